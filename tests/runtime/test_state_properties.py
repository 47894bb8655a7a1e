# SPDX-License-Identifier: Apache-2.0
"""Random operations on caches whose layers keep everything, against lists: the tokens that each sequence was given, and sums over them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nnfront.errors import RunError
from nnfront.lower import Buffer, StateLayerType, StateType, kv_layer
from nnfront.state.contiguous import make_cache

ROOM, WINDOW, SIZE = 16, 4, 2
SUM = Buffer("sum", (SIZE,), "float32")


def new_cache(batch, **options):
    layers = (
        kv_layer(1, SIZE, "float32", batch, ROOM),
        kv_layer(1, SIZE, "float32", batch, ROOM, WINDOW),
        StateLayerType((Buffer("latent", (SIZE,), "float32"),), (SUM,), batch, ROOM),
        StateLayerType((), (SUM,), batch, ROOM),
    )
    return make_cache(StateType(layers), {}, **options)


def append(cache, x, until=None):
    """Give tokens [batch, seq, size] to each storage; raise between two of them, the one of this index first."""
    done = 0
    for layer in cache:
        if layer.type.per_token:
            parts = [x[:, :, None] if len(b.shape) == 2 else x for b in layer.type.per_token]
            layer.append(*parts)
            layer.attended()
            done += 1
            if done == until:
                raise ValueError("in between")
        for name in layer.fixed:
            layer.write(name, layer.read(name) + x.sum(1), x.shape[1])
            done += 1
            if done == until:
                raise ValueError("in between")


def check(cache, model):
    """What the next token of each sequence sees is what the lists say."""
    assert cache.lengths == [len(tokens) for tokens in model]
    assert cache.uneven() is None
    for layer in cache:
        for row, tokens in enumerate(model):
            first = 0 if layer.window is None else max(len(tokens) - layer.window + 1, 0)
            wanted = torch.stack(tokens) if tokens else torch.zeros(0, SIZE)
            for name in layer.fixed:
                torch.testing.assert_close(layer.read(name)[row], wanted.sum(0), rtol=1e-5, atol=1e-5)
            for i in range(len(layer.type.per_token)):
                at = layer.key_positions()[row].tolist()
                stored = layer.stored(i)[row].reshape(len(at), SIZE)
                slots = [at.index(position) for position in range(first, len(tokens))]
                torch.testing.assert_close(stored[slots], wanted[first:], rtol=0, atol=0)


def refusal(call):
    """What a call that is refused says; None if it is not."""
    try:
        call()
    except RunError as error:
        return error.what
    return None


@settings(max_examples=20, deadline=None)
@given(st.data())
def test_a_state_is_what_its_tokens_make_it(data):
    draw = data.draw
    torch.manual_seed(draw(st.integers(0, 1 << 16)))
    options = draw(st.sampled_from([{}, {"page_size": 2}, {"stored_as": "float8_e4m3fn"}]))
    cache, model, snapshots = new_cache(2, **options), [[], []], []
    for _ in range(draw(st.integers(1, 9))):
        what = draw(
            st.sampled_from(
                ["append", "append", "fail", "rows", "fork", "snapshot", "restore", "truncate", "reset"]
            )
        )
        seq = draw(st.sampled_from([1, 1, 2, 6]))
        x = torch.randint(0, 2, (cache.batch, seq, SIZE)).float() * 448  # what 8 bits hold
        fits = max(map(len, model)) + seq <= ROOM
        if what == "append" and fits:
            append(cache, x)
            model = [tokens + list(new) for tokens, new in zip(model, x, strict=True)]
        elif what == "fail" and fits:
            mark = cache.mark()
            with pytest.raises(ValueError, match="in between"):
                append(cache, x, draw(st.integers(1, 5)))
            cache.restore(mark)
        elif what == "rows":
            row = draw(st.integers(0, cache.batch - 1))
            if len(model[row]) + seq <= ROOM:
                append(cache.rows(row), x[row : row + 1])
                model[row] = model[row] + list(x[row])
        elif what == "fork":
            chosen = draw(st.lists(st.integers(0, cache.batch - 1), min_size=1, max_size=3))
            cache, model, snapshots = cache.fork(chosen), [list(model[i]) for i in chosen], []
        elif what == "snapshot":
            snapshots.append((cache.snapshot(), [list(tokens) for tokens in model]))
        elif what == "restore" and snapshots:
            snapshot, then = draw(st.sampled_from(snapshots))
            refused = refusal(lambda c=cache, s=snapshot: c.restore(s))
            if refused is None:
                model = [list(tokens) for tokens in then]
            else:
                assert refused == "the cache cannot go back to its snapshot"
                assert "page_size" not in options
        elif what == "truncate":
            length = draw(st.integers(0, ROOM))
            refused = refusal(lambda c=cache, n=length: c.truncate(n))
            if refused is None:
                model = [tokens[:length] for tokens in model]
            else:
                assert refused.startswith("the cache cannot be cut to")
        elif what == "reset":
            cache.reset()
            model = [[] for _ in model]
        check(cache, model)


def test_a_snapshot_of_tokens_that_were_cut_off_is_refused():
    cache = new_cache(1)
    append(cache, torch.ones(1, 5, SIZE))
    snapshot = cache.snapshot()
    assert snapshot.nbytes == 2 * SIZE * 4 + 2 * WINDOW * SIZE * 4
    cache.reset()
    with pytest.raises(RunError) as caught:
        cache.restore(snapshot)
    assert str(caught.value) == (
        "the cache cannot go back to its snapshot\n"
        "  the snapshot holds [5] tokens, and the cache has been cut to fewer since\n"
        "  help: keep a clone: cache.clone()"
    )


def test_a_state_does_not_go_back_past_its_last_snapshot():
    cache = new_cache(1)
    append(cache, torch.ones(1, 2, SIZE))
    snapshot = cache.snapshot()
    append(cache, torch.ones(1, 1, SIZE))
    with pytest.raises(RunError) as caught:
        cache.truncate(1)
    assert str(caught.value) == (
        "the cache cannot be cut to 1 tokens: it has 3, and layer 2 keeps 'sum' only as of the last one\n"
        "  its last snapshot holds [2]\n"
        "  help: mark = cache.snapshot() where it may have to go back to, and cache.restore(mark)"
    )
    cache.truncate(2)
    assert cache.lengths == list(snapshot.lengths.values)
