# SPDX-License-Identifier: Apache-2.0
"""Gemma 4, text.

Source: transformers' `modeling_gemma4.py` (5.x), whose attribute names are the checkpoint's. Differences from Gemma 3: layers that see everything have heads of another size, and may
take their values from the projection of keys; the last layers have no keys and values, and read those of the last layer of their type that has; each layer is given an embedding of
its own of each token; experts may stand beside the MLP. Scores are not scaled.

Sizes: B batch, S seq, T tokens of all texts, D hidden_size, H heads, G kv heads, K head size, L layers, P hidden_size_per_layer_input.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import LoadError

PREFIXES = {
    "model.language_model.": "model."
}  # checkpoints with images and sounds hold the text's model under it

UNREAD = ("k_proj", "v_proj", "k_norm", "v_norm")
IGNORED = tuple(
    f"*.self_attn.{name}.weight" for name in UNREAD
)  # of layers that read what others have stored

Stored: TypeAlias = tuple[nn.Tensor, nn.Tensor] | nn.CacheLayer
"""Keys and values that other layers read: of this call alone, or the layer of the cache that holds them."""


@dataclass(frozen=True)
class Config(nn.WindowedConfig):
    """The fields of config.json that matter, under its own names."""

    divided: ClassVar = nn.USUALLY_DIVIDED
    model_types: ClassVar = {"gemma4_text": {}}
    only: ClassVar = {
        "hidden_activation": nn.EXPERT_ACTIVATIONS,
        "use_bidirectional_attention": (None, "vision"),  # of a text alone nothing is seen ahead
    }
    unused: ClassVar = {"hidden_act": "transformers reads hidden_activation"}
    rope_defaults: ClassVar = {
        "sliding_attention": {"rope_theta": 10000.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
        },
    }

    vocab_size: int = 262144
    hidden_size: int = 2304
    intermediate_size: int = 9216
    num_hidden_layers: int = 30
    num_attention_heads: int = 8
    num_key_value_heads: int | None = 4
    head_dim: int | None = 256
    hidden_activation: str = "gelu_pytorch_tanh"
    max_position_embeddings: int = 131072
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    sliding_window: int | None = 512
    final_logit_softcapping: float | None = None
    vocab_size_per_layer_input: int = 262144
    hidden_size_per_layer_input: int = field(default=256, metadata={"min": 0})
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = field(default=0, metadata={"min": 0})
    enable_moe_block: bool = False
    use_double_wide_mlp: bool = False
    num_experts: int | None = None
    top_k_experts: int | None = None
    moe_intermediate_size: int | None = None
    global_head_dim: int = 512
    num_global_key_value_heads: int | None = None
    per_layer_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for layer, sizes in (self.per_layer_config or {}).items():
            if not layer.isdigit():
                raise LoadError(f"per_layer_config speaks of layer {layer!r}, expected a number")
            if unknown := {*sizes} - {"head_dim", "num_key_value_heads"}:
                raise LoadError(f"per_layer_config gives layer {layer} another {', '.join(sorted(unknown))}")

    def is_sliding(self, layer: int) -> bool:
        return (layer + 1) % 6 != 0

    def layer_type(self, layer: int) -> str:
        is_last = layer == self.num_hidden_layers - 1
        return "full_attention" if is_last else super().layer_type(layer)

    def kv_of(self, layer: int) -> tuple[int, int]:
        """How many heads of keys and values a layer has, and the size of each."""
        sizes = {"num_key_value_heads": self.kv_heads, "head_dim": self.head_size}
        if self.per_layer_config is not None:
            sizes |= {int(each): own for each, own in self.per_layer_config.items()}.get(layer, {})
        elif self.layer_type(layer) == "full_attention":
            sizes["head_dim"] = self.global_head_dim
            if self.attention_k_eq_v and self.num_global_key_value_heads is not None:
                sizes["num_key_value_heads"] = self.num_global_key_value_heads
        return sizes["num_key_value_heads"], sizes["head_dim"]

    @property
    def storing(self) -> int:
        """How many layers have keys and values of their own."""
        return self.num_hidden_layers - self.num_kv_shared_layers

    def stored_by(self, layer: int) -> int:
        """The layer whose keys and values a layer reads."""
        if layer < self.storing:
            return layer
        kind = self.layer_type(layer)
        found = [i for i in range(self.storing) if self.layer_type(i) == kind]
        if not found:
            raise LoadError(f"layer {layer} reads keys and values of {kind}, and no layer stores such")
        return found[-1]


class Gemma4RMSNorm(nn.RMSNorm):
    def __init__(self, config: Config, size: int) -> None:
        super().__init__(size, -1, config.rms_norm_eps, bias=False)


class Gemma4TextAttention(nn.Module):
    """Of a layer that has keys and values; one that reads another's has queries alone."""

    def __init__(self, config: Config, index: int) -> None:
        heads, (kv_heads, size) = config.num_attention_heads, config.kv_of(index)
        d, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(d, heads * size, bias)
        self.o_proj = nn.Linear(heads * size, d, bias)
        self.q_norm = Gemma4RMSNorm(config, size)
        self.head_size, self.epsilon, self.window = size, config.rms_norm_eps, config.window(index)
        self.stores = index < config.storing
        if self.stores:
            self.k_proj = nn.Linear(d, kv_heads * size, bias)
            self.k_norm = Gemma4RMSNorm(config, size)
            parts = [self.q_proj, self.k_proj]
            if not config.attention_k_eq_v or config.layer_type(index) == "sliding_attention":
                self.v_proj = nn.Linear(d, kv_heads * size, bias)
                parts.append(self.v_proj)
            self.qkv = nn.Fused(*parts)

    def forward(
        self, x_BSD: nn.Tensor, rope: nn.Rotation, cache: nn.CacheLayer | None, stored: Stored | None
    ) -> tuple[nn.Tensor, nn.Tensor | None, nn.Tensor | None]:
        """What attention gives, and the keys and values that it has made."""
        k = v = None
        if self.stores:
            q, k, *own = (op.split_heads(part, self.head_size) for part in self.qkv(x_BSD))
            v = op.rms_norm(own[0] if own else k, None, -1, self.epsilon)
            k = op.rope(self.k_norm(k), *rope)
        else:
            q = op.split_heads(self.q_proj(x_BSD), self.head_size)
        q = op.rope(self.q_norm(q), *rope)
        read = (k, v) if stored is None else stored if isinstance(stored, tuple) else (None, None)
        cache = stored if isinstance(stored, nn.CacheLayer) else cache
        y = op.attention(q, *read, cache=cache, window=self.window, scale=1.0)
        return self.o_proj(op.merge_heads(y)), k, v


