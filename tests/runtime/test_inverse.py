# SPDX-License-Identifier: Apache-2.0
"""A transform undone: what was put in comes back bit for bit, or an error says which formula lost it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transform_cases import LiveBytes, transform, typed, types_of

from nnfront.errors import LoadError
from nnfront.ir import Projection
from nnfront.transform.inverse import Inverse, invert_transform
from nnfront.transform.run import run_transform


def round_trip(weights, make):
    program = transform(types_of(weights), make)
    return invert_transform(program, run_transform(program, weights))


def assert_equal(found, weights):
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        assert found[name].dtype == weight.dtype
        assert torch.equal(found[name], weight), name


def test_a_fused_model_gives_back_its_checkpoint_without_a_copy():
    weights = {"q": torch.randn(8, 4), "k": torch.randn(2, 4), "o": torch.randn(4, 8), "norm": torch.randn(4)}
    program = transform(types_of(weights), lambda m: {
        "qk": m.permute_dims(m.concat(m.w["q"], m.w["k"])), "o": m.w["o"], "norm": m.w["norm"]
    })  # fmt: skip
    results = run_transform(program, weights)
    found = invert_transform(program, results)
    assert_equal(found, weights)
    start = results["qk"].data_ptr()
    assert start <= found["k"].data_ptr() < start + results["qk"].nbytes


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_any_composition_of_moves_is_undone(data):
    dtype = data.draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.int8]), "dtype")
    weights = {name: torch.randint(-100, 100, (4, 6)).to(dtype) for name in "abc"}

    def make(m):
        values = list(m.w.values())
        for _ in range(data.draw(st.integers(0, 8), "length")):
            i = data.draw(st.integers(0, len(values) - 1), "which")
            x = values.pop(i)
            shape = [int(size) for size in x.type.shape]
            match data.draw(
                st.sampled_from(["permute", "reshape", "flip", "wider", "unsqueeze", "split", "join"])
            ):
                case "permute":
                    values.append(m.permute_dims(x, axes=data.draw(st.permutations(range(len(shape))))))
                case "reshape":
                    values.append(m.reshape(x, shape=(-1,)))
                case "flip":
                    values.append(m.flip(x, axis=(len(shape) - 1,)))
                case "wider":
                    values.append(m.astype(x, dtype="int64" if "int" in x.type.dtype else "float64"))
                case "unsqueeze":
                    values.append(m.squeeze(m.unsqueeze(x, dim=0), axis=0))
                case "split" if shape[-1] >= 3:
                    parts = m.split(x, indices_or_sections=(1, 2), axis=len(shape) - 1)
                    values += [m.builder.emit(Projection(parts, i)) for i in range(3)]
                case "join":
                    same = [y for y in values if y.type == x.type]
                    values = [y for y in values if y.type != x.type]
                    axis = data.draw(st.integers(0, len(shape) - 1), "axis")
                    values.append(data.draw(st.sampled_from([m.concat, m.stack]))(x, *same, dim=axis))
                case "split":
                    values.append(x)
        return {f"r{i}": value for i, value in enumerate(values)}

    assert_equal(round_trip(weights, make), weights)


def test_sizes_of_parts_are_found_through_dims():
    types = {"a": typed("n", 4), "b": typed("2*n", 4)}
    program = transform(types, lambda m: {"ab": m.concat(m.w["a"], m.w["b"])})
    weights = {"a": torch.randn(3, 4), "b": torch.randn(6, 4)}
    assert_equal(invert_transform(program, run_transform(program, weights)), weights)


def test_a_weight_that_one_formula_loses_is_found_through_another():
    weights = {"a": torch.randn(4)}
    assert_equal(
        round_trip(weights, lambda m: {"x": m.relu(m.w["a"]), "y": m.flip(m.w["a"], axis=0)}), weights
    )


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda m: m.relu(m.w["a"]),
            r"'a' is part of x = relu\(a\), which cannot be undone: relu has no inverse",
        ),
        (
            lambda m: m.flip(m.astype(m.w["a"], dtype="bfloat16"), axis=0),
            r"'a' is part of x = flip\(astype\(a, dtype='bfloat16'\), axis=\[0\]\), which cannot be undone: astype makes bfloat16 of float32",
        ),
        (
            lambda m: m.concat(m.w["a"], m.w["half"]),
            r"'half' is part of x = concat\(a, half\), which cannot be undone: concat makes float32 of float32 and float16",
        ),
        (lambda m: m.w["half"], r"'a' is in no result"),
    ],
    ids=["arithmetic", "a narrower dtype", "promotion", "unused"],
)
def test_what_is_lost_is_named_with_its_formula(make, text: str):
    weights = {"a": torch.randn(4), "half": torch.randn(4).to(torch.float16)}
    with pytest.raises(LoadError, match=text):
        round_trip(weights, lambda m: {"x": make(m)})


def test_a_part_that_no_result_kept_cannot_be_put_together():
    def make(m):
        parts = m.split(m.w["a"], indices_or_sections=2, axis=0)
        return {"x": m.builder.emit(Projection(parts, 0))}

    with pytest.raises(
        LoadError,
        match=r"'a' is part of x = split\(a, indices_or_sections=2\)\[0\], which cannot be undone: a part of it is in no result",
    ):
        round_trip({"a": torch.randn(4)}, make)


def test_only_what_is_asked_for_is_computed_and_copies_are_let_go():
    weights = {f"w{i}": torch.randn(64, 64) for i in range(8)}
    program = transform(types_of(weights), lambda m: {n: m.flip(m.w[n], axis=(0,)) for n in weights})
    inverse = Inverse(program, run_transform(program, weights))
    with LiveBytes() as memory:
        for name, weight in weights.items():
            assert torch.equal(inverse.weight(name), weight)
    assert memory.peak == 2 * weights["w0"].nbytes  # a copy, and the one before it until the new one is there
