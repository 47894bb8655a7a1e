# SPDX-License-Identifier: Apache-2.0
"""The proof that a checkpoint fits a model: what passes, and every way not to fit as it is told to the user."""

import pytest

from nnfront.dims import Symbol, symbol, to_size
from nnfront.errors import LoadError
from nnfront.ir import TensorType
from nnfront.weights import check_weights


def t(*shape: int | str, dtype: str = "float32") -> TensorType:
    return TensorType(tuple(to_size(s) for s in shape), dtype)


def problems(wanted, have, **options) -> list[str]:
    return [f"{p.kind}: {p.text}" for p in check_weights(wanted, have, **options).problems]


def test_equal_names_shapes_and_dtypes_fit():
    types = {"a": t(2, 3), "b": t(), "c": t(0, 4, dtype="int8")}
    result = check_weights(types, types)
    assert result.fits
    assert result.sources == {"a": "a", "b": "b", "c": "c"}
    assert not result.casts
    result.raise_if_wrong()


def test_all_kinds_of_problems_are_raised_as_one_error():
    wanted = {"a.weight": t(2, 3), "b": t("n", 3), "c": t(4), "d": t("n"), "gone.weight": t(5), "tied": t(7)}
    have = {
        "a.weight": t(3, 2),
        "b": t(8, 3),
        "c": t(4, dtype="bfloat16"),
        "d": t(9),
        "gone.weights": t(5),
        "tied": t(7),
        "tied2": t(8),
    }
    result = check_weights(
        wanted, have, aliases={"tied2": "tied"}, needed_by={"gone.weight": ["prefill", "decode"]}
    )
    with pytest.raises(LoadError) as caught:
        result.raise_if_wrong("folder")
    assert str(caught.value) == (
        "the checkpoint does not fit the model: 1 missing, 1 unexpected, 2 of another shape, 1 of another dtype, 1 tied but different\n"
        "  missing: 'gone.weight': float32[5], needed by prefill, decode; nearest unexpected: 'gone.weights'\n"
        "  unexpected: 'gone.weights': float32[5]\n"
        "  shape: 'a.weight': float32[3, 2], expected float32[2, 3]; the stored one is its transpose\n"
        "  shape: 'd': float32[9], expected float32[n]; n is 8 by 'b' axis 0\n"
        "  dtype: 'c': bfloat16[4], expected float32[4]\n"
        "  tied: 'tied2': float32[8], but 'tied' is float32[7] and both are one weight\n"
        "  at folder"
    )


class TestDims:
    def test_a_dim_of_the_model_gets_one_value(self):
        wanted = {
            "embed": t("vocab", 64),
            "head": t("vocab", 64),
            "two": t("2*hidden"),
            "h": t("vocab + hidden"),
        }
        result = check_weights(wanted, {"embed": t(100, 64), "head": t(100, 64), "two": t(34), "h": t(117)})
        assert result.fits
        assert {str(s): v for s, v in result.dims.items()} == {"vocab": 100, "hidden": 17}

    def test_the_value_that_most_weights_say_is_the_right_one(self):
        wanted = {name: t("n") for name in "abc"}
        assert problems(wanted, {"a": t(7), "b": t(8), "c": t(8)}) == [
            "shape: 'a': float32[7], expected float32[n]; n is 8 by 'b' axis 0"
        ]

    def test_a_value_outside_the_facts_is_told_with_the_facts(self):
        n = symbol("n", multiple_of=16)
        assert problems({"a": TensorType((n,), "float32")}, {"a": t(20)}) == [
            "dim: 'n': is 20 by 'a' axis 0, but is at least 0, a multiple of 16"
        ]

    def test_an_expression_without_a_solution_is_told(self):
        assert problems({"a": t("2*n")}, {"a": t(7)}) == [
            "dim: 'dims': no integer 'n' fits: it would be 7/2; 2*n is 7"
        ]

    def test_dims_that_no_weight_can_tell_apart_are_left_to_the_calls(self):
        wanted = {"a": t("n*m"), "b": t("n*m")}
        found = check_weights(wanted, {"a": t(12), "b": t(12)})
        assert found.fits
        assert found.dims == {}
        assert problems(wanted, {"a": t(12), "b": t(15)}) == ["dim: 'dims': 'm*n' cannot be 15; m*n is 12"]

    def test_a_dim_that_the_stored_sizes_do_not_determine_is_told(self):
        # 0 is 0 times anything.
        assert problems({"a": t("n*m"), "b": t("n")}, {"a": t(0), "b": t(0)}) == [
            "dim: 'm': no weight gives it a value; it is part of the shape of 'a'"
        ]

    def test_a_factor_that_another_weight_tells_gives_the_other_factor(self):
        found = check_weights({"a": t("n*m"), "b": t("n")}, {"a": t(12), "b": t(3)})
        assert {str(s): v for s, v in found.dims.items()} == {"n": 3, "m": 4}

    def test_a_dim_is_given_where_no_weight_tells_it(self):
        wanted, have = {"a": t("n*m"), "b": t("k")}, {"a": t(12), "b": t(7)}
        found = check_weights(wanted, have, dims={Symbol("n"): 3, Symbol("k"): 8})
        assert {str(s): v for s, v in found.dims.items()} == {"k": 7, "n": 3, "m": 4}

    def test_another_rank_is_another_shape(self):
        assert problems({"a": t("n", 3), "b": t()}, {"a": t(3), "b": t(1)}) == [
            "shape: 'a': float32[3], expected float32[n, 3]",
            "shape: 'b': float32[1], expected float32[]",
        ]


