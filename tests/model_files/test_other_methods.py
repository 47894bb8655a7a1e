# SPDX-License-Identifier: Apache-2.0
"""Model files whose methods generate no text, and dtypes that they do not compute in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from own_files import FOLDER, LLAMA, written

import nnfront as nn
from nnfront.cli import main
from nnfront.errors import LoadError

ENCODER = """
from dataclasses import dataclass
from typing import Any

import nnfront as nn
from nnfront import op, spec


@dataclass(frozen=True)
class Config(nn.Config):
    vocab_size: int
    hidden_size: int
    dtype: str = "float32"
    unused = dict.fromkeys(("intermediate_size", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "head_dim",
        "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings", "rope_parameters", "pretraining_tp"), "not this one's")


class Encoder(nn.Module):
    def __init__(self, config):
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.dtype)

    def encode(self, tokens):
        return op.mean(self.embed_tokens(tokens), 1)

    def decode(self, tokens):
        return self.embed_tokens(tokens)


class Model(nn.Module):
    def __init__(self, config):
        self.model = Encoder(config)

    def encode(self, tokens):
        return self.model.encode(tokens)

    def decode(self, tokens):
        return self.model.decode(tokens)


def build(config):
    return Model(config)


def export_spec(config):
    tokens = {"tokens": spec.Tensor(["batch", "seq"], "int64")}
    return {"encode": tokens, "decode": tokens}


IGNORED = ("model.layers.*", "model.norm.weight")
"""


_HEAD, _TAIL = ENCODER.split("class Encoder")[0], ENCODER[ENCODER.index("IGNORED") :]
STEPS = f"""{_HEAD.replace('"max_position_embeddings", ', "").replace("hidden_size: int", "hidden_size: int; max_position_embeddings: int")}
class Steps(nn.Module):
    def __init__(self, config):
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.dtype)

    def step(self, tokens, cache):
        return self.mix(self.embed_tokens(tokens), cache)[:, None] + self.embed_tokens(tokens)

    def mix(self, x, cache):
        total = op.cache_read(cache[0], "sum") + op.sum(x, axis=1)
        op.cache_write(cache[0], "sum", total, x.shape[1])
        return total


class Model(nn.Module):
    def __init__(self, config):
        self.model = Steps(config)
        self.vocab = config.vocab_size

    def prefill(self, tokens, cache):
        return op.broadcast_to(self.model.step(tokens, cache)[:, :, :1], (*tokens.shape, self.vocab))

METHODS

def build(config):
    return Model(config)


def export_spec(config):
    any, one, two = (spec.Tensor(["batch", n], "int64") for n in ("seq", 1, 2))
    floats = spec.Tensor(["batch", 1, config.hidden_size], "float32")
    layer = spec.Layer(per_sequence={{"sum": spec.Tensor([config.hidden_size])}})
    kept, other, fixed = (spec.State([layer], *sizes) for sizes in (("batch", "max_seq"), ("batch", "room"), ("batch", 8)))
    return SPEC


{_TAIL}"""


class TestNoLanguageModel:
    def test_loading_it_says_what_is_missing(self, tmp_path: Path) -> None:
        file = written(tmp_path / "encoder.py", ENCODER)
        with pytest.raises(LoadError) as caught:
            nn.LLM.load(FOLDER, model_file=file)
        assert str(caught.value) == (
            f"{FOLDER} holds no language model\n"
            "  there is no method 'prefill', methods are 'encode', 'decode'\n"
            "  'decode' takes int64[batch, seq], expected tokens and a cache\n"
            "  the model file's Config has no int 'max_position_embeddings'\n"
            "  help: nnfront.compile(nnfront.export_folder(DIR)).load(nnfront.Checkpoint(DIR)) loads any model"
        )

    @pytest.mark.parametrize(
        ("spec", "methods", "lacks"),
        [
            (
                """{"prefill": {"tokens": any, "cache": kept}, "decode": {"tokens": one, "embeds": floats, "cache": kept}}""",
                """    def decode(self, tokens, embeds, cache):
        return self.model.step(tokens, cache)
""",
                [
                    "'decode' takes int64[batch, 1], float32[batch, 1, 256], "
                    "cache(layer(batch=batch, max_seq=max_seq, per_sequence={sum: float32[256]})), expected tokens and a cache"
                ],
            ),
            (
                """{"prefill": {"tokens": floats, "cache": other}, "decode": {"tokens": two, "cache": fixed}}""",
                """    def prefill(self, tokens, cache):
        return self.model.mix(tokens, cache)

    def decode(self, tokens, cache):
        return op.astype(self.model.step(tokens, cache), "int64")
""",
                [
                    "'prefill' takes tokens float32[batch, 1, 256], expected int64[batch, seq]",
                    "'prefill' takes a cache of batch x room, expected batch x max_seq",
                    "'prefill' gives float32[batch, 256], expected floats [batch, 1, 4096]",
                    "'decode' takes tokens int64[batch, 2], expected int64[batch, 1]",
                    "'decode' takes a cache of batch x 8, expected batch x max_seq",
                    "'decode' gives int64[batch, 2, 256], expected floats [batch, 1, 4096]",
                ],
            ),
        ],
        ids=["other arguments", "other types"],
    )
    def test_methods_of_the_same_names_that_are_others_are_named(
        self, spec: str, methods: str, lacks: list[str], tmp_path: Path
    ) -> None:
        text = STEPS.replace("SPEC", spec).replace("METHODS", methods)
        file = written(tmp_path / "steps.py", text)
        with pytest.raises(LoadError) as caught:
            nn.LLM.load(FOLDER, model_file=file)
        assert caught.value.what == f"{FOLDER} holds no language model"
        assert list(caught.value.details) == lacks

    def test_it_is_exported_and_loads_as_the_help_says(self, tmp_path: Path) -> None:
        file = written(tmp_path / "encoder.py", ENCODER)
        ids = torch.tensor([[5, 6]])
        session = nn.compile(nn.export_folder(FOLDER, file)).load(nn.Checkpoint(FOLDER))
        nn.artefact.export(FOLDER, tmp_path / "out", model_file=file)
        assert torch.equal(nn.load(tmp_path / "out")["encode"](ids), session["encode"](ids))
        with pytest.raises(LoadError, match="is an artefact, but of no language model"):
            nn.LLM.load(tmp_path / "out")


@pytest.mark.parametrize(
    ("dtype", "text", "message"),
    [
        ("int8", LLAMA, "dtype is 'int8', expected one of float16, bfloat16, float32, float64"),
        ("half", LLAMA, "dtype is 'half', expected one of float16, bfloat16, float32, float64"),
        (
            "float32",
            ENCODER.replace('    dtype: str = "float32"\n', "")
            .replace('"head_dim",', '"head_dim", "dtype",')
            .replace("config.dtype", "'bfloat16'"),
            "dtype is 'float32', but the model file's Config has no field 'dtype'",
        ),
    ],
)
def test_a_dtype_that_the_model_cannot_compute_in_is_refused(
    dtype: str, text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(tmp_path / "mine.py", text)
    assert main(["run", str(FOLDER), "-p", "x", "--dtype", dtype, "--model", str(file)]) == 1
    assert capsys.readouterr().err.splitlines()[0] == f"error: {message}"
