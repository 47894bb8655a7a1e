# SPDX-License-Identifier: Apache-2.0
"""Lifting one function: which values move, in which order, under which names."""

from __future__ import annotations

from lift_checks import check_lift

TWO_TRANSPOSES = """
def {name}(x: input float32[4, 4], w1: weight float32[4, 4], w2: weight float32[4, 4]) -> float32[4, 4] {{
    w1_t: float32[4, 4] = permute_dims(w1, axes=(1, 0))
    y1: float32[4, 4] = matmul(x, w1_t)
    w2_t: float32[4, 4] = permute_dims(w2, axes=(1, 0))
    y2: float32[4, 4] = matmul(x, w2_t)
    y: float32[4, 4] = {op}(y1, y2)
    return y
}}
"""


def test_work_on_weights_that_are_needed_as_they_are_stays():
    check_lift(
        """
        def main(x: input float32[2, 3, 4], w1: weight float32[8, 3], w2: weight float32[4, 8]) -> float32[2, 8, 8] {
            w1_t: float32[3, 8] = permute_dims(w1, axes=(1, 0))
            h: float32[2, 3, 8] = matmul(x, w2)
            y: float32[2, 8, 8] = matmul(w1, h)
            z: float32[3, 8] = add(w1_t, 1.0)
            a: float32[3, 3] = matmul(z, w1)
            b: float32[] = sum(a)
            r: float32[2, 8, 8] = add(y, b)
            return r
        }
        """,
        """
        transform def main_transform_params(w1: weight float32[8, 3], w2: weight float32[4, 8])
                -> {w1: float32[8, 3], w2: float32[4, 8]} {
            results: {w1: float32[8, 3], w2: float32[4, 8]} = {w1: w1, w2: w2}
            return results
        }
        def main(x: input float32[2, 3, 4], w1: transformed float32[8, 3], w2: transformed float32[4, 8]) -> float32[2, 8, 8]
                attrs(transform="main_transform_params") {
            w1_t: float32[3, 8] = permute_dims(w1, axes=(1, 0))
            h: float32[2, 3, 8] = matmul(x, w2)
            y: float32[2, 8, 8] = matmul(w1, h)
            z: float32[3, 8] = add(w1_t, 1.0)
            a: float32[3, 3] = matmul(z, w1)
            b: float32[] = sum(a)
            r: float32[2, 8, 8] = add(y, b)
            return r
        }
        """,
    )


def test_weights_needed_as_they_are_come_first_and_names_are_kept():
    check_lift(
        """
        def main(x: input float32[2, 4], w1: weight float32[8, 4], w2: weight float32[8, 8]) -> float32[2, 8] {
            w1_transformed: float32[4, 8] = permute_dims(w1, axes=(1, 0))
            h: float32[2, 8] = matmul(x, w1_transformed)
            y: float32[2, 8] = matmul(h, w2)
            return y
        }
        """,
        """
        transform def main_transform_params(w1: weight float32[8, 4], w2: weight float32[8, 8])
                -> {w2: float32[8, 8], w1_transformed: float32[4, 8]} {
            w1_transformed: float32[4, 8] = permute_dims(w1, axes=(1, 0))
            results: {w2: float32[8, 8], w1_transformed: float32[4, 8]} = {w2: w2, w1_transformed: w1_transformed}
            return results
        }
        def main(x: input float32[2, 4], w2: transformed float32[8, 8], w1_transformed: transformed float32[4, 8]) -> float32[2, 8]
                attrs(transform="main_transform_params") {
            h: float32[2, 8] = matmul(x, w1_transformed)
            y: float32[2, 8] = matmul(h, w2)
            return y
        }
        """,
    )


def test_a_tuple_of_a_weight_is_seen_through_and_its_alias_is_the_weight_itself():
    # One tensor, one result: an alias is no second copy.
    check_lift(
        """
        def main(x: input float32[2, 4], w1: weight float32[4, 4]) -> float32[2, 4] {
            inner: (float32[4, 4],) = (w1,)
            outer: ((float32[4, 4],), float32[2, 4]) = (inner, x)
            again: (float32[4, 4],) = inner
            w2: float32[4, 4] = again[0]
            h: float32[2, 4] = matmul(x, w2)
            y: float32[2, 4] = matmul(h, w1)
            return y
        }
        """,
        """
        transform def main_transform_params(w1: weight float32[4, 4]) -> {w1: float32[4, 4]} {
            results: {w1: float32[4, 4]} = {w1: w1}
            return results
        }
        def main(x: input float32[2, 4], w1: transformed float32[4, 4]) -> float32[2, 4]
                attrs(transform="main_transform_params") {
            h: float32[2, 4] = matmul(x, w1)
            y: float32[2, 4] = matmul(h, w1)
            return y
        }
        """,
    )


