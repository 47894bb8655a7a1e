# SPDX-License-Identifier: Apache-2.0
"""The kernels in C (`c/`), on the threads of torch, where they were built and the processor can run them."""

from __future__ import annotations

import ctypes
import warnings
from pathlib import Path
from types import ModuleType

import torch

try:
    from nnfront.backends.cpu import native
except ImportError:  # it is built where there is a C compiler
    native = None  # type: ignore[assignment]

# The kernels in the order of `module.c`, each with how many numbers it takes.
KERNELS = {
    "append_and_attend": 18,
    "gate": 5,
    "multiply": 10,
    "multiply_gated": 9,
    "multiply_quantized": 13,
    "rms_norm": 8,
    "rotate": 9,
}
_OPENMP = ("GOMP_parallel", "omp_get_num_threads")


def torch_library() -> ctypes.CDLL | None:
    """Return torch's library for CPUs, which is loaded already."""
    path = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"), None)
    return None if path is None else ctypes.CDLL(str(path))


def find_native(module: ModuleType | None, torch_cpu: ctypes.CDLL | None) -> ModuleType | None:
    """Return the module, ready to run on the threads of torch, or None if its kernels cannot.

    Warns if it was built from other source than the Python beside it.
    """
    if module is None or not module.is_able or torch_cpu is None:
        return None
    if getattr(module, "kernels", "").split() != [f"{name}/{count}" for name, count in KERNELS.items()]:
        warnings.warn(
            "nnfront's kernels in C are older than nnfront and do not run: install it again", stacklevel=2
        )
        return None
    try:  # looked up in torch's library, a name is found in the OpenMP that it is linked to
        entries = [ctypes.cast(torch_cpu[name], ctypes.c_void_p).value for name in _OPENMP]
    except AttributeError:
        return None
    module.use_openmp(*entries)
    return module


NATIVE = find_native(native, torch_library())
