# SPDX-License-Identifier: Apache-2.0
"""What holds for every op: the rule says what the reference does, for ints and for dims."""

import contextlib
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from op_cases import Case, Layer, type_of
from op_strategies import CASES

from nnfront import ops
from nnfront.dims import Dim, Size, Symbol
from nnfront.errors import NnfrontError
from nnfront.ir.infer import substitute_type
from nnfront.ir.op import OPS, Op
from nnfront.ir.types import (
    ScalarType,
    StateLayerType,
    StateType,
    TensorType,
    TupleType,
    Type,
    sizes_of,
)


def test_every_op_has_a_strategy() -> None:
    assert set(CASES) == set(OPS)


def test_every_op_is_exported_by_its_name() -> None:
    assert all(getattr(ops, name) is op for name, op in OPS.items())


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_every_op_is_documented(op: Op) -> None:
    assert op.doc.endswith((".", ")", "]", "."))


def infer(op: Op, types: list[Type | None], attrs: dict[str, Any]) -> tuple[dict[str, Any], Type]:
    full = {name: attrs.get(name, default) for name, default in op.attributes.items()}
    canonical = op.canonical_attrs(types, full)
    return canonical, op.result_type(types, canonical)


def run(op: Op, case: Case, attrs: dict[str, Any]) -> Any:
    with contextlib.redirect_stdout(io.StringIO()):
        return op.run(case.operands, attrs)


def matches(type: Type, value: Any) -> bool:
    match type:
        case TensorType():
            return isinstance(value, torch.Tensor) and type_of(value) == type
        case TupleType():
            return (
                isinstance(value, tuple)
                and len(value) == len(type.fields)
                and all(map(matches, type.fields, value))
            )
        case ScalarType():
            return type_of(value) == type
        case StateLayerType():
            return isinstance(value, Layer) and value.type == type
        case StateType():
            return tuple(layer.type for layer in value) == type.layers
    return False


def symbolic(size: Size, dims: dict[int, Dim]) -> Size:
    return dims.get(size, size) if isinstance(size, int) else size


def with_dims(value: Any, dims: dict[int, Dim]) -> Any:
    """Return a type or an attribute with its sizes replaced by dims."""
    match value:
        case TensorType():
            return TensorType(tuple(symbolic(s, dims) for s in value.shape), value.dtype)
        case TupleType():
            return TupleType(tuple(with_dims(field, dims) for field in value.fields))
        case StateLayerType():
            return replace(value, batch=symbolic(value.batch, dims))
        case StateType():
            return StateType(tuple(with_dims(layer, dims) for layer in value.layers))
        case int():
            return symbolic(value, dims)
        case list() | tuple():
            return [with_dims(v, dims) for v in value]
    return value


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("name", sorted(CASES))
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(data=st.data())
def test_the_rule_says_what_the_reference_does(name: str, data: st.DataObject) -> None:
    op, case = OPS[name], data.draw(CASES[name])
    types = [type_of(x) for x in case.operands]
    try:
        attrs, result = infer(op, types, case.attrs)
    except NnfrontError:
        if not op.stricter:
            with pytest.raises(Exception):  # noqa: B017 -- whatever torch or Python raises
                run(op, case, case.attrs)
        return
    assert matches(result, run(op, case, attrs)), f"the rule says {result}"

    bound = {
        size: Dim(f"s{size}", multiple_of=size or 1) if data.draw(st.booleans()) else Dim(f"s{size}")
        for size in range(5)
    }
    if case.keeps_ones or data.draw(st.booleans()):
        del bound[1]  # a known 1 broadcasts, a dim never does
    attrs_with_dims = {k: with_dims(v, bound) if k in case.sizes else v for k, v in case.attrs.items()}
    try:
        _, general = infer(op, [with_dims(t, bound) for t in types], attrs_with_dims)
    except NnfrontError:
        return
    values: dict[Symbol, Size] = {dim.symbols[0]: size for size, dim in bound.items()}
    assert substitute_type(general, values) == result, f"the rule says {general} for dims"


def accepts_dims(op: Op, case: Case, sizes: set[int]) -> bool:
    """Whether the rule accepts the case with dims for these sizes, and the dims reach the result."""
    dims = {size: Dim(f"s{size}", multiple_of=size) for size in sizes}
    attrs = {k: with_dims(v, dims) if k in case.sizes else v for k, v in case.attrs.items()}
    try:
        _, result = infer(op, [with_dims(type_of(x), dims) for x in case.operands], attrs)
    except NnfrontError:
        return False
    return any(isinstance(size, Dim) for size in sizes_of(result))


@pytest.mark.parametrize(
    "name", sorted(set(CASES) - {"enter_case", "print_", "dim_value", "extern", "within"})
)  # their results have no dims
def test_dims_flow_through_every_op(name: str) -> None:
    quick = settings(max_examples=300, phases=[Phase.generate], derandomize=True, database=None)
    some = st.sets(st.sampled_from([2, 3, 4]), min_size=1)
    find(st.tuples(CASES[name], some), lambda found: accepts_dims(OPS[name], *found), settings=quick)
