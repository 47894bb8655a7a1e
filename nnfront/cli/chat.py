# SPDX-License-Identifier: Apache-2.0
"""Talk with a model: an interrupt stops an answer, /help lists what else there is."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nnfront.cli import loading
from nnfront.cli.serve import engine_parts
from nnfront.cli.text_file import read_text, write_text
from nnfront.errors import LoadError, NnfrontError, RunError
from nnfront.files import parse_json

if TYPE_CHECKING:
    from nnfront.serve.talk import Talk

TURN_TOKENS = 64
"""Of a prompt in one call: what is new in a turn is short, and what is old is there already."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    parser.add_argument(
        "--chat-template", metavar="FILE", help="a template in Jinja, instead of the folder's"
    )
    parser.add_argument(
        "-n", "--max-new-tokens", type=int, metavar="N", help="of an answer; default what fits"
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="default as generation_config.json says"
    )
    parser.add_argument("--seed", type=int, help="the same seed draws the same answers")
    loading.add_spec_argument(parser)
    loading.add_adapter_arguments(parser)
    loading.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    parts = engine_parts()
    llm = loading.load(args)
    template = parts.template_of(
        llm.files, None if args.chat_template is None else read_text(args.chat_template)
    )
    if template is None:
        raise LoadError(
            f"{args.path} has no chat template", help="give one with --chat-template, or use nnfront run"
        )
    said = {"temperature": args.temperature, "seed": args.seed, "max_tokens": args.max_new_tokens}
    given = {name: value for name, value in said.items() if value is not None}
    params = parts.Params.of(llm.sampling, **given)
    limits = parts.Limits(
        max_model_len=llm.context,
        pages=2 * -(-llm.context // TURN_TOKENS) * (TURN_TOKENS // 16),
        max_num_seqs=1,
        chunk=TURN_TOKENS,
        step_tokens=TURN_TOKENS,
        reuse_answers=True,
    )
    if sys.stdin.isatty():
        import readline

        assert readline  # lines can be edited, and come back
    with parts.Engine(llm, limits, spec=args.spec) as engine:
        talk = parts.Talk(engine, template, params, args.system)
        talk.use(args.adapter)
        print("Ctrl-C stops an answer, /help lists commands, /exit or Ctrl-D ends.", file=sys.stderr)
        for line in _lines():
            try:
                if not _turn(talk, line):
                    break
            except NnfrontError as error:
                print(f"error: {error}", file=sys.stderr)
    return 0


def _lines() -> Iterator[str]:
    """What is typed: a line, or several of which all but the last end with a backslash."""
    typed: list[str] = []
    while True:
        try:
            line = input("... " if typed else "> ")
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\n/exit or Ctrl-D ends", file=sys.stderr)
            typed.clear()
            continue
        typed.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            text = "\n".join(typed)
            typed.clear()
            if text.strip():
                yield text


def _turn(talk: Talk, line: str) -> bool:
    """Do what a line says; False if that is to end."""
    if not line.startswith("/"):
        _show(talk.ask(line))
        return True
    name, _, rest = line[1:].partition(" ")
    if name in ("exit", "quit"):
        return False
    if name not in COMMANDS:
        raise RunError(f"there is no command /{name}", help="/help lists those that there are")
    COMMANDS[name][0](talk, rest.strip())
    return True


def _show(pieces: Iterator[str]) -> None:
    """Write an answer as it comes; an interrupt ends it."""
    try:
        for piece in pieces:
            sys.stdout.write(piece)
            sys.stdout.flush()
        sys.stdout.write("\n")
    except KeyboardInterrupt:
        pieces.close()  # type: ignore[attr-defined]
        print("\n(stopped)", file=sys.stderr)
    sys.stdout.flush()


def _help(_: Talk, __: str) -> None:
    for name, (_run, about) in COMMANDS.items():
        print(f"/{name:<18}{about}", file=sys.stderr)


def _system(talk: Talk, text: str) -> None:
    talk.system = text or None


def _set(talk: Talk, rest: str) -> None:
    name, _, value = rest.partition(" ")
    if name:
        talk.set(name, value.strip())
    print(talk.params, file=sys.stderr)


def _history(talk: Talk, _: str) -> None:
    for turn in talk.turns:
        print(f"{turn['role']}: {turn['content']}", file=sys.stderr)


def _save(talk: Talk, path: str) -> None:
    write_text(path, json.dumps({"system": talk.system, "messages": talk.turns}, indent=1))


def _load(talk: Talk, path: str) -> None:
    try:
        found: Any = parse_json(Path(path).read_bytes())
        system, turns = found["system"], [dict(turn) for turn in found["messages"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"{path} holds no conversation: {error}") from None
    talk.system, talk.turns = system, turns


COMMANDS: dict[str, tuple[Callable[[Talk, str], None], str]] = {
    "help": (_help, "this list"),
    "clear": (lambda talk, _: talk.turns.clear(), "forget the conversation"),
    "undo": (lambda talk, _: talk.undo(), "take back what was said last, and its answer"),
    "retry": (lambda talk, _: _show(talk.again()), "answer once more"),
    "system": (_system, "TEXT: the system message; none without a text"),
    "adapter": (
        lambda talk, name: talk.use(name or None),
        "NAME: what --lora-modules calls an adapter, which answers from now on; none without a name",
    ),
    "set": (_set, "NAME VALUE: temperature, top_p, seed ...; without a name all that is set"),
    "history": (_history, "what has been said"),
    "save": (_save, "FILE: write the conversation"),
    "load": (_load, "FILE: go on with one"),
    "exit": (lambda _talk, _rest: None, "end"),
}
