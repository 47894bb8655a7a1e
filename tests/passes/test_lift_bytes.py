# SPDX-License-Identifier: Apache-2.0
"""What moves: derived tensors always, other values if the bytes that stay in memory do not grow."""

from __future__ import annotations

import pytest
from lift_checks import check_lift


def weights(lifted, name="main"):
    return [p.name for p in lifted[name].weights]


DEQUANTISE = """
def main(x: input float32[2, 8], q: weight int8[8, 8], scale: weight float32[8, 1]) -> float32[2, 8] {
    wide: float32[8, 8] = astype(q, dtype="float32")
    w: float32[8, 8] = multiply(wide, scale)
    y: float32[2, 8] = linear(x, w, None)
    return y
}
"""


def test_a_dequantise_stays():
    assert weights(check_lift(DEQUANTISE)) == ["q", "scale"]


def test_growth_is_allowed_on_request():
    assert weights(check_lift(DEQUANTISE, allow_growth=True)) == ["w"]


def test_a_derived_tensor_moves_even_if_it_takes_more():
    declared = DEQUANTISE.replace("-> float32[2, 8] {", '-> float32[2, 8] attrs(derived=("w",)) {')
    assert weights(check_lift(declared)) == ["w"]


def test_what_comes_before_a_dequantise_moves():
    lifted = check_lift(
        """
        def main(x: input float32[2, 8], q: weight int8[8, 4], scale: weight float32[4, 1]) -> float32[2, 4] {
            t: int8[4, 8] = permute_dims(q, axes=(1, 0))
            half: float32[4, 1] = multiply(scale, 0.5)
            wide: float32[4, 8] = astype(t, dtype="float32")
            w: float32[4, 8] = multiply(wide, half)
            y: float32[2, 4] = linear(x, w, None)
            return y
        }
        """
    )
    assert weights(lifted) == ["t", "half"]


def test_a_transpose_stays_where_its_source_is_needed_as_well():
    lifted = check_lift(
        """
        def main(x: input float32[4, 4], w: weight float32[4, 4]) -> float32[4, 4] {
            t: float32[4, 4] = permute_dims(w, axes=(1, 0))
            y: float32[4, 4] = matmul(x, t)
            z: float32[4, 4] = matmul(y, w)
            return z
        }
        """
    )
    assert weights(lifted) == ["w"]


def test_a_weight_that_another_sharing_function_reads_counts():
    two = """
    def decode(x: input float32[4, 4], w: weight float32[4, 4]) -> float32[4, 4] {
        t: float32[4, 4] = permute_dims(w, axes=(1, 0))
        y: float32[4, 4] = matmul(x, t)
        return y
    }
    def prefill(x: input float32[4, 4], w: weight float32[4, 4]) -> float32[4, 4] {
        y: float32[4, 4] = matmul(x, w)
        return y
    }
    """
    assert weights(check_lift(two, shared_transform=True), "decode") == ["w"]
    assert weights(check_lift(two), "decode") == ["t"]


def test_parts_of_a_weight_move_if_together_they_are_no_more_than_the_weight():
    lifted = check_lift(
        """
        def main(x: input float32[2, 4], qkv: weight float32[12, 4]) -> (float32[2, 4], float32[2, 4], float32[2, 4]) {
            parts: (float32[4, 4], float32[4, 4], float32[4, 4]) = split(qkv, indices_or_sections=3)
            q: float32[4, 4] = parts[0]
            k: float32[4, 4] = parts[1]
            v: float32[4, 4] = parts[2]
            a: float32[2, 4] = linear(x, q, None)
            b: float32[2, 4] = linear(x, k, None)
            c: float32[2, 4] = linear(x, v, None)
            r: (float32[2, 4], float32[2, 4], float32[2, 4]) = (a, b, c)
            return r
        }
        """
    )
    assert weights(lifted) == ["q", "k", "v"]


def test_parts_that_overlap_stay():
    lifted = check_lift(
        """
        def main(x: input float32[2, 4], w: weight float32[6, 4]) -> (float32[2, 4], float32[2, 4]) {
            p: float32[4, 4] = getitem(w, index=((0, 4, 1),))
            q: float32[4, 4] = getitem(w, index=((2, 6, 1),))
            a: float32[2, 4] = linear(x, p, None)
            b: float32[2, 4] = linear(x, q, None)
            r: (float32[2, 4], float32[2, 4]) = (a, b)
            return r
        }
        """
    )
    assert weights(lifted) == ["w"]


def test_a_tuple_of_parts_that_is_used_whole_stays():
    lifted = check_lift(
        """
        def main(x: input float32[2], w: weight float32[4]) -> (float32[2], (float32[2], float32[2])) {
            parts: (float32[2], float32[2]) = split(w, indices_or_sections=2)
            r: (float32[2], (float32[2], float32[2])) = (x, parts)
            return r
        }
        """
    )
    assert weights(lifted) == ["w"]


