# SPDX-License-Identifier: Apache-2.0
"""Lifting through calls of private functions: shared layers, clones, nesting, effects."""

from __future__ import annotations

import pytest
from lift_checks import check_lift
from pass_checks import expect_same_results, module

from nnfront.ir import first_difference
from nnfront.passes import lift_transform_params

LAYER = """
private def layer(x: input float32[4, 4], w: weight float32[4, 4]) -> float32[4, 4] {
    t: float32[4, 4] = permute_dims(w, axes=(1, 0))
    y: float32[4, 4] = matmul(x, t)
    return y
}
"""


def test_a_layer_that_occurs_often_stays_one_function():
    check_lift(
        LAYER
        + """
        def main(x: input float32[4, 4], a: weight float32[4, 4], b: weight float32[4, 4]) -> float32[4, 4] {
            y: float32[4, 4] = @layer(x, a)  # at layers.0
            z: float32[4, 4] = @layer(y, b)  # at layers.1
            return z
        }
        """,
        """
        private def layer(x: input float32[4, 4], t: transformed float32[4, 4]) -> float32[4, 4] {
            y: float32[4, 4] = matmul(x, t)
            return y
        }
        transform def main_transform_params(a: weight float32[4, 4], b: weight float32[4, 4])
                -> {layers.0.t: float32[4, 4], layers.1.t: float32[4, 4]} {
            layers.0.t: float32[4, 4] = permute_dims(a, axes=(1, 0))
            layers.1.t: float32[4, 4] = permute_dims(b, axes=(1, 0))
            results: {layers.0.t: float32[4, 4], layers.1.t: float32[4, 4]} = {layers.0.t: layers.0.t, layers.1.t: layers.1.t}
            return results
        }
        def main(x: input float32[4, 4], layers.0.t: transformed float32[4, 4], layers.1.t: transformed float32[4, 4])
                -> float32[4, 4] attrs(transform="main_transform_params") {
            y: float32[4, 4] = @layer(x, layers.0.t)
            z: float32[4, 4] = @layer(y, layers.1.t)
            return z
        }
        """,
    )


def test_where_call_sites_disagree_the_function_is_cloned():
    # b is needed as it is as well, so its transpose stays; that of a moves.
    lifted = check_lift(
        LAYER
        + """
        def main(x: input float32[4, 4], a: weight float32[4, 4], b: weight float32[4, 4]) -> float32[4, 4] {
            y: float32[4, 4] = @layer(x, a)
            z: float32[4, 4] = @layer(y, b)
            r: float32[4, 4] = add(z, b)
            return r
        }
        """
    )
    assert list(lifted) == ["layer", "layer_1", "main_transform_params", "main"]
    assert [p.name for p in lifted["main"].weights] == ["b", "t"]
    assert [len(lifted[name].bindings) for name in ("layer", "layer_1")] == [1, 2]


def test_a_function_that_others_call_too_keeps_its_name_and_body():
    ir = module(
        LAYER
        + """
        def lifted(x: input float32[4, 4], a: weight float32[4, 4]) -> float32[4, 4] {
            y: float32[4, 4] = @layer(x, a)
            return y
        }
        def left(x: input float32[4, 4], a: weight float32[4, 4]) -> float32[4, 4] {
            y: float32[4, 4] = @layer(x, a)
            return y
        }
        """
    )
    lifted = lift_transform_params(ir, shared_transform=["lifted"])
    assert list(lifted) == ["layer", "layer_1", "transform_params", "lifted", "left"]
    assert lifted["layer"] is ir["layer"]
    expect_same_results(ir, lifted)


def test_lifting_goes_through_nested_calls():
    lifted = check_lift(
        LAYER
        + """
        private def block(x: input float32[4, 4], a: weight float32[4, 4], b: weight float32[4, 4]) -> float32[4, 4] {
            y: float32[4, 4] = @layer(x, a)  # at first
            z: float32[4, 4] = @layer(y, b)  # at second
            return z
        }
        def main(x: input float32[4, 4], a: weight float32[4, 4], b: weight float32[4, 4]) -> float32[4, 4] {
            y: float32[4, 4] = @block(x, a, b)  # at 0
            z: float32[4, 4] = @block(y, b, a)  # at 1
            return z
        }
        """
    )
    assert list(lifted) == ["layer", "block", "main_transform_params", "main"]
    # Each transpose is one value, whichever block it is computed for.
    assert [p.name for p in lifted["main"].weights] == ["0.first.t", "0.second.t"]


