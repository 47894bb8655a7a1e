# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode of language models on a CPU against llama.cpp, in the same run.

    python bench/llama_cpp.py FOLDER --bin LLAMA_CPP/build/bin [--names llama-3.2-1b qwen2.5-0.5b] [--rounds 3]

`--bin` has llama-bench and llama-quantize of a build of llama.cpp for this machine. FOLDER holds the checkpoints that `bench/checkpoints.py` writes and
the same weights as GGUF (both are written if absent), of which Q4_K_M is read by both. Two threads, batch 1, a prompt of 512 tokens, 64 new ones behind it. Each measurement
runs in a process of its own; ours and theirs alternate, medians over all. Shares are of the speed at which memory is read in the same process, by what weights take
that a token reads.

`--prompt 8192` measures one long prompt instead: how fast it is read, once in each process, and the memory that ours takes for it besides weights and cache, beside that for 512 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

import gguf
import torch
from checkpoints import CONFIGS, write
from llm_cpu import median
from machine import describe, keep, measure, table
from safetensors import safe_open

PEERS = Path(__file__).parent / "peers"
PEER, PROMPT_PEER = PEERS / "nnfront_llm.py", PEERS / "nnfront_prompt.py"
# Ours and what llama.cpp has of as many bits, which rounds activations to 8 bits with both: so do those of ours that say so behind a dash.
FORMATS = {"bfloat16": "BF16", "int8": "Q8_0", "int8-int8": "Q8_0", "int4": "Q4_0", "int4-int8": "Q4_0"}
# Files of llama.cpp's that both read: weights of inputs that 256 divides are in blocks.
FILES = {"Q4_K_M": "Q4_K_M", "Q4_K_M-int8": "Q4_K_M"}
FORMATS |= FILES
BLOCK = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
BLOCK |= {
    f"self_attn.{ours}_proj": f"attn_{theirs}"
    for ours, theirs in zip("qkvo", ("q", "k", "v", "output"), strict=True)
}
BLOCK |= {f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}


def gguf_name(name: str) -> str:
    """The name of a tensor of a Llama checkpoint in GGUF."""
    layer, _, rest = name.removeprefix("model.layers.").removesuffix(".weight").partition(".")
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    return outer.get(name) or f"blk.{layer}.{BLOCK[rest]}.weight"


def write_gguf(name: str, folder: Path, binaries: Path, format: str) -> Path:
    """The checkpoint as GGUF, unless it is there. Heads are not permuted: the weights are random, and as many."""
    whole, path = folder / f"{name}-BF16.gguf", folder / f"{name}-{format}.gguf"
    if not whole.exists():
        config, writer = CONFIGS[name], gguf.GGUFWriter(whole, "llama")
        writer.add_block_count(config.num_hidden_layers)
        writer.add_context_length(8192)
        writer.add_embedding_length(config.hidden_size)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count(config.num_attention_heads)
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_rope_dimension_count(config.head_dim)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
        kinds = gguf.TokenType
        special = [("<unk>", kinds.UNKNOWN), ("<s>", kinds.CONTROL), ("</s>", kinds.CONTROL)]
        tokens = special + [(f"<0x{byte:02X}>", kinds.BYTE) for byte in range(256)]
        tokens += [(f"\u2581t{i}", kinds.NORMAL) for i in range(len(tokens), config.vocab_size)]
        writer.add_tokenizer_model("llama")
        writer.add_token_list([text for text, _ in tokens])
        writer.add_token_scores([-float(i) for i in range(len(tokens))])
        writer.add_token_types([kind for _, kind in tokens])
        with safe_open(folder / name / "model.safetensors", "pt") as file:
            for key in file.keys():
                weight = file.get_tensor(key)
                if weight.ndim == 1:
                    writer.add_tensor(gguf_name(key), weight.float().numpy())
                else:
                    bits = weight.view(torch.uint8).numpy()
                    writer.add_tensor(gguf_name(key), bits, raw_dtype=gguf.GGMLQuantizationType.BF16)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    if not path.exists():
        subprocess.run(
            [binaries / "llama-quantize", whole, path, format, "2"], check=True, capture_output=True
        )
    return path


def asked(ours: str, folder: Path, file: Path) -> tuple[object, ...]:
    """What our side is to read: a checkpoint and the format that its weights are to have, or their file and what becomes of activations."""
    if ours in FILES:
        _, _, activations = ours.partition("-")
        return (file, f"keep-{activations}") if activations else (file,)
    return (folder,) if ours == "bfloat16" else (folder, ours)


