# SPDX-License-Identifier: Apache-2.0
"""What a call accepts, converts and refuses, and in which words."""

import numpy as np
import pytest
import torch

import nnfront.ops  # noqa: F401 - declares the ops
from nnfront.backends.lowering import lower
from nnfront.errors import LoadError, RunError
from nnfront.ir import parse
from nnfront.session import Session

PREFILL = """
def prefill[batch, seq: 1..8192, even: %2, vocab](
    tokens: input int64[batch, seq],
    positions: input int64[batch, seq],
    mask: input bool[batch, 2*seq + 1],
    x: input float32[even, 4],
    w: weight float32[vocab, 4],
) -> float32[even, vocab] {
    y: float32[even, vocab] = linear(x, w)
    return y
}
"""
W = torch.randn(3, 4)


def prefill_args(batch=2, seq=7, even=6) -> list[torch.Tensor]:
    tokens = torch.zeros(batch, seq, dtype=torch.int64)
    return [tokens, tokens, torch.ones(batch, 2 * seq + 1, dtype=torch.bool), torch.randn(even, 4)]


def prefill():
    return Session(lower(parse(PREFILL)), {"w": W})["prefill"]


def changed(index: int, value) -> list:
    args = prefill_args()
    args[index] = value
    return args


def int64(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            changed(1, int64(2, 9)),
            "prefill: argument 'positions' axis 1 is 'seq' = 9, but 'tokens' axis 1 already said 'seq' = 7",
        ),
        (
            prefill_args(seq=9000),
            "prefill: argument 'tokens' axis 1 is 'seq' = 9000, but 'seq' is at most 8192",
        ),
        (prefill_args(seq=0), "prefill: argument 'tokens' axis 1 is 'seq' = 0, but 'seq' is at least 1"),
        (
            prefill_args(even=5),
            "prefill: argument 'x' axis 0 is 'even' = 5, but 'even' is a multiple of 2",
        ),
        (
            changed(2, torch.ones(2, 14, dtype=torch.bool)),
            "prefill: argument 'mask' axis 1 is 14, but '2*seq + 1' is 15",
        ),
        (changed(3, torch.randn(6, 5)), "prefill: argument 'x' axis 1 is 5, expected 4"),
        (
            changed(0, torch.zeros(2, 7)),
            "prefill: argument 'tokens' is float32, expected int64[batch, seq]",
        ),
        (changed(0, int64(7)), "prefill: argument 'tokens' has 1 axis, expected int64[batch, seq]"),
        (changed(0, int64(2, 7, 1)), "prefill: argument 'tokens' has 3 axes, expected int64[batch, seq]"),
        (changed(0, [[1, 2]]), "prefill: argument 'tokens' is a list, expected int64[batch, seq]"),
        (changed(0, None), "prefill: argument 'tokens' is None, expected int64[batch, seq]"),
        (
            changed(0, torch.zeros(2, 7, dtype=torch.int64, device="meta")),
            "prefill: argument 'tokens' is on meta, expected a dense tensor on the CPU",
        ),
        (
            changed(0, int64(2, 7).to_sparse()),
            "prefill: argument 'tokens' is torch.sparse_coo, expected a dense tensor on the CPU",
        ),
        (prefill_args()[:3], "prefill: argument 'x' is missing"),
        (prefill_args()[:2], "prefill: arguments 'mask', 'x' are missing"),
        ([*prefill_args(), 1], "prefill: takes 4 arguments, got 5"),
    ],
)
def test_a_wrong_call_is_refused_in_these_words(args, message):
    with pytest.raises(RunError) as caught:
        prefill()(*args)
    assert first_line(caught.value) == message


class Hostile:
    def __getattr__(self, name: str) -> None:
        raise RuntimeError(f"no {name}")


class HostileTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *args, **kwargs):
        raise RuntimeError("no functions")


EVERY_KIND = """
def main[n](x: input float32[n, 4], k: input int64, f: input float64, b: input bool, t: input (float32[n], int64[]), s: input int64[]) -> float32[n, 4] {
    return x
}
"""
UNREADABLE = {
    "objects": np.array([object()]),
    "texts": np.array(["a"]),
    "times": np.array([1], dtype="datetime64[s]"),
    "fields": np.zeros(3, dtype=[("a", int)]),
    "another byte order": np.array([1], dtype=">f4"),
    "a number beyond int64": 2**70,
    "a number beyond float64": 10**400,
    "attributes that raise": Hostile(),
    "functions that raise": torch.zeros(3, 4).as_subclass(HostileTensor),
    "nested": torch.nested.nested_tensor([torch.zeros(4)], layout=torch.jagged),
}


