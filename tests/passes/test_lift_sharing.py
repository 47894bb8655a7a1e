# SPDX-License-Identifier: Apache-2.0
"""Functions that share one transform: matched by weight name, whatever each of them reads."""

from __future__ import annotations

import pytest
from lift_checks import check_lift
from pass_checks import expect_same_results, module

from nnfront.errors import PassError
from nnfront.ir import first_difference, parse
from nnfront.passes import lift_transform_params

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
LIFTED_TRANSPOSES = """
def {name}(x: input float32[4, 4], w1_t: transformed float32[4, 4], w2_t: transformed float32[4, 4]) -> float32[4, 4]
        attrs(transform="{transform}") {{
    y1: float32[4, 4] = matmul(x, w1_t)
    y2: float32[4, 4] = matmul(x, w2_t)
    y: float32[4, 4] = {op}(y1, y2)
    return y
}}
"""
TRANSFORM = """
transform def {transform}(w1: weight float32[4, 4], w2: weight float32[4, 4]) -> {{w1_t: float32[4, 4], w2_t: float32[4, 4]}} {{
    w1_t: float32[4, 4] = permute_dims(w1, axes=(1, 0))
    w2_t: float32[4, 4] = permute_dims(w2, axes=(1, 0))
    results: {{w1_t: float32[4, 4], w2_t: float32[4, 4]}} = {{w1_t: w1_t, w2_t: w2_t}}
    return results
}}
"""
FUSED = """
private def fused(x: input float32[4, 4], weight: input float32[4, 4]) -> float32[4, 4] {
    weight_t: float32[4, 4] = permute_dims(weight, axes=(1, 0))
    y: float32[4, 4] = matmul(x, weight_t)
    return y
}
"""


def test_functions_share_identical_transforms():
    names = {"transform": "transform_params"}
    check_lift(
        TWO_TRANSPOSES.format(name="func1", op="add") + TWO_TRANSPOSES.format(name="func2", op="multiply"),
        TRANSFORM.format(**names)
        + LIFTED_TRANSPOSES.format(name="func1", op="add", **names)
        + LIFTED_TRANSPOSES.format(name="func2", op="multiply", **names),
        shared_transform=True,
    )


def test_functions_that_become_equal_all_stay():
    lifted = check_lift(
        TWO_TRANSPOSES.format(name="func1", op="add") + TWO_TRANSPOSES.format(name="func2", op="add"),
        shared_transform=True,
    )
    assert lifted["func1"].with_(name="func2") == lifted["func2"]


def test_functions_with_different_weights_share_because_weights_go_by_name():
    # Matching by position would have to refuse this: func1 has one weight, func2 two.
    check_lift(
        """
        def func1(x: input float32[4, 4], w1: weight float32[4, 4]) -> float32[4, 4] {
            w1_t: float32[4, 4] = permute_dims(w1, axes=(1, 0))
            y1: float32[4, 4] = matmul(x, w1_t)
            return y1
        }
        """
        + TWO_TRANSPOSES.format(name="func2", op="add"),
        TRANSFORM.format(transform="transform_params")
        + """
        def func1(x: input float32[4, 4], w1_t: transformed float32[4, 4]) -> float32[4, 4] attrs(transform="transform_params") {
            y1: float32[4, 4] = matmul(x, w1_t)
            return y1
        }
        """
        + LIFTED_TRANSPOSES.format(name="func2", op="add", transform="transform_params"),
        shared_transform=True,
    )


@pytest.mark.parametrize(
    "other", ["float32[4, b]", "float32[2, 4]", "float16[4, 4]"], ids=["dims", "shape", "dtype"]
)
def test_weights_of_one_name_must_agree(other):
    ir = parse(
        f"""
        def decode[a](x: input float32[a, 4], w: weight float32[4, a]) -> float32[4, a] {{ return w }}
        def prefill[b](x: input float32[b, 4], w: weight {other}) -> {other} {{ return w }}
        """
    )
    with pytest.raises(PassError) as caught:
        lift_transform_params(ir, shared_transform=True)
    assert str(caught.value) == (
        "decode and prefill cannot share a transform: they differ in weight 'w'\n"
        "  decode: float32[4, a]\n"
        f"  prefill: {other}\n"
        "  help: lift them apart, with shared_transform=False or a list without one of them"
    )


