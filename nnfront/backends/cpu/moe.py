# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts on a CPU: products with the matrices of the experts that were chosen, each with its tokens at once.

Nothing is done for an expert that no token chose: neither are its weights read nor, where they are quantised, decoded. The same loop serves other devices,
with products of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.nn import functional as F

from nnfront.backends.cpu import linear
from nnfront.backends.cpu.activations import ACTIVATIONS, GATES
from nnfront.backends.cpu.extension import TILES
from nnfront.backends.cpu.in_c import kernel
from nnfront.backends.cpu.quantized_linear import product, product_held, with_factors
from nnfront.backends.cpu.quantized_pieces import (
    BY_OPS,
    DECODINGS,
    Decoding,
    Multiply,
    dequantized_by_ops,
    in_pieces,
)
from nnfront.backends.cpu.tape_builder import Operand, TapeBuilder, Value, demand, demand_bfloat16
from nnfront.backends.kernel import ACCEPTED, Context, Kernel, always
from nnfront.ir import OPS
from nnfront.lower import Run
from nnfront.memory.allocations import Workspace
from nnfront.memory.layout import Layout, contiguous
from nnfront.quant_format import QuantFormat

# Tokens up to which C multiplies them with each expert's matrices; of more there is enough to do for torch's products.
MOST_TOKENS = 16

Stack: TypeAlias = tuple["torch.Tensor | None", ...]
"""The matrices of all experts, their scales and zero points, if they are quantised, and their biases, if they have some."""
Products: TypeAlias = Callable[[Run, str], Multiply]
"""Gives the product with the matrix of an instruction, by its name: (x, weight, scales, zeros, bias) -> product."""
Gated: TypeAlias = Callable[[Run, Multiply], Multiply]
"""Makes of the product with gate and up what is multiplied with `down`."""