def test_a_call_with_weights_only_moves_as_a_whole():
    lifted = check_lift(
        """
        private def double(w: input float32[4]) -> float32[4] {
            y: float32[4] = add(w, w)
            return y
        }
        def main(x: input float32[4], w: weight float32[4]) -> float32[4] {
            d: float32[4] = @double(w)
            y: float32[4] = add(x, d)
            return y
        }
        """
    )
    assert list(lifted) == ["main_transform_params", "main"]
    assert len(lifted["main"].bindings) == 1


def test_a_call_with_weights_only_that_would_grow_stays_a_call():
    text = """
    private def widen(w: input int8[4]) -> float32[4] {
        y: float32[4] = astype(w, dtype="float32")
        return y
    }
    def main(x: input float32[4], w: weight int8[4]) -> float32[4] {
        d: float32[4] = @widen(w)
        y: float32[4] = add(x, d)
        return y
    }
    """
    lifted = check_lift(text)
    assert lifted["widen"] == module(text)["widen"]
    assert [p.name for p in lifted["main"].weights] == ["w"]


def test_a_call_with_an_effect_stays(capsys):
    lifted = check_lift(
        """
        private def shout(w: input float32[4]) -> float32[4] {
            y: float32[4] = add(w, w)
            p: () = print_(y)
            return y
        }
        def main(x: input float32[4], w: weight float32[4]) -> float32[4] {
            d: float32[4] = @shout(w)
            y: float32[4] = add(x, d)
            return y
        }
        """
    )
    assert [type(b.value).__name__ for b in lifted["main"].bindings] == ["FunctionCall", "Call"]
    assert capsys.readouterr().out.count("tensor") == 2


def test_a_derived_tensor_handed_to_a_layer_moves_with_what_the_layer_makes_of_it():
    lifted = check_lift(
        LAYER
        + """
        def main(x: input float32[4, 4], a: weight float32[2, 4], b: weight float32[2, 4]) -> float32[4, 4] attrs(derived=("ab",)) {
            ab: float32[4, 4] = concat(a, b)
            y: float32[4, 4] = @layer(x, ab)
            return y
        }
        """
    )
    assert [p.name for p in lifted["main"].weights] == ["t"]


def test_a_value_named_after_its_op_is_named_after_its_source():
    lifted = check_lift(
        """
        private def layer(x: input float32[4, 4], proj.weight: weight float32[4, 4]) -> float32[4, 4] {
            permute_dims: float32[4, 4] = permute_dims(proj.weight, axes=(1, 0))
            matmul: float32[4, 4] = matmul(x, permute_dims)
            return matmul
        }
        def main(x: input float32[4, 4], layers.7.proj.weight: weight float32[4, 4]) -> float32[4, 4] {
            layer: float32[4, 4] = @layer(x, layers.7.proj.weight)  # at layers.7
            return layer
        }
        """
    )
    assert [p.name for p in lifted["main"].weights] == ["layers.7.proj.weight.permute_dims"]
    assert [p.name for p in lifted["layer"].params] == ["x", "proj.weight.permute_dims"]


def test_a_parameter_that_is_a_weight_at_one_call_and_an_input_at_another_moves_for_the_first():
    lifted = check_lift(
        """
        private def layer(x: input float32[4, 4], w: input float32[4, 4]) -> float32[4, 4] {
            t: float32[4, 4] = permute_dims(w, axes=(1, 0))
            y: float32[4, 4] = matmul(x, t)
            return y
        }
        def main(x: input float32[4, 4], a: weight float32[4, 4]) -> float32[4, 4] {
            y: float32[4, 4] = @layer(x, a)
            z: float32[4, 4] = @layer(x, y)
            return z
        }
        """
    )
    assert list(lifted) == ["layer", "layer_1", "main_transform_params", "main"]
    assert [len(lifted[name].bindings) for name in ("layer", "layer_1")] == [1, 2]


def test_calls_inside_branches_are_lifted_and_share_their_weights():
    lifted = check_lift(
        LAYER
        + """
        def main(x: input float32[4, 4], fast: input bool, a: weight float32[4, 4]) -> float32[4, 4] {
            y: float32[4, 4] = if fast {
                p: float32[4, 4] = @layer(x, a)
                yield p
            } else {
                q: float32[4, 4] = @layer(x, a)
                r: float32[4, 4] = add(q, q)
                yield r
            }
            return y
        }
        """
    )
    assert [p.name for p in lifted["main"].weights] == ["t"]
    assert list(lifted) == ["layer", "main_transform_params", "main"]


