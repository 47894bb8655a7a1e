# SPDX-License-Identifier: Apache-2.0
"""Primitive functions under every pass: what a pass does to a body elsewhere, it does not do to the body of a kernel.

One body has work for every pass. It stands in a function that the pass may change, where it must change it, and in a fused or an
external function, where it must not.
"""

from __future__ import annotations

import pytest
from pass_checks import module

from nnfront.errors import PassError, VerifyError
from nnfront.ir import Call, FunctionCall, IRModule, first_difference, infer, verify, walk_exprs
from nnfront.passes import PASSES, eliminate_dead_code, outline

# Something for each pass: a reshape to the same, a dead and a repeated value, a permutation twice, constants, a product with
# its activation, one with a quantised weight, one of which a part is read, a call of a private function, weights that can be permuted beforehand, dims
# that can be bound.
BODY = """
    again: float32[n, 4] = reshape(x, shape=(n, 4))
    dead: float32[n, 4] = exp(x)
    twice: float32[n, 4] = exp(x)
    t: float32[4, 4] = permute_dims(w, axes=(1, 0))
    u: float32[4, 4] = permute_dims(t, axes=(1, 0))
    v: float32[4, 4] = permute_dims(w, axes=(1, 0))
    half: float32[] = multiply(const(float32[], [4.0]), 0.5)
    h: float32[n, 4] = linear(again, u, None)
    g: float32[n, 4] = silu(h)
    p: float32[n, 4] = matmul(g, v)
    c: float32[n, 4] = @inner(p)
    y: float32[n, 4] = multiply(c, half)
    x16: float16[n, 4] = astype(x, dtype="float16")
    s: float16[n, 3] = @gated_product(x16, m)
    total: float16[] = sum(s)
    r: float32[n, 4] = add(y, total)
    d: float32[1, 4] = dequantize(const(int8[1, 4], [1, 2, 3, 4]), const(float32[1, 1], [0.5]), axis=1)
    e: float32[n, 1] = linear(r, d)
    f: float32[n, 4] = add(r, e)
    k: float32[n, 4] = matmul(f, v)
    o: float32[ceildiv(n, 2), 4] = getitem(k, index=((0, n, 2),))
    l: float32[4] = sum(o, axis=(0,))
    z: float32[n, 4] = add(f, l)
    return z
"""
# A region whose weight a pass may pack, and a private function.
CALLED = """
private def inner[n](x: input float32[n, 4]) -> float32[n, 4] { y: float32[n, 4] = tanh(x) return y }
fused def gated_product[n](x: input float16[n, 4], weight: input float16[6, 4]) -> float16[n, 3]
        attrs(activation="silu", kind="linear", region="gated_product", operands=("x", "weight", "bias")) {
    linear: float16[n, 6] = linear(x, weight)
    split: (float16[n, 3], float16[n, 3]) = split(linear, indices_or_sections=2, axis=1)
    gate: float16[n, 3] = split[0]
    up: float16[n, 3] = split[1]
    silu: float16[n, 3] = silu(gate)
    multiply: float16[n, 3] = multiply(silu, up)
    return multiply
}
"""
# Passes that begin at public functions.
OF_PUBLIC = {
    "bind_dims",
    "bind_params",
    "lift_transform_params",
    "pack_weights",
    "shard_weights",
    "special_cases",
}
# Passes for what the body has not: a cache, and tokens that are looked up; and one that refuses weights of primitive functions.
OF_OTHERS = {"add_adapters", "external_attention", "input_moments", "split_embedding"}
OPTIONS = {
    "apply_dtype_policy": {"dtype": "bfloat16"},
    "bind_dims": {"dims": {"n": 3}},
    "bind_params": {"params": {"w": [[0.0] * 4] * 4}},
    "quantize_weights": {"scheme": "int8"},
    "shard_weights": {"shards": {"w": (0, 8, None)}, "world": 2},
    "special_cases": {"function": "elsewhere", "cases": [{"n": 3}]},
}


def modules(name: str, kind: str) -> IRModule:
    """A module with the body in `kernel`, of the kind, and in `elsewhere`, which the pass may change; `main` calls the former."""
    is_public = name in OF_PUBLIC
    params = "x: input float32[n, 4], w: weight float32[4, 4], m: weight float16[6, 4]"
    ir = module(
        f"""
        {CALLED}
        {kind} def kernel[n]({params}) -> float32[n, 4] {{{BODY}}}
        {"" if is_public else "private "}def elsewhere[n]({params}) -> float32[n, 4] {{{BODY}}}
        def main[n]({params.replace("m: weight", "m: input")}, e: weight float32[4, 4]) -> float32[n, 4] {{
            a: float32[n, 4] = @kernel(x, w, m)
            {"" if is_public else "b: float32[n, 4] = @elsewhere(a, e, m)"}
            return {"a" if is_public else "b"}
        }}
        """
    )
    return ir.with_functions(f.with_(is_outlined=f.name == "gated_product") for f in ir.functions)


