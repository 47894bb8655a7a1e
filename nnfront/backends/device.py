# SPDX-License-Identifier: Apache-2.0
"""Where a program's tensors live."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from nnfront.holding import holding

CPU = torch.device("cpu")
META = torch.device("meta")

_STAND_IN: ContextVar[torch.device | None] = ContextVar("stand_in", default=None)


def overriding_device(device: torch.device) -> AbstractContextManager[object]:
    """Inside of this, in this thread, programs for a GPU have their tensors on another device: on `meta`, nothing is computed."""
    return holding(_STAND_IN, device)


def stand_in() -> torch.device | None:
    """The device that stands in for a GPU in this thread, if one does."""
    return _STAND_IN.get()


def current(device: torch.device) -> AbstractContextManager[object]:
    """Let kernels be launched on a device inside of this: Triton's go to the current GPU, wherever their operands are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def default_device(device: torch.device) -> AbstractContextManager[object]:
    """Let new tensors be on a device inside of this, and kernels be launched there; the CPU is where they are anyway."""
    return nullcontext() if device.type == "cpu" else _default(device)


@contextmanager
def _default(device: torch.device) -> Iterator[None]:
    with current(device), device:
        yield


def sent(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers as a tensor on a device. The host does not wait for a GPU: it copies from pinned memory, which is free again when it has."""
    made = torch.tensor(values, dtype=dtype, device=device if device.type != "cuda" else CPU)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made


def fetching(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begin to copy a tensor to the host; what is returned waits for that, not for what a GPU is given to do meanwhile."""
    if tensor.device.type != "cuda":
        return lambda: tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(tensor.device))

    def fetched() -> torch.Tensor:
        done.synchronize()
        return host

    return fetched


def on_device(value: Any, device: torch.device) -> Any:
    """Return a tensor on a device, itself if it is there; anything else as it is."""
    return value.to(device) if isinstance(value, torch.Tensor) else value
