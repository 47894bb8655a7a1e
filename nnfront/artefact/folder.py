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

import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from nnfront.artefact.integrity import Digest, damaged_blocks, digest_files, digest_of
from nnfront.artefact.kernel_files import FOLDER, is_kernel_file, read_kernels, write_kernels
from nnfront.artefact.manifest import Manifest, read_manifest
from nnfront.backends.cuda.ahead.cubin import Ahead
from nnfront.errors import LoadError
from nnfront.ir import TensorType
from nnfront.weights.atomic_folder import put_folder
from nnfront.weights.checkpoint import MANIFEST, Checkpoint
from nnfront.weights.write import SHARD_BYTES, write_tensors

PROGRAM = "program.nnir"
WEIGHTS = "nnfront-weights"
_INDEX = f"{WEIGHTS}.safetensors.index.json"
_MAX_PROGRAM_BYTES = 1 << 30
# What people and tools put into any folder, and loading never looks at.
_FOREIGN = (".", "README", "LICENSE", "LICENCE", "NOTICE")


@dataclass(frozen=True, slots=True)
class ArtefactFiles:
    """An artefact that was found whole: its folder, its manifest, the text of its program, its tensors and its compiled kernels."""

    folder: Path
    manifest: Manifest
    program: str
    tensors: Checkpoint
    kernels: Ahead | None = None

    @property
    def copies(self) -> tuple[Path, ...]:
        """The files that were copied into it."""
        return tuple(self.folder / name for name in self.manifest.files if not _is_ours(name))


def write_artefact(
    folder: Path,
    manifest: Manifest,
    program: str,
    types: Mapping[str, TensorType],
    tensors: Iterable[tuple[str, torch.Tensor]],
    *,
    kernels: Ahead | None = None,
    copies: Sequence[Path] = (),
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
    phase: Callable[[str], None] = lambda name: None,
) -> None:
    """Write an artefact; an artefact that is there already is replaced in one step.

    `manifest` lacks the files, which are found here. `types` announces `tensors`, which may come in any order. `copies` are files
    that go into the folder as they are. `progress` is told how many bytes of how many are written, `phase` what has been done.
    Raises LoadError for a disk that is full or a folder that holds something else; then nothing has changed.
    """
    names = [file.name for file in copies]
    assert len(set(names)) == len(names), "every file has a name of its own"
    assert not any(map(_is_ours, names)), "copies do not have the names of the artefact's own files"
    with put_folder(folder, check_replaceable) as place:
        files = write_tensors(
            place, WEIGHTS, types, tensors, shard_bytes=shard_bytes, progress=progress, is_indexed=True
        )
        phase("write")
        try:
            for file in copies:
                shutil.copyfile(file, place / file.name)
            files.extend(place / name for name in names)
            if kernels is not None:
                files.extend(write_kernels(place, kernels))
            (place / PROGRAM).write_text(program, encoding="utf-8")
            listed = [file.relative_to(place).as_posix() for file in files]
            digests = dict(zip(listed, digest_files(files), strict=True))
            whole = replace(manifest, files={PROGRAM: digest_of(program.encode()), **digests})
            (place / MANIFEST).write_text(whole.text(), encoding="utf-8")
        except OSError as error:
            raise LoadError(f"{folder} cannot be written: {error.strerror}") from error
        phase("hash")


def read_artefact(folder: str | Path, *, verify: bool = True) -> ArtefactFiles:
    """Open an artefact: check that its files are those that were written, and read all but the weights.

    With `verify` the bytes of the weights are read and compared with their CRC-32s; without it only their sizes and headers are checked.
    Raises LoadError that lists what is wrong.
    """
    place = Path(folder)
    manifest = read_manifest(place)
    raise_if_damaged(place, find_damage(place, manifest, weights="quick" if verify else "sizes"))
    try:
        program = (place / PROGRAM).read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise LoadError(f"{place / PROGRAM} cannot be read: {error}") from None
    tensors = Checkpoint(place / _INDEX)
    strange = [file.name for file in tensors.files if file.name not in manifest.files]
    if strange:
        raise LoadError(f"{place / _INDEX} names {', '.join(strange)}, which {MANIFEST} does not list")
    return ArtefactFiles(place, manifest, program, tensors, read_kernels(place, manifest))


