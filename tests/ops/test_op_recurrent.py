# SPDX-License-Identifier: Apache-2.0
"""Recurrences against loops over tokens in float64, and against what transformers computes for the models that have them."""

from typing import Any

import pytest
import torch
from call import run
from hypothesis import given, settings
from hypothesis import strategies as st
from recurrent_loops import LOOPS
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.kimi_linear.modeling_kimi_linear import (
    chunk_kimi_delta_attention,
    recurrent_kimi_delta_attention,
)
from transformers.models.mamba.modeling_mamba import mamba_selective_scan, mamba_selective_state_update
from transformers.models.mamba2.modeling_mamba2 import (
    causal_conv1d_fn,
    causal_conv1d_update,
    mamba2_chunk_scan,
    mamba2_selective_state_update,
)
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from nnfront import ops
from nnfront.ir import Op
from nnfront.ops.recurrent import CHUNK

FEW = settings(max_examples=20, deadline=None, derandomize=True)
ODD = st.sampled_from([1, 2, 3, 5])
# Around the ends of chunks, of either length.
LENGTHS = st.sampled_from([1, 2, 3, 15, 16, 17, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 2 * CHUNK + 3])
RECURRENT = pytest.mark.parametrize("op", LOOPS, ids=lambda op: op.name)


class Calls(TorchDispatchMode):
    """Counts what torch is asked for."""

    count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def rates(*shape: int) -> torch.Tensor:
    """What a token leaves, in logs: from nearly all to nothing."""
    return -torch.randn(shape).mul(2).exp()


def operands(op: Op, batch: int, seq: int, groups: int, per_group: int, size: int, states: int) -> list[Any]:
    """Operands with everything that is optional."""
    heads = groups * per_group
    if op is ops.causal_conv1d:
        return [
            torch.randn(batch, seq, heads),
            torch.randn(heads, states),
            torch.randn(heads),
            torch.randn(batch, heads, states - 1),
        ]
    if op is ops.ssm_scan:
        return [
            torch.randn(batch, seq, heads, size),
            torch.rand(batch, seq, heads),
            rates(heads),
            torch.randn(batch, seq, groups, states),
            torch.randn(batch, seq, groups, states),
            torch.randn(heads),
            torch.randn(batch, heads, size, states),
        ]
    if op is ops.selective_scan:
        return [
            torch.randn(batch, seq, heads),
            torch.rand(batch, seq, heads),
            rates(heads, states),
            torch.randn(batch, seq, states),
            torch.randn(batch, seq, states),
            torch.randn(heads),
            torch.randn(batch, heads, states),
        ]
    return [
        torch.nn.functional.normalize(torch.randn(batch, seq, groups, states), dim=-1),
        torch.nn.functional.normalize(torch.randn(batch, seq, groups, states), dim=-1),
        torch.randn(batch, seq, heads, size),
        rates(batch, seq, heads),
        torch.rand(batch, seq, heads),
        torch.randn(batch, heads, states, size),
    ]


def loop(op: Op, given_operands: list[Any], **attrs: Any) -> list[torch.Tensor]:
    """The results in float64, rounded to the dtypes of the op's."""
    wide = [None if x is None else x.double() for x in given_operands]
    return list(LOOPS[op](*wide, **attrs))


