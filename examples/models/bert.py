# SPDX-License-Identifier: Apache-2.0
"""BERT and RoBERTa with their kin, XLM-RoBERTa and CamemBERT: encoders, whose tokens all see each other.

Source: transformers' `modeling_bert.py` and `modeling_roberta.py` (5.x), whose attribute names are the checkpoint's. Heads for other tasks than
embeddings are left out, and so is the decoder that either may be.

tokens, mask and types are [B, S]. Sizes: B batch, S seq, D hidden_size, H heads, K head size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import nnfront as nn
from nnfront import op

IGNORED = (
    *("cls.*", "lm_head.*", "classifier.*", "qa_outputs.*"),  # heads of other tasks
    *("pooler.*", "bert.pooler.*", "roberta.pooler.*"),  # where `pools` does not count on it
    *("embeddings.position_ids", "*.embeddings.position_ids"),  # counted here
)
PREFIXES = {"bert.": "", "roberta.": ""}  # of checkpoints with a head

POOLED = ("ForMultipleChoice", "ForNextSentencePrediction", "ForPreTraining", "Model")


@dataclass(frozen=True)
class Config(nn.Config):
    """The fields of config.json that matter, under its own names."""

    model_types: ClassVar = {
        "bert": {"pad_token_id": 0},
        "roberta": {"vocab_size": 50265},
        "xlm-roberta": {},
        "camembert": {},
    }
    only: ClassVar = {
        "hidden_act": nn.ACTIVATIONS,
        "position_embedding_type": ("absolute",),
        "is_decoder": (False,),
        "add_cross_attention": (False,),
    }
    unused: ClassVar = {
        "attention_probs_dropout_prob": "training",
        "classifier_dropout": "training",
        "tie_word_embeddings": "of the head that fills in tokens",
        "output_past": "of the decoder",
        **{
            f"pooler_{key}": "of another program"
            for key in ("fc_size", "num_attention_heads", "num_fc_layers")
        },
        **{key: "of another program" for key in ("directionality", "pooler_size_per_head", "pooler_type")},
    }

    model_type: str = "bert"
    architectures: tuple[str, ...] = ()
    vocab_size: int = 30522
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    hidden_act: str = "gelu"
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    pad_token_id: int = field(default=1, metadata={"min": 0})
    dtype: str = "float32"

    @property
    def first_position(self) -> int | None:
        """The row of the first token's position where padding is not counted: that after padding's own; None where all are counted from 0."""
        return None if self.model_type == "bert" else self.pad_token_id + 1

    @property
    def pools(self) -> bool:
        """Whether the checkpoint is of a class with a pooler."""
        classified = self.model_type == "bert" and "BertForSequenceClassification" in self.architectures
        return classified or not self.architectures or self.architectures[0].endswith(POOLED)


class LayerNorm(nn.LayerNorm):
    """Also under the names that the first checkpoints have."""

    def __init__(self, config: Config) -> None:
        super().__init__(config.hidden_size, config.layer_norm_eps)
        self.gamma, self.beta = self.weight, self.bias


class BertEmbeddings(nn.Module):
    def __init__(self, config: Config) -> None:
        d = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, d)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, d)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, d)
        self.LayerNorm = LayerNorm(config)
        self.first_position, self.padding = config.first_position, config.pad_token_id

    def positions(self, tokens: nn.Tensor) -> nn.Tensor:
        if self.first_position is None:
            return op.positions(tokens, nn.NO_CACHE)
        is_token_BS = op.astype(tokens != self.padding, "int64")
        return op.cumsum(is_token_BS, 1) * is_token_BS + self.padding

    def forward(self, tokens: nn.Tensor, types: nn.Tensor | None) -> nn.Tensor:
        table = self.token_type_embeddings
        type_BSD = table.weight[0] if types is None else table(types)
        x_BSD = self.word_embeddings(tokens) + type_BSD
        return self.LayerNorm(x_BSD + self.position_embeddings(self.positions(tokens)))


class BertSelfAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        d = config.hidden_size
        self.query, self.key, self.value = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)
        self.qkv = nn.Fused(self.query, self.key, self.value)
        self.head_size = d // config.num_attention_heads

    def forward(self, x_BSD: nn.Tensor, seen_B11S: nn.Tensor) -> nn.Tensor:
        q_BSHK, k_BSHK, v_BSHK = (op.split_heads(part, self.head_size) for part in self.qkv(x_BSD))
        return op.merge_heads(op.attention(q_BSHK, k_BSHK, v_BSHK, bias=seen_B11S, is_causal=False))


class BertOutput(nn.Module):
    """A product, added to what it came from, and a norm of both."""

    def __init__(self, config: Config, size: int) -> None:
        self.dense = nn.Linear(size, config.hidden_size)
        self.LayerNorm = LayerNorm(config)

    def forward(self, y: nn.Tensor, x_BSD: nn.Tensor) -> nn.Tensor:
        return self.LayerNorm(self.dense(y) + x_BSD)


class BertAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        self.self = BertSelfAttention(config)
        self.output = BertOutput(config, config.hidden_size)

    def forward(self, x_BSD: nn.Tensor, seen_B11S: nn.Tensor) -> nn.Tensor:
        return self.output(self.self(x_BSD, seen_B11S), x_BSD)


class BertIntermediate(nn.Module):
    def __init__(self, config: Config) -> None:
        self.dense = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation = nn.ACTIVATIONS[config.hidden_act]

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        return self.activation(self.dense(x_BSD))


class BertLayer(nn.Module):
    def __init__(self, config: Config) -> None:
        self.attention = BertAttention(config)
        self.intermediate = BertIntermediate(config)
        self.output = BertOutput(config, config.intermediate_size)

    def forward(self, x_BSD: nn.Tensor, seen_B11S: nn.Tensor) -> nn.Tensor:
        x_BSD = self.attention(x_BSD, seen_B11S)
        return self.output(self.intermediate(x_BSD), x_BSD)


class BertEncoder(nn.Module):
    def __init__(self, config: Config) -> None:
        self.layer = [BertLayer(config) for _ in range(config.num_hidden_layers)]

    def forward(self, x_BSD: nn.Tensor, seen_B11S: nn.Tensor) -> nn.Tensor:
        for layer in self.layer:
            x_BSD = layer(x_BSD, seen_B11S)
        return x_BSD


class BertPooler(nn.Module):
    def __init__(self, config: Config) -> None:
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x_BSD: nn.Tensor) -> nn.Tensor:
        return op.tanh(self.dense(x_BSD[:, 0]))


class BertModel(nn.Module):
    """`mask` is 1 where there is a token and 0 where there is padding, `types` which text of several a token is of; None for the first."""

    def __init__(self, config: Config) -> None:
        self.embeddings = BertEmbeddings(config)
        self.encoder = BertEncoder(config)
        self.pooler = BertPooler(config) if config.pools else None

    def hidden(self, tokens: nn.Tensor, mask: nn.Tensor, types: nn.Tensor | None = None) -> nn.Tensor:
        """What each token has become: [B, S] to [B, S, D]."""
        seen_B11S = op.reshape(mask != 0, (mask.shape[0], 1, 1, mask.shape[1]))
        return self.encoder(self.embeddings(tokens, types), seen_B11S)

    def pooled(self, tokens: nn.Tensor, mask: nn.Tensor, types: nn.Tensor | None = None) -> nn.Tensor:
        """What the pooler makes of the first token: [B, S] to [B, D]."""
        assert self.pooler is not None
        return self.pooler(self.hidden(tokens, mask, types))

    def mean(self, tokens: nn.Tensor, mask: nn.Tensor, types: nn.Tensor | None = None) -> nn.Tensor:
        """The mean of the tokens that are no padding, which most embeddings of sentences are: [B, S] to float32 [B, D]."""
        return nn.mean_of_tokens(self.hidden(tokens, mask, types), mask)


def build(config: Config) -> nn.Module:
    """Return the model; attribute paths are checkpoint names."""
    with nn.default_dtype(config.dtype):
        return BertModel(config)


def export_spec(config: Config) -> dict[str, Any]:
    """Return the methods to export: `hidden`, `mean`, and `pooled` where there is a pooler; they take `types` where there are several."""
    longest = config.max_position_embeddings - (config.first_position or 0)
    arguments = ("tokens", "mask", *(("types",) if config.type_vocab_size > 1 else ()))
    methods = ("hidden", "mean", *(("pooled",) if config.pools else ()))
    return nn.encoder_spec(methods, longest, arguments)


TINY = Config(
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=256,
)
