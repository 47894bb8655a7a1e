# SPDX-License-Identifier: Apache-2.0
"""Time torch.export of transformers' Llama with 70B dimensions on the meta device: one method, dynamic batch and length, no cache.

Usage: torch_export.py LAYERS.
"""

import json
import sys
import time

import torch
from torch.export import Dim
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    hidden_size=8192,
    num_hidden_layers=int(sys.argv[1]),
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=28672,
    vocab_size=128256,
    tie_word_embeddings=False,
    use_cache=False,
)
with torch.device("meta"):
    model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, ids, positions):
        return self.model(input_ids=ids, position_ids=positions, use_cache=False).logits


ids = torch.zeros((2, 16), dtype=torch.long, device="meta")
positions = torch.arange(16, device="meta").expand(2, 16)
axes = {0: Dim("batch", min=2, max=512), 1: Dim("seq", min=4, max=8192)}
start = time.perf_counter()
exported = torch.export.export(Logits(model), (ids, positions), dynamic_shapes=(axes, axes), strict=False)
print(json.dumps({"export_s": time.perf_counter() - start, "nodes": len(exported.graph.nodes)}))