def texts(ir: IRModule, name: str) -> str | None:
    return str(IRModule([ir[name]])) if name in ir else None


@pytest.mark.parametrize("kind", ["fused", "external"])
@pytest.mark.parametrize("name", sorted(PASSES.keys() - OF_OTHERS))
def test_a_pass_changes_a_body_and_leaves_it_alone_in_a_primitive_function(name, kind):
    ir = modules(name, kind)
    declared = PASSES[name]
    after = declared(ir, **OPTIONS.get(name, {}))
    assert texts(after, "elsewhere") != texts(ir, "elsewhere"), "the body has nothing for this pass"
    if name == "inline" and kind == "fused":  # it asks for them: what they call is inlined, and they are
        assert "kernel" not in after
    else:
        assert after["kernel"] is ir["kernel"]


def test_only_passes_that_ask_see_primitive_functions():
    assert {name for name, declared in PASSES.items() if declared.sees_primitive} <= {
        "eliminate_dead_code",
        "inline",
        "pack_weights",
    }


# Who must see them does.


@pytest.mark.parametrize("kind", ["fused", "external"])
def test_printing_shows_what_primitive_functions_compute(kind):
    text = str(modules("outline", kind))
    assert text.count("again: float32[n, 4] = reshape(x, shape=(n, 4))") == 2


@pytest.mark.parametrize("kind", ["fused", "external"])
def test_verification_looks_into_primitive_functions(kind):
    ir = modules("outline", kind)
    kernel = ir["kernel"]
    broken = kernel.with_(bindings=kernel.bindings[1:])
    with pytest.raises(VerifyError, match="'again'"):
        verify(ir.with_functions(broken if f is kernel else f for f in ir.functions))


@pytest.mark.parametrize("kind", ["fused", "external"])
def test_inference_types_calls_of_primitive_functions_and_what_is_in_them(kind):
    ir = modules("outline", kind)
    (call,) = [e for e in walk_exprs(ir["main"]) if isinstance(e, FunctionCall) and e.function == "kernel"]
    assert infer(call, ir) == ir["main"].bindings[0].var.type
    for binding in ir["kernel"].bindings:
        assert infer(binding.value, ir) == binding.var.type


@pytest.mark.parametrize("kind", ["fused", "external"])
def test_structural_equality_compares_primitive_functions(kind):
    ir, other = modules("outline", kind), modules("outline", kind)
    assert first_difference(ir, other) is None
    text = str(ir).replace("permute_dims(w, axes=(1, 0))", "permute_dims(w, axes=(0, 1))", 2)
    assert str(first_difference(ir, module(text))).startswith("kernel.")


def test_dead_functions_are_found_through_the_calls_of_primitive_functions():
    ir = modules("outline", "fused")
    alone = ir.with_functions(f for f in ir.functions if f.name != "elsewhere").with_functions(
        f.with_(bindings=f.bindings[:1], result=f.bindings[0].var) if f.name == "main" else f
        for f in ir.functions
        if f.name != "elsewhere"
    )
    assert list(eliminate_dead_code(alone)) == ["inner", "gated_product", "kernel", "main"]
    uncalled = alone.with_functions(
        f.with_(bindings=(), result=f.params[0]) if f.name == "main" else f for f in alone.functions
    )
    assert list(eliminate_dead_code(uncalled)) == ["main"]


def test_what_outline_makes_is_left_alone_by_every_other_pass():
    ir = outline(modules("outline", "external"))
    made = [f for f in ir.functions if f.kind == "fused"]
    assert any(isinstance(e, Call) and e.op.name == "linear" for f in made for e in walk_exprs(f))
    for name in sorted(PASSES.keys() - OF_OTHERS - {"inline", "special_cases", "pack_weights"}):
        after = PASSES[name](ir, **OPTIONS.get(name, {}))
        assert all(after[f.name] is f for f in made), name


@pytest.mark.parametrize("kind", ["fused", "external"])
def test_adapters_of_a_primitive_functions_weight_are_refused(kind):
    with pytest.raises(PassError) as error:
        PASSES["add_adapters"](modules("bind_dims", kind), ranks={"w": 2}, count=3)
    assert str(error.value) == (
        "main: 'w' cannot have an adapter for each sequence: FunctionCall reads it, and no product with [out, in]\n"
        "  help: merge the adapter into the weight"
    )
