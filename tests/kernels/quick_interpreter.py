# SPDX-License-Identifier: Apache-2.0
"""Triton's interpreter without what it does again and again: kernels take half of the time, and compute and refuse what they did.

A kernel of a test works on few numbers, so to make the types of its tensors anew with each operation takes longer than the operation.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np


def install() -> None:
    from triton.language import core, semantic
    from triton.runtime import interpreter

    _patch_once_a_launch(interpreter)
    _remember_types(core, interpreter)
    semantics = semantic.TritonSemantic
    # Where kernels are not debugged it throws away what it has found of every addition, by six operations of its own.
    semantics.binary_op_sanitize_overflow_impl = lambda *_: None
    broadcast = semantics.broadcast_impl_value

    def broadcast_unlike(self: Any, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        is_alike = a.is_block() and b.is_block() and a.shape.values == b.shape.values
        return (lhs, rhs) if is_alike else broadcast(self, lhs, rhs)

    semantics.broadcast_impl_value = broadcast_unlike


def _patch_once_a_launch(interpreter: Any) -> None:
    """Put its functions in the place of Triton's when a kernel starts, and not again with each function that the kernel calls.

    To look for what is to be replaced took half of the time that kernels took; it is looked for once in a process.
    """
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[str] = set()

    def once(function: Callable[..., Any]) -> Any:
        module = function.__globals__["__name__"]  # what is replaced depends on what its file imports
        if module in done:
            return None  # only a kernel takes back what was replaced, and it comes first
        done.add(module)
        return patch(function)

    def launched(*arguments: Any, **options: Any) -> None:
        done.clear()
        launch(*arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = once, launched
    inspect = interpreter.inspect
    remembered = {name: getattr(inspect, name) for name in dir(inspect)}
    interpreter.inspect = SimpleNamespace(**remembered | {"getmembers": cache(inspect.getmembers)})


def _remember_types(core: Any, interpreter: Any) -> None:
    """Make a type of blocks once, and what all tensors of it have in common."""
    begin, make, found = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    blocks: dict[tuple[Any, ...], Any] = {}
    by_name: dict[str, np.dtype[Any]] = {}

    def block(cls: type, element_ty: Any, shape: Any) -> Any:
        sizes = getattr(shape, "values", shape)
        key = type(element_ty), element_ty.name, *[getattr(size, "value", size) for size in sizes]
        if key not in blocks:
            blocks[key] = object.__new__(cls)
        return blocks[key]

    def begin_once(self: Any, element_ty: Any, shape: Any) -> None:
        if not hasattr(self, "numel"):
            begin(self, element_ty, shape)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        if hasattr(type, "of_tensors"):
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = type.of_tensors
        else:
            make(self, handle, type)
            type.of_tensors = self.numel, self.shape

    def np_dtype(type: Any) -> np.dtype[Any]:
        name = type.scalar.name
        if name not in by_name:
            by_name[name] = found(type)
        return by_name[name]

    core.block_type.__new__, core.block_type.__init__, core.tensor.__init__ = block, begin_once, tensor
    interpreter._get_np_dtype = np_dtype
