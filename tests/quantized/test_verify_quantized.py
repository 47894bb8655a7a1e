# SPDX-License-Identifier: Apache-2.0
"""`nnfront verify` of quantised folders: equal to transformers on the weights that they stand for, or where not and whose fault it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization.utils import calculate_qparams
from folders import llama, write
from test_compressed_tensors import FP8, INT4, config, least_and_most
from test_gptq_awq import quantized, words

import nnfront as nn
from nnfront.backends.cpu import quantized_pieces
from nnfront.cli import main
from nnfront.llm.dequantised import BY_THEM, BY_US

LLAMA = Path(__file__).parents[1] / "models" / "explicit_llama.py"
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1}
LAYER = "model.layers.0"


def gguf_file(folder: Path) -> Path:
    gguf_files.write(folder / "m.gguf", llama(**SIZES), types={"down": "Q4_K", "weight": "Q8_0"})
    return folder / "m.gguf"


def gguf_parts(folder: Path) -> Path:
    gguf_files.write(folder / "m.gguf", llama(**SIZES), types="Q4_0", tensors_each=5)
    return folder


def gptq_folder(folder: Path) -> Path:
    def store(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        groups = torch.arange(weight.shape[1]) // 32
        q, zeros, scales, dense = quantized(weight, 4, groups)
        stored = {
            "qweight": words(q, 4).T,
            "qzeros": words(zeros.T, 4),
            "scales": scales.T.half(),
            "g_idx": groups.to(torch.int32),
        }
        return {name.removesuffix("weight") + key: tensor for key, tensor in stored.items()}, dense

    said = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
    write(folder, llama(num_hidden_layers=1), store, {**said, "checkpoint_format": "gptq_v2"})
    return folder


def compressed(format: str, weights: dict[str, Any]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        scheme, said = config(format, weights)
        args, compressor = scheme.weights, BaseCompressor.get_value_from_registry(format)

        def store(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
            scale, zero = calculate_qparams(*least_and_most(weight, args), args)
            state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero}
            stored = compressor.compress(state, scheme)
            base = name.removesuffix("weight")
            return {f"{base}{key}": t for key, t in stored.items()}, compressor.decompress(stored, scheme)[
                "weight"
            ]

        write(folder, llama(num_hidden_layers=1), store, said)
        return folder

    return make  # fmt: skip


@pytest.mark.parametrize(
    ("make", "kept", "reference"),
    [
        (gguf_file, "GGUF's Q8_0: 8 weights kept as int8 in groups of 32", BY_THEM),
        (gguf_parts, "GGUF's Q4_0: 9 weights kept as int4", BY_US),
        (gptq_folder, "GPTQ of 4 bits: 7 weights kept as uint4", BY_US),
        (compressed("pack-quantized", INT4), "compressed-tensors of 4 bits: 7 weights kept as int4", BY_US),
        (compressed("float-quantized", FP8), "float8: 7 weights kept as fp8", BY_US),
    ],
    ids=["GGUF", "GGUF in parts", "GPTQ", "int4", "fp8"],
)
def test_a_quantised_model_equals_transformers_on_what_it_stands_for(
    make: Callable[[Path], Path], kept: str, reference: str, tmp_path: Path
) -> None:
    found = nn.verify(make(tmp_path), LLAMA)
    assert found.fault is None, str(found)
    assert found.eager < 1e-5
    assert kept in found.stored
    assert found.stored.endswith(reference)
    assert {f"{LAYER}.self_attn.o_proj", "model.norm", "lm_head"} <= set(found.compared)


def test_a_mistake_of_the_model_file_is_named_all_the_same(tmp_path: Path) -> None:
    text = LLAMA.read_text(encoding="utf-8")
    right = "[self.gate_proj.weight, self.up_proj.weight]"
    assert text.count(right) == 1
    mistaken = tmp_path / "mistaken.py"
    mistaken.write_text(text.replace(right, "[self.up_proj.weight, self.gate_proj.weight]"), encoding="utf-8")
    (tmp_path / "folder").mkdir()
    found = nn.verify(gptq_folder(tmp_path / "folder"), mistaken)
    assert found.fault is not None
    assert found.fault.path == f"{LAYER}.mlp"


def test_a_mistake_of_the_reader_shows_where_transformers_reads_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        sys.modules["nnfront.quantized.gguf"], "INTERLEAVED", ()
    )  # rows of q and k stay in pairs
    found = nn.verify(gguf_file(tmp_path))
    assert found.fault is not None
    assert found.fault.path.startswith(f"{LAYER}.self_attn")


def test_a_mistake_of_a_kernel_is_one_of_what_is_compiled_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = quantized_pieces.dequantized
    monkeypatch.setattr(quantized_pieces, "dequantized", lambda *args: right(*args) * 1.01)
    found = nn.verify(gptq_folder(tmp_path), LLAMA)
    assert found.eager < 1e-5
    assert found.fault is not None
    assert found.fault.details == ("only what is compiled differs",)


def test_the_command_says_what_is_kept_and_who_dequantised(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(gguf_parts(tmp_path))]) == 0
    out = capsys.readouterr().out
    assert out.startswith("stored as GGUF's Q4_0: 9 weights kept as int4;")
    assert f"{BY_US}\n" in out
    assert "equal to transformers" in out
