# SPDX-License-Identifier: Apache-2.0
"""Compiled kernels in an artefact: written, listed, hashed, read back as they were, and refused if anything about them is wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from artefact_cases import rehash, reseal
from fake_cubins import ahead_of
from nnfront_kernels.common import planning_for

import nnfront as nn
from nnfront import spec
from nnfront.artefact.save import Options
from nnfront.backends.cuda.ahead import enumerate_kernels
from nnfront.backends.cuda.ahead import launcher as launcher_module
from nnfront.backends.cuda.ahead.cubin import CompiledKernels
from nnfront.backends.cuda.ahead.launcher import Launcher
from nnfront.backends.device import CPU, overriding_device
from nnfront.errors import LoadError
from nnfront.files import Folder

FIRST, SECOND = "0" * 16, "f" * 16
KERNELS = ahead_of(FIRST, SECOND, notes={"look": "take: no data"})
WEIGHTS = {"weight": torch.ones(32, 64, dtype=torch.float16)}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Instead of compiling: what was asked to be."""
    found: list[Any] = []

    def compiled(
        program: Any, known: Any, sizes: Any = None, progress: Any = None, **draws: bool
    ) -> CompiledKernels | None:
        found.append((sizes, *draws.values()))
        return KERNELS if ":" in program.target else None

    monkeypatch.setattr(enumerate_kernels, "kernels_of", compiled)
    return found


def saved(folder: Path, target: str = "cuda:sm_90", **options: Any) -> Path:
    ir = nn.Linear(64, 32, bias=False, dtype="float16").export(
        {"forward": {"x": spec.Tensor(["n", 64], "float16")}}
    )
    nn.compile(ir, target=target).save(folder / "a", WEIGHTS, options=Options(**options))
    return folder / "a"


