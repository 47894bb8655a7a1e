# SPDX-License-Identifier: Apache-2.0
"""Keys and values in 8 bits from what is appended to what attention makes of it, by e4m3's precision, and what is refused."""

from __future__ import annotations

import math
import re

import pytest
import torch
from kernel_attention import normal
from kernel_mutants import Mutant
from nnfront_kernels import KernelError, attention_decode, attention_prefill, rope_append
from nnfront_kernels.attention_fp8 import MOVES
from test_attention import Decode
from test_attention import run_mutant as decode_mutant
from test_rope_append import Append
from test_rope_append import run_mutant as append_mutant

FP8 = torch.float8_e4m3fn


def moved(words: torch.Tensor) -> list[torch.Tensor]:
    """What the instructions of `MOVES` do to 32-bit words, in int64."""
    registers: dict[str, torch.Tensor] = {"$2": words}

    def value(name: str) -> torch.Tensor | int:
        return registers[name] if name in registers else int(name, 0)

    for opcode, target, *operands in re.findall(
        r"(\w+)\.b32 (\S+), (\S+), (\S+?)(?:, (\S+), 0xEA)?;", MOVES.value
    ):
        a, b, *c = (value(name) for name in operands if name)
        if opcode == "lop3":
            registers[target] = (a & b) | c[0]
        else:
            registers[target] = {"shl": a << b, "shr": a >> b, "and": a & b}[opcode] & 0xFFFFFFFF
    return [registers["$0"], registers["$1"]]


def test_the_instructions_that_move_bits_give_every_code_divided_by_256():
    low = torch.arange(2**16)
    words = low | (low.flip(0) << 16)
    codes = torch.stack([(words >> 8 * i) & 0xFF for i in range(4)], 1).to(torch.uint8)
    expected = codes.view(FP8).double() / 256
    for half, answers in zip(moved(words), (expected[:, 0::2], expected[:, 1::2]), strict=True):
        found = torch.stack([half & 0xFFFF, half >> 16], 1).to(torch.uint16).view(torch.float16).double()
        known = ~answers.isnan()
        assert known.sum() == 2 * 2**16 - 2 * 2**9
        assert torch.equal(found[known], answers[known])


def empty_cache(batch: int, kv_heads: int, slots: int, size: int) -> tuple[list[torch.Tensor], dict]:
    codes = [torch.zeros(batch, kv_heads, slots, size).to(FP8) for _ in range(2)]
    names = ("key_scales", "value_scales")
    return codes, {name: torch.full((batch, kv_heads, slots), math.nan) for name in names}


