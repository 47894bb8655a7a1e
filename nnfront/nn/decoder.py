# SPDX-License-Identifier: Apache-2.0
"""What most decoders are made of: attention with rotary positions, layers that normalise before each part, and all of them in a row.

Attribute names are those of most checkpoints. A model that differs derives from one of these classes, or writes its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nnfront.nn import spec
from nnfront.nn.cache import Cache, CacheLayer
from nnfront.nn.causal_lm import NO_CACHE, NoCache, causal_lm_spec
from nnfront.nn.config import DecoderConfig
from nnfront.nn.functional import op
from nnfront.nn.layers import Embedding, Linear
from nnfront.nn.module import Module
from nnfront.nn.projections import Fused, pairs_as_halves
from nnfront.nn.rotary import Rotation
from nnfront.nn.tensor import Tensor


class Attention(Module):
    """Grouped-query attention: q_proj, k_proj and v_proj as one product, rotation, attention, o_proj.

    size: of what comes in and goes out. bias: of q, k and v; out_bias: of the output, as the others if None. window, scale, softcap: as for
    `op.attention`. rotated: whether positions turn q and k. interleaved: of so many features the pairs that are rotated are neighbours.

    A class derived from it may have `sinks`, as for `op.attention`, project, rotate, or go on from `attend` in its own way; `head_size` is all that these need.
    """

    rotated = True
    window: int | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def __init__(
        self,
        size: int,
        heads: int,
        kv_heads: int,
        head_size: int,
        bias: bool = False,
        out_bias: bool | None = None,
        *,
        window: int | None = None,
        scale: float | None = None,
        softcap: float | None = None,
        rotated: bool = True,
        interleaved: int = 0,
    ) -> None:
        self.q_proj = Linear(size, heads * head_size, bias)
        self.k_proj = Linear(size, kv_heads * head_size, bias)
        self.v_proj = Linear(size, kv_heads * head_size, bias)
        self.o_proj = Linear(heads * head_size, size, bias if out_bias is None else out_bias)
        order = pairs_as_halves(head_size, interleaved) if interleaved else None
        self.qkv = Fused(self.q_proj, self.k_proj, self.v_proj, orders=(order, order))
        self.head_size, self.rotated = head_size, rotated
        self.window, self.scale, self.softcap = window, scale, softcap

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[batch, seq, size] to q [batch, seq, heads, head_size], and k and v of the kv heads."""
        q, k, v = (op.split_heads(part, self.head_size) for part in self.qkv(x))
        return q, k, v

    def rotate(self, q: Tensor, k: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
        """q and k at their positions."""
        return op.rope(q, *rope), op.rope(k, *rope)

    def attend(
        self,
        x: Tensor,
        rope: Rotation | None,
        cache: CacheLayer | None,
        bias: Tensor | None = None,
        *,
        is_causal: bool = True,
    ) -> Tensor:
        """[batch, seq, size] to what each head has seen, [batch, seq, heads * head_size]; without `rope` nothing is rotated.

        is_causal False: later tokens are seen too, and `bias` alone says which, windows included.
        """
        q, k, v = self.project(x)
        if self.rotated and rope is not None:
            q, k = self.rotate(q, k, rope)
        options = {"scale": self.scale, "softcap": self.softcap, "is_causal": is_causal}
        window = self.window if is_causal else None
        y = op.attention(q, k, v, cache=cache, sinks=self.sinks, bias=bias, window=window, **options)
        return op.merge_heads(y)

    def forward(self, x: Tensor, rope: Rotation | None, cache: CacheLayer | None) -> Tensor:
        """[batch, seq, size] to the same."""
        return self.o_proj(self.attend(x, rope, cache))


class DecoderLayer(Module):
    """Attention and a feed-forward part, each of a norm of what it is added to."""

    def __init__(
        self, self_attn: Module, mlp: Module, input_layernorm: Module, post_attention_layernorm: Module
    ) -> None:
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = input_layernorm
        self.post_attention_layernorm = post_attention_layernorm

    def forward(self, x: Tensor, rope: Rotation | None, cache: CacheLayer | None) -> Tensor:
        """[batch, seq, size] to the same."""
        x = x + self.self_attn(self.input_layernorm(x), rope, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(Module):
    """An embedding, layers, each of which takes what is computed so far, a rotation and a layer of the cache, and a norm."""

    def __init__(
        self, embed_tokens: Module, layers: Sequence[Module], norm: Module, rotary_emb: Module
    ) -> None:
        self.embed_tokens = embed_tokens
        self.layers = list(layers)
        self.depth = len(self.layers)  # behind them may lie what guesses further tokens
        self.norm = norm
        self.rotary_emb = rotary_emb

    def forward(self, tokens: Tensor, cache: Cache | NoCache = NO_CACHE) -> Tensor:
        """Integers [batch, seq] to [batch, seq, size]."""
        rope = self.rotary_emb(op.positions(tokens, cache))
        x = self.embed_tokens(tokens)
        for i, layer in enumerate(self.layers[: self.depth]):
            x = layer(x, rope, cache[i])
        return self.norm(x)


class ScaledEmbedding(Embedding):
    """Rows of a table times a number, which is first rounded to the table's dtype."""

    def __init__(self, num: int, dim: int, scale: float) -> None:
        super().__init__(num, dim)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Integers [...] to [..., dim]."""
        scale = float(torch.tensor(self.scale, dtype=getattr(torch, self.weight.dtype)))
        rows: Any = super().forward(x)
        return rows * scale


def decoder_spec(config: DecoderConfig) -> dict[str, Any]:
    """Return the spec of a `CausalLM` whose layers all keep keys and values, and see what `config.window` says."""
    windows = [config.window(i) for i in range(config.num_hidden_layers)]
    cache = spec.Cache(len(windows), config.kv_heads, config.head_size, config.dtype, window=windows)
    return causal_lm_spec(cache, config.max_position_embeddings)