def check_files(folder: str | Path) -> list[str]:
    """Compare every byte with the SHA-256s and return what is wrong, a line for each problem. Raises LoadError for a manifest that cannot be read."""
    place = Path(folder)
    return find_damage(place, read_manifest(place), weights="full")


def raise_if_damaged(folder: Path, problems: Sequence[str]) -> None:
    """Raise one LoadError for what `find_damage` found."""
    if problems:
        raise LoadError(
            f"{folder} is not the artefact that was written",
            details=problems,
            help="copy it again, or export the model again",
        )


def find_damage(folder: Path, manifest: Manifest, *, weights: str) -> list[str]:
    """Return a line for each file that is missing, of another size or content, or not listed.

    `weights` is how far weights are compared: "sizes", "quick" (CRC-32) or "full" (SHA-256); other files always are in full.
    """
    problems = [
        f"{name}: {MANIFEST} does not list it" for name in (PROGRAM, _INDEX) if name not in manifest.files
    ]
    problems.extend(_unlisted(folder, manifest))
    sized: list[str] = []
    for name, digest in manifest.files.items():
        problem = _size_problem(folder / name, digest)
        if problem is None:
            sized.append(name)
        else:
            problems.append(f"{name}: {problem}")
    exact = [name for name in sized if weights == "full" or not _is_weights(name)]
    for name, found in zip(exact, digest_files([folder / name for name in exact]), strict=True):
        if found.sha256 != manifest.files[name].sha256:
            problems.append(f"{name}: its content is not what was written: its sha256 is {found.sha256}")
    quick = [name for name in sized if weights == "quick" and _is_weights(name)]
    for file, offset in damaged_blocks([(folder / name, manifest.files[name]) for name in quick]):
        problems.append(
            f"{file.name}: its content is not what was written, somewhere in the block at byte {offset}"
        )
    return problems


def check_replaceable(folder: Path) -> None:
    """Raise LoadError unless a folder holds an artefact and nothing besides, so that nothing else is lost with it."""
    choose = "choose another place, or remove it first"
    try:
        manifest = read_manifest(folder)
    except LoadError as error:
        raise LoadError(
            f"{folder} is there already and is not an artefact of this nnfront",
            details=[error.what],
            help=choose,
        ) from None
    others = sorted(name for name in _contents(folder, manifest) if name not in manifest.files)
    if others:
        raise LoadError(
            f"{folder} is there already and holds more than an artefact: {', '.join(others[:5])}", help=choose
        )


def _is_ours(name: str) -> bool:
    return name in (MANIFEST, PROGRAM, _INDEX) or _is_weights(name) or is_kernel_file(name)


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors")


def _unlisted(folder: Path, manifest: Manifest) -> Iterator[str]:
    for name in sorted(_contents(folder, manifest)):
        if name not in manifest.files and not name.startswith(_FOREIGN):
            yield f"{name}: not one of the artefact's files; remove it, or export again with it"


def _contents(folder: Path, manifest: Manifest) -> Iterator[str]:
    """The names of all that is in an artefact's folder but the manifest; of the folder of kernels, if it has one, of what is in there."""
    has_kernels = any(name.startswith(f"{FOLDER}/") for name in manifest.files)
    for file in folder.iterdir():
        if file.name == FOLDER and has_kernels and file.is_dir():
            yield from (f"{FOLDER}/{inner.name}" for inner in file.iterdir())
        elif file.name != MANIFEST:
            yield file.name


def _size_problem(file: Path, digest: Digest) -> str | None:
    if not file.is_file():
        return "the file is missing"
    size = file.stat().st_size
    if file.name == PROGRAM and size > _MAX_PROGRAM_BYTES:
        return f"a program has at most {_MAX_PROGRAM_BYTES >> 20} MB"
    if size == digest.size_bytes:
        return None
    return f"the file {'is truncated' if size < digest.size_bytes else 'has grown'}: {size} bytes, {digest.size_bytes} were written"
