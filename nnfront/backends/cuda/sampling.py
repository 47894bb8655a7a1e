# SPDX-License-Identifier: Apache-2.0
"""Draw tokens where the logits are: one launch or two for a batch, nothing read back, the same buffers every time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nnfront.backends.cuda.kernel_package import kernel_module
from nnfront.backends.cuda.shared_workspace import sharing
from nnfront.backends.device import current, sent


def _kernel(vocab: int) -> Any:
    """One block for a row of few tokens, several for one of many."""
    parts = kernel_module("sampling_parts")
    return parts if vocab >= parts.LEAST else kernel_module("sampling")


def takes(logits: torch.Tensor) -> bool:
    """Whether the kernel draws from such logits on the device that they are on: it has not been made for every GPU."""
    common, kernel = kernel_module("common"), kernel_module("sampling")
    shape = kernel.SampleShape(*logits.shape)
    reason = kernel.accepts(shape, common.dtype_name(logits), common.arch_of(logits.device))
    return reason is None


# Ways of drawing whose kernels are compiled ahead, with and without a penalty; values only say what is there.
COMMON: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 1.0, "top_k": 50},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "top_k": 50, "top_p": 0.9},
)


def enumerate_draws(logits: torch.Tensor) -> None:
    """Launch the kernel in each of the common ways; nothing if it does not take such logits."""
    if not takes(logits):
        return
    for given in COMMON:
        options = {"top_k": None, "top_p": None, "min_p": None, **given}
        for seen in (None, torch.empty(logits.shape, dtype=torch.bool, device=logits.device)):
            DeviceSampler(options, 0, penalty=1.1)(logits, seen)


def draw_at(
    logits: torch.Tensor, options: Mapping[str, Any], states: Sequence[tuple[int, int]]
) -> torch.Tensor:
    """Return one token for each row, which has a seed and a step of its own: float [rows, vocab] to int64 [rows], -1 for a row that has none."""
    numbers = [(_signed(seed), step) for seed, step in states]
    state = {"state": sent(numbers, torch.int64, logits.device)} if options["temperature"] else {}
    with current(logits.device), sharing():
        # Steps are advanced, though nobody reads them again: so it is the kernel that is compiled ahead.
        kernel = _kernel(logits.shape[-1])
        token: torch.Tensor = kernel.launch(logits, **options, **state, advance=True)
    return token


class DeviceSampler:
    """A launch of the kernel `sampling` for each call, or two of `sampling_parts`. Seeds, steps and marks of seen tokens lie on the device and the kernel advances
    them, so a launch can be captured and replayed.

    Row r counts its steps from r * 2^32 on, so rows draw different numbers from one seed.
    """

    def __init__(self, options: Mapping[str, Any], seed: int, *, penalty: float = 1.0) -> None:
        """options: temperature, top_k, top_p and min_p as the kernel has them. seed: any 64 bits."""
        self._options = dict(options)
        self._penalty = penalty
        self._seed = _signed(seed)
        self._calls = 0
        self._buffers: dict[str, Any] = {}
        self._shape: tuple[int, ...] = ()

    def __call__(self, logits: torch.Tensor, seen: torch.Tensor | None) -> torch.Tensor:
        """Return one token for each row, float [batch, vocab] to int64 [batch], -1 for a row that has none.

        seen: bool [batch, vocab], the tokens that the penalty is for; what is drawn is added to them.
        """
        kernel = _kernel(logits.shape[-1])
        rows = logits if logits.stride(-1) == 1 else logits.contiguous()
        if rows.shape != self._shape:
            self._shape = tuple(rows.shape)
            self._buffers = self._made(kernel, rows)
        self._calls += 1
        with current(logits.device), sharing():
            token: torch.Tensor = kernel.launch(
                rows,
                **self._options,
                **self._buffers,
                **({} if seen is None else {"seen": seen, "penalty": self._penalty}),
                advance=True,
            )
        return token

    def restart(self, seed: int) -> None:
        """Begin again with another seed, in the same buffers."""
        self._seed, self._calls = _signed(seed), 0
        if "state" in self._buffers:
            self._buffers["state"].copy_(self._state(self._buffers["state"]))

    def state(self) -> list[torch.Tensor]:
        """Seeds and steps, where the kernel advances them."""
        return [self._buffers["state"]] if "state" in self._buffers else []

    def _state(self, like: torch.Tensor) -> torch.Tensor:
        """Seeds and steps for as many rows."""
        return sent(
            [[self._seed, (row << 32) + self._calls] for row in range(len(like))], torch.int64, like.device
        )

    def _made(self, kernel: Any, logits: torch.Tensor) -> dict[str, Any]:
        """Seeds and steps for a batch, and room for what the kernel gathers."""
        if not self._options["temperature"]:
            return {}
        state = self._state(logits)
        limits = (self._options[name] for name in ("top_k", "top_p", "min_p"))
        if all(limit is None for limit in limits):
            return {"state": state}
        return {"state": state, "workspace": kernel.workspace(*logits.shape, logits.device)}


def _signed(seed: int) -> int:
    """64 bits as int64 has them."""
    return (seed + 2**63) % 2**64 - 2**63
