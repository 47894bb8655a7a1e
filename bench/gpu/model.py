# SPDX-License-Identifier: Apache-2.0
"""A model in Llama-3-8B's shape with random weights: right first, then prefill, decode and first token against the memory's limit.

One layer of it is compared with the same module on the CPU. The whole model is timed in bf16 and in int4, with weights that are
made on the device, and in the same run transformers' model with a static cache and torch.compile, if transformers is here.

A decode step must read every weight except the embeddings, and the keys and values of every token. Its share of the limit is
the time that takes at the bandwidth of a copy, over the step's. Its gap is the step's time less that of its kernels, by the
profiler: what the GPU waits for launches.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from nnfront_models import llama
from speed import Clock, ceilings

import nnfront as nn
from nnfront.compiler import Executable, TransformedWeights

HERE = Path(__file__).resolve().parent
LLAMA_3_8B = llama.Config(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131072,
    rms_norm_eps=1e-5,
    rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
    dtype="bfloat16",
)
# The interpreter's bfloat16 is wrong, and it takes a second for some dozens of blocks.
SMALL = dataclasses.replace(
    llama.TINY, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, dtype="float16"
)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What is timed: lengths of prompts, (batch, tokens before, ...) of decode steps, and how often."""

    config: llama.Config
    prompts: tuple[int, ...]
    decodes: tuple[tuple[int, int, str | None], ...]  # and what keys and values are stored as
    steps: int


NARROW = "float8_e4m3fn"
FULL = Sizes(
    LLAMA_3_8B,
    (512, 4096, 32768),
    (*((b, n, None) for n in (512, 8192) for b in (1, 8, 64)), (64, 8192, NARROW)),
    32,
)
DRY = Sizes(SMALL, (5,), ((1, 3, None), (2, 3, NARROW)), 2)


def compiled(config: llama.Config, quant: str | None, target: str) -> Executable:
    """The model's program for a target, without weights."""
    ir = llama.build(config).export(llama.export_spec(config))
    if quant is not None:
        ir = nn.passes.quantize_weights(ir, quant)
    return nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True), target=target)


def raw_weights(config: llama.Config) -> dict[str, torch.Tensor]:
    """Random weights under the checkpoint's names, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    made = {}
    for name, parameter in llama.build(config).named_parameters():
        shape = [int(size) for size in parameter.shape]
        values = (
            torch.ones(shape)
            if "norm" in name
            else torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        )
        made[name] = values.to(getattr(torch, config.dtype))
    return made


def on_device(executable: Executable, device: torch.device) -> nn.Session:
    """A session over random weights in the form that its methods read, made on the device."""
    made: dict[str, dict[str, torch.Tensor]] = {"weight": {}, "transformed": {}}
    wanted = {w.name: w for method in executable.program.methods.values() for w in method.weights}
    for name, weight in wanted.items():
        shape, dtype = [int(size) for size in weight.type.shape], getattr(torch, weight.type.dtype)
        if not dtype.is_floating_point:
            values = torch.randint(0, 127, shape, dtype=dtype, device=device)
        elif "norm" in name:
            values = torch.ones(shape, dtype=dtype, device=device)
        elif ".scales" in name:
            values = torch.full(shape, 1e-3, dtype=dtype, device=device)
        else:
            values = torch.randn(shape, dtype=dtype, device=device) / shape[-1] ** 0.5
        made[weight.role][name] = values
    return executable.bind(TransformedWeights(made["transformed"]), made["weight"])


def right(sizes: Sizes, quant: str | None, target: str) -> str | None:
    """None, or what is wrong with one layer of the model against the same module on the CPU."""
    config = dataclasses.replace(sizes.config, num_hidden_layers=1, vocab_size=1024)
    weights = raw_weights(config)
    ids = torch.randint(0, config.vocab_size, (2, min(sizes.prompts[0], 128)))
    sessions = [compiled(config, quant, name).load(weights) for name in (target, "cpu")]
    caches = [s.make_cache(batch=2, max_seq=ids.shape[1] + 2) for s in sessions]
    for step, tokens in enumerate((ids, ids[:, :1], ids[:, 1:2])):
        method = "decode" if step else "prefill"
        found, expected = (
            s[method](tokens.to(s.device), cache).cpu().double()
            for s, cache in zip(sessions, caches, strict=True)
        )
        off = float((found - expected).abs().max() / expected.abs().max())
        # Both round to the dtype some tens of times on the way, in different places.
        if not off < (0.05 if config.dtype == "bfloat16" else 0.01):
            return f"{method} {step}: the largest difference is {off:.3g} of the largest logit"
    return None


class Steps:
    """Times of calls in a row, in seconds each: by the clock, and of the device's kernels."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def wall(self, call: Callable[[], Any], count: int) -> float:
        self.wait()
        start = time.perf_counter()
        for _ in range(count):
            call()
        self.wait()
        return (time.perf_counter() - start) / count

    def kernels(self, call: Callable[[], Any], count: int) -> float | None:
        """None without a GPU."""
        if self.device.type != "cuda":
            return None
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            self.wall(call, count)
        total = sum(e.self_device_time_total for e in profile.key_averages()) / 1e6 / count
        return total or None  # no kernels: the profiler may not look at this GPU


