# SPDX-License-Identifier: Apache-2.0
"""New values for weights of a running session: what a fresh load would give, nothing else touched, all or nothing."""

import gc
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from patience import HANGS_SECONDS
from safetensors.torch import save_file

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import LoadError


class Model(nn.Module):
    """One of each: fused, turned, quantised alone and with another, read as it is, as it is and in a formula, tied."""

    def __init__(self):
        self.embed = nn.Embedding(8, 8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight
        self.q, self.k, self.a, self.b, self.c, self.raw, self.both = (
            nn.Linear(8, 8, bias=False) for _ in range(7)
        )
        self.qk = op.concat([self.q.weight, self.k.weight], dim=0)
        self.turned = op.permute_dims(self.both.weight) * 2.0
        self.ab, self.ab_scale = op.quantize(op.concat([self.a.weight, self.b.weight], dim=0))
        self.c8, self.c_scale = op.quantize(self.c.weight)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + op.sum(op.linear(x, self.qk), axis=-1, keepdims=True) + op.matmul(x, self.turned)
        x = x + op.sum(op.linear(x, op.dequantize(self.ab, self.ab_scale)), axis=-1, keepdims=True)
        x = op.linear(x, op.dequantize(self.c8, self.c_scale))
        return self.head(self.raw(self.both(x)))

    def first(self, tokens):
        return self.raw(self.embed(tokens))


NAMES = ["embed.weight", *(f"{n}.weight" for n in ("q", "k", "a", "b", "c", "raw", "both"))]
TOKENS = {"tokens": spec.Tensor(["n"], "int64")}
EXECUTABLE = nn.compile(
    nn.passes.lift_transform_params(
        Model().export({"forward": TOKENS, "first": TOKENS}), shared_transform=True
    )
)
IDS = torch.arange(8)
MADE_OF = {
    "embed.weight": {"embed.weight"},
    "q.weight": {"qk"},
    "k.weight": {"qk"},
    "a.weight": {"ab", "ab_scale"},
    "b.weight": {"ab", "ab_scale"},
    "c.weight": {"c8", "c_scale"},
    "raw.weight": {"raw.weight"},
    "both.weight": {"both.weight", "turned"},
}


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(8, 8, generator=generator) for name in NAMES}


def assert_as_loaded(session, expected: dict[str, torch.Tensor]) -> None:
    """The session holds and computes, bit for bit, what one made of these weights does."""
    fresh = EXECUTABLE.load(expected)
    assert session.weights.keys() == fresh.weights.keys()
    for name, value in fresh.weights.items():
        assert torch.equal(session.weights[name], value), name
    for method in fresh:
        assert torch.equal(session[method](IDS), fresh[method](IDS)), method


@pytest.fixture(params=["a dict", "a checkpoint", "bound results"])
def session(request, tmp_path: Path):
    if request.param == "a checkpoint":
        save_file(weights(), tmp_path / "model.safetensors")
        yield EXECUTABLE.load(nn.Checkpoint(tmp_path))
    elif request.param == "a dict":
        held = weights()
        yield EXECUTABLE.load(held)
        del held
    else:
        session = EXECUTABLE.bind(EXECUTABLE.transform_params(weights()), weights())
        yield session


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("a.weight", "b.weight")])
def test_exactly_what_is_made_of_a_weight_is_made_again(session, name: str):
    before = dict(session.weights)
    new = weights(1)[name]
    assert set(session.update({name: new})) == MADE_OF[name]
    for other, value in session.weights.items():
        assert (value is before[other]) == (other not in MADE_OF[name]), other
    assert_as_loaded(session, weights() | {name: new})


def test_only_what_is_stale_is_computed(monkeypatch):
    import nnfront.weights.update as module

    seen = []
    stream = module.stream_transform

    def noting(program, source, *, only):
        for name, value in stream(program, source, only=only):
            seen.append(name)
            yield name, value

    session = EXECUTABLE.load(weights())
    monkeypatch.setattr(module, "stream_transform", noting)
    session.update({"q.weight": torch.ones(8, 8), "raw.weight": torch.ones(8, 8)})
    assert sorted(seen) == ["qk", "raw.weight"]


@given(
    rounds=st.lists(st.sets(st.sampled_from(NAMES), min_size=1), min_size=1, max_size=4), files=st.booleans()
)
@settings(max_examples=25, deadline=None)
def test_any_updates_in_a_row_give_what_a_fresh_load_gives(tmp_path_factory, rounds, files: bool):
    now = source = weights()
    if files:
        folder = tmp_path_factory.mktemp("checkpoint")
        save_file(source, folder / "model.safetensors")
    session = EXECUTABLE.load(nn.Checkpoint(folder) if files else source)
    for i, names in enumerate(rounds, 1):
        new = {name: weights(i)[name] for name in names}
        session.update(new)
        now = now | new
    assert_as_loaded(session, now)


def test_a_method_that_was_taken_before_uses_the_new_weights():
    session = EXECUTABLE.load(weights())
    method = session["first"]
    session.update({"raw.weight": torch.zeros(8, 8)})
    assert not method(IDS).any()


