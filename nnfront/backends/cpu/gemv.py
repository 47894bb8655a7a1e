# SPDX-License-Identifier: Apache-2.0
"""Products of a few rows with a bfloat16 weight, at the speed of memory.

Torch's public ops take oneDNN's matmul for bfloat16, which reaches a third to a half of the memory's bandwidth for one row (2 threads, EPYC with
AVX512_BF16). `c/products.c` reaches nine tenths of it; of several rows it stays there where the processor has tiles (AMX_BF16: 16 rows take as long
as one), and else comes as far as the arithmetic allows. Where that was not built, torch's own kernel for one row is next: it widens before it
multiplies, and reaches three quarters or a little more. Torch has it behind a switch that turns oneDNN off for the whole process, so it would change the speed and the rounding of whatever other threads do; hence it is called by its symbol. The mangled name spells
out the argument types: where a build of torch has another kernel, the name is missing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TypeAlias

import torch

from nnfront.backends.cpu.activations import GATES, NO_ACTIVATION
from nnfront.backends.cpu.extension import NATIVE, torch_library

_SYMBOL = (
    "_ZN2at6native12DispatchStubIPFviiN3c108BFloat16EPKS3_iS5_iS3_PS3_iE"
    "NS0_42bf16_gemv_trans_stub_DECLARE_DISPATCH_typeEE{}E"
)
# What torch itself picks from, best first, for each capability it reports. A variant may be absent, which is a null pointer.
_VARIANTS = {"AVX512": ("6AVX512", "4AVX2", "7DEFAULT"), "AVX2": ("4AVX2", "7DEFAULT")}
# Products are multiplied with tiles where the processor has them; tests turn it off.
TILES = True
_ONE = 0x3F80  # 1.0 as bfloat16


Multiply: TypeAlias = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class SmallBatchLinear:
    """A kernel for up to `most` rows.

    multiply    (x, weight, bias, added, dtype, activation) -> activation(x @ weight.T + bias) + added, operands bfloat16 and contiguous;
                x [..., columns], weight [outputs, columns], added [..., outputs]
    results     what `dtype` may be; a result in float32 is not rounded
    activates   whether `activation` may be a number of `activations.GATES`
    gated       by activation: (x, weight, bias) -> activation(gate) * up, the halves of the product; for those that the kernel computes
    """

    most: int
    multiply: Multiply
    results: tuple[torch.dtype, ...] = (torch.bfloat16,)
    gated: Mapping[str, Multiply] = field(default_factory=dict)
    activates: bool = False

    def takes(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
        """Whether `x` is of few rows, and the operands are of one dtype and lie in one piece each."""
        is_few = x.dtype == weight.dtype and 0 < x.numel() <= self.most * weight.shape[1]
        are_whole = is_few and x.is_contiguous() and weight.is_contiguous()
        return are_whole and (bias is None or (bias.dtype == weight.dtype and bias.is_contiguous()))


def find_native(module: ModuleType | None, *, with_tiles: bool = TILES) -> SmallBatchLinear | None:
    """Return the kernel in C, if there is one; with tiles where the processor has them, or without."""
    if module is None:
        return None
    product, gated_product, threads = module.multiply, module.multiply_gated, torch.get_num_threads

    def multiply(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        added: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
        activation: int = NO_ACTIVATION,
    ) -> torch.Tensor:
        outputs, columns = weight.shape
        shape = list(x.shape)  # less work than taking a torch.Size apart
        shape[-1] = outputs
        y = torch.empty(shape, dtype=dtype)
        rows, is_wide = x.numel() // columns, dtype is torch.float32
        kind = is_wide, activation, with_tiles, threads()
        product(rows, columns, outputs, *kind, weight, x, bias, added, y)
        return y

    def gated_by(activation: int) -> Multiply:
        def gated(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            outputs, columns = weight.shape[0] // 2, weight.shape[1]
            shape = list(x.shape)
            shape[-1] = outputs
            y = torch.empty(shape, dtype=torch.bfloat16)
            kind = activation, with_tiles, threads()
            gated_product(x.numel() // columns, columns, outputs, *kind, weight, x, bias, y)
            return y

        return gated

    gates = {name: gated_by(i) for i, name in enumerate(GATES)}
    return SmallBatchLinear(64, multiply, (torch.bfloat16, torch.float32), gates, True)


def find_torch(torch_cpu: ctypes.CDLL | None) -> SmallBatchLinear | None:
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
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        added: torch.Tensor | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> torch.Tensor:
        outputs, columns = weight.shape
        if x.numel() != columns or not x.dtype == weight.dtype == torch.bfloat16:
            raise ValueError(f"one row of {columns} elements in bfloat16, got {list(x.shape)} in {x.dtype}")
        y = torch.empty((*x.shape[:-1], outputs), dtype=torch.bfloat16)
        if outputs:
            kernel(columns, outputs, _ONE, weight.data_ptr(), columns, x.data_ptr(), 1, 0, y.data_ptr(), 1)
        y = y if bias is None else y.add_(bias)
        return y if added is None else y.add_(added)

    return SmallBatchLinear(1, multiply) if _is_right(multiply) else None


def _is_right(multiply: Callable[..., torch.Tensor]) -> bool:
    """Whether it computes what it should: integers that bfloat16 holds, sizes that are no multiple of a vector."""
    outputs, columns = 5, 67
    w = (torch.arange(outputs * columns) % 7 - 3).view(outputs, columns).to(torch.bfloat16)
    x = (torch.arange(columns) % 3 - 1).to(torch.bfloat16)
    return torch.equal(multiply(x, w, None).float(), w.float() @ x.float())


SMALL_BATCH: SmallBatchLinear | None = find_native(NATIVE) or find_torch(torch_library())


def adds_single_rows_otherwise(few: SmallBatchLinear | None) -> bool:
    """Whether a product of a single row has its sums in another order than one of several rows, as where tiles multiply these."""
    if few is None or few.most == 1:
        return True
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 1024, generator=generator).to(torch.bfloat16) for n in (2, 256))
    one, two = (few.multiply(rows, weight, dtype=torch.float32) for rows in (x[:1], x))
    return not torch.equal(one[0], two[0])
