# SPDX-License-Identifier: Apache-2.0
"""Folders of float8 in blocks, MXFP4, NVFP4 and bitsandbytes' floats, against an independent reading of what their authors say of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import IDS, agrees, kinds, llama, logits, write
from safetensors.torch import save_file

import nnfront as nn
from nnfront.errors import LoadError
from nnfront.lower import Run
from nnfront.quantized import StoredTensors, quantization_of

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
Stored = tuple[dict[str, torch.Tensor], torch.Tensor]


@pytest.mark.parametrize("block", [[128, 128], [48, 96], None])
def test_float8_in_blocks(tmp_path: Path, block: list[int] | None) -> None:
    def store(name: str, weight: torch.Tensor) -> Stored:
        if block is None:
            scale = weight.abs().max() / 448
            q = (weight / scale).to(torch.float8_e4m3fn)
            return {name: q, f"{name}_scale": scale.reshape(())}, q.float() * scale
        outputs, inputs = weight.shape
        scales = torch.empty(-(-outputs // block[0]), -(-inputs // block[1]))
        each = torch.empty_like(weight)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                place = (
                    slice(i * block[0], (i + 1) * block[0]),
                    slice(j * block[1], (j + 1) * block[1]),
                )
                scales[i, j] = each[place] = weight[place].abs().max() / 448
        q = (weight / each).to(torch.float8_e4m3fn)
        return {name: q, f"{name}_scale_inv": scales}, q.float() * each

    settings = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": block,
        "modules_to_not_convert": ["lm_head"],
    }
    model = write(tmp_path, llama(), store, settings)
    kept = {(128, 128): "fp8 in groups of 128", (48, 96): "float32"}.get(tuple(block or ()), "fp8")
    assert kinds(agrees(tmp_path, model)) == {kept: 14}
    if block == [128, 128]:  # of the 128 inputs of o_proj each of two ranks has half a block
        assert kinds(nn.compile_folder(tmp_path, ranks=2)) == {kept: 12, "float32": 2}


def test_nvfp4_of_modelopt(tmp_path: Path) -> None:
    def store(name: str, weight: torch.Tensor) -> Stored:
        codes = torch.randint(0, 16, weight.shape)
        scales = torch.rand(weight.shape[0], weight.shape[1] // 16).add(0.5).to(torch.float8_e4m3fn)
        factor = torch.tensor(0.03)
        packed = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8)
        base = name.removesuffix("weight")
        stored = {
            name: packed,
            f"{name}_scale": scales,
            f"{name}_scale_2": factor,
            f"{base}input_scale": torch.tensor(1.0),
        }
        return stored, E2M1[codes] * (scales.float() * factor).repeat_interleave(16, 1)

    settings = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": {"targets": ["Linear"]}},
        "producer": {"name": "modelopt", "version": "0.33"},
    }
    model = write(tmp_path, llama(), store, settings)
    assert kinds(agrees(tmp_path, model)) == {"nvfp4": 14}
    half = nn.LLM.load(tmp_path, dtype="bfloat16")
    assert kinds(half) == {"nvfp4": 14}
    decode = half.session.program.methods["decode"]
    runs = [i for i in decode.body.walk() if isinstance(i, Run)]
    products = [i for i in runs if i.kernel in ("table4_product", "table4_gated_product")]
    assert len({i.kernel for i in products}) == 2
    # Nothing multiplies scales with the factor ahead of them.
    assert all(decode.slots[i.inputs[2]].type.dtype == "float8_e4m3fn" for i in products)
    expected = logits(model)
    assert (half.logits(IDS) - expected).abs().mean() < 0.02 * expected.std()


def test_float8_of_modelopt(tmp_path: Path) -> None:
    def store(name: str, weight: torch.Tensor) -> Stored:
        scale = weight.abs().max() / 448
        q = (weight / scale).to(torch.float8_e4m3fn)
        stored = {name: q, f"{name}_scale": scale, f"{name.removesuffix('weight')}input_scale": scale}
        return stored, q.float() * scale

    settings = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
    assert kinds(agrees(tmp_path, write(tmp_path, llama(), store, settings))) == {"fp8": 14}


NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
    ]
)


@pytest.mark.parametrize("is_nested", [False, True])
def test_nf4_of_bitsandbytes(tmp_path: Path, is_nested: bool) -> None:
    table = torch.linspace(-1, 1, 256)

    def store(name: str, weight: torch.Tensor) -> Stored:
        blocks = weight.reshape(-1, 64)
        most = blocks.abs().amax(1)
        stored: dict[str, torch.Tensor] = {}
        state: dict[str, Any] = {
            "quant_type": "nf4",
            "blocksize": 64,
            "dtype": "bfloat16",
            "shape": list(weight.shape),
        }
        if is_nested:
            offset = most.mean()
            padded = torch.nn.functional.pad(most - offset, (0, -len(most) % 256)).reshape(-1, 256)
            greatest = padded.abs().amax(1)
            places = (padded / greatest[:, None])[..., None].sub(table).abs().argmin(-1)
            places = places.flatten()[: len(most)]
            stored |= {
                f"{name}.absmax": places.to(torch.uint8),
                f"{name}.nested_absmax": greatest,
                f"{name}.nested_quant_map": table,
            }
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
            most = table[places] * greatest.repeat_interleave(256)[: len(most)] + offset
        else:
            stored[f"{name}.absmax"] = most
        codes = (blocks / most[:, None])[..., None].sub(NF4).abs().argmin(-1)
        dense = (NF4[codes] * most[:, None]).reshape(weight.shape)
        codes = codes.flatten()
        stored[name] = (codes[::2] << 4 | codes[1::2]).to(torch.uint8)[:, None]
        stored[f"{name}.quant_map"] = NF4
        text = json.dumps(state).encode()
        stored[f"{name}.quant_state.bitsandbytes__nf4"] = torch.tensor(list(text), dtype=torch.uint8)
        return stored, dense

    settings = {
        "quant_method": "bitsandbytes",
        "_load_in_4bit": True,
        "load_in_4bit": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_quant_storage": "uint8",
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": is_nested,
        "llm_int8_threshold": 6.0,
    }
    model = write(tmp_path, llama(), store, settings)
    assert kinds(agrees(tmp_path, model)) == {"float32": 14}
    nn.Checkpoint(tmp_path)  # a check of headers alone needs no offset
    assert len(nn.export_folder(tmp_path)["logits"].weights) > 14
    again = nn.LLM.load(tmp_path, quant="int4").quantized  # each weight once, whatever reads it
    assert again is not None
    assert len([w for w in again.quantized if w.role == "product"]) == 8


def test_a_state_of_bitsandbytes_that_cannot_be_is_refused(tmp_path: Path) -> None:
    quantization = quantization_of(
        {"quantization_config": {"quant_method": "bitsandbytes", "bnb_4bit_quant_type": "nf4"}}
    )
    assert quantization is not None
    state = "x.weight.quant_state.bitsandbytes__nf4"
    names = ("x.weight", "x.weight.absmax", "x.weight.quant_map", state)
    stored = {name: nn.ir.TensorType((4, 1), "uint8") for name in names}
    for text in (b'{"blocksize": 0}', b'{"shape": [1, 2]}', b'{"nested_offset": NaN}', b"[]{", b"3"):
        held = StoredTensors(stored, lambda name, text=text: text)
        with pytest.raises(LoadError, match=state):
            quantization.layout(held, "x.weight", nn.ir.TensorType((8, 1), "float32"))


def test_int8_of_bitsandbytes(tmp_path: Path) -> None:
    def store(name: str, weight: torch.Tensor) -> Stored:
        most = weight.abs().amax(1)
        q = (weight / most[:, None] * 127).round().to(torch.int8)
        base = name.removesuffix("weight")
        stored = {name: q, f"{base}SCB": most, f"{base}weight_format": torch.tensor(0, dtype=torch.uint8)}
        return stored, q.float() * most[:, None] / 127

    settings = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_threshold": 6.0}
    assert kinds(agrees(tmp_path, write(tmp_path, llama(), store, settings))) == {"int8": 14}


MODEL = """
import nnfront as nn
from dataclasses import dataclass
from nnfront import op, spec

