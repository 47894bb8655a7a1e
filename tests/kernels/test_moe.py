# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts, kernel by kernel and as a whole, against loops over tokens in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import nnfront_kernels
import pytest
import torch
from few_of import few_of
from kernel_checks import EPS32, SUM, TOLERANCES, Guarded, assert_close, surrounded
from kernel_memory import watched
from kernel_mutants import Mutant, package
from nnfront_kernels.epilogue import interleave

NAN = 0xFF


@dataclass(frozen=True)
class Layer:
    """A feed-forward layer of experts. `choice` says how tokens choose; block_m also picks the kernels' config."""

    tokens: int
    top_k: int
    experts: int
    width: int = 48
    hidden: int = 40
    choice: str = "random"
    block_m: int = 16
    arch: str = "sm_80"
    gap: int = 0
    dtype: str = "float16"
    bias: bool = False
    activation: str = "silu"
    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    gated: bool = True

    def __str__(self) -> str:
        sizes = f"{self.tokens}x{self.top_k}of{self.experts}-{self.width}x{self.hidden}"
        between = f"{self.activation}{self.alpha}{'' if self.limit is None else f'-limit{self.limit}'}"
        return (
            f"{sizes}-{self.choice}-{self.arch}-{self.block_m}-gap{self.gap}{'-bias' * self.bias}-{between}"
        )

    @property
    def options(self) -> dict[str, Any]:
        """What happens between the two products."""
        names = ("activation", "gated", "alpha", "limit", "up_offset")
        return {name: getattr(self, name) for name in names}


def choices(layer: Layer) -> torch.Tensor:
    """[tokens, top_k] int32, all different in a row unless choice says otherwise."""
    generator = torch.Generator().manual_seed(layer.tokens * 31 + layer.experts)
    scores = torch.rand(layer.tokens, layer.experts, generator=generator)
    chosen = scores.argsort(1)[:, : layer.top_k].to(torch.int32)
    if layer.choice == "one":  # every choice of every token
        chosen = torch.full_like(chosen, layer.experts - 1)
    if layer.choice == "ends":  # all experts but the first and the last are empty
        chosen = torch.where(chosen % 2 == 0, 0, layer.experts - 1).to(torch.int32)
    if layer.choice == "elsewhere":  # a third of the experts is not here
        chosen = torch.where(chosen % 3 == 0, -1, chosen)
        chosen = torch.where(chosen % 3 == 1, layer.experts + chosen, chosen).to(torch.int32)
    if layer.choice == "nowhere":
        chosen = torch.full_like(chosen, -1)
    return chosen


def poisoned_routing(package: ModuleType, chosen: torch.Tensor, experts: int, block_m: int) -> Any:
    """A routing whose buffers, inner ones too, held another bit pattern before; each launch in both block orders."""
    results = []
    for backwards, value in ((False, -1), (True, 0x5A5A5A5A)):
        made = package.moe_routing.launches(chosen, num_experts=experts, block_m=block_m)
        for plan in made.plans:
            for tensor in plan.arguments.values():
                if isinstance(tensor, torch.Tensor) and tensor is not chosen and plan is made.plans[0]:
                    tensor.fill_(value)
        for tensor in (*made.routing[:2], *made.plans[1].arguments.values()):
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(value)
        for plan in made.plans:
            with watched(plan.arguments, backwards=backwards):
                plan.launch()
        results.append(made.routing)
    used = int(((chosen >= 0) & (chosen < experts)).sum())
    assert torch.equal(results[0].tiles, results[1].tiles), "tiles depend on what was there before"
    assert torch.equal(results[0].slots[:used], results[1].slots[:used]), (
        "slots depend on what was there before"
    )
    return results[0]


def route(package: ModuleType, layer: Layer) -> None:
    """AssertionError unless the routing is the sorted list that its definition gives."""
    chosen = choices(layer)
    routing = poisoned_routing(package, chosen, layer.experts, layer.block_m)
    flat = chosen.flatten().tolist()
    slots, tiles = [], []
    for expert in range(layer.experts):
        mine = [slot for slot, choice in enumerate(flat) if choice == expert]
        tiles += [
            (expert, len(slots) + first, min(layer.block_m, len(mine) - first))
            for first in range(0, len(mine), layer.block_m)
        ]
        slots += mine
    assert routing.slots[: len(slots)].tolist() == slots, "slots"
    found = [tuple(tile) for tile in routing.tiles.T.tolist()]
    assert found[: len(tiles)] == tiles, "tiles"
    assert all(rows == 0 for _, _, rows in found[len(tiles) :]), "a tile too many"
    assert package.moe_routing.reference(chosen, layer.experts, layer.block_m) == (
        slots,
        [list(t) for t in tiles],
    )


