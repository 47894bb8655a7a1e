# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels in an artefact: `kernels.json` says how each is launched (`nnfront.backends.cuda.ahead.cubin`), `kernels/KEY.cubin` is its code.

    {"arch": "sm_90", "kernels": [{"key": "1f0c...", ...}], "notes": {"generate": "take at model: ..."}}

Machine code is taken only from files that the manifest lists, and only if they have the hash that it gives.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from nnfront.artefact.manifest import Manifest
from nnfront.backends.cuda.ahead.cubin import CompiledKernels, Cubin, read_cubin
from nnfront.errors import LoadError
from nnfront.files import Folder, parse_json, shown
from nnfront.weights.checkpoint import MANIFEST

KERNELS = "kernels.json"
FOLDER = "kernels"


def is_kernel_file(name: str) -> bool:
    """Whether a file of an artefact, by its name in the manifest, is about kernels."""
    return name == KERNELS or name.startswith(f"{FOLDER}/")


def write_kernels(place: Path, ahead: CompiledKernels) -> list[Path]:
    """Write compiled kernels into a folder that is being made; return the files. Raises OSError."""
    if ahead.cubins:
        (place / FOLDER).mkdir()
    fields = {
        "arch": ahead.arch,
        "kernels": [cubin.fields() for cubin in ahead.cubins],
        "notes": dict(ahead.notes),
    }
    files = [place / KERNELS]
    files[0].write_text(json.dumps(fields, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for cubin in ahead.cubins:
        files.append(place / _name(cubin.key))
        files[-1].write_bytes(cubin.image)
    return files


def read_kernels(folder: Folder, manifest: Manifest) -> CompiledKernels | None:
    """Read the compiled kernels of an artefact, None if it has none.

    Raises LoadError for kernels that the manifest does not list or whose content has another hash, for files that no kernel names,
    and for kernels of another GPU than the artefact's target.
    """
    if KERNELS not in manifest.files:
        return None
    file = folder.path / KERNELS
    try:
        found = _compiled(folder, manifest, _parsed(folder, manifest))
    except LoadError as error:
        raise LoadError(
            f"{file} cannot be used", details=[error.what, *error.details], help=error.help
        ) from None
    listed = {name for name in manifest.files if name.startswith(f"{FOLDER}/")}
    unnamed = sorted(listed - {_name(cubin.key) for cubin in found.cubins})
    if unnamed:
        raise LoadError(f"{file} does not say how to launch {', '.join(unnamed[:5])}")
    archs = {found.arch, *(cubin.arch for cubin in found.cubins)}
    if archs != {manifest.target.partition(":")[2]}:
        raise LoadError(
            f"{file} has kernels for {', '.join(sorted(archs))}, the artefact is for {manifest.target!r}"
        )
    return found


def _name(key: str) -> str:
    return f"{FOLDER}/{key}.cubin"


def _parsed(folder: Folder, manifest: Manifest) -> Any:
    try:
        return parse_json(_content(folder, manifest, KERNELS), is_strict=True)
    except ValueError as error:
        raise LoadError("it is not JSON", details=[str(error)]) from None


def _content(folder: Folder, manifest: Manifest, name: str) -> bytes:
    """The bytes of a file, which are those that the manifest names."""
    if name not in manifest.files:
        raise LoadError(f"it names {shown(name)}, which {MANIFEST} does not list")
    data = folder.read(name)
    found = hashlib.sha256(data).hexdigest()
    if found != manifest.files[name].sha256:
        raise LoadError(
            f"{name} is not what was written",
            details=[f"its sha256 is {found}", f"expected {manifest.files[name].sha256}"],
            help="copy the artefact again, or export the model again",
        )
    return data


def _compiled(folder: Folder, manifest: Manifest, fields: Any) -> CompiledKernels:
    if not isinstance(fields, dict) or sorted(fields) != ["arch", "kernels", "notes"]:
        raise LoadError("expected the fields 'arch', 'kernels' and 'notes'")
    arch, kernels, notes = fields["arch"], fields["kernels"], fields["notes"]
    if not isinstance(arch, str):
        raise LoadError(f"arch is {arch!r:.80}, expected a text")
    if not isinstance(kernels, list):
        raise LoadError(f"kernels are {kernels!r:.80}, expected a list")
    if not isinstance(notes, dict) or not all(isinstance(note, str) for note in notes.values()):
        raise LoadError(f"notes are {notes!r:.80}, expected texts")
    cubins = tuple(_cubin(folder, manifest, each) for each in kernels)
    if len({cubin.key for cubin in cubins}) != len(cubins):
        raise LoadError("a kernel occurs twice")
    return CompiledKernels(arch, cubins, notes)


def _cubin(folder: Folder, manifest: Manifest, given: Any) -> Cubin:
    key = given.get("key") if isinstance(given, dict) else None
    return read_cubin(given, _content(folder, manifest, _name(str(key))))
