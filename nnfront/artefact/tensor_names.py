# SPDX-License-Identifier: Apache-2.0
"""Which tensor of an artefact is which weight of a program.

A weight comes from an origin: "" for those that methods read as the checkpoint has them, else the name of the transform whose result
it is. Weights with the same formula over the same checkpoint are one tensor, whatever transforms they come from.

Of a program for ranks each has tensors of its own, `NAME@RANK`; what has the same formula on all of them is one tensor for all, under its own name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from nnfront.dims import Symbol
from nnfront.errors import LoadError
from nnfront.ir import ScalarType, TensorType, Type
from nnfront.lower import RANK, MethodProgram, Program, of_rank, world_of
from nnfront.transform.content_keys import result_keys, weight_key
from nnfront.weights.check import check_weights
from nnfront.weights.checkpoint import Checkpoint

Places: TypeAlias = Mapping[str, Mapping[str, str]]
"""Origin, then the weight's name, to the name of its tensor."""
Values: TypeAlias = Mapping[str, Mapping[str, Any]]
"""Origin, then the weight's name, to its value: a tensor, or a number for a dim."""
Orders: TypeAlias = Mapping[str, tuple[int, ...]]
"""Name of a tensor to its axes as they are stored, where that is not their own order."""


def rank_programs(program: Program) -> list[Program]:
    """Return what each rank runs of a program; of one for a single process that itself. Raises LoadError for what one of several ranks runs."""
    world = world_of(program)
    if world == 1:
        return [program]
    if not any(w.name == RANK for m in program.transforms.values() for w in m.weights):
        raise LoadError(
            f"this is what one of {world} ranks runs",
            help="take what all of them run, before of_rank",
        )
    return [of_rank(program, rank) for rank in range(world)]


def own_tensors(programs: Sequence[Program], places: Places, dims: Mapping[Symbol, int]) -> set[str]:
    """Return the tensors of which each rank has one of its own, by their names without a rank: what it is made of differs, or cannot be told."""
    if len(programs) == 1:
        return set()
    own = set()
    for origin in programs[0].used_transforms:
        one, two = (
            result_keys(program.transforms[origin], set(places[origin]), lambda name: name, dims)
            for program in programs[:2]
        )
        own |= {s for name, s in places[origin].items() if name not in one or one[name] != two.get(name)}
    return own


def at_rank(places: Places, own: Collection[str], rank: int) -> dict[str, dict[str, str]]:
    """Return where the weights of a rank are."""
    return {
        origin: {name: own_name(stored, rank) if stored in own else stored for name, stored in names.items()}
        for origin, names in places.items()
    }


def of_all_ranks(programs: Sequence[Program], places: Places, dims: Mapping[Symbol, int]) -> Places:
    """Return where the weights of all ranks are; those of which each has its own are named `NAME@RANK`."""
    own = own_tensors(programs, places, dims)
    return {
        origin: {
            own_name(name, rank) if stored in own else name: place[name]
            for rank in range(len(programs))
            for place in [at_rank({origin: names}, own, rank)[origin]]
            for name, stored in names.items()
        }
        for origin, names in places.items()
    }


def own_name(stored: str, rank: int) -> str:
    """What a rank's own tensor is called."""
    return f"{stored}@{rank}"


def is_for(stored: str, rank: int) -> bool:
    """Whether a rank reads a tensor, of an artefact for several."""
    _, _, owner = stored.rpartition("@")
    return owner in (stored, str(rank))


def place_weights(program: Program, dims: Mapping[Symbol, int]) -> dict[str, dict[str, str]]:
    """Name the tensors to store: the weight's own name, unless another weight has it. `dims` are the sizes that weights have said."""
    by_key: dict[str, str] = {}
    taken: set[str] = set()
    places: dict[str, dict[str, str]] = {}
    for origin, types in weight_types(program).items():
        keys = (
            result_keys(program.transforms[origin], set(types), lambda name: name, dims)
            if origin
            else {name: weight_key(name) for name in types}
        )
        places[origin] = {}
        for name in types:
            stored = by_key.get(keys.get(name, ""))
            if stored is None:
                stored = name if name not in taken else f"{origin}.{name}"
                while stored in taken:
                    stored += "_"
                taken.add(stored)
                if name in keys:
                    by_key[keys[name]] = stored
            places[origin][name] = stored
    return places


def renamed(places: Places) -> dict[str, dict[str, str]]:
    """Return the part of the places where weight and tensor have different names: all that has to be written down."""
    found = {o: {name: s for name, s in names.items() if s != name} for o, names in places.items()}
    return {origin: names for origin, names in found.items() if names}


def restored(program: Program, written: Places) -> dict[str, dict[str, str]]:
    """Return all places, from those that were written down. Raises LoadError for one that is no weight of the program."""
    places = {o: {name: name for name in types} for o, types in weight_types(program).items()}
    for origin, names in written.items():
        for name, stored in names.items():
            if name not in places.get(origin, {}):
                raise LoadError(
                    f"the manifest places {name!r} of {origin!r}, which the program does not have"
                )
            places[origin][name] = stored
    return places


