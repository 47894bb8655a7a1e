# SPDX-License-Identifier: Apache-2.0
"""A session's weights as the checkpoint that they came from: the same names, shapes, dtypes and bytes, in safetensors files.

Weights that went into formulas come out of the results, one at a time, views where possible. What a formula has lost (a quantised
weight) is lost: the error names it. The folder appears whole or not at all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from nnfront.errors import LoadError
from nnfront.ir import TensorType
from nnfront.transform.inverse import holds
from nnfront.weights.atomic_folder import put_folder
from nnfront.weights.bound_checkpoint import BoundWeights
from nnfront.weights.checkpoint import INDEX, SINGLE, Checkpoint, is_artefact
from nnfront.weights.name_hints import shortened
from nnfront.weights.session_weights import SessionWeights, WeightRecovery
from nnfront.weights.write import SHARD_BYTES, write_tensors

STEM = SINGLE.removesuffix(".safetensors")


def export_checkpoint(
    current: SessionWeights,
    sources: BoundWeights | None,
    folder: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    overwrite: bool = False,
    writes: bool = True,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Write what a session holds as a checkpoint and return the files, the index last.

    `sources` are what it was made of, where that is known: they say which name and dtype a weight had in the files, and hold the tensors
    that no method reads. With `overwrite` the weights in a folder are replaced; other files there stay.
    Without `writes` nothing is written: a rank gives its part of weights to the one that does.
    Raises LoadError that lists the weights that cannot be had back, and if the folder is not empty or cannot be written.
    """
    origins = _origins(current, sources)
    weights = _types(current, sources, origins)
    if not writes:
        for _ in _tensors(current, sources, origins, weights):
            pass
        return []

    def check_replaceable(place: Path) -> None:
        if is_artefact(place):
            raise LoadError(f"{place} is an nnfront artefact", help="export to another folder")
        if not overwrite:
            raise LoadError(
                f"{place} is there already and is not empty",
                help="export to another folder, or replace its weights with overwrite=True",
            )

    with put_folder(folder, check_replaceable) as temporary:
        _carry_over(folder, temporary)
        tensors = _tensors(current, sources, origins, weights)
        files = write_tensors(
            temporary,
            STEM,
            weights,
            tensors,
            metadata={"format": "pt"},  # without it other readers refuse the file
            shard_bytes=shard_bytes,
            progress=progress,
        )
    return [folder / file.name for file in files]


def _origins(current: SessionWeights, sources: BoundWeights | None) -> dict[str, str]:
    """The tensors of the checkpoint by their names there, in its order, each with the weight of the model's that it is; "" for one that the model does not want."""
    if sources is None:
        return {name: name for name in current.layout.wanted}
    found = {stored: name for name, stored in sources.found.sources.items()}
    found |= {other: found[one] for one, other in sources.found.ties}
    if isinstance(sources.weights, Checkpoint):
        found |= dict.fromkeys(sources.found.ignored, "")
        return {stored: found[stored] for stored in sources.weights}
    return found


def _types(
    current: SessionWeights, sources: BoundWeights | None, origins: Mapping[str, str]
) -> dict[str, TensorType]:
    """The type of each tensor in the files. Raises LoadError if one cannot be had back."""
    types: dict[str, TensorType] = {}
    lost: dict[str, str] = {}
    for stored, name in origins.items():
        if not name:
            assert sources is not None, "only files have tensors that the model does not want"
            info = sources.stored(stored)
            types[stored] = TensorType(tuple(info.shape), info.dtype)
            continue
        if not current.layout.is_kept(name):
            lost[name] = current.layout.why_lost(name)
            continue
        types[stored] = type = current.layout.type(name)
        if sources is None or name not in sources.found.casts or name in current.updated:
            continue
        dtype = sources.stored(stored).dtype
        types[stored] = TensorType(type.shape, dtype)
        if not holds(type.dtype, dtype):
            lost[name] = f"{name!r} was converted from {dtype} to {type.dtype} when it was loaded"
    if lost:
        raise LoadError(
            "the session cannot give back every weight of the checkpoint",
            details=shortened(list(lost.items())),
            help="keep the checkpoint that it was made of",
        )
    return types


def _tensors(
    current: SessionWeights,
    sources: BoundWeights | None,
    origins: Mapping[str, str],
    types: Mapping[str, TensorType],
) -> Iterator[tuple[str, torch.Tensor]]:
    back = WeightRecovery(current)
    for stored, name in origins.items():
        if name:
            value = back.weight(name)
        else:
            value = sources.weights[stored] if sources is not None else None
        assert value is not None, f"{stored} was found before"
        dtype: torch.dtype = getattr(torch, types[stored].dtype)
        yield stored, value.to(dtype)
        del value


def _carry_over(folder: Path, temporary: Path) -> None:
    """Put what a folder has besides weights into its successor: the same files where the file system allows it, else copies."""

    def without_weights(place: str, names: Sequence[str]) -> list[str]:
        top = [n for n in names if n in (SINGLE, INDEX) or Path(n).match(f"{STEM}-*-of-*.safetensors")]
        return top if Path(place) == folder else []

    if folder.is_dir():
        try:
            shutil.copytree(
                folder,
                temporary,
                symlinks=True,
                ignore=without_weights,
                copy_function=_link,
                dirs_exist_ok=True,
            )
        except (OSError, shutil.Error) as error:
            raise LoadError(f"{folder}: what is there besides weights cannot be kept: {error}") from error


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)