def assert_near(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Equal to a share of the largest element."""
    largest = float(expected.abs().max()) if expected.numel() else 1.0
    assert got.shape == expected.shape
    assert float((got.double() - expected.double()).abs().max() if got.numel() else 0) <= tolerance * largest


@RECURRENT
@FEW
@given(st.tuples(ODD, LENGTHS, ODD, ODD, ODD, ODD), st.sets(st.integers(2, 6)), st.booleans())
def test_a_recurrence_is_a_loop_over_tokens(op: Op, sizes: Any, absent: set[int], is_set: bool) -> None:
    torch.manual_seed(sum(sizes))
    given_operands = operands(op, *sizes)
    optional = [i for i, operand in enumerate(op.operands) if operand.is_optional and i in absent]
    given_operands = [None if i in optional else x for i, x in enumerate(given_operands)]
    attrs: dict[str, Any] = {}
    if op is ops.gated_delta_rule:
        if is_set:  # a rate for each channel of the key
            given_operands[3] = rates(*given_operands[3].shape, sizes[-1])
        attrs = {"qk_l2norm": is_set, "scale": 0.7 if is_set else None}
    if op is ops.causal_conv1d:
        attrs = {"activation": "silu" if is_set else None}
    for got, expected in zip(
        run(op, *given_operands, **attrs), loop(op, given_operands, **attrs), strict=True
    ):
        assert_near(got, expected)


@RECURRENT
@FEW
@given(st.tuples(ODD, LENGTHS, ODD, ODD, ODD, ODD), st.data())
def test_a_sequence_in_parts_is_the_whole_one(op: Op, sizes: Any, data: st.DataObject) -> None:
    torch.manual_seed(0)
    given_operands = operands(op, *sizes)
    cut = data.draw(st.integers(0, sizes[1]))
    tokens = [
        i
        for i, x in enumerate(given_operands)
        if x.ndim > 2 and x.shape[1] == sizes[1] and op.operands[i].name != "state"
    ]
    whole, state = run(op, *given_operands)
    ys, states = [], given_operands[-1]
    for part in (slice(0, cut), slice(cut, None)):
        y, states = run(
            op,
            *[
                states if i == len(given_operands) - 1 else x[:, part] if i in tokens else x
                for i, x in enumerate(given_operands)
            ],
        )
        ys.append(y)
    assert_near(torch.cat(ys, 1), whole)
    assert_near(states, state)


@RECURRENT
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seq", [1, CHUNK + 9])
def test_half_types_are_computed_in_float32_and_rounded_once(op: Op, dtype: torch.dtype, seq: int) -> None:
    torch.manual_seed(0)
    halves = [x.to(dtype) for x in operands(op, 2, seq, 2, 2, 4, 4)]
    if op is not ops.causal_conv1d:
        halves[-1] = halves[-1].float()
    y, state = run(op, *halves)
    expected, expected_state = run(op, *[x.float() for x in halves])
    assert torch.equal(y, expected.to(dtype))
    assert torch.equal(state, expected_state.to(halves[-1].dtype))


@RECURRENT
@pytest.mark.parametrize("seq", [0, 1, 3])
def test_the_state_that_comes_in_is_neither_changed_nor_given_back(op: Op, seq: int) -> None:
    given_operands = operands(op, 2, seq, 1, 2, 3, 4)
    before = [x.clone() for x in given_operands]
    _, state = run(op, *given_operands)
    assert all(map(torch.equal, given_operands, before))
    assert state.untyped_storage().data_ptr() != given_operands[-1].untyped_storage().data_ptr()
    assert state.is_contiguous()
    assert state.untyped_storage().nbytes() == state.nbytes


@RECURRENT
def test_a_token_of_a_long_prompt_takes_at_most_four_calls_of_torch(op: Op) -> None:
    given_operands = operands(op, 1, 1000, 16, 1, 64, 64)
    if op is ops.causal_conv1d:
        given_operands[1], given_operands[3] = torch.randn(16, 4), torch.randn(1, 16, 3)
    with Calls() as calls:
        run(op, *given_operands)
    assert 0 < calls.count <= 4 * 1000  # its formula, token by token, takes 15 to 36


# What transformers computes; its chunks of delta nets subtract sums in float32, which leaves fewer digits than ours have.


@pytest.mark.parametrize("seq", [3, 70])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_convolution_is_that_of_mamba(seq: int, activation: str | None) -> None:
    x, weight, bias, state = operands(ops.causal_conv1d, 2, seq, 6, 1, 1, 4)
    y, after = run(ops.causal_conv1d, x, weight, bias, activation=activation)
    assert_close(y, causal_conv1d_fn(x.mT, weight, bias, activation).mT)
    assert torch.equal(after, torch.nn.functional.pad(x.mT, (4, 0))[..., -3:])
    kept = state.clone()
    y, after = run(ops.causal_conv1d, x[:, :1], weight, bias, state, activation=activation)
    assert_close(y, causal_conv1d_update(x[:, :1].mT, kept, weight, bias, activation).mT)
    assert torch.equal(after, kept)


@pytest.mark.parametrize("seq", [1, 17, 130])
def test_the_state_space_model_is_that_of_mamba2(seq: int) -> None:
    torch.manual_seed(0)
    x, dt, a, b, c, d, state = operands(ops.ssm_scan, 2, seq, 2, 3, 8, 5)
    expected = mamba2_chunk_scan(x, dt, a, b, c, 32, d, initial_states=state, return_final_states=True)
    for got, other in zip(run(ops.ssm_scan, x, dt, a, b, c, d, state), expected, strict=True):
        assert_near(got, other)
    if seq == 1:
        steps = dt[:, 0, :, None].expand(2, 6, 8)
        rate, skip = a[:, None, None].expand(6, 8, 5), d[:, None].expand(6, 8)
        y = mamba2_selective_state_update(state, x[:, 0], steps, rate, b[:, 0], c[:, 0], skip)
        assert_near(expected[0][:, 0], y)


@pytest.mark.parametrize("seq", [1, 70])
def test_the_selective_scan_is_that_of_mamba(seq: int) -> None:
    torch.manual_seed(0)
    x, dt, a, b, c, d, state = operands(ops.selective_scan, 2, seq, 6, 1, 1, 5)
    expected = mamba_selective_scan(x.mT, dt.mT, a, b.mT, c.mT, d, return_last_state=True)
    got = run(ops.selective_scan, x, dt, a, b, c, d)
    assert_near(got[0], expected[0].mT)
    assert_near(got[1], expected[1])
    y, after = run(ops.selective_scan, x[:, :1], dt[:, :1], a, b[:, :1], c[:, :1], d, state)
    assert_near(y[:, 0], mamba_selective_state_update(state, x[:, 0], dt[:, 0], a, b[:, 0], c[:, 0], d))
    assert_near(after, state)  # which it has changed in place


@pytest.mark.parametrize("qk_l2norm", [False, True])
@pytest.mark.parametrize("seq", [1, 17, 130])
def test_the_delta_rule_is_that_of_qwen3_next(seq: int, qk_l2norm: bool) -> None:
    torch.manual_seed(0)
    *tokens, state = operands(ops.gated_delta_rule, 2, seq, 2, 3, 8, 5)
    got = run(ops.gated_delta_rule, *tokens, state, qk_l2norm=qk_l2norm)
    for function in (torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule):
        expected = function(
            *tokens, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=qk_l2norm
        )
        assert_near(got[0], expected[0], 1e-4)
        assert_near(got[1], expected[1], 1e-4)


@pytest.mark.parametrize("seq", [1, 17, 130])
def test_the_delta_rule_with_a_gate_for_each_channel_is_that_of_kimi_linear(seq: int) -> None:
    torch.manual_seed(0)
    q, k, v, _, beta, state = operands(ops.gated_delta_rule, 2, seq, 3, 1, 8, 5)
    tokens = q, k, v, rates(2, seq, 3, 5), beta
    got = run(ops.gated_delta_rule, *tokens, state, qk_l2norm=True)
    for function in (chunk_kimi_delta_attention, recurrent_kimi_delta_attention):
        expected = function(
            *tokens, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        assert_near(got[0], expected[0], 1e-4)
        assert_near(got[1], expected[1], 1e-4)
