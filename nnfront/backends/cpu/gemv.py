# SPDX-License-Identifier: Apache-2.0
"""Products of rows with a bfloat16 weight, of a few at the speed of memory.

Torch's public ops take oneDNN's matmul for bfloat16, which reaches a third to a half of the memory's bandwidth for one row (2 threads, EPYC with AVX512_BF16). `c/products.c` reaches
nine tenths of it, with the same sums for a row however many there are. Where that was not built, torch's own kernel for one row is next, which widens before it multiplies: three quarters.
Torch has it behind a switch that turns oneDNN off for the whole process, hence it is called by its symbol. The mangled name spells out the argument types:
where a build has another kernel, it is missing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TypeAlias

import torch

from nnfront.backends.cpu.extension import NATIVE, torch_library

_SYMBOL = (
    "_ZN2at6native12DispatchStubIPFviiN3c108BFloat16EPKS3_iS5_iS3_PS3_iE"
    "NS0_42bf16_gemv_trans_stub_DECLARE_DISPATCH_typeEE{}E"
)
# What torch itself picks from, best first, for each capability it reports. A variant may be absent, which is a null pointer.
_VARIANTS = {"AVX512": ("6AVX512", "4AVX2", "7DEFAULT"), "AVX2": ("4AVX2", "7DEFAULT")}
# Whether products are multiplied with tiles, which takes memory; tests turn it off and on.
TILES = NATIVE is not None and NATIVE.has_tiles()
# Rows of quantised weights that a product in C takes where tiles multiply them.
MOST_ROWS = 64
_ONE = 0x3F80  # 1.0 as bfloat16

OneRow: TypeAlias = Callable[..., "torch.Tensor | None"]
"""(x, weight, bias) -> x @ weight.T + bias for one row in bfloat16; None for operands that it is not for."""


def find_torch(torch_cpu: ctypes.CDLL | None) -> OneRow | None:
    """Return torch's kernel for one row, or None if this build does not have it under the known name and type."""
    if torch_cpu is None:
        return None
    address, i32, u16 = ctypes.c_void_p, ctypes.c_int, ctypes.c_uint16
    prototype = ctypes.CFUNCTYPE(None, i32, i32, u16, address, i32, address, i32, u16, address, i32)
    for variant in _VARIANTS.get(torch.backends.cpu.get_cpu_capability(), ("7DEFAULT",)):
        try:
            pointer = ctypes.c_void_p.in_dll(torch_cpu, _SYMBOL.format(variant)).value
        except ValueError:
            return None
        if pointer:
            kernel = prototype(pointer)
            break
    else:
        return None

    def multiply(
        x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        outputs, columns = weight.shape
        given = [t for t in (x, weight, bias) if t is not None]
        are_read = all(t.dtype == torch.bfloat16 and t.is_contiguous() for t in given)
        if not are_read or not 0 < x.numel() == x.shape[-1] == columns:
            return None
        y = torch.empty((*x.shape[:-1], outputs), dtype=torch.bfloat16)
        if outputs:
            kernel(columns, outputs, _ONE, weight.data_ptr(), columns, x.data_ptr(), 1, 0, y.data_ptr(), 1)
        return y if bias is None else y.add_(bias)

    return multiply if _is_right(multiply) else None


def _is_right(multiply: OneRow) -> bool:
    """Whether it computes what it should: integers that bfloat16 holds, sizes that are no multiple of a vector."""
    outputs, columns = 5, 67
    w = (torch.arange(outputs * columns) % 7 - 3).view(outputs, columns).to(torch.bfloat16)
    x = (torch.arange(columns) % 3 - 1).to(torch.bfloat16)
    y = multiply(x, w)
    return y is not None and torch.equal(y.float(), w.float() @ x.float())


ONE_ROW = find_torch(torch_library()) if NATIVE is None else None
