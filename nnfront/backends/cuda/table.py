# SPDX-License-Identifier: Apache-2.0
"""The kernels of CUDA, in the order in which they are asked."""

from __future__ import annotations

from nnfront.backends.cpu import attention as torch_attention
from nnfront.backends.cpu import host, rope
from nnfront.backends.cuda import attention, linear, rowwise

ON_DEVICE = (*linear.KERNELS, *attention.KERNELS, *rowwise.KERNELS)
"""Kernels that launch those of `nnfront_kernels`."""

KERNELS = (*ON_DEVICE, *torch_attention.KERNELS, *rope.KERNELS, *host.KERNELS)
