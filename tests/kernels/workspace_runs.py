# SPDX-License-Identifier: Apache-2.0
"""What CUDA's kernels allocate in a model, for `test_workspaces.py`. A module of its own: it runs in a process with the interpreter on."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from nnfront_kernels.common import launched_by
from nnfront_models import llama, qwen3_moe
from tape import Tape
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves

import nnfront as nn
from nnfront.backends.cuda import backend
from nnfront.backends.cuda.backend import CudaBackend
from nnfront.backends.cuda.table import ON_DEVICE
from nnfront.backends.kernel import Kernel
from nnfront.backends.table import memory_policy
from nnfront.memory.layout import Layer, Layout
from nnfront.state.layer import CacheLayer

MAX_SEQ = 220  # two prompts of it are fewer rows than a weight is unpacked for, which kernels that are interpreted do not do


@contextmanager
def workspaces_of_their_own() -> Iterator[None]:
    """Launches share none inside of this, so that what each takes shows."""
    shared, backend.sharing = backend.sharing, nullcontext
    try:
        yield
    finally:
        backend.sharing = shared


def made_in_a_step(quant: str | None, is_shared: bool) -> list[str]:
    """The calls of torch that make memory, in a decode step that others have come before."""
    executable, weights = compiled("plain", quant)
    session = executable.load(weights)
    with launched_by(lambda plan: None), nullcontext() if is_shared else workspaces_of_their_own():
        cache, token = session.make_cache(batch=2, max_seq=MAX_SEQ), torch.zeros(2, 1, dtype=torch.int64)
        for step in range(3):
            tape = Tape()
            with tape if step == 2 else nullcontext():
                session["decode"](token, cache)
    return tape.names


def operand(value: Any) -> Any:
    if isinstance(value, CacheLayer):
        return Layer(value.type, value.batch, value.max_seq)
    if isinstance(value, torch.Tensor):
        return Layout(tuple(value.shape), value.stride(), str(value.dtype).removeprefix("torch."))
    return value


def allocated(call: Callable[[], Any]) -> tuple[Any, int]:
    """What a call returns, and the most bytes that torch's allocator has given out meanwhile, its results left out."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        result = call()
    events = found.profiler.kineto_results.events()
    live = peak = 0
    for _, _, change in sorted(
        (e.start_ns(), i, e.nbytes()) for i, e in enumerate(events) if e.name() == "[memory]"
    ):
        live += change
        peak = max(peak, live)
    own = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()
        for t in tree_leaves(result)
        if isinstance(t, torch.Tensor)
    }
    return result, peak - sum(own.values())


def compiled(variant: str, quant: str | None) -> tuple[nn.Executable, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    file: Any = qwen3_moe if variant == "experts" else llama
    config = dataclasses.replace(file.TINY, dtype="float16", hidden_size=256, num_hidden_layers=1)
    ir = file.build(config).export(file.export_spec(config))
    if quant is not None:
        ir = nn.passes.quantize_weights(ir, quant)
    executable = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True), target="cuda")
    return executable, {
        name: torch.zeros([int(s) for s in p.shape]).half()
        for name, p in file.build(config).named_parameters()
    }


def peaks(variant: str, quant: str | None) -> dict[str, tuple[int, int, int]]:
    """By method: the peak of the plan of a call, what torch's allocator gives out in one, and what a recording of one holds if it gives back nothing."""
    executable, weights = compiled(variant, quant)
    session = executable.load(weights)
    plans = executable.memory(batch=2, seq=60, max_seq=MAX_SEQ).methods
    found = {}
    with launched_by(lambda plan: None), workspaces_of_their_own():
        cache = session.make_cache(batch=2, max_seq=MAX_SEQ)
        for name, seq in (("prefill", 60), ("decode", 1)):
            ids = torch.zeros(2, seq, dtype=torch.int64)
            session[name](ids, cache)
            result, taken = allocated(lambda name=name, ids=ids: session[name](ids, cache))
            tape = Tape()
            with tape:
                session[name](ids, cache)
            found[name] = plans[name].plan.peak, taken + result.nbytes, sum(tape.made.values())
    return found


def compare(variant: str, quant: str | None, seq: int) -> dict[str, list[tuple[int, int]]]:
    """By kernel: the bytes that the table says and those that are allocated, in a prefill of `seq` tokens and the last decode."""
    executable, weights = compiled(variant, quant)
    table = memory_policy("cuda").workspaces
    found: dict[str, list[tuple[int, int]]] = {}
    kernels = CudaBackend.kernels

    def bind(kernel: Kernel, run: Any) -> Callable[..., Any]:
        call = kernel.bind(run)

        def measured(*operands: Any, **keywords: Any) -> Any:
            said = table[run.kernel].held(run, *map(operand, operands))
            result, taken = allocated(lambda: call(*operands, **keywords))
            found.setdefault(run.kernel, []).append((said, taken))
            return result

        return measured

    CudaBackend.kernels = tuple(
        replace(kernel, bind=partial(bind, kernel)) if kernel in ON_DEVICE else kernel for kernel in kernels
    )
    try:
        session = executable.load(weights)
    finally:
        CudaBackend.kernels = kernels
    cache = session.make_cache(batch=2, max_seq=MAX_SEQ)
    with launched_by(lambda plan: None), workspaces_of_their_own():
        session["prefill"](torch.zeros(2, seq, dtype=torch.int64), cache)
        found.clear()
        session["prefill"](torch.zeros(2, MAX_SEQ - 1 - seq, dtype=torch.int64), cache)
        session["decode"](torch.zeros(2, 1, dtype=torch.int64), cache)
    return found
