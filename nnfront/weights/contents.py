# SPDX-License-Identifier: Apache-2.0
"""Content hashes of a checkpoint's tensors, kept beside the cache so that bytes are hashed once, not on every start.

A file is known by path, size, inode and time of last change: whoever changes bytes and sets the time back gets old hashes.
Each tensor has a hash of its own, so that replacing one of them renews only what is made of it.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from nnfront.weights.checkpoint import Checkpoint
from nnfront.weights.write import write_text


class Contents:
    """Hashes of tensors, computed when first asked for and remembered in `folder`; call `save` to keep the new ones."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        self.checkpoint = checkpoint
        self.folder = folder
        self._known: dict[Path, dict[str, str]] = {}
        self._changed: set[Path] = set()

    def hash(self, name: str) -> str:
        """Return the hash of a tensor's bytes."""
        info = self.checkpoint.info(name)
        record = _record(self.folder, info.file)
        known = self._known.get(record)
        if known is None:
            known = self._known[record] = _read(record)
        if name not in known:
            known[name] = _digest(self.checkpoint, name)
            self._changed.add(record)
        return known[name]

    def save(self) -> None:
        """Write down what has been hashed since the last time. Raises LoadError if the folder cannot be written to."""
        for record in sorted(self._changed):
            write_text(record, json.dumps(self._known[record]))
        self._changed.clear()


def _record(folder: Path, file: Path) -> Path:
    """The file that remembers the hashes of one state of one file."""
    stat = os.stat(file)
    identity = f"{os.path.realpath(file)}:{stat.st_size}:{stat.st_ino}:{stat.st_mtime_ns}"
    return folder / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"


def _read(record: Path) -> dict[str, str]:
    try:
        known = json.loads(record.read_text())
    except (OSError, ValueError):
        return {}
    is_whole = isinstance(known, dict) and all(isinstance(value, str) for value in known.values())
    return known if is_whole else {}


def _digest(checkpoint: Checkpoint, name: str) -> str:
    digest = hashlib.sha256()
    for block in checkpoint.blocks(name):
        digest.update(block)
    return digest.hexdigest()
