# SPDX-License-Identifier: Apache-2.0
"""What of the runtime only a GPU can show: that weights arrive, that replayed decode steps have the bits of others, that what is planned fits.

Without a GPU the same steps, small, in the interpreter: graphs are tapes, nothing is measured.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from nnfront_kernels.common import launched_by
from nnfront_models import llama

import nnfront as nn
from nnfront.backends.cuda import attention as cuda_attention
from nnfront.backends.cuda import graph_capture
from nnfront.backends.cuda.independent_rows import BATCHES, TOKENS
from nnfront.backends.cuda.upload import Upload, link_to
from nnfront.errors import RunError
from nnfront.memory.allocations import Meter
from nnfront.memory.free_memory import FreeMemory, free_memory_on
from nnfront.session import Session
from nnfront.state import new

SMALL = dataclasses.replace(
    llama.TINY,
    dtype="float16",
    head_dim=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)
LARGE = dataclasses.replace(
    SMALL,
    dtype="bfloat16",
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    vocab_size=128256,
    max_position_embeddings=8192,
)
# Of decoding: sequences, tokens of the first prompt, and steps. Of memory: room of a cache, sequences of one that fits, and tokens of its prompts.
DECODE, MEMORY = (3, 120, 40), (2048, 64, 512)
DRY_DECODE, DRY_MEMORY = (1, 2, 4), (64, 4, 60)
SHORTER = 3  # each prompt than the one before
PLANNED = 4  # sequences of a call whose memory is compared with its plan
PAGE = 16


def looked(look: Callable[..., None]) -> dict[str, Any]:
    """What a function tells, line by line."""
    lines: list[str] = []

    def check(what: str, holds: bool, figure: str = "") -> None:
        lines.append(f"{'ok   ' if holds else 'WRONG'} {what}{f': {figure}' if figure else ''}")

    look(check)
    wrong = [
        {"case": "runtime", "why": line.removeprefix("WRONG ")} for line in lines if line.startswith("WRONG")
    ]
    return {"runtime": lines, "wrong": wrong}


def cases(options: Any) -> Iterator[Any]:
    from part import Case

    made = functools.cache(partial(sessions, options.dry))
    looks: dict[str, Callable[..., None]] = {"upload": partial(upload, options.dry)}
    for page_size in (PAGE,) if options.dry else (None, PAGE):
        looks[f"decode, pages {page_size}"] = lambda check, page_size=page_size: decode(
            *made(), page_size, options.dry, check
        )
    looks["memory"] = lambda check: memory(made()[1], options.dry, check)
    for label, look in looks.items():
        yield Case(f"runtime {label}", partial(looked, look))


def programs(dry: bool) -> Iterator[tuple[llama.Config, str | None, dict[str, list[int]]]]:
    """What is called, and with which sizes, as `model.plans` takes them."""
    config = SMALL if dry else LARGE
    batch, prompt, steps = DRY_DECODE if dry else DECODE
    prompts = [prompt - SHORTER * i for i in range(batch)]
    padded = [to for to in TOKENS if to >= prompt][:1]
    room, pages = {"max_seq": [prompt + steps]}, {"page_size": [0, PAGE]}
    yield config, None, {"batch": [1], "seq": sorted({*prompts, *padded}), **room, **pages}
    rows = sorted({batch, *[to for to in BATCHES if to >= batch][:1]})
    yield config, None, {"batch": rows, "seq": [1], **room, **pages}
    long, batch, prompt = DRY_MEMORY if dry else MEMORY
    yield config, None, {"batch": [PLANNED], "seq": [1, long // 2], "max_seq": [long]}
    yield config, None, {"batch": [batch], "seq": [prompt], "max_seq": [4 * long], "page_size": [PAGE]}


def upload(dry: bool, check: Callable[..., None]) -> None:
    """2 GiB from pageable memory, in tensors of every form."""
    device = torch.device("cpu") if dry else torch.device("cuda", 0)
    if dry:
        from fake_link import FakeLink

        link: Any = FakeLink()
    else:
        link = link_to(device)
    values = [torch.randint(0, 255, (1 << 10 if dry else 256 << 20,), dtype=torch.uint8) for _ in range(8)]
    values += [
        torch.randn(3000, 5000).t(),
        torch.randn(7, 11, 13)[::2, :, ::3],
        torch.tensor(1.5),
        torch.empty(0, 3),
    ]
    for what in ("first", "again"):  # the first one also pins the ring
        started = time.perf_counter()
        sent = Upload(link, device)
        found = [sent.send(f"w{i}", value) for i, value in enumerate(values)]
        sent.finish()
        seconds = time.perf_counter() - started
        equal = all(torch.equal(a, b.cpu()) for a, b in zip(values, found, strict=True))
        size = sum(value.nbytes for value in values)
        check(f"weights arrive, {what}", equal, "" if dry else f"{size / seconds / 1e9:.1f} GB/s")


def sessions(dry: bool) -> tuple[Session, Session]:
    """Two sessions of one model and the same weights: one that records, one that does not."""
    config = SMALL if dry else LARGE
    torch.manual_seed(0)
    model = llama.build(config)
    ir = nn.passes.lift_transform_params(model.export(llama.export_spec(config)), shared_transform=True)
    if dry:
        from graph_runs import attention_alone
        from tape import TapeCapture

        with attention_alone(True):
            executable = nn.compile(ir, target="cuda")
    else:
        executable = nn.compile(ir, target="cuda")
    dtype = getattr(torch, config.dtype)
    weights = {
        name: (torch.randn([int(size) for size in p.shape]) * 0.02).to(dtype)
        for name, p in model.named_parameters()
    }
    if dry:
        graph_capture.graph_capture_for = lambda device: TapeCapture()
        cuda_attention.MIN_BUCKET = 4
    one = executable.load(weights)
    graph_capture.graph_capture_for = lambda device: None
    return one, executable.load(weights)


def decode(
    one: Session, other: Session, page_size: int | None, dry: bool, check: Callable[..., None]
) -> None:
    """Sequences of different lengths, from before the end of a length class to behind it."""
    kind = "contiguous" if page_size is None else f"pages of {page_size}"
    batch, prompt, steps = DRY_DECODE if dry else DECODE
    sizes: dict[str, Any] = {"batch": batch, "max_seq": prompt + steps, "page_size": page_size}
    caches = [session.make_cache(**sizes) for session in (one, other)]
    device = other.device
    for i in range(batch):
        ids = torch.randint(0, 250, (1, prompt - SHORTER * i), device=device)
        for session, cache in zip((one, other), caches, strict=True):
            session["prefill"](ids, cache.rows(i))
    token = torch.randint(0, 250, (batch, 1), device=device)
    equal, times = True, ([], [])
    for _ in range(steps):
        results = []
        for session, cache, spent in zip((one, other), caches, times, strict=True):
            started = time.perf_counter()
            results.append(session["decode"](token, cache))
            if not dry:
                torch.cuda.synchronize()
            spent.append(time.perf_counter() - started)
        equal = equal and torch.equal(*results)
        token = results[1][:, -1].argmax(-1, keepdim=True)
    replayed, usual = (sorted(spent)[len(spent) // 2] * 1e3 for spent in times)
    figure = f"{replayed:.2f} ms a step, {usual:.2f} as usual; {one['decode'].graphs}"
    check(f"replayed steps have the bits of others, {kind}", equal, "" if dry else figure)
    check(f"steps are replayed, {kind}", one["decode"].graphs.replays > 0)


# What cuBLAS takes for itself on sm_90, at a call that it has no workspace for yet.
OF_CUBLAS = 32 << 20


def taken_by(call: Callable[[], Any], dry: bool) -> int:
    """The most bytes that a call asks torch's allocator for at a time: not what that rounds them up to, a piece of up to 1 MiB at each large one."""
    if dry:
        with launched_by(lambda plan: None), Meter([]) as meter:
            call()
        peak: int = meter.peak
        return peak
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    call()
    return int(torch.cuda.memory_stats()["requested_bytes.all.peak"]) - before


