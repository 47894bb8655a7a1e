# SPDX-License-Identifier: Apache-2.0
"""Weights under the model's names: aliases, conversion of floats, tied weights."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nnfront.errors import LoadError
from nnfront.transform.source import Source
from nnfront.weights import BoundWeights, Checkpoint, check_weights, stored_type

STORED = {
    "embed": torch.randn(40, 8),
    "q": torch.randn(600, 800),
    "k": torch.randn(200, 800),
    "n": torch.tensor(3.0),
}


@pytest.fixture(params=["file", "dict"])
def weights(request, tmp_path: Path):
    if request.param == "dict":
        return STORED
    save_file(STORED, tmp_path / "x.safetensors")
    return Checkpoint(tmp_path)


def bound(weights, dtype: str = "float32", aliases=(), drop=()) -> BoundWeights:
    wanted = {
        dict(aliases).get(name, name): stored_type(t.to(getattr(torch, dtype))) for name, t in STORED.items()
    }
    have = (
        weights.infos
        if isinstance(weights, Checkpoint)
        else {name: stored_type(t) for name, t in weights.items()}
    )
    return BoundWeights(weights, check_weights(wanted, have, aliases=dict(aliases), ignored=drop, cast=True))


def test_it_is_a_source_and_a_mapping_of_the_models_names(weights):
    names = bound(weights, aliases={"embed": "lm_head"})
    assert isinstance(names, Source)
    assert sorted(names) == ["k", "lm_head", "n", "q"]
    assert "embed" not in names
    assert torch.equal(names["lm_head"], STORED["embed"])
    assert names.info("lm_head").shape == (40, 8)
    with pytest.raises(KeyError):
        names["embed"]


def test_a_join_is_the_weights_in_a_row(weights):
    expected = torch.cat([STORED[name].reshape(-1) for name in ("n", "k", "q")])
    assert torch.equal(bound(weights).joined(["n", "k", "q"]), expected)
    assert torch.equal(bound(weights, "bfloat16").joined(["n", "k", "q"]), expected.to(torch.bfloat16))


def test_floats_are_converted_as_torch_does(weights):
    half = bound(weights, "float16")
    assert all(torch.equal(half[name], tensor.to(torch.float16)) for name, tensor in STORED.items())
    assert half.info("q").dtype == "float16"
    assert half.copied_bytes(["q"]) == 600 * 800 * 2
    assert half.copied_bytes(["q", "k"]) == 800 * 800 * 2


def test_what_is_not_converted_is_not_copied(weights):
    plain = bound(weights)
    assert plain.copied_bytes(["q"]) < 64 << 10
    if weights is STORED:
        assert plain["q"].data_ptr() == STORED["q"].data_ptr()


def test_a_check_with_problems_binds_nothing():
    with pytest.raises(LoadError, match="missing: 'b'"):
        BoundWeights(STORED, check_weights({"b": stored_type(STORED["n"])}, {}))


@pytest.mark.parametrize("place", [0, 9_999, None])
def test_tied_weights_must_have_equal_bytes(place: int | None):
    head = torch.randn(100, 100)
    embed = head.clone()
    if place is not None:
        embed.view(-1)[place] += 1
    tensors = {"embed": embed, "head": head}
    found = check_weights(
        {"embed": stored_type(embed)},
        {"embed": stored_type(embed), "head": stored_type(head)},
        aliases={"head": "embed"},
    )
    if place is None:
        BoundWeights(tensors, found).check_ties()
        return
    with pytest.raises(LoadError, match="'embed' and 'head' are tied in the model, but their bytes differ"):
        BoundWeights(tensors, found).check_ties()


def test_tied_weights_that_are_not_numbers_may_be_equal():
    nan = torch.full((4,), float("nan"))
    type = stored_type(nan)
    found = check_weights({"a": type}, {"a": type, "b": type}, aliases={"b": "a"})
    BoundWeights({"a": nan, "b": nan.clone()}, found).check_ties()
