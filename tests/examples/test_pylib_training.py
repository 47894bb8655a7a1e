# SPDX-License-Identifier: Apache-2.0
"""The scripts behind the shipped checkpoint: the split, the order of the data, and the baselines."""

from __future__ import annotations

import gzip
import lzma
import math
from collections import Counter
from pathlib import Path

import baselines
import numpy as np
import pytest
import torch
import train
from corpus import END_OF_TEXT, VOCAB_SIZE, is_held_out, read_library, train_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

TEXTS = [b"abracadabra", b"abba cab", b"a"]


def test_the_split_depends_on_the_path_alone():
    # The hash is SHA-256, so these hold on every machine; a change here would let held-out text into training.
    assert is_held_out("fnmatch.py")
    assert is_held_out("unittest/mock.py")
    assert not is_held_out("json/decoder.py")


def test_read_library_leaves_out_tests_tables_and_other_packages(tmp_path: Path):
    kept = {"fnmatch.py": "f", "json/decoder.py": "d"}
    skipped = [
        "test/test_x.py",
        "idlelib/idle_test/x.py",
        "site-packages/x.py",
        "_sysconfigdata__linux.py",
        "json/x.txt",
    ]
    for name in [*kept, *skipped]:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(kept.get(name, ""))
    assert read_library(tmp_path) == ({"json/decoder.py": "d"}, {"fnmatch.py": "f"})


@given(st.text())
@settings(max_examples=25, deadline=None)
def test_the_tokenizer_keeps_any_text(text: str):
    tokenizer = train_tokenizer(["def f():\n    return 1\n"])
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_end_of_text_is_token_zero():
    tokenizer = train_tokenizer(["def f():\n    return 1\n"])
    assert tokenizer.token_to_id(END_OF_TEXT) == 0
    assert tokenizer.get_vocab_size() <= VOCAB_SIZE


def test_an_epoch_shows_every_window_once():
    tokens = torch.arange(20 * train.BATCH * train.CONTEXT)
    steps = (len(tokens) - 2 * train.CONTEXT) // (train.BATCH * train.CONTEXT)
    for epoch in range(2):
        windows = torch.cat([train.batch_at(tokens, epoch * steps + i) for i in range(steps)])
        inputs = windows[:, :-1].flatten().sort().values
        assert torch.equal(inputs, torch.arange(inputs[0], inputs[0] + len(inputs)))
        assert torch.equal(windows[:, 1:], windows[:, :-1] + 1)


def test_epochs_differ_in_order():
    tokens = torch.arange(20 * train.BATCH * train.CONTEXT)
    steps = (len(tokens) - 2 * train.CONTEXT) // (train.BATCH * train.CONTEXT)
    assert not torch.equal(train.batch_at(tokens, 0), train.batch_at(tokens, steps))
    assert torch.equal(train.batch_at(tokens, 3), train.batch_at(tokens, 3))


@pytest.mark.parametrize(
    ("progress", "share"), [(0.0, 0.0), (train.WARMUP, 1.0), (0.5, 0.5), (1.0, 0.0), (1.1, 0.0)]
)
def test_the_rate_warms_up_and_falls_to_zero(progress: float, share: float):
    assert train.rate_at(progress) == pytest.approx(share * train.PEAK_RATE, abs=0.01 * train.PEAK_RATE)


def test_a_run_goes_on_where_the_saved_state_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        train, "CONFIG", type(train.CONFIG)(**{**train.CONFIG.to_dict(), "num_hidden_layers": 1})
    )
    monkeypatch.setattr(train, "SAVE_EVERY_S", 0.0)
    tokens = torch.arange(8 * train.BATCH * train.CONTEXT) % VOCAB_SIZE
    _, first = train.train(tokens, tmp_path / "state.pt", 0.2)
    saved = torch.load(tmp_path / "state.pt")
    model, second = train.train(tokens, tmp_path / "state.pt", 0.0)
    assert first == second == saved["step"] >= 1
    assert all(torch.equal(value, saved["model"][name]) for name, value in model.state_dict().items())


def witten_bell(context: bytes, order: int) -> list[float]:
    """The definition in the docstring of `baselines`, counted letter by letter; the 256 probabilities after `context`."""
    start = bytes(baselines.MAX_ORDER - 1)
    probabilities = [1 / 256] * 256
    for size in range(order):
        wanted = (start + context)[len(start) + len(context) - size :]
        after: Counter[int] = Counter()
        for text in [start + t for t in TEXTS]:
            for i in range(len(text)):
                if i >= len(start) and text[i - size : i] == wanted:
                    after[text[i]] += 1
        total, kinds = sum(after.values()), len(after)
        if total:
            probabilities = [(after[c] + kinds * probabilities[c]) / (total + kinds) for c in range(256)]
    return probabilities


@pytest.mark.parametrize("order", range(1, baselines.MAX_ORDER + 1))
def test_the_ngram_is_interpolated_witten_bell(order: int):
    levels = baselines.fit_ngram(TEXTS, order)
    text = b"abracab zz"
    expected = [witten_bell(text[:i], order)[c] for i, c in enumerate(text)]
    np.testing.assert_allclose(baselines.ngram_probabilities(levels, text), expected, rtol=1e-12)


def test_the_ngram_probabilities_of_all_next_bytes_sum_to_one():
    levels = baselines.fit_ngram(TEXTS, 5)
    total = sum(baselines.ngram_probabilities(levels, b"abra" + bytes([c]))[-1] for c in range(256))
    assert total == pytest.approx(1.0)


def test_the_ngram_pays_for_each_text_from_its_own_start():
    levels = baselines.fit_ngram(TEXTS, 3)
    texts = [b"abra", b"cab"]
    bits = -sum(math.log2(p) for text in texts for p in baselines.ngram_probabilities(levels, text))
    assert baselines.ngram_bits(levels, texts) == pytest.approx(bits / 7)


def test_compressors_are_charged_for_every_byte_of_their_file():
    text = bytes(range(256)) * 4
    assert baselines.gzip_bits(text) == 8 * len(gzip.compress(text, 9)) / len(text)
    assert baselines.xz_bits(text) == 8 * len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME)) / len(text)


def test_xz_after_the_same_text_costs_next_to_nothing():
    text = np.random.default_rng(0).bytes(20_000)
    assert baselines.xz_bits(text) > 8
    assert baselines.xz_bits(text, after=text) < 0.2
