# SPDX-License-Identifier: Apache-2.0
"""What refusals of type rules advise, word by word."""

from typing import Any

import pytest
from call import FLOAT, INT, infer, t
from test_op_errors import BIT, F16, I64, K, M, N, Q

from nnfront import ops
from nnfront.errors import InferError
from nnfront.ir.op import Op
from nnfront.ir.types import kv_layer

HELPED: list[tuple[Op, list[Any], dict[str, Any], str]] = [
    (ops.add, [t(N), t(16)], {}, "nothing says that they are equal: use one dim for both in the spec"),
    (ops.add, [t(15), t(16)], {}, ""),
    (ops.add, [INT, FLOAT], {}, "compute with the numbers in Python"),
    (ops.silu, [t(2, dtype=I64)], {}, "cast with astype first"),
    (ops.abs, [t(2, dtype=BIT)], {}, "cast with astype first"),
    (ops.take, [t(2), t(2)], {}, "cast with astype first"),
    (ops.matmul, [t(2, 3), t(5, 3)], {}, "b looks like [out, in]: use linear(a, b), or matmul(a, permute_dims(b))"),
    (ops.matmul, [t(2, 3), t(3, 3, dtype=F16)], {}, "cast one of them with astype"),
    (ops.matmul, [t(), t(3)], {}, "use multiply"),
    (ops.einsum, [t(2)], {"subscripts": "...i->i"}, "write each axis as one letter"),
    (ops.split, [t(7)], {"indices_or_sections": 2}, "use chunk, or give the dim multiple_of"),
    (ops.chunk, [t(N)], {"chunks": 2}, "give the dim multiple_of"),
    (ops.reshape, [t(N)], {"shape": (M,)}, "nothing says that they are equal: use one dim for both in the spec"),
    (ops.getitem, [t(2)], {"index": (True,)}, "index with ints, dims and slices; use take or gather for tensors of positions"),
    (ops.getitem, [t(2)], {"index": (slice(None, None, -1),)}, "use flip to reverse an axis"),
    (ops.pad, [t(2)], {"pad": (1,)}, "give two for each axis: before, after"),
    (ops.pad, [t(2)], {"pad": (-1, 0)}, "use a slice to cut"),
    (ops.pad, [t(2)], {"pad": (1, 0), "mode": "edge"}, "use one of constant, reflect, replicate, circular"),
    (ops.arange, [], {"start": N, "step": 0.5}, "compute on arange(n) instead"),
    (ops.conv1d, [t(1, 2, 5), t(3, 2, N)], {"padding": "same"}, "give the padding as numbers"),
    (ops.interpolate, [t(1, 2, N, 5)], {"scale_factor": 1.5}, "scale by an integer or one over an integer, or give the size"),
    (ops.attention, [Q, None, None, kv_layer(2, 8, "float32", 3, 16, 4)], {"is_causal": False}, "store what is attended to as a whole in a layer without a window"),
    (ops.attention, [Q, K, K, kv_layer(2, 8, F16, 3, 9)], {}, "cast k and v, or make the cache of that dtype"),
    (ops.pack_int4, [t(5, dtype="int8")], {}, "pad it, or give the dim multiple_of=2"),
    (ops.extern, [], {"name": "f", "out": 1}, "give nn.Tensor.placeholder(shape, dtype), or a tuple of them"),
]  # fmt: skip


@pytest.mark.parametrize(("op", "types", "attrs", "help"), HELPED, ids=[op.name for op, *_ in HELPED])
def test_a_refusal_says_what_to_do(op: Op, types: list[Any], attrs: dict[str, Any], help: str) -> None:
    with pytest.raises(InferError) as caught:
        infer(op, *types, **attrs)
    assert caught.value.help == help
