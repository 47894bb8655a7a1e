# SPDX-License-Identifier: Apache-2.0
"""What guessing tokens gains where code is edited, one stream: `python bench/speculation.py FOLDER [--rounds 3] [--spec ngram]`.

FOLDER is a checkpoint of `bench/checkpoints.py`, whose weights are random: it would write anything. So what is drawn is what an editor wrote, the same with
guesses and without: the prompt is a piece of Python, and the answer the whole piece with one of the EDITS. All else is as ever: the engine finds its guesses in
what there is of the text, computes them with the model, keeps those that are drawn, and stops guessing where that does not pay.
Prints tokens a second for each edit, times alternating in one process, medians over rounds, and how many guesses were right.
"""

from __future__ import annotations

import argparse
import queue
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from machine import describe, keep, table
from tokenizers import Tokenizer

import nnfront as nn
from nnfront.engine.draw import Draw
from nnfront.engine.params import Params
from nnfront.engine.runner import Event
from nnfront.engine.schedule import Limits
from nnfront.serve import engine as serving

SHIPPED = Path(__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m"
BEGIN, END = "    def __new__(mcls", "    def _abc_registry_clear"


def renamed(code: str) -> str:
    """A name that occurs often is another."""
    return code.replace("subclass", "derived").replace("abstracts", "missing")


def annotated(code: str) -> str:
    """Signatures say of what type everything is."""
    code = code.replace("def register(cls, subclass):", "def register(cls, subclass: type) -> type:")
    code = code.replace(
        "def _dump_registry(cls, file=None):", "def _dump_registry(cls, file: TextIO | None = None) -> None:"
    )
    return code.replace(
        "__new__(mcls, name, bases, namespace, /, **kwargs):",
        "__new__(mcls, name: str, bases: tuple[type, ...], namespace: dict, /, **kwargs) -> type:",
    )


def shortened(code: str) -> str:
    """Comments are taken out."""
    return "\n".join(line for line in code.split("\n") if not line.lstrip().startswith("#"))


def extended(code: str) -> str:
    """A method has a further argument that it checks."""
    code = code.replace("def register(cls, subclass):", "def register(cls, subclass, *, strict=False):")
    old = "        if issubclass(subclass, cls):\n"
    return code.replace(
        old,
        "        if strict and not cls.__abstractmethods__:\n            raise TypeError(f'{cls.__name__} has no abstract methods')\n"
        + old,
    )


EDITS: dict[str, Callable[[str], str]] = {f.__name__: f for f in (renamed, annotated, shortened, extended)}


class Written(Draw):
    """Draws the tokens of a text."""

    text: tuple[int, ...] = ()

    def __call__(self, logits: object) -> int:
        token = self.text[self.drawn]
        self._took(token)
        return token


def seconds(engine: serving.Engine, prompt: list[int], answer: list[int]) -> float:
    """From the first token of an answer to the last."""
    came: queue.SimpleQueue[Event] = queue.SimpleQueue()
    Written.text = tuple(answer)
    with patch.object(serving, "Draw", Written):
        engine.submit(prompt, Params(max_tokens=len(answer), ignore_eos=True), came.put)
    found = []
    while not found or found[-1].finish is None:
        found.append(came.get())
        if len(found) == 1:
            began = time.perf_counter()
    assert [event.token for event in found] == answer
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--spec", default="ngram")
    parser.add_argument("--quant")
    args = parser.parse_args()
    torch.set_num_threads(2)
    tokenizer = Tokenizer.from_file(str(SHIPPED / "tokenizer.json"))
    text = (SHIPPED / "heldout.txt").read_text()
    code = text[text.index(BEGIN) : text.index(END)]
    llm = nn.LLM.load(args.folder, quant=args.quant, extends=True)
    prompt = tokenizer.encode(code).ids
    limits = Limits(max_model_len=4 * len(prompt), pages=len(prompt), remembers=False)
    rows = []
    for name, edit in EDITS.items():
        answer = tokenizer.encode(edit(code)).ids
        assert answer != prompt
        times: dict[str | None, list[float]] = {None: [], args.spec: []}
        for _ in range(args.rounds):
            for spec, found in times.items():
                with serving.Engine(llm, limits, spec=spec) as engine:
                    found.append(seconds(engine, prompt, answer))
                    counts = engine.counts()
        plain, guessed = (len(answer) / median(found) for found in times.values())
        right = counts["accepted"] / max(counts["drafted"], 1)
        rows.append(
            {
                "edit": name,
                "tokens": len(answer),
                "tokens/s": plain,
                f"with {args.spec}": guessed,
                "times": guessed / plain,
                "of guesses right": right,
            }
        )
    keep("speculation", describe("torch"), rows)
    print(table(rows))


if __name__ == "__main__":
    main()
