# SPDX-License-Identifier: Apache-2.0
"""The regions that kernels can compute as one: the tables that `outline` uses. The first pattern that fits wins, so longer ones come first.

qkv_attention      split of a fused projection, rope, append to the cache, attention
gated_product      one product with gate and up side by side, activation, multiplication
quantized_product  a product with a weight that is dequantised, in the `format` of its attributes, and what `product` has; quantized_gated_product likewise
int8_activations_product  a product of integers (`linear_int8`), and a residual or a cast if there is one; int8_activations_gated_product likewise, of the `format` of its attributes
quantized_embedding  rows of a matrix, in several tensors, that are taken and dequantised, in the `format` of its attributes
quantized_experts  a mixture of experts of which `gate_up`, `down` or both are dequantised: `gate_up_format` and the like in its attributes
product            a product, and what can be done to its finished tiles: activation, scale, residual, cast
norm_residual      a sum and its RMS norm or layer norm; the region returns both

For CUDA as well:
rope_attention     rope, append to the cache and attention from separate q, k and v
gated_activation   activation and multiplication, whatever gate and up are
norm_product       a product of rows that nothing else reads with their RMS norm; norm_gated_product, norm_quantized_product and so on likewise
experts            the feed-forward layers of a mixture of experts
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from nnfront import ops
from nnfront.dims import same
from nnfront.ir import Call, TensorType, tensor_type
from nnfront.passes.patterns import Either, Match, Part, Pattern, Tree, apply, field, optional
from nnfront.quant_format import FORMATS, QuantFormat, recognise

ACTIVATIONS = (ops.silu, ops.gelu, ops.relu)


def _activation(inner: Part) -> Tree:
    return apply(ACTIVATIONS, inner, called="activation", keeps={"approximate": "approximate"})


def _scaled(inner: Part) -> Tree:
    return apply(ops.multiply, inner, "scale", commutes=True)


def _plus_residual(inner: Part) -> Tree:
    return apply(ops.add, inner, "residual", commutes=True)


def _product(weight: Part, x: Part = "x") -> Either:
    keeps = {"out_dtype": "product_dtype"}
    return Either(
        (
            apply(ops.linear, x, weight, "bias", called="kind", keeps=keeps),
            apply(ops.matmul, x, weight, called="kind", keeps=keeps),
        )
    )


def _normalises_rows(call: Call) -> bool:
    x, _, *bias = call.args
    return call.attrs["axes"] == (tensor_type(x).ndim - 1,) and not any(bias)


_NORMALISED = apply(ops.rms_norm, "x", "norm_weight", keeps={"epsilon": "epsilon"}, where=_normalises_rows)


def _finished(product: Part) -> tuple[Tree, ...]:
    """A product with each of the last things that may be done to it, and what may be before those."""
    activated = optional(_activation, product)
    scaled = optional(_scaled, activated)
    summed = optional(_plus_residual, scaled)
    cast = apply(ops.astype, summed, keeps={"dtype": "dtype"})
    return cast, _plus_residual(scaled), _scaled(activated), _activation(product)


def _dequantized(matrix: str = "") -> Either:
    """A dequantised weight, in several tensors or in one; of a region with several the names begin with that of the matrix."""
    prefix = f"{matrix}_" if matrix else ""
    unpacking = {"axis": f"{prefix}packing", "signed": f"{prefix}signed"}
    unpacked = optional(lambda inner: apply(ops.unpack_int4, inner, keeps=unpacking), matrix or "weight")
    keeps = {name: f"{prefix}{name}" for name in ("group_size", "axis", "format")}
    in_parts = apply(ops.dequantize, unpacked, f"{prefix}scales", f"{prefix}zero_points", keeps=keeps)
    blocks = {"format": f"{prefix}format"}
    return Either((in_parts, apply(ops.dequantize_blocks, matrix or "weight", keeps=blocks)))


def _with_format(found: Match) -> Mapping[str, Any]:
    """The attributes of a region with a dequantised weight: its format in the place of what the calls say one by one."""
    attrs = dict(found.attrs)
    format = _format(attrs, found, "weight", "")
    return {**attrs, **format.attrs}


def _format(attrs: dict[str, Any], found: Match, weight: str, prefix: str) -> QuantFormat:
    """The format of a dequantised weight, from what calls say about it, which is taken out of `attrs`; of a stack that of each matrix."""
    type = found.operands[weight].type
    assert isinstance(type, TensorType)
    if f"{prefix}axis" not in attrs:
        return FORMATS[attrs.pop(f"{prefix}format")]
    said = {
        name: attrs.pop(f"{prefix}{name}", None) for name in ("signed", "packing", "group_size", "format")
    }
    signed, packing, stacked = said.pop("signed"), said.pop("packing"), type.ndim - 2
    return recognise(
        type.dtype if signed is None else "int8" if signed else "uint8",
        packing=None if packing is None else packing - stacked,
        symmetric=f"{prefix}zero_points" not in found.operands,
        axis=attrs.pop(f"{prefix}axis") - stacked,
        **said,
    )


def _is_of_rows(call: Call) -> bool:
    return call.attrs["axis"] == 0 and tensor_type(call.args[0]).ndim == 2


def _embeddings() -> tuple[Tree, ...]:
    """Rows of a quantised matrix in several tensors, with zero points or without."""
    weight, scales, zeros = (
        apply(ops.take, name, "tokens", where=_is_of_rows) for name in ("weight", "scales", "zero_points")
    )
    unpacking = {"axis": "packing", "signed": "signed"}
    elements = optional(lambda inner: apply(ops.unpack_int4, inner, keeps=unpacking), weight)
    keeps = {name: name for name in ("group_size", "axis", "format", "dtype")}
    return (
        apply(ops.dequantize, elements, scales, zeros, keeps=keeps),
        apply(ops.dequantize, elements, scales, keeps=keeps, where=lambda call: call.args[2] is None),
    )


def _is_within_rows(found: Mapping[str, Any]) -> bool:
    """Whether groups, and halves of bytes, are neighbours of one row."""
    last = tensor_type(found["tokens"]).ndim
    return all(found.get(name, last) == last for name in ("axis", "packing"))


def _of_matrix(found: Match) -> Mapping[str, Any]:
    """The attributes of a region that dequantises rows: the format is that of the matrix that they are taken from."""
    more = tensor_type(found.operands["tokens"]).ndim - 1
    attrs = {name: x - more if name in ("axis", "packing") else x for name, x in found.attrs.items()}
    return _with_format(replace(found, attrs=attrs))


def _products(product: Either) -> tuple[Tree, ...]:
    """A product with what may be done to it, or alone."""
    alone = tuple(option for option in product.options if isinstance(option, Tree))
    return (*_finished(product), *alone)


def _is_halves(call: Call) -> bool:
    (x,) = (arg.type for arg in call.args if arg is not None)
    return (
        isinstance(x, TensorType)
        and call.attrs["indices_or_sections"] == 2
        and call.attrs.get("axis", 0) == x.ndim - 1
    )


def _gated_products(product: Part) -> tuple[Tree, ...]:
    halves = apply(ops.split, product, where=_is_halves)
    gate, up = field(halves, 0), field(halves, 1)
    return (
        apply(ops.multiply, _activation(gate), up, commutes=True),
        apply(ops.swiglu, gate, up, says={"activation": "silu"}),
    )


def _has_keys_and_values(call: Call) -> bool:
    """Whether attention is to what it is given and what came before, and nothing says besides which keys are seen."""
    if call.args[3] is not None and not call.attrs.get("is_causal", True):
        return False
    return call.attrs.get("value_size") is None and all(arg is None for arg in call.args[5:])


_ATTENTION = {"scale": "scale", "window": "window", "softcap": "softcap", "is_causal": "is_causal"}


def _rope(x: Part) -> Tree:
    return apply(ops.rope, x, "cos", "sin", keeps={"interleaved": "interleaved"})


def _is_heads(call: Call) -> bool:
    """Whether a reshape takes the last axis apart: [batch, seq, heads * size] to [batch, seq, heads, size]."""
    (x,) = call.args
    shape = call.attrs["shape"]
    return (
        x is not None
        and isinstance(x.type, TensorType)
        and len(shape) == 4
        and x.type.ndim == 3
        and all(map(same, shape[:2], x.type.shape[:2]))
    )


def _is_thirds(call: Call) -> bool:
    sections = call.attrs["indices_or_sections"]
    (x,) = (arg.type for arg in call.args if arg is not None)
    return (
        isinstance(x, TensorType)
        and isinstance(sections, tuple)
        and len(sections) == 2
        and call.attrs.get("axis", 0) == x.ndim - 1
    )


def _qkv_attention() -> Tree:
    parts = apply(ops.split, "qkv", where=_is_thirds)
    q, k, v = (apply(ops.reshape, field(parts, i), where=_is_heads) for i in range(3))
    return apply(
        ops.attention, _rope(q), _rope(k), v, "cache", "sinks", keeps=_ATTENTION, where=_has_keys_and_values
    )


def _is_row(call: Call) -> bool:
    shape = call.attrs["normalized_shape"]
    return len(shape) == 1 and isinstance(shape[0], int)


def _norms_of_sums() -> tuple[Tree, ...]:
    total = apply(ops.add, "x", "residual", also_result=True)
    layer = {"normalized_shape": "normalized_shape", "eps": "eps"}
    return (
        apply(ops.rms_norm, total, "weight", "bias", keeps={"axes": "axes", "epsilon": "epsilon"}),
        apply(ops.layer_norm, total, "weight", "bias", keeps=layer, where=_is_row),
    )


def _is_pair(found: Mapping[str, Any]) -> bool:
    """Whether gate and up are two tensors of one type."""
    gate, up = (getattr(found.get(name), "type", None) for name in ("gate", "up"))
    return (
        isinstance(gate, TensorType)
        and isinstance(up, TensorType)
        and gate.dtype == up.dtype
        and gate.ndim == up.ndim
        and all(map(same, gate.shape, up.shape))
    )


def _gated_activations() -> tuple[Tree, ...]:
    return (
        apply(ops.multiply, _activation("gate"), "up", commutes=True),
        apply(ops.swiglu, "gate", "up", says={"activation": "silu"}),
        apply(ops.geglu, "gate", "up", says={"activation": "gelu"}, keeps={"approximate": "approximate"}),
    )


_EXPERTS = ("activation", "gated", "interleaved", "alpha", "limit", "up_offset")


def _experts(gate_up: Part, down: Part) -> Tree:
    biases = ("gate_up_bias", "down_bias")
    keeps = {name: name for name in _EXPERTS}
    return apply(ops.moe_mlp, "x", gate_up, down, "experts", "weights", *biases, keeps=keeps)


def _quantized_experts() -> tuple[Tree, ...]:
    first, second = map(_dequantized, ("gate_up", "down"))
    return _experts(first, second), _experts(first, "down"), _experts("gate_up", second)


def _of_matrices(found: Match) -> Mapping[str, Any]:
    """The format of each dequantised matrix under names that begin with the matrix's; what the op does by default is not said."""
    attrs = dict(found.attrs)
    for matrix in ("gate_up", "down"):
        if f"{matrix}_axis" in attrs or f"{matrix}_format" in attrs:
            format = _format(attrs, found, matrix, f"{matrix}_")
            attrs |= {f"{matrix}_{name}": value for name, value in format.attrs.items()}
    usual = {**ops.moe_mlp.attributes, "activation": None}
    return {name: value for name, value in attrs.items() if name not in usual or value != usual[name]}


