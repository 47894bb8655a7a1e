# SPDX-License-Identifier: Apache-2.0
"""What each rank does in the tests that start real ones: everything for every folder, results left in files."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import nnfront as nn
from nnfront import op
from nnfront.distributed.ranks import Ranks, joined
from nnfront.engine.compute import Compute
from nnfront.errors import LoadError

TOKENS = 24
READ: list[int] = []
LOOP = torch.tensor([[5, 6, 7, 8] * 4, [9] * 16])
"""Prompts that come again."""


def counting(fd: int, buffers: Any, offset: int, preadv: Any = os.preadv) -> int:
    """`os.preadv`, which notes how much was read of weights."""
    count: int = preadv(fd, buffers, offset)
    if os.readlink(f"/proc/self/fd/{fd}").endswith(".safetensors"):
        READ.append(count)
    return count


def collectives(ranks: Ranks) -> dict[str, torch.Tensor]:
    """Each collective, run by itself, on numbers that tell ranks apart."""
    mine = torch.arange(2.0 * ranks.world).reshape(ranks.world, 2) + 100 * ranks.rank
    return {
        "all_reduce": op.all_reduce(mine, ranks.world),
        "all_gather": op.all_gather(mine, 1, ranks.world),
        "all_to_all": op.all_to_all(mine, ranks.world),
        "half": op.all_reduce(mine.to(torch.bfloat16), ranks.world),
    }


def model(ranks: Ranks, folder: str, quant: str | None) -> dict[str, Any]:
    plans: list[Any] = []
    ids = torch.load(Path(folder) / "ids.pt")
    READ.clear()
    llm = nn.LLM.load(folder, quant=quant, ranks=ranks, plan=plans.append)
    return {
        "read": sum(READ),
        "planned": plans[0].read_bytes,
        "weights": sum(w.nbytes for w in llm.session.weights.values()),
        "logits": llm.logits(ids),
        "tokens": llm.generate_ids(ids, max_new_tokens=TOKENS),
        "drawn": llm.generate_ids(ids, max_new_tokens=8, temperature=1.0),
    }


def artefact(ranks: Ranks, folder: str, ids: torch.Tensor) -> dict[str, Any]:
    llm = nn.LLM.load(folder, ranks=ranks)
    files = sorted(Path(folder).glob("*.safetensors"))
    return {
        "sizes": [file.stat().st_size for file in files],
        "weights": sum(w.nbytes for w in llm.session.weights.values()),
        "tokens": llm.generate_ids(ids, max_new_tokens=TOKENS),
    }


def guessed(ranks: Ranks, folder: str) -> dict[str, Any]:
    """Texts with guesses, and how many calls computed some."""
    llm = nn.LLM.load(folder, ranks=ranks, extends=True)
    extended: list[int] = []
    call = Compute._call

    def counted(self: Compute, method: str, *rest: Any) -> Any:
        extended.append(method == "extend")
        return call(self, method, *rest)

    Compute._call = counted  # type: ignore[method-assign]
    found = {
        how: llm.generate_ids(LOOP, max_new_tokens=32, spec=how) for how in ("ngram:1", f"draft:{folder}")
    }
    Compute._call = call  # type: ignore[method-assign]
    return {"texts": found, "extended": sum(extended)}


def refusals(ranks: Ranks, folder: str) -> dict[str, str]:
    """What ranks say that are not alike, or of which one cannot go on."""

    def failing(work: Callable[[], object]) -> None:
        with ranks.together():
            if ranks.rank == ranks.world - 1:
                work()

    def full() -> None:
        raise OSError(28, "No space left on device")

    said = {}
    for name, work in {
        "versions": lambda: ranks.agree({"nnfront": f"0.{ranks.rank}", "torch": "2"}),
        "weights": lambda: nn.LLM.load(f"{folder}{ranks.rank}", ranks=ranks),
        "disk": lambda: failing(full),
        "memory": lambda: failing(lambda: torch.empty(1 << 50)),
        "all": lambda: nn.LLM.load(f"{folder}-none", ranks=ranks),
    }.items():
        try:
            work()
        except LoadError as error:
            said[name] = str(error)
    return said


if __name__ == "__main__":
    task = json.loads(Path(sys.argv[1]).read_text())
    os.preadv = counting
    with joined() as ranks:
        found: dict[str, Any] = {"collectives": collectives(ranks)}
        found["models"] = {
            name: model(ranks, folder, quant) for name, (folder, quant) in task["models"].items()
        }
        found["guessed"] = guessed(ranks, task["models"]["llama"][0])
        found["artefacts"] = {
            name: artefact(ranks, folder, torch.load(Path(task["models"][name][0]) / "ids.pt"))
            for name, folder in task["artefacts"].items()
        }
        folder = task["models"]["qwen3_moe"][0]
        llm = nn.LLM.load(folder, ranks=ranks)
        llm.session.export_checkpoint(Path(task["out"]) / "exported", writes=ranks.is_first)
        llm = nn.LLM.load(task["models"]["llama"][0], ranks=ranks)
        llm.session.update(torch.load(f"{task['out']}/new.pt"))
        found["updated"] = llm.logits(torch.arange(12)[None])
        found["exported"] = str(Path(task["out"]) / "exported")
        found["refusals"] = refusals(ranks, task["unlike"])
        torch.save(found, f"{task['out']}/{ranks.rank}.pt")
        dist.barrier()
