# SPDX-License-Identifier: Apache-2.0
"""GGUF files against the library that defines them, and models of them against transformers."""

from __future__ import annotations

from pathlib import Path

import gguf
import gguf_files
import numpy as np
import pytest
import torch
import transformers
from few_of import few_of
from folders import IDS, agrees, kinds, llama, logits
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from gguf_files import write

import nnfront as nn
from nnfront import ops
from nnfront.backends.cpu import backend
from nnfront.backends.cpu.extension import NATIVE
from nnfront.cli import main
from nnfront.errors import LoadError
from nnfront.ir import OPS, FunctionBuilder, IRModule, TensorType
from nnfront.ops.encoded import Encoded
from nnfront.quant_format import BLOCK_FORMATS
from nnfront.quantized.gguf_types import ENCODINGS, Blocks
from nnfront.weights.gguf import TYPES

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
"""Rows of whole blocks of 256."""


@pytest.mark.parametrize("name", ENCODINGS)
def test_blocks_stand_for_what_the_library_says_bit_for_bit(name: str) -> None:
    encoding = ENCODINGS[name]
    b = FunctionBuilder("main")
    data = b.param("data", TensorType((5, 3 * encoding.size_bytes), "uint8"), "input")
    made = encoding.make(Blocks(b, b.call(ops.reshape, data, shape=(5, 3, encoding.size_bytes))))
    if isinstance(made, Encoded):
        assert made.format == encoding.format
        if made.scales is not None:
            assert isinstance(made.scales.type, TensorType)
            assert made.scales.type.dtype == encoding.scale_dtype
        made = made.dense(b, "float32")
    session = nn.compile(IRModule([b.finish(made)])).load({})
    type = GGMLQuantizationType[name]
    for seed in range(3):
        blocks = gguf_files.random_blocks((5, 3 * encoding.numbers), type, seed)
        expected = dequantize(blocks, type)
        assert np.array_equal(session["main"](torch.from_numpy(blocks)).numpy(), expected)


def test_every_type_of_blocks_is_as_large_as_the_library_says() -> None:
    from gguf.constants import GGML_QUANT_SIZES

    assert {k: (t.numbers, t.size_bytes) for k, t in TYPES.items()} == {
        k: GGML_QUANT_SIZES[GGMLQuantizationType(k)] for k in TYPES
    }
    assert {t.name for t in TYPES.values() if not t.dtype} == set(ENCODINGS)
    assert all(GGMLQuantizationType(k).name == t.name for k, t in TYPES.items())


KEPT = {
    "Q4_0": "int4",
    "Q5_0": "int8 in groups of 32",
    "Q8_0": "int8 in groups of 32",
    **{name.upper(): name for name in BLOCK_FORMATS},
}


@pytest.mark.parametrize(
    "type",
    few_of(
        ["F32", "F16", "BF16", "Q4_0", "Q5_0", "Q5_1", "Q8_0", *map(str.upper, BLOCK_FORMATS), "IQ4_XS"], 6
    ),
)
def test_a_llama_is_the_model_of_the_weights_that_the_library_reads(tmp_path: Path, type: str) -> None:
    model = write(tmp_path / "m.gguf", llama(**SIZES), types=type)
    llm = agrees(tmp_path / "m.gguf", model, dtype="float32")
    found = kinds(llm)
    if type in KEPT:
        assert found == {KEPT[type]: 9, "float32": 3}  # norms
    assert llm.eos_token_ids == (7,)


def test_a_folder_with_one_file_and_types_that_are_mixed(tmp_path: Path) -> None:
    types = {"embed": "Q6_K", "down": "Q6_K", "v_proj": "Q6_K", "lm_head": "Q6_K", "weight": "Q4_K"}
    model = write(tmp_path / "m.gguf", llama(**SIZES), types=types)
    llm = agrees(tmp_path, model, dtype="float32")
    assert str(llm.stored) == (
        "stored as GGUF's Q6_K: 4 weights kept as q6_k; GGUF's Q4_K: 5 weights kept as q4_k; GGUF's float32: 3 weights made float32"
    )


def test_it_computes_in_bfloat16_unless_its_matrices_are_floats(tmp_path: Path) -> None:
    model = write(tmp_path / "q.gguf", llama(**SIZES), types="Q5_1", dtype=torch.bfloat16)
    llm = nn.LLM.load(tmp_path / "q.gguf")
    assert kinds(llm) == {"bfloat16": 12}
    expected = logits(model)
    assert (llm.logits(IDS) - expected).abs().mean() < 0.02 * expected.std()
    write(tmp_path / "h.gguf", llama(**SIZES), types="F16")
    assert nn.LLM.load(tmp_path / "h.gguf").config.dtype == "float16"


