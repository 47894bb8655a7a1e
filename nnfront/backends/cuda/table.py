# SPDX-License-Identifier: Apache-2.0
"""The kernels of CUDA by name."""

from __future__ import annotations

from nnfront.backends.cpu.kernels import KERNELS as OF_TORCH
from nnfront.backends.cuda import attention, linear, rowwise
from nnfront.backends.select import Maker

ON_DEVICE: dict[str, Maker] = {**linear.KERNELS, **attention.KERNELS, **rowwise.KERNELS}
"""Kernels that launch those of `nnfront_kernels`."""

KERNELS: dict[str, Maker] = {**OF_TORCH, **ON_DEVICE}
