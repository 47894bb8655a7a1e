# SPDX-License-Identifier: Apache-2.0
"""Folders that somebody has spoiled, and a process that opens many of them and says what came of each.

    python hostile_folders.py KIND GOOD PLACE FIRST COUNT

GOOD is a whole folder of one of KINDS. For each case a copy of it under PLACE gets one hostile file, or one hostile value in a file, in an artefact
with the hashes made right again, so that what lies behind them is reached; the number of the case decides which. A line of JSON says for each
what was done and what came of it. What is no error of ours is raised: wrong exceptions, more than SECONDS, more memory than ROOM_BYTES,
a file opened that is not the folder's.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from artefact_cases import rehash, reseal
from artefact_mutations import spoil_value
from hostile import hostile_value, limits, nested

import nnfront as nn
from nnfront.artefact.folder import check_files
from nnfront.cli import main
from nnfront.errors import NnfrontError

SPARSE_BYTES = 3 << 30
_HASHED_BYTES = 10 << 20
_LONGEST_MESSAGE = 20_000


def _make_pipe(file: Path) -> None:
    os.mkfifo(file)


def _make_socket(file: Path) -> None:
    with (
        contextlib.chdir(file.parent),
        socket.socket(socket.AF_UNIX) as bound,
    ):  # the names of sockets are short
        bound.bind(file.name)


def _make_sparse(file: Path) -> None:
    file.touch()
    os.truncate(file, SPARSE_BYTES)


def _make_sparse_header(file: Path) -> None:
    file.write_bytes((99_000_000).to_bytes(8, "little"))
    os.truncate(file, SPARSE_BYTES)


# What may stand in the place of any file.
FILES: dict[str, Callable[[Path], object]] = {
    "nothing": lambda file: None,
    "a folder": Path.mkdir,
    "a pipe": _make_pipe,
    "a socket": _make_socket,
    "a link to /dev/zero": lambda file: file.symlink_to("/dev/zero"),
    "a link to /proc": lambda file: file.symlink_to("/proc/self/environ"),
    "a link to itself": lambda file: file.symlink_to(file.name),
    "a link to its folder": lambda file: file.symlink_to("."),
    "a link to nothing": lambda file: file.symlink_to("gone"),
    "a link out of the folder": lambda file: file.symlink_to("../outside/secret.json"),
    "a link out by its whole path": lambda file: file.symlink_to(file.parents[1] / "outside" / "secret.json"),
    "no bytes": Path.touch,
    "3 GB of nothing": _make_sparse,
    "a header in 3 GB of nothing": _make_sparse_header,
    "noise": lambda file: file.write_bytes(random.Random(0).randbytes(5000)),
}

# What may stand in the place of any JSON.
TEXTS: dict[str, bytes] = {
    "many lists": b"[" * 100_000,
    "lists in lists": b"[" * 90_000 + b"]" * 90_000,
    "objects in objects": b'{"x":' * 90_000 + b"1" + b"}" * 90_000,
    "99 lists": json.dumps(nested(99)).encode(),
    "5000 digits": b'{"vocab_size": ' + b"9" * 5000 + b"}",
    "a float of 5000 digits": b'{"vocab_size": ' + b"9" * 5000 + b".0}",
    "six million lists": b"[" + b"[]," * 6_000_000 + b"[]]",
    "one long text": b'"' + b"a" * 20_000_000 + b'"',
    "two names": b'{"a": 1, "a": 2}',
    "no text": b"\xff\xfe\x00",
    "half a character": b'{"model_type": "\\ud800", "\\udfff": 1}',
    "a mark": b"\xef\xbb\xbf{}",
    "a control character": b'{"model_type": "\\u001b[2J\\u0000"}',
    "not a number": b'{"rms_norm_eps": NaN, "rope_theta": -Infinity}',
    "null": b"null",
    "a list": b"[]",
    "an empty object": b"{}",
}

ROPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "spiral", 7, None)


def spoil_json(rng: random.Random, file: Path) -> str:
    """Spoil a value of a JSON file, or several; return which."""
    fields = json.loads(file.read_bytes())
    places = [spoil_value(rng, fields) for _ in range(rng.choice((1, 1, 1, 2, 3)))]
    if file.name == "config.json" and rng.random() < 0.3:
        keys = ("factor", "rope_theta", "original_max_position_embeddings", "beta_fast", "short_factor")
        rope = {key: hostile_value(rng) for key in keys if rng.random() < 0.5}
        fields["rope_parameters"] = {"rope_type": rng.choice(ROPES), "rope_theta": 1e4, **rope}
        places.append(f"rope {fields['rope_parameters']!r:.100}")
    file.write_text(json.dumps(fields))
    return "; ".join(places)


def spoil_header(rng: random.Random, file: Path) -> str:
    """Spoil a value of a safetensors header, and keep its length right."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    fields = json.loads(data[8 : 8 + length])
    place = spoil_value(rng, fields)
    text = json.dumps(fields).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return place