def test_a_transform_inside_a_called_function_is_shared_with_one_outside():
    # w2 is transposed by func1 itself and, for func2, by the function it calls: both are one value.
    check_lift(
        FUSED
        + TWO_TRANSPOSES.format(name="func1", op="add")
        + """
        def func2(x: input float32[4, 4], w1: weight float32[4, 4], w2: weight float32[4, 4]) -> float32[4, 4] {
            w1_t: float32[4, 4] = permute_dims(w1, axes=(1, 0))
            y1: float32[4, 4] = matmul(x, w1_t)
            y2: float32[4, 4] = @fused(x, w2)
            y: float32[4, 4] = add(y1, y2)
            return y
        }
        """,
        """
        private def fused(x: input float32[4, 4], weight_t: transformed float32[4, 4]) -> float32[4, 4] {
            y: float32[4, 4] = matmul(x, weight_t)
            return y
        }
        """
        + TRANSFORM.format(transform="transform_params")
        + LIFTED_TRANSPOSES.format(name="func1", op="add", transform="transform_params")
        + """
        def func2(x: input float32[4, 4], w1_t: transformed float32[4, 4], w2_t: transformed float32[4, 4]) -> float32[4, 4]
                attrs(transform="transform_params") {
            y1: float32[4, 4] = matmul(x, w1_t)
            y2: float32[4, 4] = @fused(x, w2_t)
            y: float32[4, 4] = add(y1, y2)
            return y
        }
        """,
        shared_transform=True,
    )


def test_order_of_results_is_that_of_the_alphabetically_first_function():
    reordered = """
    def func1(x: input float32[4, 4], w1: weight float32[4, 4], w2: weight float32[4, 4]) -> float32[4, 4] {
        w2_t: float32[4, 4] = permute_dims(w2, axes=(1, 0))
        w1_t: float32[4, 4] = permute_dims(w1, axes=(1, 0))
        y1: float32[4, 4] = matmul(x, w1_t)
        y2: float32[4, 4] = matmul(y1, w2_t)
        return y2
    }
    """
    lifted = check_lift(TWO_TRANSPOSES.format(name="func2", op="add") + reordered, shared_transform=True)
    assert lifted["transform_params"].result_type.names == ("w2_t", "w1_t")
    assert [p.name for p in lifted["func2"].weights] == ["w2_t", "w1_t"]


def test_a_list_lifts_the_functions_it_names_only():
    func3 = """
    def func3(x: input float32[4, 4], w1: weight float32[4, 4], w2: weight float32[4, 4]) -> float32[4, 4] {
        y1: float32[4, 4] = @fused(x, w1)
        y2: float32[4, 4] = @fused(y1, w2)
        return y2
    }
    """
    names = {"transform": "transform_params"}
    before = module(
        FUSED
        + TWO_TRANSPOSES.format(name="func1", op="add")
        + TWO_TRANSPOSES.format(name="func2", op="multiply")
        + func3
    )
    lifted = lift_transform_params(before, shared_transform=["func1", "func2"])
    expected = module(
        FUSED
        + TRANSFORM.format(**names)
        + LIFTED_TRANSPOSES.format(name="func1", op="add", **names)
        + LIFTED_TRANSPOSES.format(name="func2", op="multiply", **names)
        + func3
    )
    assert first_difference(lifted, expected) is None
    assert lifted["func3"] is before["func3"]
    expect_same_results(before, lifted)


@pytest.mark.parametrize("name", ["fused", "nobody"])
def test_a_list_may_name_public_functions_only(name):
    ir = module(FUSED + TWO_TRANSPOSES.format(name="func1", op="add"))
    with pytest.raises(PassError) as caught:
        lift_transform_params(ir, shared_transform=["func1", name])
    assert str(caught.value) == (
        f"shared_transform names no public function: '{name}'\n"
        "  public functions are func1\n"
        "  help: use True for all, False for none, or a list of names"
    )


