# SPDX-License-Identifier: Apache-2.0
"""Whisper: an encoder reads half a minute of sound, a decoder writes what is said.

Source: transformers' `modeling_whisper.py` (5.x), whose attribute names are the checkpoint's. A sound comes as its log mel spectrogram, which the checkpoint's feature
extractor makes; two convolutions halve its frames. Positions are learned, or sinusoids that are stored like learned ones; keys have no bias.

source is [B, M, 2T], tokens are [B, S]. Sizes: B batch, M num_mel_bins, T max_source_positions, S seq, D d_model, H heads, K head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op, spec


@dataclass(frozen=True)
class Config(nn.Config):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"whisper": {}}
    aliases: ClassVar = {"hidden_size": "d_model"}
    only: ClassVar = {"activation_function": nn.ACTIVATIONS, "is_encoder_decoder": (True,)}
    unused: ClassVar = {
        **{key: "training" for key in ("activation_dropout", "apply_spec_augment", "dropout", "init_std")},
        **{f"{side}_layerdrop": "training" for side in ("encoder", "decoder")},
        **{f"mask_time_{what}": "training" for what in ("length", "min_masks", "prob")},
        **{f"mask_feature_{what}": "training" for what in ("length", "min_masks", "prob")},
        "classifier_proj_size": "of the head that classifies sounds",
        "use_weighted_layer_sum": "of the head that classifies sounds",
        "forced_decoder_ids": "choosing tokens",
        "median_filter_width": "of timestamps",
        "num_hidden_layers": "encoder_layers says it",
        "scale_embedding": "transformers does not read it",
    }

    vocab_size: int = 51865
    num_mel_bins: int = 80
    d_model: int = 384
    encoder_layers: int = 4
    encoder_attention_heads: int = 6
    encoder_ffn_dim: int = 1536
    decoder_layers: int = 4
    decoder_attention_heads: int = 6
    decoder_ffn_dim: int = 1536
    activation_function: str = "gelu"
    max_source_positions: int = 1500
    max_target_positions: int = 448
    tie_word_embeddings: bool = True
    dtype: str = "float32"

    @property
    def max_position_embeddings(self) -> int:
        return self.max_target_positions


class WhisperAttention(nn.Module):
    def __init__(self, config: Config, heads: int) -> None:
        d = config.d_model
        self.q_proj, self.v_proj, self.out_proj = (nn.Linear(d, d) for _ in range(3))
        self.k_proj = nn.Linear(d, d, bias=False)
        self.head_size = d // heads

    def keys_and_values(self, x_BSD: nn.Tensor) -> nn.KeysAndValues:
        k, v = (op.split_heads(part(x_BSD), self.head_size) for part in (self.k_proj, self.v_proj))
        return k, v

    def queries(self, x_BSD: nn.Tensor) -> nn.Tensor:
        return op.split_heads(self.q_proj(x_BSD), self.head_size)


class WhisperSelfAttention(WhisperAttention):
    def __init__(self, config: Config, heads: int, is_causal: bool) -> None:
        super().__init__(config, heads)
        self.is_causal = is_causal

    def forward(self, x_BSD: nn.Tensor, cache: nn.CacheLayer | None = None) -> nn.Tensor:
        q, kv = self.queries(x_BSD), self.keys_and_values(x_BSD)
        return self.out_proj(op.merge_heads(op.attention(q, *kv, cache=cache, is_causal=self.is_causal)))


class WhisperCrossAttention(WhisperAttention):
    def forward(self, x_BSD: nn.Tensor, memory: nn.Memory) -> nn.Tensor:
        return self.out_proj(op.merge_heads(nn.cross_attention(self.queries(x_BSD), memory)))


class WhisperLayer(nn.Module):
    """What layers of both sides have: attention to themselves, and a feed-forward part, each of a norm of what it is added to."""

    def __init__(self, config: Config, heads: int, inner: int, is_causal: bool) -> None:
        self.self_attn = WhisperSelfAttention(config, heads, is_causal)
        self.self_attn_layer_norm = nn.LayerNorm(config.d_model)
        self.fc1, self.fc2 = nn.Linear(config.d_model, inner), nn.Linear(inner, config.d_model)
        self.final_layer_norm = nn.LayerNorm(config.d_model)
        self.activation = nn.ACTIVATIONS[config.activation_function]

    def mlp(self, x_BSD: nn.Tensor) -> nn.Tensor:
        return x_BSD + self.fc2(self.activation(self.fc1(self.final_layer_norm(x_BSD))))


class WhisperEncoderLayer(WhisperLayer):
    def __init__(self, config: Config) -> None:
        super().__init__(config, config.encoder_attention_heads, config.encoder_ffn_dim, is_causal=False)

    def forward(self, x_BTD: nn.Tensor) -> nn.Tensor:
        return self.mlp(x_BTD + self.self_attn(self.self_attn_layer_norm(x_BTD)))


class WhisperDecoderLayer(WhisperLayer):
    def __init__(self, config: Config) -> None:
        super().__init__(config, config.decoder_attention_heads, config.decoder_ffn_dim, is_causal=True)
        self.encoder_attn = WhisperCrossAttention(config, config.decoder_attention_heads)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.d_model)

    def forward(self, x_BSD: nn.Tensor, memory: nn.Memory, cache: nn.CacheLayer | None) -> nn.Tensor:
        x_BSD = x_BSD + self.self_attn(self.self_attn_layer_norm(x_BSD), cache)
        x_BSD = x_BSD + self.encoder_attn(self.encoder_attn_layer_norm(x_BSD), memory)
        return self.mlp(x_BSD)


class WhisperEncoder(nn.Module):
    def __init__(self, config: Config) -> None:
        d = config.d_model
        self.conv1 = nn.Conv1D(config.num_mel_bins, d, 3, padding=1)
        self.conv2 = nn.Conv1D(d, d, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config.max_source_positions, d)
        self.layers = [WhisperEncoderLayer(config) for _ in range(config.encoder_layers)]
        self.layer_norm = nn.LayerNorm(d)

    def forward(self, source: nn.Tensor) -> nn.Tensor:
        x_BDT = op.gelu(self.conv2(op.gelu(self.conv1(source))))
        x_BTD = op.permute_dims(x_BDT, (0, 2, 1)) + self.embed_positions.weight
        for layer in self.layers:
            x_BTD = layer(x_BTD)
        return self.layer_norm(x_BTD)


class WhisperDecoder(nn.Module):
    def __init__(self, config: Config) -> None:
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        self.embed_positions = nn.Embedding(config.max_target_positions, config.d_model)
        self.layers = [WhisperDecoderLayer(config) for _ in range(config.decoder_layers)]
        self.layer_norm = nn.LayerNorm(config.d_model)

    def forward(
        self, tokens: nn.Tensor, memory: Sequence[nn.Memory] | nn.Cache, cache: nn.Cache | nn.NoCache
    ) -> nn.Tensor:
        x_BSD = self.embed_tokens(tokens) + self.embed_positions(op.positions(tokens, cache))
        for i, layer in enumerate(self.layers):
            x_BSD = layer(x_BSD, memory[i], cache[i])
        return self.layer_norm(x_BSD)


class WhisperModel(nn.Module):
    def __init__(self, config: Config) -> None:
        self.encoder = WhisperEncoder(config)
        self.decoder = WhisperDecoder(config)


class WhisperForConditionalGeneration(nn.EncoderDecoder):
    def __init__(self, config: Config) -> None:
        self.model = WhisperModel(config)
        self.proj_out = nn.Linear(config.d_model, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.proj_out.weight = self.model.decoder.embed_tokens.weight

    def encoded(self, source: nn.Tensor) -> nn.Tensor:
        return self.model.encoder(source)

    def keys_and_values(self, x: nn.Tensor) -> Iterator[nn.KeysAndValues]:
        for layer in self.model.decoder.layers:
            yield layer.encoder_attn.keys_and_values(x)

    def hidden(
        self, tokens: nn.Tensor, memory: Sequence[nn.Memory] | nn.Cache, cache: nn.Cache | nn.NoCache
    ) -> nn.Tensor:
        return self.model.decoder(tokens, memory, cache)

    def head(self, x: nn.Tensor) -> nn.Tensor:
        return op.astype(self.proj_out(x), "float32")


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return WhisperForConditionalGeneration(config)


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export; a source is a spectrogram of a fixed length."""
    frames, heads = config.max_source_positions, config.decoder_attention_heads
    source = spec.Tensor([nn.Dim("batch", min=1), config.num_mel_bins, 2 * frames], config.dtype)
    sizes = config.decoder_layers, heads, config.d_model // heads, config.dtype
    return nn.encoder_decoder_spec(
        source, *sizes, max_source=frames, max_positions=config.max_target_positions
    )


TINY = Config(
    vocab_size=259,
    num_mel_bins=8,
    d_model=64,
    encoder_layers=2,
    encoder_attention_heads=4,
    encoder_ffn_dim=96,
    decoder_layers=2,
    decoder_attention_heads=4,
    decoder_ffn_dim=96,
    max_source_positions=20,
    max_target_positions=64,
)
