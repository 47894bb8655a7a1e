# SPDX-License-Identifier: Apache-2.0
"""Dims that weights say only together, with the arguments of a call, or with the weights of another method."""

from __future__ import annotations

import pytest
import torch

import nnfront
from nnfront.compiler import TransformedWeights
from nnfront.errors import LoadError, RunError
from nnfront.ir import parse, verify
from nnfront.passes import lift_transform_params

MODES = {"unlifted": None, "lifted apart": False, "lifted together": True}

PRODUCT = """
def main[m, n](x: input float32[m, n], w: weight float32[m*n]) -> float32[m, n] {
    r: float32[m, n] = reshape(w, shape=(m, n))
    y: float32[m, n] = add(x, r)
    return y
}
"""
QUOTIENT = """
def main[m, n](x: input float32[m], w: weight float32[m*n]) -> float32[m, n] {
    r: float32[m, n] = reshape(w, shape=(m, n))
    c: float32[m, 1] = unsqueeze(x, dim=1)
    y: float32[m, n] = add(r, c)
    return y
}
"""
TWO_METHODS = """
def one[b, d](x: input float32[b, 4], w: weight float32[d, 4]) -> float32[b, d] {
    t: float32[4, d] = permute_dims(w, axes=(1, 0))
    y: float32[b, d] = matmul(x, t)
    return y
}
def two[b, d, e](x: input float32[b, 4], q: weight float32[d*e, 4]) -> float32[d, e, b] {
    t: float32[4, d*e] = permute_dims(q, axes=(1, 0))
    u: float32[b, d*e] = matmul(x, t)
    v: float32[d*e, b] = permute_dims(u, axes=(1, 0))
    y: float32[d, e, b] = reshape(v, shape=(d, e, b))
    return y
}
"""
# After lifting no weight that is left has d or e by itself.
GONE = """
def one[b, d](x: input float32[b, 4], w: weight float32[1 + d, 4]) -> float32[b, 4] {
    s: float32[] = sum(w)
    y: float32[b, 4] = add(x, s)
    return y
}
""" + TWO_METHODS[TWO_METHODS.index("def two") :]


def compiled(text, mode):
    ir = parse(text)
    verify(ir)
    if MODES[mode] is not None:
        ir = lift_transform_params(ir, shared_transform=MODES[mode])
    return nnfront.compile(ir)


@pytest.mark.parametrize("mode", MODES)
def test_each_call_says_what_the_factors_of_a_weights_size_are(mode):
    w = torch.arange(6.0)
    main = compiled(PRODUCT, mode).load({"w": w})["main"]
    for m, n in ((2, 3), (3, 2), (6, 1)):
        x = torch.randn(m, n)
        torch.testing.assert_close(main(x), x + w.reshape(m, n))


@pytest.mark.parametrize("mode", MODES)
def test_a_call_whose_factors_do_not_give_a_weights_size_is_refused(mode):
    main = compiled(PRODUCT, mode).load({"w": torch.arange(6.0)})["main"]
    with pytest.raises(RunError) as caught:
        main(torch.zeros(2, 4))
    assert str(caught.value) == (
        "main: weight 'w' axis 0 is 6, but 'm*n' is 8\n  'x' axis 0 said 'm' = 2\n  'x' axis 1 said 'n' = 4"
    )


@pytest.mark.parametrize("mode", MODES)
def test_a_call_solves_a_weights_size_for_what_its_arguments_leave_open(mode):
    w = torch.arange(6.0)
    main = compiled(QUOTIENT, mode).load({"w": w})["main"]
    for m in (1, 2, 3):
        x = torch.randn(m)
        torch.testing.assert_close(main(x), w.reshape(m, -1) + x[:, None])
    with pytest.raises(RunError) as caught:
        main(torch.zeros(4))
    assert str(caught.value) == (
        "main: weight 'w' axis 0 is 'm*n' = 6, but no 'n' gives that\n  'x' axis 0 said 'm' = 4"
    )


