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
import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from nnfront_models import llama
from speed import Clock, ceilings

import nnfront as nn
from nnfront.backends.cuda.ahead.cubin import CompiledKernels
from nnfront.backends.cuda.ahead.enumerate_kernels import enumerate_plans
from nnfront.compiler import Executable
from nnfront.state.cache import Cache

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
FIRST_TOKEN = {"batch": [1], "seq": [16], "max_seq": [32]}  # of first_token.py


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


def on_device(
    executable: Executable, device: torch.device, kernels: CompiledKernels | None = None
) -> nn.Session:
    """A session over random weights in the form that its methods read, made on the device; `kernels` are compiled already."""
    made: dict[str, dict[str, torch.Tensor]] = {"weight": {}, "transformed": {}}
    methods = executable.program.methods.values()
    wanted = {w.name: w for method in methods for w in method.weights}
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
    results = {method.transform: made["transformed"] for method in methods if method.transform}
    return nn.Session(executable.program, made["weight"], results, ir=executable.source, kernels=kernels)


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


def prefilled(session: nn.Session, sizes: Sizes, label: str, length: int) -> dict[str, Any]:
    """A row for one prompt."""
    steps = Steps(session.device)
    ids = torch.randint(0, sizes.config.vocab_size, (1, length), device=session.device)
    cache = session.make_cache(batch=1, max_seq=length)

    def prefill() -> Any:
        cache.reset()
        return session["prefill"](ids, cache)

    prefill()
    wall, device = steps.wall(prefill, 3), steps.kernels(prefill, 1)
    row = {"who": label, "what": f"prefill {length}", "ms": wall * 1e3, "tokens_s": length / wall}
    row |= {"tflop_s": prefill_flops(sizes.config, length) / wall / 1e12, "gap_ms": gap(wall, device)}
    return {"model": [row]}


def filled(session: nn.Session, batch: int, length: int, room: int, stored_as: str | None) -> Cache:
    """A cache of so many random tokens: what a step takes does not depend on whose they are."""
    cache = session.make_cache(batch=batch, max_seq=length + room, stored_as=stored_as)
    for layer in cache:
        layer.advance(length)
        for part in layer.placed.all:
            part.random_(0, 120) if part.dtype == torch.uint8 else part.normal_()
    return cache


def decoded(
    session: nn.Session,
    sizes: Sizes,
    label: str,
    batch: int,
    length: int,
    stored_as: str | None,
    copy_gb_s: float,
) -> dict[str, Any]:
    """A row for steps of a batch behind so many tokens."""
    config, steps = sizes.config, Steps(session.device)
    what = f"decode {batch} x {length}" + " in 8 bits" * bool(stored_as)
    cache = filled(session, batch, length, 4 * sizes.steps, stored_as)
    state = {"token": torch.randint(0, config.vocab_size, (batch, 1), device=session.device)}

    def decode() -> None:
        state["token"] = session["decode"](state["token"], cache)[:, -1:].argmax(-1)

    steps.wall(decode, sizes.steps)  # compiles, then captures
    wall, device = steps.wall(decode, sizes.steps), steps.kernels(decode, sizes.steps)
    weights = sum(w.nbytes for w in session.weights.values())
    needed = decode_bytes(weights, config, batch * (length + 2 * sizes.steps), stored_as)
    return {"model": [decode_row(label, what, batch, wall, device, needed, copy_gb_s)]}


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


def first_token(
    sizes: Sizes, quant: str, label: str, device: torch.device, brought: CompiledKernels | None
) -> dict[str, Any] | str:
    """Save a session, with the kernels that were brought along, and time a process that loads it and computes one token."""
    executable, kernels = compiled(sizes.config, quant, "cuda"), None
    if brought is not None:
        executable = compiled(sizes.config, quant, f"cuda:{brought.arch}")
        keys = plans(sizes.config, quant, FIRST_TOKEN, brought.arch)
        kernels = CompiledKernels(brought.arch, tuple(c for c in brought.cubins if c.key in keys))
    with tempfile.TemporaryDirectory() as folder:
        artefact = Path(folder, "artefact")
        on_device(executable, device, kernels).save(artefact)
        command = [sys.executable, str(HERE / "first_token.py"), str(artefact)]
        environment = {**os.environ, "BENCH_START": str(time.time())}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return done.stderr[-1500:]
    row = json.loads(done.stdout.splitlines()[-1])
    here = row.pop("compiled_here")
    return {"model": [{"who": label, "what": "first token", **row}], "compiled_here": here}


