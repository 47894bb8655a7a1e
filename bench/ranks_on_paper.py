# SPDX-License-Identifier: Apache-2.0
"""What dividing a model among GPUs costs and gives, on paper: nothing here is measured. `python bench/ranks_on_paper.py` prints a table.

From the plan of `nn.divide`, weights in bfloat16, n GPUs, a batch of b sequences of 4096 tokens in each group of t ranks:

    memory     bytes of a rank's parts of weights + b * 4096 * bytes that a rank keeps of a token
    read       bytes of its parts, of an embedding b rows, of E experts of which a token takes k those that are met: E * (1 - (1 - k / E) ** b)
    sums       one for each weight that is divided by rows, each mixture of experts and the embedding
    sent       sums * 2 * (t - 1) / t * b * hidden_size * 2 + (t - 1) / t * b * vocab_size * 2
    step       max((read + kept) / MEMORY, b * (dense + experts * k / E) / FLOPS) + sent / LINK + (sums + 1) * 2 * log2(t) * HOP
               two operations for each weight of two bytes that a token meets; launching hidden behind it
    tokens/s   n / t groups * b / step, with the b that the memory holds, up to 64 for each rank

The constants are a vendor's figures (HBM, links) and a usual latency; change them for other machines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from nnfront.llm.model_files import find_architecture

MEMORY, ROOM = 4.8e12, 0.9 * 141e9  # H200: bytes a second, bytes that may be filled
FLOPS = 990e12  # in bfloat16
NODE = 8  # GPUs that NVLink joins
LINK = {True: 450e9, False: 50e9}  # bytes a second to others, within a node and beyond
HOP = {True: 1.5e-6, False: 5e-6}  # seconds from one GPU to the next
CONTEXT, MOST = 4096, 64

LLAMA = find_architecture("llama").file.Config
V3 = find_architecture("deepseek_v3").file.Config
BIG = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "dtype": "bfloat16"}
MODELS: dict[str, tuple[str, Any]] = {
    "8B": ("llama", LLAMA(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, **BIG)),
    "70B": ("llama", LLAMA(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64, **BIG)),
    "671B": ("deepseek_v3", V3(dtype="bfloat16")),
}  # fmt: skip


@dataclass(frozen=True)
class Divided:
    """What one of t ranks has: bytes of weights that every step reads, of experts, of the embedding, of a token; and sums in a step."""

    dense: int
    experts: int
    embedding: int
    token: int
    sums: int


def divided(kind: str, config: Any, t: int) -> Divided:
    """Count over the plan of a few layers, and take them as often as the model has them."""
    dense_layers = getattr(config, "first_k_dense_replace", 0)
    few = replace(config, num_hidden_layers=dense_layers + 1)
    architecture = find_architecture(kind)
    plan = architecture.divided(few, t)[1].weights if t > 1 else None
    found = {"dense": 0, "experts": 0, "embedding": 0}
    sums = 1
    last = config.num_hidden_layers - dense_layers  # as many layers are like the last of the few
    weights = plan or {n: None for n, _ in architecture.file.build(few).named_parameters()}
    shapes = {n: p.shape for n, p in architecture.file.build(few).named_parameters()}
    for name, planned in weights.items():
        times = last if f".layers.{dense_layers}." in name else 1
        size = 2 * math.prod(map(int, planned.part.shape if planned else shapes[name])) * times
        is_expert = ".experts." in name
        part = "experts" if is_expert else "embedding" if "embed_tokens" in name else "dense"
        found[part] += size // (t if is_expert else 1)
        sums += times if planned and planned.style == "row" else 0
    sums += last if found["experts"] else 0
    kept = (
        config.kv_lora_rank + config.qk_rope_head_dim
        if kind == "deepseek_v3"
        else 2 * max(config.kv_heads // t, 1) * config.head_size
    )
    return Divided(**found, token=2 * kept * config.num_hidden_layers, sums=sums)


def step(config: Any, part: Divided, t: int, b: int) -> tuple[float, float]:
    """Seconds and bytes sent of one step."""
    experts, chosen = getattr(config, "n_routed_experts", 0), getattr(config, "num_experts_per_tok", 0)
    met = 1 - (1 - chosen / experts) ** b if experts else 0
    read = part.dense + part.experts * met + b * (CONTEXT * part.token + 2 * config.hidden_size)
    sent = (t - 1) / t * b * 2 * (part.sums * 2 * config.hidden_size + config.vocab_size)
    computed = b * (part.dense + (part.experts * chosen / experts if experts else 0))
    near = t <= NODE
    hops = (part.sums + 1) * 2 * math.log2(t) * HOP[near] if t > 1 else 0.0
    return max(read / MEMORY, computed / FLOPS) + sent / LINK[near] + hops, sent


def batch(part: Divided, t: int) -> int:
    """How many sequences the memory beside the weights holds, up to MOST for each rank."""
    left = ROOM - part.dense - part.experts - part.embedding
    return max(min(MOST * t, int(left / (CONTEXT * part.token))), 0)


def main() -> None:
    """Print the table."""
    print(
        "| model | GPUs | fastest step: ranks | GB a rank | KB sent | ms a token | most tokens/s: groups x ranks | batch | tokens/s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for name, (kind, config) in MODELS.items():
        ranks = [t for t in (1, 2, 4, 8, 16, 32, 64) if config.num_attention_heads % t == 0]
        parts = {t: divided(kind, config, t) for t in ranks}
        fitting = {t: part for t, part in parts.items() if batch(part, t)}
        for n in (1, 2, 4, 8, 16, 32, 64):
            here = {t: part for t, part in fitting.items() if t <= n}
            if not here:
                print(f"| {name} | {n} | does not fit | | | | | | |")
                continue
            quick = min(here, key=lambda t: step(config, parts[t], t, 1)[0])
            rate = {t: n // t * batch(p, t) / step(config, p, t, batch(p, t))[0] for t, p in here.items()}
            best = max(rate, key=lambda t: rate[t])
            seconds, sent = step(config, parts[quick], quick, 1)
            size = (parts[quick].dense + parts[quick].experts + parts[quick].embedding) / 1e9
            print(
                f"| {name} | {n} | {quick} | {size:.1f} | {sent / 1e3:,.0f} | {seconds * 1e3:.2f} "
                f"| {n // best} x {best} | {batch(parts[best], best)} | {rate[best]:,.0f} |"
            )


if __name__ == "__main__":
    main()
