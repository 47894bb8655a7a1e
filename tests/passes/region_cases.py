# SPDX-License-Identifier: Apache-2.0
"""Functions that the standard table of regions takes whole, and what it calls them."""

from __future__ import annotations

import nnfront as nn
from nnfront import op, spec

N, D, F = "n", 8, 12
X = spec.Tensor([N, D], "float32")
W = spec.Tensor([F, D], "float32")
B = spec.Tensor([F], "float32")
G = spec.Tensor([D], "float32")
Y = spec.Tensor([N, F], "float32")
HEADS, GROUPS, SIZE = 4, 2, 6
QKV = spec.Tensor(["b", "s", (HEADS + 2 * GROUPS) * SIZE], "float32")
TABLE = spec.Tensor([1, "s", SIZE // 2], "float32")


def exported(forward, **arguments):
    """The IR of a function of these arguments."""
    scope: dict = {"forward_of": forward}
    names = ", ".join(arguments)
    exec(f"def forward(self, {names}):\n    return forward_of({names})", scope)
    model = type("Model", (nn.Module,), {"forward": scope["forward"]})()
    return model.export({"forward": arguments})


def regions(ir) -> list[tuple[str, dict]]:
    """The fused functions: their region and the other attributes."""
    found = []
    for f in ir.functions:
        if f.kind == "fused":
            attrs = dict(f.attrs)
            operands = attrs.pop("operands")
            assert [p.name for p in f.params if p.name in operands] == [
                n for n in operands if n in {p.name for p in f.params}
            ]
            found.append((attrs.pop("region"), attrs))
    return found


def heads(x, count):
    b, s, _ = x.shape
    return op.reshape(x, (b, s, count, SIZE))


def qkv_attention(qkv, cos, sin):
    q, k, v = op.split(qkv, [HEADS * SIZE, (HEADS + GROUPS) * SIZE], -1)
    return op.attention(
        op.rope(heads(q, HEADS), cos, sin), op.rope(heads(k, GROUPS), cos, sin), heads(v, GROUPS), window=3
    )


def gated_of(both, act=op.silu):
    gate, up = op.split(both, 2, -1)
    return up * act(gate)


def gated(x, w):
    return gated_of(op.linear(x, w))


LINEAR = {"kind": "linear"}
CASES = {
    "activation": (
        lambda x, w, b: op.gelu(op.linear(x, w, b), "tanh"),
        {"x": X, "w": W, "b": B},
        "product",
        {**LINEAR, "activation": "gelu", "approximate": "tanh"},
    ),
    "residual": (lambda x, w, y: y + op.linear(x, w), {"x": X, "w": W, "y": Y}, "product", LINEAR),
    "scale": (lambda x, w: op.linear(x, w) * 0.5, {"x": X, "w": W}, "product", {**LINEAR, "scale": 0.5}),
    "cast": (
        lambda x, w: op.astype(op.linear(x, w), "float64"),
        {"x": X, "w": W},
        "product",
        {**LINEAR, "dtype": "float64"},
    ),
    "everything": (
        lambda x, w, b, y: op.astype(op.relu(op.linear(x, w, b)) * 2.0 + y, "float64"),
        {"x": X, "w": W, "b": B, "y": Y},
        "product",
        {**LINEAR, "activation": "relu", "scale": 2.0, "dtype": "float64"},
    ),
    "matmul": (
        lambda x, w: op.silu(op.matmul(x, w)),
        {"x": Y, "w": W},
        "product",
        {"kind": "matmul", "activation": "silu"},
    ),
    "gate and up in one": (gated, {"x": X, "w": W}, "gated_product", {**LINEAR, "activation": "silu"}),
    "swiglu": (
        lambda x, w: op.swiglu(*op.split(op.linear(x, w), 2, -1)),
        {"x": X, "w": W},
        "gated_product",
        {**LINEAR, "activation": "silu"},
    ),
    "norm of a sum": (
        lambda x, y, w: op.rms_norm(x + y, w, -1, 1e-3),
        {"x": Y, "y": Y, "w": B},
        "norm_residual",
        {"axes": (1,), "epsilon": 1e-3},
    ),
    "norm of a sum that is read again": (
        lambda x, y, w: (s := x + y) * op.rms_norm(s, w, -1),
        {"x": Y, "y": Y, "w": B},
        "norm_residual",
        {"axes": (1,), "epsilon": 1e-5},
    ),
    "layer norm of a sum that is read again": (
        lambda x, y, w, b: (s := x + y) * op.layer_norm(s, F, w, b),
        {"x": Y, "y": Y, "w": B, "b": spec.Tensor([F], "float32")},
        "norm_residual",
        {"normalized_shape": (F,), "eps": 1e-5},
    ),
    "attention": (qkv_attention, {"qkv": QKV, "cos": TABLE, "sin": TABLE}, "qkv_attention", {"window": 3}),
    "rope and attention": (
        lambda q, k, v, cos, sin: op.attention(op.rope(q, cos, sin), op.rope(k, cos, sin), v, scale=0.1),
        {n: spec.Tensor(["b", "s", HEADS, SIZE], "float32") for n in "qkv"} | {"cos": TABLE, "sin": TABLE},
        "rope_attention",
        {"scale": 0.1},
    ),
    "int4 weight": (
        lambda x, q, s: op.linear(x, op.dequantize(op.unpack_int4(q), s, group_size=4)),
        {"x": X, "q": spec.Tensor([F, D // 2], "uint8"), "s": spec.Tensor([F, D // 4], "float32")},
        "quantized_product",
        {**LINEAR, "format": "int4", "group_size": 4},
    ),
    "gate and up in one, in 8 bits": (
        lambda x, q, s: gated_of(op.linear(x, op.dequantize(q, s))),
        {"x": X, "q": spec.Tensor([F, D], "int8"), "s": spec.Tensor([F, 1], "float32")},
        "quantized_gated_product",
        {**LINEAR, "format": "int8", "activation": "silu"},
    ),
    "integers alone": (
        lambda x, q, s: op.linear_int8(x, q, s),
        {"x": X, "q": spec.Tensor([F, D], "int8"), "s": spec.Tensor([F, 1], "float32")},
        "int8_activations_product",
        {"format": "int8"},
    ),
    "integers, and a cast": (
        lambda x, q, s: op.astype(op.linear_int8(x, q, s), "float16"),
        {"x": X, "q": spec.Tensor([F, D], "int8"), "s": spec.Tensor([F, 1], "float32")},
        "int8_activations_product",
        {"format": "int8", "dtype": "float16"},
    ),
    "int8 weight with an end": (
        lambda x, q, s: op.silu(op.linear(x, op.dequantize(q, s))),
        {"x": X, "q": spec.Tensor([F, D], "int8"), "s": spec.Tensor([F, 1], "float32")},
        "quantized_product",
        {**LINEAR, "format": "int8", "activation": "silu"},
    ),
    "gate and up of integers": (
        lambda x, q, s: gated_of(op.linear_int8(x, q, s, format="int4", group_size=4)),
        {"x": X, "q": spec.Tensor([F, D // 2], "uint8"), "s": spec.Tensor([F, D // 4], "float32")},
        "int8_activations_gated_product",
        {"format": "int4", "group_size": 4, "activation": "silu"},
    ),
    "gate and up of integers in blocks": (
        lambda x, q, b: gated_of(op.linear_int8(x, q, bias=b, format="q4_k")),
        {
            "x": spec.Tensor([N, 384], "float32"),
            "q": spec.Tensor([F, 144 + 80], "uint8"),
            "b": B,
        },
        "int8_activations_gated_product",
        {"format": "q4_k", "activation": "silu"},
    ),
    "integers in blocks and a residual": (
        lambda x, q, y: y + op.linear_int8(x, q, format="q6_k"),
        {"x": spec.Tensor([N, 256], "float32"), "q": spec.Tensor([F, 210], "uint8"), "y": Y},
        "int8_activations_product",
        {"format": "q6_k"},
    ),
    "rows of a matrix in 8 bits": (
        lambda q, s, i: op.dequantize(op.take(q, i, 0), op.take(s, i, 0)),
        {
            "q": spec.Tensor([F, D], "int8"),
            "s": spec.Tensor([F, 1], "float32"),
            "i": spec.Tensor(["b", "n"], "int32"),
        },
        "quantized_embedding",
        {"format": "int8"},
    ),
    "rows of a matrix in 4 bits with zero points": (
        lambda q, s, z, i: op.dequantize(
            op.unpack_int4(op.take(q, i, 0), signed=False),
            op.take(s, i, 0),
            op.take(z, i, 0),
            4,
            dtype="bfloat16",
        ),
        {
            "q": spec.Tensor([F, D // 2], "uint8"),
            "s": spec.Tensor([F, D // 4], "float32"),
            "z": spec.Tensor([F, D // 4], "uint8"),
            "i": spec.Tensor(["n"], "int64"),
        },
        "quantized_embedding",
        {"format": "uint4", "group_size": 4, "dtype": "bfloat16"},
    ),
    "integers and a residual": (
        lambda x, q, s, b, y: y + op.linear_int8(x, q, s, bias=b),
        {
            "x": X,
            "q": spec.Tensor([F, D], "int8"),
            "s": spec.Tensor([F, 1], "float32"),
            "b": B,
            "y": Y,
        },
        "int8_activations_product",
        {"format": "int8"},
    ),
    "normalised rows": (
        lambda x, g, w: op.linear(op.rms_norm(x, g, -1, 1e-3), w),
        {"x": X, "g": G, "w": W},
        "norm_product",
        {**LINEAR, "epsilon": 1e-3},
    ),
    "normalised rows, gate and up in one": (
        lambda x, g, w: gated(op.rms_norm(x, g, -1), w),
        {"x": X, "g": G, "w": W},
        "norm_gated_product",
        {**LINEAR, "activation": "silu", "epsilon": 1e-5},
    ),
    "normalised rows, int4 weight": (
        lambda x, g, q, s: op.linear(
            op.rms_norm(x, g, -1), op.dequantize(op.unpack_int4(q), s, group_size=4)
        ),
        {"x": X, "g": G, "q": spec.Tensor([F, D // 2], "uint8"), "s": spec.Tensor([F, D // 4], "float32")},
        "norm_quantized_product",
        {**LINEAR, "format": "int4", "group_size": 4, "epsilon": 1e-5},
    ),
    "normalised rows, gate and up in one, in 8 bits": (
        lambda x, g, q, s: gated_of(op.linear(op.rms_norm(x, g, -1), op.dequantize(q, s))),
        {"x": X, "g": G, "q": spec.Tensor([F, D], "int8"), "s": spec.Tensor([F, 1], "float32")},
        "norm_quantized_gated_product",
        {**LINEAR, "format": "int8", "activation": "silu", "epsilon": 1e-5},
    ),
    "experts": (
        lambda x, g, d, e, w: op.moe_mlp(x, g, d, e, w, activation="relu"),
        {
            "x": X,
            "g": spec.Tensor([3, 2 * F, D], "float32"),
            "d": spec.Tensor([3, D, F], "float32"),
            "e": spec.Tensor([N, 2], "int64"),
            "w": spec.Tensor([N, 2], "float32"),
        },
        "experts",
        {"activation": "relu"},
    ),
    "experts in 4 and in 8 bits": (
        lambda x, q, s, p, t, e, w: op.moe_mlp(
            x, op.dequantize(op.unpack_int4(q), s, group_size=4), op.dequantize(p, t), e, w, limit=7.0
        ),
        {
            "x": X,
            "q": spec.Tensor([3, 2 * F, D // 2], "uint8"),
            "s": spec.Tensor([3, 2 * F, D // 4], "float32"),
            "p": spec.Tensor([3, D, F], "int8"),
            "t": spec.Tensor([3, D, 1], "float32"),
            "e": spec.Tensor([N, 2], "int64"),
            "w": spec.Tensor([N, 2], "float32"),
        },
        "quantized_experts",
        {
            "activation": "silu",
            "limit": 7.0,
            "gate_up_format": "int4",
            "gate_up_group_size": 4,
            "down_format": "int8",
        },
    ),
    "experts one of whose matrices is quantised, with zero points": (
        lambda x, g, p, t, z, e, w: op.moe_mlp(x, g, op.dequantize(p, t, z, group_size=2), e, w),
        {
            "x": X,
            "g": spec.Tensor([3, 2 * F, D], "float32"),
            "p": spec.Tensor([3, D, F], "uint8"),
            "t": spec.Tensor([3, D, F // 2], "float32"),
            "z": spec.Tensor([3, D, F // 2], "uint8"),
            "e": spec.Tensor([N, 2], "int64"),
            "w": spec.Tensor([N, 2], "float32"),
        },
        "quantized_experts",
        {"activation": "silu", "down_format": "uint8", "down_group_size": 2},
    ),
}
