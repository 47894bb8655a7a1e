# SPDX-License-Identifier: Apache-2.0
"""A server whose model two ranks compute: it answers as one process does, also at the same time, and ends when it is asked to."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from patience import HANGS_SECONDS

import nnfront as nn

FOLDER = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"
PROMPTS = ["def main():\n", "import os\n\n", "class Path:\n    def "]


@pytest.mark.matrix  # whole processes
@pytest.mark.parametrize("form", ["an artefact, with guesses", "a folder"])
def test_a_server_of_two_ranks_answers_as_one_process_and_ends_in_order(form: str, tmp_path: Path) -> None:
    path, flags = FOLDER, []
    if form != "a folder":
        path, flags = tmp_path / "made", ["--spec", "ngram"]
        nn.artefact.export(FOLDER, path, ranks=2)
    command = [sys.executable, "-m", "nnfront", "serve", str(path), "--port", "0", "--tp", "2", *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        urls = (re.search(r"http://127\.0\.0\.1:\d+", line) for line in process.stderr)
        url = next(found[0] for found in urls if found)

        def ask(prompt: str) -> str:
            body = json.dumps({"prompt": prompt, "max_tokens": 12, "temperature": 0}).encode()
            request = urllib.request.Request(
                f"{url}/v1/completions", body, {"content-type": "application/json"}
            )
            with urllib.request.urlopen(request, timeout=HANGS_SECONDS) as answer:
                text: str = json.load(answer)["choices"][0]["text"]
                return text

        with ThreadPoolExecutor(3) as threads:
            answers = list(threads.map(ask, PROMPTS))
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(HANGS_SECONDS) == 0, rest
        assert "error" not in rest.lower()
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    alone = nn.LLM.load(FOLDER)
    assert answers == [alone.generate(prompt, 12, temperature=0.0) for prompt in PROMPTS]
