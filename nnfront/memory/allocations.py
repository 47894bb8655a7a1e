# SPDX-License-Identifier: Apache-2.0
"""What an instruction does to memory: which results share memory with which operands, the memory it takes, its workspace.

A reference says so itself: it runs once on tensors without data (torch's meta device) while a meter counts what it allocates.
So a reshape is a view where the strides allow it and a copy where they do not, and what a reference holds in between is counted.
Kernels that are more than a reference make their results anew, and a table says what they hold besides.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nnfront.ir import OPS
from nnfront.lower import LayerLike
from nnfront.lower.instructions import PACK, Run
from nnfront.lower.reference import reference
from nnfront.memory.layout import Layer, Layout


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value that is no tensor, number or layer of a cache: it has no memory that is counted."""


# A tensor's `Layout`, a number, None, a `Layer`, an `Opaque`, or a tuple of these.
Operand: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Result:
    """One leaf of a result: its layout (None: no tensor), and what its memory is.

    `shares` are the operands whose memory it shares; `made` is the index among the memory that the instruction takes.
    """

    layout: Layout | None
    shares: tuple[int, ...] = ()
    made: int | None = None


@dataclass(frozen=True, slots=True)
class Footprint:
    """The results, the bytes of each piece of memory that they take, and the bytes that are held besides while it runs.

    `remembered` are bytes that the first of alike instructions leaves behind for the others, until the method returns.
    """

    results: tuple[Result, ...]
    made: tuple[int, ...]
    workspace: int
    remembered: int = 0


@dataclass(frozen=True, slots=True)
class Workspace:
    """What a kernel holds besides operands and results: functions from the instruction and its operands to bytes.

    `held` while it runs; `remembered`: left behind by the first of alike instructions until the method returns.
    """

    held: Callable[..., int]
    remembered: Callable[..., int] | None = None


@dataclass(frozen=True, slots=True)
class MemoryPolicy:
    """What a back end does with memory: `workspaces` of its kernels that are more than a reference, and whether a layer of a cache
    with a window is a ring of the window's tokens.
    """

    workspaces: Mapping[str, Workspace]
    ring_windows: bool = True


class Footprints:
    """Footprints by instruction, alike ones computed once."""

    def __init__(self, policy: MemoryPolicy) -> None:
        self.ring_windows = policy.ring_windows
        self._workspaces = policy.workspaces
        self._known: dict[tuple[Any, ...], Footprint] = {}

    def of(
        self,
        run: Run,
        operands: Sequence[Operand],
        sized: Mapping[str, Any],
        declared: Sequence[Layout | None],
    ) -> Footprint:
        """Return the footprint of an instruction; `declared` are the leaves of its result by their types, contiguous."""
        if run.op == PACK:
            return Footprint((Result(None, tuple(range(len(operands)))),), (), 0)
        key = (run.kernel, tuple(operands), *sized.items(), repr(run.attrs), tuple(declared))
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._footprint(run, operands, sized, declared)
        return found

    def _footprint(
        self,
        run: Run,
        operands: Sequence[Operand],
        sized: Mapping[str, Any],
        declared: Sequence[Layout | None],
    ) -> Footprint:
        rule = self._workspaces.get(run.kernel)
        if rule is not None:
            remembered = 0 if rule.remembered is None else rule.remembered(run, *operands)
            return _anew(declared, rule.held(run, *operands), remembered)
        if _is_plain(run, operands, declared):
            return _anew(declared, 0)
        op = OPS.get(run.kernel)
        if op is not None and (run.is_pure or op.writes) and not any(map(_is_opaque, operands)):
            try:
                return metered(run, operands, sized, declared)
            except RuntimeError:
                pass  # it looks at data, or sizes that are each the largest do not go together
        return _anew(declared, 0)


def _anew(declared: Sequence[Layout | None], workspace: int, remembered: int = 0) -> Footprint:
    """Every tensor of the result in memory of its own."""
    results: list[Result] = []
    made: list[int] = []
    for layout in declared:
        results.append(Result(layout, (), None if layout is None else len(made)))
        if layout is not None:
            made.append(layout.size_bytes)
    return Footprint(tuple(results), tuple(made), workspace, remembered)


def _is_plain(run: Run, operands: Sequence[Operand], declared: Sequence[Layout | None]) -> bool:
    """Whether the reference takes memory for its result alone, and makes it row by row.

    It is not metered, as the first computation on the meta device in a process loads torch's compiler.
    """
    op = OPS.get(run.kernel)
    if op is None or op.scratch or op.is_view or not all(map(_is_row_major, operands)):
        return False
    given = [x.dtype for x in operands if isinstance(x, Layout)]
    result = declared[0].dtype if declared[0] is not None else ""
    if run.kernel == "astype":  # to the dtype that it has already is the operand itself
        return given != [result]
    if run.kernel == "take":
        return given[1] == "int64"
    if run.kernel == "linear" and operands[2] is not None:
        return False
    # What has to be converted first is converted in memory of its own.
    is_one = isinstance(next(iter(operands), None), Layout) and set(given) == {given[0]} != {"bool"}
    return is_one and result in (given[0], "bool")


