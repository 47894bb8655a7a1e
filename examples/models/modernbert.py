# SPDX-License-Identifier: Apache-2.0
"""ModernBERT: an encoder with rotary positions, gated feed-forward parts, norms ahead, and windows to both sides in most layers.

Source: transformers' `modeling_modernbert.py` (5.x), whose attribute names are the checkpoint's. Heads for other tasks than embeddings are left out.

tokens and mask are [B, S]. Sizes: B batch, S seq, D hidden_size, H heads, K head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

import nnfront as nn
from nnfront import op

IGNORED = ("head.*", "decoder.*", "classifier.*")  # heads of other tasks
PREFIXES = {"model.": ""}  # of checkpoints with a head

_CLASSIFIER = ("activation", "bias", "dropout", "pooling")


@dataclass(frozen=True)
class Config(nn.Config):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"modernbert": {}}
    only: ClassVar = {
        "hidden_activation": nn.ACTIVATIONS,
        "layer_types": ("full_attention", "sliding_attention"),
        "rope_scaling": (None,),
    }
    unused: ClassVar = {
        "global_rope_theta": "it is taken into rope_parameters",
        "local_rope_theta": "it is taken into rope_parameters",
        "layer_norm_eps": "transformers reads norm_eps",
        "position_embedding_type": "transformers does not read it",
        "cls_token_id": "metadata",
        "decoder_bias": "of the head that fills in tokens",
        "tie_word_embeddings": "of the head that fills in tokens",
        "sparse_prediction": "of the head that fills in tokens",
        "sparse_pred_ignore_index": "of the head that fills in tokens",
        "deterministic_flash_attn": "how transformers runs it",
        "reference_compile": "how transformers runs it",
        "repad_logits_with_grad": "how transformers runs it",
        **{key: "training" for key in ("embedding_dropout", "initializer_cutoff_factor", "mlp_dropout")},
        **{f"classifier_{key}": "classification" for key in _CLASSIFIER},
    }
    rope_defaults: ClassVar = {
        "full_attention": {"rope_theta": 160000.0},
        "sliding_attention": {"rope_theta": 10000.0},
    }

    vocab_size: int = 50368
    hidden_size: int = 768
    intermediate_size: int = 1152
    num_hidden_layers: int = 22
    num_attention_heads: int = 12
    hidden_activation: str = "gelu"
    max_position_embeddings: int = 8192
    norm_eps: float = 1e-5
    norm_bias: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    layer_types: tuple[str, ...] | None = None
    global_attn_every_n_layers: int = 3
    local_attention: int = 128
    rope_parameters: dict[str, Any] = field(
        default_factory=lambda: nn.rope_parameters({}, Config.rope_defaults)
    )
    dtype: str = "float32"

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Self:
        """Read a config.json, of either generation of rotary parameters."""
        given = config.get("rope_parameters") or {}
        thetas = {"full_attention": "global_rope_theta", "sliding_attention": "local_rope_theta"}
        if {*given} <= {*thetas}:
            rope = {
                kind: {"rope_theta": config.get(key), **(given.get(kind) or {})}
                for kind, key in thetas.items()
            }
            config = {**config, "rope_parameters": rope}
        return super().from_hf(config)

    def __post_init__(self) -> None:
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise nn.errors.LoadError(
                f"layer_types has {len(self.layer_types)} entries for {self.num_hidden_layers} layers"
            )

    def layer_type(self, layer: int) -> str:
        """`full_attention` or `sliding_attention`."""
        if self.layer_types is not None:
            return self.layer_types[layer]
        return "sliding_attention" if layer % self.global_attn_every_n_layers else "full_attention"


class LayerNorm(nn.LayerNorm):
    def __init__(self, config: Config) -> None:
        super().__init__(config.hidden_size, config.norm_eps, bias=config.norm_bias)


class ModernBertEmbeddings(nn.Module):
    def __init__(self, config: Config) -> None:
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.norm = LayerNorm(config)

    def forward(self, tokens: nn.Tensor) -> nn.Tensor:
        return self.norm(self.tok_embeddings(tokens))


class ModernBertAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        d = config.hidden_size
        self.Wqkv = nn.Linear(d, 3 * d, config.attention_bias)
        self.Wo = nn.Linear(d, d, config.attention_bias)
        self.head_size = d // config.num_attention_heads

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, seen: nn.Tensor) -> nn.Tensor:
        parts = op.split(self.Wqkv(x_BSD), 3, -1)
        q_BSHK, k_BSHK, v_BSHK = (op.split_heads(part, self.head_size) for part in parts)
        q_BSHK, k_BSHK = op.rope(q_BSHK, *rope), op.rope(k_BSHK, *rope)
        y_BSHK = op.attention(q_BSHK, k_BSHK, v_BSHK, bias=seen, is_causal=False)
        return self.Wo(op.merge_heads(y_BSHK))


class ModernBertMLP(nn.Module):
    def __init__(self, config: Config) -> None:
        self.Wi = nn.Linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias)
        self.Wo = nn.Linear(config.intermediate_size, config.hidden_size, config.mlp_bias)
        self.activation = nn.ACTIVATIONS[config.hidden_activation]

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        gate, up = op.split(self.Wi(x_BSD), 2, -1)
        return self.Wo(self.activation(gate) * up)


class ModernBertEncoderLayer(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        self.layer_type = config.layer_type(index)
        self.attn_norm = LayerNorm(config) if index else None  # the embeddings are normalised already
        self.attn = ModernBertAttention(config)
        self.mlp_norm = LayerNorm(config)
        self.mlp = ModernBertMLP(config)

    def forward(self, x_BSD: nn.Tensor, rope: nn.Rotation, seen: nn.Tensor) -> nn.Tensor:
        x_BSD = x_BSD + self.attn(x_BSD if self.attn_norm is None else self.attn_norm(x_BSD), rope, seen)
        return x_BSD + self.mlp(self.mlp_norm(x_BSD))


class ModernBertModel(nn.Module):
    """`mask` is 1 where there is a token and 0 where there is padding."""

    def __init__(self, config: Config) -> None:
        self.embeddings = ModernBertEmbeddings(config)
        self.layers = [ModernBertEncoderLayer(config, i) for i in range(config.num_hidden_layers)]
        self.final_norm = LayerNorm(config)
        self.rotary_emb = nn.RotaryByLayerType(
            config.hidden_size // config.num_attention_heads,
            config.rope_parameters,
            config.max_position_embeddings,
        )
        self.reach = config.local_attention // 2

    def hidden(self, tokens: nn.Tensor, mask: nn.Tensor) -> nn.Tensor:
        """What each token has become: [B, S] to [B, S, D]."""
        batch, seq = tokens.shape
        positions = op.positions(tokens, nn.NO_CACHE)
        seen_B11S = op.reshape(mask != 0, (batch, 1, 1, seq))
        distance_SS = op.abs(op.reshape(positions, (seq, 1)) - positions)
        seen = {"full_attention": seen_B11S, "sliding_attention": seen_B11S & (distance_SS <= self.reach)}
        rope = self.rotary_emb(positions)
        x_BSD = self.embeddings(tokens)
        for layer in self.layers:
            x_BSD = layer(x_BSD, rope[layer.layer_type], seen[layer.layer_type])
        return self.final_norm(x_BSD)

    def mean(self, tokens: nn.Tensor, mask: nn.Tensor) -> nn.Tensor:
        """The mean of the tokens that are no padding: [B, S] to float32 [B, D]."""
        return nn.mean_of_tokens(self.hidden(tokens, mask), mask)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return ModernBertModel(config)


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export: `hidden` and `mean`."""
    return nn.encoder_spec(("hidden", "mean"), config.max_position_embeddings)


TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    max_position_embeddings=256,
    local_attention=16,
)
