# SPDX-License-Identifier: Apache-2.0
"""Experts of others' checkpoints: matrices that are stored one by one and stacked, or stacks that are stored turned, stay as they are stored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from nnfront_models import qwen3_moe
from safetensors.torch import save_file
from test_derive import INT8, int8

import nnfront as nn

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])


def folder(path: Path, tensors: Mapping[str, torch.Tensor], said: Mapping[str, object]) -> Path:
    path.mkdir()
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(said))
    return path


def test_matrices_of_experts_are_stacked_as_they_are_stored(tmp_path: Path) -> None:
    config = {**asdict(qwen3_moe.TINY), "model_type": "qwen3_moe"}
    model = qwen3_moe.build(qwen3_moe.TINY)
    dense, stored = {}, {}
    for name, parameter in model.named_parameters():
        dense[name] = torch.randn(parameter.shape) * (0.1 if parameter.ndim == 2 else 1)
        stored[name] = dense[name]
        if "proj.weight" in name:
            stored |= (made := int8(name, dense[name]))[0]
            dense[name] = made[1]
    expected = nn.LLM.load(folder(tmp_path / "dense", dense, config))
    llm = nn.LLM.load(folder(tmp_path / "int8", stored, {**config, "quantization_config": INT8}))
    assert llm.stored is not None
    assert {weight.format for weight in llm.stored.weights} == {"int8"}
    stacks = [t for n, t in llm.session.weights.items() if t.ndim == 3 and t.dtype == torch.int8]
    assert len(stacks) == 2  # one of the layers has experts
    torch.testing.assert_close(llm.logits(IDS), expected.logits(IDS), rtol=1e-4, atol=1e-4)
    kernels = {getattr(run, "kernel", "") for run in llm.session.program.methods["decode"].body.walk()}
    assert not kernels & {"dequantize", "moe_mlp"}
    cuda = nn.compile_folder(tmp_path / "int8", "cuda:sm_90")
    assert cuda.stored is not None
    assert all((weight.format == "int8") != (".experts." in weight.name) for weight in cuda.stored.weights)


MODEL = """
import nnfront as nn
from dataclasses import dataclass
from nnfront import op, spec

@dataclass(frozen=True)
class Config(nn.Config):
    dtype: str = "float32"

class Experts(nn.Module):
    def __init__(self):
        self.gate_up_proj, self.down_proj = nn.Parameter((3, 64, 64)), nn.Parameter((3, 32, 64))

    def forward(self, x, experts, weights):
        gate_up, down = (op.permute_dims(w, (0, 2, 1)) for w in (self.gate_up_proj, self.down_proj))
        return op.moe_mlp(x, gate_up, down, experts, weights)

class Layers(nn.Module):
    def __init__(self):
        self.layers = [Experts(), Experts()]

    def forward(self, x, experts, weights):
        for layer in self.layers:
            x = layer(x, experts, weights)
        return x

def build(config):
    return Layers()

def export_spec(config):
    return {"forward": {
        "x": spec.Tensor(["n", 64]), "experts": spec.Tensor(["n", 2], "int64"), "weights": spec.Tensor(["n", 2]),
    }}
"""


def test_stacks_that_are_stored_turned_are_read_as_they_are_stored(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    stored, dense = {}, {}
    for i in range(2):
        for name, (outputs, groups) in {"gate_up_proj": (64, 2), "down_proj": (64, 1)}.items():
            full = f"layers.{i}.{name}"
            stored[f"{full}_blocks"] = blocks = torch.randint(
                0, 256, (3, outputs, groups, 16), dtype=torch.uint8
            )
            stored[f"{full}_scales"] = scales = torch.randint(
                119, 123, (3, outputs, groups), dtype=torch.uint8
            )
            halves = torch.stack([values[(blocks & 15).long()], values[(blocks >> 4).long()]], -1).flatten(-2)
            dense[full] = (halves * 2.0 ** (scales.float()[..., None] - 127)).flatten(-2).transpose(1, 2)
    said = {"quantization_config": {"quant_method": "mxfp4"}}
    sessions = []
    for name, tensors, config in (("mxfp4", stored, said), ("dense", dense, {})):
        path = folder(tmp_path / name, {n: t.contiguous() for n, t in tensors.items()}, config)
        ir = nn.export_folder(path, tmp_path / "model.py")
        executable = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True))
        sessions.append(executable.load(nn.Checkpoint(path)))
    assert {t.dtype for t in sessions[0].weights.values()} == {torch.uint8}
    x, experts, weights = torch.randn(5, 64), torch.randint(0, 3, (5, 2)), torch.rand(5, 2)
    got, expected = (session["forward"](x, experts, weights) for session in sessions)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
