# SPDX-License-Identifier: Apache-2.0
"""What differs between two models: nothing between equal ones, and of each change the one thing that was changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import nnfront as nn
from nnfront.cli import main

FOLDER = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "copy"))


def changed(folder: Path, name: str, index: int) -> None:
    """Change the lowest bit of one element."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(torch.int16).view(-1)[index] ^= 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def configure(folder: Path, **values: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artefact") / "pylib"
    nn.artefact.export(FOLDER, folder)
    return folder


def test_equal_folders_and_the_artefact_of_one_are_the_same(
    copy: Path, artefact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diff", str(FOLDER), str(copy)]) == 0
    assert capsys.readouterr().out == f"{FOLDER} and {copy} are the same\n"
    assert nn.diff(FOLDER, artefact).json()["changes"] == {}
    assert nn.diff(artefact, artefact).is_same


def test_one_bit_of_one_tensor_is_one_change(
    copy: Path, artefact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    changed(copy, name, 1234)
    found = nn.diff(FOLDER, copy)
    assert list(found.changes) == ["weights"]
    (change,) = found.changes["weights"]
    assert change.name == name
    assert change.before is not None
    assert change.before.startswith("bfloat16[512, 256] ")
    assert change.before != change.after
    # In an artefact it is part of the weight that is made of it.
    assert [c.name for c in nn.diff(artefact, copy).changes["weights"]] == [
        "model.layers.2.mlp.gate_up.weight"
    ]
    assert main(["diff", str(FOLDER), str(copy), "--json"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["same"], list(printed["changes"])) == (False, ["weights"])
    assert [c["name"] for c in printed["changes"]["weights"]] == [name]


def test_a_longer_context_changes_config_dims_and_types(copy: Path) -> None:
    configure(copy, max_position_embeddings=1024)
    found = nn.diff(FOLDER, copy)
    assert [str(c) for c in found.changes["config"]] == ["~ max_position_embeddings: 512 -> 1024"]
    assert str(found.changes["dims"][-1]) == (
        "~ max_seq of decode\n      - between 1 and 512, bound by 'cache' max_seq"
        "\n      + between 1 and 1024, bound by 'cache' max_seq"
    )
    assert "weights" not in found.changes
    assert "kernels" not in found.changes


def test_another_dtype_changes_formulas_kernels_and_weights(copy: Path) -> None:
    tensors = {name: tensor.float() for name, tensor in load_file(copy / "model.safetensors").items()}
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    configure(copy, dtype="float32")
    found = nn.diff(FOLDER, copy)
    assert len(found.changes["weights"]) == len(tensors)
    formulas = {c.name: c for c in found.changes["formulas"]}
    assert str(formulas["model.norm.weight"]) == (
        "~ model.norm.weight: as it is: bfloat16[256] -> as it is: float32[256]"
    )
    kernels = {c.name: c for c in found.changes["kernels"]}
    assert kernels["decode: linear"].before == "linear_bfloat16 x8"
    assert kernels["decode: linear"].after != kernels["decode: linear"].before


def test_another_epsilon_changes_the_bodies_of_functions_alone(copy: Path) -> None:
    configure(copy, rms_norm_eps=1e-4)
    found = nn.diff(FOLDER, copy)
    assert list(found.changes) == ["config", "functions"]
    assert "~ LlamaDecoderLayer.bindings[0] (rms_norm).attrs['epsilon']: 1e-06 -> 0.0001" in map(
        str, found.changes["functions"]
    )


def test_tensors_that_one_has_more_are_said(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    save_file(tensors | {"extra.bias": torch.zeros(3)}, copy / "model.safetensors", {"format": "pt"})
    (change,) = nn.diff(FOLDER, copy).changes["weights"]
    assert str(change).startswith("+ extra.bias: float32[3] ")
    (change,) = nn.diff(copy, FOLDER).changes["weights"]
    assert str(change).startswith("- extra.bias: float32[3] ")


def test_a_folder_without_weights_differs_in_having_none(copy: Path) -> None:
    (copy / "model.safetensors").unlink()
    found = nn.diff(FOLDER, copy)
    assert [str(c) for c in found.changes["weights"]] == ["- files: 38 tensors"]


def test_quantised_weights_are_other_weights_with_other_formulas(tmp_path: Path, artefact: Path) -> None:
    nn.artefact.export(FOLDER, tmp_path / "int8", quant="int8")
    found = nn.diff(artefact, tmp_path / "int8")
    names = {c.name: c for c in found.changes["formulas"]}
    assert names["model.layers.0.mlp.down_proj.weight"].after is None
    (quantized,) = (name for name in names if name.startswith("model.layers.0.mlp.down_proj.weight.int8"))
    assert "quantize(" in str(names[quantized].after)
    assert {c.name for c in found.changes["weights"]} == set(names)


def test_layers_share_lines(copy: Path) -> None:
    for layer in range(4):
        for part in ("q", "k", "v", "o"):
            changed(copy, f"model.layers.{layer}.self_attn.{part}_proj.weight", 5)
        for part in ("gate", "up", "down"):
            changed(copy, f"model.layers.{layer}.mlp.{part}_proj.weight", 5)
    text = str(nn.diff(FOLDER, copy))
    assert text.count("and 3 more like 'model.layers.*.mlp.up_proj.weight'") == 1


def test_trouble_is_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(FOLDER), str(tmp_path / "nothing")]) == 2
    assert "nothing is not a folder" in capsys.readouterr().err