def test_a_branch_stays_and_its_weights_are_passed_as_they_are():
    check_lift(
        """
        def main(x: input float32[4, 4], cond: input bool, w1: weight float32[4, 4], w2: weight float32[4, 4]) -> float32[4, 4] {
            w: float32[4, 4] = if cond {
                yield w1
            } else {
                yield w2
            }
            y: float32[4, 4] = matmul(x, w)
            return y
        }
        """,
        """
        transform def main_transform_params(w1: weight float32[4, 4], w2: weight float32[4, 4])
                -> {w1: float32[4, 4], w2: float32[4, 4]} {
            results: {w1: float32[4, 4], w2: float32[4, 4]} = {w1: w1, w2: w2}
            return results
        }
        def main(x: input float32[4, 4], cond: input bool, w1: transformed float32[4, 4], w2: transformed float32[4, 4]) -> float32[4, 4]
                attrs(transform="main_transform_params") {
            w: float32[4, 4] = if cond {
                yield w1
            } else {
                yield w2
            }
            y: float32[4, 4] = matmul(x, w)
            return y
        }
        """,
    )


def test_weight_work_inside_a_branch_moves():
    lifted = check_lift(
        """
        def main(x: input float32[4, 4], cond: input bool, w: weight float32[4, 4]) -> float32[4, 4] {
            y: float32[4, 4] = if cond {
                t: float32[4, 4] = permute_dims(w, axes=(1, 0))
                m: float32[4, 4] = matmul(x, t)
                yield m
            } else {
                yield x
            }
            return y
        }
        """
    )
    assert [p.name for p in lifted["main"].params] == ["x", "cond", "t"]


def test_each_function_gets_its_own_transform_and_one_without_weights_is_left_alone():
    lifted = check_lift(
        TWO_TRANSPOSES.format(name="one", op="add")
        + """
        def two(x: input float32[2, 3], w: weight float32[5, 3]) -> float32[2, 5] {
            w_t: float32[3, 5] = permute_dims(w, axes=(1, 0))
            y: float32[2, 5] = matmul(x, w_t)
            return y
        }
        def three(x: input float32[2, 3]) -> float32[2, 3] {
            y: float32[2, 3] = add(x, x)
            return y
        }
        """
    )
    assert list(lifted) == ["one_transform_params", "one", "two_transform_params", "two", "three"]
    assert [p.name for p in lifted["two_transform_params"].params] == ["w"]


def test_stop_lift_params_keeps_what_follows():
    lifted = check_lift(
        """
        def main(x: input float32[2, 4], w: weight float32[4, 4]) -> float32[2, 4] {
            t: float32[4, 4] = permute_dims(w, axes=(1, 0))
            s: float32[4, 4] = stop_lift_params(t)
            a: float32[4, 4] = add(s, 1.0)
            y: float32[2, 4] = matmul(x, a)
            return y
        }
        """
    )
    assert [p.name for p in lifted["main"].weights] == ["t"]
    assert [b.value.op.name for b in lifted["main"].bindings] == ["stop_lift_params", "add", "matmul"]


def test_a_value_that_depends_on_no_weight_is_copied_and_never_a_result():
    check_lift(
        """
        def main(x: input float32[4], w: weight float32[4]) -> float32[4] {
            offset: float32[4] = ones(shape=(4,))
            shifted: float32[4] = add(w, offset)
            y: float32[4] = add(x, shifted)
            z: float32[4] = multiply(y, offset)
            return z
        }
        """,
        """
        transform def main_transform_params(w: weight float32[4]) -> {shifted: float32[4]} {
            offset: float32[4] = ones(shape=(4,))
            shifted: float32[4] = add(w, offset)
            results: {shifted: float32[4]} = {shifted: shifted}
            return results
        }
        def main(x: input float32[4], shifted: transformed float32[4]) -> float32[4] attrs(transform="main_transform_params") {
            offset: float32[4] = ones(shape=(4,))
            y: float32[4] = add(x, shifted)
            z: float32[4] = multiply(y, offset)
            return z
        }
        """,
    )


def test_a_name_that_looks_like_a_transform_makes_nothing_of_a_function():
    lifted = check_lift(TWO_TRANSPOSES.format(name="my_transform_params", op="add"))
    assert list(lifted) == ["my_transform_params_transform_params", "my_transform_params"]
