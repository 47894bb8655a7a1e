# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters beside the weights: each text of a batch has its own, and is what PEFT computes of it alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_lora import VOCAB, adapted, llama

import nnfront as nn

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
    assert stacks and all(weight.dtype == torch.float32 for weight in stacks.values())
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
