# SPDX-License-Identifier: Apache-2.0
"""What is done wrong with a state of all kinds at once: one error each, and the state as it was."""

import re

import pytest
import state_models
import torch

import nnfront as nn
from nnfront.errors import RunError

IDS = torch.randint(0, 61, (2, 7), generator=torch.Generator().manual_seed(0))


def session_of(kinds):
    torch.manual_seed(0)
    config = state_models.Config(kinds=kinds)
    model = state_models.build(config)
    ir = model.export(state_models.export_spec(config))
    ir = nn.passes.lift_transform_params(ir, shared_transform=True)
    return nn.compile(ir).load(
        {name: torch.randn([int(n) for n in p.shape]) * 0.3 for name, p in model.named_parameters()}
    )


@pytest.fixture(scope="module")
def session():
    return session_of("rkwm")


@pytest.fixture(scope="module", params=[None, 4], ids=["contiguous", "paged"])
def make(request, session):
    return lambda batch=2, max_seq=32: session.make_cache(
        batch=batch, max_seq=max_seq, page_size=request.param
    )


def error_of(act):
    with pytest.raises(RunError) as caught:
        act()
    return re.sub(r"(\n  (at|signature:) ).*", r"\1...", str(caught.value))


def check_as_it_was(session, make, cache):
    """The cache holds IDS and nothing else."""
    new = make()
    session["prefill"](IDS, new)
    token = IDS[:, :1]
    torch.testing.assert_close(session["decode"](token, cache), session["decode"](token, new))


@pytest.fixture
def cache(session, make):
    cache = make()
    session["prefill"](IDS, cache)
    return cache


def test_a_state_of_another_model(session):
    other = session_of("rkm").make_cache(batch=2, max_seq=32)
    recurrent, kv, latent = (
        "1 layers of conv 32 x 3 float32 a sequence, ssm 32 float32 a sequence",
        "1 layers of 2 heads of 8 float32",
        "1 layers of latent 1 x 16 float32",
    )
    assert error_of(lambda: session["prefill"](IDS, other)) == (
        "prefill: argument 'cache' is a cache of another model\n"
        f"  got {recurrent}; {kv}; {latent}\n"
        f"  expected {recurrent}; {kv}; {kv}, window 5; {latent}\n"
        "  signature: ..."
    )
    assert other.lengths == [0, 0]


def test_a_state_of_other_dims(session, make):
    cache = make(batch=3)
    assert error_of(lambda: session["prefill"](IDS, cache)) == (
        "prefill: argument 'cache' batch is 'batch' = 3, but 'tokens' axis 0 already said 'batch' = 2"
    )
    assert cache.lengths == [0, 0, 0]


def test_a_state_too_small(session, make):
    cache = make(max_seq=8)
    session["prefill"](IDS, cache)
    assert error_of(lambda: session["prefill"](IDS, cache)) == (
        "cache is full: 'max_seq' = 8 holds 7 tokens, 7 more do not fit\n"
        "  at ...\n"
        "  help: make a cache with a larger max_seq, or call cache.reset()"
    )
    check_as_it_was(session, make, cache)


def test_a_state_in_two_calls_at_once(session, make, cache):
    assert cache.use.begin("prefill")
    try:
        for used in (cache, cache.rows(0, 2)):
            assert error_of(lambda used=used: session["decode"](IDS[:, :1], used)) == (
                "decode: the cache 'cache' is in use\n"
                "  a call of 'prefill' has not ended that uses it, or one that shares its memory\n"
                "  help: a cache belongs to one caller at a time: make one for each thread"
            )
    finally:
        cache.use.end()
    check_as_it_was(session, make, cache)


def test_a_state_and_its_fork_go_their_own_ways(session, make, cache):
    fork = cache.fork([1, 0])
    session["decode"](IDS[:, 2:3], fork)
    assert (cache.lengths, fork.lengths) == ([7, 7], [8, 8])
    check_as_it_was(session, make, cache)


def test_a_snapshot_of_a_state_that_was_forked_away(session, make, cache):
    fork = cache.fork([0, 1])
    snapshot = cache.snapshot()
    session["decode"](IDS[:, :1], fork)
    for other in (fork, cache.clone(), cache.rows(0)):
        assert error_of(lambda other=other: other.restore(snapshot)) == (
            "the snapshot is of another cache\n"
            "  got one of a cache with [7, 7] tokens\n"
            f"  expected one that {other!r} has taken itself\n"
            "  help: a fork, a clone and rows of a cache take their own: mark = cache.snapshot()"
        )
    assert fork.lengths == [8, 8]
    session["decode"](IDS[:, :1], cache)
    cache.rows(0, 2).restore(snapshot)
    check_as_it_was(session, make, cache)


def test_a_state_cut_past_its_snapshot(session, make, cache):
    snapshot = cache.snapshot()
    session["decode"](IDS[:, :1], cache)
    cut = (
        "the cache cannot be cut to 6 tokens: it has 8, and layer 0 keeps 'conv', 'ssm' only as of the last one\n"
        "  its last snapshot holds [7, 7]\n"
        "  help: mark = cache.snapshot() where it may have to go back to, and cache.restore(mark)"
    )
    assert error_of(lambda: cache.truncate(6)) == cut
    assert error_of(lambda: cache.truncate(-1)) == (
        "the cache cannot be cut to -1 tokens\n  help: give how many tokens to keep; cache.reset() keeps none"
    )
    assert cache.lengths == [8, 8]
    cache.truncate(7)
    assert snapshot.nbytes
    check_as_it_was(session, make, cache)
