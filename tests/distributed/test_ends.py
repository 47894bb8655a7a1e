# SPDX-License-Identifier: Apache-2.0
"""How ranks end: a dead or a hung one ends all, with one error that names it, and nothing is left of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from patience import HANGS_SECONDS

from nnfront.distributed.launch import SHUTDOWN_SECONDS, _what_ended, launch
from nnfront.distributed.ranks import BEAT_SECONDS, ERROR_FILE, SILENT_SECONDS, end_with
from nnfront.errors import LoadError

FOLDER = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"
RUN = [sys.executable, "-m", "nnfront", "run", str(FOLDER), "-p", "-", "-n", "4", "--tp", "2"]


def environment(pid: int) -> dict[str, str]:
    try:
        found = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    return dict(each.decode().split("=", 1) for each in found if b"=" in each)


def pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def ranks_of(mark: str) -> dict[int, int]:
    """Process by rank, of those that were started with this mark in their environment."""
    found = {pid: environment(pid) for pid in pids()}
    return {int(e["RANK"]): pid for pid, e in found.items() if e.get("MARK") == mark and "RANK" in e}


class Started:
    """`nnfront run --tp 2` that has loaded: rank 0 waits for its prompt, rank 1 for rank 0."""

    def __init__(self, mark: str, folder: Path) -> None:
        self.mark, self.errors = f"{mark} of {os.getpid()}", folder / f"{mark}.txt"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(
                RUN,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "MARK": self.mark},
            )

    def wait_until_loaded(self) -> None:
        deadline = time.monotonic() + HANGS_SECONDS
        while "rank 0 reads" not in self.errors.read_text():
            assert time.monotonic() < deadline, self.errors.read_text()
            time.sleep(0.1)
        self.ranks = ranks_of(self.mark)
        assert sorted(self.ranks) == [0, 1]

    def end(self) -> None:
        """Leave no process, whatever became of the test."""
        for pid in [self.process.pid, *ranks_of(self.mark).values()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with suppress(BrokenPipeError):
            self.process.__exit__(None, None, None)

    def error(self) -> str:
        """What is said at the end."""
        self.process.communicate(timeout=HANGS_SECONDS)
        assert self.process.returncode == 1
        assert ranks_of(self.mark) == {}
        left = [n for n in os.listdir("/dev/shm") for pid in self.ranks.values() if str(pid) in n]
        assert left == []
        said = self.errors.read_text()
        assert said.count("error:") == 1, said
        return said.partition("error: ")[2]


@pytest.mark.parametrize(
    ("mark", "rank", "sent", "error"),
    [
        ("dead", 0, signal.SIGKILL, "rank 0 was killed by SIGKILL\n  process "),
        ("hung", 1, signal.SIGSTOP, "rank 1 hangs: it gave no sign of life for 6 seconds\n"),
    ],
)
@pytest.mark.matrix  # whole processes
def test_a_dead_or_a_hung_rank_ends_all(
    mark: str, rank: int, sent: signal.Signals, error: str, tmp_path: Path
) -> None:
    """Within 10 seconds, says the docs: a rank that is silent for so long counts as hung, and those that are asked to end are killed."""
    assert SILENT_SECONDS + BEAT_SECONDS + SHUTDOWN_SECONDS < 10
    with ExitStack() as ends:
        started = Started(mark, tmp_path)
        ends.callback(started.end)
        started.wait_until_loaded()
        os.kill(started.ranks[rank], sent)
        assert started.error().startswith(error)


@pytest.mark.matrix
def test_ranks_write_what_one_process_does_and_leave_nothing(tmp_path: Path) -> None:
    with ExitStack() as ends:
        fine = Started("fine", tmp_path)
        ends.callback(fine.end)
        fine.wait_until_loaded()
        out, _ = fine.process.communicate("def main():\n", timeout=HANGS_SECONDS)
    alone = subprocess.run([*RUN[:-2]], input="def main():\n", capture_output=True, text=True, check=True)
    assert fine.process.returncode == 0
    assert out == alone.stdout
    assert ranks_of(fine.mark) == {}


@pytest.mark.matrix
def test_an_error_of_all_ranks_is_said_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [*RUN[:4], str(tmp_path), *RUN[5:]],
        capture_output=True,
        text=True,
        check=False,
        timeout=HANGS_SECONDS,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == (
        f"error: {tmp_path}/config.json does not exist\n  help: give a Hugging Face folder, with config.json and safetensors\n"
    )


def test_no_ranks_are_no_ranks() -> None:
    with pytest.raises(
        LoadError, match=re.escape("0 ranks cannot be started\n  help: give a number of at least 1")
    ):
        launch(0, [])


def test_a_rank_that_was_asked_to_end_hides_no_error_of_another() -> None:
    failures = {
        0: SimpleNamespace(
            exitcode=-signal.SIGTERM, message="", pid=1, signal_name=lambda: signal.SIGTERM.name
        ),
        1: SimpleNamespace(exitcode=1, message={"message": "LoadError: it is not there"}, pid=2),
    }
    assert str(_what_ended(failures)) == "it is not there"
    assert str(_what_ended({0: failures[0]})).startswith("rank 0 was killed by SIGTERM")


def test_what_a_rank_leaves_is_never_seen_half_written(tmp_path, monkeypatch):
    seen, dump = [], json.dump

    def slow(data, file):
        file.write("{")
        file.flush()
        seen.append((tmp_path / "error.json").exists())
        file.seek(0)
        dump(data, file)

    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    monkeypatch.setattr(json, "dump", slow)
    monkeypatch.setattr(os, "_exit", lambda code: seen.append(code))
    end_with(LoadError("no weights"))
    assert seen == [False, 1]
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == "LoadError: no weights"
    assert [path.name for path in tmp_path.iterdir()] == ["error.json"]