def test_tensors_of_the_caller_are_copied_and_converted_if_asked():
    session = EXECUTABLE.load(weights())
    new = {
        "raw.weight": torch.ones(8, 8, dtype=torch.bfloat16),
        "q.weight": torch.ones(8, 8, requires_grad=True),
    }
    with pytest.raises(
        LoadError,
        match=r"(?s)the update does not fit the model\n  dtype: 'raw.weight': bfloat16\[8, 8\], expected float32\[8, 8\].*"
        r"help: convert them, or update with cast=True",
    ):
        session.update(new)
    session.update(new, cast=True)
    with torch.no_grad():
        new["q.weight"].zero_()
        new["raw.weight"].zero_()
    assert_as_loaded(session, weights() | {n: torch.ones(8, 8) for n in new})


def test_a_strided_tensor_will_do():
    session = EXECUTABLE.load(weights())
    session.update({"raw.weight": weights(1)["raw.weight"].T, "q.weight": weights(1)["q.weight"].T})
    new = {name: weights(1)[name].T.contiguous() for name in ("raw.weight", "q.weight")}
    assert_as_loaded(session, weights() | new)


class TestTied:
    def test_either_name_means_the_weight(self):
        session = EXECUTABLE.load(weights())
        assert session.update({"head.weight": torch.ones(8, 8)}) == ("embed.weight",)
        assert_as_loaded(session, weights() | {"embed.weight": torch.ones(8, 8)})

    def test_both_names_must_bring_equal_bytes(self):
        session = EXECUTABLE.load(weights())
        one = torch.ones(8, 8)
        session.update({"head.weight": one, "embed.weight": one.clone()})
        with pytest.raises(
            LoadError, match=r"'embed.weight' and 'head.weight' are tied in the model, but their bytes differ"
        ):
            session.update({"head.weight": one, "embed.weight": one * 2})


class TestPartners:
    """`ab` is quantised and made of two weights: one of them comes from somewhere else."""

    def test_a_checkpoint_gives_the_other(self, tmp_path: Path):
        save_file(weights(), tmp_path / "model.safetensors")
        session = EXECUTABLE.load(nn.Checkpoint(tmp_path))
        (tmp_path / "model.safetensors").unlink()
        session.update({"a.weight": torch.ones(8, 8)})
        session.update({"b.weight": torch.ones(8, 8)})  # with the new a
        assert_as_loaded(session, weights() | {n: torch.ones(8, 8) for n in ("a.weight", "b.weight")})

    def test_tensors_of_the_caller_give_it_as_long_as_he_keeps_them(self):
        held = weights()
        session = EXECUTABLE.load(held)
        session.update({"a.weight": torch.ones(8, 8)})
        assert_as_loaded(session, weights() | {"a.weight": torch.ones(8, 8)})
        del held
        gc.collect()
        before = dict(session.weights)
        with pytest.raises(LoadError) as error:
            session.update({"a.weight": torch.zeros(8, 8), "raw.weight": torch.zeros(8, 8)})
        assert str(error.value) == (
            "the update needs weights that are not to be had\n"
            "  'b.weight', to make 'ab' again: 'b.weight' is part of ab = quantize(concat(a.weight, b.weight), axis=1)[0], "
            "which cannot be undone: quantize has no inverse\n"
            "  help: give them in the same update (they are in memory no more)"
        )
        assert all(session.weights[name] is value for name, value in before.items())
        session.update({"a.weight": torch.zeros(8, 8), "b.weight": torch.ones(8, 8)})
        session.update({"a.weight": torch.ones(8, 8)})  # b is remembered
        assert_as_loaded(session, weights() | {n: torch.ones(8, 8) for n in ("a.weight", "b.weight")})

    def test_bound_results_have_no_other(self):
        session = EXECUTABLE.bind(EXECUTABLE.transform_params(weights()), weights())
        with pytest.raises(
            LoadError, match=r"help: give them in the same update \(the session has no checkpoint\)"
        ):
            session.update({"a.weight": torch.ones(8, 8)})


ONES = torch.ones(8, 8)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"q.wieght": ONES}, r"unknown: 'q.wieght'; nearest: 'q.weight'"),
        ({"nothing like it": ONES}, r"unknown: 'nothing like it'$"),
        ({"qk": ONES}, r"unknown: 'qk' is made of 'q.weight', 'k.weight': give those"),
        ({"extra": ONES}, r"unknown: 'extra' is in the checkpoint, but no method reads it"),
        ({"q.weight": torch.ones(8, 4)}, r"shape: 'q.weight': float32\[8, 4\], expected float32\[8, 8\]"),
        ({"q.weight": ONES.to(torch.int64)}, r"dtype: 'q.weight': int64\[8, 8\], expected float32\[8, 8\]"),
        ({"q.weight": 1.0}, r"weight 'q.weight' is a float, not a torch tensor"),
        ({"q.weight": ONES.to("meta")}, r"weight 'q.weight' is on meta, not on the CPU"),
        (
            {"q": ONES, "k.weight": torch.ones(1)},
            r"(?s)unknown: 'q'.*shape: 'k.weight': float32\[1\], expected float32\[8, 8\]",
        ),
    ],
)
def test_an_update_that_does_not_fit_changes_nothing(wrong, message: str):
    session = EXECUTABLE.load(weights() | {"extra": ONES}, ignored=["extra"])
    before, result = dict(session.weights), session["forward"](IDS)
    with pytest.raises(LoadError, match=message):
        session.update({"raw.weight": ONES * 3, **wrong})
    assert all(session.weights[name] is value for name, value in before.items())
    assert torch.equal(session["forward"](IDS), result)


