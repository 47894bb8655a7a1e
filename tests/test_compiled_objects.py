# SPDX-License-Identifier: Apache-2.0
"""What `setup.py` keeps of compiled sources, by a small extension of its own."""

import os
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from nnfront.backends.cpu import extension

ROOT = Path(__file__).resolve().parents[1]
PROJECT = """
[project]
name = "small"
version = "0"
[tool.setuptools]
py-modules = []
[[tool.setuptools.ext-modules]]
name = "small"
sources = ["c/small.c"]
"""
SOURCE = """
#include <Python.h>
#include "number.h"
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "small", NULL, NUMBER, NULL};
PyMODINIT_FUNC PyInit_small(void) { return PyModule_Create(&module); }
"""


@pytest.mark.skipif(extension.NATIVE is None, reason="no kernels in C")
def test_a_source_is_compiled_again_only_when_a_file_of_its_folder_or_a_flag_changes(tmp_path):
    shutil.copy(ROOT / "setup.py", tmp_path)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "small.c").write_text(SOURCE)
    header = tmp_path / "c" / "number.h"
    header.write_text("#define NUMBER -1\n")
    builds = count()

    def compiled(**flags: str) -> dict[str, int]:
        """When each object was made, after a build into a folder of its own."""
        command = (
            sys.executable,
            "setup.py",
            "-q",
            "build_ext",
            "--build-lib",
            f"lib{next(builds)}",
        )
        subprocess.run(command, check=True, capture_output=True, cwd=tmp_path, env={**os.environ, **flags})
        objects = (tmp_path / "build" / "objects").rglob("*.o")
        return {str(path): path.stat().st_mtime_ns for path in objects}

    first = compiled()
    assert len(first) == 1
    assert compiled() == first
    os.utime(header, ns=(max(first.values()) + 10**9,) * 2)
    again = compiled()
    assert again.keys() == first.keys()
    assert again != first
    assert len(compiled(CFLAGS="-DANOTHER=1")) == 2
    with (tmp_path / "pyproject.toml").open("a") as file:
        file.write('extra-compile-args = ["-O1"]\n')
    assert len(compiled()) == 3
