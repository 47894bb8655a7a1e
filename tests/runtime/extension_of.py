# SPDX-License-Identifier: Apache-2.0
"""The extension, compiled and loaded from a test's own sources."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import subprocess
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

import pytest

from nnfront.backends.cpu import extension


def extension_of(folder: Path, sources: Iterable[str]) -> ModuleType:
    """Compile files of a folder, in which the table is as well, and load what comes out, ready to run."""
    made, include = folder / "native.so", sysconfig.get_paths()["include"]
    files = [str(folder / name) for name in sources]
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", f"-I{include}", *files, "-o", made, "-lm"], check=True)
    loader = importlib.machinery.ExtensionFileLoader("native", str(made))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("native", loader))  # type: ignore[arg-type]
    loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(extension, "TABLE", folder / extension.TABLE.name)
        ready = extension.find_native(module, extension.torch_library())
    assert ready is not None
    return ready
