# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters beside the weights of a model that ranks divide: each has a part of their matrices, and all compute what PEFT does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from rank_threads import Threads
from test_lora import VOCAB, adapted, llama

import nnfront as nn

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
]
IDS = torch.randint(0, VOCAB, (3, 7), generator=torch.Generator().manual_seed(3))
CHOSEN = torch.tensor([1, -1, 0], dtype=torch.int32)


@pytest.mark.parametrize("world", [2, 4])
def test_each_row_is_what_peft_computes_with_its_adapter(
    world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {
        "all": {"r": 8, "target_modules": "all-linear", "use_rslora": True},
        "some": {"r": 3, "target_modules": ["k_proj", "o_proj", "down_proj", "lm_head"]},
    }
    base = tmp_path / "all" / "base"
    peft = [
        adapted(llama(), tmp_path / name, seed, **each) for seed, (name, each) in enumerate(settings.items())
    ]
    with torch.no_grad():
        rows = [model(ids[None]).logits for model, ids in zip([peft[1], llama(), peft[0]], IDS, strict=True)]
    expected = torch.cat(rows)
    adapters = {name: tmp_path / name / "adapter" for name in settings}
    folder = nn.compile_folder(base, ranks=world, adapters=adapters)
    threads = Threads(world, monkeypatch)
    sizes: list[int] = []

    def logits(rank: int) -> torch.Tensor:
        session = folder.executable.of_rank(rank).load(folder.checkpoint)
        sizes.append(sum(w.nbytes for name, w in session.weights.items() if "lora" in name))
        return session["logits"](IDS, CHOSEN)

    for found in threads.run(logits):
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    whole = nn.LLM.load(base, adapters=adapters).session.weights
    matrices = sum(w.nbytes for name, w in whole.items() if "lora" in name)
    assert max(sizes) < 0.8 * matrices  # one of each two is cut
