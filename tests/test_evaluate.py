# SPDX-License-Identifier: Apache-2.0
"""`nnfront eval` and `nn.evaluate` on the shipped checkpoint, against transformers over the same windows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
from few_of import few_of

import nnfront as nn
from nnfront.cli import main
from nnfront.errors import RunError

FOLDER = Path(__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m"
TEXT = (FOLDER / "heldout.txt").read_text(encoding="utf-8")[:3000]


@pytest.fixture(scope="module")
def llm() -> nn.LLM:
    return nn.LLM.load(FOLDER, dtype="float32")


def theirs(window: int, stride: int) -> tuple[float, float]:
    """Bits per byte and perplexity by transformers, every token predicted by the first window that reaches it."""
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    total, count, end = 0.0, 0, 1
    for begin in range(0, ids.shape[1], stride):
        stop = min(begin + window, ids.shape[1])
        labels = ids[:, begin:stop].clone()
        labels[:, : end - begin] = -100
        with torch.no_grad():
            logits = model(ids[:, begin:stop]).logits
        loss = torch.nn.functional.cross_entropy(
            logits[0, :-1].double(), labels[0, 1:], reduction="sum", ignore_index=-100
        )
        total, count, end = total + float(loss), count + int((labels[0, 1:] >= 0).sum()), stop
        if stop == ids.shape[1]:
            break
    size = len(tokenizer.decode(ids[0, 1:], skip_special_tokens=True).encode())
    return total / math.log(2) / size, math.exp(total / count)


@pytest.mark.parametrize(("window", "stride"), few_of([(64, 32), (100, 7), (96, 95)]))
def test_windows_give_the_numbers_of_transformers(llm: nn.LLM, window: int, stride: int) -> None:
    found = nn.evaluate(llm, TEXT, window, stride)
    bits, perplexity = theirs(window, stride)
    assert found.bits_per_byte == pytest.approx(bits, abs=5e-5)
    assert found.perplexity == pytest.approx(perplexity, rel=1e-4)
    assert found.predicted == found.tokens - 1


def test_the_command_prints_the_same_as_json_and_as_text(
    llm: nn.LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    command = ["eval", str(FOLDER), "--text", str(file), "--dtype", "float32", "--window", "64"]
    assert main([*command, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    found = nn.evaluate(llm, TEXT, 64)
    assert (said["bits_per_byte"], said["stride"]) == (found.bits_per_byte, 32)
    assert main(command) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"bits per byte  {found.bits_per_byte:.4f}"


@pytest.mark.parametrize(
    ("window", "stride", "what"),
    [
        (1, None, "window is 1, expected an int from 2 to 512"),
        (513, None, "window is 513, expected an int from 2 to 512"),
        (64, 64, "stride is 64, expected an int from 1 to 63"),
        (64, 0, "stride is 0, expected an int from 1 to 63"),
    ],
)
def test_windows_out_of_range_are_refused(llm: nn.LLM, window: int, stride: int | None, what: str) -> None:
    assert llm.context == 512
    with pytest.raises(RunError) as caught:
        nn.evaluate(llm, TEXT, window, stride)
    assert caught.value.what == what


def test_a_text_without_two_tokens_and_files_that_are_none_are_refused(
    llm: nn.LLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RunError, match="the text has 0 tokens, at least 2 are needed"):
        nn.evaluate(llm, "")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    for name, said in (
        ("none", "cannot read the text"),
        ("latin", "is not a text in UTF-8: byte 3 is wrong"),
    ):
        assert main(["eval", str(FOLDER), "--text", str(tmp_path / name)]) == 1
        assert said in capsys.readouterr().err
