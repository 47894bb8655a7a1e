# SPDX-License-Identifier: Apache-2.0
"""Sessions: methods over shared weights, caches that belong to the caller, threads, and what a failing call leaves behind."""

import gc
import threading
import weakref
from pathlib import Path

import pytest
import torch
from cache_model import ListCache

import nnfront as nn
from nnfront import ops
from nnfront.backends.lowering import lower
from nnfront.errors import RunError
from nnfront.ir import parse
from nnfront.ops import register_extern
from nnfront.session import Session

CHECKPOINT = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"
ATTEND = """
def {name}[batch, seq: 1..64, max_seq: 1..64](
    q: input float32[batch, seq, 4, 8], kv: input float32[batch, seq, 2, 8],
    cache: state cache(2*layer(kv_heads=2, head_size=8, dtype=float32, batch=batch, max_seq=max_seq{window})),
) -> (float32[batch, seq, 4, 8], cache(2*layer(kv_heads=2, head_size=8, dtype=float32, batch=batch, max_seq=max_seq{window}))) {{
    layers: (layer(kv_heads=2, head_size=8, dtype=float32, batch=batch, max_seq=max_seq{window}),
             layer(kv_heads=2, head_size=8, dtype=float32, batch=batch, max_seq=max_seq{window})) = cache_split(cache)
    first: layer(kv_heads=2, head_size=8, dtype=float32, batch=batch, max_seq=max_seq{window}) = layers[0]
    second: layer(kv_heads=2, head_size=8, dtype=float32, batch=batch, max_seq=max_seq{window}) = layers[1]
    a: (float32[batch, seq, 4, 8], layer(kv_heads=2, head_size=8, dtype=float32, batch=batch, max_seq=max_seq{window})) = attention(q, kv, kv, first)
    y: float32[batch, seq, 4, 8] = a[0]
    first_1: layer(kv_heads=2, head_size=8, dtype=float32, batch=batch, max_seq=max_seq{window}) = a[1]
    b: (float32[batch, seq, 4, 8], layer(kv_heads=2, head_size=8, dtype=float32, batch=batch, max_seq=max_seq{window})) = attention(y, kv, kv, second)
    z: float32[batch, seq, 4, 8] = b[0]
    second_1: layer(kv_heads=2, head_size=8, dtype=float32, batch=batch, max_seq=max_seq{window}) = b[1]
    {extra}
    cache_1: cache(2*layer(kv_heads=2, head_size=8, dtype=float32, batch=batch, max_seq=max_seq{window})) = cache_join(first_1, second_1)
    result: (float32[batch, seq, 4, 8], cache(2*layer(kv_heads=2, head_size=8, dtype=float32, batch=batch, max_seq=max_seq{window}))) = (z, cache_1)
    return result
}}
"""


def attend(window: int | None = None, extra: str = "") -> Session:
    window_text = f", window={window}" if window else ""
    text = "".join(
        ATTEND.format(name=name, window=window_text, extra=extra) for name in ("prefill", "decode")
    )
    return Session(lower(parse(text)), {})


def inputs(batch: int, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, seq, 4, 8), torch.randn(batch, seq, 2, 8)


def expected(model: ListCache, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    for layer in model.layers:
        rows = []
        for row in range(len(q)):
            layer.append(row, kv[row], kv[row])
            rows.append(layer.attend(row, q[row]))
        q = torch.stack(rows)
    return q


@pytest.mark.parametrize("window", [None, 3])
def test_a_method_writes_the_cache_in_place_and_returns_its_result_alone(window):
    session, model = attend(window), ListCache(2, (window, window))
    cache = session.make_cache(batch=2, max_seq=20)
    for name, seq in (("prefill", 5), ("decode", 1), ("decode", 1), ("prefill", 7), ("decode", 1)):
        q, kv = inputs(2, seq)
        y = session[name](q, kv, cache)
        assert isinstance(y, torch.Tensor)
        torch.testing.assert_close(y.double(), expected(model, q, kv), atol=1e-5, rtol=1e-5)
    assert cache.lengths == model.lengths == [15, 15]


def test_a_row_of_a_cache_is_a_cache_for_a_method():
    session, model = attend(), ListCache(2, (None, None))
    cache = session.make_cache(batch=2, max_seq=20)
    for row, seq in ((0, 3), (1, 9)):
        q, kv = inputs(1, seq)
        single = ListCache(1, (None, None))
        y = session["prefill"](q, kv, cache.rows(row))
        torch.testing.assert_close(y.double(), expected(single, q, kv), atol=1e-5, rtol=1e-5)
        for layer, other in zip(model.layers, single.layers, strict=True):
            layer.keys[row], layer.values[row] = other.keys[0], other.values[0]
    q, kv = inputs(2, 1)
    y = session["decode"](q, kv, cache)
    torch.testing.assert_close(y.double(), expected(model, q, kv), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({}, "make_cache needs 'batch', 'max_seq'"),
        ({"batch": 2}, "make_cache needs 'max_seq'"),
        ({"batch": 2, "max_seq": 8, "seq": 1}, "make_cache: 'seq' is not a dim of the cache"),
        ({"batch": 2, "max_seq": 65}, "make_cache: 'max_seq' is 65, expected between 1 and 64"),
        ({"batch": 2, "max_seq": "8"}, "make_cache: 'max_seq' is '8', expected between 1 and 64"),
        ({"batch": -1, "max_seq": 8}, "make_cache: 'batch' is -1, expected at least 0"),
    ],
)
def test_make_cache_wants_every_dim_once(sizes, message):
    with pytest.raises(RunError) as caught:
        attend().make_cache(**sizes)
    assert caught.value.what == message


