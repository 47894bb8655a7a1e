# SPDX-License-Identifier: Apache-2.0
"""Products with weights of several formats one after another: each stays as it is stored, and the model is that of what they stand for."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from folders import IDS, agrees, kinds, llama, logits
from gguf_files import write
from safetensors.torch import load_file, save_file
from test_derive import INT8

import nnfront as nn

SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
"""Rows of whole blocks of 256."""
Q4_K_M = {"embed": "Q6_K", "lm_head": "Q6_K", "0.self_attn.v": "Q6_K", "0.mlp.down": "Q6_K", "weight": "Q4_K"}
"""What the tool of that name writes: v in another format in some of the layers."""


def qwen2() -> torch.nn.Module:
    """A model whose q, k and v have a bias."""
    config = transformers.Qwen2Config(
        **SIZES,
        vocab_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        attn_implementation="eager",
    )
    torch.manual_seed(1)
    model = transformers.Qwen2ForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.1)
    return model


def formats(llm: nn.LLM) -> dict[str, int]:
    """How many weights with two axes are in memory in what."""
    held = llm.session.weights.items()
    return dict(Counter(name.rpartition(".")[2] for name, tensor in held if tensor.ndim == 2))


def ran(llm: nn.LLM, method: str) -> Counter[str]:
    """How often a step of a method runs what."""
    runs = llm.session.program.methods[method].body.walk()
    return Counter(run.kernel for run in runs if hasattr(run, "kernel"))


def test_q_and_k_stay_as_they_are_stored_beside_v_in_another_format(tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", llama(**SIZES), types=Q4_K_M)
    llm = agrees(tmp_path / "m.gguf", model, dtype="float32")
    assert kinds(llm) == {"q4_k": 12, "q6_k": 4, "float32": 5}  # norms
    held = llm.session.weights
    layer = {name.split(".", 4)[4]: t for name, t in held.items() if "layers.0.self_attn" in name}
    assert set(layer) == {"qkv.weight.q4_k", "v_proj.weight.q6_k", "o_proj.weight.q4_k"}
    assert "model.layers.1.self_attn.qkv.weight.q4_k" in held
    stored = {t.name: t for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    assert np.array_equal(layer["v_proj.weight.q6_k"].numpy(), stored["blk.0.attn_v.weight"].data)


def test_layers_whose_products_come_apart_run_the_same_attention_as_others(tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", llama(**SIZES), types=Q4_K_M, dtype=torch.bfloat16)
    llm = nn.LLM.load(tmp_path / "m.gguf")
    expected = logits(model)
    assert (llm.logits(IDS) - expected).abs().mean() < 0.02 * expected.std()
    for method in ("prefill", "decode"):
        assert ran(llm, method)["qkv_attention"] == 2
        assert ran(llm, method)["concat"] == 1  # of one layer


@pytest.mark.parametrize(
    "types",
    [
        {"v_proj": "Q6_K", "proj.weight": "Q4_K"},
        {"q_proj": "Q4_K", "k_proj": "Q5_K", "v_proj": "Q6_K", "proj.weight": "Q4_K"},
        {"k_proj.weight": "F16", "proj.weight": "Q4_K"},
        {"q_proj.weight": "Q8_0", "proj.weight": "Q6_K"},
    ],
    ids=["two", "three", "floats between", "with scales"],
)
def test_a_bias_is_cut_as_its_weights_are_when_they_are_loaded(tmp_path: Path, types: dict[str, str]) -> None:
    model = write(tmp_path / "m.gguf", qwen2(), "qwen2", types=types)
    llm = agrees(tmp_path / "m.gguf", model, dtype="float32")
    quantised = [type for type in types.values() if type != "F16"]
    assert {weight.scheme for weight in llm.stored.weights if weight.format} == {
        f"GGUF's {t}" for t in quantised
    }
    assert not any(
        "qkv.bias" in name and tensor.shape == (512,) for name, tensor in llm.session.weights.items()
    )
    decode = ran(llm, "decode")
    assert decode["concat"] == 2
    assert not decode["getitem"] + decode["split"]


def test_gate_and_up_of_two_formats_gate_what_the_dense_ones_do(tmp_path: Path) -> None:
    types = {"up_proj": "Q5_K", "weight": "Q4_K"}
    model = write(tmp_path / "m.gguf", llama(**SIZES), types=types)
    llm = agrees(tmp_path / "m.gguf", model, dtype="float32")
    assert kinds(llm) == {"q4_k": 14, "q5_k": 2, "float32": 5}
    assert not any("gate_up" in name for name in llm.session.weights)
    assert not {"concat", "split"} & set(ran(llm, "decode"))  # the one is the other's inverse


def test_weights_that_are_alike_are_one_product_as_ever(tmp_path: Path) -> None:
    write(tmp_path / "alike.gguf", llama(**SIZES), types="Q4_K")
    write(tmp_path / "floats.gguf", llama(**SIZES), types="F16")
    alike, floats = (
        nn.passes.inline(nn.export_folder(tmp_path / f"{name}.gguf")) for name in ("alike", "floats")
    )
    for method in ("prefill", "decode"):
        both = [re.findall(r" = (linear|split|attention)\(", str(ir[method])) for ir in (alike, floats)]
        assert both[0] == both[1]
        assert Counter(both[0]) == {"linear": 9, "split": 4, "attention": 2}  # the head's, four in a layer


def test_a_dense_weight_between_quantised_ones_leaves_them_as_they_are(tmp_path: Path) -> None:
    types = {"k_proj": "BF16", "gate_proj": "Q5_1", "weight": "Q4_K"}
    model = write(tmp_path / "m.gguf", llama(**SIZES), types=types)
    llm = agrees(tmp_path / "m.gguf", model, dtype="float32")
    layer = {name.split(".", 3)[3] for name in llm.session.weights if "layers.0" in name}
    attention = {f"self_attn.{name}_proj.weight.q4_k" for name in "qvo"}
    mlp = {"mlp.gate_proj.weight.dense", "mlp.up_proj.weight.q4_k", "mlp.down_proj.weight.q4_k"}
    assert {*attention, *mlp, "self_attn.k_proj.weight.dense"} == {n for n in layer if "norm" not in n}
    assert kinds(llm) == {"q4_k": 12, "float32": 9}  # k, gate and norms


def test_what_is_dense_beside_quantised_weights_is_quantised_if_asked_for(tmp_path: Path) -> None:
    types = {"q_proj": "F16", "k_proj": "F16", "weight": "Q8_0"}
    model = write(tmp_path / "m.gguf", llama(**SIZES), types=types)
    llm = nn.LLM.load(tmp_path / "m.gguf", quant="int8", dtype="float32")
    assert llm.quantized is not None
    names = {w.name for w in llm.quantized.quantized}
    assert names == {f"model.layers.{i}.self_attn.qkv.weight.dense" for i in range(2)}
    expected = logits(model)
    assert (llm.logits(IDS) - expected).abs().mean() < 0.03 * expected.std()


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_an_artefact_keeps_products_apart(tmp_path: Path, arch: str) -> None:
    model = llama(**SIZES) if arch == "llama" else qwen2()
    write(tmp_path / "m.gguf", model, arch, types=Q4_K_M)
    llm = nn.LLM.load(tmp_path / "m.gguf")
    llm.save(tmp_path / "out")
    again = nn.LLM.load(tmp_path / "out")
    assert torch.equal(again.logits(IDS), llm.logits(IDS))
    assert torch.equal(again.generate_ids(IDS, 3), llm.generate_ids(IDS, 3))
    assert formats(again) == formats(llm) == {"q4_k": 7, "q6_k": 4}


def adapter(folder: Path, model: Any) -> Path:
    """One that changes q and gate of all layers, and the sum in transformers' model."""
    generator, tensors = torch.Generator().manual_seed(5), {}
    for name, weight in model.named_parameters():
        if "q_proj.weight" in name or "gate_proj" in name:
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            a = torch.randn(4, weight.shape[1], generator=generator) / 16
            b = torch.randn(weight.shape[0], 4, generator=generator) / 16
            tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
            weight.data += 2 * b @ a
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


