# SPDX-License-Identifier: Apache-2.0
"""`verify`, `eval` and `explain` of a folder of every shipped model type, as transformers saves it: each does its work, or says in an error of ours why not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers
from configurations import TOKENS, configurations, kind_of, with_random_weights
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig

from nnfront.cli import main

CLASSES: dict[str, Any] = {
    "encoder": transformers.AutoModel,
    "decoder": transformers.AutoModelForCausalLM,
    "encoder-decoder": transformers.AutoModelForSeq2SeqLM,
}
OTHERS: dict[str, Any] = {
    "gemma3": transformers.AutoModelForImageTextToText,
    "whisper": transformers.AutoModelForSpeechSeq2Seq,
}
FIRST = [each for each in configurations(lambda name: True) if not each.marks]
ALWAYS = ("bert", "gemma3", "llama", "mamba2", "qwen3_next", "t5", "whisper")


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        pytest.param(
            *each.values,
            id=str(each.values[0]),
            marks=[] if each.values[0] in ALWAYS else [pytest.mark.matrix],
        )
        for each in FIRST
    ],
)
def test_commands_take_every_model(
    model_type: str, sizes: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = kind_of(model_type)
    config = AutoConfig.for_model(model_type, **sizes)
    made = OTHERS.get(model_type, CLASSES[kind]).from_config(config, attn_implementation="eager")
    with_random_weights(made).save_pretrained(tmp_path)
    words = Tokenizer(models.WordLevel({f"a{i}": i for i in range(TOKENS)}, unk_token="a0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # type: ignore[assignment]
    words.save(str(tmp_path / "tokenizer.json"))
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"a{i * 7 % TOKENS}" for i in range(40)))

    capsys.readouterr()  # how many files transformers has written
    assert main(["explain", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("method ")
    assert not said.err
    assert main(["verify", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert said.out.endswith("equal to transformers\n")
    continues = kind == "decoder"
    assert main(["eval", str(tmp_path), "--text", str(text), "--window", "16"]) == (0 if continues else 1)
    said = capsys.readouterr()
    if continues:
        assert "39 of 40 tokens predicted" in said.out
    else:
        assert said.err.startswith("error: ")
        assert f"{tmp_path} holds no language model" in said.err
