# SPDX-License-Identifier: Apache-2.0
"""A device that is not there: its tensors are on the CPU, and it copies as late or as soon as it may."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class FakeLink:
    """Copies queued for it run in order, as late as possible: when one of them is waited for. With `eager` they run at once.

    `fails` is called with each tensor that is made and each copy that is queued, and may raise. `device` are the tensors on it, if
    other links have put some there.
    """

    def __init__(
        self,
        *,
        eager: bool = False,
        fails: Callable[[str, int], None] | None = None,
        device: list[torch.Tensor] | None = None,
    ) -> None:
        self.eager = eager
        self.fails = fails or (lambda what, size: None)
        self.made: list[torch.Tensor] = [] if device is None else device
        self.slots: list[torch.Tensor] = []
        self.pending: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self.copies = 0
        self.waits = 0

    def holds(self, tensor: torch.Tensor) -> bool:
        here = tensor.untyped_storage().data_ptr()
        return any(here == made.untyped_storage().data_ptr() for made in self.made if made.numel())

    def pinned(self, size_bytes: int) -> torch.Tensor:
        self.fails("pinned", size_bytes)
        self.slots.append(torch.full((size_bytes,), 0xA5, dtype=torch.uint8))
        return self.slots[-1]

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(tuple(shape), dtype=dtype)
        self.fails("empty", made.nbytes)
        self.made.append(made)
        return made

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        self.fails("copy", source.nbytes)
        assert source.shape == target.shape
        assert source.dtype == target.dtype
        assert self._is_pinned(source), "the device copies from pinned memory only"
        self.copies += 1
        if self.eager:
            target.copy_(source)
        else:
            self.pending.append((self.copies, source, target))
        return self.copies

    def wait(self, copied: Any) -> None:
        self.waits += 1
        while self.pending and self.pending[0][0] <= copied:
            _, source, target = self.pending.pop(0)
            target.copy_(source)

    def _is_pinned(self, source: torch.Tensor) -> bool:
        here = source.untyped_storage().data_ptr()
        return any(here == slot.untyped_storage().data_ptr() for slot in self.slots)
