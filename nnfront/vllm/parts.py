# SPDX-License-Identifier: Apache-2.0
"""A model folder in parts, over flat tokens: what they are to each other, and what came before them, an engine's attention knows."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from nnfront.errors import LoadError, RunError
from nnfront.llm.find_model import find_model
from nnfront.llm.hf_folder import compile_folder
from nnfront.llm.methods import PARTS, Methods
from nnfront.passes.external_attention import AttentionCall, ExternalAttention, calls_of
from nnfront.weights.checkpoint import is_artefact

EMBED, HIDDEN, HEAD = PARTS
OPTIONS = ("quant", "model_file")
"""What may be said of a model besides its folder, as for `LLM.load`."""


class Parts:
    """A model without weights, until `load` has given it some. T: tokens of all sequences of a step, V: the vocabulary."""

    def __init__(self, path: str, dtype: torch.dtype, options: Mapping[str, Any]) -> None:
        """Export and compile the model at `path`, computing in `dtype`. Raises LoadError, or PassError for a model that keeps more than keys and values."""
        unknown = [name for name in options if name not in OPTIONS]
        if unknown:
            raise LoadError(
                f"there is no option {unknown[0]!r} of a model in vLLM",
                help=f"options are {', '.join(OPTIONS)}",
            )
        found = find_model(path)
        if is_artefact(found):
            raise LoadError(
                f"{os.fspath(found)} is an artefact, whose methods keep a cache of their own",
                help="give the folder that it was made of",
            )
        self._compiled = compile_folder(
            found, dtype=str(dtype).removeprefix("torch."), methods=Methods.PARTS, **dict(options)
        )
        self.attention: tuple[AttentionCall, ...] = calls_of(self._compiled.executable.source[HIDDEN])
        self._session: Any = None

    def load(self) -> None:
        """Make the model's weights of the folder's. Raises LoadError if they do not fit."""
        self._session = self._compiled.executable.load(self._compiled.checkpoint, cast=True)

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Tokens, integers [T], to vectors [T, hidden_size]. Raises RunError if the model makes more than one of each."""
        if EMBED not in self._loaded():
            raise RunError(
                "this model looks tokens up in several tables, so that no vector stands for a token",
                help="give it tokens, not embeddings",
            )
        x: torch.Tensor = self._session[EMBED](_column(tokens))
        return x.flatten(0, 1)

    def hidden(
        self,
        tokens: torch.Tensor | None,
        positions: torch.Tensor,
        engine: ExternalAttention,
        embedded: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Tokens [T] at positions [T], or what stands for them [T, hidden_size], to what the head reads: [T, hidden_size]."""
        x = embedded
        if x is None:
            assert tokens is not None
            x = self.embed(tokens) if EMBED in self._loaded() else tokens.to(torch.int64)
        y: torch.Tensor = self._loaded()[HIDDEN](x[:, None], _column(positions), engine)
        return y.flatten(0, 1)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] to float32 [T, V]."""
        y: torch.Tensor = self._loaded()[HEAD](hidden[:, None])
        return y.flatten(0, 1)

    def _loaded(self) -> Any:
        if self._session is None:
            raise RunError("the model has no weights: vLLM was told to load none")
        return self._session


def _column(numbers: torch.Tensor) -> torch.Tensor:
    """One token of each sequence: int64 [T, 1]."""
    return numbers.to(torch.int64)[:, None]
