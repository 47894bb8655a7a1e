# SPDX-License-Identifier: Apache-2.0
"""`Checkpoint`: the tensors of a safetensors file or of a folder of them, by name, read when they are asked for."""

from __future__ import annotations

import difflib
import json
import os
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from nnfront.errors import LoadError
from nnfront.weights.mapped_memory import CHUNK_BYTES, Piece, copied_bytes, lay_out, read_at
from nnfront.weights.safetensors import TensorInfo, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MANIFEST = "nnfront.json"
"""What an artefact has and no checkpoint does: its table of contents."""
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
    def of(file: Path | int) -> FileState:
        """Return the state of a file, by path or open. Raises OSError."""
        stat = os.stat(file)
        return FileState(stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)


class Checkpoint(Mapping[str, torch.Tensor]):
    """Tensors by name. Opening it reads and checks the headers only; `checkpoint[name]` maps a tensor without copying it.

    `path` is a safetensors file, an index (`*.safetensors.index.json`), or a folder with `model.safetensors`, with
    `model.safetensors.index.json` and the shards it names, or with any safetensors files. With `headers_only` the files may end
    after their headers: enough to check a model against them.
    Raises LoadError that lists what is wrong with the files, all of them. May be used from several threads.
    """

    def __init__(self, path: str | os.PathLike[str], *, headers_only: bool = False) -> None:
        self.path = Path(path)
        self.headers_only = headers_only
        self.metadata: dict[str, str] = {}
        self._infos: dict[str, TensorInfo] = {}
        self._fds: dict[Path, int] = {}
        self._states: dict[Path, FileState] = {}
        files, index = _find_files(self.path)
        self.files: tuple[Path, ...] = tuple(files)
        problems: list[str] = []
        for file in files:
            self._add_file(file, problems)
        if index is not None:
            _check_index(index, self._infos, problems)
        if problems:
            raise LoadError(f"{self.path}: the checkpoint is broken", details=problems)
        weakref.finalize(self, _close, self._fds)

    def _add_file(self, file: Path, problems: list[str]) -> None:
        try:
            self._states[file] = FileState.of(file)
            header = read_header(file, headers_only=self.headers_only)
        except LoadError as error:
            problems.extend(f"{file.name}: {detail}" for detail in error.details)
            return
        except OSError as error:
            problems.append(f"{file.name}: it cannot be read: {error.strerror}")
            return
        self.metadata |= header.metadata
        for name, info in header.tensors.items():
            if name in self._infos:
                problems.append(f"{file.name}: tensor {name!r} is in {self._infos[name].file.name} as well")
            self._infos[name] = info

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
        for info in infos:
            self._fd(info)
        memory, start = lay_out(list(map(_piece, infos)), dtype.itemsize, self._fds)
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
        fd = self._fds.get(info.file)
        if fd is None:
            try:
                opened = os.open(info.file, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise LoadError(f"{info.file} cannot be opened: {error.strerror}") from error
            fd = self._fds.setdefault(info.file, opened)  # another thread may have been faster
            if fd != opened:
                os.close(opened)
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


def _close(fds: dict[Path, int]) -> None:
    for fd in fds.values():
        os.close(fd)


def _torch_dtype(info: TensorInfo) -> torch.dtype:
    dtype = getattr(torch, info.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise LoadError(f"{info.file}: tensor {info.name!r} is {info.dtype}, for which torch has no dtype")
    return dtype


def is_artefact(folder: str | Path) -> bool:
    """Whether a folder says that it is an artefact: it has an nnfront.json."""
    return (Path(folder) / MANIFEST).is_file()


def _find_files(path: Path) -> tuple[list[Path], Mapping[str, str] | None]:
    """Return the files of a checkpoint and, if there is an index, the file that it names for each tensor."""
    if path.is_dir():
        if is_artefact(path):
            raise LoadError(
                f"{path} is an nnfront artefact: its weights are not a checkpoint's any more",
                help="nnfront.load(DIR) gives its session",
            )
        if (path / SINGLE).exists():
            return [path / SINGLE], None
        if (path / INDEX).exists():
            return _read_index(path / INDEX)
        files = sorted(path.glob("*.safetensors"))
        if files:
            return files, None
        pickles = sorted([*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
        raise LoadError(
            f"{path}: there is no safetensors file in this folder",
            details=[f"it has {pickles[0].name}, which may hold code and is not read"] if pickles else (),
            help="save the weights with safetensors.torch.save_file" if pickles else "",
        )
    if not path.exists():
        raise LoadError(f"{path}: no such file or folder")
    return _read_index(path) if path.name.endswith(".index.json") else ([path], None)


def _read_index(index: Path) -> tuple[list[Path], Mapping[str, str]]:
    """Return the shards that an index names, and its map from tensor to shard."""
    try:
        fields: Any = json.loads(index.read_bytes())
    except (ValueError, RecursionError, OSError) as error:
        raise LoadError(f"{index} cannot be read: {error}") from error
    shards = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(shards, dict) or not all(isinstance(file, str) for file in shards.values()):
        raise LoadError(f"{index}: 'weight_map' must map names of tensors to names of files")
    names = sorted(set(shards.values()))
    wrong = [
        f"it names {name!r}, which is not in this folder"
        for name in names
        if os.path.basename(name) != name or not (index.parent / name).is_file()
    ]
    if wrong:
        raise LoadError(f"{index}: the index does not fit the folder", details=wrong)
    return [index.parent / name for name in names], shards


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
