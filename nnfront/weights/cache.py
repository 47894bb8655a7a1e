# SPDX-License-Identifier: Apache-2.0
"""Results of weight transforms kept on disk by content, so that a second start computes nothing and reads no source bytes.

    FOLDER/results/<key>.safetensors     one result; the key says op, attributes and contents of the weights it is made of
    FOLDER/sources/<key>.json            hashes of the tensors of one state of one checkpoint file

Only results that are computed are kept: weights as they are, views of them and joins that can be mapped come from the checkpoint.
Each file appears whole or not at all, so a run that was killed is taken up where it stopped, and several may run at once.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nnfront.errors import LoadError
from nnfront.lower import MethodProgram
from nnfront.runtime.result_keys import result_keys
from nnfront.runtime.transform import stream_transform, weight_dims
from nnfront.runtime.transform_plan import plan_transform
from nnfront.runtime.transform_steps import results_of
from nnfront.weights.bind import BoundWeights, stored_type
from nnfront.weights.checkpoint import Checkpoint
from nnfront.weights.contents import Contents
from nnfront.weights.write import remove_abandoned, write_tensors

SMALL_BYTES = 1 << 20
"""Results that take less new memory than this are not kept: computing them costs less than opening a file."""
_NAME = "result"


def cached_transform(
    program: MethodProgram,
    weights: BoundWeights,
    folder: Path,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Return what `run_transform` returns; results found in the cache are mapped, others are computed and kept there.

    `progress` is told how many results of how many are there. Raises LoadError if the folder cannot be written to.
    """
    checkpoint = weights.weights
    if not isinstance(checkpoint, Checkpoint):
        raise LoadError(
            "only weights from files can be cached", help="load a Checkpoint, or leave the cache out"
        )
    results, sources = folder / "results", folder / "sources"
    for each in (results, sources):
        _make_folder(each)
        remove_abandoned(each)
    plan = plan_transform(program, weights)
    large = {result.name for result in plan.results if result.new_bytes >= SMALL_BYTES}
    contents = Contents(checkpoint, sources)

    def content(name: str) -> str:
        return f"{weights.info(name)} {contents.hash(weights.found.sources[name])}"

    keys = result_keys(program, large, content, weight_dims(program, weights))
    contents.save()
    kept = {name: _read(results / f"{key}.safetensors") for name, key in keys.items()}
    found: dict[str, Any] = {name: value for name, value in kept.items() if value is not None}
    names = [*results_of(program)]
    rest = [name for name in names if name not in found]
    done = len(found)
    for name, value in stream_transform(program, weights, only=rest):
        found[name] = _keep(results, keys[name], value) if name in keys else value
        done += 1
        if progress is not None:
            progress(done, len(names))
    return {name: found[name] for name in names}


def _read(file: Path) -> torch.Tensor | None:
    """Return a kept result; None if it is not there or was damaged, in which case it will be made again."""
    if not file.exists():
        return None
    try:
        return Checkpoint(file).tensor(_NAME)
    except LoadError:
        return None


def _keep(folder: Path, key: str, value: torch.Tensor) -> torch.Tensor:
    """Write a result and return it as the mapped file, so that the memory that it was computed in is free again."""
    (file,) = write_tensors(folder, key, {_NAME: stored_type(value)}, [(_NAME, value)])
    return Checkpoint(file).tensor(_NAME)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LoadError(f"{folder}: the cache cannot be made: {error.strerror}") from error
