# SPDX-License-Identifier: Apache-2.0
"""GPTQ's and AWQ's folders, against plain loops over words by the description of the formats."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from few_of import few_of
from folders import IDS, agrees, kinds, llama, logits, write

import nnfront as nn
from nnfront.errors import LoadError


def words(numbers: torch.Tensor, bits: int, order: list[int] | None = None) -> torch.Tensor:
    """Pack numbers along the last axis, 32 / bits of them to an int32; number order[i] of them in place i, from the lowest bits on."""
    per_word = 32 // bits
    split = numbers.to(torch.int64).reshape(*numbers.shape[:-1], -1, per_word)
    packed = torch.zeros(split.shape[:-1], dtype=torch.int64)
    for place, number in enumerate(order or range(per_word)):
        packed |= split[..., number] << (bits * place)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def quantized(
    weight: torch.Tensor, bits: int, groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers [out, in], zero points and scales [out, groups], and what they stand for; `groups` is the group of each input."""
    count, most = int(groups.max()) + 1, 2**bits - 1
    scales, zeros = (torch.empty(len(weight), count) for _ in "ab")
    for g in range(count):
        part = weight[:, groups == g]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scales[:, g] = ((high - low) / most).half().float()
        zeros[:, g] = (-low / scales[:, g]).round().clamp(0, most)
    q = ((weight / scales[:, groups]).round() + zeros[:, groups]).clamp(0, most)
    return q, zeros, scales, (q - zeros[:, groups]) * scales[:, groups]


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize(("bits", "group"), few_of([(4, 32), (4, -1), (8, 64), (2, 32)]))
def test_gptq_is_what_its_words_say(
    tmp_path: Path, version: str, is_ordered: bool, bits: int, group: int
) -> None:
    def store(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        inputs = weight.shape[1]
        groups = torch.arange(inputs) // (inputs if group == -1 else group)
        if is_ordered:
            groups = groups[torch.randperm(inputs)]
        q, zeros, scales, dense = quantized(weight, bits, groups)
        held = zeros - 1 if version == "gptq" else zeros
        base = name.removesuffix("weight")
        stored = {
            f"{base}qweight": words(q, bits).T,
            f"{base}qzeros": words(held.T.to(torch.int64) & (2**bits - 1), bits),
            f"{base}scales": scales.T.half(),
            f"{base}g_idx": groups.to(torch.int32),
        }
        return stored, dense

    settings = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "desc_act": is_ordered,
        "sym": False,
        "damp_percent": 0.1,
        "checkpoint_format": version,
        "meta": {"quantizer": ["some:1.0"]},
    }
    model = write(tmp_path, llama(), store, settings)
    llm = agrees(tmp_path, model)
    kept = {32: "uint4 ", -1: "uint4 with one scale for each output"}
    is_kept = bits == 4 and not is_ordered
    assert kinds(llm) == ({kept[group].strip(): 14} if is_kept else {"float32": 14})
    if is_kept:
        assert sum(name.endswith(".uint4") for name in llm.session.weights) == 8
        runs = {i.kernel for i in llm.session.program.methods["decode"].body.walk() if hasattr(i, "kernel")}
        assert {"int4_product", "int4_gated_product"} <= runs


def test_awq_is_what_its_words_say(tmp_path: Path) -> None:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def store(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        q, zeros, scales, dense = quantized(weight, 4, torch.arange(weight.shape[1]) // 64)
        base = name.removesuffix("weight")
        stored = {
            f"{base}qweight": words(q.T, 4, order),
            f"{base}qzeros": words(zeros.T, 4, order),
            f"{base}scales": scales.T.half(),
        }
        return stored, dense

    settings = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": None,
    }
    model = write(tmp_path, llama(), store, settings)
    llm = agrees(tmp_path, model)
    assert kinds(llm) == {"uint4 in groups of 64": 14}
    half = nn.LLM.load(tmp_path, dtype="bfloat16")  # which does not hold scales of float16
    assert kinds(half) == {"uint4 in groups of 64": 14}
    expected = logits(model)
    assert (half.logits(IDS) - expected).abs().mean() < 0.02 * expected.std()
    assert str(llm.stored) == "stored as AWQ of 4 bits: 14 weights kept as uint4 in groups of 64"


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"bits": 3}, "bits is 3, expected 2, 4 or 8"),
        ({"group_size": 0}, "group_size is 0, expected an int >= 1, or -1"),
        ({"dynamic": {"-:.*down.*": {}}}, "dynamic is {'-:.*down.*': {}}, expected {}"),
        ({"rotation": "hadamard"}, "rotation is 'hadamard', and no reader knows the key"),
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', expected 'gptq' or 'gptq_v2'"),
    ],
)
def test_settings_that_are_not_understood_are_refused_by_name(
    tmp_path: Path, changes: dict[str, object], problem: str
) -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, **changes}
    write(tmp_path, llama(), lambda name, weight: ({name: weight}, weight), settings)
    with pytest.raises(LoadError) as caught:
        nn.LLM.load(tmp_path)
    assert str(caught.value) == (
        f"config.json: quantization_config says what is not read\n  {problem}\n  help: load a checkpoint that is not quantised, or take out keys that do not"
        " change what weights stand for"
    )


def test_a_method_that_no_reader_knows_is_refused(tmp_path: Path) -> None:
    write(tmp_path, llama(), lambda name, weight: ({name: weight}, weight), {"quant_method": "hqq"})
    with pytest.raises(LoadError) as caught:
        nn.export_folder(tmp_path)
    assert (
        caught.value.what == "config.json: quantization_config.quant_method is 'hqq', and no reader knows it"
    )
    assert caught.value.details == (
        "known: awq, bitsandbytes, compressed-tensors, fp8, gguf, gptq, modelopt, mxfp4, torchao",
    )
