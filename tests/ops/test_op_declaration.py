# SPDX-License-Identifier: Apache-2.0
"""How a declaration becomes an op: operands, attributes, defaults, and calls of rule and reference."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from call import t

from nnfront import ops
from nnfront.ir.op import OPS, Op, op
from nnfront.ir.operands import Operand, OperandType
from nnfront.ir.types import ObjectType, TensorType, Type, kv_layer


@pytest.fixture(autouse=True)
def _leave_no_ops_behind() -> Iterator[None]:
    known = dict(OPS)
    yield
    OPS.clear()
    OPS.update(known)


def declared(operand: Operand) -> tuple[str, bool, bool, bool]:
    return operand.name, operand.is_sequence, operand.is_optional, operand.takes_scalar


def test_annotations_tell_operands_from_attributes() -> None:
    @op()
    def example(
        a: "TensorType", b: "OperandType", c: "TensorType | None" = None, k: "int" = 3, *, name: "str"
    ) -> "TensorType":
        """An example."""
        return a

    assert [declared(o) for o in example.operands] == [
        ("a", False, False, False),
        ("b", False, False, True),
        ("c", False, True, False),
    ]
    assert list(example.attributes) == ["k", "name"]
    assert OPS["example"] is example
    assert example.doc == "An example."


@pytest.mark.parametrize(
    "variadic", [ops.concat, ops.einsum, ops.extern, ops.print_, ops.cache_join], ids=lambda o: o.name
)
def test_a_sequence_or_a_star_takes_any_number_of_operands(variadic: Op) -> None:
    assert variadic.is_variadic
    assert len(variadic.operands) == 1


def test_a_rule_may_have_attributes_before_its_operands() -> None:
    @op()
    def ordered(
        count: "int", x: "TensorType", scale: "float" = 2.0, bias: "TensorType | None" = None
    ) -> "TensorType":
        return TensorType((count, *x.shape), x.dtype)

    @ordered.reference
    def _(count: int, x: Any, scale: float, bias: Any) -> Any:
        return count, x, scale, bias

    assert ordered.result_type([t(5)], {"count": 3}) == t(3, 5)
    assert ordered.run(["x"], {"count": 3}) == (3, "x", 2.0, None)
    assert ordered.run(["x", "b"], {"count": 3, "scale": 1.0}) == (3, "x", 1.0, "b")
    assert ordered.bound({"count": 3})("x", "b", scale=4.0) == (3, "x", 4.0, "b")


def test_a_starred_op_may_have_attributes_on_both_sides() -> None:
    @op()
    def starred(kind: "str", *values: "TensorType", end: "int" = 0) -> "TensorType":
        return values[end]

    @starred.reference
    def _(kind: str, *values: Any, end: int) -> Any:
        return kind, values, end

    assert starred.result_type([t(1), t(2)], {"kind": "k", "end": 1}) == t(2)
    assert starred.run(["a", "b"], {"kind": "k"}) == ("k", ("a", "b"), 0)


def test_canonical_attributes_leave_out_defaults_and_keep_the_declared_order() -> None:
    x = t(2, 3)
    full = {"keepdims": False, "axis": -1}
    assert ops.sum.canonical_attrs([x], full) == {"axis": (1,)}
    assert list(ops.sum.canonical_attrs([x], {"keepdims": True, "axis": 0})) == ["axis", "keepdims"]
    assert ops.layer_norm.canonical_attrs([x], {"normalized_shape": 3, "eps": 1e-5}) == {
        "normalized_shape": (3,)
    }


def test_one_and_true_are_different_attributes() -> None:
    @op()
    def strict(x: "TensorType", flag: "int | bool" = True) -> "TensorType":
        return x

    assert strict.canonical_attrs([t()], {"flag": 1}) == {"flag": 1}
    assert strict.canonical_attrs([t()], {"flag": True}) == {}


def test_writing_nothing_is_pure() -> None:
    assert ops.attention.is_pure_for(["q", "k", "v", None, None])
    assert not ops.attention.is_pure_for(["q", "k", "v", "cache", None])
    assert not ops.print_.is_pure_for(["x"])
    assert ops.matmul.is_pure_for(["a", "b"])


def test_ops_that_use_up_a_handle_say_which() -> None:
    assert {name: o.writes for name, o in OPS.items() if o.writes} == {
        "attention": "cache",
        "cache_append": "cache",
        "cache_join": "layers",
        "cache_split": "cache",
        "cache_write": "cache",
    }


def test_an_operand_of_any_type_takes_any() -> None:
    layer = kv_layer(1, 2, "float32", 3, 4)
    types: Sequence[Type] = [t(2), layer, ObjectType("thing")]
    assert ops.extern.result_type(types, {"name": "f", "out": t(1)}) == t(1)