def test_each_transform_of_its_own_still_shares_the_private_functions():
    text = LAYER + "".join(
        f"""
        def {name}(x: input float32[4, 4], a: weight float32[4, 4]) -> float32[4, 4] {{
            y: float32[4, 4] = @layer(x, a)
            return y
        }}
        """
        for name in ("one", "two")
    )
    assert list(check_lift(text)) == ["layer", "one_transform_params", "one", "two_transform_params", "two"]


def test_a_primitive_function_is_left_as_it_is_and_its_call_too():
    text = """
    fused def kernel(x: input float32[4, 4], w: input float32[4, 4]) -> float32[4, 4] {
        t: float32[4, 4] = permute_dims(w, axes=(1, 0))
        y: float32[4, 4] = matmul(x, t)
        return y
    }
    def main(x: input float32[4, 4], a: weight float32[4, 4]) -> float32[4, 4] {
        y: float32[4, 4] = @kernel(x, a)
        return y
    }
    """
    ir = module(text)
    lifted = lift_transform_params(ir)
    assert lifted["kernel"] is ir["kernel"]
    assert [p.name for p in lifted["main"].weights] == ["a"]
    assert first_difference(lift_transform_params(lifted), lifted) is None


NUMBERS = {
    "as an operand": "r: float32[4, 4] = multiply(q, dim(k))",
    "in an expression": "r: float32[4, 4] = multiply(q, dim(2*k + 1))",
    "in an attribute": "s: float32[k, 4] = ones(shape=(k, 4)) t: float32[4] = sum(s, axis=(0,)) r: float32[4, 4] = multiply(q, t)",
    "under a name": "n: int64(k) = dim(k) r: float32[4, 4] = multiply(q, n)",
    "in a tuple": "t: (int64(k), float32[4, 4]) = (dim(k), q) n: int64(k) = t[0] m: float32[4, 4] = t[1] r: float32[4, 4] = multiply(m, n)",
    "for a function that it calls": "r: float32[4, 4] = @times(q, dim(k))",
}


@pytest.mark.parametrize("use", NUMBERS)
@pytest.mark.parametrize("size", ["d", "2*d", "5"])
def test_a_private_function_that_uses_its_dim_as_a_number_is_lifted_out_of(use, size):
    dims = "[d]" if "d" in size else ""
    lifted = check_lift(
        f"""
        private def times(q: input float32[4, 4], n: input int64) -> float32[4, 4] {{
            r: float32[4, 4] = multiply(q, n)
            return r
        }}
        private def scaled[k](p: weight float32[k, 4], q: weight float32[4, 4]) -> float32[4, 4] {{
            {NUMBERS[use]}
            return r
        }}
        def main{dims}(x: input float32[4, 4], p: weight float32[{size}, 4], q: weight float32[4, 4]) -> float32[4, 4] {{
            u: float32[4, 4] = @scaled(p, q)
            y: float32[4, 4] = matmul(x, u)
            return y
        }}
        """
    )
    assert [p.name for p in lifted["main"].weights] == ["r"]


def test_a_call_that_weights_alone_determine_does_not_need_its_other_arguments():
    # Nothing of it can move without more bytes, and what it does not read was made of a weight that is gone.
    check_lift(
        """
        private def layer(x: input float32[4, 4], p: input float32[4, 4], unread: input float32[4, 4]) -> float32[4, 4] {
            t: float32[4, 4] = permute_dims(p, axes=(1, 0))
            y: float32[4, 4] = add(x, t)
            return y
        }
        def main(x: input float32[4, 4], w: weight float32[4, 4]) -> float32[4, 4] {
            a: float32[4, 4] = @layer(x, w, x)
            v: float32[4, 4] = multiply(w, 0.5)
            b: float32[4, 4] = @layer(v, v, a)
            c: float32[4, 4] = matmul(x, b)
            y: float32[4, 4] = multiply(v, c)
            return y
        }
        """,
        """
        private def layer(x: input float32[4, 4], p: input float32[4, 4]) -> float32[4, 4] {
            t: float32[4, 4] = permute_dims(p, axes=(1, 0))
            y: float32[4, 4] = add(x, t)
            return y
        }
        transform def main_transform_params(w: weight float32[4, 4]) -> {v: float32[4, 4]} {
            v: float32[4, 4] = multiply(w, 0.5)
            results: {v: float32[4, 4]} = {v: v}
            return results
        }
        def main(x: input float32[4, 4], v: transformed float32[4, 4]) -> float32[4, 4] attrs(transform="main_transform_params") {
            b: float32[4, 4] = @layer(v, v)
            c: float32[4, 4] = matmul(x, b)
            y: float32[4, 4] = multiply(v, c)
            return y
        }
        """,
    )
