# SPDX-License-Identifier: Apache-2.0
"""What becomes of products with weights of several formats one after another, as text, and with their numbers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import nnfront as nn
from nnfront.ir import FunctionBuilder, IRModule, TensorType, Var, first_difference, parse, verify
from nnfront.ops.encoded import Encoded
from nnfront.quant_format import FORMATS, QuantFormat
from nnfront.quantized import Formula, derive_weights


class Takes:
    """A target that reads every format."""

    reads_experts = True

    def reads(self, format: QuantFormat) -> bool:
        return True

    def reads_wide_scales(self, format: QuantFormat) -> bool:
        return True


def stored(name: str, kind: str, outputs: int, inputs: int = 4) -> Formula:
    """A weight in int8 or float8 with a scale for each output."""
    format = FORMATS[kind]
    types = {name: TensorType((outputs, inputs), format.dtype)}
    types[f"{name}_scale"] = TensorType((outputs, 1), "float32")

    def make(b: FunctionBuilder, found: Sequence[Var]) -> Encoded:
        return Encoded(format, *found)

    return Formula(kind, types, make, format)


SIZES = {"q": 6, "k": 2, "v": 3}


def formulas(**kinds: str) -> dict[str, Formula]:
    return {name: stored(name, kind, SIZES[name]) for name, kind in kinds.items()}


PARAMS = "q: weight float32[6, 4], k: weight float32[2, 4], v: weight float32[3, 4]"
PLAIN = f"""module(ignored=())
def main[n](x: input float32[n, 4], {PARAMS}, bias: weight float32[11]) -> float32[n, 11] attrs(derived=("qkv",)) {{
    qkv: float32[11, 4] = concat(q, k, v)
    y: float32[n, 11] = linear(x, qkv, bias)
    return y
}}
"""
SHARED = f"""module(ignored=())
private def layer[n](x: input float32[n, 4], a: weight float32[8, 4], b: weight float32[3, 4], bias: weight float32[11]) -> float32[n, 11] {{
    ab: float32[11, 4] = concat(a, b)
    y: float32[n, 11] = inner(x, ab, bias)
    return y
}}
private def inner[n](x: input float32[n, 4], w: weight float32[11, 4], bias: weight float32[11]) -> float32[n, 11] {{
    y: float32[n, 11] = linear(x, w, bias)
    return y
}}
def main[n](x: input float32[n, 4], {PARAMS}, bias: weight float32[11]) -> float32[n, 11] attrs(derived=("qk",)) {{
    qk: float32[8, 4] = concat(q, k)
    y: float32[n, 11] = layer(x, qk, v, bias)
    return y
}}
""".replace("= layer(", "= @layer(").replace("= inner(", "= @inner(")


def read(text: str) -> IRModule:
    ir = parse(text)
    verify(ir)
    return ir


def test_each_run_of_a_kind_is_a_product_with_its_part_of_the_bias() -> None:
    made, _ = derive_weights(read(PLAIN), formulas(q="int8", k="int8", v="fp8"), Takes())
    verify(made)
    expected = read("""module(ignored=())
