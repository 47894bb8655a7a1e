# SPDX-License-Identifier: Apache-2.0
"""Lifting with symbolic sizes: which dims the transform knows, and how the rest of a method learns of them."""

from __future__ import annotations

import pytest
from lift_checks import check_lift
from pass_checks import expect_same_results, module

from nnfront.errors import PassError
from nnfront.ir import first_difference, parse
from nnfront.passes import lift_transform_params


def test_a_value_whose_size_comes_from_an_argument_stays():
    lifted = check_lift(
        """
        def main[m, n](x: input float32[m, n], w: weight float32[1, 1]) -> float32[m, n] {
            wide: float32[m, n] = broadcast_to(w, shape=(m, n))
            y: float32[m, n] = multiply(x, wide)
            return y
        }
        """
    )
    assert [p.name for p in lifted["main"].weights] == ["w"]
    assert len(lifted["main"].bindings) == 2


def test_a_function_with_nothing_to_move_gets_a_transform_that_returns_nothing():
    lifted = check_lift(
        """
        def main[n](x: input float32[n], unused: weight float32[4]) -> float32[n] {
            z: float32[n] = zeros(shape=(n,))
            y: float32[n] = add(x, z)
            return y
        }
        """
    )
    assert lifted["main_transform_params"].result_type.names == ()
    assert [p.name for p in lifted["main_transform_params"].params] == ["unused"]


def test_a_dim_that_only_weights_define_is_passed_along():
    check_lift(
        """
        def main[m, n: 1..](x: input float32[m], w: weight float32[n]) -> float32[m, n] {
            s: float32[] = sum(w)
            y: float32[m] = add(x, s)
            z: float32[n] = zeros(shape=(n,))
            column: float32[m, 1] = unsqueeze(y, dim=1)
            r: float32[m, n] = add(column, z)
            return r
        }
        """,
        """
        transform def main_transform_params[n: 1..](w: weight float32[n]) -> {n: int64(n), s: float32[]} {
            s: float32[] = sum(w)
            results: {n: int64(n), s: float32[]} = {n: dim(n), s: s}
            return results
        }
        def main[m, n: 1..](x: input float32[m], n: transformed int64(n), s: transformed float32[]) -> float32[m, n]
                attrs(transform="main_transform_params") {
            y: float32[m] = add(x, s)
            z: float32[n] = zeros(shape=(n,))
            column: float32[m, 1] = unsqueeze(y, dim=1)
            r: float32[m, n] = add(column, z)
            return r
        }
        """,
    )


def test_dims_of_weights_are_constants_to_the_transform():
    lifted = check_lift(
        """
        def main[b, k, n](x: input float32[b, k], w: weight float32[n, k]) -> float32[b, n] {
            t: float32[k, n] = permute_dims(w, axes=(1, 0))
            flat: float32[k*n] = reshape(t, shape=(k*n,))
            back: float32[k, n] = reshape(flat, shape=(k, n))
            y: float32[b, n] = matmul(x, back)
            return y
        }
        """
    )
    assert [str(p.type.shape) for p in lifted["main"].weights] == ["(Dim('k'), Dim('n'))"]
    assert len(lifted["main"].bindings) == 1


def test_a_weight_whose_size_is_an_expression_over_dims_of_arguments_is_passed():
    # The transform cannot know m and n, but it need not: the product has a name of its own there.
    check_lift(
        """
        def main[m, n](x: input float32[m, n], w: weight float32[m*n]) -> float32[m, n] {
            r: float32[m, n] = reshape(w, shape=(m, n))
            y: float32[m, n] = add(x, r)
            return y
        }
        """,
        """
        transform def main_transform_params[fresh size](w: weight float32[size]) -> {w: float32[size]} {
            results: {w: float32[size]} = {w: w}
            return results
        }
        def main[m, n](x: input float32[m, n], w: transformed float32[m*n]) -> float32[m, n]
                attrs(transform="main_transform_params") {
            r: float32[m, n] = reshape(w, shape=(m, n))
            y: float32[m, n] = add(x, r)
            return y
        }
        """,
    )


def test_work_over_such_a_weight_moves_as_long_as_it_keeps_the_size():
    lifted = check_lift(
        """
        def main[m, n](x: input float32[m, n], w: weight float32[m*n]) -> float32[m, n] {
            more: float32[m*n] = add(w, 1.0)
            r: float32[m, n] = reshape(more, shape=(m, n))
            y: float32[m, n] = add(x, r)
            return y
        }
        """
    )
    assert [p.name for p in lifted["main"].weights] == ["more"]


def test_a_size_whose_factors_are_weights_too_is_defined_by_them():
    # In the transform the factors say what m and n are, so the reshape can move; its result says it at run time.
    lifted = check_lift(
        """
        def main[b, m: 1.., n: 1..](x: input float32[b], wm: weight float32[m], wn: weight float32[n], wmn: weight float32[m*n]) -> float32[m, n] {
            s: float32[] = sum(wm)
            t: float32[] = sum(wn)
            u: float32[] = add(s, t)
            p: float32[b] = add(x, u)
            q: float32[] = sum(p)
            r: float32[m, n] = reshape(wmn, shape=(m, n))
            y: float32[m, n] = add(r, q)
            return y
        }
        """
    )
    assert [p.name for p in lifted["main"].weights] == ["u", "r"]


