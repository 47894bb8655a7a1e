# SPDX-License-Identifier: Apache-2.0
"""Watch the interpreter's memory accesses: which addresses, and in which order blocks run.

The interpreter reads raw memory; a load beyond a tensor whose value is masked off later goes unseen there, and on a GPU
it may fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from triton import knobs
from triton.runtime import InterpreterError, interpreter


class _Watched:
    """The interpreter's native module, with a check of the addresses before each access."""

    def __init__(self, native: Any, tensors: list[torch.Tensor]) -> None:
        self.native = native
        spans = [(t.data_ptr(), t.data_ptr() + _extent(t)) for t in tensors if t.numel()]
        self.first = np.array([first for first, _ in spans], dtype=np.uint64)
        self.end = np.array([end for _, end in spans], dtype=np.uint64)

    def load(self, pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self.check("load", pointers, mask)
        return self.native.load(pointers, mask, other, dtype)

    def store(self, pointers: Any, value: Any, mask: Any) -> Any:
        self.check("store", pointers, mask)
        return self.native.store(pointers, value, mask)

    def check(self, access: str, pointers: Any, mask: Any) -> None:
        used = pointers[np.broadcast_to(mask, pointers.shape)].reshape(-1, 1)
        inside = ((used >= self.first) & (used < self.end)).any(axis=1)
        assert inside.all(), f"{access} of {int((~inside).sum())} elements outside every tensor of the launch"

    def __getattr__(self, name: str) -> Any:
        return getattr(self.native, name)


def _extent(tensor: torch.Tensor) -> int:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


@contextmanager
def watched(arguments: dict[str, Any], backwards: bool = False) -> Iterator[None]:
    """Allow accesses to the tensors of a plan only; `backwards` runs the blocks of the grid last to first.

    In the interpreter's own order the blocks that share a tile run one after the other; backwards they run far apart.
    """
    if not knobs.runtime.interpret:  # a GPU has no such hook
        yield
        return
    tensors = [getattr(value, "base", value) for value in arguments.values()]
    native, builder = interpreter._interpreter, interpreter.interpreter_builder
    set_grid_idx = builder.set_grid_idx
    interpreter._interpreter = _Watched(native, [t for t in tensors if isinstance(t, torch.Tensor)])

    def last_to_first(x: int, y: int, z: int) -> None:
        width, height, depth = builder.grid_dim
        z, left = divmod(width * height * depth - 1 - ((x * height + y) * depth + z), width * height)
        set_grid_idx(*divmod(left, height), z)

    if backwards:
        builder.set_grid_idx = last_to_first
    try:
        yield
    except InterpreterError as error:
        # Each function called in a kernel wraps what happens in it once more; an assertion of ours counts as one.
        cause: BaseException | None = error
        while isinstance(cause, InterpreterError):
            cause = cause.__cause__
        raise (cause if isinstance(cause, AssertionError) else error) from None
    finally:
        interpreter._interpreter = native
        builder.set_grid_idx = set_grid_idx
