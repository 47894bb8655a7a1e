# SPDX-License-Identifier: Apache-2.0
"""What ops declare of themselves beside their types, against what their torch references do."""

import contextlib
import io
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from op_cases import Case, type_of
from op_strategies import CASES
from recurrent_loops import LOOPS
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from nnfront import ops
from nnfront.errors import NnfrontError
from nnfront.ir import OPS, Op, TensorType
from nnfront.memory.allocations import Meter
from nnfront.ops.sliced_axes import sliced_axes
from nnfront.transform import blockwise

FEW = settings(
    max_examples=8, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
)
MANY = settings(max_examples=300, phases=[Phase.generate], derandomize=True, database=None)
# Their results are handles or nothing, not tensors.
NO_TENSORS = {"cache_join", "cache_split", "enter_case", "print_", "within"}


def named(fact: Callable[[Op], object]) -> list[str]:
    return [name for name, op in OPS.items() if fact(op) and name not in NO_TENSORS]


def attributes(op: Op, case: Case) -> dict[str, Any] | None:
    """The canonical attributes, None if the rule refuses the case."""
    types = [type_of(x) for x in case.operands]
    try:
        attrs = op.canonical_attrs(types, {n: case.attrs.get(n, d) for n, d in op.attributes.items()})
        op.result_type(types, attrs)
    except NnfrontError:
        return None
    return attrs


def run(op: Op, operands: Sequence[Any], attrs: dict[str, Any]) -> list[torch.Tensor]:
    with contextlib.redirect_stdout(io.StringIO()):
        value = op.run(operands, attrs)
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def tensors(values: Sequence[Any]) -> list[torch.Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


def in_another_order(x: Any) -> Any:
    """The same tensor with its last axis outermost in memory."""
    if not isinstance(x, torch.Tensor) or x.ndim < 2:
        return x
    return x.movedim(-1, 0).contiguous().movedim(0, -1)


def shares(op: Op, operands: Sequence[Any], attrs: dict[str, Any]) -> set[bool]:
    """Whether results with elements share memory with an operand."""
    given_memory = {x.untyped_storage().data_ptr() for x in tensors(operands)}
    results = [x for x in run(op, operands, attrs) if x.numel()]
    return {x.untyped_storage().data_ptr() in given_memory for x in results}


@pytest.mark.parametrize("name", named(lambda op: True))
@FEW
@given(data=st.data())
def test_a_result_shares_memory_when_its_op_says_so(name: str, data: st.DataObject) -> None:
    op, case = OPS[name], data.draw(CASES[name])
    attrs = attributes(op, case)
    if attrs is None or op.view == "sometimes":
        return
    assert shares(op, case.operands, attrs) <= {op.is_view}
    if op.view != "by strides":
        moved = list(map(in_another_order, case.operands))
        assert shares(op, moved, attrs) <= {op.view == "always"}


# What an external function gives back is its own affair; that of the cases gives back what it gets.
@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize(
    "name", named(lambda op: op.view in ("by strides", "sometimes") and op is not ops.extern)
)
def test_what_is_a_view_for_some_calls_is_one_for_some_and_none_for_others(
    name: str, is_shared: bool
) -> None:
    op = OPS[name]

    def is_example(case: Case) -> bool:
        attrs = attributes(op, case)
        return attrs is not None and any(
            is_shared in shares(op, [order(x) for x in case.operands], attrs)
            for order in (lambda x: x, in_another_order)
        )

    find(CASES[name], is_example, settings=MANY)


@pytest.mark.parametrize("name", named(lambda op: op.in_order))
@FEW
@given(data=st.data())
def test_an_op_that_keeps_the_order_of_elements_keeps_it(name: str, data: st.DataObject) -> None:
    op, case = OPS[name], data.draw(CASES[name])
    attrs = attributes(op, case)
    if attrs is None or not op.keeps_order(attrs):
        return
    (result,) = run(op, case.operands, attrs)
    flat = torch.cat([x.flatten() for x in tensors(case.operands)])
    assert torch.equal(result.flatten(), flat.to(result.dtype))


@pytest.mark.parametrize("name", ["permute_dims", "concat", "stack", "flip", "tile", "repeat"])
def test_an_op_that_moves_elements_out_of_their_order_says_so(name: str) -> None:
    def is_moved(case: Case) -> bool:
        attrs = attributes(OPS[name], case)
        if attrs is None or OPS[name].keeps_order(attrs):
            return False
        flat = torch.cat([x.flatten() for x in tensors(case.operands)])
        (result,) = run(OPS[name], case.operands, attrs)
        return not torch.equal(result.flatten(), flat.to(result.dtype))

    find(CASES[name], is_moved, settings=MANY)


def filled(x: Any, factor: int) -> Any:
    """A float tensor with other elements, multiples of a factor; anything else as it is."""
    if not isinstance(x, torch.Tensor) or not x.dtype.is_floating_point:
        return x
    return (factor * (4 + torch.arange(x.numel()) % 4)).reshape(x.shape).to(x.dtype)


def is_moved(op: Op, case: Case, attrs: dict[str, Any]) -> bool:
    """Whether each element of float results is an element of an operand, whatever its sign, or does not depend on elements."""
    given_elements = [[filled(x, factor) for x in case.operands] for factor in (1, -1, 16)]
    for results in zip(*[run(op, operands, attrs) for operands in given_elements], strict=True):
        if not results[0].dtype.is_floating_point:
            continue
        known = {v for x in tensors(given_elements[0]) for v in x.flatten().tolist()}
        for a, b, c in zip(*[x.flatten().tolist() for x in results], strict=True):
            if not a == b == c and not (a in known and b == -a and c == 16 * a):
                return False
    return True


@pytest.mark.parametrize("name", named(lambda op: op.moves and op is not ops.empty))
@FEW
@given(data=st.data())
def test_an_op_that_moves_computes_nothing(name: str, data: st.DataObject) -> None:
    op, case = OPS[name], data.draw(CASES[name])
    attrs = attributes(op, case)
    assert attrs is None or is_moved(op, case, attrs)


@pytest.mark.parametrize("name", ["relu", "abs", "negative", "max", "sort", "cumsum", "clip", "dequantize"])
def test_an_op_that_computes_something_is_told_from_one_that_moves(name: str) -> None:
    def is_computed(case: Case) -> bool:
        attrs = attributes(OPS[name], case)
        return attrs is not None and not is_moved(OPS[name], case, attrs)

    find(CASES[name], is_computed, settings=MANY)


@pytest.mark.parametrize("name", named(lambda op: op.moves and not op.scratch))
@FEW
@given(data=st.data())
def test_an_op_that_moves_without_scratch_holds_none_whatever_the_strides(
    name: str, data: st.DataObject
) -> None:
    op, case = OPS[name], data.draw(CASES[name])
    attrs = attributes(op, case)
    operands = list(map(in_another_order, case.operands))
    positions = {x.dtype for x in tensors(operands) if not x.dtype.is_floating_point}
    if attrs is None or (name == "take" and positions != {torch.int64}):
        return
    owners = {x.untyped_storage()._cdata for x in tensors(operands)}
    with Meter(owners) as meter:
        results = run(op, operands, attrs)
    made = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in results}
    own = sum(nbytes for address, nbytes in made.items() if address not in owners)
    assert meter.peak - own <= 8, "one number, converted, is no scratch"