def bench(binaries: Path, path: Path, *args: object) -> dict[str, float]:
    """The median of the tokens a second of llama-bench, with flash attention or without it as is faster, and the most memory of its process in MiB."""
    command = [binaries / "llama-bench", "-m", path, "-t", "2", "-fa", "0,1", "-o", "json", *map(str, args)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))} ended with {process.returncode}")
    speeds = [statistics.median(run["samples_ts"]) for run in json.loads(said)]
    assert len(speeds) == 2
    return {"speed": max(speeds), "peak_mib": used.ru_maxrss / 1024}


def theirs(binaries: Path, path: Path) -> dict[str, float]:
    """Tokens a second of a prompt of 512 and of 64 new ones behind it."""
    prefill = bench(binaries, path, "-p", 512, "-n", 0, "-r", 4)
    decode = bench(binaries, path, "-p", 0, "-n", 64, "-d", 512, "-r", 4)
    return {"prefill": prefill["speed"], "decode": decode["speed"]}


def long_prompt(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each model and format: one prompt of so many tokens."""
    rows: list[dict[str, Any]] = []
    for name in args.names:
        path = write(name, args.folder)
        for quant in args.weights:
            file = write_gguf(name, args.folder, args.bin, FORMATS[quant])
            mine, other = [], []
            for _ in range(args.rounds):
                source, *stored = asked(quant, path, file)
                mine.append(measure(PROMPT_PEER, source, args.prompt, *stored))
                once = ("-p", args.prompt, "-n", 0, "-r", 1, "--no-warmup")
                other.append(bench(args.bin, file, *once))
            speeds = median(mine, "prefill"), median(other, "speed")
            row = {"model": name, "weights": quant, "llama.cpp": FORMATS[quant], "prompt": args.prompt}
            row |= {"prefill tok/s": speeds[0], "llama.cpp prefill tok/s": speeds[1]}
            row |= {
                "prefill ratio": speeds[0] / speeds[1],
                "MiB besides weights and cache": median(mine, "above_mib"),
                "the same of 512 tokens": median(mine, "above_512_mib"),
                "peak MiB": median(mine, "peak_mib"),
                "llama.cpp peak MiB": median(other, "peak_mib"),
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def short_prompts(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each model and format: a prompt of 512 tokens and what comes behind it."""
    rows: list[dict[str, Any]] = []
    for name in args.names:
        path = write(name, args.folder)
        files = {ours: write_gguf(name, args.folder, args.bin, FORMATS[ours]) for ours in args.weights}
        runs: dict[str, list[tuple[dict[str, Any], dict[str, float]]]] = {ours: [] for ours in files}
        for _ in range(args.rounds):
            for ours, file in files.items():
                source, *stored = asked(ours, path, file)
                runs[ours].append((measure(PEER, source, "speed", *stored), theirs(args.bin, file)))
        for ours, pairs in runs.items():
            mine, other = [m for m, _ in pairs], [o for _, o in pairs]
            row: dict[str, Any] = {"model": name, "weights": ours, "llama.cpp": FORMATS[ours]}
            for what in ("prefill", "decode"):
                speeds = median(mine, what), median(other, what)
                row |= {f"{what} tok/s": speeds[0], f"llama.cpp {what} tok/s": speeds[1]}
                row[f"{what} ratio"] = speeds[0] / speeds[1]
            memory = median(mine, "read_gb_s")
            theirs_gb_s = median(other, "decode") * files[ours].stat().st_size / 1e9
            row |= {
                "memory GB/s": memory,
                "share of it": median(mine, "decode_share"),
                "llama.cpp share": theirs_gb_s / memory,
            }
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def main() -> None:
    """Measure, print a table and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bin", type=Path, required=True)
    parser.add_argument("--names", nargs="+", default=list(CONFIGS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, help="measure one prompt of so many tokens, and nothing else")
    parser.add_argument(
        "--weights", nargs="+", choices=FORMATS, default=list(FORMATS), help="formats to measure"
    )
    args = parser.parse_args()
    if args.prompt is not None:
        rows = long_prompt(args)
        print(keep(f"llama_cpp_prompt_{args.prompt}", describe("torch", "gguf"), rows))
    else:
        rows = short_prompts(args)
        print(keep("llama_cpp", describe("torch", "gguf"), rows))
    print(table(rows))


if __name__ == "__main__":
    main()
