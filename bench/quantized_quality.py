# SPDX-License-Identifier: Apache-2.0
"""What formats of weights cost in quality, against those of llama.cpp at the same bits: `python bench/quantized_quality.py [--ggml LIBRARY] [--only FORMAT ...]`.

Two models, computed in float32 with weights that were rounded to a format and back, all matrices alike, embedding and head too: the shipped checkpoint, in bits per
byte of its held-out text and in nats of the divergence between the next token's distributions, and a Llama of random weights, in nats of divergence. Rows of one table, by bits per weight,
scales included. Ours are measured calibrated as well, on two modules of the standard library that the text is not of. LIBRARY is ggml's (`libggml-base.so` of llama-cpp-python), which quantises; the package `gguf` dequantises. Without it ours are measured alone.

`--windows 128` measures bits per byte and divergence of the checkpoint instead on so many windows of 512 tokens, evenly from all files of this Python's library that it was not trained on, with the standard
error of what a format adds: 16 windows, as the text has, do not tell formats of as many bits apart.
"""

from __future__ import annotations

import argparse
import ctypes
import inspect
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from math import log, prod
from pathlib import Path
from typing import Any

import torch
from machine import RESULTS, describe, keep, table
from nnfront_models import llama

import nnfront as nn
from nnfront.passes import QuantScheme
from nnfront.passes.quantizing.budget import measure, within
from nnfront.passes.quantizing.budget import rounded as rounded_to
from nnfront.passes.quantizing.choose import stored_bytes
from nnfront.passes.quantizing.scheme import format_of
from nnfront.quant_format import FORMATS, QuantFormat

FOLDER = Path(__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m"
CORPUS = FOLDER.parent / "pylib"
OURS = (
    "int8 int8:32 int8:128 fp8 fp8:tensor fp8:block int4 int4:64 int4:128 uint4 uint4:64 uint4:128 mxfp4 nvfp4 nl4 q4_k q5_k q6_k auto:4.5 auto:5.5 auto:6.5625"
).split()
LLAMA_CPP = "llama.cpp "
THEIRS = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q4_0")
RANDOM = llama.Config(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1536,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=512,
)
Matrices = dict[str, torch.Tensor]


def ours(name: str) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Size], float]]:
    """How a matrix of bfloat16 is rounded to a format and back, and the bits that it takes."""
    format = format_of(name)
    assert format is not None
    rounded = in_blocks if format.shared_outputs != 1 else rounded_to
    return partial(rounded, format=format), lambda shape: 8 * stored_bytes(format, shape, "bfloat16")


