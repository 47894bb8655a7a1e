# SPDX-License-Identifier: Apache-2.0
"""The pages of a paged cache: who holds them, what is in them, and what happens when there are none left."""

import gc
from collections import Counter

import pytest
import torch
from cache_model import ListCache, new_cache
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from nnfront_kernels import attention_decode

from nnfront.errors import RunError

HEADS, SIZE, MAX_SEQ = 2, 2, 24
WINDOWS = (None, 3, None)


def append(cache, model: ListCache, first: int, count: int, seq: int) -> None:
    """Append the same random tokens to both, in every layer; to the model only if the cache takes them."""
    k, v = (torch.randn(len(cache), count, seq, HEADS, SIZE) for _ in range(2))
    part = cache.rows(first, first + count)
    mark = part.mark()
    try:
        for layer, keys, values in zip(part, k, v, strict=True):
            layer.append(keys, values)
    except RunError:
        part.restore(mark)
        raise
    for i, layer in enumerate(model.layers):
        for row in range(count):
            layer.append(first + row, k[i, row], v[i, row])


def visible(layer, window: int | None) -> list[dict[int, tuple[list, list]]]:
    """For each sequence: keys and values [heads, size] by position, of the tokens that the next one sees."""
    found = []
    for row, positions in enumerate(layer.key_positions().tolist()):
        first = 0 if window is None else max(layer.lengths.values[row] - window + 1, 0)
        slots = {p: slot for slot, p in enumerate(positions) if p >= first}
        keys, values = layer.stored(0)[row], layer.stored(1)[row]
        assert not keys.isnan().any()
        found.append({p: (keys[:, slot].tolist(), values[:, slot].tolist()) for p, slot in slots.items()})
    return found


def expected(layer) -> list[dict[int, tuple[list, list]]]:
    found = []
    for keys, values in zip(layer.keys, layer.values, strict=True):
        first = 0 if layer.window is None else max(len(keys) - layer.window + 1, 0)
        tokens = range(first, len(keys))
        found.append({p: (keys[p].tolist(), values[p].tolist()) for p in tokens})
    return found


def check_contents(cache, model: ListCache) -> None:
    assert cache.lengths == model.lengths
    for layer, wanted in zip(cache, model.layers, strict=True):
        assert visible(layer, wanted.window) == expected(wanted)


def check_counts(caches: list) -> None:
    """Pages are held by whom the tables say, and the rest is free."""
    for i, table in enumerate(caches[0].tables):
        pool = table.pool
        pool.settle()
        held = Counter(page for c in caches for row in c.tables[i].rows for page in row if page >= 0)
        assert [held[page] for page in range(pool.pages)] == pool.counts
        assert pool.free + len(held) == pool.pages
        assert sorted([*pool._free, *held]) == list(range(pool.pages))
    assert caches[0].free_pages + caches[0].used_pages == caches[0].pages


