# SPDX-License-Identifier: Apache-2.0
"""Time TVM's export and LiftTransformParams of a Llama with 70B dimensions, prefill and decode. Usage: tvm_export.py LAYERS [export]: without lifting."""

import json
import sys
import time

from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache

LAYERS, is_lifted = int(sys.argv[1]), len(sys.argv) == 2
HIDDEN, INNER, HEADS, KV_HEADS, HEAD, VOCAB = 8192, 28672, 64, 8, 128, 128256
DTYPE = "float16"


class Fused(nn.Module):
    """Several [out, in] weights, concatenated and transposed where they are used."""

    def __init__(self, size, outs):
        self.count = len(outs)
        for i, out in enumerate(outs):
            setattr(self, f"w{i}", nn.Parameter((out, size), DTYPE))

    def forward(self, x):
        parts = [getattr(self, f"w{i}") for i in range(self.count)]
        return op.matmul(x, op.permute_dims(op.concat(parts, dim=0) if self.count > 1 else parts[0]))


class Attention(nn.Module):
    def __init__(self):
        self.qkv = Fused(HIDDEN, [HEADS * HEAD, KV_HEADS * HEAD, KV_HEADS * HEAD])
        self.o = Fused(HEADS * HEAD, [HIDDEN])

    def forward(self, x, cache, layer):
        b, n, _ = x.shape
        qkv = op.reshape(self.qkv(x), (b, n, HEADS + 2 * KV_HEADS, HEAD))
        return self.o(
            op.reshape(cache.attention_with_fused_qkv(layer, qkv, HEADS, HEAD**-0.5), (b, n, HEADS * HEAD))
        )


class Mlp(nn.Module):
    def __init__(self):
        self.gate_up = Fused(HIDDEN, [INNER, INNER])
        self.down = Fused(INNER, [HIDDEN])

    def forward(self, x):
        gate, up = op.split(self.gate_up(x), 2, axis=-1)
        return self.down(op.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self):
        self.attention, self.mlp = Attention(), Mlp()
        self.norm1 = nn.RMSNorm(HIDDEN, -1, 1e-5, bias=False)
        self.norm2 = nn.RMSNorm(HIDDEN, -1, 1e-5, bias=False)

    def forward(self, x, cache, layer):
        x = x + self.attention(self.norm1(x), cache, layer)
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.norm = nn.RMSNorm(HIDDEN, -1, 1e-5, bias=False)
        self.head = Fused(HIDDEN, [VOCAB])

    def prefill(self, ids: nn.Tensor, cache: nn.Object):
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x, cache, i)
        return self.head(self.norm(x)), cache

    def decode(self, ids: nn.Tensor, cache: nn.Object):
        return self.prefill(ids, cache)


def spec():
    modes = {"param_mode": "packed", "effect_mode": "none"}
    cache = nn.spec.Object(object_type=PagedKVCache)
    return {
        "prefill": {"ids": nn.spec.Tensor(["batch", "seq"], "int32"), "cache": cache, "$": dict(modes)},
        "decode": {"ids": nn.spec.Tensor(["batch", 1], "int32"), "cache": cache, "$": dict(modes)},
    }


model = Model()
model.to(DTYPE)
times, processor, lifts = [], [], []
for _ in range(3 if is_lifted else 5):
    start, cpu = time.perf_counter(), time.process_time()
    module, _ = model.export_tvm(spec())
    times.append(time.perf_counter() - start)
    processor.append(time.process_time() - cpu)
    start = time.perf_counter()
    if is_lifted:
        relax.transform.LiftTransformParams(shared_transform=True)(module)
    lifts.append(time.perf_counter() - start)
count = sum(
    sum(len(b.bindings) for b in f.body.blocks)
    for f in module.functions.values()
    if isinstance(f, relax.Function)
)
found = {"export_s": min(times), "export_cpu_s": min(processor), "lift_s": min(lifts), "bindings": count}
print(json.dumps(found))
