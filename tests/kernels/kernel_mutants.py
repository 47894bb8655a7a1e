# SPDX-License-Identifier: Apache-2.0
"""Kernels with one deliberate mistake each. A test suite that lets one through is not testing that line.

A mutant is a copy of the whole package with one piece of text exchanged, imported under a name of its own.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

import nnfront_kernels

SOURCE = Path(nnfront_kernels.__file__).parent
# Triton reads a kernel's source again when it runs it, so the copies live until the process ends.
FOLDERS: list[tempfile.TemporaryDirectory[str]] = []


@dataclass(frozen=True)
class Mutant:
    """One mistake: `new` in the place of `old`, which `file` has once. ValueError for another: where nothing is exchanged nothing is found."""

    name: str
    file: str
    old: str
    new: str

    def __post_init__(self) -> None:
        places = SOURCE.joinpath(self.file).read_text().count(self.old) if self.file else 1
        if places != 1:
            raise ValueError(f"{self.name}: {places} places in {self.file} read {self.old!r}")

    def __str__(self) -> str:
        return self.name


@cache
def package(mutant: Mutant) -> ModuleType:
    """Import the package with the mistake in it."""
    name = f"mutant_{len(FOLDERS)}_{mutant.name}"  # counted, as mistakes of two tests may share a name and a file
    FOLDERS.append(tempfile.TemporaryDirectory(prefix="mutant_"))
    folder = Path(FOLDERS[-1].name)
    (folder / name).mkdir()
    for path in SOURCE.glob("*.py"):
        text = path.read_text()
        if path.name == mutant.file:
            text = text.replace(mutant.old, mutant.new)
        (folder / name / path.name).write_text(text.replace("nnfront_kernels", name))
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
