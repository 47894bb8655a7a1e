# SPDX-License-Identifier: Apache-2.0
"""The one door for files from outside: regular files of the folder, so many bytes, so much JSON; and what was opened stays what it was."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hostile import limits

from nnfront import files
from nnfront.errors import LoadError
from nnfront.files import MAX_BYTES, File, Folder, parse_json


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with one file, and a file beside it that is not its own."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "own.json").write_text("1")
    (tmp_path / "other.json").write_text("2")
    return tmp_path / "model"


def sparse(file: Path) -> None:
    file.touch()
    os.truncate(file, 3 << 30)


NOT_READ: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (lambda file: None, "No such file or directory"),
    "a folder": (Path.mkdir, "it is a folder, not a regular file"),
    "a pipe": (os.mkfifo, "it is a pipe, not a regular file"),
    "a device": (lambda file: file.symlink_to("/dev/zero"), "it leads out of the folder, to /dev/zero"),
    "a link to itself": (lambda file: file.symlink_to("x"), "Too many levels of symbolic links"),
    "a link to its folder": (lambda file: file.symlink_to("."), "it is a folder, not a regular file"),
    "a link out": (
        lambda file: file.symlink_to("../other.json"),
        "it leads out of the folder, to {parent}/other.json",
    ),
    "a whole path out": (
        lambda file: file.symlink_to(file.parents[1] / "other.json"),
        "it leads out of the folder, to {parent}/other.json",
    ),
    "3 GB of nothing": (sparse, f"it has {3 << 30} bytes, {MAX_BYTES} are the most"),
}


@pytest.mark.parametrize(("make", "reason"), NOT_READ.values(), ids=NOT_READ)
def test_what_is_no_regular_file_of_the_folder_is_not_read(
    place: Path, make: Callable[[Path], object], reason: str
) -> None:
    make(place / "x")
    with pytest.raises(LoadError) as error:
        Folder(place).read("x")
    assert error.value.what == f"{place / 'x'} cannot be read"
    assert error.value.details == (reason.format(parent=place.parent),)
    is_out = "leads out" in reason
    assert error.value.help == ("put the file itself into the folder" if is_out else "")


@pytest.mark.parametrize("name", ["../other.json", "/etc/hostname", "a/../../other.json", "/dev/zero"])
def test_a_name_does_not_lead_out_of_the_folder(place: Path, name: str) -> None:
    with pytest.raises(LoadError, match="it leads out of the folder, to /"):
        Folder(place).read(name)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("n" * 5000, "File name too long"),
        ("a\0b", "embedded null byte"),
        ("\ud800", "surrogates not allowed"),
    ],
)
def test_a_name_that_no_file_can_have_is_an_error(place: Path, name: str, reason: str) -> None:
    assert not Folder(place).has(name)
    with pytest.raises(LoadError, match=reason) as error:
        Folder(place).read(name)
    assert len(str(error.value)) < 600


def test_a_link_within_the_folder_is_followed(place: Path) -> None:
    (place / "link.json").symlink_to("own.json")
    assert Folder(place).read("link.json") == b"1"


def test_a_link_to_the_folder_itself_is_followed(place: Path) -> None:
    (place.parent / "link").symlink_to("model")
    assert Folder(place.parent / "link").read("own.json") == b"1"


def test_links_of_a_hugging_face_cache_are_followed_to_its_blobs_and_nowhere_else(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--a--b"
    snapshot = repository / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    (repository / "blobs" / "abcd").write_text("1")
    (repository / "refs").write_text("2")
    (snapshot / "config.json").symlink_to("../../blobs/abcd")
    (snapshot / "refs.json").symlink_to("../../refs")
    assert Folder(snapshot).read("config.json") == b"1"
    with pytest.raises(LoadError, match="it leads out of the folder"):
        Folder(snapshot).read("refs.json")


def test_what_was_opened_stays_what_it_was(place: Path) -> None:
    held = Folder(place)
    held.open("own.json")
    place.rename(place.with_name("old"))
    place.mkdir()
    (place / "own.json").write_text("another")
    shutil.rmtree(place.with_name("old"))
    assert not held.is_current
    assert held.read("own.json") == b"1"
    with pytest.raises(LoadError, match="No such file"):
        held.read("second.json")
    File(held, "own.json").copy_to(place / "copy")
    assert (place / "copy").read_text() == "1"


def test_a_folder_that_is_none_is_an_error(place: Path) -> None:
    for path, reason in ((place / "gone", "No such file"), (place / "own.json", "Not a directory")):
        with pytest.raises(LoadError, match=f"{path} cannot be opened: {reason}"):
            Folder(path)


JSON: dict[str, tuple[bytes, str]] = {
    "not closed": (b"[" * 100_000, "it is nested more than 100 deep"),
    "lists": (b"[" * 102 + b"]" * 102, "it is nested more than 100 deep"),
    "objects": (b'{"a":' * 5000 + b"1" + b"}" * 5000, "it is nested more than 100 deep"),
    "digits": (b"[" + b"1" * 5000 + b"]", "it holds a number of 5000 digits, 400 are the most"),
    "values": (b"[" + b"[]," * 6_000_000 + b"[]]", "it holds more than 5000000 values"),
    "no text": (b"\xff", "'utf-8' codec can't decode byte 0xff"),
    "half a character": (b'["\\udfff"]', "surrogates not allowed"),
    "no JSON": (b"{'a': 1}", "Expecting property name"),
}


@pytest.mark.parametrize(("data", "reason"), JSON.values(), ids=JSON)
def test_json_beyond_the_budget_is_refused_at_once(data: bytes, reason: str) -> None:
    with limits(), pytest.raises(ValueError, match=reason):
        parse_json(data)


def test_strict_json_has_neither_names_twice_nor_numbers_that_are_none() -> None:
    for text in ('{"a": 1, "a": 2}', "[NaN]", "[-Infinity]"):
        parse_json(text.encode())
        with pytest.raises(ValueError, match=r"occurs twice|is not a JSON number"):
            parse_json(text.encode(), is_strict=True)


def test_all_else_is_what_python_reads() -> None:
    value: Any = {"a": [1, -2.5e3, True, None, "\U0001f600 é"], "b": 10**399, "c": [[{}]]}
    assert parse_json(json.dumps(value).encode()) == value
    assert parse_json(json.dumps(value, ensure_ascii=False).encode()) == value


def test_nothing_but_this_opens_files_from_outside() -> None:
    """No other source file reads or parses a file by itself, but a model file of the user's own, which runs; strings of IR text are JSON."""
    root = Path(files.__file__).parent
    words = ("json.load", ".read_text(", ".read_bytes(", "from_file(", "np.load", "torch.load", "safe_open")
    found = {
        f"{path.relative_to(root)}: {word}"
        for path in root.rglob("*.py")
        for word in words
        if path.name != "files.py" and word in path.read_text()
    }
    assert found == {
        "backends/cpu/extension.py: .read_text(",  # of the package's own
        "inspection/write_page.py: .read_text(",
        "serve/home.py: .read_text(",
        "ir/literals.py: json.load",
        "serve/grammar.py: json.load",  # what llguidance makes of a schema
        "serve/trial.py: json.load",  # what comes through the pipe
        "cli/chat.py: .read_bytes(",  # what the user names on the command line
        "cli/text_file.py: .read_bytes(",
        "llm/model_files.py: .read_bytes(",
        "memory/free_memory.py: .read_text(",  # of the system's
    }
