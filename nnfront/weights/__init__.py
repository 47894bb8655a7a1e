# SPDX-License-Identifier: Apache-2.0
"""Weights as files: read, checked against a model before data is read, and written."""

from nnfront.weights.checkpoint import Checkpoint
from nnfront.weights.safetensors import TensorInfo

__all__ = ["Checkpoint", "TensorInfo"]