def is_as_planned(taken: int, planned: int) -> bool:
    """Launches may share a workspace that is there already, and each is planned with its own."""
    return 0.8 * planned <= taken <= 1.1 * planned + OF_CUBLAS


TOO_MANY = 4096  # sequences, of a cache


@contextmanager
def little_memory(dry: bool) -> Iterator[None]:
    """Without a GPU caches are to fit into 16 MiB, and one that is too large fails as there."""
    usual = new.free_memory_on, new.make_cache

    def made(type: Any, sizes: Any, *others: Any, **options: Any) -> Any:
        if sizes["batch"] == TOO_MANY:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return usual[1](type, sizes, *others, **options)

    if dry:
        new.free_memory_on = lambda device: FreeMemory(16 << 20, 16 << 20, "a machine with little")
        new.make_cache = made
    try:
        yield
    finally:
        new.free_memory_on, new.make_cache = usual


def memory(session: Session, dry: bool, check: Callable[..., None]) -> None:
    """Plans against what torch's allocator gives out; a cache that fits, with its calls; one that does not."""
    long, batch, rows = DRY_MEMORY if dry else MEMORY
    sizes = {"batch": PLANNED, "max_seq": long}
    cache = session.make_cache(**sizes)
    for name, seq in (("prefill", long // 2), ("decode", 1)):
        call = partial(
            session[name], torch.zeros(PLANNED, seq, dtype=torch.int64, device=session.device), cache
        )
        call()
        cache.reset()
        taken = taken_by(call, dry)
        cache.reset()
        planned = session.memory(**sizes, seq=seq).methods[name].plan.peak
        figure = f"{taken:,} of {planned:,} bytes"
        check(f"{name} takes what is planned", is_as_planned(taken, planned), figure)
    del cache
    with little_memory(dry):
        torch.cuda.empty_cache()
        large = session.make_cache(
            batch=batch, max_seq=4 * long, page_size=PAGE, pages="fit", calls={"seq": rows}
        )
        with launched_by(lambda plan: None) if dry else nullcontext():
            session["prefill"](torch.zeros(batch, rows, dtype=torch.int64, device=session.device), large)
        figure = f"{large.pages:,} pages; {free_memory_on(session.device)}"
        check("a cache that fits leaves room for its calls", True, figure)
        del large
        torch.cuda.empty_cache()
        refused(session, 4 * long, check)


def refused(session: Session, long: int, check: Callable[..., None]) -> None:
    try:
        session.make_cache(batch=TOO_MANY, max_seq=long)
        check("a cache that does not fit is refused", False)
    except RunError as error:
        check("a cache that does not fit is refused", "fits: " in str(error), str(error))
