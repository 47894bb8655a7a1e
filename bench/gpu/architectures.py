# SPDX-License-Identifier: Apache-2.0
"""Every architecture, small and with random weights, on the GPU against the CPU: a prompt and some tokens, with contiguous and paged caches.

Recurrences, latents, experts and what else their states and layers are; products of experts and others in 8 and 4 bits as well.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

import nnfront as nn
from nnfront.backends.cuda.ahead.enumerate_kernels import enumerate_plans
from nnfront.ir import IRModule
from nnfront.llm.model_files import known_architectures

QUANTIZED = ("llama", "qwen3_moe", "mixtral", "deepseek_v3", "qwen3_next")
DRY = ("mamba2",)
STEPS = 4
BATCH, PROMPT, ROOM, PAGE = 2, 9, 32, 16
NEAR = 0.03  # of the largest logit: both round to 16 bits some tens of times, in different places


def described(file: str, quant: str | None, dtype: str) -> tuple[nn.Module, IRModule]:
    """A small model and its description, with weights as they are stored."""
    module = importlib.import_module(f"nnfront_models.{file}")
    config = dataclasses.replace(module.TINY, dtype=dtype)
    model = module.build(config)
    ir = model.export(module.export_spec(config))
    if quant is not None:
        ir = nn.passes.quantize_weights(ir, quant)
    return model, nn.passes.lift_transform_params(ir, shared_transform=True)


def compared(file: str, quant: str | None, page_size: int | None, dry: bool) -> dict[str, Any] | str | None:
    """What is wrong with a model's logits on the GPU."""
    model, ir = described(file, quant, "float16" if dry else "bfloat16")
    methods = {method.name for method in ir.methods}
    if not {"prefill", "decode"} <= methods:
        return {
            "skipped": [
                f"architectures {file}: it has no prefill and decode, but {', '.join(sorted(methods))}"
            ]
        }
    torch.manual_seed(0)
    weights = {
        name: (torch.randn([int(s) for s in p.shape]) * 0.1).to(getattr(torch, p.dtype))
        for name, p in model.named_parameters()
    }
    sessions = [nn.compile(ir, target=target).load(weights) for target in ("cuda", "cpu")]
    caches = [s.make_cache(batch=BATCH, max_seq=ROOM, page_size=page_size) for s in sessions]
    ids = torch.randint(0, 64, (BATCH, PROMPT))
    for step in range(STEPS):
        tokens, method = (ids, "prefill") if step == 0 else (ids[:, step : step + 1], "decode")
        found, expected = (
            s[method](tokens.to(s.device), cache).cpu().double()
            for s, cache in zip(sessions, caches, strict=True)
        )
        off = float((found - expected).abs().max() / expected.abs().max())
        if not off < NEAR:
            return f"{method} {step}: the largest difference is {off:.3g} of the largest logit"
    graphs = sessions[0]["decode"].graphs
    return {"runtime": [f"ok    {file} {quant or ''} pages {page_size}: {graphs or 'nothing is captured'}"]}


def models(dry: bool) -> Iterator[tuple[str, str | None]]:
    """Files of models, and as what their weights are stored."""
    for file in DRY if dry else dict.fromkeys(known_architectures().values()):
        yield from ((file, quant) for quant in (None, *(("int8", "int4") if file in QUANTIZED else ())))


def plans(file: str, quant: str | None, arch: str) -> list[Any]:
    """What the calls of `compared` launch, found without a GPU."""
    _, ir = described(file, quant, "bfloat16")
    if not {"prefill", "decode"} <= {method.name for method in ir.methods}:
        return []
    program = nn.compile(ir, target=f"cuda:{arch}").program
    named = {"batch": [BATCH], "seq": [1, PROMPT], "max_seq": [ROOM], "page_size": [0, PAGE]}
    return [*enumerate_plans(program, {}, named)[0].values()]


def cases(options: Any) -> Iterator[Any]:
    from part import Case

    for file, quant in models(options.dry):
        for page_size in (None, PAGE) if quant is None else (None,):
            label = " ".join(filter(None, ["architectures", file, quant, page_size and "in pages"]))
            yield Case(label, partial(compared, file, quant, page_size, options.dry))