@pytest.mark.parametrize("name", named(lambda op: op.rowwise))
@FEW
@given(data=st.data())
def test_a_rowwise_op_gives_the_same_in_blocks_of_rows(name: str, data: st.DataObject) -> None:
    op, case = OPS[name], data.draw(CASES[name])
    attrs = attributes(op, case)
    instruction: Any = SimpleNamespace(op=name, attrs=attrs)
    if attrs is None or not blockwise.works_on_rows(instruction, case.operands[0].shape):
        return
    whole = run(op, case.operands, attrs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "BLOCK_ELEMENTS", 1)
        blocks = blockwise.run_in_blocks(op.bound(attrs), case.operands, {})
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(whole, blocks, strict=True)
    )


def parts_of(op: Op, case: Case, attrs: dict[str, Any], axis: int) -> tuple[list[Any], list[Any]] | None:
    """All but the first position along an axis of the results: computed of operands cut in the same way, and taken of what is computed of all; None if nothing says that it can be."""
    axes = sliced_axes(op, axis, [type_of(x) for x in case.operands], attrs)
    if axes is None:
        return None
    whole = run(op, case.operands, attrs)
    operands = [
        x if at is None else x.narrow(at, 1, x.shape[at] - 1)
        for x, at in zip(case.operands, axes, strict=True)
    ]
    return run(op, operands, attrs), [x.narrow(axis, 1, x.shape[axis] - 1) for x in whole]


def long_axes(op: Op, case: Case, attrs: dict[str, Any]) -> list[int]:
    """The axes of the first result that have something to leave out."""
    first = result_types(op, [type_of(x) for x in case.operands], attrs)[0]
    return [i for i, size in enumerate(first.shape) if size > 1] if isinstance(first, TensorType) else []


@pytest.mark.parametrize("name", named(lambda op: op.is_pure or op.collective))
@settings(FEW, max_examples=20)
@given(data=st.data())
def test_a_part_of_a_result_is_computed_of_the_parts_of_operands_that_are_said(
    name: str, data: st.DataObject
) -> None:
    op, case = OPS[name], data.draw(CASES[name])
    attrs = attributes(op, case)
    if attrs is None:
        return
    for axis in long_axes(op, case, attrs):
        if (found := parts_of(op, case, attrs, axis)) is not None:
            for part, expected in zip(*found, strict=True):
                torch.testing.assert_close(part, expected, equal_nan=True)


