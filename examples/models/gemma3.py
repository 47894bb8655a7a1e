# SPDX-License-Identifier: Apache-2.0
"""Gemma 3 with images: an encoder (SigLIP), a projection, and the decoder of `gemma3_text.py`.

Source: transformers' `modeling_gemma3.py` and `modeling_siglip.py` (5.x), whose attribute names are the checkpoint's. Each image is as many tokens as the projection gives of it;
where the text has them stand tokens that mark the places. Tokens of one image see each other, ahead as well, within the window of a layer.

tokens are [B, S], pixels [N, C, W, W], features [N, T, D]. Sizes: B batch, S seq, N images, C channels, W image_size, P patches of an image, V the encoder's hidden_size, T mm_tokens_per_image,
D the decoder's hidden_size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

from nnfront_models import gemma3_text

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import LoadError

PREFIXES = {  # as checkpoints have been written, first and later
    "vision_tower.vision_model.": "model.vision_tower.",
    "vision_tower.": "model.vision_tower.",
    "multi_modal_projector.": "model.multi_modal_projector.",
    "language_model.model.": "model.language_model.",
    "language_model.lm_head.": "lm_head.",
}


@dataclass(frozen=True)
class VisionConfig(nn.Config):
    """The fields of `vision_config` that matter."""

    model_types: ClassVar = {"siglip_vision_model": {}}
    only: ClassVar = {"hidden_act": nn.ACTIVATIONS}
    unused: ClassVar = {"vision_use_head": "of a vector for the whole image"}

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_channels: int = 3
    image_size: int = 224
    patch_size: int = 16
    hidden_act: str = "gelu_pytorch_tanh"
    layer_norm_eps: float = 1e-6
    dtype: str = "float32"

    @property
    def side(self) -> int:
        """How many patches an image has on a side."""
        return self.image_size // self.patch_size


@dataclass(frozen=True)
class Config(nn.Config):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {"gemma3": {}}
    aliases: ClassVar = {"image_token_id": "image_token_index"}
    unused: ClassVar = {
        key: "in texts alone"
        for key in ("boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index")
    }

    text_config: dict[str, Any] | None = None
    vision_config: dict[str, Any] | None = None
    mm_tokens_per_image: int = 256
    image_token_index: int = 262144
    tie_word_embeddings: bool = True
    dtype: str = "float32"

    @cached_property
    def text(self) -> gemma3_text.Config:
        """What the decoder's file reads of `text_config`."""
        own = {"tie_word_embeddings": self.tie_word_embeddings, "dtype": self.dtype}
        return replace(
            gemma3_text.Config.from_hf({"model_type": "gemma3_text", **(self.text_config or {})}), **own
        )

    @cached_property
    def vision(self) -> VisionConfig:
        given = {"model_type": "siglip_vision_model", **(self.vision_config or {})}
        return replace(VisionConfig.from_hf(given), dtype=self.dtype)

    @property
    def vocab_size(self) -> int:
        return self.text.vocab_size

    @property
    def max_position_embeddings(self) -> int:
        return self.text.max_position_embeddings


class SiglipVisionEmbeddings(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        size = config.hidden_size
        self.patch_embedding = nn.Conv2D(
            config.num_channels, size, config.patch_size, stride=config.patch_size
        )
        self.position_embedding = nn.Embedding(config.side**2, size)

    def forward(self, pixels: nn.Tensor) -> nn.Tensor:
        x_NVPP = self.patch_embedding(pixels)
        n, v, *_ = x_NVPP.shape
        x_NPV = op.permute_dims(op.reshape(x_NVPP, (n, v, self.position_embedding.num)), (0, 2, 1))
        return x_NPV + self.position_embedding.weight


class SiglipAttention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        v = config.hidden_size
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(v, v) for _ in range(4))
        self.qkv = nn.Fused(self.q_proj, self.k_proj, self.v_proj)
        self.head_size = v // config.num_attention_heads

    def forward(self, x_NPV: nn.Tensor) -> nn.Tensor:
        q, k, v = (op.split_heads(part, self.head_size) for part in self.qkv(x_NPV))
        return self.out_proj(op.merge_heads(op.attention(q, k, v, is_causal=False)))


