# SPDX-License-Identifier: Apache-2.0
"""Draw one token for each row of logits.

    s[i]   = logits[i] / penalty, or logits[i] * penalty where it is negative         for tokens seen before
    z[i]   = s[i] / temperature                                                       temperature 0: the first largest s wins
    top_k  keeps z[i] with fewer than k greater ones
    top_p  keeps, of those, the likeliest until they hold p of their probability; of equals those with lower numbers first
    min_p  keeps, of those, the ones with at least min_p times the probability of the likeliest
    token  = argmax of exp(z[i] - max z) / E[i] over what is kept                      E exponential: token i wins with its probability

Shapes: logits [rows, vocab], adjacent along vocab, any stride between rows; seen bool [rows, vocab]; state int64 [rows, 2]
(seed, step); tokens int64 [rows]. Everything is float32 inside, sums are in a fixed order: repeatable bit for bit. E[i] comes from
Philox-4x32-10 with the seed as key and (i // 4, step) as counter: it depends on nothing else, not on how a row is divided into blocks.
With `advance` the kernel adds 1 to the step of its row and marks the token as seen, so a captured graph needs nothing else.

A row with a NaN gives -1; so does, when a token is to be drawn, one whose largest z is infinite: it has no distribution.

One block for each row (`sampling_parts` has several). Tokens that some bound cannot exclude are gathered first, few as a rule; thresholds are then found bit by
bit among them, without a sort.

Source: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011) for Philox; Keskar et al., arXiv 1909.05858,
section 4.1 for the penalty; Fan et al., arXiv 1805.04833 for top-k; Holtzman et al., arXiv 1904.09751 for top-p; Nguyen et al.,
arXiv 2407.01082 for min-p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from nnfront_kernels.common import (
    Config,
    Kernel,
    KernelError,
    Plan,
    launcher,
    require_matrix,
    require_vector,
    rows_refusal,
    taking,
)
from nnfront_kernels.dependent import let_next_start, overlaps, wait_for_earlier
from nnfront_kernels.philox import exponentials
from nnfront_kernels.token_limits import best_of_lanes, draw, draw_filtered, gather, largest, value_of

DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class SampleShape:
    """`rows` rows of `vocab` logits; `greedy` takes the largest, else `filtered` says whether any of top_k, top_p and min_p is given."""

    rows: int
    vocab: int
    greedy: bool = False
    filtered: bool = True
    penalty: bool = False


class Workspace(NamedTuple):
    """Room for the tokens that are gathered; it may hold anything. One per stream."""

    scores: torch.Tensor  # float32 [rows, room]
    ids: torch.Tensor  # int32 [rows, room]


def workspace(rows: int, vocab: int, device: torch.device) -> Workspace:
    """What a launch with top_k, top_p or min_p needs."""
    return with_room(None, rows, _room(vocab), device)


def with_room(given: Workspace | None, rows: int, room: int, device: torch.device) -> Workspace:
    """A workspace with room for so many tokens of each row: the given one, or a new one. Raise KernelError if it has less."""
    if given is None:
        scores, ids = (torch.empty(rows, room, dtype=d, device=device) for d in (torch.float32, torch.int32))
        return Workspace(scores, ids)
    if min(given.scores.numel(), given.ids.numel()) < rows * room:
        raise KernelError(f"workspace must hold {rows * room} tokens, got {given.scores.numel()}")
    return given


@dataclass(frozen=True)
class Draw:
    """The options of a launch that say which token it finds."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    penalty: float = 1.0
    seen: torch.Tensor | None = None
    state: torch.Tensor | None = None
    advance: bool = False
    kept: torch.Tensor | None = None

    @property
    def draws(self) -> bool:
        """Whether there is anything to draw: else the likeliest token is found."""
        return self.temperature > 0

    @property
    def filtered(self) -> bool:
        """Whether tokens are gathered."""
        return self.draws and any(x is not None for x in (self.top_k, self.top_p, self.min_p, self.kept))

    def among(self, vocab: int) -> Draw:
        """The same of so many tokens, None in the place of a limit that keeps all of them."""
        k, p, least = (self.top_k, self.top_p, self.min_p) if self.draws else (None, None, None)
        k = None if k is None or k >= vocab else k
        return replace(
            self,
            top_k=k,
            top_p=None if p is None or p >= 1 else float(p),
            min_p=float(least) if least else None,
        )

    def shape(self, logits: torch.Tensor) -> SampleShape:
        return SampleShape(*logits.shape, not self.draws, self.filtered, self.seen is not None)

    def check(self, logits: torch.Tensor) -> None:
        """Raise KernelError unless the options fit the logits."""
        rows, vocab = logits.shape
        if self.penalty != 1.0 and self.seen is None:
            raise KernelError("a penalty needs to be told which tokens were seen")
        if self.draws and self.state is None:
            raise KernelError("a token is drawn with a seed and a step for each row: state is missing")
        for name, mask in (("seen", self.seen), ("kept", self.kept)):
            if mask is not None:
                require_matrix(name, mask, rows, vocab, torch.bool)
        if self.state is not None:
            require_matrix("state", self.state, rows, 2, torch.int64)
            if rows > 1 and self.state.stride(0) != 2:
                raise KernelError(f"state must be dense, got strides {list(self.state.stride())}")

    def tokens(self, out: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
        """Where tokens are written: `out`, or a new tensor."""
        rows = len(logits)
        out = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
        require_vector("out", out, rows)
        return out

    def scores(self, logits: torch.Tensor, out: torch.Tensor) -> dict[str, Any]:
        """The kernel arguments that z of a token follows from, and where its number goes."""
        return {
            "logits_ptr": logits,
            "token_ptr": out,
            "seen_ptr": None if self.seen is None else self.seen.view(torch.uint8),
            "VOCAB": logits.shape[1],
            "stride_l": logits.stride(0),
            "stride_seen": 0 if self.seen is None else self.seen.stride(0),
            "penalty": None if self.seen is None else float(self.penalty),
            "temperature": float(self.temperature) if self.draws else None,
        }

    def limits(self, vocab: int, space: Workspace | None) -> dict[str, Any]:
        """The kernel arguments of the draw: its numbers, and which tokens it is among."""
        kept = self.kept if self.draws else None
        return {
            "state_ptr": self.state if self.draws else None,
            "kept_ptr": None if kept is None else kept.view(torch.uint8),
            "stride_kept": 0 if kept is None else kept.stride(0),
            "scores_ptr": None if space is None else space.scores,
            "ids_ptr": None if space is None else space.ids,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "nearest": nearest_kept(vocab, self.top_k, self.top_p, self.min_p),
        }


def _room(vocab: int) -> int:
    """Tokens up to a multiple of 16, so that every row can be read in wide loads."""
    return -(-vocab // 16) * 16


def reference(
    logits: torch.Tensor,
    *,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    penalty: float = 1.0,
    seen: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    compute: torch.dtype = torch.float32,
    **_: Any,
) -> torch.Tensor:
    """The definition, with a sort; nothing is advanced."""
    s = logits.to(compute)
    if seen is not None:
        s = torch.where(seen, torch.where(s < 0, s * penalty, s / penalty), s)
    best, token = s.max(-1)
    if temperature == 0:
        return torch.where(best.isnan(), -1, token)
    assert state is not None
    z = s / temperature
    top = z.amax(-1, keepdim=True)
    if top_k is not None and top_k < z.shape[1]:
        z = z.masked_fill(z < z.topk(top_k).values[:, -1:], -math.inf)
    weights = (z - top).exp()
    if top_p is not None and top_p < 1:
        ordered, order = weights.sort(dim=-1, descending=True, stable=True)
        before = ordered.cumsum(-1) - ordered
        dropped = before >= top_p * ordered.sum(-1, keepdim=True)
        weights = weights.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), 0)
    if min_p:
        weights = weights.masked_fill(weights < min_p, 0)
    token = (weights / exponentials(state, z.shape[1])).argmax(-1)
    return torch.where(top[:, 0].isfinite(), token, -1)


