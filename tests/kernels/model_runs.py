# SPDX-License-Identifier: Apache-2.0
"""Whole models through the Triton kernels, for `test_kernels_in_models.py`. A module of its own: it runs in a process with the interpreter on."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from nnfront_models import llama, qwen3_moe

import nnfront as nn

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "experts": {},
    "biases, gelu, tied": {
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
}


def run(variant: str, quant: str | None, seq: int) -> dict[str, Any]:
    """Largest differences between the Triton path and the CPU's, relative to the largest logit; and the kernels that ran."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    file: Any = qwen3_moe if variant == "experts" else llama
    config = dataclasses.replace(file.TINY, dtype="float16", **VARIANTS[variant])
    model = file.build(config)
    ir = model.export(file.export_spec(config))
    if quant is not None:
        ir = nn.passes.quantize_weights(ir, nn.passes.QuantScheme(quant, head="keep"))
    ir = nn.passes.lift_transform_params(ir, shared_transform=True)
    triton, cpu = nn.compile(ir, target="cuda"), nn.compile(ir)
    weights = {
        name: (torch.randn([int(size) for size in p.shape]) * 0.1).half()
        for name, p in model.named_parameters()
    }
    a, b = triton.load(weights), cpu.load(weights)
    ids = torch.randint(0, config.vocab_size, (2, seq))
    caches = [session.make_cache(batch=2, max_seq=seq + 2) for session in (a, b)]
    results = {}
    for name, tokens in (("prefill", ids), ("decode", ids[:, :1])):
        got, expected = (s[name](tokens, cache) for s, cache in zip((a, b), caches, strict=True))
        results[name] = float((got - expected).abs().max() / expected.abs().max())
    got, expected = a["logits"](ids), b["logits"](ids)
    results["logits"] = float((got - expected).abs().max() / expected.abs().max())
    results["again"] = torch.equal(got, a["logits"](ids))
    results["kernels"] = sorted(
        {i.kernel for m in triton.program.methods.values() for i in m.body.instructions}
    )
    results["linear"] = [
        i.op
        for m in triton.program.methods.values()
        for i in m.body.instructions
        if i.op in ("linear", "matmul")
    ]
    results["bytes"] = [sum(v.nbytes for v in s.weights.values()) for s in (a, b)]
    return results
