# SPDX-License-Identifier: Apache-2.0
"""What every encoder-decoder that generates text has besides its own layers: methods, their spec, and attention to what the encoder gave."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

from nnfront.dims import Dim
from nnfront.nn import spec
from nnfront.nn.cache import Cache, CacheLayer
from nnfront.nn.causal_lm import NO_CACHE, NoCache
from nnfront.nn.functional import op
from nnfront.nn.module import Module
from nnfront.nn.tensor import Tensor

KeysAndValues: TypeAlias = tuple[Tensor, Tensor]
Memory: TypeAlias = CacheLayer | KeysAndValues
"""What a layer of the decoder attends to of the source: a layer of a cache that holds its keys and values, or these themselves."""


def cross_attention(q: Tensor, memory: Memory, scale: float | None = None) -> Tensor:
    """Attention of q [batch, seq, heads, size] to all of the source, without order: [batch, seq, heads, size]."""
    if isinstance(memory, tuple):
        y: Tensor = op.attention(q, *memory, is_causal=False, scale=scale)
    else:
        y = op.attention(q, cache=memory, is_causal=False, scale=scale)
    return y


class EncoderDecoder(Module):
    """A model that writes a text about a source, which it reads as a whole first.

    Keys and values of the source are computed once, by `encode`, and kept in a cache of their own, `memory`; the decoder's are in `cache`. A class derived from it
    says in `encoded`, `keys_and_values`, `hidden` and `head` what the methods use.
    """

    def encoded(self, source: Tensor) -> Tensor:
        """The source as the encoder gives it: [batch, source, size]."""
        raise NotImplementedError

    def keys_and_values(self, x: Tensor) -> Iterator[KeysAndValues]:
        """What each layer of the decoder attends to of it: keys and values [batch, source, heads, size]."""
        raise NotImplementedError

    def hidden(self, tokens: Tensor, memory: Sequence[Memory] | Cache, cache: Cache | NoCache) -> Tensor:
        """Integers [batch, seq] to what the head reads, [batch, seq, size]."""
        raise NotImplementedError

    def head(self, x: Tensor) -> Tensor:
        """[batch, seq, size] to float32 [batch, seq, vocab_size]."""
        raise NotImplementedError

    def logits(self, source: Tensor, tokens: Tensor) -> Tensor:
        """Logits of every position of a text: [batch, seq] to float32 [batch, seq, vocab_size]."""
        return self.head(self.hidden(tokens, [*self.keys_and_values(self.encoded(source))], NO_CACHE))

    def encode(self, source: Tensor, memory: Cache) -> None:
        """Append the keys and values of a source to `memory`."""
        for (k, v), layer in zip(self.keys_and_values(self.encoded(source)), memory, strict=True):
            op.cache_append(layer, k, v)

    def prefill(self, tokens: Tensor, memory: Cache, cache: Cache) -> Tensor:
        """Append the beginning of a text and give the logits of its last position: [batch, seq] to float32 [batch, 1, vocab_size]."""
        return self.head(self.hidden(tokens, memory, cache)[:, -1:])

    def decode(self, tokens: Tensor, memory: Cache, cache: Cache) -> Tensor:
        """Append one token to each text: [batch, 1] to float32 [batch, 1, vocab_size]."""
        return self.head(self.hidden(tokens, memory, cache))


def encoder_decoder_spec(
    source: spec.Tensor,
    layers: int,
    heads: int,
    head_size: int,
    dtype: str,
    *,
    max_source: int,
    max_positions: int,
) -> dict[str, Any]:
    """Return the spec of an `EncoderDecoder`'s methods.

    source: [batch, ...], what `encode` takes. max_source: how many keys and values it makes of it at most; max_positions: tokens of a text.
    """
    batch, seq = Dim("batch", min=1), Dim("seq", min=1, max=max_positions)
    kept = Dim("max_source", min=1, max=max_source), Dim("max_seq", min=1, max=max_positions)
    memory, cache = (spec.Cache(layers, heads, head_size, dtype, batch=batch, max_seq=most) for most in kept)
    tokens, token = spec.Tensor([batch, seq], "int64"), spec.Tensor([batch, 1], "int64")
    return {
        "logits": {"source": source, "tokens": tokens},
        "encode": {"source": source, "memory": memory},
        "prefill": {"tokens": tokens, "memory": memory, "cache": cache},
        "decode": {"tokens": token, "memory": memory, "cache": cache},
    }