def test_without_a_cache_argument_there_is_none_to_make():
    with pytest.raises(RunError, match="no method takes a cache"):
        Session(lower(parse("def main[n](x: input float32[n]) -> float32[n] { return x }")), {}).make_cache()


def test_a_cache_of_another_shape_is_refused():
    session = attend()
    cache = attend(window=3).make_cache(batch=1, max_seq=8)
    with pytest.raises(RunError) as caught:
        session["decode"](*inputs(1, 1), cache)
    assert caught.value.what == "decode: argument 'cache' is a cache of another model"
    assert caught.value.details[:2] == (
        "got 2 layers of 2 heads of 8 float32, window 3",
        "expected 2 layers of 2 heads of 8 float32",
    )


@pytest.mark.parametrize(
    ("batch", "value", "message"),
    [
        (3, None, "decode: argument 'cache' batch is 'batch' = 2, but 'q' axis 0 already said 'batch' = 3"),
        (2, [], "decode: argument 'cache' is a list, expected a cache"),
    ],
)
def test_a_cache_argument_is_checked_like_others(batch, value, message):
    session = attend()
    cache = session.make_cache(batch=2, max_seq=8) if value is None else value
    with pytest.raises(RunError) as caught:
        session["decode"](*inputs(batch, 1), cache)
    assert caught.value.what == message


def test_a_cache_of_another_session_of_the_same_model_will_do():
    q, kv = inputs(1, 4)
    cache = attend().make_cache(batch=1, max_seq=8)
    torch.testing.assert_close(
        attend()["prefill"](q, kv, cache).double(),
        expected(ListCache(1, (None, None)), q, kv),
        atol=1e-5,
        rtol=1e-5,
    )


FAIL = 'd: () = extern(z, name="test_session.fail", out=type(()))'


@pytest.mark.parametrize("window", [None, 3])
def test_a_call_that_fails_half_way_leaves_the_cache_as_it_was(window):
    failing = [False]

    def fail(x):
        if failing[0]:
            raise ValueError("half way")
        return ()

    ops.control._EXTERNS.pop("test_session.fail", None)
    register_extern("test_session.fail", fail)
    session, model = attend(window, FAIL), ListCache(1, (window, window))
    cache = session.make_cache(batch=1, max_seq=20)
    q, kv = inputs(1, 2)
    session["prefill"](q, kv, cache)
    expected(model, q, kv)
    failing[0] = True
    with pytest.raises(RunError, match="ValueError: half way"):
        session["decode"](*inputs(1, 1), cache)
    failing[0] = False
    assert cache.lengths == [2]
    q, kv = inputs(1, 1)
    torch.testing.assert_close(
        session["decode"](q, kv, cache).double(), expected(model, q, kv), atol=1e-5, rtol=1e-5
    )


def test_a_failed_call_that_has_overwritten_a_window_resets_the_cache():
    session = attend(window=3)
    cache = session.make_cache(batch=1, max_seq=8)
    session["prefill"](*inputs(1, 5), cache)
    with pytest.raises(RunError, match="cache is full: 'max_seq' = 8 holds 5 tokens, 4 more do not fit"):
        session["prefill"](*inputs(1, 4), cache)
    assert cache.lengths == [5]  # nothing had been written yet


@pytest.mark.parametrize("flag", [True, False], ids=["in a branch", "outside"])
def test_an_error_inside_a_method_says_where(flag):
    text = """
    def main[n](flag: input bool, x: input float32[n], i: input int64[n]) -> float32[n] {
        r: float32[n] = if flag {
            y: float32[n] = take(x, i, axis=0)             # at model.embed (model.py:12)
            yield y
        } else { yield x }
        z: float32[n] = take(r, i, axis=0)                 # at model.embed (model.py:12)
        return z
    }
    """
    with pytest.raises(RunError) as caught:
        Session(lower(parse(text)), {})["main"](flag, torch.ones(2), torch.tensor([0, 7]))
    assert str(caught.value) == (
        "take failed with IndexError: index out of range in self\n"
        "  operands: float32[2], int64[2]\n"
        "  at model.embed in method 'main' (model.py:12)"
    )
    assert isinstance(caught.value.__cause__, IndexError)