ROUTES = [
    *(Layer(t, k, e) for t in (1, 2, 15, 16, 17, 129, 257) for k, e in ((1, 1), (2, 8), (8, 60))),
    *(Layer(160, 8, 256, choice=c, block_m=b) for c, b in (("random", 16), ("one", 64), ("ends", 128), ("elsewhere", 32), ("nowhere", 16))),
    *(Layer(43, k, 18, block_m=32) for k in (*range(1, 9), 9, 13, 16)),
    Layer(0, 4, 8),
    Layer(130, 3, 512),
    Layer(200, 8, 256, block_m=128),
]  # fmt: skip


def route_here(layer: Layer) -> None:
    route(nnfront_kernels, layer)


@pytest.mark.parametrize("layer", few_of(ROUTES, 4), ids=str)
def test_slots_are_sorted_by_expert_and_tiles_cover_them(interpreted, layer):
    interpreted(route_here, layer)


def feed_forward(package: ModuleType, layer: Layer) -> None:
    """Run a layer on poisoned buffers, twice; AssertionError unless each of its steps is right and repeatable."""
    generator = torch.Generator().manual_seed(7)
    dtype = getattr(torch, layer.dtype)
    experts, slots = layer.experts, layer.tokens * layer.top_k

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64).to(dtype)

    def weight(rows: int, columns: int) -> torch.Tensor:
        flat = surrounded(normal(experts * rows, columns) / 4, layer.gap, 0)
        return flat.as_strided(
            (experts, rows, columns), (rows * flat.stride(0), flat.stride(0), 1), flat.storage_offset()
        )

    x = surrounded(normal(layer.tokens, layer.width), layer.gap, 0)
    w_in = weight((1 + layer.gated) * layer.hidden, layer.width)
    if layer.gated:
        mixed = interleave(normal(layer.hidden, layer.width), normal(layer.hidden, layer.width))
        w_in[-1].copy_(mixed / 4)
    w_out = weight(layer.width, layer.hidden)
    bias = normal(experts, layer.width) if layer.bias else None
    bias_in = normal(experts, w_in.shape[1]) if layer.bias else None
    shares = torch.rand(layer.tokens, layer.top_k, generator=generator)
    chosen = choices(layer)
    used = ((chosen >= 0) & (chosen < experts)).flatten()
    routing = poisoned_routing(package, chosen, experts, layer.block_m)
    config = next(c for c in package.grouped_matmul.CONFIGS[layer.arch] if c.block_m == layer.block_m)

    results = []
    for backwards in (False, True):
        hidden = Guarded(slots, layer.hidden, dtype, layer.gap, 0, NAN)
        out = Guarded(slots, layer.width, dtype, layer.gap, 0, NAN)
        y = Guarded(layer.tokens, layer.width, dtype, layer.gap, 0, NAN)
        options = {"config": config, "arch": layer.arch}
        plans = (
            package.grouped_matmul.plan(
                x, w_in, routing, gather=True, bias=bias_in, out=hidden.view, **layer.options, **options
            ),
            package.grouped_matmul.plan(
                hidden.view, w_out, routing, scatter=True, bias=bias, out=out.view, **options
            ),
            package.moe_combine.plan(out.view, shares, chosen, experts, out=y.view, arch=layer.arch),
        )
        for plan in plans:
            with watched(plan.arguments, backwards=backwards):
                plan.launch()
        for buffer in (hidden, out, y):
            buffer.check()
        results.append([buffer.view.clone() for buffer in (hidden, out, y)])
    for first, second in zip(*results, strict=True):
        assert torch.equal(first.view(torch.int16), second.view(torch.int16)), (
            "two runs in different orders differ"
        )
    hidden, out, y = results[0]

    # Each step against float64 on the inputs that it had.
    order = torch.tensor(
        [slot for e in range(experts) for slot, c in enumerate(chosen.flatten().tolist()) if c == e],
        dtype=torch.long,
    )
    expert_of = chosen.flatten().long()[order]
    rows = x.double()[order // layer.top_k]
    z = torch.einsum("sk,snk->sn", rows, w_in.double()[expert_of])
    size = torch.einsum("sk,snk->sn", rows.abs(), w_in.double()[expert_of].abs())
    if bias_in is not None:
        z += bias_in.double()[expert_of]
    drift = 2 * SUM * EPS32 * math.sqrt(layer.width) * size + EPS32 * z.abs()
    if layer.gated:
        gate, up = z[:, 0::2], z[:, 1::2]
        if layer.limit is not None:
            assert layer.tokens < 9 or min((gate > layer.limit).sum(), (up.abs() > layer.limit).sum()) > 0
            gate, up = gate.clamp(max=layer.limit), up.clamp(-layer.limit, layer.limit)
        gate, up = gate / (1 + torch.exp(-layer.alpha * gate)), up + layer.up_offset
        slack = (
            1.2 * drift[:, 0::2] * (up.abs() + drift[:, 1::2])
            + drift[:, 1::2] * gate.abs()
            + 32 * EPS32 * (gate * up).abs()
        )
        between = gate * up
    else:
        assert layer.activation == "relu2"
        between = z.clamp(min=0) ** 2
        slack = drift * (2 * z.abs() + drift) + 32 * EPS32 * between
    assert_close(actual=hidden[: len(order)], expected=between, drift=slack)
    assert hidden[len(order) :].isnan().all(), "rows of no expert were written"

    expected = torch.full((slots, layer.width), math.nan, dtype=torch.float64)
    rows = hidden.double()[: len(order)]
    expected[order] = torch.einsum("sk,snk->sn", rows, w_out.double()[expert_of])
    size = torch.einsum("sk,snk->sn", rows.abs(), w_out.double()[expert_of].abs())
    if bias is not None:
        expected[order] += bias.double()[expert_of]
    slack = 2 * SUM * EPS32 * math.sqrt(layer.hidden) * size + 4 * EPS32 * expected[order].abs()
    assert_close(actual=out[order], expected=expected[order], drift=slack)
    assert out[~used].isnan().all(), "a slot of no expert was written"

    terms = torch.where(used[:, None], out.double() * shares.double().flatten()[:, None], 0.0)
    terms = terms.unflatten(0, (layer.tokens, layer.top_k))
    assert_close(actual=y, expected=terms.sum(1), drift=8 * EPS32 * terms.abs().sum(1))

    # And the stated definitions.
    stated = package.grouped_matmul.reference(
        x, w_in, routing, gather=True, bias=bias_in, compute=torch.float64, **layer.options
    )
    unit = TOLERANCES[dtype].unit
    assert torch.allclose(stated[: len(order)].double(), between, rtol=2 * unit, atol=1e-7)
    stated = package.moe_combine.reference(out, shares, chosen, experts, compute=torch.float64)
    assert torch.allclose(stated.double(), terms.sum(1), rtol=2 * unit, atol=1e-7)


LIMITED = Layer(19, 2, 4, width=33, hidden=24, bias=True, alpha=1.702, limit=0.75, up_offset=1.0)
SQUARED = Layer(21, 2, 5, width=48, hidden=33, gap=1, activation="relu2", gated=False)
LAYERS = [
    LIMITED,
    SQUARED,
    Layer(17, 2, 4),
    Layer(1, 8, 60, width=128, hidden=64),
    Layer(0, 2, 4),
    Layer(33, 1, 1, width=17, hidden=15, gap=3, bias=True),
    Layer(65, 2, 7, width=65, hidden=33, block_m=32, bias=True),
    Layer(64, 8, 16, width=64, hidden=48, gap=16, block_m=64, choice="elsewhere"),
    Layer(129, 2, 5, width=96, hidden=33, block_m=64, choice="ends", bias=True),
    Layer(150, 2, 3, width=80, hidden=64, block_m=128, arch="sm_90"),
    Layer(9, 4, 256, width=16, hidden=16),
    Layer(31, 2, 6, choice="one", block_m=32, arch="sm_90"),
    Layer(9, 2, 4, choice="nowhere"),
    *(Layer(10 + k, k, 8, width=65, hidden=63, gap=k, arch="sm_100") for k in range(3, 8)),
    Layer(21, 10, 12, width=33, hidden=32),
    Layer(17, 16, 24, width=32, hidden=33, choice="elsewhere"),
]


def feed_forward_here(layer: Layer) -> None:
    feed_forward(nnfront_kernels, layer)


@pytest.mark.parametrize("layer", few_of(LAYERS, 4), ids=str)
def test_a_layer_of_experts_matches_float64(interpreted, layer):
    interpreted(feed_forward_here, layer)


HERE = Layer(23, 2, 5, width=33, hidden=24, gap=3, bias=True, choice="elsewhere")
LONG = Layer(129, 3, 40, block_m=16)
MUTANTS = [
    (Mutant("ranks_of_a_chunk_all_zero", "moe_routing.py", "(lane[None, :] < lane[:, None])", "(lane[None, :] < 0)"), route, LONG),
    (Mutant("order_within_an_expert_reversed", "moe_routing.py", "(lane[None, :] < lane[:, None])", "(lane[None, :] > lane[:, None])"), route, LONG),
    (Mutant("earlier_chunks_forgotten", "moe_routing.py", "before += tl.sum(count, axis=0)", "before = tl.sum(count, axis=0)"), route, Layer(700, 3, 300)),
    (Mutant("slots_beyond_the_last_counted", "moe_routing.py", "chosen = tl.load(experts_ptr + at, mask=at < SLOTS, other=-1)\n    for", "chosen = tl.load(experts_ptr + at, mask=at < SLOTS, other=0)\n    for"), route, LONG),
    (Mutant("tile_of_an_empty_expert", "moe_routing.py", "(end[None, :] <= at[:, None])", "(end[None, :] < at[:, None])"), route, LONG),
    (Mutant("last_tile_not_cut", "moe_routing.py", "tl.minimum(total - within, BLOCK_M)", "tl.minimum(total, BLOCK_M)"), route, Layer(129, 3, 7)),
    (Mutant("unused_tiles_not_emptied", "moe_routing.py", "tl.where(real, rows, 0), mask=wanted", "tl.where(real, rows, 0), mask=real"), route, LONG),
    (Mutant("experts_elsewhere_taken", "moe_routing.py", "used = (chosen >= 0) & (chosen < E)", "used = chosen < E"), route, HERE),
    (Mutant("too_few_tiles", "moe_routing.py", "top_k // block_m + min(experts, tokens * top_k)", "top_k // block_m"), route, LONG),
    (Mutant("weight_of_the_first_expert", "grouped_matmul.py", "w_ptr += expert * stride_we", "w_ptr += 0 * stride_we"), feed_forward, HERE),
    (Mutant("bias_of_the_first_expert", "grouped_matmul.py", "bias_ptr += expert * stride_be", "bias_ptr += 0 * stride_be"), feed_forward, HERE),
    (Mutant("tokens_not_gathered", "grouped_matmul.py", "x_row = slot // TOP_K", "x_row = position // TOP_K"), feed_forward, HERE),
    (Mutant("slots_not_scattered", "grouped_matmul.py", "y_row = slot", "y_row = position"), feed_forward, HERE),
    (Mutant("rows_of_the_next_expert_written", "grouped_matmul.py", "inside_m = lane < rows", "inside_m = lane <= rows"), feed_forward, HERE),
    (Mutant("grouped_k_mask_missing", "grouped_matmul.py", "k % config.block_k == 0", "True"), feed_forward, HERE),
    (Mutant("grouped_right_half_stored_left", "grouped_matmul.py", "store_rows(right, y_rows, inside_m, first_n + HALF", "store_rows(right, y_rows, inside_m, first_n"), feed_forward, HERE),
    (Mutant("column_mask_of_the_experts", "grouped_matmul.py", "(offs_c < num_columns)", "(offs_c <= num_columns)"), feed_forward, HERE),
    (Mutant("gates_without_a_limit", "epilogue.py", "tl.where(gate > LIMIT, LIMIT, gate)", "gate"), feed_forward, LIMITED),
    (Mutant("ups_without_a_limit_below", "epilogue.py", "tl.where(up > 0.0, LIMIT, -LIMIT), up", "LIMIT, up"), feed_forward, LIMITED),
    (Mutant("no_offset_of_ups", "epilogue.py", "up if OFFSET == 0.0 else up + OFFSET", "up"), feed_forward, LIMITED),
    (Mutant("no_slope_of_silu", "epilogue.py", "z if ALPHA == 1.0 else ALPHA * z", "z"), feed_forward, LIMITED),
    (Mutant("not_squared", "epilogue.py", "tl.where(z < 0.0, 0.0, z * z)", "tl.where(z < 0.0, 0.0, z)"), feed_forward, SQUARED),
    (Mutant("bias_of_experts_behind_the_gate", "grouped_matmul.py", "acc, bias_ptr, scale, first_n, N, ACTIVATION, True", "acc, None, scale, first_n, N, ACTIVATION, True"), feed_forward, LIMITED),
    (Mutant("shares_not_weighted", "moe_combine.py", "tl.where(used, weight, 0.0)", "tl.where(used, 1.0, 0.0)"), feed_forward, HERE),
    (Mutant("last_choice_left_out", "moe_combine.py", "tl.static_range(TOP_K)", "tl.static_range(TOP_K - 1)"), feed_forward, HERE),
    (Mutant("shares_from_elsewhere_read", "moe_combine.py", "mask=at < tl.where(used, H, 0)", "mask=at < H"), feed_forward, HERE),
]  # fmt: skip


def run_mutant(mutant: Mutant, check: Any, layer: Layer) -> None:
    check(package(mutant), layer)


@pytest.mark.parametrize(("mutant", "check", "layer"), MUTANTS, ids=[str(mutant) for mutant, _, _ in MUTANTS])
@pytest.mark.matrix
def test_mutant_of_the_experts_is_caught(interpreted, mutant, check, layer):
    with pytest.raises(AssertionError):
        interpreted(run_mutant, mutant, check, layer)


@pytest.mark.parametrize(
    ("check", "layer"), [(feed_forward, HERE), (route, HERE), (route, LONG), (route, Layer(700, 3, 300))]
)
@pytest.mark.matrix
def test_the_experts_without_the_mistake_pass(interpreted, check, layer):
    interpreted(run_mutant, Mutant("none", "", "", ""), check, layer)
