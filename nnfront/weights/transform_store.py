# SPDX-License-Identifier: Apache-2.0
"""Results of weight transforms kept on disk by content, so that a second start computes nothing and reads no source bytes.

    FOLDER/results/<key>.safetensors     one result; the key says op, attributes and contents of the weights it is made of
    FOLDER/sources/<key>.json            hashes of the tensors of one state of one checkpoint file

Results that ops compute are kept, and joins and conversions that take much memory: weights as they are, views of them and joins that
can be mapped are mapped from the checkpoint, which costs nothing. Each file appears whole or not at all, so a run that was killed is
taken up where it stopped, and several may run at once. No result is ever removed: delete the folder, or any file in it, when it pleases.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from nnfront.errors import LoadError
from nnfront.lower import MethodProgram
from nnfront.transform.content_keys import result_keys
from nnfront.transform.plan import plan_transform
from nnfront.transform.run import stream_transform, weight_dims
from nnfront.transform.source import stored_type
from nnfront.weights.bound_checkpoint import BoundWeights
from nnfront.weights.checkpoint import Checkpoint
from nnfront.weights.content_hashes import Contents
from nnfront.weights.write import remove_abandoned, write_tensors

SMALL_BYTES = 1 << 20
"""Weights that take less new memory than this to read or join are not kept: reading them again costs no more than opening a file."""
_NAME = "result"


class TransformCache:
    """A folder of results for the weights of a checkpoint, and for every other checkpoint and model that uses the folder."""

    def __init__(self, folder: Path, weights: BoundWeights) -> None:
        """Raises LoadError for weights that are not in files, and if the folder cannot be made."""
        if not isinstance(weights.weights, Checkpoint):
            raise LoadError(
                "only weights from files can be cached", help="load a Checkpoint, or leave the cache out"
            )
        self.weights = weights
        self._results = folder / "results"
        for each in (self._results, folder / "sources"):
            _make_folder(each)
            remove_abandoned(each)
        self._contents = Contents(weights.weights, folder / "sources")

    def are_equal(self, one: str, two: str) -> bool:
        """Whether two tensors of the checkpoint have the same bytes, by their hashes."""
        return self._contents.are_equal(one, two)

    def transform(
        self, program: MethodProgram, *, progress: Callable[[int, int], None] | None = None
    ) -> dict[str, Any]:
        """Return what `run_transform` returns; results found in the cache are mapped, others are computed and kept there.

        Takes at most the memory that `plan_transform(...).peak_bytes` says, besides what is not kept. `progress` is told how many
        results of how many are there. Raises LoadError if the folder cannot be written to; what was kept before stays.
        """
        keys = self._keys(program)
        kept = {name: _read(self._results / f"{key}.safetensors") for name, key in keys.items()}
        found: dict[str, Any] = {name: value for name, value in kept.items() if value is not None}
        names = [*program.results]
        rest = [name for name in names if name not in found]
        for name, value in stream_transform(program, self.weights, only=rest):
            found[name] = _keep(self._results, keys[name], value) if name in keys else value
            del value  # or it would live until the next result is there
            if progress is not None:
                progress(len(found), len(names))
        return {name: found[name] for name in names}

    def _keys(self, program: MethodProgram) -> dict[str, str]:
        """The keys of the results that are worth keeping."""
        plan = plan_transform(program, self.weights)
        kept = [r for r in plan.results if r.is_computed or r.new_bytes >= SMALL_BYTES]
        stored = self.weights.found.sources
        hashes = self._contents.hashes({stored[name] for result in kept for name in result.sources})
        self._contents.save()

        def content(name: str) -> str:
            return f"{self.weights.info(name)} {hashes[stored[name]]}"

        return result_keys(program, {r.name for r in kept}, content, weight_dims(program, self.weights))


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