@pytest.mark.parametrize("type", [name.upper() for name in BLOCK_FORMATS])
def test_blocks_stay_the_bytes_of_the_file_in_any_dtype(tmp_path: Path, type: str) -> None:
    model = write(tmp_path / "m.gguf", llama(**SIZES), types=type, dtype=torch.bfloat16)
    llm = nn.LLM.load(tmp_path / "m.gguf")
    assert kinds(llm) == {type.lower(): 9, "bfloat16": 3}
    stored = gguf.GGUFReader(tmp_path / "m.gguf").get_tensor
    (down,) = [t for t in map(stored, range(12)) if t.name == "blk.0.ffn_down.weight"]
    kept = llm.session.weights[f"model.layers.0.mlp.down_proj.weight.{type.lower()}"]
    assert np.array_equal(kept.numpy(), down.data)
    expected = logits(model)
    assert (llm.logits(IDS) - expected).abs().mean() < 0.02 * expected.std()


@pytest.mark.parametrize("type", ["Q6_K", "Q8_0"])
def test_what_stays_quantised_is_not_quantised_again_and_counts_as_it_is_stored(
    tmp_path: Path, type: str
) -> None:
    """Neither blocks, nor the scales of an embedding, whose rows are taken as well; each weight once for all methods."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
    gguf_files.write(tmp_path / "m.gguf", llama(**sizes), types=type)
    plain = nn.LLM.load(tmp_path / "m.gguf")
    again = nn.LLM.load(tmp_path / "m.gguf", quant="int4")
    assert again.quantized is not None
    assert not again.quantized.quantized
    assert torch.equal(again.logits(IDS), plain.logits(IDS))
    kept = [w for w in again.quantized.weights if w.reason == "quantised already"]
    stored = sum(
        info.size_bytes for info in nn.Checkpoint(tmp_path / "m.gguf").infos.values() if info.encoding
    )
    assert sum(w.bytes_after for w in kept) == stored * (1 if type == "Q6_K" else 36 / 34)


@pytest.mark.parametrize("type", ["Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"])
def test_scales_of_float16_are_widened_where_it_computes_in_bfloat16(
    tmp_path: Path, type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "multiplies_pairs", lambda: False)  # so that weights lie in rows
    model = write(tmp_path / "q.gguf", llama(**SIZES), types=type)
    llm = nn.LLM.load(tmp_path / "q.gguf")
    kept = "int4" if type == "Q4_0" else "int8 in groups of 32"
    assert kinds(llm) == {kept: 9, "bfloat16": 3}  # norms
    name = "model.layers.0.mlp.down_proj.weight"
    q, scales = (llm.session.weights[f"{name}.{part}"] for part in (kept.split()[0], "scales"))
    assert scales.dtype == torch.float32
    q = OPS["unpack_int4"].run((q,), {"axis": 1, "signed": True}) if type == "Q4_0" else q
    stands_for = q.float() * scales.repeat_interleave(32, 1)
    assert torch.equal(
        stands_for, model.get_parameter(name)
    )  # what the library makes of the file, bit for bit
    expected = logits(model)
    for tokens, wanted in ((IDS, expected), (IDS[:1, :1], expected[:1, :1])):
        assert (llm.logits(tokens) - wanted).abs().mean() < 0.02 * expected.std()
    runs = {i.kernel for i in llm.session.program.methods["decode"].body.walk() if hasattr(i, "kernel")}
    assert any(kernel.startswith(kept.split()[0]) for kernel in runs)


def test_what_is_kept_and_what_is_made_dense_is_said(tmp_path: Path) -> None:
    types = {"down": "Q3_K", "o_proj": "Q5_1", "weight": "Q8_0"}
    write(tmp_path / "q.gguf", llama(**SIZES), types=types)
    assert str(nn.LLM.load(tmp_path / "q.gguf").stored) == (
        "stored as GGUF's Q8_0: 7 weights kept as int8 in groups of 32;"
        " GGUF's Q5_1: 1 weight made bfloat16 (no kernel reads them as they are stored);"
        " GGUF's Q3_K: 1 weight made bfloat16 (their scales are float32, which bfloat16 does not hold);"
        " GGUF's float32: 3 weights made bfloat16"
    )


def test_factors_of_wavelengths_are_a_tensor(tmp_path: Path) -> None:
    parameters = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = llama(**SIZES, rope_parameters=parameters)
    size = 64
    plain = 1 / 10000.0 ** (np.arange(0, size, 2) / size)
    factors = plain / model.model.rotary_emb.inv_freq.numpy()
    write(tmp_path / "m.gguf", model, factors=factors)
    agrees(tmp_path / "m.gguf", model)


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", llama(**SIZES, tie_word_embeddings=True), types="Q8_0")
    model.tie_weights()
    agrees(tmp_path / "m.gguf", model, dtype="float32")


@pytest.mark.skipif(NATIVE is None, reason="no kernels in C")
@pytest.mark.parametrize("is_tied", [False, True])
def test_products_with_blocks_round_what_these_are_multiplied_with(tmp_path: Path, is_tied: bool) -> None:
    """The bytes of the file, of which there is one copy where the embedding is the head as well."""
    types = {"embed": "Q6_K", "lm_head": "Q6_K", "down": "Q6_K", "weight": "Q4_K"}
    model = llama(**SIZES, tie_word_embeddings=is_tied)
    model = write(tmp_path / "m.gguf", model, types=types, dtype=torch.bfloat16)
    model.tie_weights()
    scheme = nn.passes.QuantScheme("keep", activations="int8")
    llm = nn.LLM.load(tmp_path / "m.gguf", quant=scheme)
    assert str(llm.quantized).endswith("; activations: int8 in 15 of 15 products")
    for method in ("prefill", "decode"):
        runs = [run for run in llm.session.program.methods[method].body.walk() if hasattr(run, "kernel")]
        multiplied = [run.attrs["format"] for run in runs if run.kernel.startswith("int8_activations")]
        # Of q, k and v, of what they give, of gate and up; down and the head.
        assert multiplied == 3 * ["q4_k"] + 2 * ["q6_k"]
    assert sum(name.endswith(".q6_k") for name in llm.session.weights) == 2 + (not is_tied)
    plain = nn.LLM.load(tmp_path / "m.gguf")
    assert set(llm.session.weights) == set(plain.session.weights)
    for name, tensor in plain.session.weights.items():
        assert torch.equal(llm.session.weights[name], tensor)
    expected = logits(model)
    assert 0 < (llm.logits(IDS) - plain.logits(IDS)).abs().mean()
    assert (llm.logits(IDS) - expected).abs().mean() < 0.04 * expected.std()


def test_the_command_line_takes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "m.gguf", llama(**SIZES), types="Q8_0")
    assert main(["check", str(tmp_path / "m.gguf")]) == 0
    assert "fits: every weight has its tensor" in capsys.readouterr().out
    assert main(["export", str(tmp_path / "m.gguf"), "-o", str(tmp_path / "out"), "--dtype", "float32"]) == 0
    assert (
        "9 weights kept as int8 in groups of 32; GGUF's float32: 3 weights made float32"
        in capsys.readouterr().out
    )
    artefact = nn.LLM.load(tmp_path / "out")
    assert torch.equal(artefact.logits(IDS), nn.LLM.load(tmp_path / "m.gguf", dtype="float32").logits(IDS))
    assert artefact.eos_token_ids == (7,)


@pytest.mark.parametrize(
    ("architecture", "metadata", "problem"),
    [
        ("falcon", {}, "general.architecture is 'falcon'"),
        (
            "llama",
            {"split.count": 3},
            "m.gguf is one of 3 files of a model that was split; the others are found by names that end with -00001-of-00003.gguf",
        ),
        ("llama", {"llama.expert_count": 8}, "expert_count is 8, expected 0"),
        ("llama", {"llama.logit_scale": 2.0}, "logit_scale is 2.0, and no reader knows the key"),
        (
            "llama",
            {"llama.rope.scaling.type": "su"},
            "rope.scaling.type is 'su', expected 'none', 'linear' or 'yarn'",
        ),
    ],
)
def test_metadata_that_are_not_understood_are_refused(
    tmp_path: Path, architecture: str, metadata: dict[str, object], problem: str
) -> None:
    write(tmp_path / "m.gguf", llama(**SIZES), architecture, metadata=metadata)
    with pytest.raises(LoadError) as caught:
        nn.export_folder(tmp_path / "m.gguf")
    assert problem in str(caught.value)


def test_several_models_in_a_folder_are_told_apart_by_nobody(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").write_bytes(b"GGUF")
    with pytest.raises(LoadError, match="there are several models in GGUF"):
        nn.LLM.load(tmp_path)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_qwen_keeps_the_order_of_its_rows(tmp_path: Path, name: str) -> None:
    sizes = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    kind = {"qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}[name]
    more = {"head_dim": 32} if name == "qwen3" else {}
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(kind(**sizes, **more), attn_implementation="eager")
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)
    model = write(tmp_path / "m.gguf", model.eval(), name, types="Q8_0")
    assert kinds(agrees(tmp_path / "m.gguf", model, dtype="float32"))["int8 in groups of 32"] == 16
