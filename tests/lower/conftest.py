# SPDX-License-Identifier: Apache-2.0
"""Lets tests here draw calls of ops from the strategies of the ops' own tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "ops"))
