# SPDX-License-Identifier: Apache-2.0
"""Time transformers (eager, bf16) on a checkpoint. Usage: transformers_llm.py FOLDER. Prints JSON. Tokens are given: none is chosen by what is computed."""

import json
import resource
import sys
import time

import torch
from transformers import AutoModelForCausalLM, DynamicCache

torch.set_num_threads(2)
torch.manual_seed(0)
PROMPT, NEW, REPEATS = 512, 64, 3
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.bfloat16).eval()
ids = torch.randint(2, model.config.vocab_size, (1, PROMPT))


def run(tokens, cache):
    return model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits


prefill, decode = [], []
with torch.inference_mode():
    run(ids, DynamicCache(config=model.config))
    for _ in range(REPEATS):
        cache = DynamicCache(config=model.config)
        start = time.perf_counter()
        run(ids, cache)
        prefill.append(PROMPT / (time.perf_counter() - start))
        start = time.perf_counter()
        for token in torch.randint(2, model.config.vocab_size, (NEW, 1, 1)):
            run(token, cache)
        decode.append(NEW / (time.perf_counter() - start))
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"prefill": sorted(prefill), "decode": sorted(decode), "peak_mib": peak}))
