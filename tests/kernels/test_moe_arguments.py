# SPDX-License-Identifier: Apache-2.0
"""What the kernels of a mixture of experts refuse, and what they say of it."""

from __future__ import annotations

import pytest
import torch
from nnfront_kernels import KernelError, grouped_matmul, moe_combine, moe_routing


def tensor(*size: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


def ids(*size: int) -> torch.Tensor:
    return tensor(*size, dtype=torch.int32)


WRONG_ROUTES = [
    ({"experts": ids(4)}, r"experts must be a dense \[tokens, top_k\], got \[4\]"),
    ({"experts": ids(2, 4).T}, r"experts must be a dense \[tokens, top_k\], got \[4, 2\] with strides \[1, 4\]"),
    ({"experts": ids(4, 2).long()}, "moe_routing: dtype must be int32, got 'int64'"),
    ({"experts": ids(4, 17)}, "moe_routing: top_k must be 1 to 16, got 17"),
    ({"num_experts": 513}, "moe_routing: there must be 1 to 512 experts, got 513"),
    ({"block_m": 48}, "moe_routing: block_m must be one of 16, 32, 64, 128, got 48"),
    ({"arch": "sm_70"}, "moe_routing: arch must be one of"),
    ({"experts": ids(2**28, 8)}, "moe_routing: tokens \\* top_k must fit in int32, got 2147483648"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"), WRONG_ROUTES, ids=[message[-30:] for _, message in WRONG_ROUTES]
)
def test_moe_routing_says_what_does_not_fit(changes, message):
    arguments = {"experts": ids(4, 2), "num_experts": 8, "block_m": 16, "arch": "sm_90", **changes}
    with pytest.raises(KernelError, match=message):
        moe_routing.plan(arguments.pop("experts"), **arguments)


ROUTING = moe_routing.Routing(ids(8), ids(3, 4), ids(4, 2), 16)
WRONG_GROUPS = [
    ({"w": tensor(4, 64)}, r"w must be \[E, N, K\] with adjacent rows' elements, got \[4, 64\]"),
    ({"x": tensor(8, 32)}, r"x must have shape \[4, 32\], got \[8, 32\]"),
    ({"gather": False}, r"x must have shape \[8, 32\], got \[4, 32\]"),
    ({"bias": tensor(4, 63)}, r"bias must have shape \[4, 64\], got \[4, 63\]"),
    ({"residual": tensor(8, 64)}, "a residual is added after the weighted sum"),
    ({"w": tensor(5, 64, 32)}, "the routing must be for 5 experts and tiles of 16 rows, got tiles of 16 rows and a table of"),
    ({"config": grouped_matmul.CONFIGS["sm_90"][1]}, "the routing must be for 4 experts and tiles of 32 rows, got tiles of 16"),
    ({"x": tensor(4, 32, dtype=torch.float32), "w": tensor(4, 64, 32, dtype=torch.float32)}, "grouped_matmul: dtype must be one of float16, bfloat16, got 'float32'"),
    ({"arch": "sm_70"}, "grouped_matmul: arch must be one of"),
    ({"out": tensor(8, 65)}, r"out must have shape \[8, 64\], got \[8, 65\]"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"), WRONG_GROUPS, ids=[message[-30:] for _, message in WRONG_GROUPS]
)
def test_grouped_matmul_says_what_does_not_fit(changes, message):
    arguments = {"x": tensor(4, 32), "w": tensor(4, 64, 32), "gather": True, "arch": "sm_90", **changes}
    with pytest.raises(KernelError, match=message):
        grouped_matmul.plan(arguments.pop("x"), arguments.pop("w"), ROUTING, **arguments)


def test_a_matmul_of_no_experts_is_refused():
    shape = grouped_matmul.GroupedShape(1, 1, 0, 64, 64)
    assert grouped_matmul.accepts(shape, "float16", "sm_90") == "there must be at least 1 expert, got 0"


WRONG_SUMS = [
    ({"experts": ids(4, 2).long()}, "experts must be torch.int32, got torch.int64"),
    ({"x": tensor(7, 16)}, r"x must have shape \[8, 16\], got \[7, 16\]"),
    ({"weights": tensor(4, 3)}, r"weights must have shape \[4, 2\], got \[4, 3\]"),
    ({"x": tensor(8, 16, dtype=torch.int8)}, "moe_combine: dtype must be one of float16, bfloat16, float32, got 'int8'"),
    ({"arch": "sm_70"}, "moe_combine: arch must be one of"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG_SUMS, ids=[message[-30:] for _, message in WRONG_SUMS])
def test_moe_combine_says_what_does_not_fit(changes, message):
    arguments = {
        "x": tensor(8, 16),
        "weights": tensor(4, 2),
        "experts": ids(4, 2),
        "arch": "sm_90",
        **changes,
    }
    with pytest.raises(KernelError, match=message):
        moe_combine.plan(
            arguments.pop("x"), arguments.pop("weights"), arguments.pop("experts"), 4, **arguments
        )
