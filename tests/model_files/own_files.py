# SPDX-License-Identifier: Apache-2.0
"""A trained model and the text of its model file, which tests write out changed."""

from __future__ import annotations

from pathlib import Path

from nnfront_models import llama

FOLDER = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"
LLAMA = Path(llama.__file__).read_text(encoding="utf-8")


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path
