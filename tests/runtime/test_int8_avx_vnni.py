# SPDX-License-Identifier: Apache-2.0
"""The set `avx2_vnni` on processors without AVX-VNNI: AVX512 has its instructions under other encodings, which are put in their place in what the compiler wrote."""

import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import int8_case
import pytest
import torch
from extension_of import extension_of
from int8_case import WAYS, Case, columns_for

from nnfront.backends.cpu import extension

pytestmark = [
    pytest.mark.skipif(
        extension.NATIVE is None or "avx512_vnni" not in extension.NATIVE.sets,
        reason="no AVX512 with VNNI",
    ),
    pytest.mark.skipif(shutil.which("gcc") is None, reason="no compiler that writes encodings"),
]
# In the place of the other sets: a base of which nothing is called.
BASE = """
#include "native.h"
static bool runs(void) { return true; }
const Kernels kernels_avx2 = {.set = "avx2", .runs = runs};
"""
INSTRUCTIONS = "vpdpbusd", "vpdpwssd"


@pytest.fixture(scope="module")
def native(tmp_path_factory) -> ModuleType:
    """The extension with these kernels alone."""
    folder = tmp_path_factory.mktemp("c") / "c"
    shutil.copytree(extension.TABLE.parent, folder)
    change(
        folder / "native.h",
        "set(avx512_bf16) set(avx512_vnni) set(avx512) set(avx2_vnni) set(avx2) set(portable)",
        "set(avx2_vnni) set(avx2)",
    )
    change(folder / "set_avx2_vnni.c", "#define RUNS has_avx_vnni()", "#define RUNS true")
    subprocess.run(["gcc", "-O1", "-fPIC", "-S", "set_avx2_vnni.c"], check=True, cwd=folder)
    for name in INSTRUCTIONS:
        change(folder / "set_avx2_vnni.s", f"{{vex}} {name}", f"{{evex}} {name}")
    (folder / "base.c").write_text(BASE)
    return extension_of(folder, ("module.c", "base.c", "set_avx2_vnni.s"))


def change(path: Path, before: str, after: str) -> None:
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


@pytest.mark.parametrize(("name", "group"), WAYS, ids=str)
def test_bytes_by_fours_of_32_at_a_time_give_the_bits_of_those_in_pairs(native, monkeypatch, name, group):
    torch.manual_seed(0)
    case = Case(name, group, 70, columns_for(name, group, 704), 37, is_wide=True)
    extension.NATIVE.use_set("avx2")  # which has vectors of as many bytes
    try:
        expected = case.run(case.x)
    finally:
        extension.NATIVE.use_set(extension.NATIVE.sets[0])
    monkeypatch.setattr(int8_case, "NATIVE", native)
    for rows in (1, 2, 3, 4, 5, 7, 16, 17, 70):
        assert torch.equal(case.run(case.x[:rows].clone()), expected[:rows]), rows