def _is_row_major(operand: Operand) -> bool:
    """Whether the axes of a tensor lie in memory in their order, gaps allowed; True for what is no tensor."""
    if not isinstance(operand, Layout):
        return not isinstance(operand, tuple)
    strides = [step for size, step in zip(operand.shape, operand.strides, strict=True) if size != 1]
    return all(strides) and all(a >= b for a, b in pairwise(strides))


def _is_opaque(operand: Operand) -> bool:
    return isinstance(operand, Opaque) or (isinstance(operand, tuple) and any(map(_is_opaque, operand)))


def metered(
    run: Run, operands: Sequence[Operand], sized: Mapping[str, Any], declared: Sequence[Layout | None]
) -> Footprint:
    """Run the reference on tensors without data and see what it allocates."""
    with torch.no_grad(), torch.device("meta"):
        tensors = [_without_data(operand) for operand in operands]
        owners: dict[int, list[int]] = {}
        for i, tensor in enumerate(tensors):
            for part in tree_leaves(tensor):
                if isinstance(part, torch.Tensor):
                    owners.setdefault(address_of(part), []).append(i)
        meter = Meter(owners)
        with meter:
            value = reference(run)(*tensors, **sized)
    leaves = tree_leaves(value) if run.result.fields else [value]
    made: dict[int, int] = {}
    sizes: list[int] = []
    results: list[Result] = []
    for leaf, layout in zip(leaves, declared, strict=False):
        if not isinstance(leaf, torch.Tensor):
            results.append(Result(layout))
            continue
        address = address_of(leaf)
        here = Layout(tuple(leaf.shape), leaf.stride(), str(leaf.dtype).removeprefix("torch."))
        if address not in owners and address not in made:
            made[address] = len(sizes)
            sizes.append(leaf.untyped_storage().nbytes())
        results.append(Result(here, tuple(owners.get(address, ())), made.get(address)))
    return Footprint(tuple(results), tuple(sizes), max(meter.peak - sum(sizes), 0))


def _without_data(operand: Operand) -> Any:
    if isinstance(operand, tuple):
        return tuple(map(_without_data, operand))
    if isinstance(operand, Layer):
        layer: LayerLike = _FullLayer(operand)
        return layer
    if not isinstance(operand, Layout):
        return operand
    return torch.empty_strided(operand.shape, operand.strides, dtype=getattr(torch, operand.dtype))


class _FullLayer:
    """A layer of a cache that holds all it can, without data: what references want of one."""

    def __init__(self, layer: Layer) -> None:
        self.window = layer.window
        self._batch = layer.batch
        self._stored = [_empty(layer.tokens_shape(b), b.dtype) for b in layer.type.per_token]
        self._fixed = {b.name: _empty((layer.batch, *b.shape), b.dtype) for b in layer.type.per_sequence}
        self._positions = _empty((layer.batch, layer.capacity), "int64")

    def positions(self, seq: int) -> torch.Tensor:
        return torch.empty(self._batch, seq, dtype=torch.int64)

    def last_positions(self, seq: int) -> torch.Tensor:
        return self.positions(seq)

    def append(self, *parts: torch.Tensor) -> None:
        """Its place is there already."""

    def stored(self, index: int) -> torch.Tensor:
        return self._stored[index]

    def key_positions(self) -> torch.Tensor:
        return self._positions

    def read(self, name: str) -> torch.Tensor:
        return self._fixed[name]

    def write(self, name: str, value: torch.Tensor, seq: int) -> None:
        self._fixed[name] = value.clone()


def _empty(shape: Sequence[int], dtype: str) -> torch.Tensor:
    return torch.empty(shape, dtype=getattr(torch, dtype))


def address_of(tensor: torch.Tensor) -> int:
    """Return what tensors that share memory have alike; those without data have it too."""
    address: int = tensor.untyped_storage()._cdata
    return address


class Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of tensors that are alive, those of `outside` and numbers left out."""

    def __init__(self, outside: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._outside = frozenset(outside)
        self._tensors: dict[int, int] = {}  # how many share each memory

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # To say yes to torch would mean that the first dispatch loads its compiler, 900 modules in 1.4 s.
        return False

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and (address := address_of(leaf)) not in self._outside:
                nbytes = leaf.untyped_storage().nbytes() if leaf.ndim else 0
                if address not in self._tensors:
                    self.live += nbytes
                self._tensors[address] = self._tensors.get(address, 0) + 1
                weakref.finalize(leaf, self._drop, address, nbytes)
        self.peak = max(self.peak, self.live)
        return value

    def _drop(self, address: int, nbytes: int) -> None:
        self._tensors[address] -= 1
        if not self._tensors[address]:
            del self._tensors[address]
            self.live -= nbytes
