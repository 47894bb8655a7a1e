# SPDX-License-Identifier: Apache-2.0
"""One token of each recurrence in C, against the recurrence in float64; decoded token by token, one call with what surrounds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import nnfront as nn
from nnfront import op, ops, spec
from nnfront.backends.cpu import in_c, tape, tape_builder
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.table import resolver
from nnfront.lower import Run, Structure

pytestmark = [
    pytest.mark.skipif(NATIVE is None, reason="no kernels in C"),
    pytest.mark.usefixtures("instructions"),
]
BF16, F32 = torch.bfloat16, torch.float32
PAIR = Structure(fields=(Structure(0), Structure(1)))
halves, floats = st.just(BF16), st.sampled_from([BF16, F32])


def both(op_: Any, operands: tuple[Any, ...], threads: int = 2, **attrs: Any) -> tuple[Any, Any]:
    """What C gives on so many threads, every operand in the midst of NaN, and what the reference gives in float64."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        kernel = resolver("cpu")(Run(f"{op_.name}_step", op_.name, (), PAIR, attrs))
        with pytest.MonkeyPatch.context() as patch:
            empty = torch.empty
            patch.setattr(torch, "empty", lambda *a, **k: poisoned(empty(*a, **k)))
            got = kernel(*map(amid_nan, operands))
    finally:
        torch.set_num_threads(before)
    wide = tuple(None if x is None else x.double() for x in operands)
    return got, op_.run(wide, attrs)


def poisoned(x: torch.Tensor) -> torch.Tensor:
    return x.fill_(torch.nan if x.is_floating_point() else 255)


def amid_nan(x: torch.Tensor | None) -> torch.Tensor | None:
    if x is None:
        return None
    around = torch.full((x.numel() + 96,), torch.nan, dtype=x.dtype)
    return around[48:-48].copy_(x.flatten()).view(x.shape)


def assert_near(got: Any, expected: Any, x_dtype: torch.dtype, state: torch.Tensor) -> None:
    (y, after), (exact, exact_after) = got, expected
    scale = max(1.0, *exact.abs().flatten().tolist(), *exact_after.abs().flatten().tolist())
    assert y.dtype == x_dtype
    assert after.dtype == state.dtype
    assert ((y.double() - exact).abs() <= exact.abs() * 2**-8 + 2e-5 * scale).all()
    rounding = 2**-8 if after.dtype == BF16 else 0.0
    assert ((after.double() - exact_after).abs() <= exact_after.abs() * rounding + 2e-5 * scale).all()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_token_of_a_causal_convolution_agrees_with_float64(data: st.DataObject):
    batch, channels = data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 15, 16, 257, 600]))
    width, kind, kept = data.draw(st.integers(1, 5)), data.draw(floats), data.draw(floats)
    x, weight = torch.randn(batch, 1, channels).to(BF16), torch.randn(channels, width).to(kind)
    bias = torch.randn(channels).to(kind) if data.draw(st.booleans()) else None
    state = torch.randn(batch, channels, width - 1).to(kept) if data.draw(st.booleans()) else None
    attrs = {"activation": "silu"} if data.draw(st.booleans()) else {}
    got, expected = both(
        ops.causal_conv1d, (x, weight, bias, state), data.draw(st.sampled_from([1, 3])), **attrs
    )
    assert_near(got, expected, BF16, x if state is None else state)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_token_of_the_scan_agrees_with_float64(data: st.DataObject):
    batch, groups, shared = (data.draw(st.integers(1, 3)) for _ in range(3))
    heads, size = groups * shared, data.draw(st.sampled_from([1, 7, 64]))
    states, kind = data.draw(st.sampled_from([1, 15, 16, 33, 128])), data.draw(floats)
    x, dt = torch.randn(batch, 1, heads, size).to(BF16), torch.rand(batch, 1, heads).to(kind)
    a, d = -torch.rand(heads), torch.randn(heads).to(kind) if data.draw(st.booleans()) else None
    b, c = torch.randn(2, batch, 1, groups, states).to(BF16)
    state = torch.randn(batch, heads, size, states)
    given_state = state if data.draw(st.booleans()) else None
    operands = (x, dt, a, b, c, d, given_state)
    got, expected = both(ops.ssm_scan, operands, data.draw(st.sampled_from([1, 3])))
    assert_near(got, expected, BF16, state)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_token_of_the_delta_rule_agrees_with_float64(data: st.DataObject):
    batch, groups, shared = (data.draw(st.integers(1, 3)) for _ in range(3))
    heads, keys = groups * shared, data.draw(st.sampled_from([1, 16, 33, 128]))
    values, kind = data.draw(st.sampled_from([1, 15, 16, 64, 65, 130])), data.draw(floats)
    q, k = torch.randn(2, batch, 1, groups, keys).to(BF16)
    v, beta = torch.randn(batch, 1, heads, values).to(BF16), torch.rand(batch, 1, heads).to(kind)
    g = -torch.rand(batch, 1, heads, *([keys] if data.draw(st.booleans()) else []))
    state = torch.randn(batch, heads, keys, values)
    operands = (q, k, v, g, beta, state if data.draw(st.booleans()) else None)
    attrs = {"qk_l2norm": True} if data.draw(st.booleans()) else {"scale": 0.1}
    k.mul_(1 if "qk_l2norm" in attrs else keys**-0.5)
    got, expected = both(ops.gated_delta_rule, operands, data.draw(st.sampled_from([1, 3])), **attrs)
    assert_near(got, expected, BF16, state)


