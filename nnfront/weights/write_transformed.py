# SPDX-License-Identifier: Apache-2.0
"""Run a weight transform into files: each result is written and let go of before the next is begun."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from nnfront.dims import Symbol, evaluate
from nnfront.ir import ScalarType, TensorType
from nnfront.lower import MethodProgram
from nnfront.transform.run import stream_transform, weight_dims
from nnfront.transform.source import Source, as_source
from nnfront.weights.write import SHARD_BYTES, write_tensors


def write_transformed(
    program: MethodProgram,
    weights: Source | Mapping[str, torch.Tensor],
    folder: Path,
    stem: str,
    *,
    metadata: Mapping[str, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Write the results of a transform as safetensors files and return them; a number becomes an int64 tensor without axes.

    Takes at most the memory that `plan_transform(...).peak_bytes` says. `progress` is told how many bytes of how many are written.
    Raises LoadError if a weight cannot be read or the files cannot be written; nothing is left behind then.
    """
    source = as_source(weights)
    types = result_types(program, weight_dims(program, source))
    results = _tensors(stream_transform(program, source))
    return write_tensors(
        folder, stem, types, results, metadata=metadata, shard_bytes=shard_bytes, progress=progress
    )


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


def _tensors(results: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in results:
        yield name, value if isinstance(value, torch.Tensor) else torch.tensor(value)
        del value  # or it would live until the next result is there
