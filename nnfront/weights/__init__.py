# SPDX-License-Identifier: Apache-2.0
"""Weights as files: read, checked against a model before data is read, and written.

Read in this order: `safetensors` (headers), `pages` (memory out of files), `checkpoint`, `check` (does it fit a model?) and its `result`,
`bind` (a checkpoint under the model's names), `report` (who uses what), `write`, `convert` (transforms into files),
`contents` and `cache` (results of transforms, kept). An artefact: `manifest`, `integrity`, `put_folder`, `artefact` (its files), `stored`
(its tensors), `save`.
"""

from nnfront.weights.bind import BoundWeights, stored_type, tensor_types
from nnfront.weights.cache import TransformCache
from nnfront.weights.check import check_weights
from nnfront.weights.checkpoint import Checkpoint
from nnfront.weights.convert import write_transformed
from nnfront.weights.manifest import TextModel, is_artefact
from nnfront.weights.report import CheckReport, check_report
from nnfront.weights.result import CheckResult, Problem
from nnfront.weights.safetensors import TensorInfo
from nnfront.weights.save import Extras, Options, save_stream, save_values
from nnfront.weights.write import write_tensors

__all__ = [
    "BoundWeights",
    "CheckReport",
    "CheckResult",
    "Checkpoint",
    "Extras",
    "Options",
    "Problem",
    "TensorInfo",
    "TextModel",
    "TransformCache",
    "check_report",
    "check_weights",
    "is_artefact",
    "save_stream",
    "save_values",
    "stored_type",
    "tensor_types",
    "write_tensors",
    "write_transformed",
]
