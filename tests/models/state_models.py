# SPDX-License-Identifier: Apache-2.0
"""A model file whose layers keep all kinds of state, one for each letter of `kinds`: keys and values (k), with a window (w), a latent that is
stored once (m), the keys and values of the layer before (s), a convolution and a running sum (r).
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op, spec

HEADS, SIZE, LATENT, ROPE, WIDTH, WINDOW = 4, 8, 12, 4, 4, 5


@dataclass(frozen=True)
class Config(nn.Config):
    RENAMED: ClassVar = {}

    vocab_size: int = 61
    hidden_size: int = 32
    kinds: str = "kw"
    max_position_embeddings: int = 64
    dtype: str = "float32"


TINY = Config()


class Attention(nn.Module):
    def __init__(self, d: int, kind: str) -> None:
        self.q_proj = nn.Linear(d, HEADS * SIZE, bias=False)
        if kind != "s":
            self.kv_proj = nn.Linear(d, 2 * 2 * SIZE, bias=False)
        self.o_proj = nn.Linear(HEADS * SIZE, d, bias=False)
        self.kind = kind

    def forward(self, x: nn.Tensor, rope: Any, cache: Any, shared: Any) -> Any:
        q, k, v = op.split_heads(self.q_proj(x), SIZE), None, None
        if self.kind != "s":
            k, v = (op.split_heads(part, SIZE) for part in op.split(self.kv_proj(x), 2, -1))
            shared = k, v, WINDOW if self.kind == "w" else None
        elif cache is None:
            k, v, _ = shared
        y = op.attention(q, k, v, cache=cache, window=shared[2])
        return self.o_proj(op.merge_heads(y)), shared


class Latent(nn.Module):
    """Queries over a latent of all heads: what makes keys and values of it is part of the queries and of the result."""

    def __init__(self, d: int) -> None:
        self.q_proj = nn.Linear(d, HEADS * (SIZE + ROPE), bias=False)
        self.kv_proj = nn.Linear(d, LATENT + ROPE, bias=False)
        self.up_keys = nn.Parameter((HEADS, SIZE, LATENT), "float32")
        self.up_values = nn.Parameter((HEADS, LATENT, SIZE), "float32")
        self.o_proj = nn.Linear(HEADS * SIZE, d, bias=False)

    def forward(self, x: nn.Tensor, rope: Any, cache: Any, shared: Any) -> Any:
        q, q_rope = op.split(op.split_heads(self.q_proj(x), SIZE + ROPE), [SIZE], -1)
        latent, k_rope = op.split(self.kv_proj(x), [LATENT], -1)
        absorbed = op.permute_dims(op.matmul(op.permute_dims(q, [0, 2, 1, 3]), self.up_keys), [0, 2, 1, 3])
        query = op.concat([absorbed, op.rope(q_rope, *rope)], dim=-1)
        key = op.concat([latent[:, :, None], op.rope(k_rope[:, :, None], *rope)], dim=-1)
        y = op.attention(query, key, cache=cache, scale=(SIZE + ROPE) ** -0.5, value_size=LATENT)
        y = op.matmul(op.permute_dims(y, [0, 2, 1, 3]), self.up_values)
        return self.o_proj(op.merge_heads(op.permute_dims(y, [0, 2, 1, 3]))), shared


class Recurrent(nn.Module):
    def __init__(self, d: int) -> None:
        self.conv_weight = nn.Parameter((d, WIDTH), "float32")
        self.out_proj = nn.Linear(d, d, bias=False)

    def forward(self, x: nn.Tensor, rope: Any, cache: Any, shared: Any) -> Any:
        seq = x.shape[1]
        y, conv = op.causal_conv1d(x, self.conv_weight, None, op.cache_read(cache, "conv"), activation="silu")
        op.cache_write(cache, "conv", conv, seq)
        total, before = op.cumsum(y, axis=1), op.cache_read(cache, "ssm")
        total = total if before is None else total + before[:, None]
        op.cache_write(cache, "ssm", total[:, -1], seq)
        return self.out_proj(op.tanh(total * 0.2)), shared


class Model(nn.Module):
    def __init__(self, config: Config) -> None:
        d = config.hidden_size
        made = {"m": lambda: Latent(d), "r": lambda: Recurrent(d)}
        self.embed_tokens = nn.Embedding(config.vocab_size, d)
        self.layers = [made.get(kind, lambda kind=kind: Attention(d, kind))() for kind in config.kinds]
        self.norm = nn.RMSNorm(d, -1, 1e-6, bias=False)
        self.rotary_emb = nn.RotaryEmbedding(ROPE, {"rope_type": "default", "rope_theta": 100.0})
        self.places = places(config)

    def forward(self, tokens: nn.Tensor, cache: Any = nn.NO_CACHE) -> nn.Tensor:
        rope = self.rotary_emb(op.positions(tokens, cache))
        x, shared = self.embed_tokens(tokens), None
        for layer, place in zip(self.layers, self.places, strict=True):
            y, shared = layer(x, rope, cache[place], shared)
            x = x + y
        return self.norm(x)


def places(config: Config) -> list[int]:
    """Which layer of the cache each layer has."""
    own = [kind != "s" for kind in config.kinds]
    return [sum(own[: i + 1]) - 1 for i in range(len(own))]


def build(config: Config) -> nn.Module:
    model = Model(config)
    return nn.CausalLM(model, model.embed_tokens, True)


def export_spec(config: Config) -> dict[str, Any]:
    d = config.hidden_size
    kept = {"conv": spec.Tensor([d, WIDTH - 1]), "ssm": spec.Tensor([d])}
    kinds = {
        "k": spec.KV(2, SIZE),
        "w": spec.KV(2, SIZE, window=WINDOW),
        "m": spec.Layer({"latent": spec.Tensor([1, LATENT + ROPE])}),
        "r": spec.Layer(per_sequence=kept),
    }
    layers = [kinds[kind] for kind in config.kinds if kind != "s"]
    return nn.causal_lm_spec(spec.State(layers), config.max_position_embeddings)
