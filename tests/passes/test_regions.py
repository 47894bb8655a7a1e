# SPDX-License-Identifier: Apache-2.0
"""The standard table of regions: what each pattern takes, what it leaves, and that results stay the same."""

from __future__ import annotations

import pytest
import torch
from pass_checks import expect_same_results
from region_cases import CASES, GROUPS, HEADS, QKV, SIZE, TABLE, B, D, F, W, X, Y, exported, heads, regions

import nnfront as nn
from nnfront import op, spec
from nnfront.ir import first_difference, parse, verify
from nnfront.passes import CUDA_PATTERNS, PATTERNS, canonicalize, eliminate_dead_code, inline, outline


@pytest.mark.parametrize("name", CASES)
def test_a_region_is_outlined_whole_and_computes_the_same(name):
    forward, arguments, region, attrs = CASES[name]
    ir = exported(forward, **arguments)
    patterns = PATTERNS if region in {pattern.name for pattern in PATTERNS} else CUDA_PATTERNS
    after = outline(ir, patterns)
    found = regions(after)
    assert [r for r, _ in found] == [region]
    assert attrs.items() <= found[0][1].items()
    expect_same_results(ir, after)
    assert first_difference(parse(str(after)), after) is None
    back = eliminate_dead_code(canonicalize(inline(after)))
    verify(back)
    assert first_difference(outline(back, patterns), after) is None


def test_every_pattern_of_the_tables_has_a_case():
    names = {pattern.name for pattern in (*PATTERNS, *CUDA_PATTERNS)}
    assert names == {case[2] for case in CASES.values()} | {"gated_activation"}


