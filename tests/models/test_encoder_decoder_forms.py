# SPDX-License-Identifier: Apache-2.0
"""Encoder-decoders from artefacts, with adapters, and with weights, keys and quantised values, against transformers' classes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from configurations import TOKENS
from safetensors.torch import save_file
from test_encoder_decoders import first_sizes, logits_of, reference, sources, with_tokenizer

import nnfront as nn
from nnfront.cli import main
from nnfront.errors import LoadError

KINDS = ("t5", "whisper")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    """Of each kind a folder, and transformers' model."""
    found = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        found[kind] = folder, reference(kind, first_sizes(kind), folder)
        with_tokenizer(folder)
    return found


def greedy(theirs: Any, given: list[torch.Tensor], kind: str) -> list[list[int]]:
    """What transformers writes about each source."""
    return [
        theirs.generate(each[None], max_new_tokens=20, use_cache=False)[0].tolist()[kind == "t5" :]
        for each in given
    ]


ALONE = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "nnfront_models" or name == "nnfront.nn.trace":
            raise ImportError(f"{name} is not to be imported")
sys.meta_path.insert(0, Refuse())
import nnfront
print(nnfront.Seq2Seq.load(sys.argv[1]).generate(sys.argv[2], max_new_tokens=12))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_an_artefact_writes_what_transformers_does(
    kind: str, made: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, theirs = made[kind]
    place = tmp_path / "artefact"
    assert main(["export", str(folder), "-o", str(place)]) == 0
    ours = nn.Seq2Seq.load(place)
    given = sources(kind, ours, (3, 17, 8))
    texts = ours.generate_ids(given, max_new_tokens=20)
    assert [text.tolist() for text in texts] == greedy(theirs, given, kind)
    with pytest.raises(LoadError, match="is an artefact, but of no language model") as caught:
        nn.LLM.load(place)
    assert caught.value.help == "nnfront.Seq2Seq.load(DIR) loads an encoder-decoder"
    with pytest.raises(LoadError, match="is an artefact: its dtype"):
        nn.Seq2Seq.load(place, quant="int8")


def test_an_artefact_needs_no_model_file(
    made: dict[str, tuple[Path, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = made["t5"]
    place = tmp_path / "artefact"
    nn.artefact.export(folder, place)
    text = "a7 a20 a9 a41 a3"
    done = subprocess.run(
        [sys.executable, "-c", ALONE, str(place), text], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == nn.Seq2Seq.load(folder).generate(text, max_new_tokens=12)
    assert main(["run", str(place), "-p", text, "-n", "12"]) == 0
    assert capsys.readouterr().out == done.stdout


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [{"quant": "int8"}, {"kv_quant": "fp8"}, {"cache": "results"}])
def test_other_forms_are_near_to_transformers(
    kind: str, how: dict[str, str], made: dict[str, tuple[Path, Any]], tmp_path: Path
) -> None:
    folder, theirs = made[kind]
    how = {name: str(tmp_path) if name == "cache" else value for name, value in how.items()}
    ours = nn.Seq2Seq.load(folder, **how)  # type: ignore[arg-type]
    source = torch.stack(sources(kind, ours, (21, 21)))
    tokens = torch.randint(0, TOKENS, (2, 9))
    expected = logits_of(theirs, source, tokens)[:, -1:]
    memory, cache = ours._remembered([*source]), ours._empty("cache", batch=2, max_seq=9)
    got = ours.session["prefill"](tokens, memory, cache)
    apart = (got - expected).square().mean().sqrt() / expected.std()
    assert apart < 1e-4 if "cache" in how else 1e-5 < apart < 0.15
    assert (ours.quantized is not None) is ("quant" in how)
    if "kv_quant" in how:
        whole = ours.session.make_cache("cache", batch=2, max_seq=9)
        assert cache.nbytes < whole.nbytes / 2
    if "cache" in how:
        assert nn.Seq2Seq.load(folder, cache=tmp_path).generate_ids([source[0]], 3)[0].shape == (3,)


def test_an_adapter_changes_the_weights(
    made: dict[str, tuple[Path, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(made["t5"][0], tmp_path / "model"))
    theirs = reference("t5", first_sizes("t5"), folder)
    tensors, weights = {}, dict(theirs.named_parameters())
    for layer in ("encoder.block.0.layer.0.SelfAttention.q", "decoder.block.1.layer.1.EncDecAttention.v"):
        weight = weights[f"{layer}.weight"]
        a, b = torch.randn(4, weight.shape[1]), torch.randn(weight.shape[0], 4)
        tensors |= {
            f"base_model.model.{layer}.lora_A.weight": a,
            f"base_model.model.{layer}.lora_B.weight": b,
        }
        with torch.no_grad():
            weight += 2 * b @ a
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file(tensors, adapter / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q", "v"]}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    ours = nn.Seq2Seq.load(folder, lora=[adapter])
    given = sources("t5", ours, (5, 9))
    texts = [text.tolist() for text in ours.generate_ids(given, max_new_tokens=20)]
    assert texts == greedy(theirs, given, "t5")
    flags = ["--lora", str(adapter), "--quant", "int8", "--kv-quant", "fp8", "--cache", str(tmp_path / "c")]
    assert main(["run", str(folder), "-p", "a3 a4", "-n", "3", *flags]) == 0
    assert "quantised: " in capsys.readouterr().err
