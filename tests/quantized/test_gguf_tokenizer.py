# SPDX-License-Identifier: Apache-2.0
"""Tokenizers from GGUF's metadata: byte-level BPE against the package `tokenizers`, pieces with scores against merging them one by one."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from folders import llama
from gguf_files import write
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

import nnfront as nn
from nnfront.errors import LoadError
from nnfront.llm.gguf_tokenizer import SPLITS, NoTokenizer, tokenizer_of

TEXTS = [
    "Hello world, it's 1234567 o'clock!\n\n  What's   that?\t(x == 10) \u00e4\u00f6\u00fc \u4f60\u597d \U0001f600 don't",
    "def main():\r\n    return 'caf\u00e9' + \"e\u0301\"  # 100,000.5\n\n\n",
    " leading and trailing ",
    "",
]


def trained(pre: str) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """A byte-level tokenizer with special tokens, and the metadata that a file would have of it."""
    whole = tokenizers.Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    if SPLITS[pre]:
        split = pre_tokenizers.Split(tokenizers.Regex(SPLITS[pre]), "isolated")
        level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        whole.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    else:
        whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "qwen2":
        whole.normalizer = normalizers.NFC()
    whole.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet)
    whole.train_from_iterator(TEXTS * 20, trainer)
    said = json.loads(whole.to_str())["model"]
    tokens = sorted(said["vocab"], key=said["vocab"].get)
    return whole, {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in ("<s>", "</s>") else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in said["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


@pytest.mark.parametrize("pre", SPLITS)
@pytest.mark.parametrize("has_start", [False, True])
def test_byte_level_tokens_are_those_of_the_tokenizer(pre: str, has_start: bool) -> None:
    theirs, metadata = trained(pre)
    if has_start:
        metadata["tokenizer.ggml.add_bos_token"] = True
    ours = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_of(metadata)))
    for text in [*TEXTS, "a</s>b"]:
        ids = theirs.encode(text).ids
        assert ours.encode(text).ids == [0] * has_start + ids
        assert ours.decode(ids) == theirs.decode(ids)


SPACE = "\u2581"
PIECES = [
    *["<unk>", "<s>", "</s>", *[f"<0x{byte:02X}>" for byte in range(256)]],
    *[SPACE, "a", "b", "c", "ab", "bc", "abc", f"{SPACE}a", f"{SPACE}ab", "ca", "aa", "aaa", "cab", "bb"],
]
TYPES = [2, 3, 3, *[6] * 256, *[1] * 14]
SCORES = [0.0, 0.0, 0.0, *[0.0] * 256, *[-9.0, -10, -11, -12, -3, -1, -5, -4, -2, -8, -7, -6, -1.5, -2.5]]


def by_hand(text: str) -> list[int]:
    """Characters, of whose neighbours the two with the highest score of their whole are merged until there are none."""
    places = {piece: i for i, piece in enumerate(PIECES)}
    parts = list(SPACE + text.replace(" ", SPACE))
    while True:
        found = [
            (-SCORES[places[a + b]], i)
            for i, (a, b) in enumerate(pairwise(parts))
            if a + b in places and TYPES[places[a + b]] == 1
        ]
        if not found:
            break
        _, i = min(found)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids = [1]
    for part in parts:
        ids += [places[part]] if part in places else [3 + byte for byte in part.encode()]
    return ids


METADATA = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": PIECES,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.scores": SCORES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
}


@settings(max_examples=60)
@given(st.text(alphabet="abc \u00e9", min_size=1, max_size=24))
def test_pieces_are_merged_by_their_scores(text: str) -> None:
    ours = tokenizers.Tokenizer.from_str(json.dumps(tokenizer_of(METADATA)))
    ids = ours.encode(text).ids
    assert ids == by_hand(text)
    assert ours.decode(ids) == text


def test_a_file_generates_text(tmp_path: Path) -> None:
    _, metadata = trained("llama-bpe")
    count = len(metadata["tokenizer.ggml.tokens"])
    write(tmp_path / "m.gguf", llama(vocab_size=count), metadata=metadata)
    llm = nn.LLM.load(tmp_path / "m.gguf")
    assert isinstance(llm.generate("Hello", 3), str)
    llm.save(tmp_path / "artefact")
    assert nn.LLM.load(tmp_path / "artefact").generate("Hello", 3) == llm.generate("Hello", 3)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5'; gpt2 and llama are read"),
        ({"tokenizer.ggml.scores": [1.0]}, "tokenizer.ggml.scores are not those of the tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "the file's tokens have no types, or occur twice"),
        ({"tokenizer.ggml.tokens": None}, "the file's metadata hold no tokens"),
        ({"tokenizer.ggml.model": "gpt2"}, "tokenizer.ggml.merges is no list of pairs"),
        (
            {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": [], "tokenizer.ggml.pre": "tekken"},
            "tokenizer.ggml.pre is 'tekken'; llama-bpe, qwen2, gpt-2, default are read",
        ),
    ],
)
def test_a_tokenizer_that_is_not_read_says_why(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(NoTokenizer) as caught:
        tokenizer_of({**METADATA, **change})
    assert str(caught.value) == problem


def test_a_model_without_a_tokenizer_takes_tokens_and_says_why_no_text(tmp_path: Path) -> None:
    write(tmp_path / "m.gguf", llama())
    llm = nn.LLM.load(tmp_path / "m.gguf")
    with pytest.raises(LoadError) as caught:
        llm.generate("Hello")
    assert caught.value.details == ("the file's metadata hold no tokens",)