def main[n](x: input float32[n, 4], q: weight int8[6, 4], q_scale: weight float32[6, 1], k: weight int8[2, 4], k_scale: weight float32[2, 1], v: weight float8_e4m3fn[3, 4], v_scale: weight float32[3, 1], bias: weight float32[11]) -> float32[n, 11] attrs(derived=("qkv", "qkv.int8", "qkv.scales")) {
    qkv.int8: int8[8, 4] = concat(q, k)
    qkv.scales: float32[8, 1] = concat(q_scale, k_scale)
    dequantize: float32[8, 4] = dequantize(qkv.int8, qkv.scales, axis=1)
    getitem: float32[8] = getitem(bias, index=((0, 8, 1),))
    linear: float32[n, 8] = linear(x, dequantize, getitem)
    dequantize_1: float32[3, 4] = dequantize(v, v_scale, axis=1)
    getitem_1: float32[3] = getitem(bias, index=((8, 11, 1),))
    linear_1: float32[n, 3] = linear(x, dequantize_1, getitem_1)
    y: float32[n, 11] = concat(linear, linear_1, dim=1)
    return y
}
""")
    assert first_difference(made, expected) is None, made


@pytest.mark.parametrize(
    "kinds", [{}, {"q": "int8", "k": "int8", "v": "int8"}], ids=["no formats", "one format"]
)
@pytest.mark.parametrize("text", [PLAIN, SHARED], ids=["a method", "private functions"])
def test_what_is_alike_is_multiplied_with_as_one(text: str, kinds: dict[str, str]) -> None:
    ir = read(text)
    made, report = derive_weights(ir, formulas(**kinds), Takes())
    flat = str(nn.passes.inline(made)["main"])
    assert flat.count(" linear(") == 1
    assert ", dim=1)" not in flat
    assert all(weight.format for weight in report.weights)
    assert kinds or made == ir


WAYS = [
    {"q": "int8", "k": "int8", "v": "fp8"},
    {"q": "int8", "k": "fp8", "v": "fp8"},
    {"q": "int8", "k": "fp8", "v": "int8"},
    {"q": "int8", "v": "int8"},
    {"k": "fp8"},
    {"v": "int8"},
]


@pytest.mark.parametrize("kinds", WAYS, ids=lambda kinds: ", ".join(f"{k} {v}" for k, v in kinds.items()))
@pytest.mark.parametrize("text", [PLAIN, SHARED], ids=["a method", "private functions"])
def test_the_product_is_that_of_what_is_stored_and_nothing_is_dequantised_before(
    text: str, kinds: dict[str, str]
) -> None:
    made, report = derive_weights(read(text), formulas(**kinds), Takes())
    verify(made)
    assert {weight.name: weight.format for weight in report.weights} == {
        name: str(FORMATS[kind]) for name, kind in kinds.items()
    }
    torch.manual_seed(0)
    dense = {name: torch.randn(size, 4) for name, size in SIZES.items()}
    given: dict[str, torch.Tensor] = {"bias": torch.randn(11)}
    for name, weight in dense.items():
        if name in kinds:
            scale = torch.rand(len(weight), 1) + 0.5
            q = (weight * 5).round().to(getattr(torch, FORMATS[kinds[name]].dtype))
            given |= {name: q, f"{name}_scale": scale}
            dense[name] = q.float() * scale
        else:
            given[name] = weight
    lifted = nn.passes.lift_transform_params(made, shared_transform=True)
    session = nn.compile(lifted).load(given)
    x = torch.randn(5, 4)
    expected = torch.nn.functional.linear(x, torch.cat([*dense.values()]), given["bias"])
    torch.testing.assert_close(session["main"](x), expected, rtol=1e-5, atol=1e-5)
    held = [tensor for tensor in session.weights.values() if tensor.ndim == 2 and tensor.shape[1] == 4]
    assert sorted(str(tensor.dtype) for tensor in held if tensor.dtype != torch.float32) == sorted(
        str(getattr(torch, FORMATS[kind].dtype)) for kind in _neighbours(kinds)
    )


def _neighbours(kinds: dict[str, str]) -> list[str]:
    """The formats of q, k and v, those that follow one another once."""
    found = [kinds.get(name, "") for name in SIZES]
    return [kind for kind, before in zip(found, ["", *found], strict=False) if kind and kind != before]


@pytest.mark.parametrize(
    "reader",
    [
        "y: float32[n, 4] = matmul(x, w)",
        "y: float32[n, 4] = take(w, n_rows, axis=0)",
        "y: float32[11, 4] = multiply(w, w)",
    ],
    ids=["a product with the transpose", "rows", "another op"],
)
def test_weights_that_more_than_products_read_together_do_not_come_apart(reader: str) -> None:
    result = reader.partition(": ")[2].partition(" =")[0]
    inputs = "x: input float32[n, 11], n_rows: input int64[n]"
    text = f"""module(ignored=())
def main[n]({inputs}, {PARAMS}) -> {result} {{
    w: float32[11, 4] = concat(q, k, v)
    {reader}
    return y
}}
"""
    made, report = derive_weights(read(text), formulas(q="int8", k="int8", v="fp8"), Takes())
    verify(made)
    assert {weight.reason for weight in report.weights} == {
        "joined to weights in other formats, cut within groups, or read by more than products"
    }
    assert "w: float32[11, 4] = concat(q.dense, k.dense, v.dense)" in str(made)


def test_parts_of_another_dtype_than_the_whole_do_not_come_apart() -> None:
    """Their product would be rounded to it."""
    text = PLAIN.replace("v: weight float32", "v: weight bfloat16")
    _, report = derive_weights(read(text), formulas(q="int8", k="int8"), Takes())
    assert all(weight.reason for weight in report.weights)


def test_a_part_that_another_op_reads_is_dense_and_leaves_the_others_as_they_are_stored() -> None:
    text = PLAIN.replace(
        "    return y", "    sum: float32[6, 4] = multiply(q, q)\n    results: (float32[n, 11], float32[6, 4]) = (y, sum)\n    return results"
    ).replace("-> float32[n, 11]", "-> (float32[n, 11], float32[6, 4])")  # fmt: skip
    made, report = derive_weights(read(text), formulas(q="int8", k="int8", v="int8"), Takes())
    verify(made)
    assert [weight.format for weight in report.weights] == ["", "int8", "int8"]
    assert str(made).count(" linear(") == 2


def test_a_stack_of_experts_needs_one_format() -> None:
    text = """module(ignored=())
def main[n](x: input float32[n, 4], experts: input int64[n, 1], weights: input float32[n, 1], q: weight float32[8, 4], k: weight float32[8, 4], down: weight float32[2, 4, 4]) -> float32[n, 4] {
    both: float32[2, 8, 4] = stack(q, k)
    y: float32[n, 4] = moe_mlp(x, both, down, experts, weights)
    return y
}
"""
    ways = {"q": stored("q", "int8", 8), "k": stored("k", "fp8", 8)}
    made, report = derive_weights(read(text), ways, Takes())
    verify(made)
    assert all(weight.reason for weight in report.weights)
    alike, _ = derive_weights(read(text), {**ways, "k": stored("k", "int8", 8)}, Takes())
    assert "both.int8: int8[2, 8, 4] = stack(q, k)" in str(alike)
