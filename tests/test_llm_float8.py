# SPDX-License-Identifier: Apache-2.0
"""A language model with float8 weights, from a folder, from an artefact, and from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import nnfront as nn
from nnfront.cli import main

FOLDER = Path(__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m"


@pytest.fixture(scope="module")
def quantized() -> nn.LLM:
    return nn.LLM.load(FOLDER, quant="fp8")


def loss(llm: nn.LLM, ids: torch.Tensor) -> float:
    return float(torch.nn.functional.cross_entropy(llm.logits(ids)[0, :-1], ids[0, 1:]))


def test_text_is_as_likely_as_before(quantized: nn.LLM) -> None:
    text = (FOLDER / "heldout.txt").read_text(encoding="utf-8")[:6000]
    ids = torch.tensor(quantized.tokenizer.encode(text))[None, :512]
    # 3.9200 against 3.9194 here.
    assert abs(loss(quantized, ids) - loss(nn.LLM.load(FOLDER), ids)) < 0.005


def test_products_are_stored_in_8_bits_and_nothing_else_is(quantized: nn.LLM) -> None:
    held = quantized.session.weights
    codes = {name: t for name, t in held.items() if t.dtype == torch.float8_e4m3fn}
    others = {name: t for name, t in held.items() if name not in codes}
    layers = quantized.config.num_hidden_layers
    assert (
        len(codes) == 4 * layers + 1
    )  # q, k and v are one, gate and up are one, and the embedding is the head
    assert {t.dtype for name, t in others.items() if not name.endswith(".scales")} == {torch.bfloat16}
    assert {t.dtype for name, t in others.items() if name.endswith(".scales")} == {torch.float32}


def test_an_artefact_from_the_command_line_generates_the_same(
    quantized: nn.LLM, tmp_path: Path, capsys: Any
) -> None:
    place = tmp_path / "out"
    assert main(["export", str(FOLDER), "-o", str(place), "--quant", "fp8"]) == 0
    capsys.readouterr()
    again = nn.LLM.load(place)
    assert torch.float8_e4m3fn in {t.dtype for t in again.session.weights.values()}
    ids = torch.tensor(quantized.tokenizer.encode("def main():\n"))[None]
    assert torch.equal(
        again.generate_ids(ids, max_new_tokens=16), quantized.generate_ids(ids, max_new_tokens=16)
    )
