# SPDX-License-Identifier: Apache-2.0
"""bench/gpu/runtime.py as far as it goes without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "bench" / "gpu" / "runtime.py"


def test_the_script_for_a_gpu_finds_played_steps_right():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--dry"], capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [
        f"ok    {what}, pages of 16" for what in ("played steps have the bits of others", "steps are played")
    ]