class SiglipEncoderLayer(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        v, names = config.hidden_size, ("fc1", "fc2")
        self.layer_norm1 = nn.LayerNorm(v, config.layer_norm_eps)
        self.self_attn = SiglipAttention(config)
        self.layer_norm2 = nn.LayerNorm(v, config.layer_norm_eps)
        self.mlp = nn.MLP(v, config.intermediate_size, config.hidden_act, names=names)

    def forward(self, x_NPV: nn.Tensor) -> nn.Tensor:
        x_NPV = x_NPV + self.self_attn(self.layer_norm1(x_NPV))
        return x_NPV + self.mlp(self.layer_norm2(x_NPV))


class SiglipEncoder(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        self.layers = [SiglipEncoderLayer(config) for _ in range(config.num_hidden_layers)]

    def forward(self, x_NPV: nn.Tensor) -> nn.Tensor:
        for layer in self.layers:
            x_NPV = layer(x_NPV)
        return x_NPV


class SiglipVisionModel(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        self.embeddings = SiglipVisionEmbeddings(config)
        self.encoder = SiglipEncoder(config)
        self.post_layernorm = nn.LayerNorm(config.hidden_size, config.layer_norm_eps)

    def forward(self, pixels: nn.Tensor) -> nn.Tensor:
        return self.post_layernorm(self.encoder(self.embeddings(pixels)))


class Gemma3MultiModalProjector(nn.Module):
    """The mean of neighbouring patches, normalised, as the decoder's embeddings."""

    def __init__(self, config: Config) -> None:
        v = config.vision.hidden_size
        self.mm_input_projection_weight = nn.Parameter([v, config.text.hidden_size])
        self.mm_soft_emb_norm = nn.RMSNorm(v, -1, config.vision.layer_norm_eps, bias=False, offset=1.0)
        side, self.tokens = config.vision.side, math.isqrt(config.mm_tokens_per_image)
        if self.tokens**2 != config.mm_tokens_per_image or side % self.tokens:
            raise LoadError(
                f"mm_tokens_per_image is {config.mm_tokens_per_image}, expected a square whose side divides {side} patches"
            )
        self.pooled = side // self.tokens

    def forward(self, x_NPV: nn.Tensor) -> nn.Tensor:
        (n, _, v), t, k = x_NPV.shape, self.tokens, self.pooled
        x_NTV = op.reshape(op.mean(op.reshape(x_NPV, (n, t, k, t, k, v)), (2, 4)), (n, t * t, v))
        return op.matmul(self.mm_soft_emb_norm(x_NTV), self.mm_input_projection_weight)


class Gemma3Model(nn.Module):
    def __init__(self, config: Config, language_model: nn.Decoder) -> None:
        self.vision_tower = SiglipVisionModel(config.vision)
        self.multi_modal_projector = Gemma3MultiModalProjector(config)
        self.language_model = language_model
        self.image_token, self.window = config.image_token_index, config.text.sliding_window

    def embedded(self, tokens: nn.Tensor, features: nn.Tensor) -> nn.Tensor:
        """Embeddings of tokens, and features of images, in their order, where images stand."""
        is_image_BS = tokens == self.image_token
        flat = op.reshape(op.astype(is_image_BS, "int64"), (-1,))
        at_BS = op.reshape(op.maximum(op.cumsum(flat, 0) - 1, 0), tokens.shape)
        rows = op.reshape(features, (-1, features.shape[2]))
        x_BSD = self.language_model.embed_tokens(op.where(is_image_BS, 0, tokens))
        return op.where(op.unsqueeze(is_image_BS, 2), op.take(rows, at_BS, 0), x_BSD)

    def seen(
        self, tokens: nn.Tensor, positions: nn.Tensor, cache: nn.CacheLayer | None
    ) -> dict[str, nn.Tensor]:
        """Which positions each token sees in layers of each type: those before it, and all of its image: bool [B, 1, S, positions]."""
        is_image_BS = tokens == self.image_token
        starts_BS = op.concat([is_image_BS[:, :1], is_image_BS[:, 1:] & ~is_image_BS[:, :-1]], 1)
        image_BS = op.where(is_image_BS, op.cumsum(op.astype(starts_BS, "int64"), 1), 0)
        count = tokens.shape[1] if cache is None else cache.max_seq
        at_T = op.arange(count, dtype="int64")
        here_BT = at_T - positions[:, :1]  # which of these tokens is there, if any
        known_BT = op.minimum(op.maximum(here_BT, 0), tokens.shape[1] - 1)
        known_BT = op.broadcast_to(known_BT, (tokens.shape[0], count))
        image_BT = op.where((here_BT >= 0) & (here_BT < tokens.shape[1]), op.gather(image_BS, known_BT, 1), 0)
        at_BS1, image_BS1 = op.unsqueeze(positions, 2), op.unsqueeze(image_BS, 2)
        same_BST = (image_BS1 == op.unsqueeze(image_BT, 1)) & (image_BS1 > 0)
        full_BST = (at_T <= at_BS1) | same_BST
        near_BST = full_BST & (at_T > at_BS1 - self.window)
        found = {"full_attention": full_BST, "sliding_attention": near_BST}
        return {kind: op.unsqueeze(seen_BST, 1) for kind, seen_BST in found.items()}

    def forward(
        self, tokens: nn.Tensor, features: nn.Tensor, cache: nn.Cache | nn.NoCache = nn.NO_CACHE
    ) -> nn.Tensor:
        decoder, positions = self.language_model, op.positions(tokens, cache)
        ropes, seen = decoder.rotary_emb(positions), self.seen(tokens, positions, cache[0])
        x_BSD = self.embedded(tokens, features)
        for i, layer in enumerate(decoder.layers):
            x_BSD = layer(x_BSD, ropes, cache[i], seen)
        return decoder.norm(x_BSD)


class Gemma3ForConditionalGeneration(gemma3_text.Gemma3ForCausalLM):
    """Continues texts like the decoder alone, and texts with images."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.text)
        self.softcap = None  # transformers caps the logits of the decoder alone
        self.model = Gemma3Model(config, self.model)

    def hidden(self, tokens: nn.Tensor, cache: nn.Cache | nn.NoCache) -> nn.Tensor:
        return self.model.language_model(tokens, cache)

    def image_features(self, pixels: nn.Tensor) -> nn.Tensor:
        """Images as embeddings: [N, C, W, W] to [N, T, D]."""
        return self.model.multi_modal_projector(self.model.vision_tower(pixels))

    def logits_with_images(self, tokens: nn.Tensor, features: nn.Tensor) -> nn.Tensor:
        """Logits of every position of a text with images: [B, S] to float32 [B, S, vocab_size]."""
        return self.head(self.model(tokens, features))

    def prefill_with_images(self, tokens: nn.Tensor, features: nn.Tensor, cache: nn.Cache) -> nn.Tensor:
        """Append a prompt with images and give the logits of its last position: [B, S] to float32 [B, 1, vocab_size]."""
        return self.head(self.model(tokens, features, cache)[:, -1:])


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return Gemma3ForConditionalGeneration(config)


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export: those of the decoder, and what images need."""
    methods, vision = nn.decoder_spec(config.text), config.vision
    images = nn.Dim("images", min=1)
    sizes = [config.mm_tokens_per_image, config.text.hidden_size]
    features = {"features": spec.Tensor([images, *sizes], config.dtype)}
    pixels = [images, vision.num_channels, vision.image_size, vision.image_size]
    return methods | {
        "image_features": {"pixels": spec.Tensor(pixels, config.dtype)},
        "logits_with_images": methods["logits"] | features,
        "prefill_with_images": methods["prefill"] | features,
    }


TINY = Config(
    text_config={
        "vocab_size": 259,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 256,
    },
    vision_config={
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "image_size": 16,
        "patch_size": 4,
    },
    mm_tokens_per_image=4,
    image_token_index=258,
)
