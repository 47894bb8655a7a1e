# SPDX-License-Identifier: Apache-2.0
"""The package of Triton kernels, which a program without them never imports, and the architecture that it is asked about."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from nnfront.backends.kernel import ACCEPTED, Context
from nnfront.backends.registry import parts_of
from nnfront.errors import LoadError


def kernel_module(name: str) -> Any:
    """Return a module of `nnfront_kernels`. Triton is imported only where something needs a kernel. Raises LoadError without it."""
    try:
        return importlib.import_module(f"nnfront_kernels.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise LoadError(
            "the package 'triton' is not installed, in which kernels for a GPU are written",
            help="pip install triton, or a build of torch for CUDA, which brings it; or compile for 'cpu'",
        ) from None


def arch_of(target: str) -> str:
    """The architecture that a target names (`cuda:sm_90`), or that of its GPU; without one that of Triton's interpreter."""
    _, arch, number = parts_of(target)
    if arch is not None:
        return arch
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(*(() if number is None else (number,)))
        return f"sm_{major}{minor}"
    return "sm_80"


def asked(module: str, shape: Any, dtype: str, context: Context) -> str:
    """What a kernel's own `accepts` says of a shape on the target: why it refuses, "" if it does not."""
    reason: str | None = kernel_module(module).KERNEL.accepts(shape, dtype, arch_of(context.target))
    return reason or ACCEPTED