def test_two_weights_may_pay_for_one_value():
    lifted = check_lift(
        """
        def main(x: input float32[2, 4], a: weight float32[4, 4], b: weight float32[4, 4]) -> float32[2, 8] {
            both: float32[8, 4] = concat(a, b)
            more: float32[8, 4] = add(both, 1.0)
            y: float32[2, 8] = linear(x, more, None)
            return y
        }
        """
    )
    assert weights(lifted) == ["more"]


def test_growth_of_one_value_is_not_paid_by_another_that_has_nothing_to_do_with_it():
    lifted = check_lift(
        """
        def main(x: input float32[2, 4], w: weight float16[4, 4], big: weight float32[64, 4]) -> float32[2, 4] {
            row: float32[4] = sum(big, axis=(0,))
            wide: float32[4, 4] = astype(w, dtype="float32")
            y: float32[2, 4] = linear(x, wide, row)
            return y
        }
        """
    )
    assert weights(lifted) == ["w", "row"]


@pytest.mark.parametrize(
    ("facts", "expected"), [("", "w"), (": 1..", "s")], ids=["may be empty", "never empty"]
)
def test_symbolic_sizes_are_compared_for_all_values_of_their_dims(facts, expected):
    lifted = check_lift(
        f"""
        def main[b, n{facts}](x: input float32[b], w: weight float32[n]) -> float32[b] {{
            s: float32[] = sum(w)
            y: float32[b] = add(x, s)
            return y
        }}
        """
    )
    assert weights(lifted) == [expected]


def test_a_cut_through_symbolic_sizes_is_kept_if_it_holds_for_all_values():
    lifted = check_lift(
        """
        def main[n](x: input float32[2, n], q: weight int8[n, 4]) -> float32[2, 4] {
            t: int8[4, n] = permute_dims(q, axes=(1, 0))
            w: float32[4, n] = astype(t, dtype="float32")
            y: float32[2, 4] = linear(x, w, None)
            return y
        }
        """
    )
    assert weights(lifted) == ["t"]


def test_a_result_that_is_a_lifted_value_or_a_weight_is_passed_through():
    check_lift(
        """
        def main(x: input float32[2], w: weight float32[4], v: weight float32[4]) -> {y: float32[2], w: float32[4], s: float32[4]} {
            s: float32[4] = add(v, 1.0)
            y: float32[2] = add(x, 1.0)
            r: {y: float32[2], w: float32[4], s: float32[4]} = {y: y, w: w, s: s}
            return r
        }
        def sum(v: weight float32[4]) -> float32[4] {
            s: float32[4] = add(v, 1.0)
            return s
        }
        """,
        """
        transform def transform_params(w: weight float32[4], v: weight float32[4]) -> {w: float32[4], s: float32[4]} {
            s: float32[4] = add(v, 1.0)
            results: {w: float32[4], s: float32[4]} = {w: w, s: s}
            return results
        }
        def main(x: input float32[2], w: transformed float32[4], s: transformed float32[4]) -> {y: float32[2], w: float32[4], s: float32[4]}
                attrs(transform="transform_params") {
            y: float32[2] = add(x, 1.0)
            r: {y: float32[2], w: float32[4], s: float32[4]} = {y: y, w: w, s: s}
            return r
        }
        def sum(s: transformed float32[4]) -> float32[4] attrs(transform="transform_params") {
            return s
        }
        """,
        shared_transform=True,
    )


def test_dead_code_goes_from_both_sides():
    lifted = check_lift(
        """
        def main(x: input float32[4], w: weight float32[4]) -> float32[4] {
            dead: float32[4] = multiply(w, 2.0)
            idle: float32[4] = multiply(x, dead)
            y: float32[4] = add(x, 1.0)
            return y
        }
        """
    )
    assert weights(lifted) == []
    assert [b.var.name for b in lifted["main"].bindings] == ["y"]
    assert len(lifted["main_transform_params"].bindings) == 1


def test_work_with_an_effect_stays(capsys):
    lifted = check_lift(
        """
        def main(x: input float32[4], w: weight float32[4]) -> float32[4] {
            s: float32[4] = add(w, 1.0)
            p: () = print_(s)
            y: float32[4] = add(x, s)
            return y
        }
        """
    )
    assert weights(lifted) == ["s"]
    assert [b.value.op.name for b in lifted["main"].bindings] == ["print_", "add"]
    assert capsys.readouterr().out.count("tensor") == 2


def test_names_of_results_and_of_variables_left_behind_do_not_meet():
    # func2 has a variable of its own under the name that func1 gives the shared value.
    lifted = check_lift(
        """
        def func1(x: input float32[4], w: weight float32[4]) -> float32[4] {
            s: float32[4] = add(w, 1.0)
            y: float32[4] = add(x, s)
            return y
        }
        def func2(x: input float32[4], w: weight float32[4]) -> float32[4] {
            s: float32[4] = multiply(x, 2.0)
            t: float32[4] = add(w, 1.0)
            y: float32[4] = add(s, t)
            return y
        }
        """,
        shared_transform=True,
    )
    assert [p.name for p in lifted["func2"].params] == ["x", "s"]
    assert [b.var.name for b in lifted["func2"].bindings] == ["s_1", "y"]
