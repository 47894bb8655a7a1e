# SPDX-License-Identifier: Apache-2.0
"""The dtype policy: where casts go for each treatment, what stays as it is, and how far results move from float32."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from nnfront_models import llama
from pass_checks import expect, module
from pass_evaluator import run_method
from random_modules import modules
from rewrite_checks import main

from nnfront.errors import PassError
from nnfront.ir import OPS, Call, IRModule, TensorType, first_difference, sizes_of, walk_bindings
from nnfront.ops import silu
from nnfront.passes import apply_dtype_policy, lift_transform_params, run


def check(before: str, after: str | None, dtype: str = "bfloat16", **options) -> IRModule:
    """Apply the policy and compare the text; None: nothing may change. The second run changes nothing."""
    ir = module(before)
    result = apply_dtype_policy(ir, dtype, **options)
    if after is None:
        assert result is ir, str(result)
    else:
        expect(result, after)
        assert apply_dtype_policy(result, dtype, **options) is result
    return result


W = "x: input float32[4, 4], w: weight float32[4, 4]"
CAST_W = """
    x_bfloat16: bfloat16[4, 4] = astype(x, dtype="bfloat16")
    w_bfloat16: bfloat16[4, 4] = astype(w, dtype="bfloat16")
    h: bfloat16[4, 4] = matmul(x_bfloat16, w_bfloat16)
