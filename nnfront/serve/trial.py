# SPDX-License-Identifier: Apache-2.0
"""Grammars compiled on trial, in a process of its own that may take so much time and memory and no more.

llguidance bounds what a step of an answer takes, but not what it does before the first one: some short grammars, such as two
regular expressions that a text is to match both, keep it busy for hours. The process is this file, run as a program.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import sys
import weakref
from collections.abc import Mapping
from threading import Lock
from typing import Any

import llguidance

SECONDS = 2.0
"""Of processor time, for one grammar: those of a thousand properties take a tenth of it."""
ROOM_BYTES = 4 << 30


class Trial:
    """The process, which begins with the first grammar, and again after one that it did not come to the end of."""

    def __init__(self, tokenizer: Mapping[str, Any]) -> None:
        """`tokenizer`: what llguidance makes one of."""
        self._tokenizer = json.dumps(tokenizer)
        self._process: subprocess.Popen[str] | None = None
        self._lock = Lock()

    def ends(self, grammar: str) -> bool:
        """Whether a grammar is compiled, or refused, within the limits."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = self._begun()
            return self._answers(self._process, json.dumps(grammar))

    def _begun(self) -> subprocess.Popen[str]:
        pipe, command = subprocess.PIPE, [sys.executable, "-P", __file__]
        # Of a session of its own: an interrupt is the server's to handle.
        process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )
        weakref.finalize(self, _end, process)
        if not self._answers(process, self._tokenizer):
            raise RuntimeError("the process that tries grammars has not begun")
        return process

    def _answers(self, process: subprocess.Popen[str], line: str) -> bool:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
        if process.stdout.readline():
            return True
        _end(process)
        return False


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    with process:  # closes what leads to it, and waits
        pass


def _run() -> None:
    tokenizer = llguidance.LLTokenizer(**json.loads(sys.stdin.readline()))
    print(flush=True)
    with contextlib.suppress(ValueError):  # where it may have less anyway
        resource.setrlimit(resource.RLIMIT_AS, (ROOM_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_VIRTUAL, SECONDS)  # whose signal ends the process, whatever it does
        llguidance.LLMatcher(tokenizer, json.loads(line), log_level=0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        print(flush=True)


if __name__ == "__main__":
    _run()