def append_and_attend() -> None:
    generator = torch.Generator().manual_seed(4)
    batch, seq, heads, kv_heads, size = 2, 30, 4, 2, 64
    q, k, v = (normal(generator, batch, seq, n, size).half() for n in (heads, kv_heads, kv_heads))
    codes, scales = empty_cache(batch, kv_heads, 40, size)
    none = torch.zeros(batch, dtype=torch.int32)
    rope_append.launch(q, k, v, None, None, none, *codes, **scales)
    last = torch.full((batch,), seq, dtype=torch.int32)
    decoded = attention_decode.launch(q[:, -1], *codes, last, **scales)
    starts = torch.tensor([0, seq, 2 * seq], dtype=torch.int32)
    filled = attention_prefill.launch(q.flatten(0, 1), *codes, starts, longest=seq, **scales)
    for y in (decoded, filled.view(batch, seq, heads, size)[:, -1]):
        for b, h in ((b, h) for b in range(batch) for h in range(heads)):
            keys, values, query = (x.double() for x in (k[b, :, h // 2], v[b, :, h // 2], q[b, -1, h]))
            # Half a step of three bits, and of the smallest steps.
            off_k, off_v = (
                2.0**-4 * x.abs() + 2.0**-10 * x.abs().amax(1, True) / 448 for x in (keys, values)
            )
            off_z = (off_k @ query.abs()).max() / math.sqrt(size)
            weights = torch.softmax(keys @ query / math.sqrt(size), 0)
            factor = math.exp(2 * off_z) * (1 + 2.0**-8)  # by which a weight may be off
            bound = factor * (weights @ (values.abs() + off_v)) - weights @ values.abs()
            error = (y[b, h].double() - weights @ values).abs()
            assert (error <= bound + 2.0**-11).all()
            # Roundings are independent: what is typical is far below what is possible.
            assert error.square().mean().sqrt() < 2.0**-4 * (weights @ values.square()).mean().sqrt()


def test_what_was_appended_is_attended_within_the_precision_of_8_bits(interpreted):
    interpreted(append_and_attend)


def append_what_is_not_finite() -> None:
    k = torch.ones(1, 3, 2, 16, dtype=torch.float16)
    k[0, 0, 0, 3], k[0, 1, 1, 15] = math.nan, -math.inf
    codes, scales = empty_cache(1, 2, 4, 16)
    rope_append.launch(k, k, k, None, None, torch.zeros(1, dtype=torch.int32), *codes, **scales)
    for found in scales.values():
        finite = found[0, :, :3].isfinite()
        assert finite.tolist() == [[False, True, True], [True, False, True]]


def test_a_token_that_is_not_finite_has_a_scale_that_is_not(interpreted):
    interpreted(append_what_is_not_finite)


APPEND = Append((15, 3, 17), 2, 7, 2, 40, 12, page=16, gap=8, fp8=True)
DECODE = Decode((60, 3), 6, 2, 64, page=16, window=50, splits=3, sinks=True, fp8=True)
SMALL = Decode((70,), 2, 1, 64, step=16, fp8=True, magnitude=2.0**-12)
MUTANTS = [
    (Mutant("key_scales_ignored", "attention_fp8.py", "scale[:, None] * k_scales[None, :]", "scale[:, None] + 0 * k_scales[None, :]"), decode_mutant, DECODE),
    (Mutant("value_scales_ignored", "attention_fp8.py", "weights * v_scales[None, :]", "weights + 0 * v_scales[None, :]"), decode_mutant, DECODE),
    (Mutant("even_for_odd", "attention_fp8.py", "odd = ((words & 0x8000) | ((words >> 1) & 0x3F80))", "odd = (((words & 0x80) << 8) | ((words & 0x7F) << 7))"), decode_mutant, DECODE),
    (Mutant("unit_of_a_query_lost", "attention_fp8.py", "odd, unit * 256.0", "odd, 0 * unit + 256.0"), decode_mutant, DECODE),
    (Mutant("weights_relative_to_scores_alone", "attention_fp8.py", "tl.max(z + exponent[None, :], axis=1)", "tl.max(z, axis=1)"), decode_mutant, SMALL),
    (Mutant("features_in_halves", "attention_fp8.py", "tl.reshape(tl.join(acc_even, acc_odd), (BLOCK_M, BLOCK_D))", "tl.reshape(tl.permute(tl.join(acc_even, acc_odd), (0, 2, 1)), (BLOCK_M, BLOCK_D))"), decode_mutant, DECODE),
    (Mutant("scales_of_the_first_page", "attention_fp8.py", "step_rows(key_scales_ptr, page,", "step_rows(key_scales_ptr, page * 0,"), decode_mutant, DECODE),
    (Mutant("scales_of_the_first_head", "attention_decode.py", "value_scales_ptr + kv_head.to(tl.int64) * stride_vsh", "value_scales_ptr + 0 * kv_head.to(tl.int64)"), decode_mutant, DECODE),
    (Mutant("codes_not_rescaled", "attention_fp8.py", "acc_odd * shrink[:, None]", "acc_odd"), decode_mutant, SMALL),
    (Mutant("second_half_of_pairs_unseen", "rope.py", "larger(larger(largest, new_a), new_b)", "larger(largest, new_a)"), append_mutant, APPEND),
    (Mutant("rest_unseen", "rope.py", "largest = larger(largest, rest)", "largest = larger(largest, 0 * rest)"), append_mutant, APPEND),
    (Mutant("codes_of_a_wrong_scale", "rope.py", "inverse = tl.div_rn(full, size)", "inverse = tl.div_rn(full, size) * 0.97"), append_mutant, APPEND),
    (Mutant("zeros_without_a_scale", "rope.py", "tl.where(size < SMALLEST, full, size)", "size"), append_mutant, APPEND),
    (Mutant("scales_of_the_first_slot", "rope_append.py", "page * stride_p + slot", "page * stride_p + 0 * slot"), append_mutant, APPEND),
]  # fmt: skip


@pytest.mark.parametrize(("mutant", "run", "case"), MUTANTS, ids=[str(mutant) for mutant, _, _ in MUTANTS])
@pytest.mark.matrix
def test_mutant_of_8_bits_is_caught(interpreted, mutant, run, case):
    with pytest.raises(AssertionError):
        interpreted(run, mutant, case)


@pytest.mark.parametrize(
    ("run", "case"),
    [(append_mutant, APPEND), (decode_mutant, DECODE), (decode_mutant, SMALL)],
    ids=["append", "decode", "decode small values"],
)
@pytest.mark.matrix
def test_8_bits_without_the_mistake_pass(interpreted, run, case):
    interpreted(run, Mutant("none", "", "", ""), case)


def tensor(*size: int, dtype: torch.dtype = FP8) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


WRONG = [
    ({"keys": tensor(2, 2, 9, 65)[..., :64]}, r"keys in 8 bits must start at even bytes, as two codes are read at a time, got strides \[1170, 585, 65, 1\] from 0"),
    ({"values": tensor(2, 2, 9, 66)[..., 1:65]}, r"values in 8 bits must start at even bytes, .* got strides \[1188, 594, 66, 1\] from 1"),
    ({"value_scales": None}, "value_scales are missing: keys and values in 8 bits both have scales"),
    ({"key_scales": None, "value_scales": None}, "keys must be torch.float16, got torch.float8_e4m3fn"),
    ({"keys": tensor(2, 2, 9, 64, dtype=torch.float16)}, "keys must be torch.float8_e4m3fn, got torch.float16"),
    ({"key_scales": tensor(2, 2, 8, dtype=torch.float32)}, r"key_scales must be torch.float32 \[2, 2, 9\] with adjacent slots, got torch.float32 \[2, 2, 8\]"),
    ({"value_scales": tensor(2, 2, 9, dtype=torch.float16)}, r"value_scales must be torch.float32 \[2, 2, 9\] with adjacent slots, got torch.float16 \[2, 2, 9\]"),
    ({"key_scales": tensor(2, 9, 2, dtype=torch.float32).transpose(1, 2)}, r"with adjacent slots, got torch.float32 \[2, 2, 9\] with strides \[18, 1, 2\]"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[message[-30:] for _, message in WRONG])
def test_a_cache_in_8_bits_says_what_does_not_fit(changes, message):
    arguments = {
        "q": tensor(2, 4, 64, dtype=torch.float16),
        "keys": tensor(2, 2, 9, 64),
        "values": tensor(2, 2, 9, 64),
        "lengths": tensor(2, dtype=torch.int32),
        "key_scales": tensor(2, 2, 9, dtype=torch.float32),
        "value_scales": tensor(2, 2, 9, dtype=torch.float32),
        "arch": "sm_90",
        **changes,
    }
    with pytest.raises(KernelError, match=message):
        attention_decode.plan(**arguments)
