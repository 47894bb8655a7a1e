# SPDX-License-Identifier: Apache-2.0
"""Models whose layers keep latents and states of recurrences, on the Triton kernels, in the interpreter: they compute what the CPU computes."""

from __future__ import annotations

import pytest
from few_of import few_of
from state_runs import converse

from nnfront.backends.lowering import lower
from nnfront.ir import parse

RECURRENT = {"triton_causal_conv1d"}
EXPECTED = {
    "mamba2": RECURRENT | {"triton_ssm_scan"},
    "qwen3_next": RECURRENT | {"triton_gated_delta_rule"},
    "kimi_linear": RECURRENT | {"triton_gated_delta_rule"},
    "deepseek_v3": {"triton_latent_attention"},
}


@pytest.mark.parametrize("file", few_of(EXPECTED))
def test_a_model_with_other_states_gives_on_the_kernels_the_logits_of_the_cpu(interpreted, file):
    worst, ran = interpreted(converse, file)
    assert worst < 6e-3
    assert ran >= EXPECTED[file]


def chosen(text: str) -> tuple[str, str]:
    """The kernel of the one instruction of a method, and what it and those before it said."""
    program = lower(parse(text), "cuda:sm_90")
    (run,) = (i for i in program.methods["main"].body.walk() if i.op in text)
    return run.kernel, run.why


SCAN = """
def main[n](x: input {x}[1, n, 4, 16], dt: input float32[1, n, 4], a: weight float32[4], b: input {b}[1, n, 2, {states}], c: input {b}[1, n, 2, {states}]) -> ({x}[1, n, 4, 16], {kept}[1, 4, 16, {states}]) {{
    y: ({x}[1, n, 4, 16], {kept}[1, 4, 16, {states}]) = ssm_scan(x, dt, a, b, c)
    return y
}}
"""


@pytest.mark.parametrize(
    ("x", "b", "states", "kept", "kernel"),
    [
        ("bfloat16", "bfloat16", 32, "float32", "triton_ssm_scan"),
        ("bfloat16", "float32", 32, "float32", "ssm_scan"),
        ("bfloat16", "bfloat16", 300, "float32", "ssm_scan"),
        ("float64", "float64", 32, "float64", "ssm_scan"),
    ],
)
def test_what_the_kernel_refuses_the_reference_computes(x, b, states, kept, kernel):
    assert chosen(SCAN.format(x=x, b=b, states=states, kept=kept))[0] == kernel


LATENT = """
def main[b, n, m](q: input {q}[b, n, {heads}, 80], k: input {q}[b, n, 1, 80], bias: input {bias}[1, 1, n, n]) -> {q}[b, n, {heads}, {values}] {{
    y: {q}[b, n, {heads}, {values}] = attention(q, k, None, None, None, bias, value_size={values}, is_causal={causal})
    return y
}}
"""


@pytest.mark.parametrize(
    ("q", "bias", "values", "causal", "kernel"),
    [
        ("bfloat16", "float32", 64, True, "triton_latent_attention"),
        ("bfloat16", "bool", 64, True, "triton_latent_attention"),
        ("bfloat16", "float16", 64, True, "attention"),
        ("bfloat16", "float32", 80, True, "attention"),
        ("bfloat16", "float32", 64, False, "attention"),
        ("float32", "float32", 64, True, "attention"),
    ],
)
def test_attention_to_latents_that_the_kernel_refuses_the_reference_computes(q, bias, values, causal, kernel):
    assert chosen(LATENT.format(q=q, bias=bias, values=values, causal=causal, heads=4))[0] == kernel