@pytest.mark.parametrize(
    "name",
    [
        *named(lambda op: op.pointwise),
        *("add_low_rank", "all", "all_reduce", "any", "chunk", "concat", "gather", "layer_norm", "linear"),
        *("linear_int8", "log_softmax", "matmul", "max", "mean", "min", "moe_mlp", "prod", "rms_norm"),
        *("softmax", "split", "sum", "topk", "unsqueeze"),
    ],
)
def test_there_are_cases_of_every_op_of_which_parts_can_be_computed(name: str) -> None:
    def is_cut(case: Case) -> bool:
        attrs = attributes(OPS[name], case)
        if attrs is None:
            return False
        return any(parts_of(OPS[name], case, attrs, axis) for axis in long_axes(OPS[name], case, attrs))

    find(CASES[name], is_cut, settings=MANY)


def flops(op: Op, operands: Sequence[Any], attrs: dict[str, Any]) -> int:
    types = [type_of(x) for x in operands]
    assert op.flops is not None
    results = [t for t in tree_leaves(list(result_types(op, types, attrs))) if isinstance(t, TensorType)]
    counted = op.flops([t for t in types if isinstance(t, TensorType)], results, op.full_attrs(attrs))
    assert isinstance(counted, int)
    return counted


def result_types(op: Op, types: Sequence[Any], attrs: dict[str, Any]) -> Sequence[Any]:
    result = op.result_type(types, attrs)
    return getattr(result, "fields", (result,))


def counted_by_torch(op: Op, operands: Sequence[Any], attrs: dict[str, Any]) -> int:
    """Those of the reference; of a recurrence those of the loop over tokens, as chunks do other work for the same result."""
    with FlopCounterMode(display=False) as counter:
        LOOPS[op](*operands, **op.full_attrs(attrs)) if op in LOOPS else run(op, operands, attrs)
    return int(counter.get_total_flops())


X = torch.randn
INTEGERS = torch.tensor([[3, -7, 0, 127]] * 5, dtype=torch.int8)
BLOCKS = torch.zeros(5, 210 + 106, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("op", "operands", "attrs"),
    [
        (ops.matmul, [X(2, 3, 4), X(4, 5)], {}),
        (ops.matmul, [X(3, 4), X(6, 4, 5)], {}),
        (ops.linear, [X(2, 3, 4), X(5, 4), X(5)], {}),
        (ops.linear, [X(4), X(5, 4), None], {}),
        (ops.linear_int8, [X(2, 3, 4), INTEGERS, X(5, 1), None, X(5)], {}),
        (ops.linear_int8, [X(2, 3, 384), BLOCKS, None, None, X(5)], {"format": "q6_k"}),
        (ops.einsum, [X(2, 3, 4), X(5, 4)], {"subscripts": "bsk,nk->bsn"}),
        (ops.conv1d, [X(2, 4, 9), X(6, 2, 3), X(6)], {"groups": 2, "stride": (2,)}),
        (ops.conv2d, [X(2, 3, 8, 9), X(5, 3, 3, 2), None], {}),
        (ops.conv3d, [X(1, 2, 4, 5, 6), X(3, 2, 2, 2, 2), None], {}),
        (ops.conv1d_transpose, [X(2, 4, 9), X(4, 3, 3), None], {"stride": (2,)}),
        (ops.scaled_dot_product_attention, [X(2, 3, 4, 8), X(2, 5, 2, 8), X(2, 5, 2, 6), None], {}),
        (ops.attention, [X(2, 3, 4, 8), X(2, 3, 2, 8), X(2, 3, 2, 6), None, None], {}),
        (ops.causal_conv1d, [X(2, 5, 3), X(3, 4), X(3), None], {}),
        (ops.ssm_scan, [X(2, 5, 4, 3), X(2, 5, 4), X(4), X(2, 5, 2, 6), X(2, 5, 2, 6), None, None], {}),
        (ops.selective_scan, [X(2, 5, 4), X(2, 5, 4), X(4, 3), X(2, 5, 3), X(2, 5, 3), X(4), None], {}),
        (
            ops.gated_delta_rule,
            [X(2, 5, 2, 3), X(2, 5, 2, 3), X(2, 5, 4, 6), X(2, 5, 4), X(2, 5, 4), None],
            {},
        ),
        # The reference computes every expert for every token: here all are chosen.
        (ops.moe_mlp, [X(1, 4), X(2, 12, 4), X(2, 4, 6), torch.tensor([[1, 0]]), X(1, 2), None, None], {}),
        (ops.add_low_rank, [X(2, 3, 5), X(2, 3, 4), X(3, 2, 4), X(3, 5, 2), torch.tensor([2, 0])], {}),
    ],
    ids=lambda value: value.name if isinstance(value, Op) else "",
)
def test_products_count_the_operations_that_torch_counts(
    op: Op, operands: list[Any], attrs: dict[str, Any]
) -> None:
    types = [type_of(x) for x in operands]
    full = {name: attrs.get(name, default) for name, default in op.attributes.items()}
    canonical = op.canonical_attrs(types, full)
    assert flops(op, operands, canonical) == counted_by_torch(op, operands, canonical) > 0


def test_every_op_that_counts_its_own_operations_is_compared_with_torch() -> None:
    (cases,) = [m.args[1] for m in test_products_count_the_operations_that_torch_counts.pytestmark]
    assert {case[0].name for case in cases} == set(named(lambda op: op.flops is not None))
