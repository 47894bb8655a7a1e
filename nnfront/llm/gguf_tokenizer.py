# SPDX-License-Identifier: Apache-2.0
"""tokenizer.json from the metadata of a GGUF file: byte-level BPE (`gpt2`), and SentencePiece's BPE with scores (`llama`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nnfront.files import shown

KEY = "tokenizer.ggml."
UNKNOWN, CONTROL, DEFINED, BYTE = 2, 3, 4, 6
"""Types of tokens."""

_CASED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS: Mapping[str, str] = {
    "llama-bpe": _CASED + r"\p{N}{1,3}" + _REST,
    "qwen2": _CASED + r"\p{N}" + _REST,
    "gpt-2": "",
    "default": "",
}
"""By `tokenizer.ggml.pre`, where texts are split before pairs are merged; empty: as GPT-2 does."""


class NoTokenizer(Exception):
    """There is no tokenizer in a file, or one that is not read; says why."""


def tokenizer_of(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of tokenizer.json. Raises NoTokenizer."""
    kind, tokens = metadata.get(f"{KEY}model"), metadata.get(f"{KEY}tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise NoTokenizer("the file's metadata hold no tokens")
    # A token whose bytes are no UTF-8 cannot be a text's.
    tokens = [token.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for token in tokens]
    types = metadata.get(f"{KEY}token_type", [1] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise NoTokenizer("the file's tokens have no types, or occur twice")
    made = {"gpt2": _bytes, "llama": _pieces}.get(str(kind))
    if made is None:
        raise NoTokenizer(f"{KEY}model is {shown(kind)}; gpt2 and llama are read")
    parts = made(metadata, tokens, types)
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": i, "content": token, **plain, "special": type in (CONTROL, UNKNOWN)}
        for i, (token, type) in enumerate(zip(tokens, types, strict=True))
        if type in (CONTROL, DEFINED, UNKNOWN)
    ]
    whole = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    return {**whole, "post_processor": _ends(metadata, tokens, kind == "llama"), **parts}


def _model(tokens: Sequence[str], merges: Sequence[Sequence[str]], **more: Any) -> dict[str, Any]:
    return {
        "type": "BPE",
        **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
        **dict.fromkeys(("fuse_unk", "byte_fallback", "ignore_merges"), False),
        "vocab": {token: i for i, token in enumerate(tokens)},
        "merges": list(merges),
        **more,
    }


def _bytes(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """Byte-level BPE, with the merges that the file holds."""
    merges, pre = metadata.get(f"{KEY}merges"), metadata.get(f"{KEY}pre", "default")
    if not isinstance(merges, list) or not all(isinstance(m, str) and m.count(" ") == 1 for m in merges):
        raise NoTokenizer(f"{KEY}merges is no list of pairs")
    if pre not in SPLITS:
        raise NoTokenizer(f"{KEY}pre is {shown(pre)}; {', '.join(SPLITS)} are read")
    level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": not SPLITS[pre],
    }
    split = {"type": "Split", "pattern": {"Regex": SPLITS[pre]}, "behavior": "Isolated", "invert": False}
    before = [split, level] if SPLITS[pre] else [level]
    return {
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": before},
        "decoder": {**level, "use_regex": True},
        "model": _model(tokens, [merge.split(" ") for merge in merges], ignore_merges=pre == "llama-bpe"),
    }


def _pieces(metadata: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> dict[str, Any]:
    """Pieces with scores: of two neighbours those are merged whose whole has the highest."""
    scores = metadata.get(f"{KEY}scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise NoTokenizer(f"{KEY}scores are not those of the tokens")
    places = {token: i for i, token in enumerate(tokens) if types[i] not in (CONTROL, UNKNOWN, BYTE)}
    ranked = []
    for token, i in places.items():
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        ranked += [
            (-scores[i], i, places[a], places[b], a, b) for a, b in splits if a in places and b in places
        ]
    ranked.sort()
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    has_prefix = metadata.get(f"{KEY}add_space_prefix", True) is True
    prepend = [{"type": "Prepend", "prepend": space}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    unknown = next((token for token, type in zip(tokens, types, strict=True) if type == UNKNOWN), None)
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [*prepend, {"type": "Replace", "pattern": {"String": " "}, "content": space}],
        },
        "pre_tokenizer": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": space}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                *strip,
            ],
        },
        "model": _model(
            tokens, [[a, b] for *_, a, b in ranked], unk_token=unknown, fuse_unk=True, byte_fallback=True
        ),
    }


def _ends(metadata: Mapping[str, Any], tokens: Sequence[str], by_default: bool) -> dict[str, Any] | None:
    """Which tokens stand in front of a text and behind it."""
    around: list[list[str]] = []
    for name, default in (("bos", by_default), ("eos", False)):
        place = metadata.get(f"{KEY}{name}_token_id")
        wanted = metadata.get(f"{KEY}add_{name}_token", default) is True
        is_one = wanted and isinstance(place, int) and 0 <= place < len(tokens)
        around.append([tokens[place]] if is_one and isinstance(place, int) else [])
    front, back = ([{"SpecialToken": {"id": t, "type_id": 0}} for t in each] for each in around)
    if not front and not back:
        return None
    special = {t: {"id": t, "ids": [tokens.index(t)], "tokens": [t]} for each in around for t in each}
    return {
        "type": "TemplateProcessing",
        "single": [*front, {"Sequence": {"id": "A", "type_id": 0}}, *back],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": special,
    }
