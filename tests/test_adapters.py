# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters beside the weights: each text of a batch has its own, and is what PEFT computes of it alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from random_adapter import random_adapter
from test_lora import SHIPPED, VOCAB, adapted, gpt2, llama

import nnfront as nn
from nnfront.cli import main
from nnfront.errors import LoadError, RunError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
]
SETTINGS: dict[str, dict[str, Any]] = {
    "small": {"r": 2, "lora_alpha": 5, "target_modules": ["q_proj", "v_proj", "down_proj"]},
    "stable": {"r": 8, "lora_alpha": 4, "use_rslora": True, "target_modules": "all-linear"},
    "patterns": {
        "r": 3,
        "target_modules": ["k_proj", "up_proj", "lm_head"],
        "rank_pattern": {r"layers\.1\.mlp.up_proj": 5},
        "alpha_pattern": {"k_proj": 9},
    },
}
NAMES = [None, "patterns", "small", "stable", "small"]
IDS = torch.randint(0, VOCAB, (len(NAMES), 7), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str | None, torch.nn.Module]]:
    """A base, adapters of it in folders of their names, and PEFT's models of both, by name."""
    folder = tmp_path_factory.mktemp("adapters")
    made: dict[str | None, torch.nn.Module] = {None: llama()}
    for seed, (name, settings) in enumerate(SETTINGS.items()):
        made[name] = adapted(llama(), folder / name, seed, **settings)
    return folder, made


def loaded(folder: Path, **settings: Any) -> nn.LLM:
    adapters = {name: folder / name / "adapter" for name in SETTINGS}
    return nn.LLM.load(folder / "small" / "base", adapters=adapters, **settings)


def expected(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids).logits


def test_each_row_of_a_batch_is_what_peft_computes_with_its_adapter(models: Any) -> None:
    folder, peft = models
    found = loaded(folder).logits(IDS, adapter=NAMES)
    for row, (ids, name) in enumerate(zip(IDS, NAMES, strict=True)):
        torch.testing.assert_close(found[row], expected(peft[name], ids[None])[0], atol=1e-4, rtol=1e-4)
    assert not torch.allclose(found[1:2], found[2:3], atol=1e-2)


@pytest.mark.parametrize("settings", [{}, {"spec": "ngram:2"}], ids=["plain", "guessed"])
def test_a_text_is_that_of_the_merged_model_whatever_else_is_in_the_batch(
    settings: dict[str, Any], models: Any
) -> None:
    folder, _ = models
    llm = loaded(folder, extends="spec" in settings)
    prompts = [IDS[i, : 3 + i % 3] for i in range(len(NAMES))]
    together = llm.generate_ids(prompts, 9, adapter=NAMES, **settings)
    for prompt, name, found in zip(prompts, NAMES, together, strict=True):
        merged = nn.LLM.load(folder / "small" / "base", lora=[folder / name / "adapter"] if name else [])
        assert found.tolist() == merged.generate_ids([prompt], 9)[0].tolist()
        assert found.tolist() == llm.generate_ids([prompt], 9, adapter=name)[0].tolist()


@pytest.mark.parametrize("quant", ["int8", "int4"])
def test_a_quantised_base_keeps_its_adapters_as_they_are(quant: str, models: Any) -> None:
    folder, _ = models
    llm = loaded(folder, quant=quant)
    base = nn.LLM.load(folder / "small" / "base", quant=quant)
    stacks = {name: weight for name, weight in llm.session.weights.items() if ".lora_" in name}
    assert stacks
    assert all(weight.dtype == torch.float32 for weight in stacks.values())
    torch.testing.assert_close(llm.logits(IDS), base.logits(IDS), atol=1e-5, rtol=1e-4)
    change = llm.logits(IDS, adapter="small") - llm.logits(IDS)
    plain = loaded(folder)
    expected = plain.logits(IDS, adapter="small") - plain.logits(IDS)
    assert (change - expected).norm() < 0.2 * expected.norm()


