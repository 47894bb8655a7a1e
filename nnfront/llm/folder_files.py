# SPDX-License-Identifier: Apache-2.0
"""The JSON files of a Hugging Face folder."""

from __future__ import annotations

from typing import Any

from nnfront.errors import LoadError
from nnfront.files import Folder

CONFIG, GENERATION = "config.json", "generation_config.json"


def read_json(
    folder: Folder, name: str, help: str = "give a Hugging Face folder, with config.json and safetensors"
) -> dict[str, Any]:
    """Read a JSON object. Raises LoadError if the file is not there or holds something else."""
    if not folder.has(name):
        raise LoadError(
            f"{folder.path / name} does not exist",
            help=help,
        )
    found = folder.read_json(name)
    if not isinstance(found, dict):
        raise LoadError(f"{folder.path / name} does not hold a JSON object")
    return found