class Gemma4TextRouter(nn.Module):
    def __init__(self, config: Config) -> None:
        d = config.hidden_size
        self.proj = nn.Linear(d, config.num_experts, bias=False)
        self.scale = nn.Parameter([d])
        self.per_expert_scale = nn.Parameter([config.num_experts])
        self.epsilon, self.factor, self.chosen = config.rms_norm_eps, d**-0.5, config.top_k_experts

    def forward(self, x_TD: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor]:
        scores = self.proj(op.rms_norm(x_TD, None, -1, self.epsilon) * self.scale * self.factor)
        scores = op.softmax(op.astype(scores, "float32"), -1)
        chosen, weights = nn.top_experts(scores, self.chosen, normalized=True)
        return chosen, weights * op.take(self.per_expert_scale, chosen, 0)


class Gemma4TextExperts(nn.Module):
    def __init__(self, config: Config) -> None:
        e, d, i = config.num_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj, self.down_proj = nn.Parameter([e, 2 * i, d]), nn.Parameter([e, d, i])
        self.activation = nn.EXPERT_ACTIVATIONS[config.hidden_activation]

    def forward(self, x_TD: nn.Tensor, chosen: nn.Tensor, weights: nn.Tensor) -> nn.Tensor:
        return op.moe_mlp(
            x_TD, self.gate_up_proj, self.down_proj, chosen, weights, activation=self.activation
        )


class Gemma4TextDecoderLayer(nn.Module):
    def __init__(self, config: Config, index: int) -> None:
        d, p = config.hidden_size, config.hidden_size_per_layer_input
        is_wide = config.use_double_wide_mlp and index >= config.storing
        self.self_attn = Gemma4TextAttention(config, index)
        self.mlp = nn.GatedMLP(d, config.intermediate_size * (1 + is_wide), config.hidden_activation)
        self.input_layernorm = Gemma4RMSNorm(config, d)
        self.post_attention_layernorm = Gemma4RMSNorm(config, d)
        self.pre_feedforward_layernorm = Gemma4RMSNorm(config, d)
        self.post_feedforward_layernorm = Gemma4RMSNorm(config, d)
        self.layer_scalar = nn.Parameter([1])
        self.has_input, self.has_experts = p > 0, config.enable_moe_block
        if self.has_input:
            self.per_layer_input_gate = nn.Linear(d, p, bias=False)
            self.per_layer_projection = nn.Linear(p, d, bias=False)
            self.post_per_layer_input_norm = Gemma4RMSNorm(config, d)
            self.activation = nn.ACTIVATIONS[config.hidden_activation]
        if self.has_experts:
            self.router, self.experts = Gemma4TextRouter(config), Gemma4TextExperts(config)
            self.post_feedforward_layernorm_1 = Gemma4RMSNorm(config, d)
            self.post_feedforward_layernorm_2 = Gemma4RMSNorm(config, d)
            self.pre_feedforward_layernorm_2 = Gemma4RMSNorm(config, d)

    def feed_forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        y_BSD = self.mlp(self.pre_feedforward_layernorm(x_BSD))
        if self.has_experts:
            x_TD = op.reshape(x_BSD, (-1, x_BSD.shape[-1]))
            z_TD = self.experts(self.pre_feedforward_layernorm_2(x_TD), *self.router(x_TD))
            z_BSD = self.post_feedforward_layernorm_2(op.reshape(z_TD, x_BSD.shape))
            y_BSD = self.post_feedforward_layernorm_1(y_BSD) + z_BSD
        return self.post_feedforward_layernorm(y_BSD)

    def forward(
        self,
        x_BSD: nn.Tensor,
        input_BSP: nn.Tensor | None,
        rope: nn.Rotation,
        cache: nn.CacheLayer | None,
        stored: Stored | None,
    ) -> tuple[nn.Tensor, nn.Tensor | None, nn.Tensor | None]:
        y_BSD, k, v = self.self_attn(self.input_layernorm(x_BSD), rope, cache, stored)
        x_BSD = x_BSD + self.post_attention_layernorm(y_BSD)
        x_BSD = x_BSD + self.feed_forward(x_BSD)
        if input_BSP is not None:
            gated = self.activation(self.per_layer_input_gate(x_BSD)) * input_BSP
            x_BSD = x_BSD + self.post_per_layer_input_norm(self.per_layer_projection(gated))
        return x_BSD * self.layer_scalar, k, v