SQUARE = spec.Tensor([D, D], "float32")
LEFT = {
    "a layer norm over two axes": (
        lambda x, y: op.layer_norm(x + y, (2, F)),
        {n: spec.Tensor(["n", 2, F], "float32") for n in "xy"},
    ),
    "a product alone": (lambda x, w: op.linear(x, w), {"x": X, "w": W}),
    "a product read twice": (lambda x, w: (h := op.linear(x, w)) * op.silu(h), {"x": X, "w": W}),
    "halves along the rows": (
        lambda x, w: op.multiply(
            *[op.silu(p) if i == 0 else p for i, p in enumerate(op.split(op.linear(x, w), 2, 0))]
        ),
        {"x": spec.Tensor([4, D], "float32"), "w": W},
    ),
    "a third part that is read": (
        lambda x, w: (lambda a, b, c: op.silu(a) * b + c)(*op.split(op.linear(x, w), 3, -1)),
        {"x": X, "w": W},
    ),
    "gate and up of different inputs": (
        lambda x, y, w: op.silu(op.exp(op.linear(x, w))) * op.exp(op.linear(y, w)),
        {"x": X, "y": X, "w": W},
    ),
    "a norm of a product of sums": (
        lambda x, y, w: op.rms_norm((x + y) * x, w, -1),
        {"x": Y, "y": Y, "w": B},
    ),
    "keys that turn otherwise": (
        lambda q, k, v, cos, sin: op.attention(
            op.rope(q, cos, sin), op.rope(k, cos, sin, interleaved=True), v
        ),
        {n: spec.Tensor(["b", "s", HEADS, SIZE], "float32") for n in "qkv"} | {"cos": TABLE, "sin": TABLE},
    ),
    "a row with a scale for each column": (
        lambda q, s, i: op.dequantize(op.take(q, i, 0), op.take(s, i, 0), axis=0),
        {"q": spec.Tensor([F, D], "int8"), "s": W, "i": spec.Tensor([1], "int32")},
    ),
    "rows with the scales of others": (
        lambda q, s, i, j: op.dequantize(op.take(q, i, 0), op.take(s, j, 0)),
        {
            "q": spec.Tensor([F, D], "int8"),
            "s": spec.Tensor([F, 1], "float32"),
            **{n: spec.Tensor(["n"], "int32") for n in "ij"},
        },
    ),
    "keys that turn by other tables": (
        lambda q, k, v, cos, sin: op.attention(op.rope(q, cos, sin), op.rope(k, sin, cos), v),
        {n: spec.Tensor(["b", "s", HEADS, SIZE], "float32") for n in "qkv"} | {"cos": TABLE, "sin": TABLE},
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_no_kernel_computes_as_one_stays(name):
    forward, arguments = LEFT[name]
    ir = exported(forward, **arguments)
    assert outline(ir) is ir


GATED = {
    "silu": (lambda x, y: op.silu(x) * y, {"activation": "silu"}),
    "gelu, the other way around": (lambda x, y: y * op.gelu(x), {"activation": "gelu"}),
    "tanh": (lambda x, y: op.gelu(x, "tanh") * y, {"activation": "gelu", "approximate": "tanh"}),
    "swiglu": (lambda x, y: op.swiglu(x, y), {"activation": "silu"}),
    "geglu": (lambda x, y: op.geglu(x, y, "tanh"), {"activation": "gelu", "approximate": "tanh"}),
}


@pytest.mark.parametrize("name", GATED)
def test_a_gated_activation_is_a_region_on_cuda_alone(name):
    forward, attrs = GATED[name]
    ir = exported(forward, x=Y, y=Y)
    assert outline(ir) is ir
    outlined = outline(ir, CUDA_PATTERNS)
    assert regions(outlined) == [("gated_activation", attrs)]
    expect_same_results(ir, outlined)


@pytest.mark.parametrize(
    "forward",
    [
        lambda x, y: op.silu(x) * 2.0,
        lambda x, y: op.silu(x) * op.sum(y, 0),
        lambda x, y: op.silu(x) * op.astype(y, "float64"),
    ],
    ids=["a number", "broadcast", "another dtype"],
)
def test_an_activation_times_anything_but_a_tensor_like_it_stays(forward):
    assert regions(outline(exported(forward, x=Y, y=Y), CUDA_PATTERNS)) == []


def test_two_products_are_apart_and_on_cuda_joined_by_a_region():
    ir = exported(lambda x, v, w: op.silu(op.linear(x, v)) * op.linear(x, w), x=X, v=W, w=W)
    assert [name for name, _ in regions(outline(ir))] == ["product"]
    assert [name for name, _ in regions(outline(ir, CUDA_PATTERNS))] == ["gated_activation"]


TWICE = {
    "a product added to its own rows": (
        lambda x, w: x + op.linear(x, w),
        {"x": X, "w": SQUARE},
        ["x", "weight", "residual"],
    ),
    "a norm with one value as weight and bias": (
        lambda x, y, w: op.rms_norm(x + y, w, -1, bias=w),
        {"x": Y, "y": Y, "w": B},
        ["x", "residual", "weight", "bias"],
    ),
    "an activation times what it is of": (lambda x: op.silu(x) * x, {"x": Y}, ["gate", "up"]),
}


@pytest.mark.parametrize("name", TWICE)
def test_a_value_that_is_two_operands_is_passed_under_both_names(name):
    forward, arguments, names = TWICE[name]
    ir = exported(forward, **arguments)
    outlined = outline(ir, CUDA_PATTERNS)
    (fused,) = [f for f in outlined.functions if f.kind == "fused"]
    assert [p.name for p in fused.params] == names
    expect_same_results(ir, outlined)
    assert first_difference(inline(outlined), ir) is None


def test_an_activated_product_times_a_tensor_is_gated_on_cuda_and_times_a_number_is_still_a_product():
    gated = exported(lambda x, w, y: op.silu(op.linear(x, w)) * y, x=X, w=W, y=Y)
    assert regions(outline(gated, CUDA_PATTERNS)) == [("gated_activation", {"activation": "silu"})]
    scaled = exported(lambda x, w: op.silu(op.linear(x, w)) * 2.0, x=X, w=W)
    assert [name for name, _ in regions(outline(scaled, CUDA_PATTERNS))] == ["product"]


def test_a_value_that_is_read_before_the_region_ends_is_not_one_of_its_results():
    text = """
        def main(x: input float32[4, 4], y: input float32[4, 4], w: input float32[4]) -> (float32[4, 4], float32[4, 4]) {
            s: float32[4, 4] = add(x, y)
            e: float32[4, 4] = exp(s)
            v: float32[4] = exp(w)
            n: float32[4, 4] = rms_norm(s, v, axes=(1,))
            r: (float32[4, 4], float32[4, 4]) = (n, e)
            return r
        }
    """
    ir = parse(text)
    assert outline(ir) is ir


def test_a_written_cache_comes_back_from_the_region():
    model = nn.Module()
    cache = spec.Cache(1, GROUPS, SIZE, "float32", "b", "m")

    class Model(nn.Module):
        def forward(self, qkv: nn.Tensor, cos: nn.Tensor, sin: nn.Tensor, cache) -> nn.Tensor:
            q, k, v = op.split(qkv, [HEADS * SIZE, (HEADS + GROUPS) * SIZE], -1)
            return op.attention(
                op.rope(heads(q, HEADS), cos, sin),
                op.rope(heads(k, GROUPS), cos, sin),
                heads(v, GROUPS),
                cache=cache[0],
            )

    model = Model()
    ir = model.export({"forward": {"qkv": QKV, "cos": TABLE, "sin": TABLE, "cache": cache}})
    after = outline(ir)
    verify(after)
    (fused,) = [f for f in after.functions if f.kind == "fused"]
    assert [(p.name, p.role) for p in fused.params if p.role == "state"] == [("cache", "state")]
    outlined, plain = nn.compile(after).load({}), nn.compile(inline(after)).load({})
    torch.manual_seed(0)
    caches = [s.make_cache(b=2, m=9) for s in (outlined, plain)]
    for seq in (4, 1, 3):
        x = torch.randn(2, seq, (HEADS + 2 * GROUPS) * SIZE)
        angles = torch.randn(1, seq, SIZE // 2)
        one, two = (
            s["forward"](x, angles.cos(), angles.sin(), c)
            for s, c in zip((outlined, plain), caches, strict=True)
        )
        torch.testing.assert_close(one, two)


def test_modules_of_a_region_are_told_relative_to_it():
    class Inner(nn.Module):
        def __init__(self) -> None:
            self.proj = nn.Linear(D, F, bias=False)

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return op.silu(self.proj(x))

    class Outer(nn.Module):
        def __init__(self) -> None:
            self.block = Inner()

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return self.block(x)

    after = outline(Outer().export({"forward": {"x": X}}))
    call = after["forward"].bindings[0]
    assert call.provenance is not None
    assert call.provenance.module == "block"
    (fused,) = [f for f in after.functions if f.kind == "fused"]
    assert [b.provenance.module for b in fused.bindings if b.provenance] == ["proj", ""]
    explained = nn.compile(Outer().export({"forward": {"x": X}})).explain()
    assert "block.proj" in explained


def test_equal_regions_of_different_modules_share_a_function_that_names_none():
    class Two(nn.Module):
        def __init__(self) -> None:
            self.one, self.two = nn.Linear(D, D, bias=False), nn.Linear(D, D, bias=False)

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return op.silu(self.two(op.silu(self.one(x))))

    after = outline(Two().export({"forward": {"x": X}}))
    (fused,) = [f for f in after.functions if f.kind == "fused"]
    assert [b.provenance for b in fused.bindings] == [None, None]


def test_dims_that_operands_name_in_products_only_are_handed_to_the_region():
    """[b * s, D] says neither b nor s."""
    ir = exported(
        lambda x, w: op.silu(op.linear(op.reshape(x, (x.shape[0] * x.shape[1], D)), w)),
        x=spec.Tensor(["b", "s", D], "float32"),
        w=W,
    )
    after = outline(ir)
    (fused,) = [f for f in after.functions if f.kind == "fused"]
    assert [p.name for p in fused.params] == ["x", "weight", "b", "s"]
    expect_same_results(ir, after)
