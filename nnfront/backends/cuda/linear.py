# SPDX-License-Identifier: Apache-2.0
"""The kernels of CUDA: launches of `nnfront_kernels`. `nnfront.backends.cuda.rules` says when each is used.

All of them run in Triton's interpreter as well (TRITON_INTERPRET=1), on tensors on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nnfront.backends.cuda.kernel_package import kernel_module
from nnfront.backends.cuda.rules import ACTIVATIONS
from nnfront.lower import Run

# Rows up to which the kernel that splits K is taken; it takes no more.
FEW_ROWS = 64


def takes_cublas(*, is_cuda: bool, rows: int, has_end: bool) -> bool:
    """Whether a dense product goes to cuBLAS (torch's `linear`): for many rows, where a bias is all that comes after it.

    No measurement says yet where the Triton kernel is the faster one; where it saves a pass over the result it is taken all the same.
    """
    return is_cuda and rows > FEW_ROWS and not has_end


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x as a matrix whose rows have adjacent elements."""
    return _adjacent(x.reshape(-1, x.shape[-1]))


def _adjacent(matrix: torch.Tensor) -> torch.Tensor:
    """The matrix with adjacent elements in a row: weights have them, what a caller passes in the place of one may not."""
    return matrix if matrix.stride(-1) == 1 else matrix.contiguous()


def _epilogue(run: Run) -> dict[str, Any]:
    """What the kernel does to a finished tile, from the region's attributes."""
    attrs = run.attrs
    options: dict[str, Any] = {}
    if "activation" in attrs:
        options["activation"] = ACTIVATIONS[attrs["activation"], attrs.get("approximate")]
    if "scale" in attrs:
        options["scale"] = float(attrs["scale"])
    if "dtype" in attrs:
        options["out_dtype"] = getattr(torch, attrs["dtype"])
    return options


def _like(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A result in rows with the leading axes of x."""
    return y.view(*x.shape[:-1], y.shape[-1])


def _product(run: Run) -> Callable[..., Any]:
    few, many, options = kernel_module("matmul_small_m"), kernel_module("matmul"), _epilogue(run)

    def triton_product(
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        scale: None,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        rows = _rows(x)
        if takes_cublas(
            is_cuda=x.is_cuda or x.is_meta, rows=len(rows), has_end=bool(options) or residual is not None
        ):
            return _like(x, torch.nn.functional.linear(rows, weight, bias))
        kernel = few if len(rows) <= FEW_ROWS and x.dtype != torch.float32 else many
        added = None if residual is None else _rows(residual)
        return _like(x, kernel.launch(rows, _adjacent(weight), bias=bias, residual=added, **options))

    return triton_product


def _gated(run: Run) -> Callable[..., Any]:
    few, many, options = kernel_module("matmul_small_m"), kernel_module("matmul"), _epilogue(run)

    def triton_gated(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        rows = _rows(x)
        kernel = few if len(rows) <= FEW_ROWS and x.dtype != torch.float32 else many
        return _like(x, kernel.launch(rows, _adjacent(weight), bias=bias, gated=True, **options))

    return triton_gated


def _quantized(name: str) -> Callable[[Run], Callable[..., Any]]:
    def make(run: Run) -> Callable[..., Any]:
        kernel, options = kernel_module(name), _epilogue(run)
        options["gated"] = run.op.endswith("gated_product")

        def triton_quantized(
            x: torch.Tensor,
            weight: torch.Tensor,
            scales: torch.Tensor,
            zeros: torch.Tensor | None,
            bias: torch.Tensor | None,
            scale: None = None,
            residual: torch.Tensor | None = None,
        ) -> torch.Tensor:
            added = None if residual is None else _rows(residual)
            stored = (weight, scales) if zeros is None else (weight, scales, zeros)
            return _like(x, kernel.launch(_rows(x), *stored, bias=bias, residual=added, **options))

        return triton_quantized

    return make


def _fp8(run: Run) -> Callable[..., Any]:
    kernel, rounding, options = kernel_module("matmul_fp8"), kernel_module("quantize_fp8"), _epilogue(run)
    options["gated"] = run.op == "fp8_gated_product"

    def triton_fp8(
        x: torch.Tensor,
        weight: torch.Tensor,
        scales: torch.Tensor,
        zeros: None,
        bias: torch.Tensor | None,
        scale: None = None,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        added = None if residual is None else _rows(residual)
        codes, x_scales = rounding.launch(_rows(x))
        more = {"out_dtype": x.dtype, **options}
        return _like(x, kernel.launch(codes, weight, x_scales, scales, bias=bias, residual=added, **more))

    return triton_fp8


def _experts(run: Run) -> Callable[..., Any]:
    routing, grouped, combine = (
        kernel_module("moe_routing"),
        kernel_module("grouped_matmul"),
        kernel_module("moe_combine"),
    )
    activation = run.attrs["activation"]

    def triton_experts(
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        count, size, hidden = gate_up.shape
        chosen = experts.to(torch.int32).contiguous()
        shape = grouped.GroupedShape(len(x), chosen.shape[1], count, size, hidden, gated=True)
        config = grouped.choose(
            shape, str(x.dtype).removeprefix("torch."), kernel_module("common").arch_of(x.device)
        )
        slots = routing.launch(chosen, num_experts=count, block_m=config.block_m)
        hidden_rows = grouped.launch(_rows(x), gate_up, slots, gather=True, gated=True, activation=activation)
        shares = grouped.launch(hidden_rows, down, slots, scatter=True)
        y: torch.Tensor = combine.launch(shares, weights, chosen, num_experts=count)
        return y

    return triton_experts


KERNELS: dict[str, Callable[[Run], Callable[..., Any]]] = {
    "triton_product": _product,
    "triton_gated": _gated,
    "triton_int4": _quantized("matmul_int4"),
    "triton_int8": _quantized("matmul_int8"),
    "triton_fp8": _fp8,
    "triton_experts": _experts,
}
