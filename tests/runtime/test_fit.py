# SPDX-License-Identifier: Apache-2.0
"""Caches as large as fits: nothing less fits in, nothing more does, and the words for it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from nnfront_models import llama

import nnfront as nn
from nnfront.errors import LowerError, RunError
from nnfront.memory.free_memory import FreeMemory
from nnfront.session import Session
from nnfront.state import fit as fits
from nnfront.state import new as new_cache

CONFIG = dataclasses.replace(llama.TINY, num_hidden_layers=2, max_position_embeddings=4096)
# float32 keys and values of two layers.
TOKEN = 2 * 2 * 4 * CONFIG.kv_heads * CONFIG.head_size


@pytest.fixture(scope="module")
def session() -> Session:
    ir = nn.passes.lift_transform_params(
        llama.build(CONFIG).export(llama.export_spec(CONFIG)), shared_transform=True
    )
    model = llama.build(CONFIG)
    weights = {name: torch.zeros([int(s) for s in p.shape]) for name, p in model.named_parameters()}
    return nn.compile(ir).load(weights)


@pytest.fixture
def free(monkeypatch):
    """Say how many bytes are free."""

    def say(size: int) -> None:
        monkeypatch.setattr(new_cache, "free_memory_on", lambda device: FreeMemory(size, 32 * size, "a GPU"))

    monkeypatch.setattr(fits, "SPARE", 1 << 60)
    return say


def peak(session: Session, **sizes: int) -> int:
    report = session.memory(**sizes)
    return max(report.methods[name].plan.peak for name in ("prefill", "decode"))


@pytest.mark.parametrize("size", [4 << 20, 64 << 20])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_longest_cache_that_fits_beside_its_calls_is_made(session, free, size, batch):
    free(size)
    cache = session.make_cache(batch=batch, max_seq="fit", calls={"seq": 16})
    n = cache.max_seq
    assert cache.nbytes == batch * n * TOKEN
    assert cache.nbytes + peak(session, batch=batch, max_seq=n, seq=16) <= size
    if n < CONFIG.max_position_embeddings:
        more = batch * (n + 1) * TOKEN + peak(session, batch=batch, max_seq=n + 1, seq=16)
        assert more > size


def test_as_many_pages_as_fit_are_made(session, free):
    free(8 << 20)
    cache = session.make_cache(batch=4, max_seq=4096, page_size=16, pages="fit", calls={"seq": 64})
    calls = peak(session, batch=4, max_seq=4096, seq=64)
    assert cache.nbytes + calls <= 8 << 20
    assert cache.nbytes + calls + 16 * TOKEN > 8 << 20


def test_no_more_pages_are_made_than_sequences_can_use(session, free):
    free(1 << 34)
    assert session.make_cache(batch=2, max_seq=100, page_size=16, pages="fit").pages == 2 * 7


def test_a_batch_may_be_what_fits(session, free):
    free(8 << 20)
    cache = session.make_cache(batch="fit", max_seq=256, calls={"seq": 1})
    calls = [peak(session, batch=cache.batch + i, max_seq=256, seq=1) for i in (0, 1)]
    assert cache.nbytes + calls[0] <= 8 << 20 < cache.nbytes + 256 * TOKEN + calls[1]


def test_part_of_the_device_is_left_alone(session, monkeypatch):
    monkeypatch.setattr(new_cache, "free_memory_on", lambda device: FreeMemory(8 << 20, 64 << 20, "a GPU"))
    whole = session.make_cache(batch=1, max_seq="fit", calls={"seq": 1})
    assert whole.nbytes + peak(session, batch=1, max_seq=whole.max_seq, seq=1) <= 6 << 20


def test_on_a_gpu_what_recordings_keep_is_left_free_too(free, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    config = dataclasses.replace(CONFIG, head_dim=64, dtype="float16")
    ir = nn.passes.lift_transform_params(
        llama.build(config).export(llama.export_spec(config)), shared_transform=True
    )
    weights = {
        name: torch.zeros([int(s) for s in p.shape]).half()
        for name, p in llama.build(config).named_parameters()
    }
    session = nn.compile(ir, target="cuda").load(weights)
    free(4 << 20)
    cache = session.make_cache(batch=2, max_seq=4096, page_size=16, pages="fit", calls={"seq": 100})
    calls = peak(session, batch=2, max_seq=4096, seq=100)
    recordings = [
        session.memory(batch=2, max_seq=4096, seq=1).methods[name].plan.peak for name in ("prefill", "decode")
    ]
    page = 16 * 2 * 2 * 2 * config.kv_heads * 64
    assert cache.pages * page + calls + sum(recordings) <= 4 << 20
    assert (cache.pages + 1) * page + calls + sum(recordings) > 4 << 20


def test_what_calls_are_not_said_count_as_long_as_the_cache(session, free):
    free(4 << 20)
    n = session.make_cache(batch=1, max_seq="fit").max_seq
    assert n * TOKEN + peak(session, batch=1, max_seq=n, seq=n) <= 4 << 20
    assert (n + 1) * TOKEN + peak(session, batch=1, max_seq=n + 1, seq=n + 1) > 4 << 20


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            {"batch": "fit", "max_seq": "fit"},
            "make_cache: 'batch' and 'max_seq' are both 'fit', only one can be",
        ),
        ({"batch": 1, "max_seq": "fit"}, "make_cache: not even the smallest 'max_seq' fits"),
        (
            {"batch": 1, "max_seq": 64, "page_size": 16, "pages": "fit"},
            "make_cache: not even the smallest 'pages' fits",
        ),
        ({"max_seq": "fit"}, "make_cache needs 'batch'"),
        (
            {"batch": 1, "max_seq": 8, "pages": "fit"},
            "make_cache: page_size is None, expected a power of two",
        ),
        (
            {"batch": 1, "max_seq": "fit", "calls": {"sequence": 1}},
            "make_cache: 'sequence' in calls is not a dim of a method that takes the cache",
        ),
        ({"batch": 1, "max_seq": "all"}, "make_cache: 'max_seq' is 'all', expected between 1 and 4096"),
    ],
)
def test_what_cannot_fit_or_be_is_refused(session, free, sizes, message):
    free(1000)
    with pytest.raises(RunError) as caught:
        session.make_cache(**sizes)
    assert caught.value.what == message


def test_the_error_of_a_cache_that_does_not_fit_says_what_calls_take(session, free):
    free(1000)
    with pytest.raises(RunError) as caught:
        session.make_cache(batch=1, max_seq="fit", calls={"seq": 1})
    calls = peak(session, batch=1, max_seq=1, seq=1)
    assert caught.value.details == (
        "1000 B of 31.25 KiB are free on a GPU",
        f"calls with the cache take up to {calls / 1024:.2f} KiB of that",
    )


@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_for_which_memory_runs_out_says_what_fits(session, free, monkeypatch, paged):
    free(8 << 20)

    def fails(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

    monkeypatch.setattr(new_cache, "make_cache", fails)
    options = {"page_size": 16} if paged else {}
    with pytest.raises(RunError) as caught:
        session.make_cache(batch=8, max_seq=2048, calls={"seq": 16}, **options)
    error = caught.value
    size = 8 * 2048 * TOKEN
    assert error.what == f"there is no room for a cache of {size / (1 << 20):.2f} MiB"
    assert error.details[:2] == ("batch=8, max_seq=2048", "8.00 MiB of 256.00 MiB are free on a GPU")
    assert error.details[2].startswith("calls with it take up to ")
    monkeypatch.undo()
    monkeypatch.setattr(fits, "SPARE", 1 << 60)
    free(8 << 20)
    if paged:
        pages = session.make_cache(batch=8, max_seq=2048, page_size=16, pages="fit", calls={"seq": 16}).pages
        assert error.details[3] == f"fits: {pages:,} pages of 16, which is {16 * pages:,} tokens"
    else:
        seq = session.make_cache(batch=8, max_seq="fit", calls={"seq": 16}).max_seq
        batch = session.make_cache(batch="fit", max_seq=2048, calls={"seq": 16}).batch
        assert (
            error.details[3]
            == f"fits: batch up to {batch} with max_seq=2048; max_seq up to {seq:,} with batch=8"
        )


def test_memory_that_the_cpu_does_not_have_is_an_error_that_says_so(session):
    with pytest.raises(RunError, match="there is no room for a cache of") as caught:
        session.make_cache(batch=1 << 36, max_seq=4096)
    assert "are free on the CPU" in str(caught.value)


def test_other_errors_stay_as_they_are(session, monkeypatch):
    def fails(*args, **kwargs):
        raise RuntimeError("something else")

    monkeypatch.setattr(new_cache, "make_cache", fails)
    with pytest.raises(RuntimeError, match="something else"):
        session.make_cache(batch=1, max_seq=8)


def test_a_report_says_how_many_tokens_fit_beside_weights_and_calls(session):
    report = session.memory(batch=2, seq=32, max_seq=1024)
    calls = max(report.methods[n].plan.peak + report.methods[n].arguments for n in ("prefill", "decode"))
    needed = report.weights + calls
    assert report.tokens_that_fit(needed + 10 * TOKEN) == 10
    assert report.tokens_that_fit(needed + 10 * TOKEN - 1) == 9
    assert report.tokens_that_fit(0) == 0


def test_a_program_without_a_cache_holds_no_tokens():
    ir = nn.ir.parse("def main(x: input float32[2]) -> float32[2] { return x }")
    with pytest.raises(LowerError, match="no method takes a cache"):
        nn.compile(ir).memory().tokens_that_fit(1 << 30)


@pytest.mark.parametrize("page_size", [None, 16])
def test_a_cache_of_codes_counts_as_what_it_takes(session, free, page_size):
    size = 2 << 20
    free(size)
    amount = (
        {"max_seq": "fit"} if page_size is None else {"max_seq": 4096, "page_size": page_size, "pages": "fit"}
    )
    plain, coded = (
        session.make_cache(batch=1, calls={"seq": 16}, stored_as=stored_as, **amount)
        for stored_as in (None, "float8_e4m3fn")
    )
    tokens = [c.max_seq if page_size is None else c.pages * page_size for c in (plain, coded)]
    assert plain.nbytes == tokens[0] * TOKEN
    assert coded.nbytes == tokens[1] * TOKEN // (4 * CONFIG.head_size) * (CONFIG.head_size + 4)
    assert tokens[0] < tokens[1]
    assert coded.nbytes <= size
