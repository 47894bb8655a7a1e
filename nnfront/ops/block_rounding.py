# SPDX-License-Identifier: Apache-2.0
"""Numbers in blocks of bytes, as GGUF's K-quants: how a block is read and written, and how its scales are found.

A block of 256 numbers, or the first half of one, which a row may end with:

    q4_k, q5_k    d and dmin in float16; eight scales and eight minima of 6 bits; of q5_k 32 bytes of highest bits, bit g of byte i for number i of group g; four bits of each number,
                  those of 32 numbers in the low halves of bytes, those of the next 32 in the high ones
    q6_k          for each 128 numbers 64 bytes, their low halves first; for each 128 numbers 32 bytes of two highest bits, four times 32; sixteen scales in int8; d in float16
"""

from __future__ import annotations

from functools import partial
from math import prod

import torch

from nnfront.ops.rounding import by_pieces
from nnfront.quant_format import BlockLayout, QuantFormat

# Where a group begins and ends that is tried, in steps from one integer to the next inside its least and its largest number. Normally distributed weights, mean squared error in
# units of 1e-3 of the mean square, q4_k: 4.91 with four ends, 4.90 with five; q5_k 1.23 and 1.22.
ENDS = (-0.4, -0.1, 0.2, 0.5, 0.8)
# How far from what is wanted the integers of scales are tried, and how often with the minimum that is best then. Twice with units of the least error; 4.92 and 1.25 with three and once.
NEAR = ((-2, 1), (-1, 1), (0, 2), (1, 1), (2, 1))
TIMES = 3
# Where the largest number of a group of 6 bits comes to lie, as for `fitted`.
PLACES = (1.04, 1.0, 0.96, 0.92)
SIXES = 63
BYTES = 127
LEAST = 2.0**-24  # of float16