def sorted_by_expert(products: Products, gated: Gated, run: Run) -> Callable[..., Any]:
    """Return the function of an instruction, either of `moe_mlp` or of its region with quantised matrices."""
    inner, outer = gated(run, products(run, "gate_up")), products(run, "down")

    def through_experts(
        x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, gate_up: Stack, down: Stack
    ) -> torch.Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        y, weight = torch.zeros_like(x, dtype=wide), weights.to(wide).reshape(-1, 1)
        assert gate_up[0] is not None
        for expert, slots in _by_expert(experts, len(gate_up[0])):
            tokens = slots // experts.shape[1]
            hidden = inner(x[tokens], *_of(expert, gate_up))
            share = outer(hidden, *_of(expert, down))
            y.index_add_(0, tokens, share.to(wide).mul_(weight[slots]))
        return y.to(x.dtype)

    def quantized_experts(x: torch.Tensor, *operands: Any) -> torch.Tensor:
        gate_up, down, (experts, weights, *biases) = operands[:3], operands[3:6], operands[6:]
        return through_experts(x, experts, weights, (*gate_up, biases[0]), (*down, biases[1]))

    def moe_mlp(
        x: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        first = (gate_up, None, None, gate_up_bias)
        return through_experts(x, experts, weights, first, (down, None, None, down_bias))

    return quantized_experts if run.op == "quantized_experts" else moe_mlp


def format_of(run: Run, matrix: str) -> QuantFormat | None:
    """Return how `gate_up` or `down` is stored, if it is quantised."""
    prefix = f"{matrix}_"
    own = {key.removeprefix(prefix): value for key, value in run.attrs.items() if key.startswith(prefix)}
    return QuantFormat.of(own) if own else None


def _by_expert(experts: torch.Tensor, count: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield each expert that was chosen, and the choices of it, numbered token * top_k + choice."""
    chosen, order = experts.reshape(-1).sort(stable=True)
    first = 0
    for expert, found in enumerate(torch.bincount(chosen.clamp_(-1, count) + 1).tolist(), -1):
        first += found
        if found and 0 <= expert < count:
            yield expert, order[first - found : first]


def _of(expert: int, stack: Stack) -> Iterator[torch.Tensor | None]:
    return (None if each is None else each[expert] for each in stack)


def gated_by_torch(run: Run, multiply: Multiply) -> Multiply:
    """activation(gate) * up after their product, whose memory is taken for it."""
    options = _options(run)
    activation, alpha, limit, offset = (options[n] for n in ("activation", "alpha", "limit", "up_offset"))
    activate = ACTIVATIONS[activation] if alpha == 1 else partial(_swish, alpha)

    def gated(x: torch.Tensor, *matrix: torch.Tensor | None) -> torch.Tensor:
        both = multiply(x, *matrix)
        if not options["gated"]:
            return activate(both)
        gate, up = (both[:, ::2], both[:, 1::2]) if options["interleaved"] else both.chunk(2, -1)
        gate = gate.contiguous()  # kernels for few rows take nothing else
        if limit is not None:
            gate, up = gate.clamp_(max=limit), up.clamp_(-limit, limit)
        return activate(gate).mul_(up.add_(offset) if offset else up)

    return gated


def _options(run: Run) -> dict[str, Any]:
    """The attributes of the op, those too that are at their defaults."""
    return {name: run.attrs.get(name, value) for name, value in OPS["moe_mlp"].attributes.items()}


def _swish(alpha: float, x: torch.Tensor) -> torch.Tensor:
    return x.mul_((x * alpha).sigmoid_())


def _gated(run: Run, multiply: Multiply) -> Multiply:
    """As in a gated product of one weight, where it is one: few rows of bfloat16 in C, else gate and up one after the other."""
    others = gated_by_torch(run, multiply)
    if not _is_product(run):
        return others
    attrs = {"activation": _options(run)["activation"], "product": linear.BFLOAT16.name}
    of_bfloat16 = linear.GATED.bind(replace(run, attrs=attrs))

    def gated(x: torch.Tensor, weight: torch.Tensor, *rest: torch.Tensor | None) -> torch.Tensor:
        return of_bfloat16(x, weight, rest[-1]) if x.dtype == torch.bfloat16 else others(x, weight, *rest)

    return gated


def _is_product(run: Run) -> bool:
    """Whether what comes before `down` is a gated product with one weight."""
    usual = {**OPS["moe_mlp"].attributes, "activation": _options(run)["activation"]}
    return _options(run) == usual and format_of(run, "gate_up") is None


def by_torch(run: Run, matrix: str) -> Multiply:
    """Torch's product, on any device; of a quantised matrix piece by piece."""
    format = format_of(run, matrix)
    return _plain(F.linear) if format is None else in_pieces(partial(dequantized_by_ops, format))


def _plain(multiply_by: Callable[..., torch.Tensor]) -> Multiply:
    def multiply(
        x: torch.Tensor, weight: torch.Tensor, scales: None, zeros: None, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return multiply_by(x, weight, bias)

    return multiply


def _products(run: Run, matrix: str) -> Multiply:
    """Few rows in the kernels for them, many by the fastest way to decode a format."""
    format, others = format_of(run, matrix), by_torch(run, matrix)
    if format is None:
        of_bfloat16 = _plain(linear.BFLOAT16.bind(replace(run, attrs={})))

        def dense(x: torch.Tensor, *stored: torch.Tensor | None) -> torch.Tensor:
            return (of_bfloat16 if x.dtype == torch.bfloat16 else others)(x, *stored)

        return dense
    decoding, own = _decoding(format), format.read_scales
    decoded = others if decoding is None else decoding.multiply(format)

    def by_pieces(x: torch.Tensor, *stored: torch.Tensor | None) -> torch.Tensor:
        usual, scales = (getattr(torch, own) if own else x.dtype, torch.float32), stored[1]
        is_usual = scales is None or scales.dtype in usual or format.has_factor
        return (decoded if is_usual else others)(x, *stored)

    return product(run, format, by_pieces)


def _decoding(format: QuantFormat) -> Decoding | None:
    return next((each for each in DECODINGS if not each.refusal(format)), None)


def _in_order(run: Run, context: Context) -> str:
    """Matrices whose outputs can be taken apart: pieces of them are dequantised."""
    formats = {name: format_of(run, name) for name in ("gate_up", "down")}
    across = [name for name, f in formats.items() if f is not None and (f.axis != 1 or f.packing == 0)]
    return f"scales or packing of {' and '.join(across)} go across outputs" if across else ACCEPTED


def _with_factors(run: Run, context: Context) -> Run:
    formats = {2: format_of(run, "gate_up"), 5: format_of(run, "down")}
    read = {place: f for place, f in formats.items() if f is not None and _decoding(f) is not None}
    return with_factors(run, context, read)


def _moe_mlp_bytes(
    run: Run,
    x: Layout,
    gate_up: Layout,
    down: Layout,
    experts: Layout,
    weights: Layout,
    *biases: Layout | None,
    held: tuple[int, int] = (0, 0),
) -> int:
    """The sum in float32, the order of the choices, and what one expert takes, to which all tokens may go; `held` by its two products."""
    rows, hidden, size, wide = x.shape[0], x.shape[-1], down.shape[-1], 4 if x.is_half else 0
    gate = 0 if not _options(run)["gated"] or (_is_product(run) and x.dtype == "bfloat16") else size
    first = x.item * rows * (hidden + gate_up.shape[1]) + max(held[0], x.item * rows * gate)
    second = x.item * rows * (size + hidden) + max(held[1], wide * x.count)
    return wide * x.count + 3 * 8 * experts.count + max(first, second)


def _quantized_experts_bytes(run: Run, x: Layout, *operands: Any) -> int:
    """The same, and pieces of matrices."""
    gate_up, down, rest, held = operands[0], operands[3], operands[6:], []
    for name, stored, columns in (
        ("gate_up", operands[:3], x.shape[-1]),
        ("down", operands[3:6], gate_up.shape[1] // (2 if _options(run)["gated"] else 1)),
    ):
        format, rows = format_of(run, name), contiguous((x.shape[0], columns), x.dtype)
        if format is None:
            held.append(0)
            continue
        of_one = (t and contiguous(t.shape[1:], t.dtype) for t in (*stored, None))
        held.append(product_held(run, _decoding(format) or BY_OPS, format, rows, *of_one))
    return _moe_mlp_bytes(
        run, x, gate_up, contiguous((*down.shape[:2], columns), x.dtype), *rest, held=(held[0], held[1])
    )


def _write(
    builder: TapeBuilder,
    run: Run,
    x: Value,
    gate_up: Value,
    down: Value,
    experts: Value,
    weights: Value,
    *biases: Value | None,
) -> Sequence[Operand]:
    """Gated experts in bfloat16 for few tokens."""
    activation, (tokens, size), (count, _, inner) = _options(run)["activation"], x.shape, down.shape
    is_known = _is_product(run) and activation in GATES and not any(biases)
    demand(is_known, "experts have biases, or are gated in a way that the kernel has not")
    demand_bfloat16(x=x, gate_up=gate_up, down=down)
    are_read = experts.dtype == torch.int32 and weights.dtype in (torch.bfloat16, torch.float32)
    demand(are_read, f"choices are {experts.dtype}, their weights {weights.dtype}")
    builder.limit_count(tokens, MOST_TOKENS, "tokens")
    y = builder.make(run.outputs[0], x.shape)
    top = experts.shape[1]
    sizes = tokens, top, count, size, inner
    kind = GATES.index(activation), weights.dtype == torch.float32, TILES, builder.threads
    builder.call("experts", *sizes, *kind, x, experts, weights, gate_up, down, y)
    return (y,)


_SORTED = "the experts that were chosen, each with its tokens at once"
_DECODED = "the experts that were chosen, each with its tokens at once; their matrices are decoded piece by piece as they are multiplied"
KERNELS = (
    kernel(
        "moe_mlp_sorted",
        "moe_mlp",
        _write,
        partial(sorted_by_expert, _products, _gated),
        _SORTED,
        always,
        held=_moe_mlp_bytes,
        reads_back=True,
    ),
    Kernel(
        "quantized_experts_sorted",
        "quantized_experts",
        partial(sorted_by_expert, _products, _gated),
        _DECODED,
        _in_order,
        _with_factors,
        workspace=Workspace(_quantized_experts_bytes),
        reads_back=True,
        in_rows=True,
    ),
)
