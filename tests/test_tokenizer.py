# SPDX-License-Identifier: Apache-2.0
"""Text to tokens and back: pieces of a stream are what decoding all tokens gives, whatever a tokenizer.json says for training."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Peer
from tokenizers import decoders, models

from nnfront.files import File, Folder
from nnfront.llm.tokenizer import Tokenizer

SHIPPED = Path(__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m" / "tokenizer.json"
BYTES = [f"<0x{i:02X}>" for i in range(256)]
WORDS = [
    "\N{LOWER ONE EIGHTH BLOCK}a",
    "b",
    "\N{LOWER ONE EIGHTH BLOCK}",
    "é",
    "##ing",
    "##.",
    ".",
    "'s",
    "中",
    "\N{REPLACEMENT CHARACTER}",
]


def peer(name: str) -> Peer:
    """A tokenizer of each way to decode that models use."""
    if name == "bytes":
        return Peer.from_file(str(SHIPPED))
    vocab = {token: i for i, token in enumerate(["<unk>", "</s>", *BYTES, *WORDS])}
    if name == "pieces with bytes":  # Llama 1 and 2
        tokenizer = Peer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
        tokenizer.decoder = decoders.Sequence(
            [
                decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )
    elif name == "metaspace":
        tokenizer = Peer(models.WordLevel(vocab=vocab, unk_token="<unk>"))
        tokenizer.decoder = decoders.Metaspace()
    else:
        tokenizer = Peer(models.WordPiece(vocab=vocab, unk_token="<unk>"))
        tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


KINDS = ("bytes", "pieces with bytes", "metaspace", "word pieces")


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Peer]:
    theirs = peer(request.param)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    theirs.save(str(path))
    return Tokenizer(File(Folder(path.parent), path.name)), theirs


@settings(max_examples=100)
@given(st.data())
def test_streamed_pieces_are_what_decoding_all_tokens_gives(
    pair: tuple[Tokenizer, Peer], data: st.DataObject
) -> None:
    ours, theirs = pair
    token = st.integers(0, theirs.get_vocab_size() - 1)
    # The last ten are words, the first 260 single bytes.
    ids = data.draw(
        st.lists(
            st.one_of(token, st.integers(3, 258), token.map(lambda i: theirs.get_vocab_size() - 1 - i % 10)),
            max_size=12,
        )
    )
    pieces = list(ours.stream(ids))
    assert "".join(pieces) == theirs.decode(ids) == ours.decode(ids)
    assert all(pieces)


@pytest.mark.parametrize("cut", [1, 2])
def test_text_that_ends_inside_a_character_is_not_dropped(pair: tuple[Tokenizer, Peer], cut: int) -> None:
    ours, theirs = pair
    ids = theirs.encode("中中").ids[:-cut]
    assert "".join(ours.stream(ids)) == theirs.decode(ids)


def test_a_character_comes_when_it_is_whole() -> None:
    ours = Tokenizer(File(Folder(SHIPPED.parent), SHIPPED.name))
    ids = ours.encode("é中x")
    assert len(ids) > 3
    assert list(ours.stream(ids)) == ["é", "中", "x"]


def test_padding_and_truncation_of_a_tokenizer_file_are_switched_off(tmp_path: Path) -> None:
    plain, changed = Peer.from_file(str(SHIPPED)), Peer.from_file(str(SHIPPED))
    changed.enable_padding(length=32, pad_id=1)
    changed.enable_truncation(3)
    changed.save(str(tmp_path / "tokenizer.json"))
    text = "def main():\n    return 1\n"
    assert len(changed.encode(text).ids) == 32
    assert Tokenizer(File(Folder(tmp_path), "tokenizer.json")).encode(text) == plain.encode(text).ids
