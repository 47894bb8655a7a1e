# SPDX-License-Identifier: Apache-2.0
"""Token ids that a caller gives: whether they are any, and whether they fit the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nnfront.errors import RunError
from nnfront.ir import type_text
from nnfront.transform.source import stored_type


def check_prompts(prompts: Sequence[Any], max_new_tokens: int, context: int, vocab: int) -> None:
    """Raise RunError unless every prompt is one, and fits with what is to come after it."""
    if type(max_new_tokens) is not int or max_new_tokens < 1:
        raise RunError(f"max_new_tokens is {max_new_tokens!r}, expected an int >= 1")
    if not prompts:
        raise RunError("there is no prompt")
    for i, prompt in enumerate(prompts):
        which = f"prompt {i}" if len(prompts) > 1 else "the prompt"
        if not are_integers(prompt, 1):
            raise RunError(f"{which} is not a 1-D integer tensor")
        if not len(prompt):
            raise RunError(f"{which} is empty", help="give at least one token")
        if len(prompt) + max_new_tokens > context:
            raise RunError(
                f"{which} does not fit",
                details=[
                    f"got {len(prompt)} tokens and {max_new_tokens} new ones, the context holds {context}"
                ],
                help="shorten the prompt, or ask for fewer new tokens",
            )
        check_tokens(which, prompt, vocab)


def check_tokens(which: str, ids: torch.Tensor, vocab: int) -> None:
    """Raise RunError for a token outside the vocabulary: it has no row in the table that embeds tokens."""
    if ids.numel() and (int(ids.min()) < 0 or int(ids.max()) >= vocab):
        raise RunError(f"{which} holds a token outside the vocabulary of {vocab}")


def are_integers(value: Any, ndim: int) -> bool:
    """Whether a value is a tensor that may hold token ids."""
    dtypes = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    return isinstance(value, torch.Tensor) and value.ndim == ndim and value.dtype in dtypes


def kind_of(value: Any) -> str:
    """What a value is that should have been token ids."""
    if not isinstance(value, torch.Tensor):
        return f"of type {type(value).__name__!r}"
    return type_text(stored_type(value))


def listed(value: Any, kind: type) -> list[Any] | None:
    """One of a kind, several or none as a list; None if it is anything else."""
    several = [value] if isinstance(value, kind) else [] if value is None else value
    is_right = isinstance(several, Sequence) and all(type(item) is kind for item in several)
    return list(several) if is_right else None


def adapter_numbers(
    adapters: Sequence[str], given: str | Sequence[str | None] | None, count: int
) -> list[int]:
    """What methods call the adapters that so many texts are given, by name, one for all or one for each: their places among `adapters`, -1 for None.

    Raises RunError for one that there is not, and for another number of them.
    """
    names = [given] * count if given is None or isinstance(given, str) else list(given)
    if len(names) != count:
        raise RunError(f"there are {len(names)} adapters for {count} texts, expected one for each")
    for name in names:
        if name is not None and name not in adapters:
            there_are = f"adapters are {', '.join(map(repr, adapters))}"
            raise RunError(
                f"there is no adapter {name!r}",
                help=there_are if adapters else "load the model with adapters={NAME: DIR}",
            )
    return [-1 if name is None else adapters.index(name) for name in names]
