# SPDX-License-Identifier: Apache-2.0
"""Makes the transforms of the runtime's tests importable here: files of results are tested with the same cases."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))
