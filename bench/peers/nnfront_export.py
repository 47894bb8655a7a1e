# SPDX-License-Identifier: Apache-2.0
"""Time export (verified) and lifting of a Llama with 70B dimensions, prefill and decode. Usage: nnfront_export.py LAYERS {shared,unshared}."""

import gc
import json
import sys
import time

from nnfront_models import llama

import nnfront as nn

layers, mode = int(sys.argv[1]), sys.argv[2]
config = llama.Config(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=layers,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    dtype="bfloat16",
)
start = time.perf_counter()
model = llama.build(config)
define = time.perf_counter() - start
spec = llama.export_spec(config)
del spec["logits"]
llama.build(llama.TINY).export(
    {"decode": llama.export_spec(llama.TINY)["decode"]}
)  # imports and caches, as in any process


def timed(function):
    """Return the result, the first and the least seconds of five calls, and the least seconds of processor time."""
    times, processor = [], []
    for _ in range(5):
        gc.collect()
        begin, cpu = time.perf_counter(), time.process_time()
        result = function()
        times.append(time.perf_counter() - begin)
        processor.append(time.process_time() - cpu)
    return result, times[0], min(times), min(processor)


module, first, export, export_cpu = timed(lambda: model.export(spec, share_layers=mode == "shared"))
_, _, lift, _ = timed(lambda: nn.passes.lift_transform_params(module, shared_transform=True))
bindings = sum(len(f.bindings) for f in module.functions)
print(
    json.dumps(
        {
            "define_s": define,
            "first_export_s": first,
            "export_s": export,
            "export_cpu_s": export_cpu,
            "lift_s": lift,
            "bindings": bindings,
        }
    )
)
