# SPDX-License-Identifier: Apache-2.0
"""The kernels in C (`c/`), on the threads of torch, where they were built.

There is a build of them for each set of instructions; the fastest one that the processor runs is used, or the one that NNFRONT_INSTRUCTIONS names.

They are called by the table `c/kernels.def`: numbers, then tensors, None for one that is absent, or a tensor and how many bytes into it. C looks up
where tensors lie, and refuses a call whose operands are smaller than its numbers say (ValueError).
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from math import ceil
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from nnfront.errors import RunError

native: ModuleType | None = None
try:
    native, failure = importlib.import_module("nnfront.backends.cpu.native"), ""
except ModuleNotFoundError:  # it is built where there is a C compiler
    failure = "they are not there"
except ImportError as error:
    failure = f"they were built for another machine ({error})"

VARIABLE = "NNFRONT_INSTRUCTIONS"
TABLE = Path(__file__).parent / "c" / "kernels.def"
_OPENMP = ("GOMP_parallel", "omp_get_num_threads")
_PAUSE, _HARD = "omp_pause_resource_all", 2  # OpenMP 5.0


def read_table(text: str) -> dict[str, str]:
    """Return what each kernel takes, without spaces: `SIZE(rows)IN(x,2*rows)`."""
    plain = re.sub(r"//.*|\s", "", text)
    return dict(re.findall(r"KERNEL\((\w+),(.*?\))\)(?=KERNEL|#|$)", plain))


def torch_library() -> ctypes.CDLL | None:
    """Return torch's library for CPUs, which is loaded already."""
    path = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"), None)
    return None if path is None else ctypes.CDLL(str(path))


def end_threads() -> None:
    """Have OpenMP's threads of the calling one end, until it computes again.

    While there are more than the process has cores, those that compute sleep at each barrier instead of waiting for a moment: a wake-up each of a token's many calls.
    """
    torch_cpu = torch_library()
    if torch_cpu is not None and hasattr(torch_cpu, _PAUSE):
        torch_cpu[_PAUSE](_HARD)


def find_native(
    module: ModuleType | None, torch_cpu: ctypes.CDLL | None, wanted: str | None = None
) -> ModuleType | None:
    """Return the module, ready to run on the tensors and threads of torch, or None if its kernels cannot.

    It runs the set of instructions that is wanted; None is the fastest one. Warns if it was built from other source than the Python beside it.

    Raises:
        RunError: the processor, or this build, does not have the set that is wanted
    """
    if module is None or torch_cpu is None:
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
    if wanted is not None and wanted not in module.sets:
        raise RunError(
            f"this processor does not run kernels for {wanted!r}",
            details=[f"it runs {', '.join(module.sets)}"],
            help=f"set {VARIABLE} to one of them, or to nothing for the fastest",
        )
    module.use_set(module.sets[0] if wanted is None else wanted)
    return module


def instructions() -> str:
    """Return in a line which kernels in C run: those for a set of instructions, by its name, and which sets this processor runs besides."""
    if NATIVE is None:
        return f"none: {failure or 'this torch does not share its tensors and threads'}"
    others = ", ".join(name for name in NATIVE.sets if name != NATIVE.used_set())
    tiles = " and matrix tiles" if NATIVE.has_tiles() else ""
    return f"{NATIVE.used_set()}{tiles} (this processor also runs {others})"


@cache
def say_what_is_missing() -> None:
    """Warn, once, if there are no kernels in C."""
    if NATIVE is None:
        warnings.warn(
            f"nnfront runs on torch's kernels alone, and decodes slower than memory allows; its own in C: {instructions()}. "
            "Install a wheel of nnfront for this machine, or a C compiler and nnfront again",
            stacklevel=2,
        )


NATIVE = find_native(native, torch_library(), os.environ.get(VARIABLE) or None)
# Whether products are multiplied with tiles, which takes memory; tests turn it off and on.
TILES = NATIVE is not None and NATIVE.has_tiles()
KERNELS: Mapping[str, Sequence[str]] = {
    name: re.findall(r"(?:SIZE|REAL|IN|OUT)\((\w+)", arguments)
    for name, arguments in read_table(TABLE.read_text()).items()
}
"""The kernels in the order of their numbers, each with the names of what it takes."""
_WORK = {
    name: compile(found[1], name, "eval")
    for name, arguments in read_table(TABLE.read_text()).items()
    if (found := re.search(r"OUT\(work,(.*?)\)OUT", arguments))
}


def multiplies_pairs() -> bool:
    """Return whether products of bfloat16 are made of vectors of pairs, by an instruction, and not of tiles."""
    return NATIVE is not None and NATIVE.used_set() == "avx512_bf16" and not TILES


def work_bytes(kernel: str, sizes: Mapping[str, Any]) -> int:
    """Return how many bytes a kernel works in, besides its operands, by the table."""
    count: float = eval(_WORK[kernel], {"LEAST": min}, dict(sizes))
    return ceil(count)
