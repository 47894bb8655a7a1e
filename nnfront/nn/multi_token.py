# SPDX-License-Identifier: Apache-2.0
"""Multi-token prediction: a head that some checkpoints hold beside the model, which guesses the token behind the next.

It is a layer of its own over what the model has made of a token, and the embedding of the token behind it. What it makes of them stands in the place of the model's
if it is to guess further. Guesses are verified, so a head changes how long a text takes and nothing else; it is built only where it is asked for.

Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2; the embedding stands before what the model has made, as in its checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nnfront.nn import spec
from nnfront.nn.cache import Cache, CacheLayer
from nnfront.nn.causal_lm import CausalLM
from nnfront.nn.functional import op
from nnfront.nn.layers import Embedding, Linear, RMSNorm
from nnfront.nn.module import Module
from nnfront.nn.rotary import Rotation
from nnfront.nn.tensor import Tensor


class SharedHead(Module):
    """The model's own head, behind a norm."""

    def __init__(self, norm: Module, head: Linear) -> None:
        self.norm = norm
        self.head = head


class MultiTokenLayer(Module):
    """What DeepSeek-V3 and others store as one more layer: enorm, hnorm, eh_proj and shared_head, beside the parts of a decoder layer.

    A class derived from it and from a decoder layer calls `join` when that is made.
    """

    def join(self, embedding: Embedding, head: Linear, epsilon: float) -> None:
        """Add the parts; the model's embedding and head are the layer's too."""
        d = embedding.dim
        self.embed_tokens = embedding
        self.enorm, self.hnorm = (RMSNorm(d, -1, epsilon, bias=False) for _ in range(2))
        self.eh_proj = Linear(2 * d, d, bias=False)
        self.shared_head = SharedHead(RMSNorm(d, -1, epsilon, bias=False), head)

    def draft(self, embedded: Tensor, hidden: Tensor, rope: Rotation, cache: CacheLayer) -> Tensor:
        """Embeddings of the tokens behind, and what was made of the tokens: both [batch, seq, size], to what stands in the place of that."""
        x: Any = self.eh_proj(op.concat([self.enorm(embedded), self.hnorm(hidden)], -1))
        return self(x, rope, cache)

    def read(self, x: Tensor) -> Tensor:
        """What the model's head reads of it."""
        return self.shared_head.norm(x)


class MultiTokenLM(CausalLM):
    """A decoder with a head that guesses further tokens and keeps `kept` of each token.

    Its further methods are those of a `CausalLM` that give what the head reads as well, and `draft`.
    """

    def __init__(self, lm: CausalLM, kept: spec.Layer) -> None:
        # First: the head has it too, and a weight is called what it is called first.
        self.lm_head = lm.lm_head
        self.model = lm.model
        self.kept = kept

    def mtp_head(self) -> Any:
        """The head, a part of the model's tree, with `draft` and `read` as `MultiTokenLayer` has them: the layer behind the decoder's own, unless derived otherwise."""
        model: Any = self.model
        return model.layers[-1]

    def prefill_hidden(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """`prefill`, and what the head reads of each token: [batch, seq, hidden_size]."""
        x = self.hidden(tokens, cache)
        return self.head(x[:, -1:]), x

    def extend_hidden(self, tokens: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """`extend`, and what the head reads of each token: [batch, seq, hidden_size]."""
        x = self.hidden(tokens, cache)
        return self.head(x), x

    def draft(self, tokens: Tensor, hidden: Tensor, drafted: Cache) -> tuple[Tensor, Tensor]:
        """Append to the head's own cache the tokens behind those that `hidden` is of: integers [batch, seq] and [batch, seq, hidden_size].

        Gives the logits of the token behind the last, float32 [batch, 1, vocab_size], and what stands in the place of `hidden` for it, [batch, 1, hidden_size].
        """
        model: Any = self.model
        rope = model.rotary_emb(op.positions(tokens, drafted))
        x = self.mtp_head().draft(model.embed_tokens(tokens), hidden, rope, drafted[0])[:, -1:]
        return self.head(self.mtp_head().read(x)), x

    def spec(self, methods: Mapping[str, Any]) -> dict[str, Any]:
        """The spec of the further methods, where that of `prefill` is known."""
        model: Any = self.model
        given = methods["prefill"]
        tokens, cache, table = given["tokens"], given["cache"], model.embed_tokens.weight
        hidden = spec.Tensor([*tokens.shape, table.shape[1]], table.dtype)
        drafted = spec.State([self.kept])
        drafted.batch, drafted.max_seq = cache.batch, cache.max_seq
        return {
            "prefill_hidden": given,
            "extend_hidden": given,
            "draft": {"tokens": tokens, "hidden": hidden, "drafted": drafted},
        }