# Python's int has no end, and a float may stand for a large one.
READABLE = {("k", "a number beyond int64"), ("k", "a number beyond float64"), ("f", "a number beyond int64")}


@pytest.mark.parametrize(
    ("name", "kind"),
    [(name, kind) for name in "xkfbts" for kind in UNREADABLE if (name, kind) not in READABLE],
)
def test_a_value_that_cannot_be_read_is_refused_whatever_it_raises(name, kind):
    run = Session(lower(parse(EVERY_KIND)), {})["main"]
    given = {
        "x": torch.ones(3, 4),
        "k": 3,
        "f": 1.0,
        "b": True,
        "t": (torch.ones(3), torch.tensor(1)),
        "s": 1,
    }
    assert run(**given).shape == (3, 4)
    with pytest.raises(RunError, match=f"argument '{name}'"):
        run(**given | {name: UNREADABLE[kind]})


def test_what_cannot_be_read_is_said_with_what_it_raised():
    with pytest.raises(RunError) as caught:
        prefill()(*changed(0, np.array([[object()]])))
    assert caught.value.what == (
        "prefill: argument 'tokens' is a ndarray that cannot be read, expected int64[batch, seq]"
    )
    assert caught.value.details[0].startswith("TypeError: can't convert np.ndarray of type numpy.object_.")


def test_a_size_that_an_expression_refuses_says_who_said_the_dim():
    with pytest.raises(RunError) as caught:
        prefill()(*changed(2, torch.ones(2, 14, dtype=torch.bool)))
    assert caught.value.details == ("'tokens' axis 1 said 'seq' = 7",)


@pytest.mark.parametrize(
    ("kwargs", "message", "help"),
    [
        ({"position": 1}, "prefill: 'position' is not an argument", "did you mean 'positions'?"),
        ({"zzz": 1}, "prefill: 'zzz' is not an argument", ""),
        ({"tokens": 1}, "prefill: argument 'tokens' is given twice, by position and by name", ""),
    ],
)
def test_a_wrong_keyword_is_refused(kwargs, message, help):
    with pytest.raises(RunError) as caught:
        prefill()(*prefill_args()[:1], **kwargs)
    assert first_line(caught.value) == message
    assert caught.value.help == help


def test_an_error_shows_the_signature():
    with pytest.raises(
        RunError, match=r"signature: prefill\(tokens: int64\[batch, seq\], positions: int64\["
    ):
        prefill()()


def test_arguments_go_by_position_or_by_name():
    tokens, positions, mask, x = prefill_args()
    expected = x @ W.T
    torch.testing.assert_close(prefill()(tokens, positions, x=x, mask=mask), expected)
    torch.testing.assert_close(prefill()(x=x, positions=positions, mask=mask, tokens=tokens), expected)


def test_numpy_arrays_are_taken_as_tensors():
    args = [a.numpy() for a in prefill_args()]
    args[3] = np.asfortranarray(args[3])
    torch.testing.assert_close(prefill()(*args), torch.from_numpy(args[3].copy()) @ W.T)


def test_sizes_0_and_1_are_sizes_like_others():
    assert prefill()(*prefill_args(batch=0, seq=1, even=0)).shape == (0, 3)


SCALARS = """
def main[n: 0..9](
    n: input int64(n), f: input float64, flag: input bool, x: input float32[n], pair: input (float32[n], (int64[],)),
) -> float32[n] {
    y: float32[n] = multiply(x, f)
    z: float32[n] = multiply(y, dim(n))
    r: float32[n] = if flag { yield z } else { yield y }
    return r
}
"""


def scalars_args() -> list:
    return [3, 0.5, True, torch.ones(3), (torch.ones(3), (torch.tensor(1),))]


@pytest.mark.parametrize(
    ("index", "value"),
    [
        (0, np.int64(3)),
        (0, torch.tensor(3)),
        (1, np.float32(0.5)),
        (1, torch.tensor(0.5)),
        (2, np.True_),
        (2, torch.tensor(True)),
        (4, [torch.ones(3), [7]]),
        (4, (np.ones(3, np.float32), (np.int64(7),))),
    ],
)
def test_host_scalars_and_tuples_may_come_in_other_clothes(index, value):
    args = scalars_args()
    args[index] = value
    assert Session(lower(parse(SCALARS)), {})["main"](*args).tolist() == [1.5] * 3


def test_an_int_stands_for_a_float():
    args = scalars_args()
    args[1] = 2
    assert Session(lower(parse(SCALARS)), {})["main"](*args).tolist() == [6.0] * 3


