# SPDX-License-Identifier: Apache-2.0
"""Canonical attributes, and types with dims in them, of the ops where either takes some thought."""

from typing import Any

import pytest
from call import FLOAT, attrs_of, infer, t

from nnfront import ops
from nnfront.dims import Dim, same_shape
from nnfront.ir.op import Op
from nnfront.ir.types import StateType, TensorType, TupleType, Type, kv_layer

N, M = Dim("n"), Dim("m")
BATCH, SEQ = Dim("batch"), Dim("seq")
WHOLE = slice(None)
X = t(BATCH, SEQ, 64)

CANONICAL: list[tuple[Op, list[Any], dict[str, Any], dict[str, Any]]] = [
    (ops.reshape, [X], {"shape": (BATCH, SEQ, 4, -1)}, {"shape": (BATCH, SEQ, 4, 16)}),
    (ops.reshape, [X], {"shape": (-1, 64)}, {"shape": (BATCH * SEQ, 64)}),
    (ops.reshape, [X], {"shape": ["batch", "seq", 64]}, {"shape": (BATCH, SEQ, 64)}),
    (ops.reshape, [X], {"shape": -1}, {"shape": (64 * BATCH * SEQ,)}),
    (ops.permute_dims, [X], {"axes": None}, {"axes": (2, 1, 0)}),
    (ops.permute_dims, [X], {"axes": [0, -1, 1]}, {"axes": (0, 2, 1)}),
    (ops.squeeze, [t(1, N, 1)], {"axis": None}, {"axis": (0, 2)}),
    (ops.sum, [X], {"axis": [2, 0, 1]}, {}),
    (ops.softmax, [X], {"axis": -2}, {"axis": 1}),
    (ops.astype, [X], {"dtype": "float16"}, {"dtype": "float16"}),
    (ops.matmul, [t(2, 3), t(3, 4)], {"out_dtype": "float32"}, {}),
    (ops.arange, [], {"start": "n"}, {"start": 0, "end": N}),
    (ops.zeros, [], {"shape": "n"}, {"shape": (N,)}),
    (ops.einsum, [t(2, 3), t(3, 4)], {"subscripts": "ij, jk"}, {"subscripts": "ij,jk->ik"}),
    (ops.conv1d, [t(1, 2, 9), t(3, 2, 4)], {"padding": "same"}, {"stride": (1,), "padding": ((1, 2),), "dilation": (1,)}),
    (ops.pad, [X], {"pad": [0, 1]}, {"pad": (0, 1, 0, 0, 0, 0)}),
    (ops.topk, [X], {"k": 0}, {"k": -1, "axis": 2}),
    (ops.cumsum, [X], {"axis": 1, "exclusive": False}, {"axis": 1}),
    (ops.quantize, [t(4, 64)], {"format": "int4"}, {"bits": 4, "group_size": 32, "axis": 1}),
    (ops.quantize, [t(4, 64)], {"format": "uint4", "group_size": 16}, {"bits": 4, "group_size": 16, "axis": 1, "symmetric": False}),
    (ops.quantize, [t(4, 64, dtype="float16")], {"format": "fp8"}, {"axis": 1, "scale_dtype": "float32", "dtype": "float8_e4m3fn"}),
    (ops.dequantize, [t(4, 64, dtype="int8"), t(4, 2)], {"format": "int4", "axis": 1}, {"group_size": 32, "axis": 1}),
    (ops.getitem, [X], {"index": 0}, {"index": (0,)}),
    (ops.getitem, [X], {"index": (WHOLE, -1)}, {"index": (":", SEQ - 1)}),
    (ops.getitem, [X], {"index": (..., None, slice(0, 64))}, {"index": (":", ":", None)}),
    (ops.getitem, [X], {"index": (..., slice(-8, None, 2))}, {"index": (":", ":", (56, 64, 2))}),
    (ops.getitem, [X], {"index": (WHOLE, slice(None, "seq - 1"))}, {"index": (":", (0, Dim("max(seq - 1, 0)"), 1))}),
    (ops.getitem, [X], {"index": (":", SEQ - 1)}, {"index": (":", SEQ - 1)}),
    (ops.getitem, [X], {"index": (..., (0, 32, 1))}, {"index": (":", ":", (0, 32, 1))}),
    (ops.getitem, [X], {"index": (...,)}, {"index": ()}),
]  # fmt: skip


