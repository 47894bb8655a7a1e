# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors' folders, against the library: it compresses the weights, and says what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import (
    BaseCompressor,
    pack_to_int32,
    unpack_fp4_from_uint8,
    unpack_from_int32,
)
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from few_of import few_of
from folders import agrees, kinds, llama, write

import nnfront as nn
from nnfront.errors import LoadError


def config(format: str, weights: dict[str, Any]) -> tuple[QuantizationScheme, dict[str, Any]]:
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    said = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        format=format,
        quantization_status="compressed",
    )
    return scheme, said.model_dump(mode="json", exclude_none=False)


def least_and_most(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each group that has a scale of its own."""
    outputs, inputs = weight.shape
    match str(args.strategy):
        case "tensor":
            groups = weight.reshape(1, -1)
            return groups.amin(1), groups.amax(1)
        case "channel":
            return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        case "block":
            rows, columns = args.block_structure
            groups = weight.reshape(outputs // rows, rows, inputs // columns, columns)
            return groups.amin((1, 3)), groups.amax((1, 3))
    groups = weight.reshape(outputs, -1, args.group_size)
    return groups.amin(2), groups.amax(2)


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True}

CASES = {
    "int4": ("pack-quantized", INT4, "int4"),
    "int4 with zero points": ("pack-quantized", {**INT4, "symmetric": False, "group_size": 64}, "uint4 in groups of 64"),
    "int4 for outputs": ("pack-quantized", {**INT4, "strategy": "channel", "group_size": None}, "int4 with one scale for each output"),
    "int8 in words": ("pack-quantized", {**INT4, "num_bits": 8}, "int8 in groups of 32"),
    "int8": ("int-quantized", INT8, "int8"),
    "int8 for all": ("int-quantized", {**INT8, "strategy": "tensor"}, "int8"),
    "int8 in groups": ("int-quantized", {**INT8, "strategy": "group", "group_size": 64}, "int8 in groups of 64"),
    "int8 with zero points": ("int-quantized", {**INT8, "symmetric": False}, "int8 with zero points"),
    "fp8": ("float-quantized", FP8, "fp8"),
    "fp8 for all": ("float-quantized", {**FP8, "strategy": "tensor"}, "fp8"),
    "fp8 in blocks": ("float-quantized", {**FP8, "strategy": "block", "block_structure": [64, 32]}, "float32"),
    "nvfp4": ("nvfp4-pack-quantized", NVFP4, "nvfp4"),
    "mxfp4": ("mxfp4-pack-quantized", {**MXFP4, "scale_dtype": "torch.uint8"}, "mxfp4"),
}  # fmt: skip


@pytest.mark.parametrize(("format", "weights", "kept"), few_of(CASES.values(), 6), ids=CASES)
def test_weights_are_what_the_library_makes_of_them(
    tmp_path: Path, format: str, weights: dict[str, Any], kept: str
) -> None:
    scheme, said = config(format, weights)
    args, compressor = scheme.weights, BaseCompressor.get_value_from_registry(format)

    def store(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        given: dict[str, Any] = {}
        if format.startswith("nvfp4"):
            given["global_scale"] = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
        scale, zero = calculate_qparams(*least_and_most(weight, args), args, **given)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
        state |= {f"weight_{key}": value for key, value in given.items()}
        stored = compressor.compress(state, scheme)
        dense = compressor.decompress(stored, scheme)["weight"]
        if "nvfp4" in format:  # which the library multiplies in bfloat16
            numbers = unpack_fp4_from_uint8(stored["weight_packed"], *weight.shape, dtype=torch.float32)
            scale = stored["weight_scale"].float() / given["global_scale"]
            dense = numbers * scale.repeat_interleave(16, 1)
        base = name.removesuffix("weight")
        return {f"{base}{key}": tensor for key, tensor in stored.items()}, dense.float()

    model = write(tmp_path, llama(), store, said)
    assert kinds(agrees(tmp_path, model)) == {kept: 14}


def test_scales_of_16_bits_stay_in_products_of_these_and_are_widened_in_others(tmp_path: Path) -> None:
    scheme, said = config("pack-quantized", INT4)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    dense: dict[str, torch.Tensor] = {}

    def store(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        scale, _ = calculate_qparams(*least_and_most(weight, scheme.weights), scheme.weights)
        stored = compressor.compress({"weight": weight, "weight_scale": scale.to(torch.bfloat16)}, scheme)
        made = compressor.decompress({**stored, "weight_scale": scale.to(torch.bfloat16).float()}, scheme)
        base, dense[name] = name.removesuffix("weight"), made["weight"].float()
        return {f"{base}{key}": tensor for key, tensor in stored.items()}, dense[name]

    model = write(tmp_path, llama(), store, said, dtype="bfloat16")
    llm = nn.LLM.load(tmp_path)
    assert kinds(llm) == {"int4": 14}
    assert {t.dtype for n, t in llm.session.weights.items() if ".scales" in n} == {torch.bfloat16}
    for name, parameter in model.named_parameters():
        parameter.data = dense.get(name, parameter.data)
    assert kinds(agrees(tmp_path, model, dtype="float32")) == {"int4": 14}
    half = nn.LLM.load(tmp_path, dtype="float16")
    assert str(half.stored) == "stored as compressed-tensors of 4 bits: 14 weights kept as int4"
    assert {t.dtype for n, t in half.session.weights.items() if ".scales" in n} == {torch.float32}


def test_groups_of_inputs_in_the_order_of_activations_are_dequantised(tmp_path: Path) -> None:
    scheme, said = config("pack-quantized", INT4)
    said["config_groups"]["group_0"]["weights"]["actorder"] = "group"
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")

    def store(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        order, base = torch.randperm(weight.shape[1]), name.removesuffix("weight")
        back, ordered = torch.argsort(order), weight[:, order]
        scale, _ = calculate_qparams(*least_and_most(ordered, scheme.weights), scheme.weights)
        stored = compressor.compress({"weight": ordered, "weight_scale": scale}, scheme)
        dense = compressor.decompress(stored, scheme)["weight"]
        numbers = unpack_from_int32(stored["weight_packed"], 4, weight.shape)
        stored["weight_packed"] = pack_to_int32(numbers[:, back].contiguous(), 4)
        stored["weight_g_idx"] = (torch.arange(weight.shape[1], dtype=torch.int32) // 32)[back]
        return {f"{base}{key}": tensor for key, tensor in stored.items()}, dense[:, back]

    model = write(tmp_path, llama(), store, said)
    assert kinds(agrees(tmp_path, model)) == {"float32": 14}


def test_each_module_has_the_scheme_of_its_group(tmp_path: Path) -> None:
    schemes = {
        "pack-quantized": config("pack-quantized", INT4),
        "int-quantized": config("int-quantized", INT8),
    }

    def store(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        if "o_proj" in name:
            return {name: weight}, weight
        format = "int-quantized" if "down_proj" in name else "pack-quantized"
        scheme, compressor = schemes[format][0], BaseCompressor.get_value_from_registry(format)
        scale, zero = calculate_qparams(*least_and_most(weight, scheme.weights), scheme.weights)
        stored = compressor.compress(
            {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}, scheme
        )
        base = name.removesuffix("weight")
        return {f"{base}{key}": t for key, t in stored.items()}, compressor.decompress(stored, scheme)[
            "weight"
        ]

    said = schemes["pack-quantized"][1]
    other = schemes["int-quantized"][1]["config_groups"]["group_0"]
    said["config_groups"]["group_0"]["format"] = "pack-quantized"
    said["config_groups"]["group_1"] = {**other, "targets": ["re:.*down_proj$"], "format": "int-quantized"}
    said["format"] = "mixed-precision"
    model = write(tmp_path, llama(), store, said)
    assert kinds(agrees(tmp_path, model)) == {"int4": 10, "int8": 2}


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda said: said.update(transform_config={"config_groups": {}, "r": 1}), "transform_config is {'config_groups': {}, 'r': 1}, expected {}"),
        (lambda said: said["config_groups"]["group_0"]["weights"].update(num_bits=6), "num_bits is 6, expected 4 or 8"),
        (lambda said: said.update(sparsity_config={"format": "sparse-24-bitmask"}), "format is 'sparse-24-bitmask', expected 'dense'"),
        (lambda said: said["config_groups"]["group_0"]["weights"].update(rotation=1), "rotation is 1, and no reader knows the key"),
    ],
    ids=["transforms", "bits", "sparsity", "unknown"],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, change: Any, problem: str) -> None:
    _, said = config("pack-quantized", INT4)
    change(said)
    write(tmp_path, llama(), lambda name, weight: ({name: weight}, weight), said)
    with pytest.raises(LoadError) as caught:
        nn.export_folder(tmp_path)
    assert caught.value.details == (problem,)
