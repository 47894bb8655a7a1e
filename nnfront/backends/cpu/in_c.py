# SPDX-License-Identifier: Apache-2.0
"""A kernel in C as a function of tensors, the memory that it takes, and why it takes a call or not: all by how the tape writes its calls, so what it takes is said once.

That is asked with what is known at the time: of types when kernels have been chosen (`refusal`), of layouts when memory is planned (`besides`), of
tensors in a call (`in_c`), and of all that is in a row on a tape (`tape`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from types import MappingProxyType
from typing import Any

import torch

from nnfront.backends.cpu.decode_attention import PLACES, places
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.cpu.tape_builder import (
    MEMORY,
    LayerValue,
    Place,
    Refused,
    Tape,
    TapeBuilder,
    Value,
    Write,
)
from nnfront.backends.kernel import ACCEPTED, NOTHING, Accepts, Bind, Kernel, Rewrite, unchanged
from nnfront.dims import evaluate
from nnfront.lower import Run, Slot, StateLayerType, Structure, TensorType
from nnfront.lower.slots import dims_in
from nnfront.memory.allocations import Workspace, metered
from nnfront.memory.layout import Layer, Layout
from nnfront.memory.liveness import layer_of
from nnfront.state.layer import CacheLayer

# Elements up to which there are few: what is in pieces is copied, and torch's calls cost more than what they do.
FEW = 1 << 18
# So many shapes of operands are remembered.
KNOWN = 256


def in_c(write: Write, otherwise: Bind) -> Bind:
    """The function of a kernel: C for operands that `write` takes, `otherwise` for all others.

    A layer of a cache takes the tokens of the first operand [batch, seq, ...], and is the last result.
    """

    def bind(run: Run) -> Callable[..., Any]:
        general, known = otherwise(run), dict[Any, "Tape | None"]()
        one = run if run.outputs else replace(run, result=Structure(0))

        def call(*operands: Any, **sized: Any) -> Any:
            key = (torch.get_num_threads(), *map(_sizes, operands), *sized.values())
            if key not in known:
                if len(known) >= KNOWN:
                    known.clear()
                known[key] = written(write, one, operands, sized)
            tape, tensors, layers = known[key], _tensors(operands), _layers(operands)
            if tape is None or not all(map(_is_readable, tensors)):
                return general(*operands, **sized)
            memories: list[Any] = [*map(torch.Tensor.contiguous, tensors)]
            for layer in layers:
                storage = layer.reserve_tokens(operands[0].shape[1])
                if storage is None:
                    return general(*operands, **sized)
                memories += places(storage, layer)
            made = (*tape.run(memories), *layers)
            return made[0] if one.result.is_leaf else made

        return call

    return bind


def written(write: Write, run: Run, operands: tuple[Any, ...], sized: dict[str, Any]) -> Tape | None:
    """A tape of one call with tensors, and what is to be known of layers, as its memories; None where it is not for these operands."""
    if NATIVE is None:
        return None
    layers = MEMORY + 1 + len(_tensors(operands))
    tensor, layer = count(MEMORY + 1), count(layers, PLACES)
    values = [
        Value(Place(next(tensor)), tuple(x.shape), x.dtype)
        if isinstance(x, torch.Tensor)
        else LayerValue(x, next(layer))
        if isinstance(x, CacheLayer)
        else x
        for x in operands
    ]
    try:
        return _of_one(write, run, values, sized, layers + PLACES * len(_layers(operands)))
    except Refused:
        return None


def _of_one(write: Write, run: Run, values: Sequence[Any], sized: dict[str, Any], first: int) -> Tape:
    layers = sum(isinstance(value, LayerValue) for value in values)
    tensors = run.outputs[: len(run.outputs) - layers]
    builder = TapeBuilder(torch.get_num_threads(), {slot: first + i for i, slot in enumerate(tensors)})
    write(builder, run, *values, **sized)
    return builder.tape()


def kernel(
    name: str,
    op: str,
    write: Write,
    otherwise: Bind,
    why: str,
    accepts: Accepts | None = None,
    rewrite: Rewrite = unchanged,
    *,
    held: Callable[..., int] | None = None,
    remembered: Callable[..., int] | None = None,
    reads_back: bool = False,
) -> Kernel:
    """A kernel that is C for what `write` takes and `otherwise` for the rest, which hold what `held` and `remembered` say.

    `accepts` is what it is for altogether, if that is more than C is for.
    """
    workspace = None if held is None else besides(write, held, remembered)
    chosen = by_types(write) if accepts is None else accepts
    return Kernel(
        name, op, in_c(write, otherwise), why, chosen, rewrite, workspace, reads_back, write, in_rows=True
    )


def by_types(write: Write) -> Accepts:
    """Accept what C takes in some sizes: what there is of others goes the other way."""
    return lambda run, context: refusal(write, run, context.frame.slots, any_size=True)


def refusal(
    write: Write,
    run: Run,
    slots: Sequence[Slot],
    known: Mapping[str, int] = MappingProxyType({}),
    *,
    any_size: bool = False,
) -> str:
    """Why C does not take the smallest call of an instruction, which it takes if it takes any, or that with these dims, or with `any_size` its types;
    ACCEPTED if it does."""
    try:
        size = partial(_small, known=known, times=2 if any_size else 1)  # no size is 1 that can be another
        sized = {name: size(slots[i].value) for name, i in run.sized.items()}
        values = [_operand(slots[i], size) for i in run.inputs]
        write(TapeBuilder(torch.get_num_threads(), {}, any_size), run, *values, **sized)
    except Refused as refused:
        return str(refused).replace("torch.", "")
    return ACCEPTED


def _operand(slot: Slot, size: Callable[[Any], Any]) -> Any:
    """An operand of such sizes that a slot may hold."""
    if isinstance(slot.type, TensorType):
        shape = tuple(map(size, slot.type.shape))
        return Value(Place(MEMORY + 1), shape, getattr(torch, slot.type.dtype))
    if isinstance(slot.type, StateLayerType):
        return LayerValue(layer_of(slot.type, size, ring_windows=True), MEMORY + 1)
    if slot.kind not in ("constant", "dim", "size"):
        raise Refused("a number is computed")
    return size(slot.value)


def _small(size: Any, known: Mapping[str, int], times: int) -> Any:
    """A size, or several, where each dim that is not known is as small as it may be and not 0, or so many times that."""
    if isinstance(size, (tuple, list)):
        return tuple(_small(each, known, times) for each in size)
    symbols = [s for dim in dims_in(size) for s in dim.symbols]
    numbers = {s: known.get(s.name, times * int(max(s.low, s.divisor))) for s in symbols}
    return evaluate(size, numbers) if numbers else size


def besides(
    write: Write, otherwise: Callable[..., int], remembered: Callable[..., int] | None = None
) -> Workspace:
    """What a kernel holds: in C what its call is given besides results and copies of operands in pieces, else what the other way does, and what that leaves behind (`remembered`)."""

    def held(run: Run, *operands: Any, **sized: Any) -> int:
        tape = _planned(write, run, operands, sized)
        return otherwise(run, *operands) if tape is None else tape.size + sum(map(_copied, operands))

    def left(run: Run, *operands: Any) -> int:
        assert remembered is not None
        return remembered(run, *operands) if _planned(write, run, operands, {}) is None else 0

    return _InC(
        held,
        None if remembered is None else left,
        Workspace(lambda run, *operands, **sized: otherwise(run, *operands), remembered),
    )


@dataclass(frozen=True, slots=True)
class _InC(Workspace):
    """What a kernel holds, and what it would without C."""

    otherwise: Workspace = NOTHING


def without_c(kernel: Kernel) -> Kernel:
    """The kernel as it is on another device: what `in_c` does of tensors that are not on a CPU, and what that holds."""
    held = kernel.workspace
    return replace(
        kernel, write=None, in_rows=False, workspace=held.otherwise if isinstance(held, _InC) else held
    )


def _planned(write: Write, run: Run, operands: Sequence[Any], sized: dict[str, Any]) -> Tape | None:
    """The tape of a call with operands of these layouts; None where it takes the other way, as several tokens may that turn a ring over."""
    turns = any(isinstance(x, Layer) and x.window is not None for x in operands)
    if NATIVE is None or (turns and operands[0].shape[1] > 1):
        return None
    if any(isinstance(x, Layout) and x.count > FEW and not x.is_contiguous for x in operands):
        return None
    try:
        return _of_one(write, run, [*map(_value, operands)], sized, MEMORY + 1)
    except Refused:
        return None


def by_reference(run: Run, *operands: Any) -> int:
    """What an op's reference holds besides its results."""
    return metered(run, operands, {}, (None,) * len(run.outputs)).workspace


def _copied(operand: Any) -> int:
    """The bytes of an operand in one piece, where it lies in several."""
    return operand.size_bytes if isinstance(operand, Layout) and not operand.is_contiguous else 0


def _value(operand: Any) -> Any:
    if isinstance(operand, Layout):
        return Value(Place(MEMORY + 1), operand.shape, getattr(torch, operand.dtype))
    return LayerValue(operand, MEMORY + 1) if isinstance(operand, Layer) else operand


def _tensors(operands: Sequence[Any]) -> list[torch.Tensor]:
    return [x for x in operands if isinstance(x, torch.Tensor)]


def _layers(operands: Sequence[Any]) -> list[CacheLayer]:
    return [x for x in operands if isinstance(x, CacheLayer)]


def _sizes(operand: Any) -> Any:
    """What a tape goes by: of a layer how many tokens queries see."""
    if isinstance(operand, CacheLayer):
        return CacheLayer, operand.window
    return (operand.shape, operand.dtype) if isinstance(operand, torch.Tensor) else operand


def _is_readable(x: torch.Tensor) -> bool:
    return x.is_cpu and (x.is_contiguous() or x.numel() <= FEW)