def check_tensors(cache) -> None:
    """The tensors for kernels say what the tables say."""
    assert cache[0].lengths.counts().tolist() == cache.lengths
    for layer in cache:
        assert layer.lengths.counts().tolist() == list(layer.lengths.values)
        assert layer.page_table.dtype == layer.lengths.counts().dtype == torch.int32
        for row, pages, length in zip(layer.table.rows, layer.page_table, layer.lengths.values, strict=True):
            count = -(-length // layer.table.pool.page_size)
            assert pages.tolist() == row + [-1] * (len(pages) - count)


class Pages(RuleBasedStateMachine):
    """Random work on caches that share a pool, and on lists."""

    @initialize(batch=st.integers(1, 3), size=st.sampled_from([1, 2, 4, 8]), pages=st.integers(1, 40))
    def begin(self, batch: int, size: int, pages: int) -> None:
        cache = new_cache(batch, MAX_SEQ, WINDOWS, HEADS, SIZE, page_size=size, pages=pages)
        self.pairs = [(cache, ListCache(batch, WINDOWS))]
        self.pools = [table.pool for table in cache.tables]

    def pair(self, data):
        return self.pairs[data.draw(st.integers(0, len(self.pairs) - 1))]

    @rule(data=st.data(), seq=st.sampled_from([1, 1, 2, 3, 7]))
    def append(self, data, seq: int) -> None:
        cache, model = self.pair(data)
        first = data.draw(st.integers(0, cache.batch - 1))
        count = data.draw(st.integers(1, cache.batch - first))
        before, free = cache.lengths, min(table.pool.free for table in cache.tables)
        try:
            append(cache, model, first, count, seq)
        except RunError:
            size = cache.page_size
            assert max(before) + seq > MAX_SEQ or free < count * (-(-seq // size) + 1)
            assert cache.lengths == before

    @rule(data=st.data())
    def fork(self, data) -> None:
        cache, model = self.pair(data)
        if len(self.pairs) < 4:
            chosen = data.draw(st.lists(st.integers(0, cache.batch - 1), min_size=1, max_size=3))
            self.pairs.append((cache.fork(chosen), model.fork(chosen)))

    @rule(data=st.data(), length=st.integers(0, MAX_SEQ))
    def truncate(self, data, length: int) -> None:
        cache, model = self.pair(data)
        try:
            cache.truncate(length)
        except RunError:
            assert any(n > 3 and length < n - 1 for n in model.lengths)
        else:
            model.truncate(length)

    @rule(data=st.data())
    def reset(self, data) -> None:
        cache, model = self.pair(data)
        cache.reset()
        model.reset()

    @rule(data=st.data())
    def drop(self, data) -> None:
        if len(self.pairs) > 1:
            del self.pairs[data.draw(st.integers(0, len(self.pairs) - 1))]

    @invariant()
    def the_contents_are_those_of_the_lists(self) -> None:
        for cache, model in self.pairs:
            check_contents(cache, model)

    @invariant()
    def every_page_is_held_as_often_as_it_is_counted(self) -> None:
        check_counts([cache for cache, _ in self.pairs])

    @invariant()
    def the_tensors_follow(self) -> None:
        for cache, _ in self.pairs:
            check_tensors(cache)

    def teardown(self) -> None:
        del self.pairs[:]
        assert all(pool.free == pool.pages for pool in self.pools)


Pages.TestCase.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None, report_multiple_bugs=False
)
test_pages_are_counted_and_hold_what_the_lists_hold = Pages.TestCase


@pytest.fixture
def cache():
    return new_cache(2, 64, (None,), HEADS, SIZE, page_size=4, pages=8)


def fill(cache, first: int, count: int, seq: int) -> None:
    append(cache, ListCache(cache.batch, (None,)), first, count, seq)


def test_a_sequence_takes_pages_as_it_grows(cache):
    used = []
    for _ in range(6):
        fill(cache, 0, 1, 2)
        used.append(cache.used_pages)
    assert used == [1, 1, 2, 2, 3, 3]
    assert cache[0].page_table[:, :4].tolist() == [[0, 1, 2, -1], [-1, -1, -1, -1]]


def test_a_fork_takes_a_page_only_when_it_writes(cache):
    fill(cache, 0, 1, 10)
    forks = cache.fork([0, 0])
    assert cache.used_pages == 3
    fill(forks, 0, 2, 1)  # the third page is not full
    assert cache.used_pages == 5
    fill(cache, 0, 1, 1)  # nobody else holds it any more
    assert cache.used_pages == 5
    del forks
    assert cache.used_pages == 3


def test_the_last_of_several_that_write_at_once_keeps_the_page():
    cache = new_cache(1, 64, (None,), HEADS, SIZE, page_size=4, pages=3)
    fill(cache, 0, 1, 2)
    cache = cache.fork([0, 0, 0])
    gc.collect()
    fill(cache, 0, 3, 1)
    assert cache.free_pages == 0


def test_a_window_gives_pages_back():
    cache = new_cache(1, 1000, (5,), HEADS, SIZE, page_size=4, pages=4)
    model = ListCache(1, (5,))
    for seq in [6, *[1] * 100, *[3] * 50]:
        append(cache, model, 0, 1, seq)
        check_contents(cache, model)
        assert cache.used_pages <= 3  # 5 tokens touch at most three pages of 4
    assert cache[0].page_table[0, 5].item() == -1


def test_a_fork_keeps_pages_that_the_other_has_left_behind():
    cache, model = new_cache(1, 64, (5,), HEADS, SIZE, page_size=4), ListCache(1, (5,))
    append(cache, model, 0, 1, 8)
    fork, other = cache.fork(0), model.fork([0])
    append(cache, model, 0, 1, 10)
    check_contents(fork, other)
    append(fork, other, 0, 1, 1)
    check_contents(fork, other)
    check_counts([cache, fork])


def test_pages_of_a_sequence_that_lie_in_order_are_not_copied(cache):
    fill(cache, 0, 1, 9)
    row = cache.rows(0)[0]
    assert row.stored(0).untyped_storage().data_ptr() == row.storage.keys.untyped_storage().data_ptr()
    torch.testing.assert_close(row.stored(0), cache[0].stored(0)[:1])


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("page_size", [16, 64])
def test_kernels_find_the_tokens_by_the_tensors_of_a_layer(page_size, window):
    cache, model = new_cache(2, 200, (window,), HEADS, SIZE, page_size=page_size), ListCache(2, (window,))
    append(cache, model, 0, 1, 100)
    append(cache, model, 1, 1, 37)
    cache, model = cache.fork([1, 0, 1]), model.fork([1, 0, 1])
    append(cache, model, 0, 3, 1)
    q = torch.randn(3, 2 * HEADS, SIZE)
    (layer,), (lists,) = cache, model.layers
    y = attention_decode.reference(
        q,
        layer.storage.keys,
        layer.storage.values,
        layer.lengths.counts(),
        pages=layer.page_table,
        window=window,
    )
    expected = torch.cat([lists.attend(row, q[row][None]) for row in range(3)])
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)


def test_the_tensors_for_kernels_stay_where_they_are(cache):
    layer = cache[0]
    before = layer.page_table.data_ptr(), layer.storage.keys.data_ptr()
    fill(cache, 0, 2, 9)
    fork = cache.fork([0, 1])
    fill(cache, 0, 2, 2)
    cache.truncate(3)
    cache.reset()
    assert before == (layer.page_table.data_ptr(), layer.storage.keys.data_ptr())
    assert fork[0].storage.keys.data_ptr() == layer.storage.keys.data_ptr()
    assert fork[0].page_table.data_ptr() != layer.page_table.data_ptr()


@pytest.mark.parametrize("max_seq", [1, 160, 200])
def test_the_pages_of_each_sequence_begin_where_kernels_are_compiled_for(max_seq):
    for cache in (made := new_cache(3, max_seq, (None,), HEADS, SIZE, page_size=16), made.fork([1, 0, 1])):
        assert [cache.rows(i)[0].page_table.data_ptr() % 16 for i in range(3)] == [0, 0, 0]
    assert made.pages == 3 * -(-max_seq // 16), "which takes no page more"


def test_nan_of_one_sequence_does_not_reach_the_next_that_gets_its_page(cache):
    nan = torch.full((1, 32, HEADS, SIZE), torch.nan)
    cache.rows(0)[0].append(nan, nan)
    cache.reset()
    fill(cache, 0, 2, 3)
    fill(cache, 1, 1, 4)
    assert not cache[0].stored(0).isnan().any()
    assert not cache[0].stored(1).isnan().any()


@pytest.mark.parametrize("shared", [False, True])
def test_running_out_of_pages_says_what_fits_and_changes_nothing(cache, shared):
    fill(cache, 0, 2, 10)  # 3 pages each, 2 slots left in the last
    forks = cache.fork([0, 1]) if shared else cache
    model = [layer.stored(0).clone() for layer in forks]
    lines = [
        "cache is out of pages: 20 more tokens for 2 sequences need 1[02] pages of 4, 2 of 8 are free",
        f"tokens that fit: {2 if shared else 6} in each of them, {4 if shared else 12} in all",
        "help: make a cache with more pages, append fewer tokens, or drop, reset or truncate sequences that share the pool",
    ]
    tables = forks[0].page_table.clone()
    with pytest.raises(RunError, match=r"\n  ".join(lines)):
        forks[0].append(*torch.randn(2, 2, 20, HEADS, SIZE))
    assert forks.lengths == [10, 10]
    assert torch.equal(tables, forks[0].page_table)
    assert all(torch.equal(a, b.stored(0)) for a, b in zip(model, forks, strict=True))
    check_counts([cache, forks] if shared else [cache])
    fits = 2 if shared else 6
    with pytest.raises(RunError, match=f"tokens that fit: {fits} in each of them"):
        fill(forks, 0, 2, fits + 1)
    fill(forks, 0, 2, fits)
    assert cache.free_pages == 0


def test_pages_behind_the_window_of_a_fork_are_taken_back_when_others_need_them():
    cache = new_cache(1, 64, (4,), HEADS, SIZE, page_size=4, pages=6)
    forks = [cache.fork(0) for _ in range(2)]
    fill(forks[0], 0, 1, 20)  # 5 pages, of which the next token sees one
    fill(forks[1], 0, 1, 16)
    assert [fork.lengths for fork in forks] == [[20], [16]]
    check_counts([cache, *forks])


def test_a_layer_that_is_behind_keeps_what_it_will_see():
    cache, model = new_cache(1, 40, (3, 3), HEADS, SIZE, page_size=1), ListCache(1, (3, 3))
    for chunk in (4, *[1] * 8):
        k, v = torch.randn(2, 1, chunk, HEADS, SIZE)
        cache[0].append(k, v)
        model.layers[0].append(0, k[0], v[0])
    for chunk in (4, 8):
        k, v = torch.randn(2, 1, chunk, HEADS, SIZE)
        cache[1].append(k, v)
        model.layers[1].append(0, k[0], v[0])
        check_contents(cache, model)


def test_a_paged_cache_says_how_many_pages_are_free(cache):
    fill(cache, 0, 1, 9)
    assert repr(cache) == "<Cache 1 layers, batch 2, max_seq 64, lengths [9, 0], 5 of 8 pages of 4 free>"


def test_cutting_into_pages_that_a_window_gave_back_is_refused():
    cache, model = new_cache(1, 64, (4,), HEADS, SIZE, page_size=4), ListCache(1, (4,))
    append(cache, model, 0, 1, 15)
    append(cache, model, 0, 1, 1)  # 15 tokens were there: the next one sees those from the 12th on
    cache.truncate(11)  # sees 8, 9, 10 of the third page
    with pytest.raises(
        RunError, match="the cache cannot be cut to 10 tokens: it has 11, and a window keeps only the last 4"
    ):
        cache.truncate(10)
    assert cache.lengths == [11]


@pytest.mark.parametrize("page_size", [0, 3, 12, -4, 2.0, True])
def test_a_page_size_that_is_no_power_of_two_is_refused(page_size):
    with pytest.raises(RunError, match=f"make_cache: page_size is {page_size!r}, expected a power of two"):
        new_cache(1, 8, page_size=page_size)


@pytest.mark.parametrize("pages", [0, -1, 1.5])
def test_a_number_of_pages_that_is_none_is_refused(pages):
    with pytest.raises(RunError, match=f"make_cache: pages is {pages!r}, expected a positive int"):
        new_cache(1, 8, page_size=4, pages=pages)


def test_pages_without_a_size_are_refused():
    with pytest.raises(RunError, match=r"page_size is None, expected a power of two\n.*or leave out pages"):
        new_cache(1, 8, pages=4)
