# SPDX-License-Identifier: Apache-2.0
"""The checkpoint in the repository is whole, is what its README says it is, and has learned Python."""

from __future__ import annotations

import ast
import gzip
import json
import math
import re
from pathlib import Path

import pytest
import torch
from corpus import END_OF_TEXT, is_held_out
from evaluate import bits_per_byte
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

FOLDER = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"
README = (FOLDER / "README.md").read_text()
HELD_OUT = (FOLDER / "heldout.txt").read_bytes().decode()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """The model is so small that threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_the_folder_is_under_ten_megabytes():
    assert sum(path.stat().st_size for path in FOLDER.rglob("*")) < 10e6


def test_transformers_finds_every_weight_and_no_other():
    model, info = AutoModelForCausalLM.from_pretrained(FOLDER, output_loading_info=True)
    assert model.dtype == torch.bfloat16
    assert not any(info.values()), info
    size = sum(p.numel() for p in model.parameters())  # a tied weight counts once
    assert f"{size:,} parameters" in README
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_special_tokens_agree_in_all_files(tokenizer: Tokenizer):
    config = json.loads((FOLDER / "config.json").read_text())
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    auto = AutoTokenizer.from_pretrained(FOLDER)
    end = tokenizer.token_to_id(END_OF_TEXT)
    assert config["bos_token_id"] == config["eos_token_id"] == end
    assert generation["bos_token_id"] == generation["eos_token_id"] == end
    assert auto.bos_token_id == auto.eos_token_id == end
    assert config["vocab_size"] == tokenizer.get_vocab_size()


def test_held_out_text_round_trips_through_both_tokenizers(tokenizer: Tokenizer):
    ids = tokenizer.encode(HELD_OUT).ids
    auto = AutoTokenizer.from_pretrained(FOLDER)
    assert tokenizer.decode(ids) == HELD_OUT
    assert auto(HELD_OUT)["input_ids"] == ids
    assert auto.decode(ids) == HELD_OUT


@given(st.text())
@settings(max_examples=30, deadline=None)
def test_any_text_round_trips(tokenizer: Tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_a_line_end_and_its_indentation_are_one_token(tokenizer: Tokenizer, depth: int):
    indentation = "\n" + 4 * depth * " "
    assert len(tokenizer.encode(indentation).ids) == 1
    assert (
        tokenizer.encode(f"x{indentation}return").tokens[1:]
        == tokenizer.encode(f"{indentation}return").tokens
    )


def test_the_held_out_sample_is_made_of_held_out_files():
    names = re.search(r"`heldout\.txt` is ((?:`\S+`,?\s+)+)", README)
    assert names is not None
    assert all(is_held_out(name) for name in re.findall(r"`(\S+)`", names[1]))


@pytest.mark.parametrize("context", [8, 32])
def test_bits_per_byte_is_what_predicting_token_by_token_costs(
    model: LlamaForCausalLM, tokenizer: Tokenizer, context: int
):
    text = HELD_OUT[:150]
    ids = [0, *tokenizer.encode(text).ids]
    assert len(ids) > context + 1
    bits, start = 0.0, 0
    for i in range(1, len(ids)):
        if (
            i - start > context
        ):  # the window is full: it moves on and keeps half a context and the token before it
            start = i - context // 2 - 1
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids[start:i]])).logits[0, -1]
        bits -= logits.log_softmax(-1)[ids[i]].item() / math.log(2)
    assert bits_per_byte(model, tokenizer, [text], context) == pytest.approx(
        bits / len(text.encode()), rel=1e-4
    )


@pytest.mark.matrix  # seconds of a whole model
def test_the_model_beats_gzip_and_meets_the_figure_of_its_readme(
    model: LlamaForCausalLM, tokenizer: Tokenizer
):
    row = re.search(r"^\| pylib-3m +\| +[\d.]+ +\| +([\d.]+) +\|$", README, re.MULTILINE)
    assert row is not None
    bits = bits_per_byte(model, tokenizer, [HELD_OUT], model.config.max_position_embeddings)
    data = HELD_OUT.encode()
    assert bits < 8 * len(gzip.compress(data, 9)) / len(data)
    assert bits == pytest.approx(float(row[1]), abs=0.005)


def test_greedy_text_after_a_function_header_is_a_function_body(
    model: LlamaForCausalLM, tokenizer: Tokenizer
):
    header = "def read_lines(path):"
    ids = torch.tensor([[0, *tokenizer.encode(header).ids]])
    written = model.generate(ids, max_new_tokens=120, do_sample=False)[0, 1:].tolist()
    body, rest = re.split(r"\n(?=\S)", tokenizer.decode(written).removeprefix(header), maxsplit=1)
    (function,) = ast.parse(header + body).body
    assert len(function.body) > 1
    assert rest
