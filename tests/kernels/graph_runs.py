# SPDX-License-Identifier: Apache-2.0
"""Models whose decode steps are captured, for `test_graphs.py`. A module of its own: it runs in a process with the interpreter on."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from nnfront_models import llama
from tape import TapeCapture
from torch.utils._python_dispatch import _disable_current_modes

import nnfront as nn
from nnfront.backends.cuda import attention as cuda_attention
from nnfront.backends.cuda import captured_cache, graph_capture, graphs, linear, rowwise
from nnfront.backends.cuda.backend import CudaBackend
from nnfront.session import Session
from nnfront.state.lengths import SequenceLengths

CONFIG = dataclasses.replace(
    llama.TINY,
    dtype="float16",
    head_dim=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)


@contextmanager
def attention_alone(is_so: bool):
    """Leave the other kernels out of the table: their ops run on torch."""
    table = CudaBackend.kernels
    if is_so:
        kept = tuple(kernel for kernel in table if kernel not in (*linear.KERNELS, *rowwise.KERNELS))
        CudaBackend.kernels = kept
    try:
        yield
    finally:
        CudaBackend.kernels = table


@contextmanager
def captured_by(capturer: Any):
    """Sessions that are made inside capture with it."""
    before = graph_capture.graph_capture_for
    graph_capture.graph_capture_for = lambda device: capturer
    try:
        yield
    finally:
        graph_capture.graph_capture_for = before


def pair(
    config: Any = CONFIG, *, is_whole: bool = False, **options: Any
) -> tuple[Session, Session, TapeCapture]:
    """Two sessions of one model and the same weights: one that records, one that runs everything as usual.

    Unless `is_whole`, only attention is on kernels: the interpreter takes seconds for the products of a step.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)
    cuda_attention.MIN_BUCKET = 4  # so that a test with few tokens goes through several
    model = llama.build(config)
    ir = nn.passes.lift_transform_params(model.export(llama.export_spec(config)), shared_transform=True)
    with attention_alone(not is_whole):
        executable = nn.compile(ir, target="cuda")
    weights = {
        name: (torch.randn([int(s) for s in p.shape]) * 0.1).half() for name, p in model.named_parameters()
    }
    capturer = TapeCapture(**options)
    with captured_by(capturer):
        one = executable.load(weights)
    return one, executable.load(weights), capturer


class Both:
    """Two sessions and a cache of each, through which everything goes; results and lengths must have the same bits."""

    def __init__(self, sessions: tuple[Session, Session], caches: tuple[Any, Any]) -> None:
        self.sessions = sessions
        self.caches = caches

    def __call__(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        results = [s[name](ids, c) for s, c in zip(self.sessions, self.caches, strict=True)]
        assert torch.equal(*results), (name, self.caches[0].lengths)
        assert self.caches[0].lengths == self.caches[1].lengths
        assert not results[0].is_inference()
        return results[0][:, -1].argmax(-1, keepdim=True)

    def map(self, what: str, *arguments: Any) -> Both:
        return Both(self.sessions, tuple(getattr(cache, what)(*arguments) for cache in self.caches))


def both(one: Session, other: Session, **sizes: Any) -> Both:
    return Both((one, other), (one.make_cache(**sizes), other.make_cache(**sizes)))


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, CONFIG.vocab_size, shape)


def decode(batch: int, page_size: int | None, stored_as: str | None) -> None:
    """Prompts of different lengths, then tokens over a length class and over the end of a page."""
    layers = 1 if page_size is None else 2
    one, other, capturer = pair(dataclasses.replace(CONFIG, num_hidden_layers=layers))
    pages = {} if page_size is None else {"page_size": page_size}
    run = both(one, other, batch=batch, max_seq=40, stored_as=stored_as, **pages)
    for i in range(batch):
        run.map("rows", i)("prefill", tokens(1, 14 - 4 * i))
    token = tokens(batch, 1)
    for _ in range(5):
        token = run("decode", token)
    found = one["decode"].graphs
    # Up to 16 tokens, and up to 32: in each the first call runs as usual, the second is captured.
    assert found.replays == 1 + 2
    steps = [tape for tape in capturer.tapes if "attention_decode_kernel" in tape.names]
    assert len(found) == len(steps) == 2


def pad() -> None:
    """Batches of other sizes, and of other rows, in the rows of one graph: results and pages are those of calls that run as usual."""
    one, other, _ = pair()
    run = both(one, other, batch=4, max_seq=32, page_size=16)
    for i in range(4):
        run.map("rows", i)("prefill", tokens(1, 16 - i % 3))
    found = one["decode"].graphs
    for first, stop in ((0, 3), (0, 4), (1, 4), (0, 4)):
        run.map("rows", first, stop)("decode", tokens(stop - first, 1))
    assert found.replays == 3
    assert len(found) == 1
    pools = [cache.tables[0].pool for cache in run.caches]
    assert all(map(torch.equal, pools[0].buffers, pools[1].buffers))  # a row that is nobody's writes nothing
    for _ in range(2):
        run.map("rows", 0, 2)("decode", tokens(2, 1))
    assert found.replays == 4
    assert len(found) == 2


