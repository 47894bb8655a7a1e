# SPDX-License-Identifier: Apache-2.0
"""`Checkpoint`: the tensors of safetensors or GGUF files, one or a folder of them, by name, read when they are asked for."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nnfront.errors import LoadError
from nnfront.files import Folder, shown
from nnfront.weights.gguf import is_gguf, read_gguf
from nnfront.weights.gguf_parts import all_parts, disagreements, whole_of, with_its_parts
from nnfront.weights.mapped_memory import CHUNK_BYTES, MIN_MAPPED_BYTES, Piece, copied_bytes, lay_out, read_at
from nnfront.weights.name_hints import shortened
from nnfront.weights.safetensors import Header, TensorInfo, length_problems, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MANIFEST = "nnfront.json"
"""What an artefact has and no checkpoint does: its table of contents."""
ALIGNMENT = 64
"""Bytes of whose multiples small tensors begin at one, as torch's own do; kernels ask for 16."""
_BLOCK_BYTES = 1 << 20  # stays in a core's cache until it has been used


class FileState(NamedTuple):
    """What changes when a file does: two equal states are, short of a clock that was set back, one content.

    A replaced file has another inode; the system sets `changed_ns` whenever bytes, or anything else about the file, are changed, and
    nobody can set it back as they can the time of modification.
    """

    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int

    @staticmethod
    def of(fd: int) -> FileState:
        """Return the state of an open file."""
        stat = os.fstat(fd)
        return FileState(stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


class Checkpoint(Mapping[str, torch.Tensor]):
    """Tensors by name. Opening it reads and checks the headers only; `checkpoint[name]` maps a tensor without copying it.

    `path` is a safetensors or a GGUF file, an index (`*.safetensors.index.json`), or a folder with `model.safetensors`, with
    `model.safetensors.index.json` and the shards it names, with any safetensors files, or with one model in GGUF; of a
    model in several GGUF files (`NAME-00001-of-00003.gguf`) any is all of them. With `headers_only` the files may end
    after their headers: enough to check a model against them; `truncated` says which end elsewhere, but not where they should.
    `folder` is the folder, if it is open already: files are opened once, so that one that is replaced stays what it was. `memory` holds
    files that `whole` has mapped: their tensors are views of it, all of which keep all of it.
    Raises LoadError that lists what is wrong with the files, all of them. May be used from several threads.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        headers_only: bool = False,
        folder: Folder | None = None,
        memory: Mapping[Path, memoryview] | None = None,
    ) -> None:
        self._memory = memory or {}
        self.path = _named(Path(path))
        self.headers_only = headers_only
        self.metadata: dict[str, Any] = {}
        self.truncated: list[str] = []
        self._infos: dict[str, TensorInfo] = {}
        self._states: dict[Path, FileState] = {}
        self._folder = folder or _folder_of(self.path)
        self._folders: dict[Path, Folder] = {}
        names, index = _find_files(self.path, self._folder)
        self.files: tuple[Path, ...] = tuple(self._folder.path / name for name in names)
        problems: list[str] = []
        headers = [header for file in self.files if (header := self._add_file(file, problems)) is not None]
        if index is not None:
            _check_index(index, self._infos, problems)
        elif not problems and headers and is_gguf(self._folder, headers[0].file.name):
            problems += disagreements(headers)
        if problems:
            raise LoadError(
                f"{self.path}: the checkpoint is broken",
                details=shortened([(line, line) for line in problems]),
            )

    def _add_file(self, file: Path, problems: list[str]) -> Header | None:
        """Take a file's tensors in, and return its header; None if it is broken."""
        try:
            is_blocks = is_gguf(self._folder, file.name)
            read = read_gguf if is_blocks else read_header
            header = read(file, headers_only=self.headers_only, folder=self._folder)
            state = FileState.of(self._folder.open(file.name))
        except LoadError as error:
            problems.extend(f"{file.name}: {detail}" for detail in error.details)
            return None
        self._states[file], self._folders[file] = state, self._folder
        # Without any data it was meant to have none.
        if state.size_bytes != header.data_start and not (is_blocks and state.size_bytes > header.data_end):
            problem = length_problems(header, state.size_bytes)
            self.truncated.extend(f"{file.name}: {line}" for line in problem)
        self.metadata |= header.metadata
        for name, info in header.tensors.items():
            if name in self._infos:
                problems.append(f"{file.name}: tensor {name!r} is in {self._infos[name].file.name} as well")
            self._infos[name] = info
        return header

    def with_others(self, other: Checkpoint, prefix: str) -> Checkpoint:
        """Return a checkpoint that holds the tensors of another as well, their names behind a prefix."""
        others = {prefix + name: replace(info, name=prefix + name) for name, info in other.infos.items()}
        assert not others.keys() & self._infos.keys(), "a prefix is no beginning of names in use"
        both = copy(self)
        both.files = (*self.files, *other.files)
        both._infos = {**self._infos, **others}
        both._states = {**self._states, **other._states}
        both._folders = {**self._folders, **other._folders}
        return both

    @property
    def names(self) -> tuple[str, ...]:
        """All names, file by file in the order of the data."""
        return tuple(self._infos)

    @property
    def infos(self) -> Mapping[str, TensorInfo]:
        """What the headers say, by name."""
        return self._infos

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.size_bytes for info in self._infos.values())

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape and place of a tensor; LoadError with the nearest names if there is none."""
        info = self._infos.get(name)
        if info is None:
            near = difflib.get_close_matches(name, self._infos, 3)
            raise LoadError(
                f"{self.path}: there is no tensor {name!r}",
                help=f"nearest: {', '.join(map(repr, near))}" if near else "",
            )
        return info

    def tensor(self, name: str) -> torch.Tensor:
        """Return a tensor whose memory is the file's pages; only a tensor at an odd address, or a small one, is read.

        The pages leave the process with the last tensor that uses them. Writing into it changes this process's copy, not the file.
        """
        return self._laid_out([self.info(name)]).view(self.info(name).shape)

    def joined(self, names: Sequence[str]) -> torch.Tensor:
        """Return the elements of tensors of one dtype, row-major, one tensor after another, as a tensor of one axis.

        For matrices that is their concatenation along the first axis. Where pages allow it (see `pages`) nothing is copied.
        """
        return self._laid_out([self.info(name) for name in names])

    def _laid_out(self, infos: Sequence[TensorInfo]) -> torch.Tensor:
        dtype = _torch_dtype(infos[0])
        assert {info.dtype for info in infos} == {infos[0].dtype}, "tensors of one dtype are joined"
        size = sum(info.size_bytes for info in infos)
        if not size:
            return torch.empty(0, dtype=dtype)
        fds = {info.file: self._fd(info) for info in infos}
        mapped, start = self._memory.get(infos[0].file), infos[0].offset
        if mapped is not None and len(infos) == 1 and start % dtype.itemsize == 0:
            found = torch.frombuffer(mapped, dtype=dtype, count=size // dtype.itemsize, offset=start)
            return found.clone() if start % ALIGNMENT and size < MIN_MAPPED_BYTES else found
        memory, start = lay_out(list(map(_piece, infos)), dtype.itemsize, fds)
        return torch.frombuffer(memory, dtype=dtype, count=size // dtype.itemsize, offset=start)

    def copied_bytes(self, names: Sequence[str]) -> int:
        """Return how many bytes `joined` would read into memory; all others stay pages of the files."""
        infos = [self.info(name) for name in names]
        return copied_bytes(list(map(_piece, infos)), _torch_dtype(infos[0]).itemsize)

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Read a tensor into `out`, contiguous, of its shape, on the CPU, from the file directly: no page of it is mapped.

        If the dtypes differ, values are converted piece by piece.
        """
        info = self.info(name)
        dtype, piece, fd = _torch_dtype(info), _piece(info), self._fd(info)
        assert out.shape == info.shape, f"{tuple(out.shape)} for {info}"
        assert out.is_contiguous(), "the bytes of a tensor are read in one piece"
        if not info.size_bytes:
            return
        flat = out.detach().view(-1)
        if out.dtype == dtype:
            read_at(piece, flat.view(torch.uint8).numpy().data, fd)
            return
        staging = torch.empty(min(flat.numel(), CHUNK_BYTES // dtype.itemsize), dtype=dtype)
        buffer = staging.view(torch.uint8).numpy().data
        for begin in range(0, flat.numel(), staging.numel()):
            part = flat[begin : begin + staging.numel()]
            size = part.numel() * dtype.itemsize
            chunk = Piece(piece.file, piece.offset + begin * dtype.itemsize, size)
            read_at(chunk, buffer[:size], fd)
            part.copy_(staging[: part.numel()])

    def part(self, name: str, axis: int, ranges: Sequence[tuple[int, int]]) -> torch.Tensor:
        """Read what lies in some ranges of an axis of a tensor into new memory: these bytes and no others, each run of them by itself."""
        info = self.info(name)
        dtype, fd = _torch_dtype(info), self._fd(info)
        shape = (*info.shape[:axis], sum(end - begin for begin, end in ranges), *info.shape[axis + 1 :])
        out = torch.empty(shape, dtype=dtype)
        if not out.numel():
            return out
        each = prod(info.shape[axis + 1 :]) * dtype.itemsize
        view, done = out.view(-1).view(torch.uint8).numpy().data, 0
        for row in range(prod(info.shape[:axis])):
            for begin, end in ranges:
                size, place = (end - begin) * each, (row * info.shape[axis] + begin) * each
                read_at(Piece(info.file, info.offset + place, size), view[done : done + size], fd)
                done += size
        return out

    def blocks(self, name: str) -> Iterator[memoryview]:
        """Yield the bytes of a tensor in blocks, read without mapping the file; each is valid until the next is asked for."""
        info = self.info(name)
        fd = self._fd(info)
        buffer = memoryview(bytearray(min(info.size_bytes, _BLOCK_BYTES)))
        for begin in range(0, info.size_bytes, _BLOCK_BYTES):
            size = min(_BLOCK_BYTES, info.size_bytes - begin)
            read_at(Piece(info.file, info.offset + begin, size), buffer[:size], fd)
            yield buffer[:size]

    def state(self, name: str) -> FileState:
        """Return the state of the file that holds a tensor. Raises LoadError if that is not the file whose header was read."""
        return FileState.of(self._fd(self.info(name)))

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._infos:
            raise KeyError(name)
        return self.tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def __iter__(self) -> Iterator[str]:
        return iter(self._infos)

    def __len__(self) -> int:
        return len(self._infos)

    def __repr__(self) -> str:
        return f"<Checkpoint {self.path}: {len(self)} tensors, {self.size_bytes / 1e9:.2f} GB in {len(self.files)} files>"

    def _fd(self, info: TensorInfo) -> int:
        """The file of a tensor, opened, and still long enough."""
        if self.headers_only:
            raise LoadError(
                f"{self.path}: {info.name!r} has no data: the checkpoint was opened with headers_only=True"
            )
        fd = self._folders[info.file].open(info.file.name)
        state, known = FileState.of(fd), self._states[info.file]
        if info.offset + info.size_bytes > state.size_bytes:
            raise LoadError(f"{info.file}: the file has become shorter since its header was read")
        if state[:3] != known[:3]:
            raise LoadError(
                f"{info.file}: the file has been changed since its header was read",
                help="open the checkpoint again",
            )
        return fd


def _piece(info: TensorInfo) -> Piece:
    return Piece(info.file, info.offset, info.size_bytes)


def _torch_dtype(info: TensorInfo) -> torch.dtype:
    dtype = getattr(torch, info.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise LoadError(f"{info.file}: tensor {info.name!r} is {info.dtype}, for which torch has no dtype")
    return dtype


def is_artefact(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder says that it is an artefact: it has an nnfront.json."""
    return os.path.isfile(os.path.join(folder, MANIFEST))


def _named(path: Path) -> Path:
    """A checkpoint's path. One file that the caller names may be a link to anywhere: it is what it leads to that is opened, unless others belong to it."""
    is_file = not os.path.isdir(path) and not path.name.endswith(".index.json") and not whole_of(path.name)
    return Path(os.path.realpath(path)) if is_file and os.path.islink(path) else path


def _folder_of(path: Path) -> Folder:
    """The folder that a checkpoint is or lies in."""
    if not os.path.exists(path):
        raise LoadError(f"{path}: no such file or folder")
    return Folder(path if os.path.isdir(path) else path.parent)


def _find_files(path: Path, folder: Folder) -> tuple[list[str], Mapping[str, str] | None]:
    """Return the names of the files of a checkpoint and, if there is an index, the file that it names for each tensor."""
    if path != folder.path:
        if path.name.endswith(".index.json"):
            return _read_index(path.name, folder)
        return (all_parts(path, path.name, folder.names()) if whole_of(path.name) else [path.name]), None
    if folder.has(MANIFEST):
        raise LoadError(
            f"{path} is an nnfront artefact: its weights are not a checkpoint's any more",
            help="nnfront.load(DIR) gives its session",
        )
    if folder.has(SINGLE):
        return [SINGLE], None
    if folder.has(INDEX):
        return _read_index(INDEX, folder)
    names = folder.names()
    files = [name for name in names if name.endswith(".safetensors")]
    if files:
        return files, None
    if files := [name for name in names if name.endswith(".gguf")]:
        return _one_gguf(path, files), None
    pickles = [name for name in names if name.endswith((".bin", ".pt", ".pth"))]
    raise LoadError(
        f"{path}: there is no safetensors file in this folder",
        details=[f"it has {pickles[0]}, which may hold code and is not read"] if pickles else (),
        help="save the weights with safetensors.torch.save_file" if pickles else "",
    )


def _one_gguf(path: Path, files: list[str]) -> list[str]:
    """The files of the one model that a folder holds: a single one, or all parts of it."""
    if len(with_its_parts(files[0], files)) < len(files):
        raise LoadError(
            f"{path}: there are several models in GGUF in this folder",
            details=shortened([(name, name) for name in files]),
            help="give the path of one file; of one that has parts any will do",
        )
    return all_parts(path, files[0], files)


def _read_index(index: str, folder: Folder) -> tuple[list[str], Mapping[str, str]]:
    """Return the shards that an index names, and its map from tensor to shard."""
    fields = folder.read_json(index)
    shards = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(file, str) for file in shards.values()):
        raise LoadError(f"{folder.path / index}: 'weight_map' must map names of tensors to names of files")
    names = sorted(set(shards.values()))
    wrong = [
        (name, f"it names {shown(name)}, which is not in this folder")
        for name in names
        if os.path.basename(name) != name or name in ("", ".", "..") or not folder.has(name)
    ]
    if wrong:
        raise LoadError(f"{folder.path / index}: the index does not fit the folder", details=shortened(wrong))
    return names, shards


def _check_index(index: Mapping[str, str], infos: Mapping[str, TensorInfo], problems: list[str]) -> None:
    """Add a line for each tensor that is not where the index says; nothing if a shard could not be read."""
    if problems:
        return
    for name, file in index.items():
        if name not in infos:
            problems.append(f"{file}: the index names tensor {name!r}, which is not in this file")
        elif infos[name].file.name != file:
            problems.append(f"{infos[name].file.name}: has tensor {name!r}, which the index places in {file}")
    problems.extend(
        f"{info.file.name}: tensor {name!r} is not in the index"
        for name, info in infos.items()
        if name not in index
    )
