# SPDX-License-Identifier: Apache-2.0
"""An artefact as files: a folder that holds a compiled model, made whole or not at all and checked before it is used.

    nnfront.json                                  what there is, with the hash of every other file (`manifest`)
    program.nnir                                  the IR, lifted, as text
    nnfront-weights-00001-of-00002.safetensors    the weights that methods read: transformed ones, and others as they are
    nnfront-weights.safetensors.index.json        which file has which tensor
    kernels.json, kernels/*.cubin                 compiled kernels, of a program for a GPU that its target names (`kernels`)
    config.json, tokenizer.json, ...              copies

The weights have names of their own, so that nothing that looks for `model.safetensors` takes them for the model's own.
Nothing in an artefact is code but for compiled kernels: no pickle, no Python.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch

from nnfront.artefact.integrity import Digest, comparing_blocks, digest_files, digest_of
from nnfront.artefact.kernel_files import FOLDER, is_kernel_file, read_kernels, write_kernels
from nnfront.artefact.manifest import Manifest, read_manifest
from nnfront.artefact.tensor_names import is_for
from nnfront.backends.cuda.ahead.cubin import CompiledKernels
from nnfront.errors import LoadError
from nnfront.files import MAX_BYTES, File, Folder
from nnfront.ir import TensorType
from nnfront.weights.atomic_folder import put_folder, writing
from nnfront.weights.checkpoint import MANIFEST, Checkpoint
from nnfront.weights.mapped_memory import whole
from nnfront.weights.write import SHARD_BYTES, write_tensors

PROGRAM = "program.nnir"
WEIGHTS = "nnfront-weights"
_INDEX = f"{WEIGHTS}.safetensors.index.json"
_ATTEMPTS = 100
"""How often an artefact is opened that is replaced while it is opened: each further time takes a writer that has written a whole one."""
# What people and tools put into any folder, and loading never looks at.
_FOREIGN = (".", "README", "LICENSE", "LICENCE", "NOTICE")


@dataclass(frozen=True, slots=True)
class ArtefactFiles:
    """An artefact that was found whole: its folder, held open, its manifest, the text of its program, its tensors and its compiled kernels."""

    home: Folder
    manifest: Manifest
    program: str
    tensors: Checkpoint
    kernels: CompiledKernels | None = None
    check_weights: Callable[[], None] = lambda: None
    """Wait until the bytes of the weights have been compared, if they are. Raises LoadError that lists what is wrong."""

    @property
    def folder(self) -> Path:
        """Where it is, or was if another has taken its place."""
        return self.home.path

    @property
    def copies(self) -> tuple[File, ...]:
        """The files that were copied into it."""
        return tuple(File(self.home, name) for name in self.manifest.files if not _is_ours(name))

    def close(self) -> None:
        """Close all files but the copies, when their content has been taken."""
        self.home.close(name for name in self.manifest.files if _is_ours(name))


def write_artefact(
    folder: Path,
    manifest: Manifest,
    program: str,
    types: Mapping[str, TensorType],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    kernels: CompiledKernels | None = None,
    copies: Sequence[File] = (),
    shard_bytes: int = SHARD_BYTES,
    begins: Collection[str] = (),
    progress: Callable[[int, int], None] | None = None,
    phase: Callable[[str], None] = lambda name: None,
) -> None:
    """Write an artefact; an artefact that is there already is replaced in one step.

    `manifest` lacks the files, which are found here. `types` announces `tensors`, which may come in any order; those named in `begins` begin a file. `copies` are files
    that go into the folder as they are. `progress` is told how many bytes of how many are written, `phase` what has been done.
    Raises LoadError for a disk that is full or a folder that holds something else; then nothing has changed.
    """
    names = [file.name for file in copies]
    assert len(set(names)) == len(names), "every file has a name of its own"
    assert not any(map(_is_ours, names)), "copies do not have the names of the artefact's own files"
    text = program.encode()
    if len(text) > MAX_BYTES:
        raise LoadError(f"the program has {len(text)} bytes as text, {MAX_BYTES} are the most")
    with put_folder(folder, check_replaceable) as place:
        files = write_tensors(
            place,
            WEIGHTS,
            types,
            tensors,
            shard_bytes=shard_bytes,
            begins=begins,
            progress=progress,
            is_indexed=True,
        )
        phase("write")
        with writing(folder):
            for file in copies:
                file.copy_to(place / file.name)
            files.extend(place / name for name in names)
            if kernels is not None:
                files.extend(write_kernels(place, kernels))
            (place / PROGRAM).write_bytes(text)
            listed = [file.relative_to(place).as_posix() for file in files]
            digests = dict(zip(listed, digest_files(Folder(place), listed), strict=True))
            whole = replace(manifest, files={PROGRAM: digest_of(text), **digests})
            (place / MANIFEST).write_text(whole.text(), encoding="utf-8")
        phase("hash")


def read_artefact(folder: str | Path, *, verify: bool = True, rank: int = 0) -> ArtefactFiles:
    """Open an artefact: check that its files are those that were written, and read all but the weights. Of one for several ranks those of `rank` are compared.

    With `verify` the bytes of the weights are compared with their CRC-32s, which goes on when this returns: `check_weights` must have been called
    before they are used. Without it only their sizes and headers are checked.
    If it is replaced meanwhile, this is the one or the other. Raises LoadError that lists what is wrong.
    """
    home = _opened(Path(folder))
    manifest = read_manifest(home)
    damage = find_damage(home, manifest, weights="sizes")
    if damage and verify:
        damage = find_damage(home, manifest, weights="quick")
    raise_if_damaged(home.path, damage)
    memory = _mapped(home, manifest)
    try:
        program = home.read(PROGRAM).decode("utf-8")
    except UnicodeDecodeError as error:
        raise LoadError(f"{home.path / PROGRAM} cannot be read: {error}") from None
    try:
        tensors = Checkpoint(home.path / _INDEX, folder=home, memory=memory)
    except LoadError:
        if verify:  # a header that is damaged is one of a file that is
            _comparing(home, manifest, memory)()
        raise
    strange = [file.name for file in tensors.files if file.name not in manifest.files]
    if strange:
        raise LoadError(f"{home.path / _INDEX} names {', '.join(strange)}, which {MANIFEST} does not list")
    if manifest.ranks > 1:
        used = {info.file for name, info in tensors.infos.items() if is_for(name, rank)}
        memory = {file: mapped for file, mapped in memory.items() if file in used}
    check_weights = _comparing(home, manifest, memory) if verify else lambda: None
    return ArtefactFiles(home, manifest, program, tensors, read_kernels(home, manifest), check_weights)


def check_files(folder: str | Path) -> list[str]:
    """Compare every byte with the SHA-256s and return what is wrong, a line for each problem. Raises LoadError for a manifest that cannot be read."""
    home = _opened(Path(folder))
    return find_damage(home, read_manifest(home), weights="full")


def _opened(place: Path) -> Folder:
    """Open a folder and all its files; again, if another one has taken its place before all were open."""
    for _ in range(_ATTEMPTS):
        home = Folder(place)
        for name in (MANIFEST, *_contents(home)):
            with contextlib.suppress(LoadError):  # it is said when it is read, if it is
                home.open(name)
        if home.is_current:
            return home
    raise LoadError(f"{place} is replaced by others again and again", help="load it when they are done")


def raise_if_damaged(folder: Path, problems: Sequence[str]) -> None:
    """Raise one LoadError for what `find_damage` found."""
    if problems:
        raise LoadError(
            f"{folder} is not the artefact that was written",
            details=problems,
            help="copy it again, or export the model again",
        )


def find_damage(folder: Folder, manifest: Manifest, *, weights: str) -> list[str]:
    """Return a line for each file that is missing, of another size or content, or not listed.

    `weights` is how far weights are compared: "sizes", "quick" (CRC-32) or "full" (SHA-256); other files always are in full.
    """
    problems = [
        f"{name}: {MANIFEST} does not list it" for name in (PROGRAM, _INDEX) if name not in manifest.files
    ]
    problems.extend(_unlisted(folder, manifest))
    sized: list[str] = []
    for name, digest in manifest.files.items():
        problem = _size_problem(folder, name, digest)
        if problem is None:
            sized.append(name)
        else:
            problems.append(f"{name}: {problem}")
    exact = [name for name in sized if weights == "full" or not _is_weights(name)]
    for name, found in zip(exact, digest_files(folder, exact), strict=True):
        if found.sha256 != manifest.files[name].sha256:
            problems.append(f"{name}: its content is not what was written: its sha256 is {found.sha256}")
    quick = replace(manifest, files={name: manifest.files[name] for name in sized if weights == "quick"})
    return [*problems, *_damaged(folder, quick, _mapped(folder, quick))()]


def _mapped(folder: Folder, manifest: Manifest) -> dict[Path, memoryview]:
    """The files of the weights that have any bytes, which have their sizes, as memory."""
    return {
        folder.path / name: whole(folder.path / name, digest.size_bytes, folder.open(name))
        for name, digest in manifest.files.items()
        if _is_weights(name) and digest.size_bytes
    }


def _comparing(folder: Folder, manifest: Manifest, memory: Mapping[Path, memoryview]) -> Callable[[], None]:
    """Begin to compare the weights; what is returned waits for that, and raises what is wrong."""
    damaged = cache(_damaged(folder, manifest, memory))
    return lambda: raise_if_damaged(folder.path, damaged())


def _damaged(
    folder: Folder, manifest: Manifest, memory: Mapping[Path, memoryview]
) -> Callable[[], list[str]]:
    """Begin to compare the weights; what is returned waits for that, and gives a line for each block that is not what was written."""
    blocks = comparing_blocks([(file, mapped, manifest.files[file.name]) for file, mapped in memory.items()])
    return lambda: [
        f"{name}: its content is not what was written, somewhere in the block at byte {offset}"
        for name, offset in blocks()
    ]


def check_replaceable(folder: Path) -> None:
    """Raise LoadError unless a folder holds an artefact and nothing besides, so that nothing else is lost with it."""
    choose = "choose another place, or remove it first"
    try:
        home = Folder(folder)
        manifest = read_manifest(home)
    except LoadError as error:
        raise LoadError(
            f"{folder} is there already and is not an artefact of this nnfront",
            details=[error.what],
            help=choose,
        ) from None
    others = sorted(name for name in _contents(home) if name not in manifest.files)
    if others:
        raise LoadError(
            f"{folder} is there already and holds more than an artefact: {', '.join(others[:5])}", help=choose
        )


def _is_ours(name: str) -> bool:
    return name in (MANIFEST, PROGRAM, _INDEX) or _is_weights(name) or is_kernel_file(name)


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors")


def _unlisted(folder: Folder, manifest: Manifest) -> Iterator[str]:
    for name in _contents(folder):
        if name not in manifest.files and not name.startswith(_FOREIGN):
            yield f"{name}: not one of the artefact's files; remove it, or export again with it"


def _contents(folder: Folder) -> Iterator[str]:
    """The names of all that is in an artefact's folder but the manifest; of the folder of kernels what is in there."""
    for name in folder.names():
        kernels = folder.names(FOLDER) if name == FOLDER else []
        if kernels:
            yield from (f"{FOLDER}/{inner}" for inner in kernels)
        elif name != MANIFEST:
            yield name


def _size_problem(folder: Folder, name: str, digest: Digest) -> str | None:
    if not folder.has(name):
        return "the file is missing"
    try:
        size = os.fstat(folder.open(name)).st_size
    except LoadError as error:
        return ", ".join(error.details)
    if not _is_weights(name) and size > MAX_BYTES:
        return f"it has {size} bytes, {MAX_BYTES} are the most"
    if size == digest.size_bytes:
        return None
    return f"the file {'is truncated' if size < digest.size_bytes else 'has grown'}: {size} bytes, {digest.size_bytes} were written"