def _rope_attention() -> Tree:
    return apply(
        ops.attention,
        _rope("q"),
        _rope("k"),
        "v",
        "cache",
        "sinks",
        keeps=_ATTENTION,
        where=_has_keys_and_values,
    )


_INT8 = apply(
    ops.linear_int8,
    *("x", "weight", "scales", "zero_points", "bias"),
    keeps={"format": "format", "group_size": "group_size"},
)
_PRODUCTS_OF_INTEGERS = (
    Pattern("int8_activations_gated_product", _gated_products(_INT8)),
    Pattern(
        "int8_activations_product",
        (apply(ops.astype, _INT8, keeps={"dtype": "dtype"}), _plus_residual(_INT8), _INT8),
    ),
)

_QKV = Pattern("qkv_attention", (_qkv_attention(),))
_GATED = (
    Pattern("quantized_gated_product", _gated_products(_product(_dequantized())), attrs=_with_format),
    Pattern("gated_product", _gated_products(_product("weight"))),
)
_ROWS = (
    Pattern("quantized_product", _products(_product(_dequantized())), attrs=_with_format),
    Pattern("product", _finished(_product("weight"))),
    Pattern("norm_residual", _norms_of_sums()),
)

OF_NORM = "norm_"  # begins the names of regions that normalise their rows first
_QUANTIZED_OF_NORM, _OF_NORM = _product(_dequantized(), _NORMALISED), _product("weight", _NORMALISED)
_PRODUCTS_OF_NORMS = (
    Pattern(f"{OF_NORM}quantized_gated_product", _gated_products(_QUANTIZED_OF_NORM), attrs=_with_format),
    Pattern(f"{OF_NORM}gated_product", _gated_products(_OF_NORM)),
    Pattern(f"{OF_NORM}quantized_product", _products(_QUANTIZED_OF_NORM), attrs=_with_format),
    Pattern(f"{OF_NORM}product", _products(_OF_NORM)),
)

_EMBEDDING = Pattern("quantized_embedding", _embeddings(), _is_within_rows, _of_matrix)
_QUANTIZED_EXPERTS = Pattern("quantized_experts", _quantized_experts(), attrs=_of_matrices)

PATTERNS: tuple[Pattern, ...] = (
    _QKV,
    *_GATED,
    *_PRODUCTS_OF_INTEGERS,
    _EMBEDDING,
    _QUANTIZED_EXPERTS,
    *_ROWS,
)
CUDA_PATTERNS: tuple[Pattern, ...] = (
    _QKV,
    Pattern("rope_attention", (_rope_attention(),)),
    *_PRODUCTS_OF_NORMS,
    *_GATED,
    Pattern("gated_activation", _gated_activations(), _is_pair),
    _QUANTIZED_EXPERTS,
    Pattern("experts", (_experts("gate_up", "down"),), attrs=_of_matrices),
    *_ROWS,
)
