# SPDX-License-Identifier: Apache-2.0
"""Matrix times vector in bfloat16 at the speed of memory.

Torch has such a kernel, but its public ops take oneDNN's matmul for every bfloat16 matrix, and that reaches half of the memory's
bandwidth for one row (2 threads, EPYC with AVX512, 36 GB/s: 14 to 20 GB/s against 31 to 40). The switch that turns oneDNN off is
global to the process, so it would change the speed and the rounding of whatever other threads do. Hence the kernel is called
by its symbol in torch's library. The mangled name spells out the argument types: where a build of torch has another kernel,
the name is missing, and `gemv` is None.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch

_SYMBOL = (
    "_ZN2at6native12DispatchStubIPFviiN3c108BFloat16EPKS3_iS5_iS3_PS3_iE"
    "NS0_42bf16_gemv_trans_stub_DECLARE_DISPATCH_typeEE{}E"
)
# What torch itself picks from, best first, for each capability it reports. A variant may be absent, which is a null pointer.
_VARIANTS = {"AVX512": ("6AVX512", "4AVX2", "7DEFAULT"), "AVX2": ("4AVX2", "7DEFAULT")}
_ONE = 0x3F80  # 1.0 as bfloat16

# y[i] = sum over k of w[i * columns + k] * x[k], summed in float32: (columns, rows, w, x, y), addresses.
Gemv: TypeAlias = Callable[[int, int, int, int, int], None]


def find_gemv() -> Gemv | None:
    """Return torch's kernel, or None if this build does not have it under the known name and type."""
    library = next((Path(torch.__file__).parent / "lib").glob("libtorch_cpu.*"), None)
    if library is None:
        return None
    symbols = ctypes.CDLL(str(library))
    address, i32, u16 = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint16
    prototype = ctypes.CFUNCTYPE(None, i32, i32, u16, address, i32, address, i32, u16, address, i32)
    for variant in _VARIANTS.get(torch.backends.cpu.get_cpu_capability(), ("7DEFAULT",)):
        try:
            pointer = ctypes.c_void_p.in_dll(symbols, _SYMBOL.format(variant)).value
        except ValueError:
            return None
        if pointer:
            kernel = prototype(pointer)
            break
    else:
        return None

    def gemv(columns: int, rows: int, w: int, x: int, y: int) -> None:
        kernel(columns, rows, _ONE, w, columns, x, 1, 0, y, 1)

    return gemv if _is_right(gemv) else None


def _is_right(gemv: Gemv) -> bool:
    """Whether it computes what it should: integers that bfloat16 holds, sizes that are no multiple of a vector."""
    rows, columns = 5, 67
    w = (torch.arange(rows * columns) % 7 - 3).view(rows, columns).to(torch.bfloat16)
    x = (torch.arange(columns) % 3 - 1).to(torch.bfloat16)
    y = torch.full((rows,), torch.nan, dtype=torch.bfloat16)
    gemv(columns, rows, w.data_ptr(), x.data_ptr(), y.data_ptr())
    return torch.equal(y.float(), w.float() @ x.float())


gemv: Gemv | None = find_gemv()
