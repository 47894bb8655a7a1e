# SPDX-License-Identifier: Apache-2.0
"""An engine whose attention is a few lines of torch: what each sequence has stored is a list, and each token attends by itself."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from nnfront.passes.external_attention import AttentionCall


class PlainAttention:
    """Keys and values of sequences by name. `step` says whose the tokens of the next call are."""

    def __init__(self, calls: Sequence[AttentionCall]) -> None:
        self.calls = calls
        self.stored: dict[tuple[int, str], list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
        self.owners: list[str] = []
        self.lengths: dict[str, int] = defaultdict(int)

    def step(self, owners: list[str]) -> torch.Tensor:
        """Take tokens of these sequences, one each, in order; return their positions."""
        self.owners, positions = owners, []
        for owner in owners:
            positions.append(self.lengths[owner])
            self.lengths[owner] += 1
        return torch.tensor(positions)

    def attend(self, number: int, q: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        call = self.calls[number]
        sinks = others[-1] if call.has_sinks else None
        kept = number if call.reads is None else call.reads
        rows = []
        begun = {owner: self.lengths[owner] - self.owners.count(owner) for owner in self.owners}
        for i, owner in enumerate(self.owners):
            past = self.stored[kept, owner]
            if call.reads is None:
                past.append((others[0][i, 0], others[1][i, 0]))
            begun[owner] += 1
            rows.append(self._one(call, q[i, 0], past[: begun[owner]], sinks))
        return torch.stack(rows)[:, None]

    def _one(
        self,
        call: AttentionCall,
        q: torch.Tensor,
        past: list[tuple[torch.Tensor, torch.Tensor]],
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        seen = past[-call.window :] if call.window else past
        repeats = call.heads // call.kv_heads
        k, v = (
            torch.stack([each[j] for each in seen]).repeat_interleave(repeats, dim=1).double() for j in (0, 1)
        )
        scores = torch.einsum("hd,thd->ht", q.double(), k) * call.scale
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        weights = scores.exp()
        total = weights.sum(1) + (0 if sinks is None else sinks.double().exp())
        assert math.isfinite(total.sum().item())
        return (torch.einsum("ht,thd->hd", weights, v) / total[:, None]).to(q.dtype)
