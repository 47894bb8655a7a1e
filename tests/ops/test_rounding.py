# SPDX-License-Identifier: Apache-2.0
"""How numbers are rounded to few bits: scales by least error against brute force, and groups that are zero, tiny, huge or no numbers."""

from __future__ import annotations

import pytest
import torch

from nnfront import op, ops
from nnfront.ir import TensorType
from nnfront.quant_format import FORMATS

GROUP = 32


def rounded(x: torch.Tensor, fit: bool, **attrs: object) -> tuple[torch.Tensor, ...]:
    """q, scales, zero points and what they stand for."""
    type = TensorType(x.shape, str(x.dtype).removeprefix("torch."))
    given = {"group_size": GROUP, "axis": 1, **attrs, "fit": fit}
    found = ops.quantize.run((x,), ops.quantize.full_attrs(ops.quantize.canonical_attrs([type], given)))
    zero = found[2] if len(found) > 2 else None
    back = ops.dequantize.run(
        (found[0], found[1], zero), {"group_size": GROUP, "axis": 1, "dtype": "float32"}
    )
    return found[0], found[1], zero, back


def errors(x: torch.Tensor, back: torch.Tensor) -> torch.Tensor:
    return (x.double() - back.double()).square().view(-1, GROUP).sum(-1)


@pytest.mark.parametrize("bits", [2, 3, 4, 5])
def test_fitted_scales_are_near_the_best_of_all_and_better_than_by_the_largest_element(bits):
    torch.manual_seed(bits)
    x = torch.randn(64, 2 * GROUP)
    q, scale, _, back = rounded(x, True, bits=bits)
    half = 2 ** (bits - 1)
    assert (int(q.min()), int(q.max())) == (-half, half - 1)
    groups = x.double().view(-1, 1, GROUP)
    tried = torch.linspace(0.2, 2, 400, dtype=torch.float64) * 2 / half
    tried = torch.cat([tried, -tried]).view(1, -1, 1)
    best = (groups - (groups / tried).round().clamp(-half, half - 1) * tried).square().sum(-1).amin(-1)
    found = errors(x, back)
    assert float(found.sum()) < 1.06 * float(best.sum())
    assert float(found.sum()) < 0.85 * float(errors(x, rounded(x, False, bits=bits)[3]).sum())
    again = rounded(x, True, bits=bits)
    assert torch.equal(q, again[0])
    assert torch.equal(scale, again[1])


@pytest.mark.parametrize("shift", [0.0, 1.0, -3.0])
def test_fitted_zero_points_are_near_the_best_of_all(shift):
    torch.manual_seed(0)
    x = torch.randn(32, 2 * GROUP) + shift
    q, scale, zero, back = rounded(x, True, bits=4, symmetric=False)
    assert (q.dtype, zero.dtype) == (torch.uint8, torch.uint8)
    assert (scale > 0).all()
    groups = x.double().view(-1, 1, 1, GROUP)
    spread = groups.amax(-1, keepdim=True).clamp(min=0) - groups.amin(-1, keepdim=True).clamp(max=0)
    tried = spread / 15 * torch.linspace(0.5, 1.1, 121, dtype=torch.float64).view(1, -1, 1, 1)
    zeros = torch.arange(16, dtype=torch.float64).view(1, 1, -1, 1)
    values = (((groups / tried).round() + zeros).clamp(0, 15) - zeros) * tried
    best = (groups - values).square().sum(-1).amin((1, 2))
    found = errors(x, back)
    assert float(found.sum()) < 1.08 * float(best.sum())
    assert float(found.sum()) < float(errors(x, rounded(x, False, bits=4, symmetric=False)[3]).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("fit", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_a_group_that_is_zero_or_tiny_or_huge_stays_what_it_is_and_one_that_is_no_number_becomes_nan(
    bits, symmetric, fit, dtype
):
    largest, least = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal / 4
    x = torch.randn(6, GROUP).to(dtype)
    x[1] = 0
    x[2] = least * torch.sign(x[2])
    x[3] = largest / 4 * torch.sign(x[3])
    x[4, 5], x[5, 7] = float("nan"), -float("inf")
    back = rounded(x, fit, bits=bits, symmetric=symmetric)[3]
    assert torch.equal(back[1], torch.zeros(GROUP))
    assert (back[2].abs() <= 2 * least).all()
    torch.testing.assert_close(back[3], x[3].float(), rtol=0.1, atol=0)
    assert back[4].isnan().all()
    assert back[5].isnan().all()
    assert back[:4].isfinite().all()


def test_groups_along_any_axis_are_fitted_alike():
    x = torch.randn(GROUP, 6, 3)
    q, scale = op.quantize(x.permute(1, 2, 0).contiguous(), 4, GROUP, fit=True)
    turned, scales = op.quantize(x, 4, GROUP, axis=0, fit=True)
    assert torch.equal(turned.permute(1, 2, 0), q)
    assert torch.equal(scales.permute(1, 2, 0), scale)


@pytest.mark.parametrize("name", ["nvfp4", "nl4"])
def test_scales_of_a_table_are_near_the_best_of_all_that_8_bits_can_say(name):
    torch.manual_seed(0)
    x = torch.randn(8, 512) * torch.logspace(-6, 6, 8).unsqueeze(1)
    places, scale, factor = op.quantize(x, format=name)
    assert (places.dtype, scale.dtype, factor.dtype) == (torch.uint8, torch.float8_e4m3fn, torch.float32)
    assert (scale.shape, factor.shape) == ((8, 32), (8, 1))
    back = op.dequantize(places, scale.float() * factor, format=name)
    every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    tried = every[every.isfinite() & (every != 0)] * factor.double()
    values, groups = torch.tensor(FORMATS[name].values, dtype=torch.float64), x.double().view(8, 32, 16)
    best = torch.empty(8, 32, dtype=torch.float64)
    for row in range(8):
        grid = (tried[row, :, None] * values)[None, :, None]
        best[row] = (groups[row, :, None, :, None] - grid).square().amin(-1).sum(-1).amin(-1)
    found = (x.double() - back.double()).square().view(8, 32, 16).sum(-1)
    assert float((found.sum(-1) / best.sum(-1)).max()) < 1.12
    assert float((found.sum(-1) / best.sum(-1)).mean()) < 1.06


@pytest.mark.parametrize("name", ["nvfp4", "nl4"])
def test_zeros_in_a_table_format_are_zeros_and_what_is_not_finite_is_nan(name):
    x = torch.randn(4, 32)
    x[0], x[1, :16] = 0, 0
    x[2, 3], x[3, 3] = float("nan"), float("inf")
    places, scale, factor = op.quantize(x, format=name)
    back = op.dequantize(places, scale.float() * factor, format=name)
    assert torch.equal(back[0], torch.zeros(32))
    assert torch.equal(back[1, :16], torch.zeros(16))
    assert back[1, 16:].isfinite().all()
    assert back[2:, :16].isnan().all()
