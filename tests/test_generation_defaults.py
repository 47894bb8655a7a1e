# SPDX-License-Identifier: Apache-2.0
"""What `generate` does that is told nothing, or nonsense; and what `--quant` says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import nnfront as nn
from nnfront.cli import main
from nnfront.engine.params import Sampling
from nnfront.errors import LoadError, LowerError, RunError

FOLDER = Path(__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m"
PROMPT = "def main():\n"


@pytest.fixture(scope="module")
def llm() -> nn.LLM:
    return nn.LLM.load(FOLDER)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(FOLDER, tmp_path / "model"))


def say(folder: Path, **said: Any) -> Path:
    """Write a generation_config.json."""
    (folder / "generation_config.json").write_text(json.dumps(said))
    return folder


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({}, Sampling()),
        ({"do_sample": False, "temperature": 0.7}, Sampling()),
        ({"do_sample": True}, Sampling(1.0)),
        ({"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8}, Sampling(0.7, 20, 0.8)),
        ({"do_sample": True, "top_k": 0, "min_p": 0.1, "top_p": None}, Sampling(1.0, min_p=0.1)),
        (
            {"repetition_penalty": 1.1, "eos_token_id": [1, 2], "max_length": 20},
            Sampling(repetition_penalty=1.1),
        ),
    ],
)
def test_the_folder_says_how_tokens_are_chosen(
    said: dict[str, Any], expected: Sampling, folder: Path
) -> None:
    llm = nn.LLM.load(say(folder, **said))
    assert llm.sampling == expected
    llm.save(folder.parent / "artefact")
    assert nn.LLM.load(folder.parent / "artefact").sampling == expected


def test_a_folder_that_says_nothing_takes_the_likeliest_token(llm: nn.LLM, folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    assert nn.LLM.load(folder).generate(PROMPT, 16) == llm.generate(PROMPT, 16, temperature=0.0)


def test_generate_draws_as_the_folder_says_and_arguments_win(
    llm: nn.LLM, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drawing = nn.LLM.load(say(folder, do_sample=True, temperature=0.9, top_p=0.8, repetition_penalty=1.3))
    expected = llm.generate(PROMPT, 16, 0.9, top_p=0.8, repetition_penalty=1.3, seed=3)
    assert drawing.generate(PROMPT, 16, seed=3) == expected
    assert main(["run", str(folder), "-p", PROMPT, "-n", "16", "--seed", "3"]) == 0
    assert capsys.readouterr().out == PROMPT + expected + "\n"
    greedy = drawing.generate(PROMPT, 16, temperature=0.0, repetition_penalty=1.0)
    assert greedy == llm.generate(PROMPT, 16)
    wide = drawing.generate(PROMPT, 16, temperature=2.0, top_p=1.0, repetition_penalty=1.0, seed=3)
    assert wide == llm.generate(PROMPT, 16, temperature=2.0, seed=3)


def test_token_ids_are_continued_greedily_whatever_the_folder_says(llm: nn.LLM, folder: Path) -> None:
    drawing = nn.LLM.load(say(folder, do_sample=True, temperature=5.0))
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(drawing.generate_ids(ids, 12), llm.generate_ids(ids, 12))


def test_several_end_tokens_end_a_text(llm: nn.LLM, folder: Path) -> None:
    ids = torch.tensor([llm.tokenizer.encode(PROMPT)])
    tokens = llm.generate_ids(ids, 16)[0].tolist()
    ends = [tokens[9], tokens[6]]
    first = min(tokens.index(end) for end in ends)
    ending = nn.LLM.load(say(folder, eos_token_id=ends))
    assert ending.generate(PROMPT, 16) == llm.tokenizer.decode(tokens[:first])


def test_parameters_of_the_folder_that_cannot_be_are_refused_at_load(folder: Path) -> None:
    with pytest.raises(LoadError) as caught:
        nn.LLM.load(say(folder, do_sample=True, temperature="warm", top_p=7))
    assert str(caught.value) == (
        f"{folder / 'generation_config.json'}: the sampling parameters are out of range\n"
        "  temperature is 'warm', expected a number >= 0\n"
        "  top_p is 7, expected a number in (0, 1]"
    )


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.generate(PROMPT, stop=5), "stop is 5, expected a non-empty text or several"),
        (
            lambda m: m.generate(PROMPT, stop=["x", 5]),
            "stop is ['x', 5], expected a non-empty text or several",
        ),
        (lambda m: m.generate(PROMPT, max_new_tokens="4"), "max_new_tokens is '4', expected an int >= 1"),
        (
            lambda m: m.generate(PROMPT, seed="x"),
            "the sampling parameters are out of range\n  seed is 'x', expected an int",
        ),
        (
            lambda m: m.generate_ids(5),
            "the prompts are of type 'int', expected int64[batch, seq] or a list of 1-D integer tensors",
        ),
        (lambda m: m.generate_ids("text"), "prompt 0 is not a 1-D integer tensor"),
        (
            lambda m: m.generate_ids(torch.tensor([1, 2])),
            "the prompts are int64[2], expected int64[batch, seq] or a list of 1-D integer tensors",
        ),
        (lambda m: m.generate_ids([[1, 2]]), "the prompt is not a 1-D integer tensor"),
        (
            lambda m: m.generate_ids(torch.tensor([[1]]), eos_token_id="x"),
            "eos_token_id is 'x', expected a token or several",
        ),
        (
            lambda m: m.generate_ids(torch.tensor([[1]]), eos_token_id=1.5),
            "eos_token_id is 1.5, expected a token or several",
        ),
        (lambda m: m.logits("text"), "the tokens are of type 'str', expected int64[batch, seq]"),
        (lambda m: m.logits(torch.tensor([1, 2])), "the tokens are int64[2], expected int64[batch, seq]"),
        (
            lambda m: m.logits(torch.tensor([[0.5]])),
            "the tokens are float32[1, 1], expected int64[batch, seq]",
        ),
    ],
)
def test_arguments_of_a_wrong_type_are_refused(llm: nn.LLM, call: Any, message: str) -> None:
    with pytest.raises(RunError) as caught:
        call(llm)
    assert str(caught.value).startswith(message)


def test_a_kernel_for_a_mistyped_op_is_refused_with_the_nearest() -> None:
    with pytest.raises(LowerError) as caught:
        nn.register_kernel("rms_norn", "mine", lambda run: lambda x: x)
    assert str(caught.value) == (
        "there is no op 'rms_norn' to register a kernel for\n"
        "  help: did you mean 'rms_norm'? If it is an external function or a region of yours, give it another name"
    )


def test_what_is_quantised_is_said(llm: nn.LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "quantised: 17 weights to int8, 6.82 MB to 3.43 MB; as they are: 4.61 kB of vectors;"
        " all weights: 6.82 MB to 3.44 MB"
    )
    assert llm.quantized is None
    assert str(nn.LLM.load(FOLDER, quant="int8").quantized) == line
    assert main(["run", str(FOLDER), "-p", "x", "-n", "1", "--quant", "int8"]) == 0
    assert capsys.readouterr().err.startswith(line + "\n")
    assert main(["export", str(FOLDER), "-o", str(tmp_path / "out"), "--quant", "int8"]) == 0
    assert capsys.readouterr().err.startswith(line + "\n")


def test_what_weights_are_stored_in_can_be_said_by_module_and_all_of_it_reported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = ["run", str(FOLDER), "-p", "x", "-n", "1"]
    rules = ["--keep", "*.o_proj", "--quant-rule", "model.layers.0=int4:64", "--quant-head", "fp8"]
    assert main([*said, "--quant", "int8", *rules, "--quant-report"]) == 0
    lines = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert ["model.embed_tokens.weight", "embedding", "and", "head", "fp8", "2097152", "1064960"] in lines
    assert ["model.layers.0.self_attn.o_proj.weight", "product", "int4:64", "131072", "34816"] in lines
    assert ["model.layers.1.mlp.down_proj.weight", "product", "int8", "262144", "131584"] in lines
    assert [
        "model.layers.1.self_attn.o_proj.weight",
        "product",
        "as",
        "it",
        "is",
        "131072",
        "131072",
        "kept",
        "by",
        "'*.o_proj'",
    ] in lines
    for wrong, error in (
        (
            ["--keep", "x"],
            "it is said how weights are to be quantised, but not to what\n  help: add --quant int8, or leave it out",
        ),
        (
            ["--quant", "int8", "--quant-rule", "x"],
            "--quant-rule x is no rule\n  help: write the modules and the format: --quant-rule '*.o_proj=int8'",
        ),
    ):
        assert main([*said, *wrong]) == 1
        assert capsys.readouterr().err == f"error: {error}\n"
