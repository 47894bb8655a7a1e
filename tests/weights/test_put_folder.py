# SPDX-License-Identifier: Apache-2.0
"""A folder is made whole or not at all, whatever ends its writer, and nothing else is lost by it."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from artefact_cases import Varied, outputs, varied_session, weight

import nnfront as nn
from nnfront.errors import LoadError
from nnfront.weights import atomic_folder as module
from nnfront.weights.atomic_folder import put_folder


def allow(folder: Path) -> None:
    """Let anything be replaced."""


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def changed_session() -> nn.Session:
    session = varied_session()
    session.update({"up.bias": weight("other", (6,))})
    return session


def crash_after(steps: int, folder: Path) -> int:
    """Save another session in a process that dies after so many changes of the file system; return those left, -1 if it died."""
    session = changed_session()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            _save_and_die(session, folder, steps, writer)
        finally:
            os._exit(1)
    os.close(writer)
    with open(reader) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == (0 if said else 9)
    return int(said or -1)


def _save_and_die(session: nn.Session, folder: Path, steps: int, writer: int) -> None:
    left = steps

    def count(event: str, args: Any) -> None:
        nonlocal left
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir") and "crash" in str(args[0]):
            left -= 1
            if left == 0:
                os._exit(9)

    exchange = module._exchange

    def exchange_and_count(one: Path, two: Path) -> bool:
        done = exchange(one, two)
        count("os.rename", (one,))
        return done

    sys.addaudithook(count)
    module._exchange = exchange_and_count
    session.save(folder)
    os.write(writer, str(left).encode())
    os._exit(0)


def steps_of_a_save(folder: Path) -> int:
    return 1000 - crash_after(1000, folder)


def test_a_crash_anywhere_leaves_the_old_artefact_or_the_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "crash"
    old, new = varied_session(), changed_session()
    old.save(folder)
    steps = steps_of_a_save(folder)
    assert 15 < steps < 60
    found = []
    for step in range(1, steps + 1):
        old.save(folder)
        assert names(tmp_path) == ["crash"]  # what the dead one has left is gone
        assert crash_after(step, folder) == -1
        got = outputs(nn.load(folder))
        found.append([all(map(torch.equal, got, outputs(each))) for each in (old, new)])
    last_old = found.index([False, True])
    assert found == [[True, False]] * last_old + [[False, True]] * (steps - last_old)
    assert 10 < last_old < steps - 3  # there are crashes on both sides of the exchange


def test_a_first_save_that_crashes_leaves_nothing_in_the_place(tmp_path: Path) -> None:
    assert crash_after(9, tmp_path / "crash") == -1
    assert not (tmp_path / "crash").exists()
    varied_session().save(tmp_path / "crash")
    assert names(tmp_path) == ["crash"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")])
def test_a_failure_on_the_way_changes_nothing(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "a"
    session = varied_session()
    session.save(folder)

    def fail(*args: Any) -> int:
        raise error

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises((KeyboardInterrupt, LoadError)):
        varied_session().save(folder)
    assert names(tmp_path) == ["a"]
    assert all(map(torch.equal, outputs(nn.load(folder)), outputs(session)))


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    session = varied_session()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        LoadError, match=r"weights cannot be written: No space left on device\n  0\.00 GB are needed"
    ):
        session.save(tmp_path / "a")
    assert names(tmp_path) == []


def test_a_session_may_replace_the_artefact_that_it_came_from(tmp_path: Path) -> None:
    varied_session().save(tmp_path / "a")
    first = nn.load(tmp_path / "a")
    before = outputs(first)
    first.save(tmp_path / "a")
    assert all(map(torch.equal, outputs(first), before))
    assert all(map(torch.equal, outputs(nn.load(tmp_path / "a")), before))


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real").mkdir()
    varied_session().save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert nn.load(tmp_path / "real").methods == ("forward", "look")


def spoiled(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """Places that are not an artefact's, and what is said of them."""
    help = "\n  help: choose another place, or remove it first"
    file = tmp_path / "file"
    file.write_text("x")
    yield file, f"{file} is there already and is no folder\n  help: choose another place"
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("x")
    yield (
        other,
        (
            f"{other} is there already and is not an artefact of this nnfront\n"
            f"  {other} is not an nnfront artefact: it has no nnfront.json{help}"
        ),
    )
    more = tmp_path / "more"
    varied_session().save(more)
    (more / ".git").mkdir()
    yield more, f"{more} is there already and holds more than an artefact: .git{help}"
    broken = tmp_path / "broken"
    varied_session().save(broken)
    (broken / "nnfront.json").write_text("{")
    yield (
        broken,
        (
            f"{broken} is there already and is not an artefact of this nnfront\n"
            f"  {broken}/nnfront.json is damaged: it is not JSON{help}"
        ),
    )


