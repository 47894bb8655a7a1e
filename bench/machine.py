# SPDX-License-Identifier: Apache-2.0
"""What every benchmark shares: the machine and versions in words, measurements in a process of their own, and result files."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def describe(*packages: str) -> dict[str, str]:
    """Return date, processor, core count and the versions of packages."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    found = {"date": datetime.date.today().isoformat(), "cpu": model, "cores": str(os.cpu_count())}
    found["python"] = platform.python_version()
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def measure(script: Path, *args: object) -> dict[str, Any]:
    """Run a script in a fresh process and return the JSON object in the last line it prints."""
    command = [sys.executable, str(script), *map(str, args)]
    started = {
        "BENCH_START": repr(time.time())
    }  # so that a script can count from before its interpreter started
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **started}, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


def read_afresh(file: Path) -> None:
    """Let the page cache hold a file as after a start of the machine: what was written piece by piece lies there in pieces."""
    with open(file, "rb", buffering=0) as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while opened.read(1 << 24):
            pass


def keep(name: str, machine: dict[str, str], rows: list[dict[str, Any]]) -> Path:
    """Write the results as JSON and return the path."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")
    return path


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a Markdown table; floats with four significant digits."""

    def cell(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value)

    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(cell(row.get(c, "")) for c in columns) + " |" for row in rows]
    return "\n".join(lines)
