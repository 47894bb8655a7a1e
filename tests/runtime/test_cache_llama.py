# SPDX-License-Identifier: Apache-2.0
"""A whole model generates the same tokens with either cache."""

from pathlib import Path

import pytest
import torch
from few_of import few_of
from nnfront_models import llama

import nnfront as nn
from nnfront import spec
from nnfront.errors import RunError

MAX_SEQ = 64
SHIPPED = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"


@pytest.fixture(scope="module")
def session():
    """The tiny Llama with random weights."""
    torch.manual_seed(0)
    model = llama.build(llama.TINY)
    weights = {name: torch.randn(p.shape) * 0.3 for name, p in model.named_parameters()}
    ir = nn.passes.lift_transform_params(model.export(llama.export_spec(llama.TINY)), shared_transform=True)
    return nn.compile(ir).load(weights)


def greedy(session, cache, logits, count: int) -> tuple[list[list[int]], torch.Tensor]:
    """Decode `count` tokens of all sequences: [step][sequence], and the last logits."""
    found = []
    for _ in range(count):
        token = logits[:, -1].argmax(-1)
        found.append(token.tolist())
        logits = session["decode"](token[:, None], cache)
    return found, logits


def history(session, cache, prompts: list[torch.Tensor], chunk: int) -> list[list[list[int]]]:
    """Tokens after prompts of different lengths in chunks, after a fork, after a truncation, and of the fork."""
    last = []
    for i, prompt in enumerate(prompts):
        for first in range(0, len(prompt), chunk):
            logits = session["prefill"](prompt[None, first : first + chunk], cache.rows(i))
        last.append(logits[:, -1:])
    tokens, logits = greedy(session, cache, torch.cat(last), 7)
    results = [tokens]
    fork = cache.fork([2, 0, 2])
    turned = logits[[2, 0, 2]].clone()
    turned[0] = -turned[0]  # goes another way than the last one
    results.append(greedy(session, cache, logits, 5)[0])
    limit = min(map(len, prompts)) + 2
    cache.truncate(limit)
    again = session["prefill"](torch.full((3, 4), 5), cache)
    results.append(greedy(session, cache, again, 6)[0])
    results.append(greedy(session, fork, turned, 9)[0])
    assert cache.lengths == [min(len(p) + 12, limit) + 10 for p in prompts]
    return results


@pytest.mark.parametrize("page_size", few_of([4, 1, 16, 128]))
@pytest.mark.parametrize(("lengths", "chunk"), [((5, 17, 11), 64), ((9, 2, 20), 3), ((6, 6, 6), 5)])
def test_greedy_tokens_do_not_depend_on_the_cache(session, lengths, chunk, page_size):
    prompts = [torch.randint(0, llama.TINY.vocab_size, (n,)) for n in lengths]
    contiguous = session.make_cache(batch=3, max_seq=MAX_SEQ)
    paged = session.make_cache(batch=3, max_seq=MAX_SEQ, page_size=page_size, pages=6 * MAX_SEQ)
    expected = history(session, contiguous, prompts, chunk)
    assert len({tuple(column) for column in zip(*expected[0], strict=True)}) > 1
    assert history(session, paged, prompts, chunk) == expected


def test_logits_over_pages_equal_those_over_a_buffer(session):
    ids = torch.randint(0, llama.TINY.vocab_size, (2, 40))
    caches = [session.make_cache(batch=2, max_seq=MAX_SEQ, page_size=size) for size in (None, 8)]
    for first, stop in ((0, 20), (20, 21), (21, 25), (25, 40)):
        one, two = (session["prefill"](ids[:, first:stop], cache) for cache in caches)
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)


def test_a_call_that_runs_out_of_pages_changes_nothing(session):
    cache = session.make_cache(batch=2, max_seq=MAX_SEQ, page_size=8, pages=4)
    ids = torch.randint(0, llama.TINY.vocab_size, (2, 30))
    session["prefill"](ids[:, :10], cache)
    kept = [layer.stored(0).clone() for layer in cache]
    message = (
        "cache is out of pages: 20 more tokens for 2 sequences need 4 pages of 8, 0 of 4 are free\n"
        "  tokens that fit: 6 in each of them, 12 in all"
    )
    with pytest.raises(RunError, match=message):
        session["prefill"](ids[:, 10:], cache)
    assert cache.lengths == [10, 10]
    assert all(torch.equal(a, layer.stored(0)) for a, layer in zip(kept, cache, strict=True))
    assert session["prefill"](ids[:, 10:16], cache).shape[1] >= 1


def test_layers_with_different_windows_have_pools_of_their_own():
    class Two(nn.Module):
        def step(self, x, cache):
            for layer in cache:
                x = nn.op.attention(x, x, x, cache=layer)
            return x

    cache_spec = spec.Cache(
        layers=2, kv_heads=1, head_size=4, batch="batch", max_seq="max_seq", window=[None, 4]
    )
    ir = Two().export({"step": {"x": spec.Tensor(["batch", "seq", 1, 4]), "cache": cache_spec}})
    two = nn.compile(ir).load({})
    caches = [two.make_cache(batch=2, max_seq=MAX_SEQ, page_size=size) for size in (None, 2)]
    x = torch.randn(2, 40, 1, 4)
    for first, stop in [(0, 9), *((i, i + 1) for i in range(9, 40))]:
        one, paged = (two["step"](x[:, first:stop], cache) for cache in caches)
        torch.testing.assert_close(one, paged)
    assert [table.pool.pages - table.pool.free for table in caches[1].tables] == [40, 2 * 3]


@pytest.mark.parametrize("page_size", [None, 16])
def test_a_cache_of_codes_costs_little_of_the_logits(page_size):
    llm = nn.LLM.load(SHIPPED, dtype="float32")
    text = "def read(path):\n    with open(path) as file:\n        return file.read()\n" * 4
    ids = torch.tensor([llm.tokenizer.encode(text)])
    exact = llm.session["logits"](ids).log_softmax(-1)[:, -1]
    cache = llm.session.make_cache(
        batch=1, max_seq=ids.shape[1], page_size=page_size, stored_as="float8_e4m3fn"
    )
    llm.session["prefill"](ids[:, :-1], cache)
    got = llm.session["decode"](ids[:, -1:], cache).log_softmax(-1)[:, -1]
    divergence = (exact.exp() * (exact - got)).sum().item()
    assert 0 < divergence < 2e-3  # nats; 4e-4 in one run