def test_an_empty_list_is_an_error():
    with pytest.raises(PassError, match=r"^shared_transform names no public function: the list is empty"):
        lift_transform_params(module(TWO_TRANSPOSES.format(name="func1", op="add")), shared_transform=[])


def test_a_function_that_does_not_read_a_weight_has_no_say_in_it():
    # func1 takes w2 and never reads it; that is no reason to keep func2's transpose at run time.
    lifted = check_lift(
        """
        def func1(x: input float32[4, 4], w1: weight float32[4, 4], w2: weight float32[4, 4]) -> float32[4, 4] {
            w1_t: float32[4, 4] = permute_dims(w1, axes=(1, 0))
            y: float32[4, 4] = matmul(x, w1_t)
            return y
        }
        """
        + TWO_TRANSPOSES.format(name="func2", op="add"),
        shared_transform=True,
    )
    assert [p.name for p in lifted["func1"].weights] == ["w1_t"]
    assert [p.name for p in lifted["func2"].weights] == ["w1_t", "w2_t"]


def test_functions_with_nothing_in_common_share_the_union_of_their_transforms():
    lifted = check_lift(
        """
        def func1(x: input float32[4, 4], w1: weight float32[4, 4], w2: weight float32[4, 4]) -> float32[4, 4] {
            w1_t: float32[4, 4] = permute_dims(w1, axes=(1, 0))
            y: float32[4, 4] = matmul(x, w1_t)
            return y
        }
        def func2(x: input float32[4, 4], w1: weight float32[4, 4], w2: weight float32[4, 4]) -> float32[4, 4] {
            w2_t: float32[4, 4] = permute_dims(w2, axes=(1, 0))
            y: float32[4, 4] = matmul(x, w2_t)
            return y
        }
        """,
        TRANSFORM.format(transform="transform_params")
        + """
        def func1(x: input float32[4, 4], w1_t: transformed float32[4, 4]) -> float32[4, 4] attrs(transform="transform_params") {
            y: float32[4, 4] = matmul(x, w1_t)
            return y
        }
        def func2(x: input float32[4, 4], w2_t: transformed float32[4, 4]) -> float32[4, 4] attrs(transform="transform_params") {
            y: float32[4, 4] = matmul(x, w2_t)
            return y
        }
        """,
        shared_transform=True,
    )
    assert lifted.methods


def test_a_duplicate_in_one_function_does_not_change_what_moves():
    # Counting bindings would lift this in one function and not in two.
    doubled = """
    def {name}(x: input float32[4, 4], w: weight float32[4, 4]) -> float32[4, 4] {{
        a: float32[4, 4] = permute_dims(w, axes=(1, 0))
        b: float32[4, 4] = permute_dims(w, axes=(1, 0))
        y: float32[4, 4] = matmul(x, a)
        z: float32[4, 4] = matmul(y, b)
        return z
    }}
    """
    lifted = check_lift(doubled.format(name="one") + doubled.format(name="two"), shared_transform=True)
    assert lifted["transform_params"].result_type.names == ("a",)
    assert [len(f.bindings) for f in lifted.methods] == [2, 2]


def test_a_taken_name_is_not_taken_again():
    lifted = check_lift(TWO_TRANSPOSES.format(name="transform_params", op="add"), shared_transform=True)
    assert list(lifted) == ["transform_params_1", "transform_params"]


@pytest.mark.parametrize("mode", [True, ["a", "b"], False])
def test_a_method_without_weights_after_lifting_goes_on_sharing(mode):
    # Its weight is not read: nothing of it is left, but the transform is still that of both.
    lifted = check_lift(
        """
        def a(x: input float32[4, 4], w: weight float32[4, 4]) -> float32[4, 4] {
            t: float32[4, 4] = permute_dims(w, axes=(1, 0))
            y: float32[4, 4] = matmul(x, t)
            return y
        }
        def b(x: input float32[4, 4], v: weight float32[4, 4]) -> float32[4, 4] { return x }
        """,
        shared_transform=mode,
    )
    assert len([f for f in lifted.functions if f.kind == "transform"]) == (1 if mode else 2)
