# SPDX-License-Identifier: Apache-2.0
"""What formats of weights cost in quality, against those of llama.cpp at the same bits: `python bench/quantized_quality.py [--ggml LIBRARY]`.

Two models, computed in float32 with weights that were rounded to a format and back, all matrices alike, embedding and head too: the shipped checkpoint, in bits per
byte of its held-out text, and a Llama of random weights, in nats of the divergence between the next token's distributions. Rows of one table, by bits per weight,
scales included. LIBRARY is ggml's (`libggml-base.so` of llama-cpp-python), which quantises; the package `gguf` dequantises. Without it ours are measured alone.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import torch
from machine import describe, keep, table
from nnfront_models import llama

import nnfront as nn
from nnfront import ops
from nnfront.ir import TensorType
from nnfront.passes.quantizing.choose import stored_bytes
from nnfront.passes.quantizing.scheme import format_of

FOLDER = Path(__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m"
OURS = ("int8 int8:32 int8:128 fp8 int4 int4:64 int4:128 uint4 uint4:64 uint4:128 mxfp4 nvfp4 nl4").split()
THEIRS = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0")
RANDOM = llama.Config(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=512,
)
Round = Callable[[torch.Tensor], torch.Tensor]


def ours(name: str) -> tuple[Round, Callable[[torch.Size], float]]:
    """How a matrix of bfloat16 is rounded to a format and back, and the bits that its elements take."""
    format = format_of(name)
    assert format is not None
    attrs = {"group_size": format.group_size, "axis": 1, "format": format.name, "fit": format.fit}
    table = format.name if format.values else None

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        given = ops.quantize.canonical_attrs([TensorType(weight.shape, "bfloat16")], attrs)
        q, scales, *more = ops.quantize.run((weight,), ops.quantize.full_attrs(given))
        if format.has_factor:
            scales = scales.float() * more.pop()
        back = {"group_size": format.group_size, "axis": 1, "dtype": "float32", "format": table}
        found: torch.Tensor = ops.dequantize.run((q, scales, *(more or [None])), back)
        return found

    return rounded, lambda shape: 8 * stored_bytes(format, shape, "bfloat16") / prod(shape)


def theirs(name: str, library: ctypes.CDLL) -> tuple[Round, Callable[[torch.Size], float]]:
    """The same in llama.cpp."""
    import gguf
    import numpy as np

    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]

    def rounded(weight: torch.Tensor) -> torch.Tensor:
        rows, columns = weight.shape
        given = np.ascontiguousarray(weight.float().numpy())
        stored = np.zeros((rows, columns // block * size), dtype=np.uint8)
        sizes = (ctypes.c_int64(0), ctypes.c_int64(rows), ctypes.c_int64(columns))
        pointers = (ctypes.c_void_p(given.ctypes.data), ctypes.c_void_p(stored.ctypes.data))
        library.ggml_quantize_chunk(int(kind), *pointers, *sizes, None)
        return torch.from_numpy(gguf.quants.dequantize(stored, kind).reshape(rows, columns))

    return rounded, lambda shape: 8 * size / block


def random_weights() -> dict[str, torch.Tensor]:
    """Weights that keep the size of what they are multiplied with, and logits of a spread of two."""
    torch.manual_seed(0)
    found = {}
    for name, parameter in llama.build(RANDOM).named_parameters():
        shape = tuple(map(int, parameter.shape))
        spread = 1.0 if "embed" in name else 2 * shape[-1] ** -0.5 if "lm_head" in name else shape[-1] ** -0.5
        found[name] = torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * spread
    return {name: weight.bfloat16() for name, weight in found.items()}


def main() -> None:
    """Measure, print a table and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ggml", type=Path)
    args = parser.parse_args()
    ways = {name: ours(name) for name in OURS}
    if args.ggml:
        library = ctypes.CDLL(str(args.ggml))
        ways |= {f"llama.cpp {name}": theirs(name, library) for name in THEIRS}
    trained = nn.LLM.load(FOLDER, dtype="float32")
    text = (FOLDER / "heldout.txt").read_text(encoding="utf-8")
    ids = torch.tensor(trained.tokenizer.encode(text))[: 512 * 16].view(16, 512)
    size = len(trained.tokenizer.decode(ids[:, 1:].flatten().tolist()).encode())
    checkpoint = nn.Checkpoint(FOLDER)
    weights = {name: checkpoint.tensor(name) for name in checkpoint.infos}
    ir = nn.passes.lift_transform_params(
        llama.build(RANDOM).export(llama.export_spec(RANDOM)), shared_transform=True
    )
    executable, drawn = nn.compile(ir), random_weights()
    tokens = torch.randint(0, RANDOM.vocab_size, (4, 128), generator=torch.Generator().manual_seed(1))

    def of(given: dict[str, torch.Tensor], way: Round) -> dict[str, torch.Tensor]:
        return {n: (way(w) if w.ndim == 2 else w).float() for n, w in given.items()}

    def bits_per_byte(way: Round) -> float:
        trained.session.update(of(weights, way))
        logits = torch.cat([trained.logits(row[None]) for row in ids])[:, :-1].flatten(0, 1)
        nats = torch.nn.functional.cross_entropy(logits.double(), ids[:, 1:].flatten(), reduction="sum")
        return float(nats) / 0.6931471805599453 / size

    def log_probabilities(way: Round) -> torch.Tensor:
        return executable.load(of(drawn, way))["logits"](tokens).double().log_softmax(-1)

    plain, before = log_probabilities(lambda w: w), bits_per_byte(lambda w: w)
    rows: list[dict[str, Any]] = [
        {"format": "bfloat16", "bits": 16.0, "bits/byte": before, "more": 0.0, "divergence": 0.0}
    ]
    for name, (way, bits) in ways.items():
        found = log_probabilities(way)
        divergence = float((plain.exp() * (plain - found)).sum(-1).mean())
        after = bits_per_byte(way)
        size_of = sum(bits(w.shape) * w.numel() for w in drawn.values() if w.ndim == 2)
        rows.append(
            {
                "format": name,
                "bits": size_of / sum(w.numel() for w in drawn.values() if w.ndim == 2),
                "bits/byte": after,
                "more": after - before,
                "divergence": divergence,
            }
        )
        print(rows[-1], flush=True)
    rows.sort(key=lambda row: -row["bits"])
    print(keep("quantized_quality", describe("torch", "gguf"), rows))
    print(table(rows))


if __name__ == "__main__":
    main()
