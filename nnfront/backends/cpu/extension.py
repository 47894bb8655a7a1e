# SPDX-License-Identifier: Apache-2.0
"""The kernels in C (`c/`), on the threads of torch, where they were built and the processor can run them.

They are called by the table `c/kernels.def`: numbers, then tensors, None for one that is absent, or a tensor and how many bytes into it. C looks up
where tensors lie, and refuses a call whose operands are smaller than its numbers say (ValueError).
"""

from __future__ import annotations

import ctypes
import importlib
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import torch

try:
    native: ModuleType | None = importlib.import_module("nnfront.backends.cpu.native")
except ImportError:  # it is built where there is a C compiler
    native = None

TABLE = Path(__file__).parent / "c" / "kernels.def"
_OPENMP = ("GOMP_parallel", "omp_get_num_threads")


def read_table(text: str) -> dict[str, str]:
    """Return what each kernel takes, without spaces: `SIZE(rows)IN(x,2*rows)`."""
    plain = re.sub(r"//.*|\s", "", text)
    return dict(re.findall(r"KERNEL\((\w+),(.*?\))\)(?=KERNEL|#|$)", plain))


def torch_library() -> ctypes.CDLL | None:
    """Return torch's library for CPUs, which is loaded already."""
    path = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"), None)
    return None if path is None else ctypes.CDLL(str(path))


def find_native(module: ModuleType | None, torch_cpu: ctypes.CDLL | None) -> ModuleType | None:
    """Return the module, ready to run on the tensors and threads of torch, or None if its kernels cannot.

    Warns if it was built from other source than the Python beside it.
    """
    if module is None or not module.is_able or torch_cpu is None:
        return None
    if read_table(getattr(module, "table", "")) != read_table(TABLE.read_text()):
        warnings.warn(
            "nnfront's kernels in C are older than nnfront and do not run: install it again", stacklevel=2
        )
        return None
    try:  # looked up in torch's library, a name is found in the OpenMP that it is linked to
        entries = [ctypes.cast(torch_cpu[name], ctypes.c_void_p).value for name in _OPENMP]
        module.use_torch(torch.Tensor.__dlpack_c_exchange_api__, *entries)
    except (AttributeError, ValueError):  # a torch that has none of it, or of another version
        return None
    return module


NATIVE = find_native(native, torch_library())
KERNELS: Mapping[str, Sequence[str]] = {
    name: re.findall(r"(?:SIZE|REAL|IN|OUT)\((\w+)", arguments)
    for name, arguments in (read_table(NATIVE.table) if NATIVE else {}).items()
}
"""The kernels in the order of their numbers, each with the names of what it takes."""