@dataclass(frozen=True)
class Config(nn.Config):
    dtype: str = "float32"

class Experts(nn.Module):
    def __init__(self):
        self.gate_up_proj = nn.Parameter((3, 64, 10), "float32")
        self.router = nn.Parameter((10, 32), "float32")

    def forward(self, x):
        return op.matmul(x, self.gate_up_proj), op.linear(op.reshape(x, (-1, 64))[:, :32], self.router)

def build(config):
    return Experts()

def export_spec(config):
    return {"forward": {"x": spec.Tensor([3, "n", 64], "float32")}}
"""


def test_mxfp4_of_experts_is_stored_turned(tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), dtype=torch.uint8)
    scales = torch.randint(110, 130, (3, 10, 2), dtype=torch.uint8)
    flat, powers = (
        torch.randint(0, 256, (10, 1, 16), dtype=torch.uint8),
        torch.full((10, 1), 127, dtype=torch.uint8),
    )
    stored = {
        "gate_up_proj_blocks": blocks,
        "gate_up_proj_scales": scales,
        "router_blocks": flat,
        "router_scales": powers,
    }
    save_file(stored, tmp_path / "model.safetensors")
    said = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    (tmp_path / "config.json").write_text(json.dumps(said))
    ir = nn.passes.lift_transform_params(
        nn.export_folder(tmp_path, tmp_path / "model.py"), shared_transform=True
    )
    session = nn.compile(ir).load(nn.Checkpoint(tmp_path))

    def dense(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        halves = torch.stack([E2M1[(blocks & 15).long()], E2M1[(blocks >> 4).long()]], -1).flatten(-2)
        return (halves * 2.0 ** (scales.float()[..., None] - 127)).flatten(-2)

    x = torch.randn(3, 5, 64)
    experts, router = session["forward"](x)
    torch.testing.assert_close(experts, x @ dense(blocks, scales).transpose(1, 2))
    torch.testing.assert_close(router, x.reshape(-1, 64)[:, :32] @ dense(flat, powers).T)
    assert session.weights["router.mxfp4"].dtype == torch.uint8
