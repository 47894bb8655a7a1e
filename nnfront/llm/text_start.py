# SPDX-License-Identifier: Apache-2.0
"""How the decoder of an encoder-decoder begins a text, and which tokens may not come: what generation_config.json says, else config.json."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from nnfront.errors import LoadError, RunError
from nnfront.files import Folder, shown
from nnfront.llm.folder_files import GENERATION, read_json

TRANSCRIBE = "transcribe"


@dataclass(frozen=True)
class TextStart:
    """token: the first that a decoder reads. suppressed: tokens that never come, at_first: that are not the first to come.

    languages, tasks: the tokens that follow for these, by name, where there are any; plain: what ends such a beginning for a text without timestamps.
    """

    token: int
    suppressed: tuple[int, ...] = ()
    at_first: tuple[int, ...] = ()
    languages: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[str, int] = field(default_factory=dict)
    plain: int | None = None

    @staticmethod
    def of(folder: Folder, hf_config: Mapping[str, Any]) -> TextStart:
        """What a folder says. Raises LoadError if it names no first token, and for what are no tokens."""
        said = {**hf_config, **(read_json(folder, GENERATION) if folder.has(GENERATION) else {})}
        token = said.get("decoder_start_token_id")
        if not isinstance(token, int) or not _is_token(token):
            raise LoadError(
                f"{folder.path}: decoder_start_token_id is {shown(token)}, expected a token",
                help=f"say in {GENERATION} which token a text begins with",
            )
        lists = [said.get(key) or [] for key in ("suppress_tokens", "begin_suppress_tokens")]
        names = [said.get(key) or {} for key in ("lang_to_id", "task_to_id")]
        tokens = [*(t for each in lists for t in each), *(t for each in names for t in dict(each).values())]
        plain = said.get("no_timestamps_token_id")
        if wrong := [t for t in (*tokens, *([] if plain is None else [plain])) if not _is_token(t)]:
            raise LoadError(f"{folder.path / GENERATION}: {shown(wrong[0])} is no token")
        languages = {name.strip("<|>"): id for name, id in names[0].items()}
        return TextStart(token, tuple(lists[0]), tuple(lists[1]), languages, names[1], plain)

    def suppress(self, logits: torch.Tensor, *, is_first: bool) -> torch.Tensor:
        """Logits [batch, vocab_size] of which those of tokens that may not come are minus infinity."""
        never = [*self.suppressed, *(self.at_first if is_first else ())]
        never = [token for token in never if token < logits.shape[-1]]
        return (
            logits.index_fill(1, torch.tensor(never, device=logits.device), -torch.inf) if never else logits
        )

    def detected(self, logits: torch.Tensor) -> list[int]:
        """The likeliest language of each text, from the logits behind the first token [batch, vocab_size]."""
        tokens = list(self.languages.values())
        return [tokens[i] for i in logits[:, tokens].argmax(-1).tolist()]

    def language(self, name: str) -> int:
        """The token of a language. Raises RunError for one that the model does not know."""
        return _named("language", name, self.languages)

    def prompt(self, language: int | None, task: str | None) -> list[int]:
        """What a decoder is given before it writes: its first token, those of language and task, and that there are no timestamps. Raises RunError for an unknown task."""
        tokens = [self.token, *([] if language is None else [language])]
        if task is not None or (self.tasks and language is not None):
            tokens.append(_named("task", task or TRANSCRIBE, self.tasks))
        return tokens if self.plain is None else [*tokens, self.plain]


def _named(what: str, name: str, known: Mapping[str, int]) -> int:
    if name not in known:
        names: Sequence[str] = sorted(known)
        raise RunError(
            f"the model has no {what} {name!r}", help=f"it has {', '.join(names) if names else 'none'}"
        )
    return known[name]


def _is_token(value: Any) -> bool:
    return type(value) is int and value >= 0