def spoil_index(rng: random.Random, file: Path) -> str:
    """Let an index name files that are not shards, or spoil it as any JSON."""
    if rng.random() < 0.5:
        return spoil_json(rng, file)
    fields = json.loads(file.read_bytes())
    names = [
        "/dev/zero",
        "../outside/secret.json",
        "n" * 5000,
        "",
        ".",
        "..",
        "a\0b",
        "config.json",
        "\ud800",
    ]
    fields["weight_map"][rng.choice([*fields["weight_map"]])] = name = rng.choice(names)
    file.write_text(json.dumps(fields))
    return f"a shard {name!r:.60}"


def _set(steps: dict[str, Any]) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields.update(steps)


# What a tokenizer.json can be told to do to a process.
TOKENIZERS: dict[str, Callable[[dict[str, Any]], None]] = {
    "pads to 2**40": _set({"padding": {"strategy": {"Fixed": 2**40}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}}),
    "truncates to nothing": _set({"truncation": {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 7}}),
    "doubles a hundred times": _set({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 100}}),
    "puts in a megabyte": _set({"normalizer": {"type": "Prepend", "prepend": "a" * 1_000_000}}),
    "has a broken table": _set({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}),
    "has a cruel pattern": _set({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a|a?)+" * 20 + "b"}, "behavior": "Isolated", "invert": False}}),
    "is nested": _set({"normalizer": nested(200, {"type": "NFC"}, of=dict)}),
    "has another vocabulary": lambda fields: fields["model"].update(vocab={"[unk]": 2**32 - 1, "a": 10**6, "b": 3}),
    "has a token too many": _set({"added_tokens": [{"id": 2**31, "content": "", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}]}),
}  # fmt: skip


def spoil_tokenizer(rng: random.Random, file: Path) -> str:
    """Make a tokenizer that is a danger to its process, or spoil it as any JSON."""
    if rng.random() < 0.5:
        return spoil_json(rng, file)
    fields = json.loads(file.read_bytes())
    name = rng.choice([*TOKENIZERS])
    TOKENIZERS[name](fields)
    file.write_text(json.dumps(fields))
    return name


_BY_NAME: dict[str, Callable[[random.Random, Path], str]] = {
    "tokenizer.json": spoil_tokenizer,
    "model.safetensors.index.json": spoil_index,
    "nnfront-weights.safetensors.index.json": spoil_index,
}


def spoil(rng: random.Random, folder: Path) -> str:
    """Spoil one file of a folder; return what was done."""
    files = sorted(
        f
        for f in folder.rglob("*")
        if f.is_file() and f.suffix in (".json", ".safetensors", ".cubin", ".nnir")
    )
    file = rng.choice(files)
    kind = rng.random()
    is_json = file.suffix == ".json"
    if kind < 0.25 or not (is_json or file.suffix == ".safetensors"):
        name = rng.choice([*FILES])
        file.unlink()
        FILES[name](file)
    elif kind < 0.4 and is_json:
        name = rng.choice([*TEXTS])
        file.write_bytes(TEXTS[name])
    elif file.suffix == ".safetensors":
        name = spoil_header(rng, file)
    else:
        name = _BY_NAME.get(file.name, spoil_json)(rng, file)
    return f"{file.name}: {name}"


def forge(folder: Path) -> None:
    """Make the hashes of an artefact right, where it has files that can be hashed at all."""
    manifest = folder / "nnfront.json"
    if not manifest.is_file() or any(
        f.is_symlink() or f.stat().st_size > _HASHED_BYTES for f in folder.rglob("*")
    ):
        return
    with contextlib.suppress(ValueError, RecursionError, AttributeError, TypeError):
        fields = json.loads(manifest.read_bytes())
        files = {f.relative_to(folder).as_posix() for f in folder.rglob("*") if f.is_file() and f != manifest}
        if fields.get("files", {}).keys() == files:
            rehash(folder)
        else:
            reseal(folder)