LINEAR = """
def main[n](x: input float32[n, 64], w: weight float32[64, 64]) -> float32[n, 64] {
    y: float32[n, 64] = linear(x, w)
    z: float32[n, 64] = tanh(y)
    return z
}
"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_session_runs_in_several_threads(dtype):
    w = torch.randn(64, 64).to(dtype)
    text = LINEAR.replace("float32", str(dtype).removeprefix("torch."))
    run = Session(lower(parse(text)), {"w": w})["main"]
    xs = [torch.randn(n // 2 + 1, 64).to(dtype) for n in range(8)]
    alone = [run(x) for x in xs]
    results: list[list[torch.Tensor]] = [[] for _ in xs]

    def work(i: int) -> None:
        for _ in range(20):
            results[i].append(run(xs[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(xs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for x, expected, found in zip(xs, alone, results, strict=True):
        torch.testing.assert_close(expected, torch.tanh(x @ w.T))
        assert len(found) == 20
        assert all(torch.equal(y, expected) for y in found)


def test_two_sessions_share_one_set_of_weights():
    weights = {"w": torch.randn(64, 64)}
    first = Session(lower(parse(LINEAR)), weights)
    second = Session(lower(parse(LINEAR)), first.weights)
    assert second.weights["w"] is first.weights["w"] is weights["w"]


def test_the_weights_of_a_session_cannot_be_replaced():
    session = Session(lower(parse(LINEAR)), {"w": torch.randn(64, 64)})
    with pytest.raises(TypeError):
        session.weights["w"] = torch.zeros(64, 64)


def test_a_result_that_shares_memory_with_the_session_is_a_copy():
    text = """
    def main[n](x: input float32[n], w: weight float32[2, 3]) -> (float32[2, 3], float32[3, 2], float32[2], float32[3]) {
        t: float32[3, 2] = permute_dims(w, axes=(1, 0))
        flat: float32[6] = reshape(w, shape=(6,))
        parts: (float32[3], float32[3]) = split(flat, indices_or_sections=2)
        part: float32[3] = parts[1]
        r: (float32[2, 3], float32[3, 2], float32[2], float32[3]) = (w, t, const(float32[2], [1.0, 2.0]), part)
        return r
    }
    """
    w = torch.randn(2, 3)
    run = Session(lower(parse(text)), {"w": w})["main"]
    kept = w.clone()
    for result in run(torch.ones(1)):
        result.zero_()
    first, second, third, fourth = run(torch.ones(1))
    assert torch.equal(first, kept)
    assert torch.equal(second, kept.T)
    assert third.tolist() == [1.0, 2.0]
    assert torch.equal(fourth, kept[1])


def test_a_caller_may_write_to_any_result():
    text = """
    def main[n](flag: input bool, x: input float32[n]) -> {a: float32[n], b: float32[n], c: float32[n]} {
        a: float32[n] = exp(x)
        b: float32[n] = if flag { y: float32[n] = sin(a) yield y } else { yield a }
        c: float32[n] = cos(b)
        r: {a: float32[n], b: float32[n], c: float32[n]} = {a: a, b: b, c: c}
        return r
    }
    """
    run = Session(lower(parse(text)), {})["main"]
    for result in run(True, torch.ones(2)).values():
        result += 1
        assert not result.is_inference()


def test_a_call_keeps_nothing_alive():
    run = Session(lower(parse(LINEAR)), {"w": torch.randn(64, 64)})["main"]
    x = torch.randn(2, 64)
    y = run(x)
    references = [weakref.ref(x), weakref.ref(y)]
    del x, y
    gc.collect()
    assert [r() for r in references] == [None, None]


def test_a_cache_is_freed_without_the_garbage_collector():
    session = attend(window=3)
    cache = session.make_cache(batch=1, max_seq=40)
    session["prefill"](*inputs(1, 30), cache)
    buffer = weakref.ref(cache[0].storage.keys)
    gc.disable()
    try:
        del cache
        assert buffer() is None
    finally:
        gc.enable()


def test_a_method_that_is_not_there_lists_those_that_are():
    session = attend()
    with pytest.raises(
        RunError, match="there is no method 'forward'\n  help: methods are 'prefill', 'decode'"
    ):
        session["forward"]
    assert session.methods == ("prefill", "decode")
    assert list(session) == ["prefill", "decode"]
    assert len(session) == 2


def test_results_need_no_gradient_and_inputs_may():
    x = torch.randn(2, 64, requires_grad=True)
    y = Session(lower(parse(LINEAR)), {"w": torch.randn(64, 64, requires_grad=True)})["main"](x)
    assert not y.requires_grad


@pytest.mark.parametrize("quant", [None, "int8"])
def test_a_token_that_there_is_not_is_refused_where_it_is_read_and_the_cache_stays_as_it_was(quant):
    session = nn.LLM.load(CHECKPOINT, quant=quant).session
    cache = session.make_cache(batch=1, max_seq=8)
    session["prefill"](torch.arange(3)[None], cache)
    expected = session["decode"](torch.tensor([[5]]), cache)
    cache.truncate(3)
    for token in (1 << 20, -1):
        with pytest.raises(RunError, match="index out of range") as raised:
            session["decode"](torch.tensor([[token]]), cache)
        assert "embed" in str(raised.value.where)
        assert cache.lengths == [3]
    assert torch.equal(session["decode"](torch.tensor([[5]]), cache), expected)