def test_symbolic_weights_are_shared():
    lifted = check_lift(
        """
        def embed[seq, vocab](tokens: input int64[seq], table: weight float32[vocab, 4]) -> float32[seq, 4] {
            y: float32[seq, 4] = take(table, tokens, axis=0)
            return y
        }
        def logits[seq, vocab](x: input float32[seq, 4], head: weight float32[vocab, 4]) -> float32[seq, vocab] {
            t: float32[4, vocab] = permute_dims(head, axes=(1, 0))
            y: float32[seq, vocab] = matmul(x, t)
            return y
        }
        """,
        shared_transform=True,
    )
    assert [s.name for s in lifted["transform_params"].symbols] == ["vocab"]
    assert lifted["transform_params"].result_type.names == ("table", "t")


def test_a_shape_as_a_weight_defines_dims():
    ir = module(
        """
        def main[n](x: input float32[n], w: weight shape[n]) -> float32[n] {
            z: float32[n] = zeros(shape=(n,))
            y: float32[n] = add(x, z)
            return y
        }
        """
    )
    lifted = lift_transform_params(ir)
    assert [(p.name, p.role) for p in lifted["main"].params] == [("x", "input")]


def test_a_number_as_a_weight_defines_a_dim_that_is_passed_along():
    check_lift(
        """
        def main[n](x: input float32[4], count: weight int64(n), w: weight float32[n, 4]) -> float32[n, 4] {
            w1: float32[n, 4] = add(w, 1.0)
            y: float32[n, 4] = add(w1, x)
            return y
        }
        """,
        """
        transform def main_transform_params[n](count: weight int64(n), w: weight float32[n, 4]) -> {w1: float32[n, 4]} {
            w1: float32[n, 4] = add(w, 1.0)
            results: {w1: float32[n, 4]} = {w1: w1}
            return results
        }
        def main[n](x: input float32[4], w1: transformed float32[n, 4]) -> float32[n, 4] attrs(transform="main_transform_params") {
            y: float32[n, 4] = add(w1, x)
            return y
        }
        """,
    )


def test_match_shape_that_only_checks_moves():
    lifted = check_lift(
        """
        def main[b, n](x: input float32[b, n], a: weight float32[n], w: weight float32[n]) -> float32[b, n] {
            same: float32[n] = match_shape(w, float32[n])
            both: float32[n] = add(same, a)
            y: float32[b, n] = add(x, both)
            return y
        }
        """,
        shared_transform=True,
    )
    assert [p.name for p in lifted["main"].weights] == ["both"]


def test_match_shape_that_defines_a_dim_stays():
    lifted = check_lift(
        """
        def main[b, n, k](x: input float32[b], w: weight float32[n]) -> float32[b] {
            v: float32[k] = match_shape(w, float32[k])
            s: float32[] = sum(v)
            y: float32[b] = add(x, s)
            return y
        }
        """
    )
    assert [p.name for p in lifted["main"].weights] == ["w"]


def test_a_dim_that_nothing_defines_any_more_is_named():
    # Before lifting, too, nothing says what m is.
    ir = parse(
        """
        def main[m, n](x: input float32[4], w: weight float32[m*n]) -> float32[m] {
            y: float32[m] = zeros(shape=(m,))
            return y
        }
        """
    )
    with pytest.raises(PassError) as caught:
        lift_transform_params(ir)
    assert str(caught.value) == (
        "main: no weight and no argument says what 'm' is\n"
        "  help: make 'm' an axis of an argument or of a weight, or an integer argument"
    )


def test_dims_that_a_called_function_loses_are_handed_to_it():
    check_lift(
        """
        private def layer[b, n](x: input float32[b], w: weight float32[n]) -> float32[b, n] {
            s: float32[] = sum(w)
            y: float32[b] = add(x, s)
            z: float32[n] = zeros(shape=(n,))
            column: float32[b, 1] = unsqueeze(y, dim=1)
            r: float32[b, n] = add(column, z)
            return r
        }
        def main[b, k: 1..](x: input float32[b], a: weight float32[k], c: weight float32[2*k]) -> (float32[b, k], float32[b, 2*k]) {
            p: float32[b, k] = @layer(x, a)
            q: float32[b, 2*k] = @layer(x, c)
            r: (float32[b, k], float32[b, 2*k]) = (p, q)
            return r
        }
        """,
        """
        private def layer[b, n](x: input float32[b], s: transformed float32[], n: input int64(n)) -> float32[b, n] {
            y: float32[b] = add(x, s)
            z: float32[n] = zeros(shape=(n,))
            column: float32[b, 1] = unsqueeze(y, dim=1)
            r: float32[b, n] = add(column, z)
            return r
        }
        transform def main_transform_params[k: 1..](a: weight float32[k], c: weight float32[2*k])
                -> {k: int64(k), s: float32[], s_1: float32[]} {
            s: float32[] = sum(a)
            s_1: float32[] = sum(c)
            results: {k: int64(k), s: float32[], s_1: float32[]} = {k: dim(k), s: s, s_1: s_1}
            return results
        }
        def main[b, k: 1..](x: input float32[b], k: transformed int64(k), s: transformed float32[], s_1: transformed float32[])
                -> (float32[b, k], float32[b, 2*k]) attrs(transform="main_transform_params") {
            p: float32[b, k] = @layer(x, s, dim(k))
            q: float32[b, 2*k] = @layer(x, s_1, dim(2*k))
            r: (float32[b, k], float32[b, 2*k]) = (p, q)
            return r
        }
        """,
    )


