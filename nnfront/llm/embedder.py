# SPDX-License-Identifier: Apache-2.0
"""`Embedder`: the folder of an encoder, ready to make vectors of texts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from nnfront.dims import Dim
from nnfront.errors import LoadError, RunError
from nnfront.files import Folder
from nnfront.llm.find_model import find_model
from nnfront.llm.folder_files import read_json
from nnfront.llm.hf_folder import CompiledFolder, compile_folder
from nnfront.llm.methods import EMBEDDER, require_methods
from nnfront.llm.timings import Timings
from nnfront.llm.tokenizer import Tokenizer, tokenizer_of
from nnfront.lower import TensorType
from nnfront.passes import QuantScheme
from nnfront.session import Session

MODULES = "modules.json"
"""What says, in folders of sentence encoders, what comes behind the model."""
_POOLINGS = {"mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls"}
"""What a text's vector is, by what older and newer folders call it."""
BATCH_TOKENS = 2048
"""Of one call, padding included: more at once is no faster, and takes memory."""


class Embedder:
    """An encoder that makes a vector of each text. Make one with `Embedder.load`.

    `pooling`: what of its tokens a text's vector is, their `mean`, or the first one's, `cls`; `is_normalised`: whether vectors have length 1;
    `context`: how many tokens a text may have, special ones included. The first two are as the folder's modules.json says; without one they are means of length 1.
    """

    def __init__(self, session: Session, model: CompiledFolder, path: Path) -> None:
        self.session, self.config, self.files, self.path = session, model.config, model.folder, path
        self.pooling, self.is_normalised = _pooling_of(model.folder)
        self._method = session["hidden" if self.pooling == "cls" else "mean"]
        arguments = self._method.program.arguments
        self._takes_types = len(arguments) == 3
        assert isinstance(arguments[0].type, TensorType)
        seq = arguments[0].type.shape[1]
        assert isinstance(seq, Dim)
        assert seq.max is not None
        self.context: int = seq.max

    @staticmethod
    def load(
        path: str | Path,
        device: str = "cpu",
        dtype: str | None = None,
        quant: str | QuantScheme | None = None,
        *,
        model_file: str | Path | None = None,
        ignored: Sequence[str] = (),
        progress: Callable[[int, int], None] | None = None,
    ) -> Embedder:
        """Load a Hugging Face folder; the arguments are those of `LLM.load`.

        Raises LoadError if the folder, its architecture or its weights are not what they should be, and for a model that is no encoder.
        """
        path = find_model(path)
        model = compile_folder(path, str(device), dtype, model_file, Timings(), quant)
        methods = [method.name for method in model.executable.source.methods]
        help = "nnfront.LLM.load(DIR) loads a language model"
        require_methods(path, "encoder", EMBEDDER, methods, help)
        session = model.executable.load(
            model.checkpoint, ignored=ignored, cast=dtype is not None, progress=progress
        )
        return Embedder(session, model, Path(path))

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer. Raises LoadError if it has none."""
        return tokenizer_of(self.files)

    def embed(self, texts: Sequence[str | Sequence[int]]) -> torch.Tensor:
        """Return a vector for each text, or its tokens: float32 [texts, size]. Raises RunError as `tokens_of` does."""
        rows = [self.tokens_of(text) for text in texts]
        found: list[torch.Tensor | None] = [None for _ in rows]
        for batch in batches([len(row) for row in rows]):
            for i, vector in zip(batch, self.vectors([rows[i] for i in batch]), strict=True):
                found[i] = vector
        return torch.stack([vector for vector in found if vector is not None]) if found else torch.empty(0, 0)

    def tokens_of(self, text: str | Sequence[int]) -> list[int]:
        """A text as the model takes it. Raises RunError for one without tokens or with too many, and for tokens outside the vocabulary."""
        tokens = self.tokenizer.encode(text) if isinstance(text, str) else list(text)
        if not tokens:
            raise RunError("a text is empty", help="give at least one token")
        if not 0 <= min(tokens) <= max(tokens) < self.config.vocab_size:
            raise RunError(f"a text holds a token outside the vocabulary of {self.config.vocab_size}")
        if len(tokens) > self.context:
            raise RunError(
                "a text is too long",
                details=[f"it has {len(tokens)} tokens, the model reads {self.context}"],
                help="embed its parts",
            )
        return tokens

    def vectors(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """The vectors of texts that go through the model together, by their tokens: float32 [texts, size], in the CPU's memory."""
        lengths = torch.tensor([len(row) for row in rows])
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).to(torch.int64)
        tokens = torch.full_like(mask, getattr(self.config, "pad_token_id", None) or 0)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = torch.tensor(row)
        given = [tokens, mask, *([torch.zeros_like(mask)] if self._takes_types else [])]
        found: Any = self._method(*(each.to(self.session.device) for each in given))
        found = (found[:, 0] if self.pooling == "cls" else found).float().cpu()
        return torch.nn.functional.normalize(found, dim=-1) if self.is_normalised else found


def batches(lengths: Sequence[int], most: int = BATCH_TOKENS) -> Iterator[list[int]]:
    """Divide texts of these lengths into batches of alike ones, of at most `most` tokens with their padding, or one text: their numbers."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[i] > most:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _pooling_of(folder: Folder) -> tuple[str, bool]:
    """What a text's vector is, and whether its length is 1. Raises LoadError for what is not computed here."""
    if not folder.has(MODULES):
        return "mean", True
    listed = folder.read_json(MODULES)
    entries = listed if isinstance(listed, list) and all(isinstance(each, dict) for each in listed) else [{}]
    kinds = {str(each.get("type")).rpartition(".")[2]: str(each.get("path", "")) for each in entries}
    if unknown := kinds.keys() - {"Transformer", "Pooling", "Normalize"}:
        raise LoadError(
            f"{folder.path / MODULES} has a module of type {min(unknown)!r}, expected Transformer, Pooling and Normalize"
        )
    how = read_json(folder, f"{kinds['Pooling']}/config.json") if "Pooling" in kinds else {}
    flags = [name.removeprefix("pooling_mode_") for name, value in how.items() if value is True]
    modes = (
        [str(how["pooling_mode"])] if "pooling_mode" in how else [f for f in flags if f != "include_prompt"]
    )
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise LoadError(
            f"{folder.path}: texts are pooled by {' and '.join(modes) or 'nothing'}, expected mean or cls"
        )
    return _POOLINGS[modes[0]], "Normalize" in kinds
