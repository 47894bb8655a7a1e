# SPDX-License-Identifier: Apache-2.0
"""Experts that a checkpoint holds in few bits: multiplied as they are stored, against transformers with what the bytes stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import nnfront as nn

E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
}


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], quantization: dict[str, Any]) -> None:
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))


def agrees(theirs: Any, ours: nn.LLM) -> None:
    ids = torch.randint(0, SIZES["vocab_size"], (2, 20))
    with torch.no_grad():
        expected = theirs(ids, use_cache=False).logits
    assert expected.std() > 0.3
    torch.testing.assert_close(
        ours.logits(ids).float(), expected, rtol=0, atol=1e-4 * float(expected.abs().max())
    )
    cache = ours.session.make_cache(batch=2, max_seq=20)
    got = [ours.session["prefill"](ids[:, :10], cache)]
    got += [ours.session["decode"](ids[:, i : i + 1], cache) for i in range(10, 20)]
    torch.testing.assert_close(
        torch.cat(got, 1).float(), expected[:, 9:], rtol=0, atol=1e-4 * float(expected.abs().max())
    )


def test_mxfp4_experts_of_gpt_oss_stay_in_four_bits_and_compute_what_they_stand_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = transformers.GptOssForCausalLM(transformers.GptOssConfig(**SIZES, sliding_window=8)).eval()
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(122, 125, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        halves = torch.stack([E2M1[(blocks & 15).long()], E2M1[(blocks >> 4).long()]], -1).flatten(-2)
        dense = (halves * 2.0 ** (scales.float()[..., None] - 127)).flatten(-2)
        theirs.get_parameter(name).data = dense.transpose(1, 2)
    rewrite(tmp_path, tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    ours = nn.LLM.load(tmp_path)
    agrees(theirs, ours)
    held = {n: w for n, w in ours.session.weights.items() if "experts" in n and "bias" not in n}
    assert {w.dtype for w in held.values()} == {torch.uint8}
    assert len(held) == 8  # of two layers elements and scales of two matrices
    assert str(ours.stored) == "stored as MXFP4: 4 weights kept as mxfp4"
    kernels = {run.kernel for run in ours.session.program.methods["decode"].body.walk()}
    assert "quantized_experts_sorted" in kernels


@pytest.mark.parametrize("chosen", [1, 4])
def test_int8_experts_that_are_stored_one_by_one_are_stacked_as_they_are(chosen: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**{**SIZES, "num_experts_per_tok": chosen})
    theirs = transformers.MixtralForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        weight = tensors.pop(name)
        scale = weight.abs().amax(1, keepdim=True) / 127
        tensors |= {name: (weight / scale).round().to(torch.int8), f"{name}_scale": scale}
        tensors[name.replace(".weight", ".back")] = tensors[name].float() * scale
    folder = tmp_path / "dense"
    dense = {name.replace(".back", ".weight"): t for name, t in tensors.items() if t.dtype != torch.int8}
    dense = {name: t for name, t in dense.items() if not name.endswith("_scale")}
    theirs.save_pretrained(folder)
    save_file({name: t.contiguous() for name, t in dense.items()}, folder / "model.safetensors")
    theirs = transformers.MixtralForCausalLM.from_pretrained(folder).eval()
    scheme = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    groups = {"group_0": {"targets": ["re:.*experts.*"], "weights": scheme}}
    said = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": groups}
    rewrite(tmp_path, {n: t for n, t in tensors.items() if not n.endswith(".back")}, said)
    ours = nn.LLM.load(tmp_path)
    agrees(theirs, ours)
    held = {n: w for n, w in ours.session.weights.items() if ".experts." in n}
    assert sorted(str(w.dtype) for w in held.values()) == ["torch.float32"] * 4 + ["torch.int8"] * 4


def test_deepseek_in_blocks_of_float8_computes_what_they_stand_for(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {name: size for name, size in SIZES.items() if name not in ("head_dim", "num_local_experts")}
    ranks = {"q_lora_rank": 24, "kv_lora_rank": 20, "n_routed_experts": 4, "n_group": 2, "topk_group": 1}
    sizes["num_key_value_heads"] = 4
    heads = {"qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10, "first_k_dense_replace": 1}
    config = transformers.DeepseekV3Config(**sizes, **ranks, **heads, moe_intermediate_size=24)
    theirs = transformers.DeepseekV3ForCausalLM(config).eval()
    theirs.save_pretrained(tmp_path)
    tensors, dense = load_file(tmp_path / "model.safetensors"), {}
    rows, columns = 16, 8
    for name in [name for name in tensors if name.endswith("proj.weight") or "with_mqa" in name]:
        weight = tensors[name]
        padded = torch.zeros(-(-weight.shape[0] // rows) * rows, -(-weight.shape[1] // columns) * columns)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))  # [outs, rows, ins, columns]
        scale = blocks.abs().amax((1, 3)) / 448
        spread = scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)[
            : weight.shape[0], : weight.shape[1]
        ]
        stored = (weight / spread).to(torch.float8_e4m3fn)
        tensors |= {name: stored, f"{name}_scale_inv": scale}
        dense[name] = stored.float() * spread
    folder = tmp_path / "dense"
    theirs.save_pretrained(folder)
    kept = {n: t for n, t in tensors.items() if not n.endswith("_scale_inv")} | dense
    save_file({name: t.contiguous() for name, t in kept.items()}, folder / "model.safetensors")
    theirs = transformers.DeepseekV3ForCausalLM.from_pretrained(folder).eval()
    rewrite(tmp_path, tensors, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [rows, columns]})
    agrees(theirs, nn.LLM.load(tmp_path))