def same_attrs(a: Any, b: Any) -> bool:
    """Compare by meaning: a dim equals itself only, and no string."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same_attrs(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same_attrs, a, b))
    if isinstance(a, Dim) or isinstance(b, Dim):
        return same_shape((a,), (b,)) if not isinstance(b, str) else False
    return type(a) is type(b) and a == b


@pytest.mark.parametrize(
    ("op", "types", "attrs", "expected"), CANONICAL, ids=[f"{op.name}-{a}" for op, _, a, _ in CANONICAL]
)
def test_attributes_have_one_form(
    op: Op, types: list[Any], attrs: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = attrs_of(op, types, attrs)
    assert same_attrs(found, expected), found


@pytest.mark.parametrize(
    ("op", "types", "attrs", "expected"), CANONICAL, ids=[f"{op.name}-{a}" for op, _, a, _ in CANONICAL]
)
def test_the_one_form_is_its_own_one_form(
    op: Op, types: list[Any], attrs: dict[str, Any], expected: dict[str, Any]
) -> None:
    found = attrs_of(op, types, attrs)
    assert same_attrs(attrs_of(op, types, found), found)


LAYER = kv_layer(2, 8, "float32", BATCH, Dim("max_seq"), 128)
Q, K = t(BATCH, SEQ, 4, 8), t(BATCH, SEQ, 2, 8)

TYPES: list[tuple[Op, list[Any], dict[str, Any], Type]] = [
    (ops.add, [X, t(64)], {}, X),
    (ops.add, [t(1, SEQ, 1), t(BATCH, 1, 64)], {}, X),
    (ops.add, [t(2 * N), t(N + N)], {}, t(2 * N)),
    (ops.multiply, [t(N, dtype="int64"), FLOAT], {}, t(N)),
    (ops.matmul, [t(BATCH, 4, SEQ, 8), t(BATCH, 4, 8, M)], {}, t(BATCH, 4, SEQ, M)),
    (ops.concat, [t(BATCH, SEQ), t(BATCH, 1)], {"dim": 1}, t(BATCH, SEQ + 1)),
    (ops.split, [t(4 * N)], {"indices_or_sections": 4}, TupleType((t(N),) * 4)),
    (ops.split, [t(N + 4)], {"indices_or_sections": [4]}, TupleType((t(4), t(N)))),
    (ops.chunk, [t(5)], {"chunks": 4}, TupleType((t(2), t(2), t(1)))),
    (ops.repeat, [t(2, N)], {"repeats": 3, "axis": 1}, t(2, 3 * N)),
    (ops.tile, [t(N)], {"repeats": (M, 2)}, t(M, 2 * N)),
    (ops.getitem, [X], {"index": (WHOLE, slice(1, None))}, t(BATCH, Dim("max(seq - 1, 0)"), 64)),
    (ops.getitem, [X], {"index": (WHOLE, slice(None, -1))}, t(BATCH, Dim("max(seq - 1, 0)"), 64)),
    (ops.getitem, [X], {"index": (WHOLE, slice(None, 16))}, t(BATCH, Dim("min(seq, 16)"), 64)),
    (ops.getitem, [X], {"index": (WHOLE, slice(None, SEQ - 1))}, t(BATCH, Dim("max(seq - 1, 0)"), 64)),
    (ops.arange, [], {"start": N, "end": N + SEQ, "dtype": "int64"}, t(SEQ, dtype="int64")),
    (ops.arange, [], {"start": 0, "end": N, "step": 2}, t(Dim("ceildiv(n, 2)"))),
    (ops.arange, [], {"start": N, "end": 0, "step": -1}, t(N)),
    (ops.dim_value, [], {"dim": "n"}, t(dtype="int64")),
    (ops.pad, [t(N)], {"pad": (M, 1)}, t(N + M + 1)),
    (ops.conv2d, [t(BATCH, 3, N, 224), t(8, 3, 3, 3)], {"stride": 2, "padding": 1}, t(BATCH, 8, Dim("(n - 1)//2 + 1"), 112)),
    (ops.interpolate, [t(1, 3, N, M)], {"scale_factor": (2, 0.5)}, t(1, 3, 2 * N, Dim("m//2"))),
    (ops.topk, [t(BATCH, N)], {"k": 0}, TupleType((t(BATCH, N), t(BATCH, N, dtype="int32")))),
    (ops.cumsum, [t(BATCH, N, dtype="bool")], {}, t(BATCH * N, dtype="int64")),
    (ops.attention, [Q, K, K], {}, Q),
    (ops.attention, [Q, K, K, LAYER], {}, TupleType((Q, LAYER))),
    (ops.attention, [Q, K, t(BATCH, SEQ, 2, 6)], {}, t(BATCH, SEQ, 4, 6)),
    (ops.cache_split, [StateType((LAYER, LAYER))], {}, TupleType((LAYER, LAYER))),
    (ops.cache_join, [LAYER, LAYER], {}, StateType((LAYER, LAYER))),
    (ops.cache_positions, [LAYER], {"seq": "seq"}, t(BATCH, SEQ, dtype="int64")),
    (ops.quantize, [t(N, 64)], {"group_size": 32}, TupleType((t(N, 64, dtype="int8"), t(N, 2)))),
    (ops.quantize, [t(N, 64, dtype="float16")], {"dtype": "float8_e4m3fn", "scale_dtype": "float32"}, TupleType((t(N, 64, dtype="float8_e4m3fn"), t(N, 1)))),
    (ops.dequantize, [t(N, 64, dtype="int8"), t(N, 2, dtype="float16")], {"group_size": 32}, t(N, 64, dtype="float16")),
    (ops.dequantize, [t(N, 64, dtype="float8_e5m2"), t(N, 1)], {"dtype": "bfloat16"}, t(N, 64, dtype="bfloat16")),
    (ops.quantize, [t(N, 64)], {"format": "int4"}, TupleType((t(N, 64, dtype="int8"), t(N, 2)))),
    (ops.quantize, [t(N, 64, dtype="float16")], {"format": "fp8"}, TupleType((t(N, 64, dtype="float8_e4m3fn"), t(N, 1)))),
    (ops.quantize, [t(N, 64)], {"format": "uint4", "group_size": 64}, TupleType((t(N, 64, dtype="uint8"), t(N, 1), t(N, 1, dtype="uint8")))),
    (ops.dequantize, [t(N, 64, dtype="int8"), t(N, 2)], {"format": "int4"}, t(N, 64)),
    (ops.pack_int4, [t(2 * N, dtype="int8")], {}, t(N, dtype="uint8")),
    (ops.get_timestep_embedding, [t(N)], {"embedding_dim": 320, "dtype": "float16"}, t(N, 320, dtype="float16")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "types", "attrs", "expected"), TYPES, ids=[f"{op.name}-{a}" for op, _, a, _ in TYPES]
)
def test_dims_come_out_in_their_simplest_form(
    op: Op, types: list[Any], attrs: dict[str, Any], expected: Type
) -> None:
    assert infer(op, *types, **attrs) == expected


def test_a_rule_gives_back_the_type_it_got_if_nothing_changes() -> None:
    for op in (ops.silu, ops.softmax, ops.abs, ops.stop_lift_params):
        assert infer(op, X) is X


def test_types_stay_types_of_tensors() -> None:
    result = infer(ops.reshape, X, shape=(BATCH, SEQ * 64))
    assert isinstance(result, TensorType)
    assert result.ndim == 2
