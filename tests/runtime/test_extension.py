# SPDX-License-Identifier: Apache-2.0
"""Where the kernels in C are used, and where not."""

import ctypes
import os
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from few_of import few_of

from nnfront.backends.cpu import extension
from nnfront.backends.cpu.extension import TABLE, find_native, torch_library
from nnfront.cli import main
from nnfront.errors import RunError


def module(taken: list) -> SimpleNamespace:
    """Stands for the extension: notes what it is told."""
    return SimpleNamespace(
        sets=["wide", "narrow"],
        table=TABLE.read_text(),
        use_torch=lambda *entries: taken.extend(entries),
        use_set=taken.append,
        used_set=lambda: taken[-1],
        has_tiles=lambda: taken[-1] == "wide",
    )


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_there_are_kernels_in_c_wherever_there_is_a_compiler():
    """Or every case that needs them would be left out, and nobody told."""
    assert extension.NATIVE is not None, extension.instructions()


def test_the_kernels_run_on_tensors_and_threads_of_torch():
    taken: list[int] = []
    stands_for_it = module(taken)
    assert find_native(stands_for_it, torch_library()) is stands_for_it
    assert len(taken) == 4
    assert all(taken)


def test_the_fastest_set_of_instructions_runs_or_the_one_that_is_named(monkeypatch):
    taken: list[int] = []
    monkeypatch.setattr(extension, "NATIVE", find_native(module(taken), torch_library()))
    assert extension.instructions() == "wide and matrix tiles (this processor also runs narrow)"
    monkeypatch.setattr(extension, "NATIVE", find_native(module(taken), torch_library(), "narrow"))
    assert extension.instructions() == "narrow (this processor also runs wide)"


def test_a_set_that_the_processor_does_not_run_is_refused():
    text = (
        "this processor does not run kernels for 'neon'\n  it runs wide, narrow\n"
        "  help: set NNFRONT_INSTRUCTIONS to one of them, or to nothing for the fastest"
    )
    with pytest.raises(RunError) as caught:
        find_native(module([]), torch_library(), "neon")
    assert str(caught.value) == text


@pytest.mark.skipif(extension.NATIVE is None, reason="no kernels in C")
def test_sets_of_the_build_are_chosen_by_name_and_others_refused():
    native = extension.NATIVE
    assert native.sets[-1] == "portable"
    for name in reversed(native.sets):
        native.use_set(name)
        assert native.used_set() == name
    with pytest.raises(ValueError, match="this processor does not run kernels for sse9"):
        native.use_set("sse9")
    with pytest.raises(TypeError, match="use_set takes 1 argument, got 0"):
        native.use_set()
    with pytest.raises(TypeError, match="bad argument type"):
        native.use_set(1)
    assert native.used_set() == native.sets[0]


RUN = """
import sys, warnings
warnings.simplefilter("error")
import torch
{before}
import nnfront as nn
from nnfront import spec
from nnfront.backends.cpu.extension import instructions
print(instructions())
class Model(nn.Module):
    def __init__(self):
        self.proj = nn.Linear(8, 4, bias=False)
    def forward(self, x):
        return self.proj(x)
ir = Model().export({{"forward": {{"x": spec.Tensor(["n", 8], "float32")}}}})
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    session = nn.compile(ir).load({{"proj.weight": torch.ones(4, 8)}})
    nn.compile(ir)
print(session["forward"](torch.ones(1, 8)).tolist(), len(said), *(one.message for one in said))
"""


def run(before: str = "", **environment: str) -> list[str]:
    """Lines that a process prints, in which `before` runs first."""
    command = [sys.executable, "-c", RUN.format(before=before)]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | environment
    ).stdout.splitlines()


@pytest.mark.skipif(extension.NATIVE is None, reason="no kernels in C")
def test_the_environment_names_the_set_that_runs():
    first, second = run(NNFRONT_INSTRUCTIONS="portable")
    assert first.startswith("portable (this processor also runs")
    assert second == "[[8.0, 8.0, 8.0, 8.0]] 0"