def test_a_failure_in_the_middle_changes_nothing(monkeypatch):
    import nnfront.weights.update as module

    def breaking(*_, **__):
        yield "qk", torch.zeros(16, 8)
        raise MemoryError

    session = EXECUTABLE.load(weights())
    with monkeypatch.context() as patch:
        patch.setattr(module, "stream_transform", breaking)
        with pytest.raises(MemoryError):
            session.update({"q.weight": ONES, "raw.weight": ONES})
    assert_as_loaded(session, weights())


def test_other_sessions_and_files_keep_their_weights(tmp_path: Path):
    save_file(weights(), tmp_path / "model.safetensors")
    bytes_before = (tmp_path / "model.safetensors").read_bytes()
    checkpoint, results = nn.Checkpoint(tmp_path), EXECUTABLE.transform_params(weights())
    mapped, other = EXECUTABLE.load(checkpoint), EXECUTABLE.load(checkpoint)
    raw = weights()
    bound, twin = EXECUTABLE.bind(results, raw), EXECUTABLE.bind(results, raw)
    for session in (mapped, bound):
        session.update(weights(1))
        assert_as_loaded(session, weights(1))
    assert_as_loaded(other, weights())
    assert_as_loaded(twin, weights())
    assert (tmp_path / "model.safetensors").read_bytes() == bytes_before
    assert all(torch.equal(raw[name], value) for name, value in weights().items())


def test_a_call_sees_all_old_or_all_new_weights():
    """Every weight is replaced at once, back and forth; a mixture of both would give another result."""
    versions = [weights(0), weights(1)]
    right = [EXECUTABLE.load(each)["forward"](IDS) for each in versions]
    session = EXECUTABLE.load(versions[0])
    method, seen, wrong = session["forward"], set(), []
    done, calls = threading.Event(), threading.Semaphore(0)

    def call() -> None:
        while not done.is_set():
            result = method(IDS)
            matches = [i for i in (0, 1) if torch.equal(result, right[i])]
            seen.update(matches)
            if not matches:
                wrong.append(result)
            calls.release()

    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for i in range(60):
        session.update(versions[(i + 1) % 2])
        for _ in range(
            i % 6
        ):  # sometimes a call is made between two updates, sometimes there is no time for one
            assert calls.acquire(timeout=HANGS_SECONDS)
    done.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert seen == {0, 1}


def test_after_an_update_returns_every_method_is_new():
    """Two updaters at once: whoever comes last has the say over all weights."""
    session = EXECUTABLE.load(weights())
    versions = [weights(i) for i in range(4)]
    threads = [threading.Thread(target=session.update, args=(each,)) for each in versions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    last = next(each for each in versions if torch.equal(session.weights["raw.weight"], each["raw.weight"]))
    assert_as_loaded(session, last)


def test_unlifted_models_and_separate_transforms_are_updated_too():
    plain = Model().export({"forward": TOKENS, "first": TOKENS})
    for module in (plain, nn.passes.lift_transform_params(plain)):
        executable = nn.compile(module)
        session = executable.load(weights())
        new = {name: weights(1)[name] for name in NAMES}
        session.update(new)
        fresh = executable.load(new)
        assert all(torch.equal(session.weights[name], value) for name, value in fresh.weights.items())
        assert all(torch.equal(session[m](IDS), fresh[m](IDS)) for m in fresh)


def test_sizes_that_only_weights_say_are_those_of_the_session():
    class Sized(nn.Module):
        def __init__(self):
            self.w = nn.Parameter(("n", "m"))
            self.turned = op.permute_dims(self.w) * 2.0

        def forward(self, x):
            return op.matmul(x, self.turned)

    ir = Sized().export({"forward": {"x": spec.Tensor(["batch", "m"], "float32")}})
    session = nn.compile(nn.passes.lift_transform_params(ir, allow_growth=True)).load({"w": torch.ones(3, 5)})
    session.update({"w": torch.full((3, 5), 2.0)})
    assert torch.equal(session["forward"](torch.ones(1, 5)), torch.full((1, 3), 20.0))
    with pytest.raises(LoadError, match=r"shape: 'w': float32\[4, 5\], expected float32\[3, 5\]"):
        session.update({"w": torch.ones(4, 5)})
