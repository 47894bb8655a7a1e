# SPDX-License-Identifier: Apache-2.0
"""Text to tokens and back, with the tokenizer.json of a Hugging Face folder."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

from nnfront.errors import LoadError, NnfrontError, RunError
from nnfront.files import File, Folder, check_size, parse_json, shown_text
from nnfront.packages import package

TOKENIZER = "tokenizer.json"
_MAX_GROWTH = 1 << 16
_PUT_IN = ("content", "prepend", "replacement")


class Tokenizer:
    """The tokenizer of a folder. Needs the package `tokenizers`, which the extra `llm` installs."""

    def __init__(self, file: File) -> None:
        """Raises LoadError for a file that is no tokenizer, or one that makes very long texts of short ones."""
        tokenizers = package("tokenizers", "llm")
        data = file.folder.read(file.name)
        with _refused(LoadError, f"{file.folder.path / file.name} is not a tokenizer"):
            check_size(data)
            self._tokenizer: Any = tokenizers.Tokenizer.from_buffer(data)
            _check_growth(self._tokenizer)
        # What a file may say for training in batches; a prompt is given whole and alone.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token for token, how in added.items() if how.special}

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Return the tokens of a text, with the special tokens that the tokenizer adds unless `special` is false.

        Raises RunError if it has none for it.
        """
        with _refused(RunError, "the tokenizer cannot encode this text"):
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Return the text of tokens, with special ones if `special`. Raises RunError if the tokenizer has none for them."""
        with _refused(RunError, "the tokenizer cannot decode these tokens"):
            text: str = self._tokenizer.decode(list(ids), skip_special_tokens=not special)
        return text

    def stream(self, ids: Iterable[int]) -> Iterator[str]:
        """Yield pieces of text as tokens come, which together are what `decode` gives for all of them.

        A character that spans tokens comes when it is whole; what is still none at the end comes as `decode` has it.
        """
        text = TextStream(self)
        for token in ids:
            if piece := text.push(token):
                yield piece
        if piece := text.end():
            yield piece

    def is_special(self, token: int) -> bool:
        """Whether a token is one that texts are shown without."""
        return token in self._special

    def special(self) -> dict[str, int]:
        """The tokens that texts are shown without, by their names."""
        return {self._tokenizer.id_to_token(token): token for token in sorted(self._special)}

    def is_byte(self, token: int) -> bool:
        """Whether a token is one byte of a character that the vocabulary lacks: a run of them is decoded as one."""
        return BYTE.fullmatch(self._tokenizer.id_to_token(token) or "") is not None

    def json(self) -> str:
        """What its file says."""
        text: str = self._tokenizer.to_str()
        return text


class TextStream:
    """The text of tokens that come one by one; with `special`, of special ones too."""

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._seen: list[int] = []
        # The tokens from `settled` on are decoded again, since a decoder may treat the first one in its own way;
        # the text of those before `given` has been given.
        self._settled = self._given = 0
        self._text = ""

    def push(self, token: int) -> str:
        """Return the text that is sure with one more token, which may be none."""
        if not self._special and self._tokenizer.is_special(token):
            return ""
        self._seen.append(token)
        before = self._decode(self._seen[self._settled : self._given])
        now = self._decode(self._seen[self._settled :])
        if now.endswith(UNKNOWN) or self._tokenizer.is_byte(token) or not now.startswith(before):
            return ""
        if piece := now.removeprefix(before):
            self._settled, self._given = self._given, len(self._seen)
            self._text += piece
        return piece

    def end(self) -> str:
        """Return what is left of the text when no more tokens come."""
        whole = self._decode(self._seen)
        return whole[len(self._text) :]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, special=self._special)


UNKNOWN = "\N{REPLACEMENT CHARACTER}"
"""What a decoder puts for bytes that are no character, or not yet."""

BYTE = re.compile("<0x[0-9A-F]{2}>")


def tokenizer_of(folder: Folder) -> Tokenizer:
    """The tokenizer of a folder. Raises LoadError if it has none."""
    if not folder.has(TOKENIZER):
        raise LoadError(
            f"{folder.path} has no tokenizer.json, so it takes no text",
            details=list(filter(None, [folder.why_not(TOKENIZER)])),
            help="use generate_ids with token ids, or add the model's tokenizer.json to the folder",
        )
    return Tokenizer(File(folder, TOKENIZER))


@contextmanager
def _refused(kind: type[NnfrontError], what: str) -> Iterator[None]:
    """What the package raises for whatever is wrong with a file or a text: plain Exception, and panics, which are none."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise kind(what, details=[shown_text(str(error))]) from None


def _check_growth(tokenizer: Any) -> None:
    """Raise ValueError for steps that put texts in, each for every character that the one before it has left."""
    growth = 1
    for step in (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.decoder):
        pending = [parse_json(step.__getstate__())] if step is not None else []
        while pending:
            value = pending.pop()
            if isinstance(value, dict):
                growth *= prod(1 + len(v) for k, v in value.items() if k in _PUT_IN and isinstance(v, str))
                value = list(value.values())
            if isinstance(value, list):
                pending.extend(value)
    if growth > _MAX_GROWTH:
        raise ValueError(f"its steps make texts up to {growth} times as long, {_MAX_GROWTH} are the most")


def until(pieces: Iterable[str], stop: str | Sequence[str] | None) -> Iterator[str]:
    """Return what yields text up to the first of the stop strings, which itself is not part of it. Raises RunError, at once, for what is not a text or several.

    What might be the beginning of a stop string is held back until it is clear that it is not.
    """
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, Sequence) or not all(type(each) is str and each for each in stops):
        raise RunError(f"stop is {stop!r}, expected a non-empty text or several")
    return _until(pieces, Stops(stops))


def _until(pieces: Iterable[str], text: Stops) -> Iterator[str]:
    for piece in pieces:
        if ready := text.push(piece):
            yield ready
        if text.found is not None:
            return
    if text.pending:
        yield text.pending


class Stops:
    """Text that comes in pieces, up to the first of the stop strings; `found` is that one, `pending` what might be the beginning of one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self.pending = ""
        self.found: str | None = None

    def push(self, piece: str) -> str:
        """Return the text that is sure with one more piece."""
        self.pending += piece
        places = [(at, stop) for stop in self._stops if (at := self.pending.find(stop)) >= 0]
        if places:
            at, self.found = min(places)
        else:
            at = len(self.pending) - max((overlap(self.pending, stop) for stop in self._stops), default=0)
        ready, self.pending = self.pending[:at], self.pending[at:]
        return ready


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