class TestTied:
    aliases = {"lm_head.weight": "embed.weight"}  # noqa: RUF012

    @pytest.mark.parametrize("stored", ["lm_head.weight", "embed.weight"])
    def test_either_name_will_do(self, stored: str):
        result = check_weights({"embed.weight": t(4)}, {stored: t(4)}, aliases=self.aliases)
        assert result.fits
        assert result.sources == {"embed.weight": stored}
        assert result.ties == ()

    def test_both_names_are_a_pair_whose_bytes_are_to_be_compared(self):
        result = check_weights(
            {"embed.weight": t(4)}, {"lm_head.weight": t(4), "embed.weight": t(4)}, aliases=self.aliases
        )
        assert result.fits
        assert result.ties == (("embed.weight", "lm_head.weight"),)

    def test_an_alias_of_what_nobody_wants_is_unexpected(self):
        assert problems({}, {"lm_head.weight": t(4)}, aliases=self.aliases) == [
            "unexpected: 'lm_head.weight': float32[4]"
        ]


class TestLeftOver:
    def test_patterns_allow_what_is_left_over(self):
        have = {"a": t(1), "layers.0.inv_freq": t(1), "layers.12.inv_freq": t(1), "x.y": t(1)}
        result = check_weights({"a": t(1)}, have, ignored=["*.inv_freq", "x.y"])
        assert result.fits
        assert result.ignored == ("layers.0.inv_freq", "layers.12.inv_freq", "x.y")

    def test_a_pattern_does_not_match_a_part_of_a_name(self):
        assert problems({}, {"x.yz": t(1), "ax.y": t(1)}, ignored=["x.y"]) != []

    def test_an_ignored_pattern_does_not_hide_a_weight_that_is_wanted(self):
        assert check_weights({"a": t(1)}, {"a": t(1)}, ignored=["*"]).sources == {"a": "a"}

    def test_only_left_over_tensors_get_the_advice_to_ignore_them(self):
        with pytest.raises(LoadError, match="help: name tensors that the model does not need as ignored"):
            check_weights({}, {"a": t(1)}).raise_if_wrong()


class TestDtypes:
    def test_a_float_dtype_may_change_if_asked_for(self):
        result = check_weights({"a": t(1, dtype="float32")}, {"a": t(1, dtype="bfloat16")}, cast=True)
        assert result.fits
        assert result.casts == {"a": "float32"}

    @pytest.mark.parametrize(("stored", "wanted"), [("int8", "float32"), ("float8_e4m3fn", "bfloat16"), ("float32", "int32"), ("uint16", "float32")])  # fmt: skip
    def test_what_is_not_a_plain_float_is_never_converted(self, stored: str, wanted: str):
        assert problems({"a": t(1, dtype=wanted)}, {"a": t(1, dtype=stored)}, cast=True) == [
            f"dtype: 'a': {stored}[1], expected {wanted}[1]"
        ]

    def test_the_advice_to_convert_is_given_where_it_helps(self):
        with pytest.raises(LoadError, match=r"help: load with cast=True, or LLM.load with dtype="):
            check_weights({"a": t(1)}, {"a": t(1, dtype="float16")}).raise_if_wrong()
        with pytest.raises(LoadError) as caught:
            check_weights({"a": t(1)}, {"a": t(1, dtype="int8")}).raise_if_wrong()
        assert "help" not in str(caught.value)


class TestManyProblems:
    def test_more_than_twenty_of_a_kind_are_grouped_by_pattern(self):
        wanted = {f"layers.{i}.{part}": t(3) for i in range(80) for part in ("q", "k")}
        lines = check_weights(wanted, {}).lines()
        assert lines == [
            "missing: 'layers.0.q': float32[3] (and 79 more like 'layers.*.q')",
            "missing: 'layers.0.k': float32[3] (and 79 more like 'layers.*.k')",
        ]

    def test_more_than_twenty_patterns_end_in_a_count(self):
        lines = check_weights({}, {chr(97 + i): t(3) for i in range(26)}).lines()
        assert len(lines) == 21
        assert lines[-1] == "unexpected: and 6 more"

    def test_a_name_with_other_numbers_is_not_nearest(self):
        wanted, have = {"layers.1.weight": t(1)}, {"layers.2.weight": t(1), "layers.1.weights": t(1)}
        assert "nearest unexpected: 'layers.1.weights'" in problems(wanted, have)[-1]
        assert "nearest" not in problems(wanted, {"layers.2.weight": t(1)})[-1]

    @pytest.mark.parametrize(
        ("wanted", "stored", "text"),
        [
            ("", "model.", "the checkpoint's names begin with 'model.', the model's do not"),
            ("model.", "", "the model's names begin with 'model.', the checkpoint's do not"),
        ],
    )
    def test_names_that_differ_by_a_prefix_are_told_so(self, wanted: str, stored: str, text: str):
        names = [f"layers.{i}.weight" for i in range(5)]
        result = check_weights({wanted + n: t(1) for n in names}, {stored + n: t(1) for n in names})
        with pytest.raises(LoadError, match=f"help: {text}"):
            result.raise_if_wrong()

    def test_fifty_thousand_left_over_names_are_summarised(self):
        have = {f"model.layers.{i // 500}.experts.{i % 500}.weight": t(3) for i in range(50_000)}
        wanted = {f"layers.{i // 500}.experts.{i % 500}.weight_packed": t(3) for i in range(50_000)}
        result = check_weights(wanted, have)
        assert len(result.problems) == 100_000
        assert len(result.lines()) == 2
