# SPDX-License-Identifier: Apache-2.0
"""Llama 4, text: most layers see the chunk of the text that they are in, some all of it and no positions; layers are dense, or mixtures of experts beside one that every token takes.

Source: transformers' `modeling_llama4.py` (5.x), whose attribute names are the checkpoint's. Experts are stored as stacks that are multiplied from the right.

Sizes: B batch, S seq, T batch * seq, D hidden_size, H heads, G kv heads, K head_dim, E experts, C chosen for a token, I intermediate_size, P positions of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import nnfront as nn
from nnfront import op


@dataclass(frozen=True)
class Config(nn.DecoderConfig):
    """The fields of config.json that matter, under its own names."""

    divided: ClassVar = (*nn.USUALLY_DIVIDED, "intermediate_size_mlp")
    model_types: ClassVar = {"llama4_text": {}}
    aliases: ClassVar = {"num_experts": "num_local_experts"}
    only: ClassVar = {
        "hidden_act": nn.EXPERT_ACTIVATIONS,
        "layer_types": ("chunked_attention", "full_attention"),
    }
    unused: ClassVar = {
        "router_jitter_noise": "noise in training",
        "for_llm_compressor": "how transformers lays out experts",
    }
    rope_defaults: ClassVar = {"rope_theta": 500000.0}

    vocab_size: int = 202048
    hidden_size: int = 5120
    intermediate_size: int = 8192
    intermediate_size_mlp: int = 16384
    num_hidden_layers: int = 48
    num_attention_heads: int = 40
    num_key_value_heads: int | None = 8
    head_dim: int | None = 128
    hidden_act: str = "silu"
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False
    num_local_experts: int = 16
    num_experts_per_tok: int = 1
    moe_layers: tuple[int, ...] | None = None
    interleave_moe_layer_step: int = 1
    use_qk_norm: bool = True
    no_rope_layers: tuple[int, ...] | None = None
    no_rope_layer_interval: int = 4
    layer_types: tuple[str, ...] | None = None
    attention_chunk_size: int | None = 8192
    attn_temperature_tuning: bool = True
    floor_scale: int = 8192
    attn_scale: float = 0.1

    def is_sparse(self, layer: int) -> bool:
        """Whether a layer has experts."""
        every = (layer + 1) % self.interleave_moe_layer_step == 0
        return every if self.moe_layers is None else layer in self.moe_layers

    def is_rotated(self, layer: int) -> bool:
        """Whether positions turn q and k of a layer."""
        every = (layer + 1) % self.no_rope_layer_interval != 0
        return bool(self.no_rope_layers[layer]) if self.no_rope_layers else every

    def is_chunked(self, layer: int) -> bool:
        """Whether a layer sees its chunk of the text only."""
        if self.layer_types is not None:
            return self.layer_types[layer] == "chunked_attention"
        return self.is_rotated(layer)


class Place(NamedTuple):
    """What layers know of positions: the rotation, what q is multiplied with where nothing is rotated, and which keys are in a token's chunk."""

    rope: nn.Rotation
    temperature_BS11: nn.Tensor
    chunk_B1SP: nn.Tensor | None


class Llama4TextAttention(nn.Attention):
    def __init__(self, config: Config, index: int) -> None:
        sizes = config.num_attention_heads, config.kv_heads, config.head_size
        is_rotated = config.is_rotated(index)
        pairs = config.head_size if is_rotated else 0
        super().__init__(
            config.hidden_size, *sizes, config.attention_bias, rotated=is_rotated, interleaved=pairs
        )
        self.chunked = config.is_chunked(index)
        self.tuned, self.eps = config.attn_temperature_tuning, config.rms_norm_eps
        self.has_norms = config.use_qk_norm

    def forward(self, x_BSD: nn.Tensor, place: Place, cache: nn.CacheLayer | None) -> nn.Tensor:
        q_BSHK, k_BSGK, v_BSGK = self.project(x_BSD)
        if self.rotated:
            q_BSHK, k_BSGK = self.rotate(q_BSHK, k_BSGK, place.rope)
            if self.has_norms:
                q_BSHK, k_BSGK = (op.rms_norm(x, None, -1, self.eps) for x in (q_BSHK, k_BSGK))
        elif self.tuned:
            q_BSHK = op.astype(q_BSHK * place.temperature_BS11, q_BSHK.dtype)
        seen = place.chunk_B1SP if self.chunked else None
        y_BSHK = op.attention(q_BSHK, k_BSGK, v_BSGK, cache=cache, bias=seen)
        return self.o_proj(op.merge_heads(y_BSHK))


