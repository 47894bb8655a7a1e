# SPDX-License-Identifier: Apache-2.0
"""What docs/start.md says of serving is so: the server that it starts answers the client that it shows, as it shows."""

import contextlib
import io
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from patience import HANGS_SECONDS

from nnfront.cli import main

PROJECT = Path(__file__).parents[1]
PAGE = (PROJECT / "docs" / "start.md").read_text(encoding="utf-8")


def indented(first: str) -> str:
    """The indented block that begins with these words."""
    found = re.search(rf"^    {re.escape(first)}.*\n(?:(?:    .*)?\n)*", PAGE, re.MULTILINE)
    assert found
    return textwrap.dedent(found[0]).strip()


def test_the_server_of_the_page_answers_the_client_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(PROJECT)
    artefact = str(tmp_path / "pylib-int8.nnfront")
    made = re.search(r"^\$ nnfront (export .*)$", PAGE, re.MULTILINE)
    assert made
    place = "build/pylib-int8.nnfront"
    assert main(shlex.split(made[1].replace(place, artefact))) == 0
    command = shlex.split(
        indented("nnfront serve").replace(place, artefact).replace("--port 8000", "--port 0")
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "nnfront.cli", *command[1:]], stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        port = next(
            found[1]
            for line in process.stderr
            if (found := re.search(r"running on http://127\.0\.0\.1:(\d+)", line, re.IGNORECASE))
        )
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(indented("import openai").replace("8000", port), {})
    finally:
        process.terminate()
        assert process.stderr is not None
        process.stderr.read()
        process.stderr.close()
        process.wait(HANGS_SECONDS)
    shown = indented("['pylib']").splitlines()
    assert out.getvalue().splitlines()[: len(shown)] == shown
