# SPDX-License-Identifier: Apache-2.0
"""Rounding by the inputs: as the formulas of optimal brain surgery have it, better for products in every format, and harmless where moments say nothing."""

from __future__ import annotations

import pytest
import torch

from nnfront import op
from nnfront.quant_format import BLOCK_FORMATS, FORMATS

ROWS, COLUMNS = 48, 256


def inputs() -> torch.Tensor:
    """Inputs of which some are large, and which are alike."""
    drawn = torch.Generator().manual_seed(0)
    mixed = torch.randn(2000, 64, generator=drawn) @ torch.randn(64, COLUMNS, generator=drawn)
    sizes = torch.rand(COLUMNS, generator=drawn).square() * 3
    return (mixed + 2 * torch.randn(2000, COLUMNS, generator=drawn)) * sizes


def moments(x: torch.Tensor, size: int = COLUMNS) -> torch.Tensor:
    blocks = x.view(len(x), -1, size)
    return torch.einsum("tbi,tbj->bij", blocks, blocks) / len(x)


def read(stored, format: str) -> torch.Tensor:
    if format in BLOCK_FORMATS:
        return op.dequantize_blocks(stored, format)
    known, (q, scale, *more) = FORMATS[format], stored
    if known.has_factor:
        scale = scale.float() * more.pop()
    return op.dequantize(
        q, scale, *more, axis=1, dtype="float32", format=format if known.values else None, group_size=COLUMNS // scale.shape[1]
    )  # fmt: skip


def plain(w: torch.Tensor, format: str):
    if format in BLOCK_FORMATS:
        return op.quantize_blocks(w, format)
    return op.quantize(w, axis=1, format=format, fit=FORMATS[format].fit)


def weight() -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("format", FORMATS)
def test_products_with_such_inputs_lose_less_in_every_format(format):
    w, x = weight(), inputs()
    calibrated = op.quantize_calibrated(w, moments(x), format)
    lost = [
        float((x @ (read(stored, format) - w).T).square().mean()) for stored in (calibrated, plain(w, format))
    ]
    assert lost[0] < 0.75 * lost[1]
    if format not in BLOCK_FORMATS:
        for part, same in zip(calibrated[1:], plain(w, format)[1:], strict=True):
            assert torch.equal(part, same)  # scales and zero points are those of `quantize`


@pytest.mark.parametrize("format", ["fp8", "fp8_e5m2"])
def test_float8_under_scales_that_outputs_share_loses_less_in_products(format):
    w, x = weight(), inputs()
    shared = (
        (w.abs().max() / torch.finfo(getattr(torch, FORMATS[format].dtype)).max).expand(ROWS, 1).contiguous()
    )
    q = op.quantize_calibrated(w, moments(x), format, scales=shared)
    plainly = (w / shared).to(q.dtype)
    lost = [float((x @ (each.float() * shared - w).T).square().mean()) for each in (q, plainly)]
    assert lost[0] < 0.75 * lost[1]
    own = op.quantize_calibrated(w, moments(x), format)
    again = op.quantize_calibrated(w, moments(x), format, scales=own[1])
    assert torch.equal(again.view(torch.uint8), own[0].view(torch.uint8))


def by_surgery(w: torch.Tensor, scale: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    """Columns are rounded one after the other, and the inverse of what is left of H is made anew for each."""
    w, h = w.double().clone(), h.double()
    h = h + torch.eye(len(h)) * 0.01 * h.diagonal().mean()
    order = h.diagonal().argsort(descending=True).tolist()
    q = torch.zeros_like(w)
    for at, column in enumerate(order):
        left = order[at:]
        inverse = torch.linalg.inv(h[left][:, left])
        q[:, column] = (w[:, column] / scale[:, column]).round().clamp(-8, 7)
        error = (w[:, column] - q[:, column] * scale[:, column]) / inverse[0, 0]
        w[:, left] -= error[:, None] * inverse[0]
    return q


@pytest.mark.parametrize("size", [32, 16])
def test_integers_are_those_of_optimal_brain_surgery(size):
    w, h = weight()[:, :32], moments(inputs()[:, :32], size)
    q, scale = op.quantize_calibrated(w, h, "int4")
    scales = scale.double().expand(-1, 32)
    wanted = torch.cat([
        by_surgery(part, s, each)
        for part, s, each in zip(w.split(size, 1), scales.split(size, 1), h, strict=True)
    ], 1)  # fmt: skip
    assert (q == wanted).float().mean() > 0.995  # but where a number lies in the middle of two in float32


@pytest.mark.parametrize("format", ["int4", "uint4", "int8", "q4_k", "q6_k", "mxfp4", "nvfp4", "fp8"])
@pytest.mark.parametrize(
    "nothing",
    [torch.eye(128).repeat(2, 1, 1), torch.zeros(2, 128, 128), torch.full((2, 128, 128), torch.nan), -torch.eye(128).repeat(2, 1, 1)],
    ids=["unrelated", "no inputs", "NaN", "negative"],
)  # fmt: skip
def test_moments_that_say_nothing_change_nothing(format, nothing):
    w = weight()
    found, expected = (
        read(stored, format) for stored in (op.quantize_calibrated(w, nothing, format), plain(w, format))
    )
    assert torch.equal(found, expected)


@pytest.mark.parametrize("format", FORMATS)
def test_groups_of_zeros_and_large_numbers_stay_finite(format):
    w = weight() * 1e4
    w[:, :128] = 0
    found = read(op.quantize_calibrated(w, moments(inputs()), format), format)
    assert found.isfinite().all()


def test_experts_are_rounded_as_each_of_them_alone():
    w, h = torch.stack([weight(), weight().flip(0)]), moments(inputs())
    together = op.quantize_calibrated(w, h, "int4")
    for i, each in enumerate(w):
        for part, alone in zip(together, op.quantize_calibrated(each, h, "int4"), strict=True):
            assert torch.equal(part[i], alone)
