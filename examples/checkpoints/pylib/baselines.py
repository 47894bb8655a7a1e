# SPDX-License-Identifier: Apache-2.0
"""How many bits per byte the held-out text costs without a neural network: three compressors and a byte n-gram.

Compressors see all held-out files as one text. The n-gram is fitted to the training files, smoothed by interpolated
Witten-Bell: P(c | context) = (count(context c) + kinds(context) * P(c | shorter context)) / (count(context) + kinds(context)),
where kinds counts the different bytes seen after the context, and P(c) below the empty context is 1/256.
"""

from __future__ import annotations

import gzip
import lzma
from dataclasses import dataclass

import numpy as np

MAX_ORDER = 8  # one context and the byte after it fill a uint64
_START = bytes(
    MAX_ORDER - 1
)  # zero bytes stand before every file; no source file holds any, and they are not predicted


def gzip_bits(text: bytes) -> float:
    """Bits per byte of `text` alone, gzip level 9."""
    return 8 * len(gzip.compress(text, 9)) / len(text)


def xz_bits(text: bytes, after: bytes = b"") -> float:
    """Bits per byte that `text` adds to an xz archive (preset 9, extreme) that already holds `after`."""
    preset = 9 | lzma.PRESET_EXTREME
    alone = len(lzma.compress(after, preset=preset)) if after else 0
    return 8 * (len(lzma.compress(after + text, preset=preset)) - alone) / len(text)


@dataclass(frozen=True)
class Level:
    """Counts for contexts of one length; keys are big-endian bytes in sorted uint64 arrays."""

    context_size: int
    grams: np.ndarray  # context and next byte
    gram_counts: np.ndarray
    contexts: np.ndarray
    context_counts: np.ndarray
    context_kinds: np.ndarray


def _grams(data: np.ndarray, context_size: int) -> np.ndarray:
    """The uint64 key of context and byte for each byte that has `MAX_ORDER - 1` bytes before it."""
    first = MAX_ORDER - 1 - context_size
    size = len(data) - (MAX_ORDER - 1)
    keys = np.zeros(size, np.uint64)
    for offset in range(first, MAX_ORDER):
        keys = keys << np.uint64(8) | data[offset : offset + size]
    return keys


def _with_starts(texts: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(_START + text for text in texts), np.uint8).astype(np.uint64)


def fit_ngram(texts: list[bytes], order: int) -> list[Level]:
    """Count contexts of 0 to `order - 1` bytes in `texts`; `order` is at most `MAX_ORDER`."""
    data = _with_starts(texts)
    levels = []
    for context_size in range(order):
        keys = _grams(data, context_size)
        grams, gram_counts = np.unique(keys[keys & np.uint64(255) != 0], return_counts=True)
        contexts, first, kinds = np.unique(grams >> np.uint64(8), return_index=True, return_counts=True)
        context_counts = np.add.reduceat(gram_counts, first)
        levels.append(Level(context_size, grams, gram_counts, contexts, context_counts, kinds))
    return levels


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The value of each wanted key, 0 where it is absent."""
    index = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[index] == wanted, values[index], 0)


def ngram_probabilities(levels: list[Level], text: bytes) -> np.ndarray:
    """Probability of each byte of `text` given the bytes before it, float64 [len(text)]."""
    data = _with_starts([text])
    probabilities = np.full(len(text), 1 / 256)
    for level in levels:
        grams = _grams(data, level.context_size)
        contexts = grams >> np.uint64(8)
        count = _look_up(level.grams, level.gram_counts, grams)
        total = _look_up(level.contexts, level.context_counts, contexts)
        kinds = _look_up(level.contexts, level.context_kinds, contexts)
        seen = total > 0
        mixed = (count + kinds * probabilities) / np.maximum(total + kinds, 1)
        probabilities = np.where(seen, mixed, probabilities)
    return probabilities


def ngram_bits(levels: list[Level], texts: list[bytes]) -> float:
    """Bits per byte of `texts`, each predicted from its own start."""
    bits = sum(-np.log2(ngram_probabilities(levels, text)).sum() for text in texts)
    return float(bits / sum(len(text) for text in texts))
