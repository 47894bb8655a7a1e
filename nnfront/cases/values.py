# SPDX-License-Identifier: Apache-2.0
"""What a condition asks of a number or a torch tensor."""

from __future__ import annotations

from typing import Any

import torch

from nnfront.cases.conditions import Causal, Zeros, dim_bounds


def asked_for(condition: Any, like: torch.Tensor) -> torch.Tensor:
    """Return the tensor that a condition asks for, with the sizes, dtype and device of `like`."""
    if not isinstance(condition, Causal):
        return torch.full_like(like, 0 if isinstance(condition, Zeros) else condition)
    full = torch.full_like(like, like.dtype == torch.bool or condition.hidden)
    return full.tril() if like.dtype == torch.bool else full.triu(1)


def meets(value: Any, condition: Any) -> bool:
    """Whether the value of a dim or an argument is what one condition asks for."""
    if isinstance(value, torch.Tensor):
        return bool((value == asked_for(condition, value)).all())
    bounds = dim_bounds(condition)
    if bounds is None or isinstance(condition, int):
        return bool(value == condition)
    low, high, step = bounds
    return bool(low <= value and (high is None or value <= high) and value % step == 0)
