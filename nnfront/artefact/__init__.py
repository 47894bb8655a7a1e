# SPDX-License-Identifier: Apache-2.0
"""Artefacts: compiled models as folders.

manifest, integrity    the table of contents, and checksums;  kernel_files  compiled kernels
folder                 the files of an artefact, opened and written;  tensor_names  its weights by name
save                   writing one
loader, exporter       a session of an artefact; an artefact of a Hugging Face folder: the names below

The last two stand above `session` and `compiler`, the others below them; so names are resolved on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

_PUBLIC = {
    **dict.fromkeys(
        ("check", "kernels_of", "load", "program_of", "session_of", "target_of"), "artefact.loader"
    ),
    "export": "artefact.exporter",
    "is_artefact": "weights.checkpoint",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'nnfront.artefact' has no attribute {name!r}")
    return getattr(importlib.import_module(f"nnfront.{_PUBLIC[name]}"), name)
