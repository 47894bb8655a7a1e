# SPDX-License-Identifier: Apache-2.0
"""Damage, forgery and other versions: every artefact that is not as it was written is refused in words."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from artefact_cases import outputs, rehash, varied_session
from patience import HANGS_SECONDS

import nnfront as nn
from nnfront.artefact import integrity, loader
from nnfront.backends.registry import targets
from nnfront.compiler import compile_admitted
from nnfront.errors import LoadError

W = "nnfront-weights-00001-of-00001.safetensors"
AGAIN = "copy it again, or export the model again"
FIELDS = "copy the artefact again, or export the model again"


@pytest.fixture(scope="module")
def original(tmp_path_factory: Any) -> Path:
    folder = Path(tmp_path_factory.mktemp("artefact")) / "a"
    varied_session().save(folder)
    return folder


@pytest.fixture
def place(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy to spoil, called by a relative name so that messages are short."""
    shutil.copytree(original, tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    return Path("a")


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return apply


def edit_text(old: str, new: str) -> Callable[[Path], None]:
    """Change the program and forge the hashes."""

    def apply(folder: Path) -> None:
        text = (folder / "program.nnir").read_text()
        assert old in text
        (folder / "program.nnir").write_text(text.replace(old, new))
        rehash(folder)

    return apply


def field(**changes: Any) -> Callable[[Path], None]:
    """Change fields of the manifest without its hash."""

    def apply(folder: Path) -> None:
        fields = json.loads((folder / "nnfront.json").read_text())
        (folder / "nnfront.json").write_text(json.dumps(fields | changes))

    return apply


def forged(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: rehash(folder, **changes)


def without(key: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        fields = json.loads((folder / "nnfront.json").read_text())
        del fields[key]
        (folder / "nnfront.json").write_text(json.dumps(fields))

    return apply


def damage(*lines: str) -> str:
    return "\n".join(
        ["a is not the artefact that was written", *(f"  {x}" for x in lines), f"  help: {AGAIN}"]
    )


def broken(what: str) -> str:
    return f"a/nnfront.json is damaged: {what}\n  help: {FIELDS}"


def flip(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


CASES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a newer schema": (
        field(schema=4, nnfront="9.0"),
        "a was made by a newer nnfront\n  got schema 4, written by nnfront '9.0'\n"
        f"  expected schema 3: this is nnfront {nn.__version__}\n"
        "  help: upgrade nnfront, or export the model again with this one",
    ),
    "an older schema": (field(schema=0), broken("its schema is 0, expected a number from 1")),
    "a schema that is no number": (
        field(schema="1"),
        broken("its schema is '1', expected a number from 1"),
    ),
    "a changed field": (field(target="cuda"), broken("its sha256 is not that of its other fields")),
    "a missing field": (without("dims"), broken("it has no 'dims'")),
    "a field of another schema": (field(color=1), broken("schema 1 has no 'color'")),
    "a file that is missing": (lambda f: (f / W).unlink(), damage(f"{W}: the file is missing")),
    "a program that is missing": (
        lambda f: (f / "program.nnir").unlink(),
        damage("program.nnir: the file is missing"),
    ),
    "a file too many": (
        lambda f: (f / "notes.txt").write_text("x"),
        damage("notes.txt: not one of the artefact's files; remove it, or export again with it"),
    ),
    "a truncated file": (
        edit(W, lambda data: data[:-10]),
        damage(f"{W}: the file is truncated: 4510 bytes, 4520 were written"),
    ),
    "a file that has grown": (
        edit(W, lambda data: data + b"\0"),
        damage(f"{W}: the file has grown: 4521 bytes, 4520 were written"),
    ),
    "a bit of a weight": (
        edit(W, flip),
        damage(f"{W}: its content is not what was written, somewhere in the block at byte 0"),
    ),
    "an empty manifest": (
        edit("nnfront.json", lambda data: b""),
        "a/nnfront.json is damaged: it is not JSON\n  Expecting value: line 1 column 1 (char 0)",
    ),
    "a manifest of something else": (
        edit("nnfront.json", lambda data: b'{"name": "x"}'),
        "a/nnfront.json is not the manifest of an nnfront artefact",
    ),
    "no manifest": (
        lambda f: (f / "nnfront.json").unlink(),
        "a is not an nnfront artefact: it has no nnfront.json\n"
        "  help: session.save(DIR) or `nnfront export` makes one",
    ),
    "a target of another build": (
        forged(target="abacus"),
        f"a was made for the target 'abacus'\n  targets of this build are {', '.join(map(repr, targets()))}\n"
        "  help: export the model again for one of them",
    ),
    "methods of another program": (
        forged(methods={"decode": ""}),
        "a: the program does not have the methods that the manifest lists\n  got forward, look\n  expected decode",
    ),
    "a dim that the weights contradict": (
        forged(dims={"vocab": 7}),
        "a cannot be used\n  the manifest says that dim 'vocab' is 7, the weights that it is 5",
    ),
    "a dim below zero": (
        forged(dims={"vocab": -7}),
        broken("dims.vocab is -7, expected a number from 0 to 2**63 - 1"),
    ),
    "a weight that the program lacks": (
        forged(weights={"": {"q": "x"}}),
        "a cannot be used\n  the manifest places 'q' of '', which the program does not have",
    ),
    "a weight under another name": (
        forged(weights={"transform_params": {"up.bias": "x"}}),
        "a cannot be used\n  the weights are not those that the program declares\n"
        "    missing: 'x': float32[6]\n    unexpected: 'up.bias': float32[6]",
    ),
    "axes of another rank": (
        forged(orders={"up.bias": [1, 0]}),
        "a cannot be used\n  the manifest stores 'up.bias' with axes [1, 0], but it has 1",
    ),
    "a file outside the folder": (
        forged(files={"../x": {}}),
        broken("'../x' cannot be a file of an artefact"),
    ),
    "a text model without fields": (forged(llm={"context": 3}), broken("llm has ['context']")),
    "a program that breaks a rule": (
        edit_text("multiply: float32[n, 6]", "multiply: float32[n, 7]"),
        "a/program.nnir cannot be used\n  V18: 'multiply' has another type than its value\n"
        "    declared float32[n, 7]\n    inferred float32[n, 6]\n"
        "    at 'multiply' in forward, from artefact_cases.py:98",
    ),
    "a weight of another dtype": (
        edit_text("bfloat16", "float16"),
        "a cannot be used\n  the weights are not those that the program declares\n"
        "    dtype: 'half.permute_dims': bfloat16[6, 4], expected float16[6, 4]",
    ),
    "an attribute that names no transform": (
        edit_text('transform="transform_params"', "transform=3"),
        "a/program.nnir cannot be used\n  forward: the attribute 'transform' names a transform of the module",
    ),
}


@pytest.mark.parametrize(("spoil", "expected"), CASES.values(), ids=CASES.keys())
def test_what_is_wrong_is_said(place: Path, spoil: Callable[[Path], None], expected: str) -> None:
    spoil(place)
    with pytest.raises(LoadError) as error:
        nn.load(place)
    assert str(error.value) == expected


def test_all_that_is_wrong_is_said_at_once(place: Path) -> None:
    edit("program.nnir", flip)(place)
    edit(W, flip)(place)
    (place / "evil.py").write_text("raise SystemExit")
    with pytest.raises(LoadError) as error:
        nn.load(place)
    assert [line.partition(":")[0] for line in error.value.details] == ["evil.py", "program.nnir", W]


def test_a_readme_a_licence_and_hidden_files_may_lie_beside(place: Path) -> None:
    for name in ("README.md", "LICENSE", ".gitattributes"):
        (place / name).write_text("x")
    assert nn.load(place).methods == ("forward", "look")


def test_without_verify_weights_are_not_compared_and_all_else_is(place: Path) -> None:
    edit(W, flip)(place)
    good, bad = outputs(nn.load(place, verify=False)), outputs(varied_session())
    assert not all(map(torch.equal, good, bad))
    edit("program.nnir", flip)(place)
    with pytest.raises(LoadError, match=r"program\.nnir: its content is not what was written"):
        nn.load(place, verify=False)


def test_what_the_fast_checksum_cannot_see_the_check_does(place: Path) -> None:
    """Bytes with the same CRC-32: any change of four bytes can be made up for by four others."""
    data = (place / W).read_bytes()
    (place / W).write_bytes(data[:-12] + _same_crc(data[-12:]))
    nn.load(place)
    (problem,) = nn.artefact.check(place)
    assert problem.startswith(f"{W}: its content is not what was written: its sha256 is ")


def _same_crc(tail: bytes) -> bytes:
    """Another text of the same length whose CRC-32, behind any text, is the same: the polynomial, added at one place."""
    polynomial = 0x1DB710641  # CRC-32's own, lowest bit first
    mask = (polynomial << 31).to_bytes(12, "little")
    return bytes(a ^ b for a, b in zip(tail, mask, strict=True))


def test_a_named_pipe_is_not_waited_for(place: Path) -> None:
    (place / W).unlink()
    os.mkfifo(place / W)
    with pytest.raises(LoadError, match="it is a pipe, not a regular file"):
        nn.load(place)


def test_check_lists_nothing_for_a_good_artefact(place: Path) -> None:
    assert nn.artefact.check(place) == []


def test_check_also_loads(place: Path) -> None:
    edit_text("silu(", "relu_(")(place)
    (problem,) = nn.artefact.check(place)
    assert "there is no op 'relu_'" in problem


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is compared before a program is compiled; the event says that it is."""
    compiled, crc_of = threading.Event(), integrity._crc_of

    def compile(*args: Any) -> Any:
        compiled.set()
        return compile_admitted(*args)

    def crc_when_compiled(*args: Any) -> int:
        assert compiled.wait(HANGS_SECONDS), "the comparison is waited for before the program is compiled"
        return crc_of(*args)

    monkeypatch.setattr(loader, "compile_admitted", compile)
    monkeypatch.setattr(integrity, "_crc_of", crc_when_compiled)
    return compiled


def test_weights_are_compared_while_the_program_is_compiled(place: Path, late: threading.Event) -> None:
    assert nn.load(place).methods
    assert late.is_set()


def test_damaged_weights_are_refused_before_one_of_them_is_read(
    place: Path, late: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(W, lambda data: data[:-1] + bytes([data[-1] ^ 1]))(place)
    monkeypatch.setattr(loader, "read_weights", lambda *args: pytest.fail("damaged weights are read"))
    with pytest.raises(LoadError, match="somewhere in the block at byte 0"):
        nn.load(place)


def test_a_damaged_header_of_weights_is_said_to_be_damage(place: Path) -> None:
    edit(W, lambda data: data[:8] + b"?" + data[9:])(place)
    with pytest.raises(LoadError, match="is not the artefact that was written"):
        nn.load(place)