def in_blocks(weight: torch.Tensor, format: QuantFormat) -> torch.Tensor:
    """A matrix after each of its blocks was stored with one scale and read back, in float32."""
    rows, columns = format.shared_outputs or len(weight), format.group_size or weight.shape[1]
    missing = -len(weight) % rows
    whole = torch.nn.functional.pad(weight, (0, 0, 0, missing))
    blocks = whole.view(len(whole) // rows, rows, -1, columns).transpose(1, 2)
    left = rounded_to(blocks.reshape(-1, rows * columns), FORMATS[format.name])
    return left.view(blocks.shape).transpose(1, 2).reshape(whole.shape)[: len(weight)]


def theirs(
    name: str, library: ctypes.CDLL
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Callable[[torch.Size], float]]:
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

    return rounded, lambda shape: 8 * size * prod(shape) / block


def mixed(scheme: str, matrices: Matrices) -> dict[str, str]:
    """The format of each matrix within a budget."""
    measured = {name: measure(weight) for name, weight in matrices.items()}
    elements = sum(weight.numel() for weight in matrices.values())
    heads = matrices.keys() & {"lm_head.weight"} or {"model.embed_tokens.weight"}
    return dict(within(QuantScheme(scheme), measured, elements, heads).rules)


def rounded(way: str, matrices: Matrices, library: ctypes.CDLL | None) -> tuple[Matrices, float]:
    """Matrices rounded in a way, and the bits that an element takes."""
    names = mixed(way, matrices) if way.startswith("auto") else dict.fromkeys(matrices, way)
    found, bits = {}, 0.0
    for name, weight in matrices.items():
        kind = names[name]
        assert library is not None or not kind.startswith(LLAMA_CPP)
        round_to, bits_of = (
            theirs(kind.removeprefix(LLAMA_CPP), library)
            if library and kind.startswith(LLAMA_CPP)
            else ours(kind)
        )
        found[name] = round_to(weight)
        bits += bits_of(weight.shape)
    return found, bits / sum(weight.numel() for weight in matrices.values())


def random_weights() -> dict[str, torch.Tensor]:
    """Weights that keep the size of what they are multiplied with, and logits of a spread of two."""
    torch.manual_seed(0)
    found = {}
    for name, parameter in llama.build(RANDOM).named_parameters():
        shape = tuple(map(int, parameter.shape))
        spread = 1.0 if "embed" in name else 2 * shape[-1] ** -0.5 if "lm_head" in name else shape[-1] ** -0.5
        found[name] = torch.ones(shape) if len(shape) == 1 else torch.randn(shape) * spread
    return {name: weight.bfloat16() for name, weight in found.items()}


def on_windows(ways: Sequence[str], library: ctypes.CDLL | None, count: int) -> list[dict[str, Any]]:
    """A row for each format: bits per byte of the checkpoint on windows of the library, what it adds to them with its standard error, and the divergence."""
    sys.path.append(str(CORPUS))
    from corpus import read_library

    model, checkpoint = nn.LLM.load(FOLDER, dtype="float32"), nn.Checkpoint(FOLDER)
    weights = {name: checkpoint.tensor(name) for name in checkpoint.infos}
    ids = [i for text in read_library()[1].values() for i in (0, *model.tokenizer.encode(text))]
    windows = torch.tensor(ids[: len(ids) // 512 * 512]).view(-1, 512)
    windows = windows[torch.linspace(0, len(windows) - 1, count).long()]
    size = sum(len(model.tokenizer.decode(row[1:].tolist()).encode()) for row in windows)

    def logits(row: torch.Tensor) -> torch.Tensor:
        return model.logits(row[None])[0].log_softmax(-1)

    def bits(found: torch.Tensor, row: torch.Tensor) -> float:
        return -float(found[:-1].gather(-1, row[1:, None]).double().sum()) / log(2)

    plain = [logits(row) for row in windows]
    before = torch.tensor([bits(found, row) for found, row in zip(plain, windows, strict=True)])
    rows: list[dict[str, Any]] = [
        {"format": "bfloat16", "bits": 16.0, "bits/byte": float(before.sum()) / size}
    ]
    for way in ways:
        matrices, stored = rounded(way, {n: w for n, w in weights.items() if w.ndim == 2}, library)
        model.session.update({name: w.float() for name, w in {**weights, **matrices}.items()})
        after, lost = [], 0.0
        for of, row in zip(plain, windows, strict=True):
            found = logits(row)
            after.append(bits(found, row))
            lost += float((of.exp() * (of - found)).sum(-1).double().mean()) / count
        added = torch.tensor(after) - before
        row_of = {"format": way, "bits": stored, "bits/byte": sum(after) / size}
        row_of |= {
            "added": float(added.sum()) / size,
            "standard error": float(added.std()) * count**0.5 / size,
        }
        rows.append({**row_of, "divergence": lost})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure, print a table and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ggml", type=Path)
    parser.add_argument(
        "--only", nargs="+", help="formats to measure; of others the rows that were kept stay"
    )
    parser.add_argument("--windows", type=int, help="measure on so many windows of the library instead")
    args = parser.parse_args()
    library = ctypes.CDLL(str(args.ggml)) if args.ggml else None
    ways = [*OURS, *(f"{LLAMA_CPP}{name}" for name in THEIRS if library)]
    ways = args.only or ways
    if args.windows is not None:
        rows = sorted(on_windows(ways, library, args.windows), key=lambda row: -row["bits"])
        print(keep("quantized_quality_windows", describe("torch", "gguf"), rows))
        print(table(rows))
        return
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

    def on_the_checkpoint(matrices: Matrices) -> tuple[torch.Tensor, float]:
        trained.session.update({name: w.float() for name, w in {**weights, **matrices}.items()})
        found = torch.cat([trained.logits(row[None]) for row in ids]).double().log_softmax(-1)
        nats = -found[:, :-1].gather(-1, ids[:, 1:, None]).sum()
        return found, float(nats) / log(2) / size

    folder = tempfile.TemporaryDirectory()
    moments = Path(folder.name) / "moments.safetensors"
    read = "".join(Path(inspect.getfile(module)).read_text() for module in (argparse, inspect))
    nn.calibrate(FOLDER, read, moments, dtype="float32")

    def calibrated(way: str) -> torch.Tensor:
        scheme = QuantScheme(way, head=None if way.startswith("auto") else way, calibration=moments)
        model = nn.LLM.load(FOLDER, dtype="float32", quant=scheme)
        return torch.cat([model.logits(row[None]) for row in ids]).double().log_softmax(-1)

    def on_random_weights(matrices: Matrices) -> torch.Tensor:
        session = executable.load({name: w.float() for name, w in {**drawn, **matrices}.items()})
        return session["logits"](tokens).double().log_softmax(-1)

    def divergence(of: torch.Tensor, found: torch.Tensor) -> float:
        return float((of.exp() * (of - found)).sum(-1).mean())

    def matrices_of(given: Matrices) -> Matrices:
        return {name: weight for name, weight in given.items() if weight.ndim == 2}

    plain, before = on_random_weights({}), on_the_checkpoint({})
    rows = [{"format": "bfloat16", "bits": 16.0, "bits/byte": before[1]}]
    for way in ways:
        after = on_the_checkpoint(rounded(way, matrices_of(weights), library)[0])
        matrices, bits = rounded(way, matrices_of(drawn), library)
        rows.append(
            {
                "format": way,
                "bits": bits,
                "bits/byte": after[1],
                "divergence": divergence(before[0], after[0]),
                "calibrated": "" if way.startswith(LLAMA_CPP) else divergence(before[0], calibrated(way)),
                "of random weights": divergence(plain, on_random_weights(matrices)),
            }
        )
        print(rows[-1], flush=True)
    kept = RESULTS / "quantized_quality.json"
    if args.only and kept.exists():
        measured = {row["format"] for row in rows}
        rows += [row for row in json.loads(kept.read_text())["rows"] if row["format"] not in measured]
    rows.sort(key=lambda row: -row["bits"])
    print(keep("quantized_quality", describe("torch", "gguf"), rows))
    print(table(rows))


if __name__ == "__main__":
    main()