def test_a_merged_adapter_makes_dense_what_it_changes_and_leaves_the_weights_beside(tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", llama(**SIZES), types=Q4_K_M)
    lora = adapter(tmp_path / "adapter", model)
    llm = agrees(tmp_path / "m.gguf", model, dtype="float32", lora=[lora])
    assert kinds(llm) == {"q4_k": 8, "q6_k": 4, "float32": 9}  # norms, q and gate


def test_an_adapter_beside_the_weights_is_added_to_products_that_come_apart(tmp_path: Path) -> None:
    model = write(tmp_path / "m.gguf", llama(**SIZES), types=Q4_K_M)
    without = logits(model)
    lora = adapter(tmp_path / "adapter", model)
    llm = nn.LLM.load(tmp_path / "m.gguf", dtype="float32", adapters={"other": lora})
    assert kinds(llm) == {"q4_k": 12, "q6_k": 4, "float32": 5}
    torch.testing.assert_close(llm.logits(IDS), without, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(llm.logits(IDS, adapter="other"), logits(model), rtol=1e-4, atol=1e-4)


def test_what_is_dense_beside_quantised_weights_is_calibrated(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"
    folder = tmp_path / "model"
    shutil.copytree(shipped, folder)
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith(("k_proj.weight", "up_proj.weight"))]:
        weight = stored[name].float()
        stored[f"{name}_scale"] = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
        stored[name] = (weight / stored[f"{name}_scale"]).round().clamp(-127, 127).to(torch.int8)
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": INT8}))
    nn.calibrate(folder, (shipped / "heldout.txt").read_text()[:2000], tmp_path / "it.safetensors")
    scheme = nn.passes.QuantScheme("int4", calibration=tmp_path / "it.safetensors")
    said = str(nn.LLM.load(folder, quant=scheme).quantized)
    assert "21 of 21 calibrated" in said  # q, v, o, gate and down of four layers, the head
