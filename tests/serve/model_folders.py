# SPDX-License-Identifier: Apache-2.0
"""Folders of tiny models of any type, with random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from nnfront.llm.methods import Methods
from nnfront.llm.model_files import find_architecture

CONFIGS = Path(__file__).parents[1] / "models" / "configs"


def random_folder(
    path: Path, model_type: str, dtype: str = "bfloat16", *, mtp: bool = False, **changes: Any
) -> Path:
    """Write a folder of a model type, in the first of its configurations that are compared, but for `changes`; with `mtp` one with a head that guesses."""
    given = json.loads((CONFIGS / f"{model_type}.json").read_text())
    first = next(iter(given["configs"].values()))
    config = {**given.get("sizes", {}), **first, "model_type": model_type, "dtype": dtype, **changes}
    file = find_architecture(model_type)
    ir = file.export(file.config(config), methods=Methods.of(mtp=mtp))
    shapes = {p.name: p.type for f in ir.methods for p in f.params if p.role == "weight"}
    torch.manual_seed(5)
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: _weight(type) for name, type in sorted(shapes.items())}, path / "model.safetensors")
    return path


def _weight(type: Any) -> torch.Tensor:
    shape = tuple(type.shape)
    scale = 1.5 * shape[-1] ** -0.5 if len(shape) > 1 else 0.3
    offset = 0.0 if len(shape) > 1 else 0.7
    return (offset + scale * torch.randn(shape)).to(getattr(torch, type.dtype))