def test_what_is_no_artefact_is_not_replaced(tmp_path: Path) -> None:
    session = varied_session()
    for place, expected in spoiled(tmp_path):
        with pytest.raises(LoadError) as error:
            session.save(place)
        assert str(error.value) == expected
        assert place.exists()


def test_a_folder_that_is_being_written_is_not_taken_for_a_dead_ones(tmp_path: Path) -> None:
    with put_folder(tmp_path / "a", allow) as first:
        (first / "x").write_text("first")
        with put_folder(tmp_path / "a", allow) as second:
            (second / "x").write_text("second")
        assert (tmp_path / "a" / "x").read_text() == "second"
    assert (tmp_path / "a" / "x").read_text() == "first"
    assert names(tmp_path) == ["a"]


def test_names_that_look_like_patterns_are_names(tmp_path: Path) -> None:
    (tmp_path / ".a1.12345678.nnfront-tmp").mkdir()
    with put_folder(tmp_path / "a[1]", allow):
        pass
    assert names(tmp_path) == [".a1.12345678.nnfront-tmp", "a[1]"]


@pytest.mark.parametrize("fails", [False, True], ids=["works", "fails"])
def test_a_file_system_that_cannot_exchange_moves_the_old_one_aside(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_exchange", lambda one, two: False)
    with put_folder(tmp_path / "a", allow) as first:
        (first / "x").write_text("old")
    rename = os.rename

    def count(source: Path, target: Path) -> None:
        if fails and target == tmp_path / "a" and "aside" in seen:
            seen.remove("aside")
            raise OSError(errno.EIO, "Input/output error")
        if str(target).endswith(module.ASIDE):
            seen.append("aside")
        rename(source, target)

    seen: list[str] = []
    monkeypatch.setattr(os, "rename", count)
    if fails:
        with (
            pytest.raises(LoadError, match="Input/output error"),
            put_folder(tmp_path / "a", allow) as second,
        ):
            (second / "x").write_text("new")
    else:
        with put_folder(tmp_path / "a", allow) as second:
            (second / "x").write_text("new")
    assert (tmp_path / "a" / "x").read_text() == ("old" if fails else "new")
    assert names(tmp_path) == ["a"]


def test_an_old_one_set_aside_is_kept_until_there_is_a_new_one(tmp_path: Path) -> None:
    aside = tmp_path / f".a.12345678{module.ASIDE}"
    aside.mkdir()
    with pytest.raises(RuntimeError, match="stop"), put_folder(tmp_path / "a", allow):
        raise RuntimeError("stop")
    assert aside.exists()
    with put_folder(tmp_path / "a", allow):
        pass
    with put_folder(tmp_path / "a", allow):
        pass
    assert names(tmp_path) == ["a"]


def test_a_parent_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(LoadError, match="cannot be written: File exists"):
        nn.compile(Varied().export({"forward": {"x": nn.spec.Tensor(["n", 4])}})).save(
            tmp_path / "file" / "a",
            {"gate.weight": torch.ones(6, 4), "up.weight": torch.ones(6, 4), "up.bias": torch.ones(6)},
            ignored=["table.weight"],
        )