def pad_contiguous() -> None:
    """Batches of other sizes, in caches of their own without pages, in the rows of one graph: nothing is written behind a cache."""
    one, other, _ = pair()
    found = one["decode"].graphs
    for batch in (3, 4, 3):
        whole = both(one, other, batch=5, max_seq=32)
        for cache in whole.caches:
            for part in cache[0].storage.tensors():
                part.fill_(7)
        run = whole.map("rows", 0, batch)
        for i in range(batch):
            run.map("rows", i)("prefill", tokens(1, 6 - i % 3))
        for _ in range(2):
            run("decode", tokens(batch, 1))
        behind = [part[batch:] for part in whole.caches[0][0].storage.tensors()]
        assert all(bool((part == 7).all()) for part in behind)
    assert (len(found), found.replays) == (1, 5)


def prompts(page_size: int | None, stored_as: str | None) -> None:
    """Prompts of other lengths, and chunks behind others, in the tokens of one graph: pages and answers are those of calls that run as usual."""
    one, other, _ = pair()
    sizes = {"batch": 2, "max_seq": 52, "stored_as": stored_as}
    run = both(one, other, **sizes, **({} if page_size is None else {"page_size": page_size}))
    found = one["prefill"].graphs
    for row, length in ((0, 5), (1, 14), (0, 9), (1, 1), (1, 16), (0, 3)):
        run.map("rows", row)("prefill", tokens(1, length))
    assert (len(found), found.replays) == (1, 5)
    held = [cache.free_pages for cache in run.caches] if page_size is not None else [0, 0]
    assert held[0] == held[1]
    run("decode", tokens(2, 1))  # reads what they have stored
    for _ in range(2):
        run.map("rows", 1).map("truncate", 0)
        run.map("rows", 1)("prefill", tokens(1, 20))
    run("decode", tokens(2, 1))
    assert (len(found), found.replays) == (2, 6)
    run.map("rows", 1)("prefill", tokens(1, 21))  # to 32 tokens they would not fit
    assert found.replays == 6
    assert found.error == ""


def chunks() -> None:
    """Several tokens at a time, behind sequences of different lengths."""
    one, other, capturer = pair()
    cuda_attention.MIN_BUCKET = 16
    run = both(one, other, batch=2, max_seq=16, page_size=16)
    run.map("rows", 0)("decode", tokens(1, 1))
    for _ in range(3):
        run("prefill", tokens(2, 2))
    assert one["prefill"].graphs.replays == 2
    assert "attention_prefill_kernel" in capturer.tapes[0].names


def whole() -> None:
    """Every kernel of a step on the tape, not attention alone."""
    config = dataclasses.replace(CONFIG, vocab_size=64, intermediate_size=64)
    one, other, capturer = pair(config, is_whole=True)
    run = both(one, other, batch=1, max_seq=8)
    for i in range(3):
        run("decode", torch.tensor([[i]]))
    assert one["decode"].graphs.replays == 2
    names = set(capturer.tapes[0].names)
    # Attention rotates and stores a token by itself, and products normalise the rows that they read.
    assert names >= {"matmul_small_m_kernel", "attention_decode_kernel"}
    assert names.isdisjoint({"rope_append_kernel", "norm_kernel"})


def bake() -> None:
    """A cache that tells a graph on the host how many tokens it holds: the tape must show that this is wrong."""

    def told(cache: Any, lengths: Any, tables: Any, bases: Any, in_place: Any) -> Any:
        known = SequenceLengths((cache[0].lengths.values[0] - 1,) * cache.batch)
        with _disable_current_modes():  # or the tape would refuse it at once
            known.counts()
        return tuple(
            captured_cache.CapturedLayer(layer, known, None, base)
            for layer, base in zip(cache, bases, strict=True)
        )

    one, other, _ = pair()
    run = both(one, other, batch=1, max_seq=16)
    before, graphs.still = graphs.still, told
    try:
        run("prefill", tokens(1, 5))
        for _ in range(2):
            run("decode", tokens(1, 1))
        with pytest.raises(AssertionError):
            run("decode", tokens(1, 1))
    finally:
        graphs.still = before


def fail() -> None:
    """What cannot be captured runs as usual, and says so once."""
    one, other, _ = pair(fails="no such thing")
    run = both(one, other, batch=1, max_seq=16)
    run("decode", tokens(1, 1))
    with pytest.warns(
        RuntimeWarning,
        match="decode is not captured, its next 100 calls run as usual: RuntimeError: no such thing",
    ):
        run("decode", tokens(1, 1))
    run("decode", tokens(1, 1))
    assert run.caches[0].lengths == [3]
    assert str(one["decode"].graphs) == "decode: not captured, RuntimeError: no such thing"
