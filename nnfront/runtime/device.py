# SPDX-License-Identifier: Apache-2.0
"""Where a program's tensors live."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from nnfront.errors import LoadError

CPU = torch.device("cpu")
META = torch.device("meta")

_STAND_IN: ContextVar[torch.device | None] = ContextVar("stand_in", default=None)


@contextmanager
def standing_in(device: torch.device) -> Iterator[None]:
    """Inside of this, in this thread, programs for a GPU have their tensors on another device: on `meta`, nothing is computed."""
    token = _STAND_IN.set(device)
    try:
        yield
    finally:
        _STAND_IN.reset(token)


def device_of(target: str) -> torch.device:
    """Return the device for a target; for CUDA the current GPU, or the CPU under Triton's interpreter (TRITON_INTERPRET=1).

    Raises LoadError if there is no GPU, or not one of the architecture that the target names.
    """
    kind, _, arch = target.partition(":")
    if kind == "cpu":
        return CPU
    if (stand_in := _STAND_IN.get()) is not None:
        return stand_in
    if not torch.cuda.is_available():
        if os.environ.get("TRITON_INTERPRET") == "1":
            return CPU
        raise LoadError(
            f"target {target!r} needs a GPU, and torch finds none",
            help="compile for 'cpu'; TRITON_INTERPRET=1, set before the start, runs the kernels without a GPU, slowly",
        )
    major, minor = torch.cuda.get_device_capability()
    if arch and arch != f"sm_{major}{minor}":
        raise LoadError(
            f"this program was compiled for {arch}, the GPU here is sm_{major}{minor}",
            details=[f"GPU: {torch.cuda.get_device_name()}"],
            help=f"compile it for 'cuda:sm_{major}{minor}', or for 'cuda'",
        )
    return torch.device("cuda", torch.cuda.current_device())


def default_device(device: torch.device) -> AbstractContextManager[object]:
    """Let new tensors be on a device inside of this; the CPU is where they are anyway."""
    return nullcontext() if device.type == "cpu" else device


def on_device(value: Any, device: torch.device) -> Any:
    """Return a tensor on a device, itself if it is there; anything else as it is."""
    return value.to(device) if isinstance(value, torch.Tensor) else value