def in_blocks(x: torch.Tensor, format: QuantFormat) -> torch.Tensor:
    """Return floats [..., n] in blocks [..., bytes]."""
    block = _block(format)
    rows = _rows(x).to(torch.float32)
    fit = partial(_symmetric if format.symmetric else _between, format.bits)
    parts = [
        by_pieces(fit, part)[0].flatten(1) for part, _ in _split(rows, block.numbers, block.numbers // 2)
    ]
    return torch.cat([rows.new_empty((len(rows), 0), dtype=torch.uint8), *parts], 1).view(
        *x.shape[:-1], block.row_bytes(x.shape[-1])
    )


def out_of_blocks(q: torch.Tensor, format: QuantFormat) -> torch.Tensor:
    """Return what blocks [..., bytes] stand for, in float32 [..., n]."""
    block = _block(format)
    rows = _rows(q)
    read = _read_symmetric if format.symmetric else _read_between
    parts = [
        read(part, block.numbers if is_whole else block.numbers // 2).flatten(1)
        for part, is_whole in _split(rows, block.bytes, block.half)
    ]
    found = torch.cat([rows.new_empty((len(rows), 0), dtype=torch.float32), *parts], 1)
    return found.view(*q.shape[:-1], found.shape[1])


def with_numbers(blocks: torch.Tensor, q: torch.Tensor, format: QuantFormat) -> torch.Tensor:
    """Return blocks [rows, bytes] with other numbers [rows, n], from 0, and the scales that they have."""
    block, found = _block(format), []
    assert format.group_size is not None
    old = _split(blocks, block.bytes, block.half)
    new = _split(q, block.numbers, block.numbers // 2)
    for (part, _), (numbers, _) in zip(old, new, strict=True):
        data, groups = part.flatten(0, 1), numbers.shape[-1] // format.group_size
        grouped = numbers.to(torch.uint8).reshape(len(data), groups, format.group_size)
        if format.symmetric:
            written = _numbers_symmetric(grouped)
            data = torch.cat([written, data[:, written.shape[1] :]], 1)
        else:
            written = _numbers_between(format.bits, grouped)
            data = torch.cat([data[:, : -written.shape[1]], written], 1)
        found.append(data.view(part.shape).flatten(1))
    return torch.cat([blocks[:, :0], *found], 1)


def _block(format: QuantFormat) -> BlockLayout:
    assert format.block is not None
    return format.block


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(prod(x.shape[:-1]), x.shape[-1])


def _split(rows: torch.Tensor, whole: int, half: int) -> list[tuple[torch.Tensor, bool]]:
    """Whole blocks [rows, blocks, size] and, where rows end with it, the half of one; whether they are whole."""
    count, rest = divmod(rows.shape[1], whole)
    parts = [(rows[:, : count * whole].reshape(len(rows), count, whole), True)] if count else []
    return parts + ([(rows[:, None, count * whole :], False)] if rest else [])


def _half(two: torch.Tensor) -> torch.Tensor:
    """Two bytes along the last axis as a float16."""
    return two.contiguous().view(torch.float16)


def _shifts(count: int, step: int, like: torch.Tensor) -> torch.Tensor:
    """How far each of several fields of a byte is from its lowest bit, [count, 1]."""
    return torch.arange(0, count * step, step, dtype=torch.uint8, device=like.device).unsqueeze(1)


def scales_in(q: torch.Tensor, format: QuantFormat) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scale and the minimum of each number in blocks [..., bytes], in float32 [..., n]: scale * q - minimum is what it stands for."""
    block = _block(format)
    of = _scales_symmetric if format.symmetric else _scales_between
    parts = [
        of(part, block.numbers if is_whole else block.numbers // 2)
        for part, is_whole in _split(_rows(q), block.bytes, block.half)
    ]
    assert format.group_size is not None
    scale, minimum = (torch.cat([x.flatten(1) for x in found], 1) for found in zip(*parts, strict=True))
    return scale.repeat_interleave(format.group_size, 1), minimum.repeat_interleave(format.group_size, 1)


def _scales_between(data: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and minima of the groups of blocks, in float32 [..., groups]."""
    groups = count // 32
    d = _half(data[..., :4]).float()
    first, second, third = (data[..., at : at + 4] for at in (4, 8, 12))
    scales = torch.cat([first & 63, third & 15 | first >> 6 << 4], -1)[..., :groups]
    minima = torch.cat([second & 63, third >> 4 | second >> 6 << 4], -1)[..., :groups]
    return d[..., :1] * scales, d[..., 1:] * minima


def _read_between(data: torch.Tensor, count: int) -> torch.Tensor:
    """Blocks of `count` numbers with minima [..., bytes] as float32 [..., count]."""
    groups, shape = count // 32, data.shape[:-1]
    scales, minima = _scales_between(data, count)
    pairs = data[..., -count // 2 :].reshape(*shape, groups // 2, 1, 32)
    q = (pairs >> _shifts(2, 4, data) & 15).reshape(*shape, groups, 32)
    if data.shape[-1] - count // 2 > 16:
        q = q | (data[..., None, 16:48] >> _shifts(groups, 1, data) & 1) << 4
    return (scales.unsqueeze(-1) * q - minima.unsqueeze(-1)).flatten(-2)


def _scales_symmetric(data: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales of the groups of blocks without minima, in float32 [..., groups], and zeros."""
    scales = data[..., count * 3 // 4 : -2].contiguous().view(torch.int8)
    found = _half(data[..., -2:]).float() * scales
    return found, torch.zeros_like(found)


def _read_symmetric(data: torch.Tensor, count: int) -> torch.Tensor:
    """Blocks of `count` numbers of 6 bits [..., bytes] as float32 [..., count]."""
    shape, halves, low, high = data.shape[:-1], count // 128, count // 2, count * 3 // 4
    q = (data[..., :low].reshape(*shape, halves, 1, 64) >> _shifts(2, 4, data) & 15).flatten(-3)
    twos = data[..., low:high].reshape(*shape, halves, 1, 32) >> _shifts(4, 2, data) & 3
    q = (q | twos.flatten(-3) << 4).to(torch.int8) - 32
    by = _scales_symmetric(data, count)[0]
    return (by.unsqueeze(-1) * q.reshape(*shape, count // 16, 16)).flatten(-2)


def _as_bytes(half: torch.Tensor) -> torch.Tensor:
    return half.to(torch.float16).contiguous().view(torch.uint8)


def _joined(q: torch.Tensor, width: int) -> torch.Tensor:
    """Fields [..., fields, n] of so many bits as bytes [..., n], the first one lowest."""
    joined = q[..., 0, :]
    for i in range(1, q.shape[-2]):
        joined = joined | q[..., i, :] << width * i
    return joined


def _write_between(
    bits: int, d: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor, q: torch.Tensor
) -> torch.Tensor:
    """Blocks of bytes from d and dmin [n, 2], scales and minima [n, groups] and numbers [n, groups, 32]."""
    if scales.shape[1] < 8:
        scales, minima = (torch.cat([x, torch.zeros_like(x)], 1) for x in (scales, minima))
    low, high = (torch.stack([scales[:, at], minima[:, at]], 1) for at in (slice(0, 4), slice(4, 8)))
    ends = (low | high >> 4 << 6).flatten(1), high[:, 0] & 15 | high[:, 1] << 4
    return torch.cat([_as_bytes(d), *ends, _numbers_between(bits, q)], 1)


def _numbers_between(bits: int, q: torch.Tensor) -> torch.Tensor:
    """The bytes of numbers [n, groups, 32]."""
    pairs = _joined((q & 15).view(len(q), q.shape[1] // 2, 2, 32), 4).flatten(1)
    return pairs if bits == 4 else torch.cat([_joined(q >> 4, 1), pairs], 1)


def _write_symmetric(d: torch.Tensor, scales: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Blocks of bytes from d [n, 1], scales int8 [n, groups] and numbers from 0 [n, groups, 16]."""
    return torch.cat([_numbers_symmetric(q), scales.view(torch.uint8), _as_bytes(d)], 1)


def _numbers_symmetric(q: torch.Tensor) -> torch.Tensor:
    """The bytes of numbers from 0 [n, groups, 16]."""
    low = _joined((q & 15).view(len(q), q.shape[1] // 8, 2, 64), 4).flatten(1)
    high = _joined((q >> 4).view(len(q), q.shape[1] // 8, 4, 32), 2).flatten(1)
    return torch.cat([low, high], 1)


def _quotient(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """x / by, 0 where that is 0."""
    return torch.where(by == 0, torch.zeros_like(x), x / by)


def _finite(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks with zeros in the place of those that are not finite, and what d is to be multiplied with: 1, or NaN for those."""
    lost = y.sum(-1, keepdim=True) * 0
    return torch.where(lost == 0, y, torch.zeros_like(y)), lost + 1


def _between(bits: int, y: torch.Tensor) -> tuple[torch.Tensor]:
    """Blocks of bytes for rows [n, 256] or [n, 128]. For each group the best of some scales and minima; then integers that are multiples of the block's, and
    neighbours of them, each scale with the minimum that is best for it; then d and dmin again, by the least error of the block."""
    most = 2**bits - 1
    y, kept = _finite(y)
    y = y.view(len(y), y.shape[-1] // 32, 32)
    q, work = torch.empty_like(y), torch.empty_like(y)
    scale, minimum = _ends(y, most, q, work)
    d, dmin = (_rounded(x.amax(1, keepdim=True) / SIXES) for x in (scale, minimum))
    for time in range(TIMES):
        scales, minima = _sixes(y, most, (scale, minimum), (d, dmin), q, work)
        _numbers(y, d * scales, dmin * minima, most, q)
        if time + 1 < TIMES:
            d, dmin = _least(y, q, work, scales, minima, d, dmin)
            scale, minimum = d * scales, dmin * minima
    both = torch.cat([d.flatten(1) * kept, dmin.flatten(1)], 1)
    integers = [x.flatten(1).to(torch.uint8) for x in (scales, minima)]
    return (_write_between(bits, both, integers[0], integers[1], q.to(torch.uint8)),)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """What float16 makes of numbers, not 0 of others than 0: what is a multiple of it would be lost."""
    found, least = x.to(torch.float16).to(x.dtype), torch.full_like(x, LEAST)
    return torch.where((found == 0) & (x != 0), least.copysign(x), found)


def _numbers(
    y: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor, most: int, out: torch.Tensor
) -> None:
    """The integers from 0 of which scale * q - minimum is nearest to y."""
    inverse = _quotient(torch.ones_like(scale), scale)
    torch.mul(y, inverse, out=out).add_(minimum * inverse).round_().clamp_(0, most)


def _sums(y: torch.Tensor, q: torch.Tensor, work: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The sums of q, q * q and q * y over groups."""
    with_q = torch.mul(q, q, out=work).sum(-1, keepdim=True)
    return q.sum(-1, keepdim=True), with_q, torch.mul(q, y, out=work).sum(-1, keepdim=True)


def _ends(
    y: torch.Tensor, most: int, q: torch.Tensor, work: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The best scale and minimum of each group. For integers q these are a regression's; with a minimum below 0, which there is not, it goes through 0."""
    low, high = y.amin(-1, keepdim=True).clamp_(max=0), y.amax(-1, keepdim=True)
    spread, all_of_y, count = high - low, y.sum(-1, keepdim=True), y.shape[-1]
    scale, minimum, best = torch.zeros_like(low), torch.zeros_like(low), torch.full_like(low, -1)
    for first in ENDS:
        for last in ENDS:
            tried = spread * ((1 - (first + last) / most) / most)
            _numbers(y, tried, -low - spread * (first / most), most, q)
            with_one, with_q, with_y = _sums(y, q, work)
            by = with_y - with_one * all_of_y / count
            slope = _quotient(by, with_q - with_one * with_one / count)
            less = (slope * with_one - all_of_y) / count
            through = _quotient(with_y, with_q)
            gain = torch.where(less < 0, through * with_y - all_of_y * all_of_y / count, slope * by)
            is_better = gain > best
            scale = torch.where(is_better, torch.where(less < 0, through, slope), scale)
            minimum = torch.where(is_better, less.clamp(min=0), minimum)
            best = torch.where(is_better, gain, best)
    return scale.clamp_(min=0), minimum


def _sixes(
    y: torch.Tensor,
    most: int,
    wanted: tuple[torch.Tensor, torch.Tensor],
    units: tuple[torch.Tensor, torch.Tensor],
    q: torch.Tensor,
    work: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The integers of 6 bits near those that are wanted, times units, that have the least error."""
    d, dmin = units
    near = [_quotient(x, unit).round_().clamp_(0, SIXES) for x, unit in zip(wanted, units, strict=True)]
    scales, minima = near
    best = torch.full_like(scales, torch.inf)
    for step, turns in NEAR:
        tried, less = (near[0] + step).clamp_(min(1, SIXES), SIXES), near[1]
        for _ in range(turns):
            _numbers(y, d * tried, dmin * less, most, q)
            above = torch.mul(q, d * tried, out=work).sub_(y)
            mean = above.mean(-1, keepdim=True)
            less = _quotient(mean, dmin).round_().clamp_(0, SIXES)
            lost = dmin * less
            error = above.square_().sum(-1, keepdim=True) + y.shape[-1] * lost * (lost - 2 * mean)
            is_better = error < best
            scales, minima = torch.where(is_better, tried, scales), torch.where(is_better, less, minima)
            best = torch.where(is_better, error, best)
    return scales, minima


def _least(
    y: torch.Tensor,
    q: torch.Tensor,
    work: torch.Tensor,
    scales: torch.Tensor,
    minima: torch.Tensor,
    d: torch.Tensor,
    dmin: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """d and dmin of the least error of each block, with its integers as they are; as they were where there are none."""
    with_one, with_q, with_y = _sums(y, q, work)

    def over(x: torch.Tensor) -> torch.Tensor:
        return x.sum(1, keepdim=True)

    aa = over(scales * scales * with_q)
    ab = over(scales * minima * with_one)
    bb = over(minima * minima) * y.shape[-1]
    ay, by = over(scales * with_y), over(minima * y.sum(-1, keepdim=True))
    divisor = aa * bb - ab * ab
    found = (ay * bb - ab * by) / divisor, (ab * ay - aa * by) / divisor
    is_one = (divisor > 0) & (found[0] > 0) & (found[1] > 0)
    return _rounded(torch.where(is_one, found[0], d)), _rounded(torch.where(is_one, found[1], dmin))


def _symmetric(bits: int, y: torch.Tensor) -> tuple[torch.Tensor]:
    """Blocks of bytes for rows [n, 256] or [n, 128] without minima, likewise."""
    half = 2 ** (bits - 1)
    y, kept = _finite(y)
    y = y.view(len(y), y.shape[-1] // 16, 16)
    q, work = torch.empty_like(y), torch.empty_like(y)
    largest = y.gather(-1, y.abs().argmax(-1, keepdim=True))
    scale, best = torch.zeros_like(largest), torch.zeros_like(largest)
    for place in PLACES:
        _signed(y, largest / (-half * place), half, q)
        _, with_q, with_y = _sums(y, q, work)
        found = _quotient(with_y, with_q)
        is_better = found * with_y > best
        scale, best = torch.where(is_better, found, scale), torch.where(is_better, found * with_y, best)
    d = _rounded(scale.gather(1, scale.abs().argmax(1, keepdim=True)) / -(BYTES + 1))
    for is_last in (False, True):
        near = _quotient(scale, d).round_().clamp_(-BYTES - 1, BYTES)
        scales, least = near, torch.full_like(near, torch.inf)
        for step in (0, -1, 1):
            tried = (near + step).clamp_(-BYTES - 1, BYTES)
            _signed(y, d * tried, half, q)
            error = torch.mul(q, d * tried, out=work).sub_(y).square_().sum(-1, keepdim=True)
            scales = torch.where(error < least, tried, scales)
            least = torch.minimum(error, least)
        _signed(y, d * scales, half, q)
        if not is_last:
            _, with_q, with_y = _sums(y, q, work)
            divisor = (scales * scales * with_q).sum(1, keepdim=True)
            d = _rounded(torch.where(divisor == 0, d, (scales * with_y).sum(1, keepdim=True) / divisor))
            scale = d * scales
    return (
        _write_symmetric(d.flatten(1) * kept, scales.flatten(1).to(torch.int8), (q + half).to(torch.uint8)),
    )


def _signed(y: torch.Tensor, scale: torch.Tensor, half: int, out: torch.Tensor) -> None:
    """The integers of which scale * q is nearest to y."""
    torch.mul(y, _quotient(torch.ones_like(scale), scale), out=out).round_().clamp_(-half, half - 1)
