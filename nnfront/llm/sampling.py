# SPDX-License-Identifier: Apache-2.0
"""Choose the next token from logits: repetition penalty, temperature, top-k, top-p, min-p, in that order, as transformers applies them.

On a GPU one kernel does all of it (`nnfront.backends.cuda.sampling`), and no number leaves the device.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from nnfront.backends.cuda.sampling import DeviceSampler, takes
from nnfront.errors import LoadError, RunError
from nnfront.files import Folder, shown
from nnfront.llm.folder_files import GENERATION, read_json


@dataclass(frozen=True)
class Sampling:
    """How to choose. Temperature 0 takes the likeliest token; of everything else only the penalty then has a say.

    temperature >= 0; top_k >= 1: only the k likeliest; 0 < top_p <= 1: the fewest likeliest whose probabilities reach p;
    0 <= min_p <= 1: those with at least min_p times the highest probability; seed: the same seed draws the same tokens, on the same
    kind of device. repetition_penalty > 0: the logits of tokens in the prompt or drawn before are divided by it where they are
    positive, multiplied where negative, so more than 1 makes repetition less likely (arXiv 1909.05858, section 4.1).
    Raises RunError that lists every value out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if problems := list(self._problems()):
            raise RunError("the sampling parameters are out of range", details=problems)

    def changed(self, said: Mapping[str, Any]) -> Sampling:
        """The same with other values; what is None stays. Raises RunError as it does itself."""
        return replace(self, **{name: value for name, value in said.items() if value is not None})

    def _problems(self) -> Iterator[str]:
        if not is_number(self.temperature) or self.temperature < 0:
            yield f"temperature is {shown(self.temperature)}, expected a number >= 0"
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            yield f"top_k is {shown(self.top_k)}, expected an int >= 1"
        if self.top_p is not None and not (is_number(self.top_p) and 0 < self.top_p <= 1):
            yield f"top_p is {shown(self.top_p)}, expected a number in (0, 1]"
        if self.min_p is not None and not (is_number(self.min_p) and 0 <= self.min_p <= 1):
            yield f"min_p is {shown(self.min_p)}, expected a number in [0, 1]"
        if self.seed is not None and type(self.seed) is not int:
            yield f"seed is {shown(self.seed)}, expected an int"
        if not is_number(self.repetition_penalty) or self.repetition_penalty <= 0:
            yield f"repetition_penalty is {shown(self.repetition_penalty)}, expected a number > 0"


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
    """Draws tokens as a `Sampling` says, with a random generator of its own, one call after the other for the same sequences.

    prompts: for each sequence its tokens so far, int64 [seq], which a repetition penalty counts as drawn.
    on_kernel: whether the kernel draws; by default for logits on a GPU that it was made for.
    """

    sampling: Sampling
    prompts: Sequence[torch.Tensor] = ()
    on_kernel: bool | None = None
    generator: torch.Generator = field(default_factory=torch.Generator)

    def __post_init__(self) -> None:
        if self.sampling.seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(self.sampling.seed)
        self._seen: torch.Tensor | None = None
        self._device: DeviceSampler | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Return one token for each row: float [batch, vocab] to int64 [batch], where the logits are.

        Raises RunError for a row that no token can be drawn from, and for another batch than the prompts'. A kernel gives -1 for such a
        row instead, so that nobody waits for it: `tokens_of` raises when the numbers are read.
        """
        if self.sampling.repetition_penalty != 1 and self._seen is None:
            self._seen = self._in_prompts(logits)
        if self.on_kernel is None:
            self.on_kernel = logits.is_cuda and takes(logits)
        if self.on_kernel:
            return self._on_device(logits)
        scores = self.scores(logits)
        # NaN spreads into the maximum, so looking at that finds one anywhere in the row.
        best, token = scores.max(-1)
        if bool(best.isnan().any()):
            raise RunError("the model's logits hold NaN", help=_HELP)
        if self.sampling.temperature != 0:
            if bool(best.isinf().any()):
                raise RunError(
                    "the model's logits hold no token to draw: the largest is infinite", help=_HELP
                )
            # The generator's numbers are the CPU's, wherever the logits are.
            likely = self._probabilities(scores).cpu()
            token = torch.multinomial(likely, 1, generator=self.generator)[:, 0].to(logits.device)
        if self._seen is not None:
            self._seen.scatter_(1, token[:, None], True)
        return token

    def restart(self, like: Sampler) -> None:
        """Go on as another sampler for as many sequences begins, in the same buffers; its sampling differs in nothing but the seed."""
        self.prompts, self.generator = like.prompts, like.generator
        if self._seen is not None:
            self._seen.copy_(self._in_prompts(self._seen))
        if self._device is not None:
            self._device.restart(self.generator.initial_seed())

    def state(self) -> list[torch.Tensor]:
        """What a draw by the kernel changes, where it does: seeds, steps and marks of tokens."""
        assert self._device is not None
        return [*self._device.state(), *([] if self._seen is None else [self._seen])]

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the distribution from which tokens are drawn: float [batch, vocab] to float32 of the same shape."""
        return self._probabilities(self.scores(logits))

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits in float32, with the penalty for the tokens so far."""
        scores, penalty = logits.float(), self.sampling.repetition_penalty
        if self._seen is None:
            return scores
        return torch.where(self._seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)

    def _probabilities(self, scores: torch.Tensor) -> torch.Tensor:
        s = self.sampling
        scores = scores / s.temperature
        if s.top_k is not None and s.top_k < scores.shape[-1]:
            least = scores.topk(s.top_k, -1).values[:, -1:]
            scores = scores.masked_fill(scores < least, -math.inf)
        probabilities = scores.softmax(-1)
        if s.top_p is not None and s.top_p < 1:
            ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
            before = ordered.cumsum(-1) - ordered
            dropped = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= s.top_p)
            probabilities = probabilities.masked_fill(dropped, 0.0)
        if s.min_p:
            least = s.min_p * probabilities.amax(-1, keepdim=True)
            probabilities = probabilities.masked_fill(probabilities < least, 0.0)
        return probabilities / probabilities.sum(-1, keepdim=True)

    def _in_prompts(self, logits: torch.Tensor) -> torch.Tensor:
        """Which tokens the prompts hold: bool [batch, vocab]."""
        if len(self.prompts) != len(logits):
            raise RunError(
                "a repetition penalty counts the prompts' tokens",
                details=[f"got logits for {len(logits)} sequences, and {len(self.prompts)} prompts"],
            )
        seen = torch.zeros(logits.shape, dtype=torch.bool)
        for row, prompt in zip(seen, self.prompts, strict=True):
            row[prompt.to("cpu", torch.int64)] = True
        return seen.to(logits.device)

    def _on_device(self, logits: torch.Tensor) -> torch.Tensor:
        if self._device is None:
            s = self.sampling
            self._device = DeviceSampler(
                {"temperature": s.temperature, "top_k": s.top_k, "top_p": s.top_p, "min_p": s.min_p},
                self.generator.initial_seed(),
                penalty=s.repetition_penalty,
            )
        return self._device(logits, self._seen)


def tokens_of(drawn: torch.Tensor) -> list[int]:
    """Return the numbers of drawn tokens, int64 [batch]. Raises RunError if a row had none."""
    tokens: list[int] = drawn.tolist()
    if any(token < 0 for token in tokens):
        raise RunError("the model's logits hold NaN, or no token to draw", help=_HELP)
    return tokens


def until_end(steps: Iterable[torch.Tensor], ends: Container[int]) -> Iterator[int]:
    """Yield the tokens of the only sequence, up to one that ends it."""
    for step in steps:
        (token,) = tokens_of(step)
        if token in ends:
            return
        yield token


_HELP = "check the weights, or use a wider dtype"


def is_number(value: Any) -> bool:
    """Whether a value is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
