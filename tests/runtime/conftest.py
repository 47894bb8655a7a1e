# SPDX-License-Identifier: Apache-2.0
"""Lets tests here record with the tape of the kernels' tests."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "kernels"))
