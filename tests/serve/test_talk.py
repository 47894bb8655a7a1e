# SPDX-License-Identifier: Apache-2.0
"""`nnfront chat`: turns, commands, and interrupts that end an answer and nothing else."""

from __future__ import annotations

import builtins
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from serving import FOLDER, TEMPLATE

from nnfront.cli import main

Say = Callable[..., tuple[str, str]]


@pytest.fixture
def say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Say:
    """Run the command with some lines typed; what it writes, and what it says."""
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)

    def run(*lines: str | type[BaseException], options: tuple[str, ...] = ("-n", "6")) -> tuple[str, str]:
        typed = iter(lines)

        def read(_: str = "") -> str:
            line = next(typed, EOFError)
            if isinstance(line, str):
                return line
            raise line

        monkeypatch.setattr(builtins, "input", read)
        assert main(["chat", str(FOLDER), "--chat-template", str(template), *options]) == 0
        found = capsys.readouterr()
        return found.out, found.err

    return run


def test_turns_are_answered_and_remembered(say: Say) -> None:
    out, err = say("import os", "def main():", "/history", "/exit", "never said")
    answers = out.split("\n")
    assert "user: import os" in err
    assert f"assistant: {answers[0]}" in err
    assert "never said" not in err


def test_commands_change_the_conversation(say: Say, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    say("/system Be brief.", "import os", "def f", "/undo", "/retry", f"/save {file}")
    saved = json.loads(file.read_text())
    assert saved["system"] == "Be brief."
    assert [turn["role"] for turn in saved["messages"]] == ["user", "assistant"]
    _, err = say(f"/load {file}", "/history", "/clear", "/history", "/help")
    assert err.count("user: import os") == 1
    assert "/retry" in err


@pytest.mark.parametrize("settings", [(), ("/set temperature 2", "/set seed 1")])
def test_an_answer_once_more_is_the_same_with_the_same_seed(say: Say, settings: tuple[str, ...]) -> None:
    out, _ = say(*settings, "import os", "/retry")
    half = len(out) // 2
    assert out[:half] == out[half:]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/nothing", "error: there is no command /nothing\n  help: /help lists those that there are"),
        ("/set colour 1", "error: there is no parameter 'colour'"),
        ("/set top_k x", "error: top_k is 'x', expected a number or none"),
        ("/set top_p 7", "error: the sampling parameters are out of range\n  top_p is 7.0, expected a number in (0, 1]"),
        ("/undo", "error: there is nothing to take back"),
        ("/retry", "error: there is nothing to answer"),
        ("/load nowhere.json", "error: nowhere.json holds no conversation"),
        ("/save /nowhere/x", "error: /nowhere/x cannot be written: No such file or directory"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_said_and_the_conversation_goes_on(say: Say, line: str, message: str) -> None:
    out, err = say(line, "import os")
    assert message in err
    assert out.strip()


def test_an_interrupt_ends_the_answer_and_not_the_program(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    class Screen(io.StringIO):
        written = 0

        def write(self, text: str) -> int:
            Screen.written += 1
            if Screen.written == 3:
                raise KeyboardInterrupt
            return super().write(text)

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    _, err = say("import os", "def f", KeyboardInterrupt, "/history", options=("-n", "200"))
    assert "(stopped)" in err
    assert "/exit or Ctrl-D ends" in err
    assert err.count("assistant: ") == 2


def test_several_lines_are_one_message(say: Say) -> None:
    _, err = say("def f():\\", "    return 1", "/history")
    assert "user: def f():\n    return 1" in err


def test_a_folder_without_a_template_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(FOLDER)]) == 1
    assert (
        "has no chat template\n  help: give one with --chat-template, or use nnfront run"
        in capsys.readouterr().err
    )