@pytest.mark.parametrize(
    ("index", "value", "message"),
    [
        (0, True, "main: argument 'n' is a bool, expected an int"),
        (0, 3.0, "main: argument 'n' is a float, expected an int"),
        (0, -1, "main: argument 'n' is 'n' = -1, but 'n' is at least 0"),
        (0, 10, "main: argument 'n' is 'n' = 10, but 'n' is at most 9"),
        (0, 4, "main: argument 'x' axis 0 is 'n' = 3, but 'n' already said 'n' = 4"),
        (1, "half", "main: argument 'f' is a str, expected a float"),
        (1, True, "main: argument 'f' is a bool, expected a float"),
        (2, 1, "main: argument 'flag' is an int, expected True or False"),
        (4, torch.ones(2, 3), "main: argument 'pair' is a Tensor, expected a tuple of 2"),
        (4, (torch.ones(3),), "main: argument 'pair' is a tuple of 1 element, expected one of 2"),
        (
            4,
            (torch.ones(4), (torch.tensor(1),)),
            "main: argument 'pair'[0] axis 0 is 'n' = 4, but 'n' already said 'n' = 3",
        ),
        (4, (torch.ones(3), (0.5,)), "main: argument 'pair'[1][0] is float64, expected int64[]"),
    ],
)
def test_wrong_scalars_and_tuples_are_refused(index, value, message):
    args = scalars_args()
    args[index] = value
    with pytest.raises(RunError) as caught:
        Session(lower(parse(SCALARS)), {})["main"](*args)
    assert first_line(caught.value) == message


SOLVED = """
def main[n: 1..8, m](x: input float32[2*n, m], y: input float32[n*m]) -> float32[n] {
    z: float32[n] = zeros(shape=(n,))
    return z
}
"""


def test_a_dim_that_stands_only_in_expressions_is_solved():
    run = Session(lower(parse(SOLVED)), {})["main"]
    assert run(torch.ones(8, 5), torch.ones(20)).shape == (4,)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (
            (7, 5),
            20,
            "main: argument 'x' axis 0 is '2*n' = 7, but no 'n', which is between 1 and 8, gives that",
        ),
        (
            (18, 5),
            45,
            "main: argument 'x' axis 0 is '2*n' = 18, but no 'n', which is between 1 and 8, gives that",
        ),
        ((8, 5), 21, "main: argument 'y' axis 0 is 21, but 'm*n' is 20"),
    ],
)
def test_an_expression_that_no_number_satisfies_is_refused(x, y, message):
    run = Session(lower(parse(SOLVED)), {})["main"]
    with pytest.raises(RunError) as caught:
        run(torch.ones(x), torch.ones(y))
    assert first_line(caught.value) == message


MODEL_WIDE = """
def embed[vocab, n](x: input int64[n], w: weight float32[vocab, 4]) -> float32[n, 4] {
    y: float32[n, 4] = take(w, x, axis=0)
    return y
}
def score[vocab, n](x: input float32[n, vocab]) -> float32[n, vocab] { return x }
"""


def test_a_dim_of_a_weight_is_one_number_for_all_methods():
    session = Session(lower(parse(MODEL_WIDE)), {"w": torch.randn(5, 4)})
    assert session["score"](torch.ones(2, 5)).shape == (2, 5)
    with pytest.raises(RunError) as caught:
        session["score"](torch.ones(2, 6))
    expected = "score: argument 'x' axis 1 is 'vocab' = 6, but weight 'w' axis 0 already said 'vocab' = 5"
    assert first_line(caught.value) == expected


def test_weights_that_disagree_about_a_dim_are_refused():
    text = "def main[v](a: weight float32[v], b: weight float32[v]) -> float32[v] { return a }"
    with pytest.raises(LoadError) as caught:
        Session(lower(parse(text)), {"a": torch.ones(2), "b": torch.ones(3)})
    assert str(caught.value) == "main: weight 'b' axis 0 is 'v' = 3, but 'a' axis 0 already said 'v' = 2"


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({}, "embed: weight 'w' has no value"),
        ({"w": torch.ones(5)}, r"embed: weight 'w' is float32\[5\], expected float32\[vocab, 4\]"),
        (
            {"w": torch.ones(5, 4).half()},
            r"embed: weight 'w' is float16\[5, 4\], expected float32\[vocab, 4\]",
        ),
        ({"w": torch.ones(5, 3)}, "embed: weight 'w' axis 1 is 3, expected 4"),
    ],
)
def test_a_session_refuses_weights_that_do_not_fit(weights, message):
    with pytest.raises(LoadError, match=message):
        Session(lower(parse(MODEL_WIDE)), weights)
