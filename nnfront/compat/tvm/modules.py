# SPDX-License-Identifier: Apache-2.0
"""TVM's layers, which are nnfront's."""

from nnfront.compat.tvm.absent import IOEffect, KVCache
from nnfront.nn.conv import Conv1D, Conv2D, Conv3D, ConvTranspose1D
from nnfront.nn.layers import GELU, Embedding, GroupNorm, Identity, LayerNorm, Linear, ReLU, RMSNorm, SiLU

__all__ = [
    "GELU",
    "Conv1D",
    "Conv2D",
    "Conv3D",
    "ConvTranspose1D",
    "Embedding",
    "GroupNorm",
    "IOEffect",
    "Identity",
    "KVCache",
    "LayerNorm",
    "Linear",
    "RMSNorm",
    "ReLU",
    "SiLU",
]