@pytest.mark.parametrize("mode", MODES)
def test_an_axis_beside_such_a_size_is_checked_when_weights_are_loaded(mode):
    text = PRODUCT.replace("weight float32[m*n]", "weight float32[m*n, 1]")
    with pytest.raises(LoadError) as caught:
        compiled(text, mode).load({"w": torch.zeros(6, 2)})
    assert str(caught.value) == (
        "the checkpoint does not fit the model: 1 of another shape\n"
        "  shape: 'w': float32[6, 2], expected "
        + ("float32[m*n, 1]" if mode == "unlifted" else "float32[size, 1]; size is 6 by 'w' axis 0")
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("text", [TWO_METHODS, GONE], ids=["kept", "gone"])
@pytest.mark.parametrize("saved", ["session", "executable"])
def test_a_methods_dim_may_be_told_by_the_weights_of_another(mode, text, saved, tmp_path):
    executable = compiled(text, mode)
    weights = {"w": torch.randn(2 + (text is GONE), 4), "q": torch.randn(6, 4)}
    x = torch.randn(5, 4)
    session = executable.load(weights)
    if saved == "session":
        session.save(tmp_path / "artefact")
    else:
        executable.save(tmp_path / "artefact", weights)
    for each in (session, nnfront.load(tmp_path / "artefact")):
        torch.testing.assert_close(each["two"](x), (weights["q"] @ x.T).reshape(2, 3, 5))
        one = x + weights["w"].sum() if text is GONE else x @ weights["w"].T
        torch.testing.assert_close(each["one"](x), one)


@pytest.mark.parametrize("mode", MODES)
def test_weights_whose_sizes_allow_no_whole_number_are_refused(mode):
    with pytest.raises(LoadError) as caught:
        compiled(TWO_METHODS, mode).load({"w": torch.randn(4, 4), "q": torch.randn(6, 4)})
    assert "d*e" in str(caught.value)


@pytest.mark.parametrize("text", [TWO_METHODS, GONE], ids=["kept", "gone"])
def test_transformed_weights_tell_a_method_the_dims_of_another(text):
    executable = compiled(text, "lifted apart")
    weights = {"w": torch.randn(2 + (text is GONE), 4), "q": torch.randn(6, 4)}
    session = executable.bind(executable.transform_params(weights))
    x = torch.randn(5, 4)
    torch.testing.assert_close(session["two"](x), (weights["q"] @ x.T).reshape(2, 3, 5))


def test_a_dim_that_the_weights_at_hand_do_not_tell_is_named():
    executable = compiled(GONE, "lifted apart")
    weights = {"w": torch.randn(3, 4), "q": torch.randn(6, 4)}
    results = executable.transform_params(weights)
    with pytest.raises(LoadError) as caught:
        executable.bind(TransformedWeights(results))
    assert str(caught.value) == (
        "two: no weight says what 'd' is\n"
        "  expected 'w' of one_transform_params axis 0 to say it\n"
        "  help: give load(...) the checkpoint's own weights"
    )


def test_two_transforms_have_sizes_of_their_own():
    text = PRODUCT + PRODUCT.replace("main", "other").replace("w:", "v:").replace("(w,", "(v,")
    w, v = torch.arange(6.0), torch.arange(8.0)
    session = compiled(text, "lifted apart").load({"w": w, "v": v})
    x = torch.randn(2, 4)
    torch.testing.assert_close(session["other"](x), x + v.reshape(2, 4))
    torch.testing.assert_close(session["main"](x[:, :3]), x[:, :3] + w.reshape(2, 3))


@pytest.mark.parametrize("mode", MODES)
def test_a_weights_size_that_no_dim_follows_from_is_left_to_the_calls(mode):
    text = """
    def main[n](x: input float32[n], w: weight float32[ceildiv(n, 16)]) -> float32[n] {
        s: float32[] = sum(w)
        y: float32[n] = add(x, s)
        return y
    }
    """
    w = torch.randn(2)
    main = compiled(text, mode).load({"w": w})["main"]
    for n in (17, 32):
        x = torch.randn(n)
        torch.testing.assert_close(main(x), x + w.sum())
    with pytest.raises(RunError) as caught:
        main(torch.zeros(16))
    assert str(caught.value) == (
        "main: weight 'w' axis 0 is 2, but 'ceildiv(n, 16)' is 1\n  'x' axis 0 said 'n' = 16"
    )