class Held:
    """What cases share, made when the first of them asks; one session at a time, as two do not fit beside their caches."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self._quant: str | None = ""
        self._session: nn.Session | None = None
        self.ceilings = functools.cache(lambda: ceilings(Clock(device.type)))

    def session(self, quant: str | None) -> nn.Session:
        if self._session is None or self._quant != quant:
            self._session = None
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._quant, self._session = (
                quant,
                on_device(compiled(self.sizes.config, quant, "cuda"), self.device),
            )
        return self._session

    @property
    def copy(self) -> float:
        return self.ceilings()["copy_gb_s"]


def cases(options: Any) -> Iterator[Any]:
    """Correctness first, then both forms of the model, comparisons last."""
    from part import Case

    sizes = DRY if options.dry else FULL
    held = Held(sizes, torch.device(options.device))
    labels = {None: sizes.config.dtype, "int4": "int4"}
    yield Case("model ceilings", lambda: {"ceilings": held.ceilings()})
    for quant, label in labels.items():
        yield Case(f"model {label}", partial(right, sizes, quant, "cuda"))
    for quant, label in [*labels.items()][options.dry :]:  # one form runs every line
        who = f"nnfront {label}"
        for batch, length, stored_as in sizes.decodes:
            yield Case(
                f"model {label} decode {batch} x {length} {stored_as or ''}",
                lambda quant=quant, who=who, given=(batch, length, stored_as): decoded(
                    held.session(quant), sizes, who, *given, held.copy
                ),
            )
        for length in sizes.prompts:
            yield Case(
                f"model {label} prefill {length}",
                lambda quant=quant, who=who, length=length: prefilled(
                    held.session(quant), sizes, who, length
                ),
            )
        if quant:  # the other form is 16 GB, which says how fast the disk is
            yield Case(
                f"model {label} first token",
                lambda quant=quant, who=who: first_token(sizes, quant, who, held.device, options.brought),
            )
    yield from theirs(sizes, held)


def theirs(sizes: Sizes, held: Held) -> Iterator[Any]:
    """One length of prompt and of steps for transformers, if it is here: each is compiled anew, for a minute."""
    from part import Case

    @functools.cache
    def peer() -> Any:
        from peer import Peer

        held._session = None
        return Peer(dataclasses.asdict(sizes.config), held.device)

    def prefill(length: int) -> dict[str, Any]:
        call, steps = peer().prefill(length), Steps(held.device)
        call()
        wall = steps.wall(call, 3)
        row = {"who": peer().label, "what": f"prefill {length}", "ms": wall * 1e3, "tokens_s": length / wall}
        return {"model": [row | {"tflop_s": prefill_flops(sizes.config, length) / wall / 1e12}]}

    def decode(batch: int, length: int) -> dict[str, Any]:
        call, steps = peer().decode(batch, length, 5 * sizes.steps), Steps(held.device)
        steps.wall(call, sizes.steps)
        wall, on = steps.wall(call, sizes.steps), steps.kernels(call, sizes.steps)
        weights = sum(p.nbytes for p in peer().model.parameters())
        needed = decode_bytes(weights, sizes.config, batch * (length + 2 * sizes.steps), None)
        row = decode_row(peer().label, f"decode {batch} x {length}", batch, wall, on, needed, held.copy)
        return {"model": [row]}

    def if_there(look: Callable[..., dict[str, Any]], *given: int) -> dict[str, Any]:
        try:
            return look(*given)
        except ImportError as error:
            return {"skipped": [f"model transformers: {error}"]}

    batch, length, _ = sizes.decodes[0]
    yield Case("model transformers decode", partial(if_there, decode, batch, length))
    yield Case("model transformers prefill", partial(if_there, prefill, sizes.prompts[0]))


def programs(dry: bool) -> Iterator[tuple[llama.Config, str | None, dict[str, list[int]]]]:
    """What is called, and with which sizes, as `plans` takes them."""
    sizes = DRY if dry else FULL
    # What is compared with the CPU has one layer and a prompt of its own.
    alone = dataclasses.replace(sizes.config, num_hidden_layers=1, vocab_size=1024)
    length = min(sizes.prompts[0], 128)
    rooms = {length + 4 * sizes.steps for _, length, _ in sizes.decodes}
    for quant in (None, "int4"):
        yield alone, quant, {"batch": [2], "seq": [1, length], "max_seq": [length + 2]}
        yield sizes.config, quant, {"batch": [1], "seq": [*sizes.prompts], "max_seq": [*sizes.prompts]}
        steps = {"batch": sorted({b for b, *_ in sizes.decodes}), "seq": [1], "max_seq": sorted(rooms)}
        yield sizes.config, quant, steps | {"kv_bits": [0, 8]}
    yield sizes.config, "int4", FIRST_TOKEN


def plans(config: llama.Config, quant: str | None, calls: dict[str, list[int]], arch: str) -> dict[str, Any]:
    """What calls launch, by key, found without a GPU."""
    found: dict[str, Any] = enumerate_plans(compiled(config, quant, f"cuda:{arch}").program, {}, calls)[0]
    return found