def test_weights_that_are_stored_turned_have_adapters(tmp_path: Path) -> None:
    """`c_proj` of attention is square: the shapes do not tell."""
    targets = ["attn.c_attn", "attn.c_proj", "mlp.c_proj"]
    model = adapted(gpt2(), tmp_path, target_modules=targets, fan_in_fan_out=True)
    llm = nn.LLM.load(tmp_path / "base", adapters={"one": tmp_path / "adapter"})
    torch.testing.assert_close(llm.logits(IDS, adapter="one"), expected(model, IDS), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(llm.logits(IDS), expected(gpt2(), IDS), atol=1e-4, rtol=1e-4)


def test_adapters_stand_beside_weights_in_which_others_are_merged(models: Any) -> None:
    folder, _ = models
    small, stable = folder / "small" / "adapter", folder / "stable" / "adapter"
    llm = loaded(folder, lora=[(stable, 0.5)])
    both = nn.LLM.load(folder / "small" / "base", lora=[(stable, 0.5), small])
    torch.testing.assert_close(llm.logits(IDS, adapter="small"), both.logits(IDS), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"use_dora": True}, "'model.layers.0.self_attn.q_proj.weight': it is scaled as a whole (use_dora)"),
        ({"modules_to_save": ["lm_head"]}, "'lm_head.weight': another tensor takes its place (modules_to_save)"),
        ({"bias": "all"}, "'model.layers.0.self_attn.q_proj.bias': another tensor takes its place"),
        ({"lora_bias": True}, "'model.layers.0.self_attn.q_proj.bias': it is a bias"),
        ({"target_modules": ["embed_tokens"]}, "'model.embed_tokens.weight' cannot have an adapter for each sequence: take reads it"),
    ],
    ids=["dora", "modules to save", "bias", "lora_bias", "embedding"],
)  # fmt: skip
def test_what_can_only_be_merged_is_refused_by_name(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    adapted(llama(attention_bias=True), tmp_path, **{"target_modules": ["q_proj"], **settings})
    with pytest.raises(LoadError, match=re.escape(said)) as caught:
        nn.LLM.load(tmp_path / "base", adapters={"one": tmp_path / "adapter"})
    assert "merge the adapter into the weight" in str(caught.value)
    nn.LLM.load(tmp_path / "base", lora=[tmp_path / "adapter"])


def test_an_adapter_of_another_model_is_refused(models: Any, tmp_path: Path) -> None:
    folder, _ = models
    adapted(llama(hidden_size=32, num_attention_heads=2), tmp_path)
    with pytest.raises(LoadError, match="the adapter does not fit the model") as caught:
        nn.LLM.load(folder / "small" / "base", adapters={"small": folder / "small" / "adapter", "other": tmp_path / "adapter"})  # fmt: skip
    assert str(tmp_path / "adapter") in str(caught.value)
    assert "expected floats [4, 64]" in str(caught.value)


def test_names_of_adapters_are_checked(models: Any) -> None:
    folder, _ = models
    base, adapter = folder / "small" / "base", folder / "small" / "adapter"
    for adapters, said in (
        ([adapter], 'expected folders by name\n  help: write adapters={"NAME": DIR}'),
        ({"": adapter}, "an adapter has the name '', expected a text that is not empty"),
        ({str(i): adapter for i in range(257)}, "there are 257 adapters, 256 are the most"),
        ({"one": folder / "none"}, "none cannot be opened: No such file or directory"),
    ):
        with pytest.raises(LoadError, match=re.escape(said)):
            nn.LLM.load(base, adapters=adapters)
    llm = loaded(folder)
    with pytest.raises(RunError, match="there is no adapter 'large'\n  help: adapters are 'small', 'stable'"):
        llm.generate_ids(IDS, 1, adapter="large")
    with pytest.raises(RunError, match="there are 1 adapters for 5 texts, expected one for each"):
        llm.generate_ids(IDS, 1, adapter=["small"])
    with pytest.raises(RunError, match="there is no adapter 'small'\n  help: load the model with adapters="):
        nn.LLM.load(base).logits(IDS, adapter="small")


def test_artefacts_hold_no_adapters_that_are_not_merged(models: Any, tmp_path: Path) -> None:
    folder, _ = models
    with pytest.raises(LoadError, match="an artefact holds no adapters that are not merged"):
        loaded(folder).save(tmp_path / "out")
    nn.LLM.load(folder / "small" / "base").save(tmp_path / "out")
    with pytest.raises(LoadError, match="is an artefact, to which no adapters can be added") as caught:
        nn.LLM.load(tmp_path / "out", adapters={"small": folder / "small" / "adapter"})
    assert "--lora-modules NAME=DIR" in str(caught.value)


def test_commands_take_adapters_by_name(tmp_path: Path, capfd: Any) -> None:
    a, b = (random_adapter(tmp_path / name, seed) for seed, name in enumerate("ab"))
    llm = nn.LLM.load(SHIPPED, adapters={"a": a, "b": b})
    expected = llm.generate("def main", 32, adapter="b")
    assert expected not in (llm.generate("def main", 32), llm.generate("def main", 32, adapter="a"))
    command = ["run", str(SHIPPED), "-p", "def main", "-n", "32"]
    both = ["--lora-modules", f"a={a}", f"b={b}"]
    assert main([*command, *both, "--adapter", "b"]) == 0
    assert capfd.readouterr().out == f"def main{expected}\n"
    for given, said in (
        (both, "--lora-modules would change nothing: no --adapter says which of them writes the text"),
        ([*both, "--adapter", "c"], "there is no adapter 'c'"),
        ([*both, "--lora-modules", f"a={b}", "--adapter", "a"], "--lora-modules gives the name 'a' twice"),
        (["--lora-modules", str(a), "--adapter", "a"], "expected NAME=DIR"),
        (["--adapter", "a"], "there is no adapter 'a'"),
    ):
        assert main([*command, *given]) == 1
        assert said in capfd.readouterr().err
