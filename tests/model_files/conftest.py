# SPDX-License-Identifier: Apache-2.0
"""A copy of the trained model's folder."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from own_files import FOLDER


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "model"))
