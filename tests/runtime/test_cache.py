# SPDX-License-Identifier: Apache-2.0
"""Both caches, contiguous and paged, against a model of lists, through the attention reference and through the CPU's kernel."""

import weakref

import pytest
import torch
from cache_model import ListCache, exact_in_codes, new_cache
from few_of import few_of
from hypothesis import given, settings
from hypothesis import strategies as st

from nnfront import ops
from nnfront.backends.cpu.attention import cached
from nnfront.errors import RunError
from nnfront.lower import Run, Structure

HEADS, GROUPS, SIZE = 4, 2, 4

# None: the contiguous cache.
PAGE_SIZES = [None, 1, 4, 64]
both = pytest.mark.parametrize(
    "page_size", PAGE_SIZES, ids=lambda size: "contiguous" if size is None else f"pages of {size}"
)


def attention(layer, q, k, v, use_kernel: bool, **attrs):
    if use_kernel:
        run = Run("attention_cached", "attention", (), Structure(fields=(Structure(0), Structure(1))), attrs)
        return cached(run)(q, k, v, layer, None)[0]
    return ops.attention.run((q, k, v, layer, None), attrs)[0]


def tokens(batch: int, seq: int, dtype=torch.float32):
    shapes = [(batch, seq, HEADS, SIZE), (batch, seq, GROUPS, SIZE), (batch, seq, GROUPS, SIZE)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def exact_tokens(batch: int, seq: int):
    """q, and k and v that codes of 8 bits hold."""
    return torch.randn(batch, seq, HEADS, SIZE), *(exact_in_codes(batch, seq, GROUPS, SIZE) for _ in range(2))


def step(cache, model: ListCache, first: int, count: int, seq: int, use_kernel: bool, **attrs) -> None:
    """Append and attend in every layer, for some sequences in a row, and compare with the model."""
    part = cache.rows(first, first + count)
    for layer, expected in zip(part, model.layers, strict=True):
        q, k, v = exact_tokens(count, seq)
        for row in range(count):
            expected.append(first + row, k[row], v[row])
        y = attention(layer, q, k, v, use_kernel, **attrs)
        for row in range(count):
            wanted = expected.attend(first + row, q[row], attrs.get("window"), attrs.get("scale"))
            torch.testing.assert_close(y[row].double(), wanted, atol=1e-5, rtol=1e-5)
    assert cache.lengths == model.lengths


window = st.sampled_from([None, 1, 2, 3, 5, 40])


@settings(max_examples=50, deadline=None)
@given(
    st.data(),
    st.integers(1, 3),
    st.tuples(window, window),
    window,
    st.booleans(),
    st.sampled_from([*PAGE_SIZES, 2, 8]),
    st.sampled_from([None, "float8_e4m3fn"]),
)
def test_any_history_means_what_the_lists_mean(
    data, batch, windows, own_window, use_kernel, page_size, stored_as
):
    cache = new_cache(batch, 30, windows, GROUPS, SIZE, page_size=page_size, stored_as=stored_as)
    model = ListCache(batch, windows)
    for _ in range(data.draw(st.integers(1, 6))):
        match data.draw(st.sampled_from(["all", "all", "some", "some", "reset", "truncate", "fork"])):
            case "all":
                seq = data.draw(st.sampled_from([1, 1, 2, 4, 9]))
                if max(model.lengths) + seq <= 30:
                    step(cache, model, 0, batch, seq, use_kernel, window=own_window)
            case "some":
                first = data.draw(st.integers(0, batch - 1))
                count = data.draw(st.integers(1, batch - first))
                seq = data.draw(st.sampled_from([1, 2, 4, 9]))
                if max(model.lengths[first : first + count]) + seq <= 30:
                    step(cache, model, first, count, seq, use_kernel, window=own_window)
            case "reset":
                cache.reset()
                model.reset()
            case "fork":
                chosen = data.draw(st.lists(st.integers(0, cache.batch - 1), min_size=batch, max_size=batch))
                cache, model = cache.fork(chosen), model.fork(chosen)
            case "truncate":
                length = data.draw(st.integers(0, 30))
                try:
                    cache.truncate(length)
                except RunError:
                    dropped = [n - length for n in model.lengths if n > length]
                    limit = min(w for w in windows if w is not None)
                    assert max(dropped) > 1
                    assert max(model.lengths) > limit
                else:
                    model.truncate(length)
            case _:
                raise AssertionError
        assert cache.lengths == model.lengths


@both
@pytest.mark.parametrize("use_kernel", [True, False], ids=["kernel", "reference"])
def test_sequences_filled_one_by_one_decode_together(use_kernel, page_size):
    cache, model = new_cache(3, 20, (None, 4), page_size=page_size), ListCache(3, (None, 4))
    for row, seq in enumerate((5, 1, 11)):
        step(cache, model, row, 1, seq, use_kernel)
    for _ in range(6):
        step(cache, model, 0, 3, 1, use_kernel)
    assert cache.lengths == [11, 7, 17]
    assert cache.length(2) == 17


@both
@pytest.mark.parametrize("use_kernel", [True, False], ids=["kernel", "reference"])
@pytest.mark.parametrize("chunk", few_of([1, 3, 4, 5, 16, 50], 3))
def test_a_long_prefill_over_a_full_window_is_right(chunk, use_kernel, page_size):
    cache, model = new_cache(2, 60, (4,), page_size=page_size), ListCache(2, (4,))
    done = 0
    while done + chunk <= 60:
        step(cache, model, 0, 2, chunk, use_kernel)
        done += chunk


def test_a_window_limits_the_memory_to_itself():
    full, windowed = new_cache(2, 1000), new_cache(2, 1000, (10,))
    assert windowed.nbytes * 100 == full.nbytes
    for _ in range(5):
        q, k, v = tokens(2, 100)
        attention(windowed[0], q, k, v, use_kernel=True)
        assert windowed[0].stored(0).shape[2] == 10  # the chunk is given back


def test_only_one_layer_keeps_the_chunk_that_turned_its_window_over():
    cache = new_cache(1, 100, (4, 4))
    for layer in cache:
        _, k, v = tokens(1, 20)
        layer.append(k, v)
    assert [layer.stored(0).shape[2] for layer in cache] == [4, 20]


def test_equal_lengths_are_views_of_the_buffer():
    layer = new_cache(2, 16)[0]
    _, k, v = tokens(2, 3)
    layer.append(k, v)
    assert layer.stored(0).data_ptr() == layer.stored(0).data_ptr()
    assert layer.stored(0)._base is layer.stored(1)._base or layer.stored(0)._base is not None
    torch.testing.assert_close(layer.stored(0), k.transpose(1, 2))
    torch.testing.assert_close(layer.stored(1), v.transpose(1, 2))


@both
def test_rows_share_storage_and_lengths_with_the_whole(page_size):
    cache = new_cache(3, 8, page_size=page_size)
    row = cache.rows(1)
    _, k, v = tokens(1, 2)
    row[0].append(k, v)
    assert cache.lengths == [0, 2, 0]
    torch.testing.assert_close(cache[0].stored(0)[1:2], k.transpose(1, 2))
    row.reset()
    assert cache.lengths == [0, 0, 0]


@both
def test_positions_and_key_positions_tell_sequences_apart(page_size):
    cache = new_cache(2, 8, page_size=page_size)
    _, k, v = tokens(1, 3)
    cache.rows(1)[0].append(k, v)
    layer = cache[0]
    assert layer.positions(2).tolist() == [[0, 1], [3, 4]]
    assert layer.key_positions().tolist() == [[-1, -1, -1], [0, 1, 2]]


@both
def test_a_full_cache_says_what_fits_and_writes_nothing(page_size):
    cache = new_cache(1, 512, page_size=page_size)
    _, k, v = tokens(1, 500)
    cache[0].append(k, v)
    _, k, v = tokens(1, 20)
    with pytest.raises(RunError, match="cache is full: 'max_seq' = 512 holds 500 tokens, 20 more do not fit"):
        cache[0].append(k, v)
    assert cache.lengths == [500]
    cache[0].append(k[:, :12], v[:, :12])
    assert cache.lengths == [512]


@pytest.mark.parametrize("length", [0, 3, 7, 9])
def test_truncating_below_what_a_window_keeps_is_refused(length):
    cache = new_cache(1, 30, (4,))
    _, k, v = tokens(1, 11)
    cache[0].append(k, v)
    message = f"the cache cannot be cut to {length} tokens: it has 11, and a window keeps only the last 4"
    with pytest.raises(RunError, match=message):
        cache.truncate(length)
    assert cache.lengths == [11]


@both
@pytest.mark.parametrize(("first", "stop"), [(-1, None), (2, None), (0, 3), (1, 1)])
def test_rows_outside_the_batch_are_refused(first, stop, page_size):
    with pytest.raises(RunError, match="are not in a cache of 2 sequences"):
        new_cache(2, 4, page_size=page_size).rows(first, stop)


@both
@pytest.mark.parametrize("seq", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_as_exact_as_they_can_be(dtype, seq, page_size):
    name = str(dtype).removeprefix("torch.")
    cache, model = new_cache(2, 64, (None,), GROUPS, SIZE, name, page_size), ListCache(2, (None,))
    for length in (5, seq):
        q, k, v = tokens(2, length, dtype)
        y = attention(cache[0], q, k, v, use_kernel=True)
        for row in range(2):
            model.layers[0].append(row, k[row], v[row])
            wanted = model.layers[0].attend(row, q[row])
            # Torch rounds the weights of a half type before it sums: one more rounding than the reference.
            tolerance = 4 * torch.finfo(dtype).eps
            torch.testing.assert_close(y[row].double(), wanted, atol=tolerance, rtol=tolerance)


@both
def test_a_scale_of_the_call_is_used(page_size):
    cache, model = new_cache(2, 30, page_size=page_size), ListCache(2, (None,))
    for seq in (3, 1, 5, 12):
        step(cache, model, 0, 2, seq, True, scale=0.3)


@both
def test_an_empty_chunk_changes_nothing(page_size):
    cache = new_cache(2, 30, page_size=page_size)
    q, k, v = tokens(2, 0)
    assert attention(cache[0], q, k, v, use_kernel=True).shape == (2, 0, HEADS, SIZE)
    assert cache.lengths == [0, 0]


@both
def test_a_clone_has_the_same_tokens_in_buffers_of_its_own(page_size):
    cache = new_cache(batch=3, max_seq=8, windows=(None, None), page_size=page_size)
    for part in cache:
        part.append(*tokens(3, 2)[1:])
    for original in (cache, cache.rows(1, 3)):
        clone, before = original.clone(), [x.stored(0).clone() for x in original]
        assert clone.lengths == original.lengths
        for part in clone:
            part.append(*tokens(clone.batch, 1)[1:])
            part.stored(0).zero_()
        assert [n - 1 for n in clone.lengths] == original.lengths
        assert all(torch.equal(x.stored(0), kept) for x, kept in zip(original, before, strict=True))


@both
def test_a_fork_has_the_same_tokens_and_goes_its_own_way(page_size):
    pages = None if page_size is None else 100  # more than the first two sequences ever need
    cache = new_cache(2, 20, (None, 3), page_size=page_size, pages=pages)
    model = ListCache(2, (None, 3))
    step(cache, model, 0, 2, 5, True)
    step(cache, model, 1, 1, 3, True)
    fork, other = cache.fork([1, 0, 1]), model.fork([1, 0, 1])
    assert fork.lengths == [8, 5, 8]
    for seq in (1, 4, 1):
        step(cache, model, 0, 2, seq, True)
        step(fork, other, 0, 3, seq, True)
        step(fork, other, 1, 2, seq, True)
    single = cache.rows(1).fork(0)
    assert single.lengths == [14]
    step(single, model.fork([1]), 0, 1, 2, True)
    assert cache.lengths == [11, 14]


@both
@pytest.mark.parametrize("sequences", [-1, 2, [0, 5]])
def test_a_fork_of_no_sequence_of_the_cache_is_refused(sequences, page_size):
    cache = new_cache(2, 4, page_size=page_size)
    with pytest.raises(RunError, match=r"sequence (-1|2|5) is not in a cache of 2 sequences"):
        cache.fork(sequences)
    with pytest.raises(RunError, match="fork needs at least one sequence"):
        cache.fork([])


@both
def test_a_mark_is_what_a_failed_call_goes_back_to(page_size):
    cache, model = new_cache(2, 20, (None, 4), page_size=page_size), ListCache(2, (None, 4))
    step(cache, model, 0, 2, 3, True)
    step(cache, model, 1, 1, 2, True)
    mark = cache.mark()
    _, k, v = tokens(2, 1)
    cache[0].append(k, v)  # the second layer fails
    cache.restore(mark)
    assert [layer.lengths.values for layer in cache] == [(3, 5), (3, 5)]
    step(cache, model, 0, 2, 2, True)


@both
def test_the_lengths_are_a_tensor_as_well(page_size):
    cache, model = new_cache(3, 20, (None, 4), page_size=page_size), ListCache(3, (None, 4))
    step(cache, model, 0, 3, 3, True)
    step(cache, model, 1, 1, 6, True)
    assert cache[0].lengths.counts().dtype == torch.int32
    assert cache[0].lengths.counts().tolist() == [3, 9, 3]
    assert cache.rows(1, 3)[0].lengths.counts().tolist() == [9, 3]
    cache.rows(1).truncate(8)
    assert cache[0].lengths.counts().tolist() == [3, 8, 3]
    cache.reset()
    assert cache[0].lengths.counts().tolist() == [0, 0, 0]


@both
def test_a_batch_may_be_empty(page_size):
    cache = new_cache(0, 8, (None, 2), page_size=page_size)
    for part in (cache, cache.clone()):
        for layer in part:
            assert attention(layer, *tokens(0, 3), use_kernel=True).shape == (0, 3, HEADS, SIZE)
            assert attention(layer, *tokens(0, 1), use_kernel=False).shape == (0, 1, HEADS, SIZE)
        part.reset()
        assert part.lengths == part[0].lengths.counts().tolist() == []


@both
def test_a_prefix_that_stays_does_not_keep_what_its_forks_derived(page_size):
    prefix = new_cache(2, 20, page_size=page_size)
    prefix[0].append(*tokens(2, 5)[1:])
    fork = prefix.fork([0, 1])
    derived = weakref.ref(fork[0].lengths.positions(3))  # remembered, as masks are
    assert derived() is not None
    del fork
    assert derived() is None
