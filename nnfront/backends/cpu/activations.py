# SPDX-License-Identifier: Apache-2.0
"""The activations that regions name, for kernels that apply them to what they have made: they may write to their operand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional as F

from nnfront.lower import Run

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": partial(F.silu, inplace=True),
    "relu": torch.relu_,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu2": lambda x: torch.relu_(x).square_(),
}


# Those that kernels in C compute, in the order of their enum, and then the number of none.
GATES = ("silu", "gelu_tanh", "relu", "gelu")
NO_ACTIVATION = len(GATES)


def activation_name(run: Run) -> str:
    """Return the key of the activation that a region's attributes name."""
    return "gelu_tanh" if run.attrs.get("approximate") == "tanh" else str(run.attrs["activation"])


def activation_number(run: Run) -> int | None:
    """Return what kernels in C call the activation of a region's attributes, if it has one; None for one that they do not compute."""
    if "activation" not in run.attrs:
        return NO_ACTIVATION
    name = activation_name(run)
    return GATES.index(name) if name in GATES else None


def activation(run: Run) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return the activation that a region's attributes name."""
    return ACTIVATIONS[activation_name(run)]