class Gemma4TextModel(nn.Module):
    def __init__(self, config: Config) -> None:
        d, count, p = config.hidden_size, config.num_hidden_layers, config.hidden_size_per_layer_input
        self.embed_tokens = nn.ScaledEmbedding(config.vocab_size, d, d**0.5)
        self.layers = [Gemma4TextDecoderLayer(config, i) for i in range(count)]
        self.norm = Gemma4RMSNorm(config, d)
        self.config, self.input_size = config, p
        if p:
            packed = config.vocab_size_per_layer_input, count * p, p**0.5
            self.embed_tokens_per_layer = nn.ScaledEmbedding(*packed)
            self.per_layer_model_projection = nn.Linear(d, count * p, bias=False)
            self.per_layer_projection_norm = Gemma4RMSNorm(config, p)
        first = {config.layer_type(i): i for i in reversed(range(count))}
        self.rotary_emb = {
            kind: nn.RotaryEmbedding(
                config.kv_of(i)[1], config.rope_parameters[kind], config.max_position_embeddings
            )
            for kind, i in first.items()
        }

    def inputs(self, tokens: nn.Tensor, x_BSD: nn.Tensor) -> nn.Tensor:
        """What each layer is given of each token: of the token itself, and of its embedding."""
        of_tokens = op.split_heads(self.embed_tokens_per_layer(tokens), self.input_size)
        projected = self.per_layer_model_projection(x_BSD) * x_BSD.shape[-1] ** -0.5
        of_embeddings = self.per_layer_projection_norm(op.split_heads(projected, self.input_size))
        return (of_embeddings + of_tokens) * 2.0**-0.5

    def forward(self, tokens: nn.Tensor, cache: nn.Cache | nn.NoCache = nn.NO_CACHE) -> nn.Tensor:
        config, positions = self.config, op.positions(tokens, cache)
        ropes = {kind: rotary(positions) for kind, rotary in self.rotary_emb.items()}
        x_BSD = self.embed_tokens(tokens)
        inputs_BSLP = self.inputs(tokens, x_BSD) if self.input_size else None
        made: dict[int, Any] = {}
        for i, layer in enumerate(self.layers):
            own, source = i < config.storing, config.stored_by(i)
            input_BSP = None if inputs_BSLP is None else inputs_BSLP[:, :, i]
            stored = None if own else cache[source] or made[source]
            x_BSD, *made[i] = layer(
                x_BSD, input_BSP, ropes[config.layer_type(i)], cache[i] if own else None, stored
            )
            made[i] = tuple(made[i])
        return self.norm(x_BSD)


class Gemma4ForCausalLM(nn.CausalLM):
    def __init__(self, config: Config) -> None:
        model = Gemma4TextModel(config)
        super().__init__(model, model.embed_tokens, config.tie_word_embeddings)
        self.softcap = config.final_logit_softcapping

    def head(self, x_BSD: nn.Tensor) -> nn.Tensor:
        logits = super().head(x_BSD)
        return logits if self.softcap is None else op.tanh(logits / self.softcap) * self.softcap


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return Gemma4ForCausalLM(config)


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export; layers without keys and values keep nothing."""
    layers = [spec.KV(*config.kv_of(i), config.dtype, config.window(i)) for i in range(config.storing)]
    return nn.causal_lm_spec(spec.State(layers), config.max_position_embeddings)


TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    global_head_dim=32,
    sliding_window=8,
    layer_types=("sliding_attention", "full_attention", "sliding_attention", "full_attention"),
    vocab_size_per_layer_input=259,
    hidden_size_per_layer_input=8,
    num_kv_shared_layers=2,
    max_position_embeddings=256,
)
