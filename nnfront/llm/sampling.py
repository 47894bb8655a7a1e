# SPDX-License-Identifier: Apache-2.0
"""Choose the next token of each of several sequences: by a kernel on a GPU, so that no number leaves the device, else by a `Draw` of each sequence."""

from __future__ import annotations

import secrets
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from nnfront.backends.cuda.sampling import DeviceSampler, takes
from nnfront.engine.draw import Draw, no_token
from nnfront.engine.params import Params, Sampling
from nnfront.errors import LoadError, RunError
from nnfront.files import Folder
from nnfront.llm.folder_files import GENERATION, read_json


def sampling_of(folder: Folder) -> Sampling:
    """Return how tokens are chosen if the caller says nothing: as generation_config.json says, else the likeliest one."""
    said = read_json(folder, GENERATION) if folder.has(GENERATION) else {}
    found = {
        name: said[name] for name in ("top_p", "min_p", "repetition_penalty") if said.get(name) is not None
    }
    if said.get("top_k"):  # 0: all of them
        found["top_k"] = said["top_k"]
    if said.get("do_sample"):
        found["temperature"] = said.get("temperature", 1.0)
    try:
        return Sampling(**found)
    except RunError as error:
        raise LoadError(f"{folder.path / GENERATION}: {error.what}", details=error.details) from None


@dataclass
class Sampler:
    """Draws tokens as a `Sampling` says, one call after the other for the same sequences.

    prompts: for each sequence its tokens so far, int64 [seq], which a repetition penalty counts as drawn.
    on_kernel: whether the kernel draws; by default for logits on a GPU that it was made for.
    """

    sampling: Sampling
    prompts: Sequence[torch.Tensor] = ()
    on_kernel: bool | None = None

    def __post_init__(self) -> None:
        self._seed = secrets.randbits(64) if self.sampling.seed is None else self.sampling.seed
        self._draws: list[Draw] = []
        self._seen: torch.Tensor | None = None
        self._device: DeviceSampler | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Return one token for each row: float [batch, vocab] to int64 [batch], where the logits are.

        Raises RunError for a row that no token can be drawn from, and for another batch than the prompts'. A kernel gives -1 for such a
        row instead, so that nobody waits for it: `tokens_of` raises when the numbers are read.
        """
        has_penalty = self.sampling.repetition_penalty != 1
        if has_penalty and len(self.prompts) != len(logits):
            raise RunError(
                "a repetition penalty counts the prompts' tokens",
                details=[f"got logits for {len(logits)} sequences, and {len(self.prompts)} prompts"],
            )
        if self.on_kernel is None:
            self.on_kernel = logits.is_cuda and takes(logits)
        if self.on_kernel:
            if has_penalty and self._seen is None:
                self._seen = self._in_prompts(logits)
            return self._on_device(logits)
        if not self._draws:
            prompts = [prompt.tolist() for prompt in self.prompts] or [[] for _ in logits]
            self._draws = [Draw(Params.of(self.sampling), prompt) for prompt in prompts]
        rows = zip(self._draws, logits.float().cpu().numpy(), strict=True)
        return torch.tensor([draw(row) for draw, row in rows], device=logits.device)

    def restart(self, like: Sampler) -> None:
        """Go on as another sampler for as many sequences begins, in the same buffers; its sampling differs in nothing but the seed."""
        self.prompts, self._seed = like.prompts, like._seed
        if self._seen is not None:
            self._seen.copy_(self._in_prompts(self._seen))
        if self._device is not None:
            self._device.restart(self._seed)

    def state(self) -> list[torch.Tensor]:
        """What a draw by the kernel changes, where it does: seeds, steps and marks of tokens."""
        assert self._device is not None
        return [*self._device.state(), *([] if self._seen is None else [self._seen])]

    def _in_prompts(self, logits: torch.Tensor) -> torch.Tensor:
        """Which tokens the prompts hold: bool [batch, vocab]."""
        seen = torch.zeros(logits.shape, dtype=torch.bool)
        for row, prompt in zip(seen, self.prompts, strict=True):
            row[prompt.to("cpu", torch.int64)] = True
        return seen.to(logits.device)

    def _on_device(self, logits: torch.Tensor) -> torch.Tensor:
        if self._device is None:
            s = self.sampling
            self._device = DeviceSampler(
                {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "min_p": s.min_p},
                self._seed,
                penalty=s.repetition_penalty,
            )
        return self._device(logits, self._seen)


def tokens_of(drawn: torch.Tensor) -> list[int]:
    """Return the numbers of drawn tokens, int64 [batch]. Raises RunError if a row had none."""
    tokens: list[int] = drawn.tolist()
    if any(token < 0 for token in tokens):
        raise no_token()
    return tokens


def until_end(steps: Iterable[torch.Tensor], ends: Container[int]) -> Iterator[int]:
    """Yield the tokens of the only sequence, up to one that ends it."""
    for step in steps:
        (token,) = tokens_of(step)
        if token in ends:
            return
        yield token