def test_work_whose_size_only_the_callee_knows_stays_in_it():
    # The callee takes its weight's size for known; this caller has it from an argument.
    ir = module(
        """
        private def layer[n](x: input float32[n], w: weight float32[n]) -> float32[n] {
            twice: float32[2*n] = concat(w, w)
            s: float32[] = sum(twice)
            y: float32[n] = add(x, s)
            return y
        }
        def main[m, n](x: input float32[m, n], w: weight float32[m*n]) -> float32[m*n] {
            flat: float32[m*n] = reshape(x, shape=(m*n,))
            y: float32[m*n] = @layer(flat, w)
            return y
        }
        """
    )
    lifted = lift_transform_params(ir, allow_growth=True)
    expect_same_results(ir, lifted)
    assert lifted["layer"] == ir["layer"]
    assert first_difference(lift_transform_params(lifted, allow_growth=True), lifted) is None


def test_a_fresh_dim_of_a_weight_is_one_dim_for_all_that_share_it():
    # Read from text, each function has a fresh dim of its own; the weight says that they are one.
    lifted = check_lift(
        "".join(
            f"""
            def {name}[b, fresh n](x: input float32[b, n], w: weight float32[4, n]) -> float32[b, 4] {{
                t: float32[n, 4] = permute_dims(w, axes=(1, 0))
                y: float32[b, 4] = matmul(x, t)
                return y
            }}
            """
            for name in ("one", "two")
        ),
        shared_transform=True,
    )
    assert lifted["transform_params"].result_type.names == ("t",)
    again = lift_transform_params(parse(str(lifted)), shared_transform=True)
    assert first_difference(again, lifted) is None


@pytest.mark.parametrize("size", ["2*d", "d*e", "d + 2*e", "ceildiv(d, e + 1)"])
def test_methods_share_a_weight_whose_size_is_an_expression_over_fresh_dims(size):
    text = "".join(
        f"""
        def {name}[b, fresh d, fresh e](x: input float32[b, d, e], w: weight float32[{size}, 4]) -> float32[4, {size}] {{
            t: float32[4, {size}] = permute_dims(w, axes=(1, 0))
            return t
        }}
        """
        for name in ("one", "two")
    )
    lifted = check_lift(text, dims={"d": 3, "e": 2}, shared_transform=True)
    assert lifted["transform_params"].result_type.names == ("t",)
    again = lift_transform_params(parse(str(lifted)), shared_transform=True)
    assert first_difference(again, lifted) is None


def test_a_size_known_only_as_a_whole_is_a_number_too():
    lifted = check_lift(
        """
        def main[m, n](x: input float32[m, n], w: weight float32[m*n]) -> float32[m, n] {
            t: float32[m*n] = multiply(w, dim(m*n))
            r: float32[m, n] = reshape(t, shape=(m, n))
            y: float32[m, n] = add(x, r)
            return y
        }
        """
    )
    assert [p.name for p in lifted["main"].weights] == ["t"]


def test_a_dim_that_another_methods_weight_tells_is_left_to_it():
    ir = module(
        """
        def one[b, d](x: input float32[b, 4], w: weight float32[d, 4]) -> float32[b, d] {
            y: float32[b, d] = linear(x, w, None)
            return y
        }
        def two[b, d, e](x: input float32[b, 4], q: weight float32[d*e, 4]) -> float32[b, d, e] {
            t: float32[b, d*e] = linear(x, q, None)
            y: float32[b, d, e] = reshape(t, shape=(b, d, e))
            return y
        }
        """
    )
    lifted = lift_transform_params(ir)
    assert [str(p.type.shape) for p in lifted["two"].weights] == ["(Dim('d*e'), 4)"]
    expect_same_results(ir, lifted, {"d": 2, "e": 3})
    assert first_difference(lift_transform_params(lifted), lifted) is None
    shared = check_lift(str(ir), dims={"d": 2, "e": 3}, shared_transform=True)
    assert [p.name for p in shared["two"].weights] == ["d", "e", "q"]
