# SPDX-License-Identifier: Apache-2.0
"""Load a rank's part of a model, after all ranks have shown that they run the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

import nnfront as nn
from nnfront.distributed.ranks import Ranks
from nnfront.llm.hf_folder import CompiledFolder
from nnfront.session import Session
from nnfront.transform.plan import TransformPlan
from nnfront.weights import Checkpoint


def load_part(
    model: CompiledFolder,
    ranks: Ranks,
    *,
    ignored: Sequence[str] = (),
    cast: bool = False,
    cache: str | Path | None = None,
    plan: Callable[[TransformPlan], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Session:
    """Return the session of this rank. All ranks call it.

    Raises LoadError, on every rank, if they differ in versions, program or weights, and if one of them cannot load.
    """
    ranks.agree(
        {
            "nnfront": nn.__version__,
            "torch": torch.__version__,
            "the program": _digest(str(model.executable.source)),
            "the checkpoint": _digest(_listed(model.checkpoint)),
        }
    )
    with ranks.together():
        executable = model.executable.of_rank(ranks.rank)
        if plan is not None:
            plan(executable.plan(model.checkpoint, ignored=ignored, cast=cast))
        session = executable.load(
            model.checkpoint, ignored=ignored, cast=cast, cache=cache, progress=progress
        )
        session.extras = model.extras
    return session


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _listed(checkpoint: Checkpoint) -> str:
    """What a checkpoint holds: types and places of all tensors, and the bytes of vectors: every rank reads norms, which tell one training from another."""
    lines = []
    for name, info in checkpoint.infos.items():
        digest = hashlib.sha256()
        for block in checkpoint.blocks(name) if len(info.shape) == 1 else ():
            digest.update(block)
        lines.append(f"{name} {info} {info.offset} {digest.hexdigest()}")
    return "\n".join(lines)
