# SPDX-License-Identifier: Apache-2.0
"""Serve a language model, or an encoder's embeddings, to many clients at once, over OpenAI's API."""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import nnfront as nn
from nnfront.cli import loading
from nnfront.cli.text_file import read_text
from nnfront.errors import LoadError
from nnfront.packages import package

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from nnfront.engine.schedule import Limits
    from nnfront.serve.engine import Engine

KEY_VARIABLE = "NNFRONT_API_KEY"
KEEP_ALIVE_SECONDS = 75
"""How long a connection may wait for its next request: longer than clients and proxies keep one, so that they close it, and no request meets one that is being closed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_serving_arguments(parser)
    parser.add_argument(
        "--max-connections", type=int, default=800, metavar="N",
        help="open connections; one more closes that which has been without a request for longest; default 800",
    )  # fmt: skip
    loading.add_ranks_argument(parser)


def add_serving_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what is served, where and within which limits."""
    parser.add_argument(
        "--host", default="127.0.0.1", help="where to listen; default 127.0.0.1, this machine alone"
    )
    parser.add_argument("--port", type=int, default=8000, help="default 8000; 0 takes a free one")
    parser.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help=f"ask requests for this key, or one of several; the variable {KEY_VARIABLE} adds one that no list of processes shows",
    )  # fmt: skip
    parser.add_argument(
        "--served-model-name", metavar="NAME", help="the model's name for clients; default the folder's"
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="a template in Jinja, instead of the folder's"
    )
    parser.add_argument(
        "--max-num-seqs", type=int, default=16, metavar="N", help="answers at a time; default 16"
    )
    parser.add_argument(
        "--max-queued", type=int, default=256, metavar="N", help="requests that may wait; default 256"
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="tokens of a prompt and its answer; default the model's context",
    )
    parser.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="tokens that all have room for together; default as many as 4 of the longest",
    )
    parser.add_argument("--page-size", type=int, default=16, metavar="N", help="tokens of a page; default 16")
    parser.add_argument(
        "--chunk",
        type=int,
        default=256,
        metavar="N",
        help="tokens of prompts that are computed between two tokens of an answer; default 256",
    )
    parser.add_argument(
        "--inter-token-ms",
        type=int,
        default=30,
        metavar="N",
        help="how long prompts of others may keep the next token of an answer, as far as steps can be as short: less of them is computed at a time; default 30, 0 for as much as --chunk says",
    )
    parser.add_argument(
        "--reuse-answers",
        action="store_true",
        help="share what was computed of answers, too: faster in long chats, but texts may then depend on what was asked before",
    )
    parser.add_argument(
        "--snapshot-mb",
        type=int,
        default=1024,
        metavar="N",
        help="memory for copies of recurrent states behind chunks of prompts, from which others that begin alike go on; default 1024",
    )
    parser.add_argument("--timeout", type=float, metavar="SECONDS", help="the longest an answer may take")
    parser.add_argument(
        "--log", choices=["json"], help="write a line for each request to stdout: its number, tokens and times, no texts"
    )  # fmt: skip
    loading.add_spec_argument(parser)
    loading.add_adapters_argument(parser)
    loading.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    parts = engine_parts()
    if nn.kind_of_model(args.path, args.model) == "Embedder":
        return _serve_encoder(args, parts)
    llm, limits = loaded(args)
    if not llm.ranks.is_first:
        # Rank 0 ends in order, and lets this one know.
        for each in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            signal.signal(each, signal.SIG_IGN)
        parts.compute_of(llm, limits).follow()
        return 0
    engine, served = application(args, llm, limits)
    with engine:
        _follow_the_folder(engine)
        _listen(args, parts, served)
        engine.close(drain=True)
    return 0