def decode_bytes(weights: int, config: llama.Config, tokens: int, stored_as: str | None) -> int:
    """What a decode step must read: weights without the table of embeddings, and keys and values of so many tokens."""
    embeddings = 2 * config.vocab_size * config.hidden_size
    head = config.head_size + 4 if stored_as else 2 * config.head_size
    return weights - embeddings + tokens * 2 * config.num_hidden_layers * config.kv_heads * head


def prefill_flops(config: llama.Config, length: int) -> int:
    """Two for each weight of a layer and token, and two products for each pair of a token and one that it sees."""
    d, q, kv = (
        config.hidden_size,
        config.num_attention_heads * config.head_size,
        config.kv_heads * config.head_size,
    )
    layer = d * (2 * q + 2 * kv) + 3 * d * config.intermediate_size
    return config.num_hidden_layers * (2 * layer * length + 2 * q * length * (length + 1))


def ours(
    session: nn.Session, sizes: Sizes, label: str, copy_gb_s: float, deadline: float, results: dict[str, Any]
) -> None:
    """Rows of prefill and decode for one session; what there is no time for is listed."""
    config, steps = sizes.config, Steps(session.device)
    for length in sizes.prompts:
        if time.monotonic() > deadline:
            results["skipped"].append(f"model {label} prefill {length}")
            continue
        ids = torch.randint(0, config.vocab_size, (1, length), device=session.device)

        def prefill(ids: torch.Tensor = ids, length: int = length) -> Any:
            return session["prefill"](ids, session.make_cache(batch=1, max_seq=length))

        prefill()
        wall, device = steps.wall(prefill, 3), steps.kernels(prefill, 1)
        row = {"who": label, "what": f"prefill {length}", "ms": wall * 1e3, "tokens_s": length / wall}
        row |= {"tflop_s": prefill_flops(config, length) / wall / 1e12, "gap_ms": gap(wall, device)}
        results["model"].append(row)
    weights = sum(w.nbytes for w in session.weights.values())
    for batch, length, stored_as in sizes.decodes:
        what = f"decode {batch} x {length}" + " in 8 bits" * bool(stored_as)
        if time.monotonic() > deadline:
            results["skipped"].append(f"model {label} {what}")
            continue
        cache = session.make_cache(batch=batch, max_seq=length + 4 * sizes.steps, stored_as=stored_as)
        ids = torch.randint(0, config.vocab_size, (1, length), device=session.device)
        for row_index in range(batch):
            session["prefill"](ids, cache.rows(row_index, row_index + 1))
        state = {"token": ids[:, :1].expand(batch, 1).contiguous()}

        def decode(cache: Any = cache, state: dict[str, torch.Tensor] = state) -> None:
            state["token"] = session["decode"](state["token"], cache)[:, -1:].argmax(-1)

        steps.wall(decode, sizes.steps)  # compiles, then records
        wall, device = steps.wall(decode, sizes.steps), steps.kernels(decode, sizes.steps)
        needed = decode_bytes(weights, config, batch * (length + 2 * sizes.steps), stored_as)
        results["model"].append(decode_row(label, what, batch, wall, device, needed, copy_gb_s))
        del cache, decode
        gc.collect()


