# SPDX-License-Identifier: Apache-2.0
"""Write tensors as they are made: sharded safetensors files whose headers come first, put in place when all are whole.

Types are known beforehand, so every file gets its header and its full length at once (a full disk is noticed before any work is
done) and tensors may come in any order. Data begins on a page and tensors of whole pages come first: what is read back can be
mapped, and sits at addresses that suit any kernel.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch

from nnfront.errors import LoadError
from nnfront.ir import TensorType, type_text
from nnfront.transform.source import stored_type
from nnfront.weights.mapped_memory import CHUNK_BYTES, PAGE
from nnfront.weights.safetensors import DTYPES
from nnfront.weights.temporary import make_file, remove_dead, sync

SHARD_BYTES = 5_000_000_000
"""Bytes of one file, as Hugging Face shards."""

SUFFIX = ".tmp"
"""Ends the name of a file that is being written."""

_FILE_DTYPES = {torch_name: (name, bits // 8) for name, (torch_name, bits) in DTYPES.items()}


def write_tensors(
    folder: Path,
    stem: str,
    types: Mapping[str, TensorType],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    metadata: Mapping[str, str] | None = None,
    shard_bytes: int = SHARD_BYTES,
    begins: Collection[str] = (),
    is_indexed: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> list[Path]:
    """Write `tensors`, which `types` announces, to `stem.safetensors`, or to shards `stem-00001-of-00003.safetensors` and an index.

    Tensors come in any order, each once. Each of those named in `begins` begins a shard, in the order of `types`. With `is_indexed` a single shard is named like one of several and has an index too.
    `progress` is told how many bytes of how many are written. Returns the files, the index
    last. Nothing appears under these names, and nothing that was there before is lost, unless all is written and on disk.
    Raises LoadError if the disk is full or the folder cannot be written to.
    """
    shards = [_Shard(names, types, metadata or {}) for names in _split(types, shard_bytes, begins)]
    is_indexed = is_indexed or len(shards) > 1
    files = _file_names(folder, stem, len(shards), is_indexed)
    total = sum(shard.size for shard in shards)
    fds: dict[Path, int] = {}
    try:
        for file in files:
            temporary, fd = make_file(file, SUFFIX)
            fds[temporary] = fd
        *opened, last = fds.values()
        shard_fds = opened if is_indexed else [*opened, last]
        for shard, fd in zip(shards, shard_fds, strict=True):
            _begin(fd, shard)
        _write_all(shards, shard_fds, types, tensors, progress)
        if is_indexed:
            _write_at(last, _index(files, shards), 0)
        for fd in fds.values():
            os.fsync(fd)
        for source, file in zip(fds, files, strict=True):
            os.replace(source, file)
        _remove_older(folder, stem, files)
        sync(folder)
    except OSError as error:
        raise _failure(folder, error, total) from error
    finally:
        for file, fd in fds.items():
            os.close(fd)
            file.unlink(missing_ok=True)
    return files


def write_text(file: Path, text: str) -> None:
    """Put a text file in place, whole. Raises LoadError if it cannot be written."""
    try:
        temporary, fd = make_file(file, SUFFIX)
        try:
            _write_at(fd, memoryview(text.encode()), 0)
            os.replace(temporary, file)
        finally:
            os.close(fd)
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise _failure(file.parent, error, len(text)) from error


def remove_abandoned(folder: Path) -> None:
    """Remove what writers that were killed have left in a folder."""
    remove_dead(folder.glob(f".*{SUFFIX}"))


class _Shard:
    """The header of one file, and where each of its tensors goes."""

    def __init__(
        self, names: Sequence[str], types: Mapping[str, TensorType], metadata: Mapping[str, str]
    ) -> None:
        self.names = sorted(names, key=lambda name: _order(types[name]))
        fields: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        offset = 0
        offsets = {}
        for name in self.names:
            size = _size_of(types[name])
            file_dtype, _ = _FILE_DTYPES[types[name].dtype]
            fields[name] = {
                "dtype": file_dtype,
                "shape": [*types[name].shape],
                "data_offsets": [offset, offset + size],
            }
            offsets[name] = offset
            offset += size
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-(8 + len(text)) % PAGE)
        self.header = len(text).to_bytes(8, "little") + text
        self.places = {name: len(self.header) + start for name, start in offsets.items()}
        self.size = len(self.header) + offset


def _order(type: TensorType) -> tuple[bool, int]:
    """Whole pages first, then large elements first: every tensor begins at a multiple of its element's size."""
    return _size_of(type) % PAGE != 0, -_FILE_DTYPES[type.dtype][1]


