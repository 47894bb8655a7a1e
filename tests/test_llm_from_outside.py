# SPDX-License-Identifier: Apache-2.0
"""A model folder's numbers, links and tokenizer are somebody else's: what cannot be meant is refused before it costs anything."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from hostile import limits
from transformers import PreTrainedTokenizerFast

import nnfront as nn
from nnfront.cli import main
from nnfront.errors import LoadError, NnfrontError, RunError

SHIPPED = Path(__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m"
NAMES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture(scope="module")
def shipped(tmp_path_factory: Any) -> Path:
    """A copy of the shipped checkpoint, where links to its files can be made."""
    place = Path(tmp_path_factory.mktemp("shipped"))
    for name in NAMES:
        shutil.copy(SHIPPED / name, place / name)
    return place


@pytest.fixture
def folder(shipped: Path, tmp_path: Path) -> Path:
    """The shipped checkpoint, to be spoiled: files are replaced, never written over."""
    (tmp_path / "model").mkdir()
    for name in NAMES:
        os.link(shipped / name, tmp_path / "model" / name)
    return tmp_path / "model"


@pytest.fixture(scope="module")
def llm() -> nn.LLM:
    return nn.LLM.load(SHIPPED)


def change(file: Path, **changes: Any) -> None:
    """Change fields of a JSON file, of this copy of it alone."""
    fields = {**json.loads(file.read_text()), **changes}
    file.unlink()
    file.write_text(json.dumps(fields))


@pytest.mark.parametrize(
    "path", ["meta-llama-Llama-3.1-8B", "n" * 5000, "a\0b", str(SHIPPED / "config.json")]
)
def test_a_path_that_is_no_folder_is_an_error(path: str) -> None:
    for load in (nn.LLM.load, nn.export_folder):
        with pytest.raises(
            LoadError, match=r"is not a folder\n  help: give the path of a Hugging Face folder"
        ):
            load(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 10**18},
        {"num_hidden_layers": 3000},
        {"head_dim": 2**31},
        {"hidden_size": 10**18},
        {"vocab_size": 2**62},
        {"intermediate_size": 10**30},
        {"num_attention_heads": 10**12, "num_key_value_heads": 10**12},
    ],
    ids=str,
)
def test_a_config_of_more_than_the_checkpoint_can_hold_ends_at_once(
    folder: Path, changes: dict[str, int]
) -> None:
    change(folder / "config.json", **changes)
    with limits(), pytest.raises(NnfrontError) as error:
        nn.LLM.load(folder)
    assert error.value.what == "the model is larger than it can be"
    assert error.value.details[0].startswith("it declares more than 1152 parameters, or ")
    assert error.value.help.startswith("look for a number in config.json that is not the checkpoint's")


def test_a_config_that_a_model_file_trips_over_is_an_error_about_the_config(
    folder: Path, tmp_path: Path
) -> None:
    shipped = Path(__file__).parents[1] / "examples" / "models" / "llama.py"
    model_file = tmp_path / "mine.py"
    text = shipped.read_text().replace("model = LlamaModel(config)", "return {}[config.hidden_act]")
    model_file.write_text(text)
    line = next(i for i, row in enumerate(text.splitlines(), 1) if "{}[config.hidden_act]" in row)
    with pytest.raises(LoadError) as error:
        nn.LLM.load(folder, model_file=model_file)
    assert error.value.what == "the model file failed with KeyError: 'silu'"
    assert error.value.where == f"{model_file}:{line}"
    assert isinstance(error.value.__cause__, KeyError)


def test_an_error_shows_no_more_of_a_file_than_can_be_read(folder: Path) -> None:
    for changes in (
        {"model_type": "a" * 100_000},
        {"hidden_act": "a" * 100_000},
        {"a" * 100_000: 1},
        {"vocab_size": ["a" * 100_000]},
        {"eos_token_id": "a" * 100_000},
    ):
        (folder / "config.json").unlink()
        (folder / "config.json").write_text((SHIPPED / "config.json").read_text())
        (folder / "generation_config.json").unlink(missing_ok=True)
        change(folder / "config.json", **changes)
        with pytest.raises(LoadError) as error:
            nn.LLM.load(folder)
        assert len(str(error.value)) < 5000


@pytest.mark.parametrize("eos", [-1, 2**63, 10**30, 1.5, True, "1", [1, "2"], [[1]], {"id": 1}], ids=str)
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_end_tokens_that_are_none_are_refused_before_they_are_saved(
    folder: Path, name: str, eos: Any
) -> None:
    if name == "config.json":
        (folder / "generation_config.json").unlink()
    change(folder / name, eos_token_id=eos)
    with pytest.raises(LoadError) as error:
        nn.LLM.load(folder)
    assert error.value.what == f"{folder}: eos_token_id is {eos!r}, expected a token or a list of them"
    assert error.value.help == "correct it in generation_config.json, or in config.json if there is none"


@pytest.mark.parametrize("token", [-1, 4096, 2**40])
def test_tokens_outside_the_vocabulary_are_refused(llm: nn.LLM, token: int) -> None:
    ids = torch.tensor([[5, token]])
    for call in (
        lambda: llm.logits(ids),
        lambda: llm.generate_ids(ids, max_new_tokens=2),
        lambda: llm.generate_ids([ids[0]], max_new_tokens=2),
    ):
        with pytest.raises(
            RunError, match=r"(the batch|the prompt) holds a token outside the vocabulary of 4096"
        ):
            call()
    assert llm.logits(torch.tensor([[0, 4095]])).shape == (1, 2, 4096)


@pytest.mark.parametrize("ids", [torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool), [[1, 2]]], ids=repr)
def test_what_is_no_tokens_has_no_logits(llm: nn.LLM, ids: Any) -> None:
    with pytest.raises(RunError, match=r"the tokens are .*, expected int64\[batch, seq\]"):
        llm.logits(ids)


def replace_tokenizer(folder: Path, step: Callable[[dict[str, Any]], None]) -> None:
    fields = json.loads((folder / "tokenizer.json").read_text())
    step(fields)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text(json.dumps(fields))


def test_padding_and_truncation_of_a_tokenizer_do_not_change_a_text(folder: Path) -> None:
    """They are how texts were put side by side in training; what a text is made of is what transformers makes of it."""
    text = "def main():\n    return 1\n"
    fast = PreTrainedTokenizerFast(tokenizer_file=str(SHIPPED / "tokenizer.json"))
    padding = {
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "a",
    }
    truncation = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    for size in (64, 2**40):
        replace_tokenizer(
            folder,
            lambda f, n=size: f.update(padding={"strategy": {"Fixed": n}, **padding}, truncation=truncation),
        )
        assert nn.LLM.load(folder).tokenizer.encode(text) == fast(text)["input_ids"]


def test_a_tokenizer_that_panics_is_an_error(folder: Path) -> None:
    replace_tokenizer(
        folder, lambda f: f.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"})
    )
    with pytest.raises(LoadError, match=r"tokenizer\.json is not a tokenizer\n  .*precompiled_charsmap"):
        nn.LLM.load(folder).generate("a")


def test_a_tokenizer_that_makes_endless_texts_is_an_error(folder: Path) -> None:
    double = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
    replace_tokenizer(
        folder, lambda f: f.update(normalizer={"type": "Sequence", "normalizers": [double] * 40})
    )
    with pytest.raises(LoadError, match=r"its steps make texts up to \d+ times as long, 65536 are the most"):
        nn.LLM.load(folder).generate("a")


def test_steps_of_known_tokenizers_are_not_endless(folder: Path) -> None:
    """Those of Llama 2's and T5's, which put in more than others."""
    n, p, d = tokenizers.normalizers, tokenizers.pre_tokenizers, tokenizers.decoders
    made = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="?"))
    made.normalizer = n.Sequence([n.Prepend("▁"), n.Replace(" ", "▁"), n.Replace("``", '"'), n.NFKC()])
    made.pre_tokenizer = p.Sequence([p.WhitespaceSplit(), p.Metaspace()])
    made.decoder = d.Sequence([d.Replace("▁", " "), d.ByteFallback(), d.Fuse(), d.Strip(" ", 1, 0)])
    (folder / "tokenizer.json").unlink()
    made.save(str(folder / "tokenizer.json"))
    assert nn.LLM.load(folder).tokenizer.encode("") == []


@pytest.mark.parametrize("name", ["merges.txt", "tokenizer.json", "special_tokens_map.json"])
def test_an_artefact_takes_no_file_along_that_is_not_the_folders(
    folder: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "secret").write_text("s3cret")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("../secret")
    assert main(["export", str(folder), "-o", str(tmp_path / "out")]) == 1
    assert f"{folder / name} cannot be read\n  it leads out of the folder, to" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_model_in_a_hugging_face_cache_loads_and_is_exported(
    shipped: Path, tmp_path: Path, llm: nn.LLM
) -> None:
    repository = tmp_path / "models--nnfront--pylib-3m"
    snapshot = repository / "snapshots" / "0a1b2c"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for i, name in enumerate(NAMES):
        os.link(shipped / name, repository / "blobs" / f"{i:064x}")
        (snapshot / name).symlink_to(f"../../blobs/{i:064x}")
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(nn.LLM.load(snapshot).logits(ids), llm.logits(ids))
    nn.LLM.load(snapshot).save(tmp_path / "a")
    assert nn.LLM.load(tmp_path / "a").generate("def", 4) == llm.generate("def", 4)


def test_check_says_that_a_file_is_truncated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = (SHIPPED / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(data[:-1000])
    line = f"model.safetensors: the file is truncated: {len(data) - 1000} bytes, but the header describes {len(data)}"
    assert main(["check", str(folder)]) == 1
    assert f"\ncannot be loaded: {line}\n" in capsys.readouterr().out
    assert main(["check", str(folder), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["truncated"] == [line]


def test_check_of_headers_alone_misses_no_data(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = (SHIPPED / "model.safetensors").read_bytes()
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").write_bytes(data[: 8 + struct.unpack("<Q", data[:8])[0]])
    assert main(["check", str(folder)]) == 0
    assert "cannot be loaded" not in capsys.readouterr().out