def _follow_the_folder(engine: Engine) -> None:
    """On SIGUSR1 take the weights that the model's folder holds then, while requests run. What is wrong with them is said, and changes nothing.

    Not on SIGHUP, which says that a terminal has gone as well.
    """
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()

    def follow() -> None:
        while True:
            asked.get()
            try:
                engine.update(engine.llm.read())
                print("serving the weights that the folder holds now", file=sys.stderr)
            except Exception as error:  # whatever it is, the weights that are there are as good as before
                print(f"the weights stay as they are: {error}", file=sys.stderr)

    threading.Thread(target=follow, name="nnfront-weights", daemon=True).start()
    signal.signal(signal.SIGUSR1, lambda number, _: asked.put(number))


def loaded(args: argparse.Namespace) -> tuple[nn.LLM, Limits]:
    """The model that the flags say, on this rank, and the limits it is served within."""
    llm = loading.load(args, serves=True)
    longest = llm.context if args.max_model_len is None else args.max_model_len
    if not 1 < longest <= llm.context:
        raise LoadError(f"--max-model-len is {longest}, the model's context holds {llm.context} tokens")
    tokens = args.max_tokens or 4 * longest
    return llm, engine_parts().Limits(
        max_model_len=longest,
        pages=-(-tokens // max(args.page_size, 1)),
        max_num_seqs=args.max_num_seqs,
        max_queued=args.max_queued,
        page_size=args.page_size,
        chunk=args.chunk,
        step_tokens=args.chunk,
        reuse_answers=args.reuse_answers,
        snapshot_bytes=args.snapshot_mb << 20,
        inter_token_ms=args.inter_token_ms,
    )


def application(args: argparse.Namespace, llm: nn.LLM, limits: Limits) -> tuple[Engine, ASGIApp]:
    """The engine of a model, which is to be closed, and the application over it that the flags say."""
    parts = engine_parts()
    source = None if args.chat_template is None else read_text(args.chat_template)
    template = parts.template_of(llm.files, source)
    name = served_name(args)
    engine = parts.Engine(llm, limits, spec=args.spec)
    print(
        f"serving {name!r}: {limits.max_num_seqs} answers at a time, {limits.pages} pages of {limits.page_size} tokens"
        + ("" if template else "; without a chat template it takes texts only, at /v1/completions"),
        file=sys.stderr,
    )
    served = parts.app(engine, name, template=template, keys=keys(args), seconds=args.timeout, log=_log(args))
    return engine, served


def served_name(args: argparse.Namespace) -> str:
    """The model's name for clients."""
    name: str = args.served_model_name or nn.model_name(args.path)
    return name


def keys(args: argparse.Namespace) -> list[str]:
    """The keys of which requests must have one."""
    return [*args.api_key, *filter(None, [os.environ.get(KEY_VARIABLE)])]


def _serve_encoder(args: argparse.Namespace, parts: Any) -> int:
    embedder = loading.load_embedder(args)
    name = served_name(args)
    served = parts.embedding_app(embedder, name, keys=keys(args), max_queued=args.max_queued, log=_log(args))
    print(f"serving {name!r}, an encoder: texts have a vector each, at /v1/embeddings", file=sys.stderr)
    _listen(args, parts, served)
    return 0


def _log(args: argparse.Namespace) -> Callable[[dict[str, Any]], None] | None:
    return None if args.log is None else lambda line: print(json.dumps(line), flush=True)


def _listen(args: argparse.Namespace, parts: Any, served: Any) -> None:
    """Answer requests until a signal says that it is enough, and those that run."""
    # uvicorn ends in order when it is told to, and then repeats the signal for whoever else wants to know.
    signal.signal(signal.SIGTERM, lambda *_: None)
    more: dict[str, Any] = {
        "log_level": "info",
        "access_log": False,
        "timeout_keep_alive": KEEP_ALIVE_SECONDS,
    }
    more["http"] = parts.protocol(args.max_connections)
    parts.uvicorn.run(served, host=args.host, port=args.port, **more)


def engine_parts() -> Any:
    """The module of what serving takes. Raises LoadError if a package for it is not installed."""
    return package("nnfront.cli.engine_parts", "serve")
