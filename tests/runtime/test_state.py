# SPDX-License-Identifier: Apache-2.0
"""Layers of several kinds in one cache: keys and values, a window, and what is kept of whole sequences."""

import pytest
import torch

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import RunError

SIZE, HEADS, WIDTH = 8, 2, 3


class Recurrent(nn.Module):
    """y = x + the sum of all so far, kept as `ssm`, + the two inputs before, kept as `conv`."""

    def forward(self, x, cache):
        _, seq, _ = x.shape
        before = op.cache_read(cache, "conv")
        total = op.cache_read(cache, "ssm")
        kept = op.concat([before, op.permute_dims(x, [0, 2, 1])], dim=2)
        steps = op.cumsum(x, axis=1)
        inputs = op.permute_dims(kept[:, :, :-2] + kept[:, :, 1:-1], [0, 2, 1])
        y = x + steps + op.reshape(total, (x.shape[0], 1, SIZE)) + inputs
        op.cache_write(cache, "conv", kept[:, :, -(WIDTH - 1) :], seq)
        op.cache_write(cache, "ssm", total + op.sum(x, axis=1), seq)
        return y


class Hybrid(nn.Module):
    def __init__(self):
        self.recurrent = Recurrent()
        self.qkv = nn.Linear(SIZE, 3 * SIZE, bias=False)

    def step(self, x, cache):
        x = self.recurrent(x, cache[0])
        batch, seq, _ = x.shape
        q, k, v = (
            op.reshape(part, (batch, seq, HEADS, SIZE // HEADS)) for part in op.split(self.qkv(x), 3, -1)
        )
        for layer in (cache[1], cache[2]):
            q = op.attention(q, k, v, cache=layer)
        return op.reshape(q, (batch, seq, SIZE))


def state_spec() -> spec.State:
    kept = {"conv": spec.Tensor([SIZE, WIDTH - 1]), "ssm": spec.Tensor([SIZE])}
    size = SIZE // HEADS
    return spec.State([spec.Layer(per_sequence=kept), spec.KV(HEADS, size), spec.KV(HEADS, size, window=4)])


@pytest.fixture(scope="module")
def session():
    torch.manual_seed(0)
    model = Hybrid()
    ir = model.export({"step": {"x": spec.Tensor(["batch", "seq", SIZE]), "cache": state_spec()}})
    assert str(nn.ir.parse(str(ir))) == str(ir)
    ir = nn.passes.lift_transform_params(ir, shared_transform=True)
    return nn.compile(ir).load({"qkv.weight": torch.randn(3 * SIZE, SIZE)})


kinds = pytest.mark.parametrize("options", [{}, {"page_size": 4}], ids=["contiguous", "paged"])


@kinds
def test_tokens_one_by_one_give_what_they_give_at_once(session, options):
    x = torch.randn(2, 11, SIZE)
    once, each = (session.make_cache(batch=2, max_seq=16, **options) for _ in range(2))
    expected = session["step"](x, once)
    got = torch.cat([session["step"](part, each) for part in x.split([3, 1, 1, 4, 1, 1], 1)], 1)
    torch.testing.assert_close(got, expected)
    assert once.lengths == each.lengths == [11, 11]


@kinds
def test_rows_and_forks_have_what_the_whole_has(session, options):
    x = torch.randn(2, 9, SIZE)
    whole, rows = (session.make_cache(batch=2, max_seq=16, **options) for _ in range(2))
    for i, n in enumerate((5, 3)):
        session["step"](x[i : i + 1, :n], rows.rows(i))
    fork = rows.fork([1, 0, 1])
    y = session["step"](x[[1, 0, 1], 5:6], fork)
    for row, (i, n) in enumerate(((1, 3), (0, 5), (1, 3))):
        whole.reset()
        session["step"](x[[i, i], :n], whole)
        torch.testing.assert_close(y[row], session["step"](x[[i, i], 5:6], whole)[0])
    assert rows.lengths == [5, 3]


@kinds
def test_a_snapshot_brings_back_what_was_there(session, options):
    cache = session.make_cache(batch=2, max_seq=32, **options)
    x = torch.randn(2, 20, SIZE)
    session["step"](x[:, :6], cache)
    snapshot = cache.snapshot()
    first = session["step"](x[:, 6:16], cache)
    with pytest.raises(RunError, match="cannot be cut to 7 tokens: it has 16"):
        cache.truncate(7)
    cache.restore(snapshot)
    assert cache.lengths == [6, 6]
    torch.testing.assert_close(session["step"](x[:, 6:16], cache), first)
    cache.truncate(6)
    torch.testing.assert_close(session["step"](x[:, 6:16], cache), first)


class Failing(Hybrid):
    """Fails behind each layer, one after the other, as `countdown` says."""

    def step(self, x, cache):
        x = op.extern(
            "test_state.layer", [self.recurrent(x, cache[0])], nn.Tensor.placeholder(x.shape, "float32")
        )
        batch, seq, _ = x.shape
        q, k, v = (
            op.reshape(part, (batch, seq, HEADS, SIZE // HEADS)) for part in op.split(self.qkv(x), 3, -1)
        )
        for layer in (cache[1], cache[2], cache[2]):
            q = op.attention(q, k, v, cache=layer)
            q = op.extern("test_state.layer", [q], nn.Tensor.placeholder(q.shape, "float32"))
        return op.reshape(q, (batch, seq, SIZE))


def state_of(cache):
    """All that the next token can see: positions and tokens of each layer, and what is kept of sequences."""
    found = [cache.lengths]
    for layer in cache:
        found += [layer.read(buffer.name).clone() for buffer in layer.type.per_sequence]
        positions = layer.key_positions() if layer.type.per_token else ()
        for row, here in enumerate(positions):
            seen = here > (-1 if layer.window is None else layer.lengths.values[row] - layer.window)
            found += [layer.stored(i)[row][:, seen].clone() for i in range(len(layer.type.per_token))]
    return found


@kinds
@pytest.mark.parametrize("seq", [1, 3, 9])
@pytest.mark.parametrize("at", range(4))
def test_a_call_that_fails_behind_any_layer_leaves_every_kind_as_it_was(options, seq, at, monkeypatch):
    model = Failing()
    ir = model.export({"step": {"x": spec.Tensor(["batch", "seq", SIZE]), "cache": state_spec()}})
    left = []

    def layer(x):
        left.append(None)
        if len(left) == at + 1:
            raise ValueError("in between")
        return x

    nn.register_extern("test_state.layer", layer)
    try:
        session = nn.compile(ir).load({"qkv.weight": torch.randn(3 * SIZE, SIZE)})
        cache = session.make_cache(batch=2, max_seq=32, **options)
        for i, n in enumerate((5, 11)):
            for storage, buffer in ((x, b) for x in cache.rows(i) for b in x.type.per_sequence):
                storage.write(buffer.name, torch.randn(1, *buffer.shape), n)
            for each in cache.rows(i)[1:]:
                each.append(*(torch.randn(1, n, *b.shape) for b in each.type.per_token))
        before = state_of(cache)
        with pytest.raises(Exception, match="in between"):
            session["step"](torch.randn(2, seq, SIZE), cache)
        torch.testing.assert_close(state_of(cache), before, rtol=0, atol=0, equal_nan=True)
    finally:
        del nn.ops.control._EXTERNS["test_state.layer"]


def test_what_only_the_cache_reads_becomes_its_buffer(session, monkeypatch):
    runs = [line for line in str(session.program).splitlines() if "cache_write" in line]
    assert runs
    cache = session.make_cache(batch=2, max_seq=16)
    session["step"](torch.randn(2, 3, SIZE), cache)
    written = []
    write = type(cache[0].fixed["ssm"]).write

    def seen(self, value, seq, max_seq, *, take_over=False):
        write(self, value, seq, max_seq, take_over=take_over)
        written.append((self.tensor.data_ptr() == value.data_ptr(), take_over))

    monkeypatch.setattr(type(cache[0].fixed["ssm"]), "write", seen)
    session["step"](torch.randn(2, 1, SIZE), cache)
    # The sum is a tensor of its own; the inputs are the end of a longer tensor, of which the rest would stay in memory.
    assert sorted(written) == [(False, False), (True, True)]


def test_a_tensor_that_a_caller_got_is_not_written_later(session):
    cache = session.make_cache(batch=2, max_seq=16)
    session["step"](torch.randn(2, 3, SIZE), cache)
    seen = cache[0].read("ssm")
    before = seen.clone()
    session["step"](torch.randn(1, 2, SIZE), cache.rows(1))
    cache.rows(0).reset()
    cache.reset()
    assert torch.equal(seen, before)
