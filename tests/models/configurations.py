# SPDX-License-Identifier: Apache-2.0
"""The configurations that model files are compared in, and the weights.

`configs/<model type>.json` holds `sizes`, which make the model tiny, and `configs`: by name, what is changed of them. Together these turn
every switch that changes what is computed. `make test` runs the first of each type, `make test-all` all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nnfront.llm.model_files import find_architecture

CONFIGS = Path(__file__).parent / "configs"
TOKENS = 100
SIZES = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
"""Of a model type whose file of configurations has no `sizes`."""


def kind_of(model_type: str) -> str:
    """`decoder`, `encoder` or `encoder-decoder`: which methods the model has says it."""
    file = find_architecture(model_type).file
    methods = file.export_spec(file.TINY)
    return "encoder" if "decode" not in methods else "encoder-decoder" if "encode" in methods else "decoder"


def is_decoder(model_type: str) -> bool:
    """Whether the model continues texts."""
    return kind_of(model_type) == "decoder"


def is_encoder(model_type: str) -> bool:
    """Whether the model generates no text."""
    return kind_of(model_type) == "encoder"


def configurations(wanted: Callable[[str], bool]) -> Iterator[Any]:
    """Each model type that is wanted with each of its configurations; the first in `make test`."""
    for path in sorted(CONFIGS.glob("*.json")):
        given = json.loads(path.read_text())
        for i, (name, changes) in enumerate(given["configs"].items() if wanted(path.stem) else ()):
            sizes = {**given.get("sizes", SIZES), **changes}
            marks = [pytest.mark.matrix] if i else []
            yield pytest.param(path.stem, sizes, id=f"{path.stem}-{name}", marks=marks)


def with_random_weights(model: Any) -> Any:
    """transformers' model in float32, with weights such that what it gives is of order 1 and no vector is all ones or zeros."""
    model = model.float().eval()
    with torch.no_grad():
        for stored in model.state_dict().values():
            if stored.ndim > 1:
                stored.normal_(0, stored.shape[-1] ** -0.5)
            else:
                stored.add_(0.3 * torch.randn_like(stored))
    return model


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within 1e-4 of the largest logit."""
    assert 0.1 < expected.std() < 100
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4 * float(expected.abs().max()))
