# SPDX-License-Identifier: Apache-2.0
"""Decoding of many architectures at about half a billion weights, as a share of the speed at which memory is read in the same run.

    python bench/decode_cpu.py [--names gemma2 mamba2 ...] [--rounds 2]

Random weights in bfloat16, two threads, batch 1, 32 tokens after a prompt of 8; dense families in as many layers as come nearest to the same count of weights. Counted are the
bytes that a token has to move: all weights that it multiplies with, of an embedding that is no head one row, of experts those that it chooses; and what is kept of the sequence as
a whole, read and written. Each measurement runs in a process of its own, architectures alternate; the best of all rounds stands, since other work on the machine only takes away.
A round of all of them takes four minutes on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import sys
import time
from math import prod
from pathlib import Path
from typing import Any

import torch
from machine import describe, keep, measure, table
from nnfront_models import FILES

import nnfront as nn

NEW, WARM = 32, 4
# A decoder of 16 layers of 1024, in the words of the families' configurations.
WIDE = {"hidden_size": 1024, "num_hidden_layers": 16, "num_attention_heads": 16, "num_key_value_heads": 4}
WIDE |= {"head_dim": 64, "intermediate_size": 4096, "vocab_size": 64000, "max_position_embeddings": 2048}
EXPERTS = {"num_hidden_layers": 12, "moe_intermediate_size": 512, "num_experts_per_tok": 4}
STATES = {
    "gemma2": WIDE | {"vocab_size": 256000, "head_dim": 128, "num_attention_heads": 8},
    "deepseek_v3": WIDE
    | EXPERTS
    | {"q_lora_rank": 512, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    | {"v_head_dim": 128, "first_k_dense_replace": 1, "n_routed_experts": 24, "n_group": 4, "topk_group": 2},
    "mamba2": {"hidden_size": 1024, "num_hidden_layers": 64, "vocab_size": 50288, "state_size": 128}
    | {"num_heads": 32, "head_dim": 64, "n_groups": 1, "expand": 2},
    "qwen3_next": WIDE
    | EXPERTS
    | {"num_experts": 24, "shared_expert_intermediate_size": 512, "head_dim": 128, "linear_num_key_heads": 8}
    | {"linear_num_value_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128},
}
DENSE = """
llama gpt2 gemma phi falcon bloom opt gpt_neox gptj olmo2 starcoder2 cohere stablelm mpt qwen2 qwen3 mistral gemma3_text phi3 gpt_bigcode gpt_neo
olmo olmo3 granite cohere2 glm glm4 nemotron exaone4 smollm3 seed_oss ernie4_5 arcee apertus helium hunyuan_v1_dense nanochat
""".split()
ELEMENTS, MOST_LAYERS = 4e8, 24
# What a family says of each layer, which has to fit as many layers as there are; and the sizes of some that are not another's.
OF_LAYERS = {"layer_types": None, "mlp_only_layers": (), "no_rope_layers": None, "attention_layers": None}
OWN = {"opt": {"word_embed_proj_dim": 1024}}
# Embeddings by their names: of positions, and of tokens, which may be heads too.
POSITIONS, TOKENS = ("wpe", "embed_positions"), ("embed_tokens", "embed_in", "embeddings", "wte")


def sized(name: str) -> tuple[Any, Any]:
    """The model file of an architecture, and a configuration of about half a billion weights."""
    file = importlib.import_module(f"nnfront_models.{FILES.get(name, name)}")
    tiny = file.Config.from_hf({"model_type": name}) if name in FILES else file.TINY
    wanted = OF_LAYERS | STATES.get(name, WIDE | OWN.get(name, {}))
    # Sizes that a family leaves to others, or lacks, as heads of keys of its own, are none to give.
    given = {key: value for key, value in wanted.items() if getattr(file.TINY, key, None) is not None}
    config = dataclasses.replace(tiny, dtype="bfloat16", **given)
    if name in STATES:
        return file, config

    def elements(layers: int) -> int:
        model = file.build(dataclasses.replace(config, num_hidden_layers=layers))
        return sum(prod(parameter.shape) for _, parameter in model.named_parameters())

    pair = elements(4) - elements(2)
    layers = 2 + 2 * round((ELEMENTS - elements(2)) / pair)
    return file, dataclasses.replace(config, num_hidden_layers=min(layers, MOST_LAYERS))


def moved(session: Any, config: Any, cache: Any) -> int:
    """The bytes that a token moves."""
    total, chosen = 0, getattr(config, "num_experts_per_tok", 0)
    weights = session.weights
    is_tied = getattr(config, "tie_word_embeddings", False)
    for name, weight in weights.items():
        if weight.ndim == 3 and chosen and "expert" in name:
            total += weight.nbytes * chosen // len(weight)
        elif any(word in name for word in POSITIONS) or (
            any(word in name for word in TOKENS) and not is_tied
        ):
            total += weight[0].nbytes
        else:
            total += weight.nbytes
    kept = sum(storage.nbytes for layer in cache._layers for storage in layer.fixed.values())
    return total + 2 * kept


def read_gb_s() -> float:
    """The better of two ways to read half a gigabyte."""
    words = torch.ones(2**27)
    matrix, vector = torch.ones((2**15, 2**13), dtype=torch.bfloat16), torch.ones(2**13, dtype=torch.bfloat16)
    best = 0.0
    for read in (words.sum, lambda: torch.mv(matrix, vector)):
        for _ in range(4):
            begin = time.perf_counter()
            read()
            best = max(best, words.nbytes / 1e9 / (time.perf_counter() - begin))
    return best


def decode(name: str) -> dict[str, Any]:
    """Measure one architecture in this process."""
    torch.set_num_threads(2)
    torch.manual_seed(0)
    file, config = sized(name)
    model = file.build(config)
    some = torch.empty(1 << 20, dtype=torch.bfloat16).normal_(0, 0.02)
    weights = {
        n: torch.empty(tuple(p.shape), dtype=getattr(torch, p.dtype)) for n, p in model.named_parameters()
    }
    for weight in weights.values():
        for part in weight.view(-1).split(len(some)):
            part.copy_(some[: len(part)])
    ir = nn.passes.lift_transform_params(model.export(file.export_spec(config)), shared_transform=True)
    session = nn.compile(ir).load(weights)
    del weights
    cache = session.make_cache(batch=1, max_seq=64)
    session["prefill"](torch.arange(8)[None], cache)
    token, times = torch.tensor([[5]]), []
    limits = [read_gb_s()]
    for i in range(WARM + NEW):
        begin = time.perf_counter()
        session["decode"](token, cache)
        if i >= WARM:
            times.append(time.perf_counter() - begin)
    limits.append(read_gb_s())
    nbytes, seconds = moved(session, config, cache), sorted(times)[NEW // 4]
    if "--profile" in sys.argv:
        print(session["decode"].profile(token, cache), file=sys.stderr)
    return {"ms": 1e3 * seconds, "MB": nbytes / 1e6, "GB/s": nbytes / 1e9 / seconds, "read": max(limits)}


def main() -> None:
    """Measure, print a table and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--names", nargs="+", default=[*STATES, *DENSE])
    parser.add_argument("--rounds", type=int, default=2)
    args = parser.parse_args()
    rounds = [{n: measure(Path(__file__), "one", n) for n in args.names} for _ in range(args.rounds)]
    rows = []
    for name in args.names:
        found = [each[name] for each in rounds]
        best = max(found, key=lambda r: r["GB/s"] / r["read"])
        share = best["GB/s"] / best["read"]
        rows.append({"model": name, "MB a token": best["MB"], "ms a token": best["ms"], "GB/s": best["GB/s"]})
        rows[-1] |= {"memory GB/s": best["read"], "share of memory": share}
    base = next((row["share of memory"] for row in rows if row["model"] == "llama"), None)
    for row in rows:
        if base and row["model"] in DENSE:
            row["share / llama's"] = row["share of memory"] / base
    machine = {**describe("torch"), "load": f"{os.getloadavg()[0]:.1f}"}
    print(keep("decode_cpu", machine, rows))
    print(table(rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        print(json.dumps(decode(sys.argv[2])))
    else:
        main()