def _size_of(type: TensorType) -> int:
    assert type.static_shape is not None, f"{type_text(type)} has no size yet"
    return prod(type.static_shape) * _FILE_DTYPES[type.dtype][1]


def _split(types: Mapping[str, TensorType], shard_bytes: int, begins: Collection[str]) -> list[list[str]]:
    """Fill one shard after the other, in order; a tensor larger than a shard has one of its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, type in types.items():
        size = _size_of(type)
        if shards[-1] and (name in begins or filled + size > shard_bytes):
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards


def _file_names(folder: Path, stem: str, count: int, is_indexed: bool) -> list[Path]:
    if not is_indexed:
        return [folder / f"{stem}.safetensors"]
    shards = [folder / f"{stem}-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    return [*shards, folder / f"{stem}.safetensors.index.json"]


def _begin(fd: int, shard: _Shard) -> None:
    """Give a file its full length and its header."""
    try:
        os.posix_fallocate(fd, 0, shard.size)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):  # the file system cannot say beforehand
            raise
        os.truncate(fd, shard.size)
    _write_at(fd, memoryview(shard.header), 0)


def _write_all(
    shards: Sequence[_Shard],
    fds: Sequence[int],
    types: Mapping[str, TensorType],
    tensors: Iterable[tuple[str, torch.Tensor]],
    progress: Callable[[int, int], None] | None,
) -> None:
    places = {
        name: (fd, shard.places[name]) for shard, fd in zip(shards, fds, strict=True) for name in shard.names
    }
    total, done = sum(map(_size_of, types.values())), 0
    for name, tensor in tensors:
        fd, place = places.pop(name)
        assert stored_type(tensor) == types[name], (
            f"{name}: {stored_type(tensor)} was announced as {types[name]}"
        )
        for block in _blocks(tensor.detach()):
            _write_at(fd, block, place)
            place += len(block)
            done += len(block)
            if progress is not None:
                progress(done, total)
    assert not places, f"announced and not given: {', '.join(places)}"


def _blocks(tensor: torch.Tensor) -> Iterable[memoryview]:
    """Yield the bytes of a tensor, row-major, in blocks of some megabytes: what is not contiguous is copied block by block."""
    if tensor.is_contiguous():
        flat = tensor.view(-1)
        parts: Iterable[torch.Tensor] = (
            torch.split(flat, CHUNK_BYTES // flat.itemsize) if flat.numel() else ()
        )
    else:
        rows = max(CHUNK_BYTES // max(tensor[0].nbytes, 1), 1)
        parts = (part.contiguous().view(-1) for part in torch.split(tensor, rows))
    for part in parts:
        yield part.cpu().view(torch.uint8).numpy().data


def _write_at(fd: int, data: memoryview, place: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], place + done)


def _index(files: Sequence[Path], shards: Sequence[_Shard]) -> memoryview:
    where = {
        name: shard_file.name
        for shard, shard_file in zip(shards, files, strict=False)
        for name in shard.names
    }
    size = sum(shard.size - len(shard.header) for shard in shards)
    return memoryview(json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=2).encode())


def _remove_older(folder: Path, stem: str, files: Sequence[Path]) -> None:
    """Remove what an earlier call wrote under the same stem with another number of shards: a reader might prefer it."""
    names = (f"{stem}.safetensors", f"{stem}-?????-of-?????.safetensors", f"{stem}.safetensors.index.json")
    for name in names:
        for file in set(folder.glob(name)) - set(files):
            file.unlink(missing_ok=True)


def _failure(folder: Path, error: OSError, total: int) -> LoadError:
    details = []
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        stat = os.statvfs(folder)
        details = [f"{total / 1e9:.2f} GB are needed, {stat.f_bavail * stat.f_frsize / 1e9:.2f} GB are free"]
    return LoadError(f"{folder}: weights cannot be written: {error.strerror}", details=details)