def test_heads_that_groups_do_not_divide_and_long_keys_are_refused():
    assert NATIVE is not None
    x, y = torch.zeros(4096).to(BF16), torch.zeros(4096)
    with pytest.raises(ValueError, match=r"^heads that groups divide, got 3 and 2$"):
        NATIVE.ssm_scan_step(1, 3, 2, 1, 1, 1, x, y, y, x, x, None, None, x, y)
    with pytest.raises(ValueError, match=r"^heads that groups divide, got 3 and 0$"):
        NATIVE.gated_delta_rule_step(1, 0, 3, 1, 1, 0, 0, 1, 1.0, x, x, x, y, y, None, x, y)
    with pytest.raises(ValueError, match=r"^keys of 1 to 1024 features, got 1025$"):
        NATIVE.gated_delta_rule_step(1, 1, 1, 1025, 1, 0, 0, 1, 1.0, x, x, x, y, y, None, x, y)
    with pytest.raises(ValueError, match=r"^a kernel with a tap$"):
        NATIVE.causal_conv1d_step(1, 1, 0, 4, 0, 0, 1, x, x, None, None, x, x)


def test_what_c_is_not_for_goes_to_the_reference():
    def convolved(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        run = Run("causal_conv1d_step", "causal_conv1d", (), PAIR, {})
        got = resolver("cpu")(run)(x, weight, bias, None)
        for a, b in zip(got, ops.causal_conv1d.run((x, weight, bias, None), {}), strict=True):
            assert torch.equal(a, b)

    x, weight = torch.randn(2, 3, 5).to(BF16), torch.randn(5, 4).to(BF16)
    convolved(x, weight, None)
    convolved(x[:, :1].half(), weight, None)
    convolved(x[:, :1], weight, torch.randn(5))
    convolved(x[:0, :1], weight, None)
    convolved(x[:, :1].float(), weight.float(), None)


class Mixer(nn.Module):
    """A recurrence as models have it, between products; its state comes in and goes out."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.proj = nn.Linear(32, 3 * 32, bias=False, dtype="bfloat16")
        self.out = nn.Linear(32, 32, bias=False, dtype="bfloat16")
        self.conv, self.rate = nn.Parameter((96, 4), "bfloat16"), nn.Parameter((2,), "float32")

    def forward(self, x: nn.Tensor, dt: nn.Tensor, taps: nn.Tensor, state: nn.Tensor) -> Any:
        batch, seq, _ = x.shape
        mixed, taps = op.causal_conv1d(self.proj(x), self.conv, None, taps, activation="silu")
        q, k, v = (op.reshape(t, (batch, seq, 2, 16)) for t in op.split(mixed, 3, -1))
        if self.kind == "scan":
            y, state = op.ssm_scan(v, dt, self.rate, k, q, None, state)
        else:
            y, state = op.gated_delta_rule(q, k, v, -dt, dt, state, qk_l2norm=True)
        return self.out(op.reshape(y, (batch, seq, 32))), taps, state


@pytest.mark.parametrize("kind", ["scan", "delta rule"])
def test_recurrences_of_one_token_are_part_of_one_call(kind, monkeypatch):
    args = {
        "x": spec.Tensor(["batch", "seq", 32], "bfloat16"),
        "dt": spec.Tensor(["batch", "seq", 2], "float32"),
        "taps": spec.Tensor(["batch", 96, 3], "bfloat16"),
        "state": spec.Tensor(["batch", 2, 16, 16], "float32"),
    }
    executable = nn.compile(Mixer(kind).export({"forward": args}))
    weights = {"proj.weight": torch.randn(96, 32).to(BF16) / 4, "out.weight": torch.randn(32, 32).to(BF16)}
    weights |= {"conv": torch.randn(96, 4).to(BF16), "rate": -torch.rand(2)}
    ran: list[int] = []

    class Recorder:
        def __getattr__(self, name: str) -> Any:
            return getattr(NATIVE, name)

        def run_sequence(self, rows: torch.Tensor, *memories: Any) -> None:
            ran.extend([len(rows)] * (len(rows) > 1))
            assert NATIVE is not None
            NATIVE.run_sequence(rows, *memories)

    def decoded() -> list[torch.Tensor]:
        torch.manual_seed(0)
        session, found = executable.load(weights), []
        taps, state = torch.zeros(1, 96, 3).to(BF16), torch.zeros(1, 2, 16, 16)
        for seq in (5, 1, 1, 1):
            y, taps, state = session["forward"](
                torch.randn(1, seq, 32).to(BF16), torch.rand(1, seq, 2), taps, state
            )
            found += [y, taps, state]
        return found

    with monkeypatch.context() as patch:
        patch.setattr(tape_builder, "NATIVE", Recorder())
        got = decoded()
    assert ran[-3:] == ran[-1:] * 3
    with monkeypatch.context() as patch:
        patch.setattr(tape, "NATIVE", None)
        assert all(torch.equal(a, b) for a, b in zip(got, decoded(), strict=True))
        patch.setattr(in_c, "NATIVE", None)
        for a, b in zip(got, decoded(), strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=2**-6, atol=0.05)
