# SPDX-License-Identifier: Apache-2.0
"""Run a weight transform: each weight is read just before it is needed and dropped just after.

A result that is whole weights in a row (a fused QKV) is asked of the source in one piece, which maps or reads the parts into
their places; a result that is a weight, or a view of one, stays one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from nnfront.backends.table import others, resolver
from nnfront.dims import Symbol, evaluate
from nnfront.errors import LoadError, RunError
from nnfront.lower import Block, Match, MethodProgram, Run, TensorType
from nnfront.quant_format import FORMATS, BlockLayout
from nnfront.runtime.bind_arguments import observed, titles
from nnfront.runtime.bind_arguments import resolve as resolve_dims
from nnfront.runtime.execute import Frame, execute, initial_frame, prepare
from nnfront.transform.blockwise import run_in_blocks, works_on_rows
from nnfront.transform.schedule import Fetch, Give, Step, schedule
from nnfront.transform.source import Source, as_source

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc only


def run_transform(
    program: MethodProgram,
    source: Source | Mapping[str, torch.Tensor],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Return the transform's results by name: tensors, and numbers for dims. `progress` is told how many steps of how many have run.

    Raises LoadError if a weight cannot be read or the sizes of weights contradict each other.
    """
    found = dict(stream_transform(program, source, progress=progress))
    return {name: found[name] for name in program.results}


def stream_transform(
    program: MethodProgram,
    source: Source | Mapping[str, torch.Tensor],
    *,
    only: Collection[str] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[tuple[str, Any]]:
    """Yield each result (or those named in `only`) with its name as soon as it is finished.

    What the caller lets go of is given back before the next result is begun.
    """
    weights = as_source(source)
    steps = schedule(program, only)
    dims = weight_dims(program, weights)
    frame = _initial_frame(program, dims)
    slots, resolve = dict(_dim_slots(program)), resolver(program.target)
    has_computed = False
    for done, step in enumerate(steps, 1):
        with torch.no_grad():
            if isinstance(step.action, Fetch):
                frame[step.action.slot] = _fetch(program, weights, step.action, dims)
            elif isinstance(step.action, Run) and _is_blockwise(program.target, step.action, frame):
                has_computed = True
                _run_in_blocks(resolve(step.action), step.action, frame)
            elif not isinstance(step.action, Give):
                has_computed = True
                execute(prepare(Block((step.action,)), program.slots, resolve, slots, program.name), frame)
            if isinstance(step.action, Run) and step.action.op.startswith("quantize"):
                _check_scales(step.action, frame)
        if progress is not None:
            progress(done, len(steps))
        if isinstance(step.action, Give):
            yield step.action.name, _released(frame, step)
            if has_computed:
                _give_back()
            has_computed = False
        else:
            _free(frame, step)


def _give_back() -> None:
    """Give free memory back to the system, so that the peak is what is held and not what the C library keeps.

    glibc keeps what is freed below 32 MB, and cannot always use it again for aligned tensors: over 24 layers of a 450 MB checkpoint
    that were 70 MB and growing, at a cost of under a millisecond each to give back (November 2026).
    """
    if _trim is not None:
        _trim(0)


def weight_dims(program: MethodProgram, source: Source) -> dict[Symbol, int]:
    """Return the dims that weights bind, from their shapes. Raises LoadError if two weights contradict each other."""
    if not program.dims:
        return {}
    found = [item for w in program.weights for item in observed(w, source.info(w.name).shape)]
    try:
        known = resolve_dims(titles(program), found, program.dims, {})
    except RunError as error:
        raise LoadError(error.what, details=error.details) from None
    return {symbol: number for symbol, (number, _) in known.items()}


def _initial_frame(program: MethodProgram, dims: Mapping[Symbol, int]) -> Frame:
    frame = initial_frame(program.slots)
    for binding in program.dims:
        frame[binding.slot] = dims[binding.symbol]
    sizes = Block((), sizes=program.body.sizes)
    execute(
        prepare(sizes, program.slots, resolver(program.target), dict(_dim_slots(program)), program.name),
        frame,
    )
    return frame


def _dim_slots(program: MethodProgram) -> Iterator[tuple[Symbol, int]]:
    yield from ((b.symbol, b.slot) for b in program.dims)
    for instruction in program.body.walk():
        if isinstance(instruction, Match):
            yield from instruction.defines


def shape_of(type: TensorType, dims: Mapping[Symbol, int]) -> list[int]:
    """The shape of a tensor with numbers for its dims."""
    return [evaluate(size, dims) for size in type.shape]


def _fetch(program: MethodProgram, source: Source, fetch: Fetch, dims: Mapping[Symbol, int]) -> torch.Tensor:
    type = program.slots[fetch.slot].type
    assert isinstance(type, TensorType), f"weight {fetch.names} is no tensor"
    names, shape = fetch.names, shape_of(type, dims)
    if fetch.part is not None:
        axis = fetch.part.axis
        part = source.part(names[0], axis, fetch.part.ranges(int(source.info(names[0]).shape[axis])))
        if part.shape[axis] < shape[axis]:  # the last one: the rest is zeros
            whole = part.new_zeros(shape)
            whole.narrow(axis, 0, part.shape[axis]).copy_(part)
            part = whole
        return part
    value = source.tensor(names[0]) if len(names) == 1 else source.joined(names)
    return value.reshape(shape)


def _is_blockwise(target: str, run: Run, frame: Frame) -> bool:
    first = frame[run.inputs[0]] if run.inputs else None
    return isinstance(first, torch.Tensor) and works_on_rows(run, first.shape) and not others(target, run)


def _run_in_blocks(call: Callable[..., Any], run: Run, frame: Frame) -> None:
    keywords = {name: frame[slot] for name, slot in run.sized.items()}
    values = run_in_blocks(call, [frame[slot] for slot in run.inputs], keywords)
    for slot, value in zip(run.outputs, values, strict=True):
        frame[slot] = value


def _check_scales(run: Run, frame: Frame) -> None:
    """Refuse a weight with elements that are no finite numbers: a group with one of them would be NaN in few bits."""
    format = FORMATS.get(run.attrs.get("format", ""))
    q, *others = run.outputs
    at = others[0] if others else run.inputs[-1]  # which were given
    scales: torch.Tensor = _units(frame[q], format.block) if format and format.block else frame[at]
    wrong = (
        scales == len(format.scale_values) - 1
        if format is not None and format.scale_values
        else ~scales.float().isfinite()
    )
    if wrong.any():
        raise LoadError(
            "a weight that is to be quantised holds NaN or infinities",
            where=run.module,
            help="load the model without quantising this weight, or correct the checkpoint",
        )


def _units(q: torch.Tensor, block: BlockLayout) -> torch.Tensor:
    """The float16 in each block that its scales are multiples of."""
    whole = q.shape[-1] // block.bytes * block.bytes
    parts = [q[..., :whole].reshape(*q.shape[:-1], whole // block.bytes, block.bytes), q[..., None, whole:]]
    places = torch.tensor([block.unit, block.unit + 1])
    return torch.cat(
        [part[..., places].view(torch.float16).flatten() for part in parts if part.shape[-1] * part.shape[-2]]
    )


def _free(frame: Frame, step: Step) -> None:
    for slot in step.frees:
        frame[slot] = None


def _released(frame: Frame, step: Step) -> Any:
    """Return a result; the frame lets go of it if nothing else needs it, so that only the caller holds it."""
    assert isinstance(step.action, Give)
    value = frame[step.action.slot]
    _free(frame, step)
    return value
