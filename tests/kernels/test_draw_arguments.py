# SPDX-License-Identifier: Apache-2.0
"""Arguments of a draw that do not fit, and what a draw costs."""

from __future__ import annotations

import pytest
import torch
from nnfront_kernels import KernelError, sampling


def tensor(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


WRONG = [
    ({"logits": tensor(2, 3, 8)}, r"logits must have shape \[any, 8\], got \[2, 3, 8\]"),
    ({"logits": tensor(8, 4).T}, r"logits must have adjacent elements along its last axis, got strides \[1, 4\]"),
    ({"logits": tensor(4, 8, dtype=torch.int8)}, "sampling: dtype must be one of float16, bfloat16, float32, got 'int8'"),
    ({"logits": tensor(4, 2**24)}, r"sampling: there must be at least 1 token and less than 2\^24, got 16777216"),
    ({"logits": tensor(4, 0)}, r"sampling: there must be at least 1 token and less than 2\^24, got 0"),
    ({"logits": tensor(2**31, 8), "state": None}, r"sampling: there must be less than 2\^31 rows, got 2147483648"),
    ({"arch": "sm_70"}, "sampling: arch must be one of"),
    ({"state": None}, "a token is drawn with a seed and a step for each row: state is missing"),
    ({"state": tensor(4, 2)}, "state must be torch.int64, got torch.float32"),
    ({"state": tensor(4, 3, dtype=torch.int64)[:, :2]}, r"state must be dense, got strides \[3, 1\]"),
    ({"penalty": 1.2}, "a penalty needs to be told which tokens were seen"),
    ({"seen": tensor(4, 7, dtype=torch.bool)}, r"seen must have shape \[4, 8\], got \[4, 7\]"),
    ({"kept": tensor(4, 8, dtype=torch.uint8)}, "kept must be torch.bool, got torch.uint8"),
    ({"out": tensor(5, dtype=torch.int64)}, r"out must be a dense \[4\], got \[5\]"),
    ({"workspace": sampling.workspace(3, 8, torch.device("meta")), "top_k": 2}, "workspace must hold 64 tokens, got 48"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message[-30:] for _, message in WRONG])
def test_sampling_says_what_does_not_fit(changes, message):
    state = tensor(4, 2, dtype=torch.int64)
    arguments = {"logits": tensor(4, 8), "temperature": 1.0, "state": state, "arch": "sm_90", **changes}
    with pytest.raises(KernelError, match=message):
        sampling.plan(arguments.pop("logits"), **arguments)