def decode_row(
    who: str, what: str, batch: int, wall: float, device: float | None, needed: int, copy_gb_s: float
) -> dict[str, Any]:
    return {
        "who": who,
        "what": what,
        "ms": wall * 1e3,
        "tokens_s": batch / wall,
        "share": needed / 1e9 / copy_gb_s / wall,
        "gap_ms": gap(wall, device),
    }


def gap(wall: float, device: float | None) -> float | None:
    return None if device is None else (wall - device) * 1e3


def first_token(session: nn.Session, results: dict[str, Any], label: str) -> None:
    """Save the session, and time a process that loads it and computes one token."""
    with tempfile.TemporaryDirectory() as folder:
        artefact = Path(folder, "artefact")
        session.save(artefact)
        command = [sys.executable, str(HERE / "first_token.py"), str(artefact)]
        environment = {**os.environ, "BENCH_START": str(time.time())}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode:
            results["wrong"].append({"case": f"model {label} first token", "why": done.stderr[-1500:]})
        else:
            results["model"].append(
                {"who": label, "what": "first token", **json.loads(done.stdout.splitlines()[-1])}
            )


def run(dry: bool, deadline: float, results: dict[str, Any], keep: Callable[[], None]) -> None:
    """All of it into results["model"], ["wrong"] and ["skipped"]; correctness first, comparisons last. `keep` writes them."""
    device, sizes = torch.device("cpu" if dry else "cuda"), DRY if dry else FULL
    results.setdefault("ceilings", ceilings(Clock(device.type)))
    copy = results["ceilings"]["copy_gb_s"]

    def attempt(case: str, part: Callable[[], str | None], kind: str = "wrong") -> None:
        """One part: what goes wrong in it must not hide the others' numbers."""
        if time.monotonic() > deadline:
            results["skipped"].append(case)
            return
        try:
            why = part()
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
        if why:
            results[kind].append({"case": case, "why": why} if kind == "wrong" else f"{case}: {why}")
        keep()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()

    def measured(quant: str | None, label: str) -> None:
        session = on_device(compiled(sizes.config, quant, "cuda"), device)
        ours(session, sizes, label, copy, deadline, results)
        if quant or dry:  # the other form is 16 GB, which says how fast the disk is
            first_token(session, results, label)

    labels = {None: sizes.config.dtype, "int4": "int4"}
    with torch.inference_mode():
        for quant, label in labels.items():
            attempt(f"model {label}", partial(right, sizes, quant, "cuda"))
        for quant, label in labels.items():
            attempt(f"model {label} speed", partial(measured, quant, f"nnfront {label}"))
        # What is compiled anew for each shape takes a minute or two, so it starts that much earlier.
        before = deadline if dry else deadline - 120
        attempt("model transformers", partial(theirs, sizes, device, copy, before, results), "skipped")


def theirs(
    sizes: Sizes,
    device: torch.device,
    copy_gb_s: float,
    deadline: float,
    results: dict[str, Any],
) -> None:
    """The same rows for transformers, if it is here."""
    try:
        from peer import Peer
    except ImportError as error:
        results["skipped"].append(f"model transformers: {error}")
        return
    config, steps = sizes.config, Steps(device)
    peer = Peer(dataclasses.asdict(config), device)
    for length in sizes.prompts:
        if time.monotonic() > deadline:
            results["skipped"].append(f"model transformers prefill {length}")
            continue
        prefill = peer.prefill(length)
        prefill()
        wall = steps.wall(prefill, 3)
        row = {"who": peer.label, "what": f"prefill {length}", "ms": wall * 1e3, "tokens_s": length / wall}
        results["model"].append(row | {"tflop_s": prefill_flops(config, length) / wall / 1e12})
    weights = sum(p.nbytes for p in peer.model.parameters())
    for batch, length in dict.fromkeys((batch, length) for batch, length, _ in sizes.decodes):
        what = f"decode {batch} x {length}"
        if time.monotonic() > deadline:
            results["skipped"].append(f"model transformers {what}")
            continue
        decode = peer.decode(batch, length, 5 * sizes.steps)
        steps.wall(decode, sizes.steps)
        wall, on = steps.wall(decode, sizes.steps), steps.kernels(decode, sizes.steps)
        needed = decode_bytes(weights, config, batch * (length + 2 * sizes.steps), None)
        results["model"].append(decode_row(peer.label, what, batch, wall, on, needed, copy_gb_s))
        del decode
        gc.collect()
