# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: read, checked against a model before data is read, mapped, written and updated.

Read in this order: `safetensors` (headers), `mapped_memory` (memory out of files), `checkpoint`, `check` (does it fit a model?) and its
`check_result`, `bound_checkpoint` (a checkpoint under the model's names), `report` (who uses what), `write` and `atomic_folder`,
`content_hashes` and `transform_store` (results of transforms, kept), `session_weights` and `update` (what a session holds, changed),
`export_checkpoint` (back to the checkpoint's own tensors).
"""

from nnfront.transform.source import stored_type
from nnfront.weights.bound_checkpoint import BoundWeights, tensor_types
from nnfront.weights.check import check_weights
from nnfront.weights.check_result import CheckResult, Problem
from nnfront.weights.checkpoint import Checkpoint
from nnfront.weights.report import CheckReport, check_report
from nnfront.weights.safetensors import TensorInfo
from nnfront.weights.transform_store import TransformCache
from nnfront.weights.write import write_tensors
