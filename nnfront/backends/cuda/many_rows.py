# SPDX-License-Identifier: Apache-2.0
"""Products whose weight is dense, or made dense for the call: by how many rows there are, and by what comes after them.

    up to 64 rows       the kernel that splits K
    more                cuBLAS where nothing or a bias comes after, or a residual of x's dtype, which it adds to before it rounds
    another end, gated  tiles that the copy engine moves, on GPUs that have one and where each row begins at 16 bytes; else tiles of pointers

Rows that are to be normalised first are so inside of a product for few rows, and by a launch of their own before others.

Quantised weights are unpacked by each tile that reads them: for so many rows that tiles wait for that, once for the call is less work, though
it writes the weight and reads it back. From how many rows on is arithmetic, not measured (`rows_to_unpack`).
"""

from __future__ import annotations

from typing import Any

import torch

from nnfront.backends.cuda.kernel_package import kernel_module
from nnfront.backends.cuda.row_norm import RowNorm, is_inside

# Rows up to which the kernel that splits K is taken; it takes no more.
SMALL_BATCH = 64
# Of what tensor cores could do, what tiles get done that unpack between products, and what cuBLAS does. By arithmetic from machine code.
UNPACKING, DENSE = 0.45, 0.65
# Bytes that an element moves to be unpacked once, beyond those that tiles read as well: 2 are written, and 2 read back.
MOVED = 4.0


def on_gpu(x: torch.Tensor) -> bool:
    """Whether this runs on a GPU, or is planned for one; in the interpreter kernels are to run, not what stands in for them."""
    return x.is_cuda or x.is_meta


def takes_cublas(*, is_gpu: bool, rows: int, has_end: bool) -> bool:
    """Whether a dense product goes to cuBLAS: for many rows, where nothing comes after that it does not do itself.

    No measurement says yet where the Triton kernel is the faster one; where it saves a pass over the result it is taken all the same.
    """
    return is_gpu and rows > SMALL_BATCH and not has_end


def product(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    gated: bool = False,
    constant: bool = False,
    norm: RowNorm | None = None,
    **options: Any,
) -> torch.Tensor:
    """x [rows, K], weight [N, K] of one dtype, residual [rows, N]; `constant`: no launch writes the weight. Options as for the kernels' `launch`."""
    takes_few = len(x) <= SMALL_BATCH and x.dtype != torch.float32
    if norm is not None and not (takes_few and is_inside(norm, x)):
        x, norm = norm.of(x), None
    adds = residual is not None and bias is None and residual.dtype == x.dtype
    has_end = gated or bool(options) or not (residual is None or adds)
    if takes_cublas(is_gpu=on_gpu(x), rows=len(x), has_end=has_end):
        if residual is None:
            return torch.nn.functional.linear(x, weight, bias)
        return torch.addmm(residual, x, weight.t())
    more = {**added(x, residual, options), **({"gated": True} if gated else {})}
    if takes_few:
        more |= {} if norm is None else norm.options
        few = kernel_module("matmul_small_m")
        return few.launch(x, weight, bias=bias, constant_weights=constant, **more)  # type: ignore[no-any-return]
    return _kernel(x, weight, residual, gated, options).launch(x, weight, bias=bias, **more)  # type: ignore[no-any-return]


def added(x: torch.Tensor, residual: torch.Tensor | None, options: dict[str, Any]) -> dict[str, Any]:
    """A kernel's options with a residual: the sum is of the wider dtype of the two, as elsewhere."""
    if residual is None:
        return options
    dtype = torch.promote_types(options.get("out_dtype", x.dtype), residual.dtype)
    return {**options, "residual": residual, "out_dtype": dtype}


def _kernel(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None,
    gated: bool,
    options: dict[str, Any],
) -> Any:
    """The kernel for a dense product of many rows."""
    tma, common = kernel_module("matmul_tma"), kernel_module("common")
    columns, out = len(weight) // (2 if gated else 1), added(x, residual, options).get("out_dtype", x.dtype)
    begins = [columns * out.itemsize % 16]
    begins += [_rows_begin(part) for part in (x, weight, residual) if part is not None]
    dtype = common.dtype_name(x)
    if (
        on_gpu(x)
        and dtype in tma.DTYPES
        and common.arch_of(x.device) in tma.KERNEL.configs
        and not any(begins)
    ):
        return tma
    return kernel_module("matmul")


def _rows_begin(matrix: torch.Tensor) -> int:
    """0 if each row begins at a multiple of 16 bytes, as the copy engine wants it."""
    return (matrix.data_ptr() | (matrix.stride(0) * matrix.element_size() if len(matrix) > 1 else 0)) % 16


def rows_to_unpack(arch: str) -> float:
    """From how many rows on unpacking a weight once takes less time than what each tile of an arch loses by it.

    Per element tiles lose two operations a row at the difference of two rates, and unpacking moves bytes:
    rows * 2 / flops * (1 / UNPACKING - 1 / DENSE) = MOVED / bandwidth. On an H200 that is 602 rows.
    """
    limits = kernel_module("common").ARCHS[arch]
    lost: float = 2 / limits.flops * (1 / UNPACKING - 1 / DENSE)
    moved: float = MOVED / limits.bandwidth
    return moved / lost


def unpacks(x: torch.Tensor) -> bool:
    """Whether a quantised weight is unpacked once for all rows of x."""
    if not on_gpu(x) or x.dtype == torch.float32 or x.shape[1] % 16:
        return False
    return len(x) >= rows_to_unpack(kernel_module("common").arch_of(x.device))


def takes_scaled(
    x: torch.Tensor, codes: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> bool:
    """Whether a product in float8 goes to torch's kernel with scales by row: of many rows, to bfloat16, in multiples of 16, where tensor
    cores multiply float8.
    """
    arch = kernel_module("common").arch_of(x.device) if on_gpu(x) else ""
    aligned = not (codes.shape[1] % 16 or len(weight) % 16)
    ends = bias is None or bias.dtype == torch.bfloat16
    many = len(codes) > SMALL_BATCH and arch in kernel_module("matmul_tma").KERNEL.configs
    return many and x.dtype == torch.bfloat16 and aligned and ends


def scaled(
    codes: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The product of float8 codes [rows, K] and [N, K] with a scale for each of their rows, in bfloat16."""
    return torch._scaled_mm(
        codes,
        weight.t(),
        scale_a=x_scales,
        scale_b=scales.t().contiguous(),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
