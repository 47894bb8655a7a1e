# SPDX-License-Identifier: Apache-2.0
"""The package of Triton kernels, which a program without them never imports, and the architecture that it is asked about."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from nnfront.backends.registry import parts_of


def kernel_module(name: str) -> Any:
    """Return a module of `nnfront_kernels`. Triton is imported only where something needs a kernel."""
    return importlib.import_module(f"nnfront_kernels.{name}")


def arch_of(target: str) -> str:
    """The architecture that a target names (`cuda:sm_90`), or that of its GPU; without one that of Triton's interpreter."""
    _, arch, number = parts_of(target)
    if arch is not None:
        return arch
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(*(() if number is None else (number,)))
        return f"sm_{major}{minor}"
    return "sm_80"
