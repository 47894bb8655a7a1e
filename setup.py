# SPDX-License-Identifier: Apache-2.0
"""What `pyproject.toml` cannot say: how the sources in C, one for each set of instructions, are compiled.

As many at a time as there are cores or NNFRONT_BUILD_JOBS says, which takes minutes: so what was compiled is kept in build/objects, for the
same interpreter, machine and flags, those of `pyproject.toml` among them, until a file of its source's folder changes.
"""

import os
import sys
import sysconfig
import tomllib
from hashlib import sha256
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile
from setuptools import setup


def is_older(compiled: str, source: str) -> bool:
    """Whether a source, or what it may include, is newer than what it was compiled to."""
    return Path(compiled).stat().st_mtime < max(
        path.stat().st_mtime for path in Path(source).parent.iterdir()
    )


project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
given = [os.environ.get(name) for name in ("ARCHFLAGS", "CC", "CFLAGS", "CPPFLAGS")]
flags = repr((sys.version, sysconfig.get_platform(), given, project["ext-modules"]))
kept = Path("build", "objects", sha256(flags.encode()).hexdigest()[:12])
ParallelCompile("NNFRONT_BUILD_JOBS", needs_recompile=is_older).install()
setup(options={"build_ext": {"build_temp": str(kept)}})