# One block for each row: the first where a row fits, else the second. By arithmetic: loads in flight of an SM, 8 values for each thread; not yet measured.
CONFIGS = (Config(1, 4096, 1, 16, 1), Config(1, 1024, 1, 4, 1))


def choose(shape: SampleShape, dtype: str, arch: str) -> Config:
    """Few threads for few tokens."""
    return CONFIGS[1] if shape.vocab <= CONFIGS[1].block_n else CONFIGS[0]


@triton.jit(do_not_specialize=["top_k"])
def sampling_kernel(
    logits_ptr,
    token_ptr,
    state_ptr,
    seen_ptr,  # uint8
    kept_ptr,  # uint8
    scores_ptr,
    ids_ptr,
    VOCAB,
    ROOM,
    stride_l,
    stride_seen,
    stride_kept,
    penalty,
    temperature,  # None: the largest
    top_k,
    top_p,
    min_p,
    nearest,  # tokens this far below the largest cannot be kept, None if that is not known
    ADVANCE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_earlier(PDL)
    let_next_start(PDL)
    FILTERED: tl.constexpr = scores_ptr is not None
    row = tl.program_id(0).to(tl.int64)
    logits = logits_ptr + row * stride_l
    seen = None
    if seen_ptr is not None:
        seen = seen_ptr + row * stride_seen
    lane = tl.arange(0, BLOCK)
    best, token = best_of_lanes(logits, seen, 0, VOCAB, penalty, temperature, BLOCK)
    top = tl.max(best, axis=0)
    has_nan = tl.max((best != best).to(tl.int32), axis=0) > 0
    winner = tl.min(tl.where(best == top, token, VOCAB), axis=0)
    if temperature is None:
        winner = tl.where(has_nan, -1, winner)
    else:
        if has_nan | (tl.abs(top) == float("inf")):
            winner = -1
        else:
            seed = tl.load(state_ptr + 2 * row)
            step = tl.load(state_ptr + 2 * row + 1)
            if FILTERED:
                scores = scores_ptr + row * ROOM
                ids = ids_ptr + row * ROOM
                kept = None
                if kept_ptr is not None:
                    kept = kept_ptr + row * stride_kept
                low = top - float("inf")
                if top_k is not None:
                    # Lanes hold different tokens, so the k-th largest of lanes is at most that of all tokens.
                    tl.store(scores + lane, best, mask=lane < VOCAB)
                    tl.debug_barrier()
                    low = value_of(
                        largest(
                            scores, tl.minimum(VOCAB, BLOCK), ROOM, top, top_k.to(tl.float32), False, BLOCK
                        )
                    )
                if nearest is not None:
                    low = tl.maximum(low, top + nearest)
                count, total = gather(
                    logits, seen, scores, ids, kept, top, low, 0, VOCAB, penalty, temperature, BLOCK
                )
                winner = draw_filtered(
                    scores, ids, kept, count, ROOM, top, total, seed, step, top_k, top_p, min_p, VOCAB, BLOCK
                )
            else:
                _, winner = draw(logits, seen, top, seed, step, 0, VOCAB, penalty, temperature, BLOCK)
    tl.store(token_ptr + row, winner.to(tl.int64))
    if ADVANCE:
        if temperature is not None:
            tl.store(state_ptr + 2 * row + 1, tl.load(state_ptr + 2 * row + 1) + 1)
        if seen_ptr is not None:
            tl.store(seen + winner, 1, mask=winner >= 0)


@taking(DTYPES)
def accepts(shape: SampleShape, dtype: str, arch: str) -> str | None:
    if not 1 <= shape.vocab < 2**24:
        return f"there must be at least 1 token and less than 2^24, got {shape.vocab}"
    return rows_refusal(shape.rows)


def plan(
    logits: torch.Tensor,
    *,
    workspace: Workspace | None = None,
    out: torch.Tensor | None = None,
    arch: str | None = None,
    config: Config | None = None,
    **options: Any,
) -> Plan:
    """One token for each row of logits [rows, vocab], int64 [rows]; -1 for a row that has none.

    Options: temperature, 0 by default; top_k, top_p, min_p; penalty and seen; state, needed with a temperature; advance, to count the
    step and mark the token; kept, a bool [rows, vocab] to write to which tokens could have been drawn, for rows that are drawn from;
    workspace; out, to write to.
    """
    require_matrix("logits", logits, None, logits.shape[-1], None)
    rows, vocab = logits.shape
    draw = Draw(**options).among(vocab)
    arch, config = KERNEL.settle(draw.shape(logits), logits, arch, config)
    draw.check(logits)
    out = draw.tokens(out, logits)
    space = with_room(workspace, rows, _room(vocab), logits.device) if draw.filtered else None
    return Plan(
        kernel=sampling_kernel,
        grid=(rows,),
        arguments={**draw.scores(logits, out), **draw.limits(vocab, space), "ROOM": _room(vocab)},
        constants={"ADVANCE": draw.advance, "BLOCK": config.block_n, "PDL": overlaps(arch)},
        config=config,
        output=out,
    )


def nearest_kept(vocab: int, top_k: int | None, top_p: float | None, min_p: float | None) -> float | None:
    """How far below the largest z a token must be to be dropped for certain; None if that cannot be said.

    All tokens that are each less likely than (1 - p) / vocab of the likeliest hold less than 1 - p together. What top_k leaves out
    may not count in the sum for top_p, so with both nothing is said.
    """
    if top_k is not None and top_p is not None:
        return None
    bounds = [] if top_p is None else [math.log((1 - top_p) / vocab)]
    bounds += [] if min_p is None else [math.log(min_p)]
    return max(bounds) - 1.0 if bounds else None  # 1: far more than rounding can move a weight


def example(shape: SampleShape, dtype: str, device: str = "meta") -> tuple[tuple[Any, ...], dict[str, Any]]:
    logits = torch.empty(shape.rows, shape.vocab, dtype=getattr(torch, dtype), device=device)
    options: dict[str, Any] = {}
    if shape.penalty:
        seen = torch.zeros(shape.rows, shape.vocab, dtype=torch.bool, device=device)
        options |= {"penalty": 1.1, "seen": seen}
    if not shape.greedy:
        state = torch.zeros(shape.rows, 2, dtype=torch.int64, device=device)
        options |= {"temperature": 0.8, "state": state}
    if shape.filtered and not shape.greedy:
        options |= {"top_k": 50, "top_p": 0.9, "min_p": 0.02}
    return (logits,), options


launch = launcher(plan)
KERNEL = Kernel.of(
    globals(),
    shared_bytes=lambda config: 8 * config.block_n,
    typical=SampleShape(64, 128256, penalty=True),
)