def names(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def test_kernels_are_files_of_the_artefact(asked: list[Any], tmp_path: Path) -> None:
    folder = saved(tmp_path, sizes={"n": [1, 8]})
    assert asked == [({"n": [1, 8]}, False)]
    assert [name for name in names(folder) if "kernel" in name] == [
        "kernels.json",
        f"kernels/{FIRST}.cubin",
        f"kernels/{SECOND}.cubin",
    ]
    listed = json.loads((folder / "nnfront.json").read_text())
    assert {"kernels.json", f"kernels/{FIRST}.cubin"} <= listed["files"].keys()
    assert listed["schema"] == 2
    assert nn.artefact.kernels_of(folder) == KERNELS
    assert nn.artefact.check(folder) == []


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_an_artefact_without_kernels_is_as_it_was(asked: list[Any], tmp_path: Path, target: str) -> None:
    folder = saved(tmp_path, target)
    assert not [name for name in names(folder) if "kernel" in name]
    assert json.loads((folder / "nnfront.json").read_text())["schema"] == 1
    assert nn.artefact.kernels_of(folder) is None
    assert nn.artefact.check(folder) == []


def test_a_program_without_kernels_of_its_own_says_so(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = CompiledKernels("sm_90", (), {"forward": "linear: no data"})
    monkeypatch.setattr(enumerate_kernels, "kernels_of", lambda *args, **draws: nothing)
    folder = saved(tmp_path)
    assert not (folder / "kernels").exists()
    assert json.loads((folder / "nnfront.json").read_text())["schema"] == 1
    assert nn.artefact.kernels_of(folder) == nothing
    assert nn.artefact.check(folder) == []


def test_a_session_saves_the_kernels_that_it_was_loaded_with(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path)
    asked.clear()
    made: list[Launcher] = []

    def launcher_for(ahead: CompiledKernels, device: torch.device) -> Any:
        launcher = object.__new__(Launcher)
        launcher.ahead = ahead
        made.append(launcher)
        return launcher

    monkeypatch.setattr(launcher_module, "launcher_for", launcher_for)
    with overriding_device(CPU), planning_for("sm_90"):
        session = nn.load(folder)
        assert session.kernels is made[0]
        session.save(tmp_path / "b")
    assert asked == []
    assert names(tmp_path / "b") == names(folder)
    assert all((folder / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in names(folder))


def test_a_session_that_was_made_here_compiles_them_when_it_is_saved(
    asked: list[Any], tmp_path: Path
) -> None:
    ir = nn.Linear(64, 32, bias=False, dtype="float16").export(
        {"forward": {"x": spec.Tensor(["n", 64], "float16")}}
    )
    with overriding_device(CPU), planning_for("sm_90"):
        session = nn.compile(ir, target="cuda:sm_90").load(WEIGHTS)
        assert session.kernels is None
        session.save(tmp_path / "a")
    assert nn.artefact.kernels_of(tmp_path / "a") == KERNELS


def test_an_artefact_with_kernels_is_replaced_whole(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    fewer = replace(KERNELS, cubins=KERNELS.cubins[:1])
    monkeypatch.setattr(
        enumerate_kernels,
        "kernels_of",
        lambda program, *rest, **draws: fewer if ":" in program.target else None,
    )
    assert nn.artefact.kernels_of(saved(tmp_path)) == fewer
    assert saved(tmp_path, "cuda").exists()
    assert not (tmp_path / "a" / "kernels").exists()


def test_a_folder_of_kernels_with_something_else_in_it_is_not_replaced(
    asked: list[Any], tmp_path: Path
) -> None:
    (saved(tmp_path) / "kernels" / "thesis.tex").write_text("...")
    with pytest.raises(
        LoadError, match=r"is there already and holds more than an artefact: kernels/thesis\.tex"
    ):
        saved(tmp_path)


def flip(file: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = bytearray((folder / file).read_bytes())
        data[-1] ^= 1
        (folder / file).write_bytes(data)

    return change


def rewritten(**fields: Any) -> Callable[[Path], None]:
    """Change fields of kernels.json, with hashes to match."""

    def change(folder: Path) -> None:
        found = json.loads((folder / "kernels.json").read_text())
        (folder / "kernels.json").write_text(json.dumps({**found, **fields}))
        rehash(folder)

    return change


def kernel(**fields: Any) -> Callable[[Path], None]:
    """Change fields of the first kernel, with hashes to match."""
    first, *rest = [cubin.fields() for cubin in KERNELS.cubins]
    return rewritten(kernels=[{**first, **fields}, *rest])


def without(name: str) -> Callable[[Path], None]:
    """As if the manifest had never listed a file, which is still there."""

    def change(folder: Path) -> None:
        listed = json.loads((folder / "nnfront.json").read_text())
        del listed["files"][name]
        (folder / "nnfront.json").write_text(json.dumps(listed))
        reseal(folder)

    return change


C = f"kernels/{FIRST}.cubin"
DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped bit": (flip(C), rf"a is not the artefact that was written\n  {C}: its content is not what was written: its sha256 is "),
    "another table": (flip("kernels.json"), r"a is not the artefact that was written\n  kernels.json: its content is not what was written"),
    "a truncated file": (lambda f: (f / C).write_bytes(b""), rf"{C}: the file is truncated: 0 bytes, 24 were written"),
    "a missing file": (lambda f: (f / C).unlink(), rf"{C}: the file is missing"),
    "one too many": (lambda f: (f / "kernels" / "b.cubin").write_bytes(b""), r"kernels/b.cubin: not one of the artefact's files"),
    "one that is not listed": (without(C), rf"{C}: not one of the artefact's files"),
    "one that is named and not listed": (kernel(key="1" * 16), rf"kernels.json cannot be used\n  it names 'kernels/{'1' * 16}.cubin', which nnfront.json does not list"),
    "one that is listed and not named": (rewritten(kernels=[KERNELS.cubins[0].fields()]), rf"kernels.json does not say how to launch kernels/{SECOND}.cubin"),
    "one named twice": (rewritten(kernels=[KERNELS.cubins[0].fields()] * 2), r"kernels.json cannot be used\n  a kernel occurs twice"),
    "a way out of the folder": (kernel(key="../../evil"), r"it names 'kernels/../../evil.cubin', which nnfront.json does not list"),
    "another GPU": (rewritten(arch="sm_80"), r"kernels.json has kernels for sm_80, sm_90, the artefact is for 'cuda:sm_90'"),
    "a kernel for another GPU": (kernel(arch="sm_80"), r"kernels.json has kernels for sm_80, sm_90, the artefact is for 'cuda:sm_90'"),
    "a field of another kind": (kernel(threads="many"), r"kernels.json cannot be used\n  threads is 'many', expected a number from 1 to 1024"),
    "a missing field": (rewritten(notes=None), r"kernels.json cannot be used\n  notes are None, expected texts"),
    "another field": (rewritten(code="..."), r"expected the fields 'arch', 'kernels' and 'notes'"),
    "no list": (rewritten(kernels={}), r"kernels are \{\}, expected a list"),
    "an arch that is no text": (rewritten(arch=90), r"arch is 90, expected a text"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_or_unlisted_kernels_are_refused_before_anything_runs(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    change, text = DAMAGE[name]
    folder = saved(tmp_path)
    change(folder)
    monkeypatch.setattr(launcher_module, "open_driver", lambda device: pytest.fail("the driver was started"))
    with overriding_device(CPU), pytest.raises(LoadError, match=text):
        nn.load(folder)
    assert re.search(text.rpartition(r"\n")[2].strip(), "\n".join(nn.artefact.check(folder)))


def test_a_file_that_is_not_json_is_refused(asked: list[Any], tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "kernels.json").write_text("{")
    rehash(folder)
    with pytest.raises(
        LoadError, match=r"kernels.json cannot be used\n  it is not JSON\n  Expecting property name"
    ):
        nn.artefact.kernels_of(folder)


def test_bytes_that_change_after_they_were_checked_are_not_used(
    asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path)
    read = Folder.read
    monkeypatch.setattr(Folder, "read", lambda self, name: b"other" if ".cubin" in name else read(self, name))
    what = rf"kernels.json cannot be used\n  {C} is not what was written\n  its sha256 is \w+\n  expected \w+\n  help: copy the artefact again"
    with pytest.raises(LoadError, match=what):
        nn.artefact.kernels_of(folder)


def test_show_lists_the_kernels(asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from nnfront.cli import main

    folder = saved(tmp_path)
    assert main(["show", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert shown.endswith(
        "\n2 kernels for sm_90, 0.00 MB, compiled by Triton 3.9.0 and CUDA 13.4\n"
        "  kernel: 2\n"
        "  look compiles on the GPU's machine: take: no data\n"
    )
    assert main(["check", str(folder)]) == 0


def test_export_takes_a_gpu_and_the_sizes_of_calls(
    asked: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from nnfront.cli import main

    source = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"
    options = ["--device", "cuda:sm_90", "--sizes", "batch=1,8", "--sizes", "seq=16", "--dtype", "float16"]
    assert main(["export", str(source), "-o", str(tmp_path / "a"), *options]) == 0
    assert asked == [({"batch": [1, 8], "seq": [16]}, True)]
    assert "\nkernels " in capsys.readouterr().out
    assert nn.artefact.kernels_of(tmp_path / "a") == KERNELS
    assert main(["export", str(source), "-o", str(tmp_path / "b"), "--sizes", "batch"]) == 1
    assert capsys.readouterr().err == (
        "error: --sizes batch says no sizes\n  help: write the dim and its sizes: --sizes batch=1,8\n"
    )
