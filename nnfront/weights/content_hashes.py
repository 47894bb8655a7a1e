# SPDX-License-Identifier: Apache-2.0
"""Content hashes of a checkpoint's tensors, kept beside the cache so that bytes are hashed once, not on every start.

The hashes of a file are remembered for one state of it: its path, inode, size, and times of modification and of change. The time of
change is the system's: it moves whenever bytes are written, and no program can set it back, so old bytes are never taken for new ones
as long as the clock runs forward. A file that changed just now is waited for until its clock has ticked. What moves the time of change
without changing bytes (chmod, a new hard link) costs one more hashing and nothing else.
Each tensor has a hash of its own, so that replacing one of them renews only what is made of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nnfront.errors import LoadError
from nnfront.files import Folder
from nnfront.weights.checkpoint import Checkpoint, FileState
from nnfront.weights.write import write_text

TICK_NS = 50_000_000
"""Times of files are as exact as the system's tick: 1 to 10 ms on Linux. A file must be older than this to be remembered."""
_THREADS = 8  # beyond, memory is the limit


class Contents:
    """Hashes of tensors, computed when first asked for and remembered in `folder`; call `save` to keep the new ones."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        self.checkpoint = checkpoint
        self.folder = folder
        self._known: dict[Path, dict[str, str]] = {}
        self._changed: set[Path] = set()

    def hashes(self, names: Iterable[str]) -> dict[str, str]:
        """Return the hashes of several tensors, those that are not remembered computed on all cores.

        Raises LoadError if a file changes meanwhile.
        """
        wanted = {name: self._record(name) for name in names}
        for record in set(wanted.values()):
            if record not in self._known:
                self._known[record] = _read(record)
        new = [name for name, record in wanted.items() if name not in self._known[record]]
        if new:
            with ThreadPoolExecutor(min(len(new), os.cpu_count() or 1, _THREADS)) as pool:
                for name, digest in zip(new, pool.map(self._digest, new), strict=True):
                    self._known[wanted[name]][name] = digest
                    self._changed.add(wanted[name])
        return {name: self._known[record][name] for name, record in wanted.items()}

    def are_equal(self, one: str, two: str) -> bool:
        """Whether two tensors have the same bytes."""
        found = self.hashes([one, two])
        return found[one] == found[two]

    def save(self) -> None:
        """Write down what has been hashed since the last time. Raises LoadError if the folder cannot be written to."""
        for record in sorted(self._changed):
            write_text(record, json.dumps(self._known[record]))
        self._changed.clear()

    def _record(self, name: str) -> Path:
        """The file that remembers the hashes of the present state of a tensor's file."""
        file, state = self.checkpoint.info(name).file, self.checkpoint.state(name)
        identity = repr((os.path.realpath(file), *state))
        return self.folder / f"{hashlib.sha256(identity.encode()).hexdigest()}.json"

    def _digest(self, name: str) -> str:
        before = self.checkpoint.state(name)
        _wait(before)
        digest = hashlib.sha256()
        for block in self.checkpoint.blocks(name):
            digest.update(block)
        if self.checkpoint.state(name) != before:
            raise LoadError(f"{self.checkpoint.info(name).file}: the file was changed while it was read")
        return digest.hexdigest()


def _wait(state: FileState) -> None:
    """Wait until any further change of a file would give it another time."""
    age_ns = time.time_ns() - state.changed_ns
    if age_ns < TICK_NS:
        time.sleep(min(TICK_NS - age_ns, TICK_NS) / 1e9)


def _read(record: Path) -> dict[str, str]:
    try:
        known = Folder(record.parent).read_json(record.name)
    except LoadError:
        return {}
    is_whole = isinstance(known, dict) and all(isinstance(value, str) for value in known.values())
    return known if is_whole else {}
