# SPDX-License-Identifier: Apache-2.0
"""Formulas in the place of weights: what stays quantised and what does not, whoever reads it; and what is wrong with a checkpoint is said before a byte is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from folders import IDS, agrees, kinds, llama, logits, write
from safetensors.torch import load_file, save_file

import nnfront as nn
from nnfront.errors import LoadError
from nnfront.ir import verify
from nnfront.quantized import READERS, Settings, StoredReport

INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        }
    },
}


def int8(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    q = (weight / scale).round().to(torch.int8)
    return {name: q, f"{name}_scale": scale}, q.float() * scale


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, llama(), int8, INT8)
    return tmp_path


def test_the_module_keeps_the_rules_and_a_layer_is_still_one_function(folder: Path) -> None:
    ir = nn.export_folder(folder)
    verify(ir)
    plain = nn.ir.parse(str(ir))
    assert plain == ir
    private = [f for f in ir.functions if f.kind == "private"]
    assert len(private) == 3  # one for each method, of two layers
    lifted = nn.passes.lift_transform_params(ir, shared_transform=True)
    kept = {
        p.type.dtype for f in lifted.methods for p in f.weights if p.type.ndim == 2 and "layers" in p.name
    }
    assert kept == {"int8", "float32"}
    assert not any("dequantize" in str(f) for f in lifted.functions if f.kind == "transform")


def test_layers_that_are_stored_in_two_ways_are_two_functions(tmp_path: Path) -> None:
    def store(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return int8(name, weight) if "layers.0." in name else ({name: weight}, weight)

    model = write(tmp_path, llama(), store, INT8)
    assert kinds(agrees(tmp_path, model)) == {"int8": 7}
    assert len([f for f in nn.export_folder(tmp_path).functions if f.kind == "private"]) == 6


def test_one_of_joined_weights_that_is_not_quantised_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    def store(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        return ({name: weight}, weight) if "k_proj" in name or "up_proj" in name else int8(name, weight)

    model = write(tmp_path, llama(), store, INT8)
    assert kinds(agrees(tmp_path, model)) == {"int8": 10}


def test_a_target_without_a_kernel_has_weights_dequantised(folder: Path) -> None:
    ir = nn.passes.lift_transform_params(nn.export_folder(folder), shared_transform=True)
    assert "dequantize" not in str(ir["transform_params"])
    said = INT8["config_groups"]["group_0"]["weights"]  # type: ignore[index]
    asymmetric = {
        **INT8,
        "config_groups": {"g": {"targets": ["Linear"], "weights": {**said, "symmetric": False}}},
    }
    write(folder, llama(), int8, asymmetric)
    assert kinds(nn.LLM.load(folder)) == {"int8": 14}  # without zero points it is symmetric all the same


def test_what_is_quantised_already_is_not_quantised_again(folder: Path) -> None:
    model = write(folder, llama(), int8, INT8)
    llm = nn.LLM.load(folder, quant="int4")
    assert kinds(llm) == {"int8": 14}
    layers = {n: t.dtype for n, t in llm.session.weights.items() if "layers" in n}
    assert sum(dtype == torch.int8 for dtype in layers.values()) == 8
    assert torch.uint8 not in layers.values()
    assert (llm.logits(IDS) - logits(model)).abs().mean() < 0.2 * logits(model).std()


def test_weights_that_are_missing_or_of_another_shape_are_named_before_a_byte_is_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    stored[f"{name}_scale"] = torch.ones(3, 1)
    stored["model.layers.0.mlp.down_proj.weight"] = torch.ones(3, 4, dtype=torch.int8)
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(LoadError) as caught:
        nn.LLM.load(folder)
    assert caught.value.details == (
        "shape: 'model.layers.0.mlp.down_proj.weight': int8[3, 4], expected int8[128, 256]",
        f"shape: '{name}_scale': float32[3, 1], expected float32[128, 1]",
    )
    del stored[f"{name}_scale"]
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(LoadError, match=f"'{name}': int8.128, 256., expected float32.128, 256."):
        nn.LLM.load(folder)


def test_an_artefact_keeps_what_is_kept(folder: Path, tmp_path: Path) -> None:
    llm = nn.LLM.load(folder)
    llm.save(tmp_path / "out")
    again = nn.LLM.load(tmp_path / "out")
    assert torch.equal(again.logits(IDS), llm.logits(IDS))
    assert {t.dtype for t in again.session.weights.values()} == {torch.int8, torch.float32}


def test_numbers_that_are_none_and_scales_of_zero_reach_the_logits_and_no_further(folder: Path) -> None:
    stored = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight_scale"
    stored[name] = torch.zeros_like(stored[name])
    save_file(stored, folder / "model.safetensors")
    assert nn.LLM.load(folder).logits(IDS).isfinite().all()
    stored[name] = torch.full_like(stored[name], torch.nan)
    save_file(stored, folder / "model.safetensors")
    assert nn.LLM.load(folder).logits(IDS).isnan().all()


def test_a_folder_that_is_not_quantised_says_nothing() -> None:
    llm = nn.LLM.load(Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m")
    assert llm.stored is None
    assert str(StoredReport(())) == "stored as they are"


@pytest.mark.parametrize("name", READERS)
def test_no_reader_takes_a_key_that_it_does_not_know(name: str) -> None:
    settings = Settings({"quant_method": name, "no_such_key": [1]}, "here")
    settings.get("quant_method")
    READERS[name](settings)
    settings.close()
    with pytest.raises(LoadError, match="no_such_key is \\[1\\], and no reader knows the key"):
        settings.check()
