# SPDX-License-Identifier: Apache-2.0
"""torchao's folders in safetensors, against an independent reading of their parts: (qdata - zero_point) * scale."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from folders import agrees, kinds, llama, write

import nnfront as nn
from nnfront.errors import LoadError

SETTINGS = {
    "quant_method": "torchao",
    "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}},
    "modules_to_not_convert": ["lm_head"],
}


def parts(name: str, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    module, _, own = name.rpartition(".")
    return {f"{module}._{own}_{part}": tensor for part, tensor in tensors.items()}


@pytest.mark.parametrize(
    ("group", "has_zeros", "kept"),
    [
        (None, False, "int8"),
        (None, True, "int8 with zero points"),
        (32, True, "int8 in groups of 32 with zero points"),
        (64, False, "int8 in groups of 64"),
    ],
)
def test_int8(tmp_path: Path, group: int | None, has_zeros: bool, kept: str) -> None:
    def store(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        groups = weight.reshape(len(weight), -1, group or weight.shape[1])
        scale = groups.abs().amax(2) / 100
        zeros = torch.randint(-20, 20, scale.shape) * has_zeros
        q = (groups / scale[..., None]).round() + zeros[..., None]
        dense = ((q - zeros[..., None]) * scale[..., None]).reshape(weight.shape)
        more = {"zero_point": zeros.to(torch.int8)} if has_zeros else {}
        return parts(name, qdata=q.reshape(weight.shape).to(torch.int8), scale=scale, **more), dense

    assert kinds(agrees(tmp_path, write(tmp_path, llama(), store, SETTINGS))) == {kept: 14}


@pytest.mark.parametrize("is_one", [False, True])
def test_float8(tmp_path: Path, is_one: bool) -> None:
    def store(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        most = weight.abs().max().reshape(1, 1) if is_one else weight.abs().amax(1, keepdim=True)
        q = (weight / most * 448).to(torch.float8_e4m3fn)
        return parts(name, qdata=q, scale=most / 448), q.float() * (most / 448)

    assert kinds(agrees(tmp_path, write(tmp_path, llama(), store, SETTINGS))) == {"fp8": 14}


def test_parts_of_another_kind_are_named(tmp_path: Path) -> None:
    def store(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        packed = torch.zeros(len(weight), weight.shape[1] // 8, dtype=torch.int32)
        return parts(name, qdata=packed, scale=torch.ones(len(weight), 1)), weight

    write(tmp_path, llama(), store, SETTINGS)
    with pytest.raises(LoadError) as caught:
        nn.LLM.load(tmp_path)
    assert "14 missing, 28 unexpected" in caught.value.what