def open_checkpoint(folder: Path) -> Iterator[None]:
    """Do with a folder what people do, a step at a time: look at it, load it, generate, save and load again."""
    main(["check", str(folder)])
    yield
    llm = nn.LLM.load(folder)
    yield
    errors = []
    for use in (
        lambda: llm.tokenizer.decode(llm.tokenizer.encode("a b c aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa")),
        lambda: llm.generate("a b", max_new_tokens=3),
        lambda: llm.generate_ids(torch.tensor([[1, 2]]), max_new_tokens=2),
        lambda: llm.save(folder.parent / "saved"),
    ):
        try:
            use()
        except NnfrontError as error:
            errors.append(error)
        yield
    if (folder.parent / "saved").exists():
        nn.LLM.load(folder.parent / "saved")  # what was saved loads
    if errors:
        raise errors[0]


def open_artefact(folder: Path) -> Iterator[None]:
    """Look at an artefact, load it and use it."""
    main(["check", str(folder)])
    yield
    main(["show", str(folder)])
    with contextlib.suppress(NnfrontError):
        check_files(folder)
    yield
    llm = nn.LLM.load(folder)
    llm.generate_ids(torch.tensor([[1, 2]]), max_new_tokens=2)
    llm.generate("a b", max_new_tokens=3)


def open_kernels(folder: Path) -> Iterator[None]:
    """Read an artefact's compiled kernels."""
    yield
    nn.artefact.kernels_of(folder)


KINDS: dict[str, Callable[[Path], Iterator[None]]] = {
    "checkpoint": open_checkpoint,
    "artefact": open_artefact,
    "kernels": open_kernels,
}


class Opened:
    """Which files a process opens besides those of a folder, of Python and of the system's own folders."""

    def __init__(self) -> None:
        self.allowed: tuple[str, ...] = ()
        self.strange: list[str] = []
        paths = {*sys.path, *sysconfig.get_paths().values(), sys.base_prefix, Path(__file__).parents[2]} - {
            ""
        }
        self.ours = (*map(os.path.realpath, paths), *(f"/proc/{os.getpid()}/", "/sys/", "/usr/", "/dev/null"))
        sys.addaudithook(self.hear)

    def hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and self.allowed and isinstance(args[0], str | bytes):
            path = os.path.join(self.allowed[0], os.fsdecode(args[0]))  # names are relative to the folder
            found = os.path.realpath(path)
            is_above = found == os.path.dirname(
                self.allowed[0]
            )  # opened to be sure that what is in it is on disk
            if not is_above and not found.startswith((*self.allowed, *self.ours)):
                self.strange.append(path)

    @contextlib.contextmanager
    def only(self, *paths: Path) -> Iterator[None]:
        """Note what else is opened."""
        self.allowed = tuple(map(os.path.realpath, paths))
        try:
            yield
        finally:
            self.allowed = ()


def _walk(steps: Iterator[None]) -> None:
    """Take every step within limits of its own."""
    is_done = False
    while not is_done:
        with limits():
            is_done = next(steps, True) is True


def run(kind: str, good: Path, place: Path, first: int, count: int) -> None:
    """Spoil and open so many folders."""
    torch.set_num_threads(1)
    opened = Opened()
    (place / "outside").mkdir(parents=True)
    (place / "outside" / "secret.json").write_bytes(
        (good / "config.json").read_bytes() if kind == "checkpoint" else b"{}"
    )
    for case in range(first, first + count):
        rng = random.Random(f"{kind} {case}")
        folder = place / "case"
        shutil.copytree(good, folder)
        done = spoil(rng, folder)
        if kind != "checkpoint":
            forge(folder)
        print(json.dumps([case, done]), flush=True)
        message = ""
        result = "opened"
        try:
            with (
                opened.only(folder, place / "saved", place / ".saved."),
                contextlib.redirect_stdout(io.StringIO()),
                contextlib.redirect_stderr(io.StringIO()) as said,
            ):
                _walk(KINDS[kind](folder))
        except NnfrontError as error:
            result, message = type(error).__name__, str(error)
        assert len(message) + len(said.getvalue()) < _LONGEST_MESSAGE, "an error that nobody can read"
        assert not opened.strange, opened.strange
        print(json.dumps([case, result]), flush=True)
        for left in (folder, place / "saved"):
            shutil.rmtree(left, ignore_errors=True)


if __name__ == "__main__":
    for kind, count in json.loads(sys.argv[1]).items():
        run(kind, Path(sys.argv[2]) / kind, Path(sys.argv[3]) / kind, int(sys.argv[4]), count)