"""


def test_a_product_is_computed_in_the_dtype_and_the_result_comes_back_as_it_was():
    check(
        main("h: float32[4, 4] = matmul(x, w) return h", W),
        main(f'{CAST_W} h_float32: float32[4, 4] = astype(h, dtype="float32") return h_float32', W),
    )


def test_what_follows_a_product_is_in_its_dtype():
    check(
        main("h: float32[4, 4] = matmul(x, w) y: float32[4, 4] = add(h, x) return y", W),
        main(
            f"{CAST_W} y: bfloat16[4, 4] = add(h, x_bfloat16)"
            ' y_float32: float32[4, 4] = astype(y, dtype="float32") return y_float32',
            W,
        ),
    )


def test_what_comes_before_any_product_stays():
    check(main("y: float32[4, 4] = add(x, 1.0) z: float32[4, 4] = tanh(y) return z"), None)


def test_sums_are_in_float32():
    check(
        main("h: float32[4, 4] = matmul(x, w) y: float32[4] = sum(h, axis=(1,)) return y", W, "float32[4]"),
        main(
            f'{CAST_W} h_float32: float32[4, 4] = astype(h, dtype="float32")'
            " y: float32[4] = sum(h_float32, axis=(1,)) return y",
            W,
            "float32[4]",
        ),
    )


def test_the_scale_of_a_norm_stays_as_it_is_stored():
    check(
        main(
            "y: float32[4, 4] = rms_norm(x, scale, axes=(1,)) return y",
            "x: input float32[4, 4], scale: weight float32[4]",
        ),
        main(
            'x_bfloat16: bfloat16[4, 4] = astype(x, dtype="bfloat16")'
            " y: bfloat16[4, 4] = rms_norm(x_bfloat16, scale, axes=(1,))"
            ' y_float32: float32[4, 4] = astype(y, dtype="float32") return y_float32',
            "x: input float32[4, 4], scale: weight float32[4]",
        ),
    )


def test_rows_of_a_table_are_taken_before_they_are_cast():
    params = "ids: input int64[4], w: weight float32[8, 4]"
    check(
        main("x: float32[4, 4] = take(w, ids, axis=0) y: float32[4, 4] = silu(x) return y", params),
        main(
            "x: float32[4, 4] = take(w, ids, axis=0)"
            ' x_bfloat16: bfloat16[4, 4] = astype(x, dtype="bfloat16")'
            " y: bfloat16[4, 4] = silu(x_bfloat16)"
            ' y_float32: float32[4, 4] = astype(y, dtype="float32") return y_float32',
            params,
        ),
    )


def test_a_cast_that_the_author_wrote_stays():
    check(
        main(
            'h: float32[4, 4] = matmul(x, w) y: float16[4, 4] = astype(h, dtype="float16") return y',
            W,
            "float16[4, 4]",
        ),
        main(f'{CAST_W} y: float16[4, 4] = astype(h, dtype="float16") return y', W, "float16[4, 4]"),
    )


def test_an_op_that_the_table_does_not_know_gets_what_it_had():
    check(
        main("h: float32[4, 4] = matmul(x, w) p: () = print_(h) return h", W),
        main(
            f'{CAST_W} h_float32: float32[4, 4] = astype(h, dtype="float32") p: () = print_(h_float32) return h_float32',
            W,
        ),
    )


def test_integers_and_float64_stay():
    check(main("y: float64[4, 4] = matmul(x, x) return y", "x: input float64[4, 4]", "float64[4, 4]"), None)
    check(main("y: int64[4, 4] = matmul(x, x) return y", "x: input int64[4, 4]", "int64[4, 4]"), None)


def test_a_policy_of_ones_own_is_used():
    text = main("y: float32[4, 4] = silu(x) return y")
    check(text, None)
    result = apply_dtype_policy(module(text), "bfloat16", policy={silu: "compute"})
    assert str(result["main"].bindings[1].var.type.dtype) == "bfloat16"


def test_the_interface_changes_when_asked():
    check(
        main("h: float32[4, 4] = matmul(x, w) return h", W),
        main(
            'w_bfloat16: bfloat16[4, 4] = astype(w, dtype="bfloat16")'
            " h: bfloat16[4, 4] = matmul(x, w_bfloat16) return h",
            "x: input bfloat16[4, 4], w: weight float32[4, 4]",
            "bfloat16[4, 4]",
        ),
        keep_interface=False,
    )


LAYERS = """
private def layer(x: input float32[4, 4], w: weight float32[4, 4]) -> float32[4, 4] {
    h: float32[4, 4] = matmul(x, w)
    return h
}
def main(x: input float32[4, 4], w: weight float32[4, 4]) -> float32[4, 4] {
    y: float32[4, 4] = @layer(x, w)
    z: float32[4, 4] = @layer(y, w)
    return z
}
"""


def test_private_functions_get_a_version_for_each_combination_of_dtypes():
    check(
        LAYERS,
        f"""
        private def layer(x: input float32[4, 4], w: weight float32[4, 4]) -> bfloat16[4, 4] {{
            {CAST_W} return h
        }}
        private def layer_1(x: input bfloat16[4, 4], w: weight float32[4, 4]) -> bfloat16[4, 4] {{
            w_bfloat16: bfloat16[4, 4] = astype(w, dtype="bfloat16")
            h: bfloat16[4, 4] = matmul(x, w_bfloat16)
            return h
        }}
        def main(x: input float32[4, 4], w: weight float32[4, 4]) -> float32[4, 4] {{
            y: bfloat16[4, 4] = @layer(x, w)
            z: bfloat16[4, 4] = @layer_1(y, w)
            z_float32: float32[4, 4] = astype(z, dtype="float32")
            return z_float32
        }}
        """,
    )


def test_functions_that_are_not_named_keep_what_they_call():
    ir = module(LAYERS + LAYERS.partition("\ndef ")[2].replace("main(", "def other(", 1))
    result = apply_dtype_policy(ir, "bfloat16", functions=["other"])
    assert result["main"] is ir["main"]
    assert result["layer"] is ir["layer"]
    assert list(result) == ["layer", "layer_1", "layer_2", "main", "other"]


def test_primitive_functions_get_what_they_declare():
    text = """
    external def plugin(x: input float32[4, 4]) -> float32[4, 4] { return x }
    def main(x: input float32[4, 4], w: weight float32[4, 4]) -> float32[4, 4] {
        h: float32[4, 4] = matmul(x, w)
        y: float32[4, 4] = @plugin(h)
        return y
    }
    """
    result = apply_dtype_policy(module(text), "bfloat16")
    assert [b.var.type.dtype for b in result["main"].bindings] == ["bfloat16"] * 3 + ["float32"] * 2


BRANCHES = """
def main(x: input float32[4, 4], w: weight float32[4, 4], flag: input bool) -> float32[4, 4] {
    y: float32[4, 4] = if flag {
        h: float32[4, 4] = matmul(x, w)
        yield h
    } else {
        %s
    }
    return y
}
"""


@pytest.mark.parametrize(
    ("otherwise", "dtype"),
    [("h2: float32[4, 4] = matmul(w, x) yield h2", "bfloat16"), ("yield x", "float32")],
)
def test_branches_agree_about_the_dtype_of_their_result(otherwise, dtype):
    ir = module(BRANCHES % otherwise)
    result = apply_dtype_policy(ir, "bfloat16")
    (var,) = [b.var for b in result["main"].bindings if b.var.name == "y"]
    assert var.type.dtype == dtype
    assert result["main"].result_type == ir["main"].result_type
    assert apply_dtype_policy(result, "bfloat16") is result


# What holds for all modules.


def casts(ir: IRModule) -> list[tuple[str, str]]:
    """From what to what each cast of a cast casts, through what it does."""
    found = []
    for function in ir.functions:
        made = {b.var: b.value for b in walk_bindings(function.bindings)}
        for value in made.values():
            if isinstance(value, Call) and value.op is OPS["astype"]:
                inner = made.get(value.args[0])
                if isinstance(inner, Call) and inner.op is OPS["astype"]:
                    found.append((inner.args[0].type.dtype, value.attrs["dtype"]))
    return found


@settings(max_examples=40)
@given(ir=modules())
def test_any_module_keeps_its_interface_and_changes_once_and_leaves_no_cast_that_does_nothing(ir):
    result = run(apply_dtype_policy(ir, "bfloat16"), "simplify")
    for method in ir.methods:
        new = result[method.name]
        assert [(p.name, p.type, p.role) for p in new.params] == [
            (p.name, p.type, p.role) for p in method.params
        ]
        assert new.result_type == method.result_type
    assert first_difference(run(apply_dtype_policy(result, "bfloat16"), "simplify"), result) is None
    assert ("bfloat16", "bfloat16") not in casts(result)


@pytest.mark.parametrize(("dtype", "bound"), [("bfloat16", 2e-2), ("float16", 3e-3)])
def test_a_language_model_stays_near_float32(dtype, bound):
    config = dataclasses.replace(llama.TINY, num_hidden_layers=3)
    ir = llama.build(config).export({"logits": llama.export_spec(config)["logits"]})
    result = apply_dtype_policy(ir, dtype)
    weights = {
        p.name: torch.randn([int(s) for s in sizes_of(p.type)]) * (0.1 if p.type.ndim == 2 else 1)
        for p in ir["logits"].weights
    }
    inputs = {"tokens": torch.randint(0, config.vocab_size, (1, 16))}
    expected = run_method(ir, "logits", inputs, weights)
    got = run_method(result, "logits", inputs, weights)
    error = (got - expected).norm() / expected.norm()
    assert 1e-5 < error < bound


def test_casts_of_weights_move_to_load_time():
    config = llama.TINY
    ir = apply_dtype_policy(llama.build(config).export(llama.export_spec(config)), "bfloat16")
    lifted = lift_transform_params(ir, shared_transform=True)
    matrices = {
        p.name: p.type.dtype
        for p in lifted["prefill"].weights
        if isinstance(p.type, TensorType) and p.type.ndim == 2 and "embed" not in p.name
    }
    assert set(matrices.values()) == {"bfloat16"}


def test_what_makes_samples_packs_or_counts_is_left_alone():
    left_alone = (
        "all any arange bitwise_and cache_join cache_positions cache_split dequantize dim_value empty extern full logical_not"
        " multinomial_from_uniform ones pack_int4 print_ quantize sample_top_p_top_k_from_sorted_prob unpack_int4 within zeros"
    )
    assert {OPS[name].dtype_policy for name in left_alone.split()} == {"kept"}


def test_a_dtype_that_nothing_is_computed_in_is_refused():
    with pytest.raises(PassError) as caught:
        apply_dtype_policy(module(LAYERS), "int8")
    assert str(caught.value) == (
        "'int8' is no dtype to compute in\n  help: use one of float32, bfloat16, float16"
    )
