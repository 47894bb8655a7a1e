# SPDX-License-Identifier: Apache-2.0
"""A compiled model and its weights into an artefact: from values in memory, or streamed from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import torch

from nnfront.artefact.folder import write_artefact
from nnfront.artefact.manifest import Manifest, TextModel
from nnfront.artefact.tensor_names import (
    Places,
    Values,
    as_tensor,
    at_rank,
    memory_order,
    own_tensors,
    permuted,
    place_weights,
    renamed,
    tensor_type,
    tensors_of,
    weight_types,
)
from nnfront.backends.cuda.ahead.cubin import CompiledKernels
from nnfront.backends.registry import parts_of
from nnfront.dims import Symbol, evaluate
from nnfront.files import File
from nnfront.ir import IRModule, ScalarType, TensorType, admit, release, type_text
from nnfront.lower import MethodProgram, Program
from nnfront.transform.plan import plan_transform
from nnfront.transform.run import stream_transform, weight_dims
from nnfront.transform.source import Source, stored_type
from nnfront.weights.bound_checkpoint import BoundWeights
from nnfront.weights.write import SHARD_BYTES


@dataclass(frozen=True, slots=True)
class Extras:
    """What an artefact may hold beyond program and weights: what it takes to generate text, and files to copy."""

    text: TextModel | None = None
    files: tuple[File, ...] = ()


@dataclass(frozen=True, slots=True)
class Options:
    """How to write: the size of shards, for which sizes of calls kernels are compiled, and who is told what.

    `sizes` are numbers by the name of a dim, and of `earlier`, how many tokens a cache holds; for others it is all that kernels tell
    apart; `compiled` is told how many kernels of how many are compiled. `plan` is told the most memory, in bytes, that the weights will take at once, before anything is written; `progress` how
    many bytes of how many are written; `phase` the name of each phase when it ends.
    """

    shard_bytes: int = SHARD_BYTES
    sizes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    compiled: Callable[[int, int], None] | None = None
    plan: Callable[[int], None] = lambda peak_bytes: None
    progress: Callable[[int, int], None] | None = None
    phase: Callable[[str], None] = lambda name: None


_DEFAULT = Options()


def save_values(
    folder: Path,
    ir: IRModule,
    program: Program,
    values: Values,
    dims: Mapping[Symbol, int],
    extras: Extras,
    options: Options = _DEFAULT,
    kernels: CompiledKernels | None = None,
) -> None:
    """Write weights that are in memory; `values` are those of each origin. Raises LoadError as `write_artefact` does."""
    places = place_weights(program, dims)
    types = {name: stored_type(tensor) for name, tensor in tensors_of(program, places, values)}
    orders = {name: memory_order(tensor) for name, tensor in tensors_of(program, places, values)}
    contents = _Contents(places, types, orders, tensors_of(program, places, values), dims)
    _write(folder, ir, program, contents, extras, options, kernels)


def save_stream(
    folder: Path,
    ir: IRModule,
    programs: Sequence[Program],
    sources: Sequence[BoundWeights],
    extras: Extras,
    options: Options = _DEFAULT,
    kernels: CompiledKernels | None = None,
) -> None:
    """Write weights as their transforms make them from a checkpoint: each is written and let go of before the next is begun. Of ranks each has a program
    and its part of the checkpoint, and files of its own.

    Raises LoadError as `write_artefact` does, and if a weight cannot be read.
    """
    ranks = list(zip(programs, sources, strict=True))
    peaks = (plan_transform(t, source).peak_bytes for p, source in ranks for t in p.used_transforms.values())
    options.plan(max(peaks, default=0))
    dims = sources[0].found.dims
    places = place_weights(programs[0], dims)
    own = own_tensors(programs, places, dims)
    common = {stored for names in places.values() for stored in names.values()} - own
    groups = [(0, _first_of_each(places, without=own))]
    groups += [
        (rank, _first_of_each(at_rank(places, own, rank), without=common))
        for rank in range(len(ranks) if own else 0)
    ]
    types: dict[str, TensorType] = {}
    orders: dict[str, tuple[int, ...]] = {}
    begins, streams = set[str](), []
    for rank, names in groups:
        found = _types(*ranks[rank], names, orders)
        begins |= {*list(found)[:1]}
        types |= found
        streams.append(_streamed(programs[rank], names, sources[rank]))
    contents = _Contents(places, types, orders, chain.from_iterable(streams), dims, len(ranks), begins)
    _write(folder, ir, programs[0], contents, extras, options, kernels)


def _types(
    program: Program, source: BoundWeights, names: Places, orders: dict[str, tuple[int, ...]]
) -> dict[str, TensorType]:
    """The types of tensors to store; in which order their axes will lie is put into `orders`."""
    dims = source.found.dims
    types = {
        stored: TensorType(tuple(evaluate(size, dims) for size in type.shape), type.dtype)
        for stored, type in _raw_types(program, names).items()
    }
    for origin, transform in program.used_transforms.items():
        found = result_types(transform, weight_dims(transform, source))
        types |= {stored: found[name] for name, stored in names[origin].items()}
        planned = _planned_orders(transform, source)
        orders |= {stored: planned[name] for name, stored in names[origin].items() if name in planned}
    return types


@dataclass(frozen=True, slots=True)
class _Contents:
    """What is to be stored: types and orders of tensors by name, the tensors, the sizes that weights have said, for how many ranks, and which tensors begin a file."""

    places: Places
    types: Mapping[str, TensorType]
    orders: Mapping[str, tuple[int, ...]]
    tensors: Iterable[tuple[str, torch.Tensor]]
    dims: Mapping[Symbol, int]
    ranks: int = 1
    begins: Collection[str] = ()


def _write(
    folder: Path,
    ir: IRModule,
    program: Program,
    contents: _Contents,
    extras: Extras,
    options: Options,
    kernels: CompiledKernels | None,
) -> None:
    orders = {name: order for name, order in contents.orders.items() if order != tuple(range(len(order)))}
    manifest = Manifest(
        parts_of(program.target).without_number,
        {name: _signature(method) for name, method in program.methods.items()},
        {symbol.name: number for symbol, number in contents.dims.items() if not symbol.uid},
        {},
        renamed(contents.places),
        orders,
        extras.text,
        contents.ranks,
    )
    text = release(ir)
    admit(text)  # what could not be read back is better refused now
    write_artefact(
        folder,
        manifest,
        text,
        {name: permuted(t, orders.get(name, range(t.ndim))) for name, t in contents.types.items()},
        ((name, t.permute(orders[name]) if name in orders else t) for name, t in contents.tensors),
        kernels=kernels,
        copies=extras.files,
        shard_bytes=options.shard_bytes,
        begins=contents.begins,
        progress=options.progress,
        phase=options.phase,
    )


def _signature(method: MethodProgram) -> str:
    arguments = ", ".join(f"{a.name}: {type_text(a.type)}" for a in method.arguments)
    return f"{method.name}({arguments})"


def _first_of_each(places: Places, without: Collection[str] = ()) -> dict[str, dict[str, str]]:
    """The places without those of tensors that an earlier one stores, and of some others."""
    done = set(without)
    found: dict[str, dict[str, str]] = {}
    for origin, names in places.items():
        found[origin] = {}
        for name, stored in names.items():
            if stored not in done:
                done.add(stored)
                found[origin][name] = stored
    return found


def _raw_types(program: Program, names: Places) -> dict[str, TensorType]:
    types = weight_types(program)[""]
    return {stored: tensor_type(types[name]) for name, stored in names[""].items()}


def _streamed(program: Program, names: Places, source: BoundWeights) -> Iterator[tuple[str, torch.Tensor]]:
    for name, stored in names[""].items():
        yield stored, source.tensor(name)
    types = weight_types(program)
    for origin, transform in program.used_transforms.items():
        for name, value in stream_transform(transform, source, only=names[origin]):
            yield names[origin][name], as_tensor(types[origin][name], value)
            del value  # or it would live until the next result is there


def result_types(program: MethodProgram, dims: Mapping[Symbol, int]) -> dict[str, TensorType]:
    """Return the types of a transform's results, sizes as numbers."""
    types = {}
    for name, slot in program.results.items():
        type = program.slots[slot].type
        if isinstance(type, ScalarType):
            types[name] = TensorType((), type.dtype)
            continue
        assert isinstance(type, TensorType), f"result {name!r} is no tensor"
        types[name] = TensorType(tuple(evaluate(size, dims) for size in type.shape), type.dtype)
    return types


class _Shapes(Source):
    """Tensors without data: what is made of them has strides and nothing else."""

    def __init__(self, source: BoundWeights) -> None:
        self.source = source

    def info(self, name: str) -> TensorType:
        return self.source.info(name)

    def tensor(self, name: str) -> torch.Tensor:
        type = self.info(name)
        return torch.empty([int(n) for n in type.shape], dtype=getattr(torch, type.dtype), device="meta")


def _planned_orders(transform: MethodProgram, source: BoundWeights) -> dict[str, tuple[int, ...]]:
    """Return in which order each result's axes will lie in memory, so that it is stored as it would be held.

    Results behind a kernel that needs data have none: they are stored row by row, which is as right, and only another layout.
    """
    found = {}
    try:
        for name, value in stream_transform(transform, _Shapes(source)):
            if isinstance(value, torch.Tensor):
                found[name] = memory_order(value)
    except (NotImplementedError, RuntimeError):
        pass
    return found