def weight_types(program: Program) -> dict[str, dict[str, Type]]:
    """Return the declared type of each weight that methods read, by origin. Raises LoadError for one whose origin does not have it."""
    raw: dict[str, Type] = {}
    for method in program.methods.values():
        raw |= {w.name: w.type for w in method.weights if w.role == "weight" and w.name not in raw}
    types = {"": raw}
    for name, transform in program.used_transforms.items():
        types[name] = {n: _type(transform, slot) for n, slot in transform.results.items()}
    for method in program.methods.values():
        results = types.get(method.transform or "", {})
        for weight in method.weights:
            if weight.role == "transformed" and _kind(results.get(weight.name)) != _kind(weight.type):
                raise LoadError(
                    f"{method.name}: no transform gives the weight {weight.name!r} as it is declared"
                )
    return types


def read_weights(
    program: Program,
    places: Places,
    orders: Orders,
    tensors: Checkpoint,
    dims: Mapping[Symbol, int],
    rank: int | None = None,
) -> tuple[dict[str, dict[str, Any]], dict[Symbol, int]]:
    """Map the tensors of an artefact. Returns the values, and the dims that their shapes say; `dims` are known without them. Those of other ranks
    than `rank` are left alone.

    Raises LoadError that lists all tensors that are missing, left over, or not of the declared type.
    """
    types = weight_types(program)
    wanted: dict[str, TensorType] = {}
    for origin, names in places.items():
        for name, stored in names.items():
            type = tensor_type(types[origin][name])
            wanted.setdefault(stored, permuted(type, _checked_order(orders, stored, type)))
    infos = {name: i for name, i in tensors.infos.items() if rank is None or is_for(name, rank)}
    found = check_weights(wanted, infos, dims=dims)
    if not found.fits:
        raise LoadError("the weights are not those that the program declares", details=found.lines())
    loaded = {stored: _restored(tensors[stored], orders.get(stored)) for stored in wanted}
    values = {
        origin: {n: _value(types[origin][n], loaded[stored]) for n, stored in names.items()}
        for origin, names in places.items()
    }
    return values, dict(found.dims)


def memory_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the axes in the order in which they lie in memory, in which the tensor is stored; as they are if it has gaps."""
    own = tuple(range(tensor.ndim))
    if tensor.is_contiguous():
        return own
    order = tuple(sorted(own, key=tensor.stride, reverse=True))
    return order if tensor.permute(order).is_contiguous() else own


def permuted(type: TensorType, order: Sequence[int]) -> TensorType:
    """Return the type of a tensor with its axes in another order."""
    return TensorType(tuple(type.shape[axis] for axis in order), type.dtype)


def tensors_of(program: Program, places: Places, values: Values) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor to store, once, with its name, its axes in their own order."""
    types = weight_types(program)
    done: set[str] = set()
    for origin, names in places.items():
        for name, stored in names.items():
            if stored not in done:
                done.add(stored)
                yield stored, as_tensor(types[origin][name], values[origin][name])


def as_tensor(type: Type, value: Any) -> torch.Tensor:
    """Return a tensor; a number becomes one without axes."""
    if isinstance(value, torch.Tensor):
        return value
    return torch.tensor(value, dtype=getattr(torch, tensor_type(type).dtype))


def tensor_type(type: Type) -> TensorType:
    """Return the type under which a weight is stored; that of a number has no axes."""
    if isinstance(type, ScalarType):
        return TensorType((), type.dtype)
    if not isinstance(type, TensorType):
        raise LoadError("a weight is neither a tensor nor a number, so it cannot be stored")
    return type


def _type(transform: MethodProgram, slot: int) -> Type:
    type = transform.slots[slot].type
    if type is None:
        raise LoadError(f"{transform.name}: a result is neither a tensor nor a number")
    return type


def _kind(type: Type | None) -> object:
    """What of a type does not depend on the names of dims."""
    if isinstance(type, TensorType):
        return type.dtype, type.ndim
    return type.dtype if isinstance(type, ScalarType) else None


def _checked_order(orders: Orders, stored: str, type: TensorType) -> tuple[int, ...]:
    order = orders.get(stored, tuple(range(type.ndim)))
    if sorted(order) != list(range(type.ndim)):
        raise LoadError(f"the manifest stores {stored!r} with axes {list(order)}, but it has {type.ndim}")
    return order


def _restored(tensor: torch.Tensor, order: Sequence[int] | None) -> torch.Tensor:
    """The tensor with its axes in their own order."""
    return tensor if order is None else tensor.permute(sorted(range(len(order)), key=lambda i: order[i]))


def _value(type: Type, tensor: torch.Tensor) -> Any:
    return tensor.item() if isinstance(type, ScalarType) else tensor
