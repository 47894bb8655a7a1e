# SPDX-License-Identifier: Apache-2.0
"""A model in parts computes what transformers does, when tokens of several sequences come in one row and somebody else attends."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from plain_attention import PlainAttention
from tiny_folders import MODELS, written

import nnfront as nn
from nnfront.errors import LoadError, RunError
from nnfront.vllm.parts import Parts

TEXTS = {"a": [5, 6, 7, 8, 9, 10, 11, 12], "b": list(range(20, 51)), "c": [40] * 5, "d": [1]}


def logits_of_steps(parts: Parts, seed: int) -> dict[str, torch.Tensor]:
    """Logits of each token of the texts, which come in steps of a few tokens of some of them."""
    draw, engine = random.Random(seed), PlainAttention(parts.attention)
    left = {name: list(text) for name, text in TEXTS.items()}
    found: dict[str, list[torch.Tensor]] = {name: [] for name in TEXTS}
    while waiting := [name for name in left if left[name]]:
        owners, tokens = [], []
        for name in draw.sample(waiting, draw.randint(1, len(waiting))):
            count = draw.randint(1, min(9, len(left[name])))
            tokens += left[name][:count]
            owners += [name] * count
            del left[name][:count]
        positions = engine.step(owners)
        hidden = parts.hidden(torch.tensor(tokens, dtype=torch.int32), positions, engine)
        for name, row in zip(owners, parts.head(hidden), strict=True):
            found[name].append(row)
    return {name: torch.stack(rows) for name, rows in found.items()}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_tokens_of_several_sequences_in_one_row_give_what_each_text_gives_alone(
    name: str, tmp_path: Path
) -> None:
    model = written(tmp_path, name, num_hidden_layers=2)
    parts = Parts(str(tmp_path), torch.float32, {})
    parts.load()
    found = logits_of_steps(parts, seed=1)
    for text, tokens in TEXTS.items():
        with torch.no_grad():
            expected = model(torch.tensor([tokens])).logits[0]
        torch.testing.assert_close(found[text], expected, rtol=2e-4, atol=2e-3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    written(folder, "llama", num_hidden_layers=2)
    return folder


class TestOneModel:
    def test_vectors_stand_for_tokens(self, folder: Path) -> None:
        parts = Parts(str(folder), torch.float32, {})
        parts.load()
        tokens, hidden = torch.tensor([5, 9, 5]), []
        for given in ({"tokens": tokens}, {"tokens": None, "embedded": parts.embed(tokens)}):
            engine = PlainAttention(parts.attention)
            hidden.append(parts.hidden(positions=engine.step(["a", "b", "a"]), engine=engine, **given))
        assert torch.equal(*hidden)
        assert parts.embed(tokens).shape == hidden[0].shape == (3, 64)

    def test_it_computes_in_the_dtype_that_is_asked_for(self, folder: Path) -> None:
        parts = Parts(str(folder), torch.bfloat16, {})
        parts.load()
        x = parts.embed(torch.tensor([5]))
        assert (x.dtype, parts.head(x).dtype) == (torch.bfloat16, torch.float32)

    def test_weights_are_quantised_as_elsewhere(self, folder: Path) -> None:
        parts = Parts(str(folder), torch.float32, {"quant": "int8"})
        parts.load()
        alone = nn.LLM.load(folder, quant="int8")
        expected = alone.logits(torch.tensor([TEXTS["b"]]))[0]
        torch.testing.assert_close(logits_of_steps(parts, seed=2)["b"], expected, rtol=1e-3, atol=1e-2)

    def test_an_option_that_is_none_is_refused(self, folder: Path) -> None:
        with pytest.raises(LoadError, match=r"(?s)no option 'quants'.*options are quant, model_file"):
            Parts(str(folder), torch.float32, {"quants": "int8"})

    def test_a_model_without_weights_says_so(self, folder: Path) -> None:
        with pytest.raises(RunError, match="has no weights: vLLM was told to load none"):
            Parts(str(folder), torch.float32, {}).embed(torch.tensor([1]))

    def test_an_artefact_is_refused(self, folder: Path, tmp_path: Path) -> None:
        nn.LLM.load(folder).save(tmp_path / "made")
        with pytest.raises(LoadError, match=r"(?s)made is an artefact.*give the folder"):
            Parts(str(tmp_path / "made"), torch.float32, {})