class Llama4TextExperts(nn.StackedExperts):
    def __init__(self, config: Config) -> None:
        e, d, i = config.num_local_experts, config.hidden_size, config.intermediate_size
        self.gate_up_proj, self.down_proj = nn.Parameter([e, d, 2 * i]), nn.Parameter([e, i, d])
        self.activation = nn.EXPERT_ACTIVATIONS[config.hidden_act]

    def forward(self, x_TD: nn.Tensor, chosen_TC: nn.Tensor, weights_TC: nn.Tensor) -> nn.Tensor:
        """Weights are multiplied with what goes in: each choice of a token is a row of its own."""
        (t, c), d = chosen_TC.shape, x_TD.shape[-1]
        rows_RD = op.reshape(op.unsqueeze(x_TD, 1) * op.unsqueeze(weights_TC, -1), (t * c, d))
        gate_up, down = (op.permute_dims(w, (0, 2, 1)) for w in (self.gate_up_proj, self.down_proj))
        chosen_R1, ones_R1 = op.reshape(chosen_TC, (t * c, 1)), op.ones((t * c, 1), x_TD.dtype)
        y_RD = op.moe_mlp(rows_RD, gate_up, down, chosen_R1, ones_R1, activation=self.activation)
        return op.sum(op.reshape(y_RD, (t, c, d)), 1)


class Llama4TextMoe(nn.Module):
    def __init__(self, config: Config) -> None:
        d, act = config.hidden_size, config.hidden_act
        self.router = nn.Linear(d, config.num_local_experts, bias=False)
        self.experts = Llama4TextExperts(config)
        self.shared_expert = nn.GatedMLP(d, config.intermediate_size, act)
        self.chosen = config.num_experts_per_tok

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        x_TD = op.reshape(x_BSD, (-1, x_BSD.shape[-1]))
        logits_TC, chosen_TC = op.topk(self.router(x_TD), self.chosen)
        weights_TC = op.astype(op.sigmoid(op.astype(logits_TC, "float32")), x_TD.dtype)
        return op.reshape(self.experts(x_TD, chosen_TC, weights_TC), x_BSD.shape) + self.shared_expert(x_BSD)


class Llama4TextDecoderLayer(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        d, eps, act = config.hidden_size, config.rms_norm_eps, config.hidden_act
        self.self_attn = Llama4TextAttention(config, index)
        self.feed_forward = (
            Llama4TextMoe(config)
            if config.is_sparse(index)
            else nn.GatedMLP(d, config.intermediate_size_mlp, act)
        )
        self.input_layernorm = nn.RMSNorm(d, -1, eps, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, -1, eps, bias=False)

    def forward(self, x_BSD: nn.Tensor, place: Place, cache: nn.CacheLayer | None) -> nn.Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), place, cache)
        return x_BSD + self.feed_forward(self.post_attention_layernorm(x_BSD))


class Llama4TextModel(nn.Module):
    def __init__(self, config: Config) -> None:
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = [Llama4TextDecoderLayer(config, i) for i in range(config.num_hidden_layers)]
        self.norm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False)
        self.rotary_emb = nn.RotaryEmbedding(
            config.head_size, config.rope_parameters, config.max_position_embeddings
        )
        self.floor_scale, self.attn_scale = config.floor_scale, config.attn_scale
        chunk = config.attention_chunk_size or config.max_position_embeddings
        self.chunk = chunk if chunk < config.max_position_embeddings else None

    def place(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache) -> Place:
        positions_BS, layer = op.positions(tokens_BS, cache), cache[0]
        far = op.floor((op.astype(positions_BS, "float32") + 1.0) / self.floor_scale)
        temperature_BS = op.log(far + 1.0) * self.attn_scale + 1.0
        chunk_B1SP = None
        if self.chunk is not None:
            keys_P = op.arange(tokens_BS.shape[1] if layer is None else layer.max_seq)
            mine_B1S1 = op.unsqueeze(op.unsqueeze(positions_BS // self.chunk, 1), -1)
            chunk_B1SP = mine_B1S1 == keys_P // self.chunk
        return Place(
            self.rotary_emb(positions_BS), op.unsqueeze(op.unsqueeze(temperature_BS, -1), -1), chunk_B1SP
        )

    def forward(self, tokens_BS: nn.Tensor, cache: nn.Cache | nn.NoCache = nn.NO_CACHE) -> nn.Tensor:
        place, x_BSD = self.place(tokens_BS, cache), self.embed_tokens(tokens_BS)
        for i, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD, place, cache[i])
        return self.norm(x_BSD)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        model = Llama4TextModel(config)
        return nn.CausalLM(model, model.embed_tokens, config.tie_word_embeddings)


export_spec = nn.decoder_spec

TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=48,
    intermediate_size_mlp=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_local_experts=4,
    interleave_moe_layer_step=2,
    attention_chunk_size=32,
    max_position_embeddings=256,
)