MISSING = (
    "nnfront runs on torch's kernels alone, and decodes slower than memory allows; its own in C: none: {}. "
    "Install a wheel of nnfront for this machine, or a C compiler and nnfront again"
)


@pytest.mark.parametrize(
    ("before", "why"),
    few_of(
        [
            ("sys.modules['nnfront.backends.cpu.native'] = None", "they are not there"),
            ("WRONG", "they were built for another machine (file too short)"),
        ]
    ),
    ids=["not built", "another machine"],
)
def test_without_kernels_it_runs_and_says_once_what_is_missing(before, why, tmp_path):
    if before == "WRONG":  # what the system says of a file that it cannot load
        before = """
class Wrong:
    def find_spec(self, name, path=None, target=None):
        if name == "nnfront.backends.cpu.native":
            raise ImportError("file too short")
sys.meta_path.insert(0, Wrong())
"""
    first, second = run(before)
    assert first == f"none: {why}"
    assert second == f"[[8.0, 8.0, 8.0, 8.0]] 1 {MISSING.format(why)}"


def test_without_a_build_tensors_or_openmp_there_are_no_kernels(monkeypatch):
    taken: list[int] = []
    assert find_native(None, torch_library()) is None
    assert find_native(module(taken), None) is None
    monkeypatch.delattr(torch.Tensor, "__dlpack_c_exchange_api__")
    assert find_native(module(taken), torch_library()) is None
    monkeypatch.undo()
    monkeypatch.setattr(extension, "_OPENMP", ("no_such_name",))
    assert find_native(module(taken), torch_library()) is None
    assert not taken


@pytest.mark.parametrize("change", ["nothing", "another name", "another size", "none"])
def test_kernels_of_another_source_are_not_called(change):
    taken: list[int] = []
    old = module(taken)
    if change == "none":
        del old.table
    else:
        text = {"nothing": "", "another name": old.table.replace("rotate", "turn")}
        old.table = text.get(change, old.table.replace("IN(both, 4 *", "IN(both, 2 *"))
    with pytest.warns(
        UserWarning, match="kernels in C are older than nnfront and do not run: install it again"
    ):
        assert find_native(old, torch_library()) is None
    assert not taken


@pytest.mark.skipif(extension.NATIVE is None, reason="no kernels in C")
@pytest.mark.parametrize("major", [0, 2])
def test_tensors_of_another_version_are_not_read(major):
    table = (ctypes.c_uint64 * 8)(major, *[1] * 7)
    make = ctypes.pythonapi.PyCapsule_New
    make.restype, make.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    with pytest.raises(ValueError, match=f"DLPack of version 1 is wanted, torch has {major}"):
        extension.NATIVE.use_torch(make(ctypes.addressof(table), b"dlpack_exchange_api", None), 0, 0)
    with pytest.raises(ValueError, match="PyCapsule"):
        extension.NATIVE.use_torch(None, 0, 0)
    with pytest.raises(TypeError, match="use_torch takes 3 arguments, got 1"):
        extension.NATIVE.use_torch(None)


@pytest.mark.skipif(extension.NATIVE is None, reason="no kernels in C")
def test_explain_says_what_runs_between_tapes_of_calls_in_c(capsys):
    assert main(["explain", "examples/checkpoints/pylib-3m"]) == 0
    (line,) = [x for x in capsys.readouterr().out.splitlines() if x.startswith("decode: ")]
    before, _, listed = line.partition(" in C: ")
    assert before == "decode: run by themselves, between tapes of calls"
    assert {*listed.split(", ")} == {"cache_split", "cache_positions"}


def test_explain_ends_with_the_set_that_runs(capsys):
    assert main(["explain", "examples/checkpoints/pylib-3m"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"kernels in C: {extension.instructions()}"
