# SPDX-License-Identifier: Apache-2.0
"""The training scripts are run as files, not installed; put their folder on the path for the tests."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib"))
