# SPDX-License-Identifier: Apache-2.0
"""What several processes, the ranks, compute together, and the part of a weight that one of them holds.

Ranks run one program, on the same inputs. How many there are is part of it; which of them a process is, is known to weights alone: `shard` takes it
as an operand, the weight of the name `RANK`, which no checkpoint holds. Each collective is a meeting: every rank comes to it, in the same
order. So they are effects, which passes neither drop nor merge nor reorder.

On a CPU and on a GPU they run through `torch.distributed`'s default group, in place, with the back end that it was made with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeAlias

import torch
import torch.distributed as dist

from nnfront.dims import Size, ceildiv, divides
from nnfront.errors import RunError
from nnfront.ir.op import op
from nnfront.ir.print_types import type_text
from nnfront.ir.types import TensorType
from nnfront.ops.rules import Axis, integer, require

RANK = "rank"
"""The weight, int64[], that says which rank a process is."""


class LostRank(RunError):
    """A rank did not come to a collective: it has ended, hangs, or cannot be reached."""


Blocks: TypeAlias = Sequence[Sequence[int]]
World: TypeAlias = Annotated[int, lambda value, *_: _world(value)]


@op(stricter="an axis that does not divide is filled up with zeros", moves=True, dtype_policy="follow")
def shard(
    x: TensorType, rank: TensorType, axis: Axis, world: World, blocks: Blocks | None = None
) -> TensorType:
    """The part of a weight that a rank of `world` holds: x cut along `axis` into `world` equal ones; what is short at the end is filled up with zeros.

    blocks: (size, parts) of what x holds one after the other along the axis, each cut for itself, such as queries, keys and values. With fewer parts
    than ranks, neighbours hold the same one.
    """
    require(rank.dtype == "int64" and not rank.shape, "the rank must be int64[], got {}", type_text(rank))
    size: Size = ceildiv(x.shape[axis], world)
    if blocks is not None:
        whole = sum(each for each, _ in blocks)
        require(x.shape[axis] == whole, "axis {} has size {}, its blocks {}", axis, x.shape[axis], whole)
        size = sum(each // parts for each, parts in blocks)
    return TensorType((*x.shape[:axis], size, *x.shape[axis + 1 :]), x.dtype)


@shard.normalize
def _(world: int, blocks: Blocks | None) -> dict[str, Any]:
    if blocks is not None:
        blocks = tuple((integer(size, "a block"), integer(parts, "its parts")) for size, parts in blocks)
        for size, parts in blocks:
            require(parts >= 1 and world % parts == 0, "{} parts do not divide {} ranks", parts, world)
            require(
                size >= 0 and size % parts == 0, "a block of {} does not divide into {} parts", size, parts
            )
    return {"blocks": blocks}


@shard.reference
def _(x: torch.Tensor, rank: torch.Tensor, axis: int, world: int, blocks: Blocks | None) -> torch.Tensor:
    found = [x.narrow(axis, a, b - a) for a, b in ranges(x.shape[axis], int(rank), world, blocks)]
    short = 0 if blocks is not None else -(-x.shape[axis] // world) - found[0].shape[axis]
    if short:
        found.append(x.new_zeros((*x.shape[:axis], short, *x.shape[axis + 1 :])))
    return torch.cat(found, axis)


def ranges(size: int, rank: int, world: int, blocks: Blocks | None) -> list[tuple[int, int]]:
    """Where what `shard` takes of an axis of this size begins and ends, block by block."""
    if blocks is None:
        each = -(-size // world)
        return [(min(rank * each, size), min((rank + 1) * each, size))]
    found, start = [], 0
    for whole, parts in blocks:
        each, index = whole // parts, rank * parts // world
        found.append((start + index * each, start + (index + 1) * each))
        start += whole
    return found


@op(is_pure=False, collective=True, stricter="truths have no sum", dtype_policy="follow")
def all_reduce(x: TensorType, world: World) -> TensorType:
    """The sum of what each of `world` ranks has here; every rank gets it, bit for bit the same."""
    require(x.dtype != "bool", "bool has no sum", help="cast with astype first")
    return x


@all_reduce.reference
def _(x: torch.Tensor, world: int) -> torch.Tensor:
    y = x.clone(memory_format=torch.contiguous_format)
    _meet("all_reduce", world, dist.all_reduce, y)
    return y


@op(is_pure=False, collective=True, stricter="an empty vector has one axis", dtype_policy="follow")
def all_gather(x: TensorType, axis: Axis, world: World) -> TensorType:
    """What each of `world` ranks has here, one after the other along `axis`; every rank gets all."""
    return TensorType((*x.shape[:axis], x.shape[axis] * world, *x.shape[axis + 1 :]), x.dtype)


@all_gather.reference
def _(x: torch.Tensor, axis: int, world: int) -> torch.Tensor:
    found = list(x.new_empty((world, *x.shape))) if world > 1 else [x]
    _meet("all_gather", world, dist.all_gather, found, x.contiguous())
    return torch.cat(found, axis)


@op(is_pure=False, collective=True, stricter="axis 0 must divide into equal parts", dtype_policy="follow")
def all_to_all(x: TensorType, world: World) -> TensorType:
    """Cut x along axis 0 into `world` parts and give part i to rank i; the result is what each rank gave to this one, in their order."""
    require(x.ndim > 0, "x has no axis to cut")
    require(
        divides(world, x.shape[0]) is True, "axis 0 of size {} is not cut into {} parts", x.shape[0], world
    )
    return x


@all_to_all.reference
def _(x: torch.Tensor, world: int) -> torch.Tensor:
    y = x.clone(memory_format=torch.contiguous_format)
    _meet("all_to_all", world, dist.all_to_all_single, y, x.contiguous())
    return y


def _world(world: object) -> int:
    count = integer(world, "world")
    require(count >= 1, "world must be at least 1, got {}", count)
    return count


def _meet(name: str, world: int, collective: Callable[..., Any], *tensors: Any) -> None:
    """Take part in a collective. Raises RunError if there are not as many ranks, LostRank if one of them does not come."""
    if world == 1:
        return
    here = dist.get_world_size() if dist.is_initialized() else 1
    if here != world:
        raise RunError(
            f"{name} is among {world} ranks, but this process is one of {here}",
            help=f"start it with nnfront run --tp {world}, or with torchrun --nproc-per-node {world}",
        )
    try:
        collective(*tensors)
    except RuntimeError as error:
        raise LostRank(
            f"rank {dist.get_rank()}: another rank did not come to {name}",
            details=[str(error).splitlines()[0]],
            help="look for the first error among the ranks: the others end because of it",
        ) from error
