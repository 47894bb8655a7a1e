# SPDX-License-Identifier: Apache-2.0
"""How numbers are rounded to few bits: scales by the largest element or by the least error, integers, and places in tables of values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from math import copysign, frexp

import torch

from nnfront.quant_format import QuantFormat


def integers(y: torch.Tensor, low: int, high: int, dtype: torch.dtype) -> torch.Tensor:
    """Return rounded numbers; what is NaN is 0, beside a scale that is NaN."""
    return y.round().clamp_(low, high).nan_to_num_(0).to(dtype)


# Scales that are tried, by where the largest element of a group comes to lie: at 1 it is the last integer. Most groups of normally distributed weights have
# their least error at less: elements beyond are few. More of them take time and gain little: 4 bits, groups of 32, mean squared error
# 0.00943 of the mean square without, 0.00708 with one, 0.00672 with three, 0.00668 with these, 0.00657 with sixteen.
PLACES = (1.1, 1.0, 0.95, 0.85, 0.75)
TABLE_PLACES = (1.25, 1.1, 1.0, 0.85, 0.72)
STEPS = 1024
PIECE = 1 << 19


def by_pieces(fit: Callable[..., tuple[torch.Tensor, ...]], y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return what `fit` gives for groups along the last axis: of so many elements at a time that they stay in caches, and that torch shares each of its many short steps out."""
    groups = y.reshape(-1, y.shape[-1])
    found = zip(*map(fit, torch.split(groups, max(PIECE // max(y.shape[-1], 1), 1))), strict=True)
    return tuple(torch.cat(parts).view(*y.shape[:-1], parts[0].shape[-1]) for parts in found)


def by_rows(
    function: Callable[..., tuple[torch.Tensor, ...]],
    elements: int,
    rows: torch.Tensor,
    *others: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """Return what a function gives for rows, and what others hold of them, so many elements at a time on each thread."""
    step = max(elements // max(rows.shape[1], 1), 1)
    if len(rows) <= step:
        return function(rows, *others)
    parts = (torch.split(each, step) for each in (rows, *others))
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return tuple(torch.cat(each) for each in zip(*pool.map(function, *parts), strict=True))


def fitted(y: torch.Tensor, bits: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return signed integers and scales for groups along the last axis. For integers q the best scale is sum(y q) / sum(q q), and lowers the error by sum(y q)^2 / sum(q q)."""
    half = 2 ** (bits - 1)
    largest = y.gather(-1, y.abs().argmax(-1, keepdim=True))
    scale, best = torch.ones_like(largest), torch.zeros_like(largest)
    unit = y / largest  # so that no square is too large
    q, products = torch.empty_like(y), torch.empty_like(y)
    for place in PLACES:
        torch.mul(unit, -half * place, out=q).round_().clamp_(-half, half - 1)
        with_y = torch.mul(unit, q, out=products).sum(-1, keepdim=True)
        with_q = torch.mul(q, q, out=products).sum(-1, keepdim=True)
        gain = with_y.square() / with_q
        is_better = gain > best
        scale, best = torch.where(is_better, with_y / with_q, scale), torch.where(is_better, gain, best)
    scale = _stored(scale * largest, largest, dtype)
    return integers(torch.div(y, scale.to(y.dtype), out=q), -half, half - 1, torch.int8), scale


def fitted_between(y: torch.Tensor, bits: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return integers from 0, scales and zero points for groups along the last axis: ranges about the middle of each group, and the best scale for each."""
    most = 2**bits - 1
    low, high = y.amin(-1, keepdim=True).clamp(max=0), y.amax(-1, keepdim=True).clamp(min=0)
    scale, zero = torch.ones_like(low), torch.zeros_like(low)
    spread, best = high - low, torch.full_like(low, torch.inf)
    unit, both = y / spread, (high + low) / spread
    for place in PLACES[1:]:
        tried = torch.full_like(low, place / most)
        at = (both / tried).sub_(most).div_(-2).round_().clamp_(0, most)
        for _ in range(2):
            q = (unit / tried).round_().add_(at).clamp_(0, most).sub_(at)
            error = (q * tried).sub_(unit).square_().sum(-1, keepdim=True)
            is_better = error < best
            scale, zero = torch.where(is_better, tried, scale), torch.where(is_better, at, zero)
            best = torch.where(is_better, error, best)
            tried = (unit * q).sum(-1, keepdim=True) / q.square_().sum(-1, keepdim=True)
    scale = _stored(scale * spread, spread, dtype)
    q = integers((y / scale.to(y.dtype)).round_().add_(zero), 0, most, torch.uint8)
    return q, scale, zero.to(torch.uint8)


def fitted_values(y: torch.Tensor, axis: int, known: QuantFormat) -> tuple[torch.Tensor, ...]:
    """Return places of values, scales of float8_e4m3fn, and factors that are shared by the scales along `axis`, for groups along the last axis."""
    extreme = max(known.values, key=abs)
    # That of the largest scale that is tried.
    reach = torch.finfo(torch.float8_e4m3fn).max * TABLE_PLACES[-1] * abs(extreme)
    none = torch.zeros_like(y.sum((axis, -1), keepdim=True))  # of an axis without groups there is no largest
    factor = torch.cat([none, y.abs().amax(-1, keepdim=True) / reach], axis).amax(axis, keepdim=True)
    factor = torch.where(factor == 0, torch.ones_like(factor), factor)
    # The value nearest to each of many numbers: while scales are tried a table is as good as finding it each time, in a tenth of the time.
    every = torch.arange(-STEPS, STEPS + 1, dtype=y.dtype, device=y.device) * (abs(extreme) / STEPS)
    nearby = looked_up(nearest(every, known.values), known.values, y.dtype)
    places, scale = by_pieces(partial(_fitted_values, known, nearby), y / factor)
    return places, scale, factor.to(torch.float32)


def _fitted_values(
    known: QuantFormat, nearby: torch.Tensor, y: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    float8, extreme = torch.float8_e4m3fn, max(known.values, key=abs)
    largest = y.gather(-1, y.abs().argmax(-1, keepdim=True))
    if -extreme in known.values:
        largest = largest.abs()
    scale, best = torch.ones_like(largest), torch.full_like(largest, torch.inf)
    least = torch.full_like(largest, torch.finfo(float8).smallest_normal / 8)
    for place in TABLE_PLACES:
        tried = largest / (extreme * place)
        for _ in range(2):
            tried = tried.to(float8).to(y.dtype)
            tried = torch.where(tried == 0, least, tried)
            at = (y * (STEPS / abs(extreme) / tried)).clamp_(-STEPS, STEPS).add_(STEPS + 0.5)
            values = nearby.index_select(0, at.nan_to_num_(0).to(torch.int32).flatten()).view(y.shape)
            error = (values * tried).sub_(y).square_().sum(-1, keepdim=True)
            is_better = error < best
            scale, best = torch.where(is_better, tried, scale), torch.where(is_better, error, best)
            tried = (y * values).sum(-1, keepdim=True) / values.square_().sum(-1, keepdim=True)
    places = nearest((y / scale).nan_to_num_(0), known.values)
    scale = torch.where(largest.isfinite(), scale, torch.full_like(scale, torch.nan))
    return places, scale.to(float8)


def _stored(scale: torch.Tensor, spread: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scales in their dtype: 1 where they would be 0, NaN where a group is not finite."""
    rounded = scale.to(dtype)
    rounded = torch.where((rounded == 0) | (spread == 0), torch.ones_like(rounded), rounded)
    return torch.where(spread.isfinite(), rounded, torch.full_like(rounded, torch.nan))


def scale_places(most: torch.Tensor, known: QuantFormat) -> torch.Tensor:
    """Return the place of the largest scale that is not above max|x| / 2**e, where 2**e is the greatest power of two among the values; NaN for what is not finite."""
    power = 2.0 ** (frexp(max(known.values))[1] - 1)
    finite = torch.tensor(known.scale_values[:-1], dtype=most.dtype, device=most.device)
    places = torch.bucketize(most / power, finite, right=True).sub_(1).clamp_(min=0)
    return torch.where(most.isfinite(), places, len(known.scale_values) - 1).to(torch.uint8)


def looked_up(places: torch.Tensor, values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
    """Return what stands at places of a table."""
    return torch.tensor(values, dtype=dtype, device=places.device)[places.to(torch.int32)]


def nearest(y: torch.Tensor, values: Sequence[float]) -> torch.Tensor:
    """Return the place of the nearest of some values, uint8; of two as near the even place, and of two zeros the one of the same sign."""
    places = {value: place for place, value in reversed(list(enumerate(values)))}
    ordered = sorted(places)
    middles = torch.tensor([(low + high) / 2 for low, high in pairwise(ordered)], dtype=y.dtype)
    # What is not above a middle is rounded down, so the middle of an odd place and an even one has to be just out of reach.
    is_odd = torch.tensor([places[low] % 2 == 1 for low in ordered[:-1]])
    middles = torch.where(is_odd, torch.nextafter(middles, torch.full_like(middles, -torch.inf)), middles)
    ranks = torch.bucketize(y, middles.to(y.device), out_int32=True)
    found = torch.tensor([places[value] for value in ordered], dtype=torch.uint8, device=y.device)[ranks]
    for place, value in enumerate(values):
        if value == 0 and copysign(1, value) < 0:
            found.masked_fill_(torch.signbit(y) & (found == places[0.0]), place)
    return found


def rounded_up(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return scales in their dtype, never less than given (the largest element must fit), 1 for a group of zeros."""
    rounded = scale.to(dtype)
    short = rounded.to(scale.dtype) < scale
    rounded = torch.where(short, torch.nextafter(rounded, torch.full_like(rounded, torch.inf)), rounded)
    rounded = torch.where(scale == 0, torch.ones_like(rounded), rounded)
    return torch.where(scale.isfinite(), rounded, torch.full_like(rounded, torch.nan))
