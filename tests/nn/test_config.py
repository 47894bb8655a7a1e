# SPDX-License-Identifier: Apache-2.0
"""`nn.Config`: nothing of a config.json that changes the maths is dropped, whatever is wrong is one error."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from transformers.activations import ACT2FN

import nnfront as nn
from nnfront.errors import LoadError, SpecError


@dataclass(frozen=True)
class Config(nn.Config):
    """One of each kind of field."""

    model_types: ClassVar = {"plain": {}, "windowed": {"window": 8}}
    lacks: ClassVar = {"plain": ("window",)}
    aliases: ClassVar = {"n_layer": "num_layers"}
    only: ClassVar = {"hidden_act": ("silu", "relu"), "layer_types": ("full_attention",)}
    unused: ClassVar = {"note": "nobody reads it"}

    num_layers: int = 2
    num_dense_layers: int = field(default=0, metadata={"min": 0})
    window: int | None = None
    eps: float = 1e-6
    is_tied: bool = False
    hidden_act: str = "silu"
    sparse: tuple[int, ...] = ()
    rope_parameters: dict[str, Any] = field(default_factory=lambda: nn.rope_parameters({}))
    dtype: str = "float32"


def problems(**config: Any) -> tuple[str, ...]:
    with pytest.raises(LoadError) as caught:
        Config.from_hf(config)
    assert caught.value.what == "config.json says what this model file does not compute"
    assert caught.value.where == __file__
    return caught.value.details


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"eps": "64"}, "eps is '64', expected a number"),
        ({"eps": 10**400}, f"eps is {'1' + 76 * '0'}..., expected a number"),
        (
            {"model_type": ["plain"], "architectures": 3},
            "model_type is ['plain'], expected 'plain' or 'windowed'",
        ),
        ({"eps": True}, "eps is true, expected a number"),
        ({"eps": float("nan")}, "eps is nan, expected a number"),
        ({"num_layers": True}, "num_layers is true, expected an int >= 1"),
        ({"num_layers": 2.0}, "num_layers is 2.0, expected an int >= 1"),
        ({"num_layers": 0}, "num_layers is 0, expected an int >= 1"),
        ({"num_layers": -2}, "num_layers is -2, expected an int >= 1"),
        ({"num_dense_layers": -1}, "num_dense_layers is -1, expected an int >= 0"),
        ({"window": "8"}, "window is '8', expected an int >= 1 or null"),
        ({"is_tied": 1}, "is_tied is 1, expected true or false"),
        ({"hidden_act": 3}, "hidden_act is 3, expected a text"),
        ({"sparse": [1, -1]}, "sparse is [1, -1], expected a list, each item an int >= 0"),
        ({"sparse": 1}, "sparse is 1, expected a list, each item an int >= 0"),
        ({"dtype": "int8"}, "dtype is 'int8', expected 'float16', 'bfloat16', 'float32' or 'float64'"),
        (
            {"torch_dtype": "half"},
            "torch_dtype is 'half', expected 'float16', 'bfloat16', 'float32' or 'float64'",
        ),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', expected 'silu' or 'relu'"),
        (
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types is ['full_attention', 'sliding_attention'], expected 'full_attention'",
        ),
        ({"multiplier": 1.0}, "multiplier is 1.0, and the file does not know the key"),
        ({"is_gated": True}, "is_gated is true, and the file does not know the key"),
        ({"text_config": {"a": 1}}, "text_config is {'a': 1}, and the file does not know the key"),
        ({"num_layers": 2, "n_layer": 3}, "n_layer is 3, but num_layers is 2"),
        ({"model_type": "plain", "window": 8}, "window is 8, which 'plain' does not have"),
        ({"model_type": "other"}, "model_type is 'other', expected 'plain' or 'windowed'"),
        (
            {"model_type": "other", "architectures": ["OtherForCausalLM"]},
            "model_type is 'other', expected 'plain' or 'windowed'",
        ),
        ({"rope_scaling": 3}, "rope_scaling is 3, expected an object"),
        (
            {"rope_theta": 5.0, "rope_parameters": {"rope_theta": 6.0}},
            "rope_theta is 5.0, but rope_parameters has 6.0",
        ),
        (
            {"rope_scaling": {"factor": 1.0}, "rope_parameters": {"factor": 2.0}},
            "rope_parameters and rope_scaling differ",
        ),
    ],
)
def test_what_the_file_does_not_compute_is_refused(config: dict[str, Any], problem: str) -> None:
    expected = {"hidden_act is 3, expected a text": ("hidden_act is 3, expected 'silu' or 'relu'",)}
    assert problems(**config) == (problem, *expected.get(problem, ()))


def test_everything_wrong_is_one_error_that_says_what_to_do() -> None:
    with pytest.raises(LoadError) as caught:
        Config.from_hf({"eps": "x", "multiplier": 0.5, "window": 0})
    assert str(caught.value) == (
        "config.json says what this model file does not compute\n"
        "  eps is 'x', expected a number\n"
        "  multiplier is 0.5, and the file does not know the key\n"
        "  window is 0, expected an int >= 1 or null\n"
        f"  at {__file__}\n"
        "  help: a key that does not change what is computed: name it in the file's Config.unused, or take it out of"
        " config.json; else write a model file that computes it"
    )


@pytest.mark.parametrize(
    "said",
    [
        {"note": 3, "_name_or_path": "x", "use_cache": True, "initializer_range": 0.02, "eos_token_id": [1]},
        {"multiplier": None, "is_gated": False, "pruned_heads": {}, "layer_types": ["full_attention"] * 2},
        {"hidden_act": None, "eps": None, "sparse": None, "dtype": None, "rope_scaling": None},
        {"model_type": "plain", "window": None},
        {"model_type": "mine", "architectures": ["PlainForCausalLM"]},
    ],
)
def test_what_says_nothing_about_the_maths_changes_nothing(said: dict[str, Any]) -> None:
    assert Config.from_hf(said) == Config()


def test_values_are_taken_over_as_they_are() -> None:
    config = {
        "n_layer": 3,
        "num_dense_layers": 0,
        "window": 4,
        "eps": 1,
        "is_tied": True,
        "hidden_act": "relu",
        "sparse": [0, 2],
        "rope_theta": 5.0,
        "torch_dtype": "bfloat16",
    }
    rope = {"rope_type": "default", "rope_theta": 5.0}
    assert Config.from_hf(config) == Config(3, 0, 4, 1, True, "relu", (0, 2), rope, "bfloat16")


def test_an_absent_key_has_the_default_of_its_model_type() -> None:
    assert Config.from_hf({"model_type": "windowed"}).window == 8
    assert Config.from_hf({"model_type": "windowed", "window": None}).window is None
    assert Config.from_hf({"model_type": "plain"}).window is None


@pytest.mark.parametrize("name", nn.ACTIVATIONS)
def test_activations_are_those_that_transformers_calls_so(name: str) -> None:
    x = torch.linspace(-8, 8, 201)
    torch.testing.assert_close(nn.eager(nn.ACTIVATIONS[name], x), ACT2FN[name](x), rtol=1e-6, atol=1e-6)


LONG = {"rope_type": "longrope", "original_max_position_embeddings": 64, "short_factor": [1.0] * 8}


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        (
            {"rope_theta": "1e4"},
            "rope_type 'default' has wrong parameters\n  rope_theta is '1e4', expected a number > 0",
        ),
        ({"rope_theta": 0}, "rope_theta is 0, expected a number > 0"),
        (
            {"alpha": 2.0},
            "rope_type 'default' has wrong parameters\n  alpha is 2.0, which no scaling reads",
        ),
        ({"full_attention": {}}, "full_attention is {}, which no scaling reads"),
        ({"rope_type": "linear", "factor": True}, "factor is True, expected a number > 0"),
        ({"rope_type": ["linear"]}, "unknown rope_type ['linear']"),
        ({**LONG, "long_factor": 2.0}, "long_factor is 2.0, expected a list of numbers > 0"),
        (
            {**LONG, "long_factor": [2.0] * 7},
            "rope_type 'longrope': no frequencies follow from the parameters",
        ),
        (
            {"rope_type": "yarn", "rope_theta": 1.0, "factor": 4.0, "original_max_position_embeddings": 64},
            "rope_type 'yarn': no frequencies follow from the parameters\n  float division by zero\n"
            "  got factor, original_max_position_embeddings, rope_theta, rope_type, head size 16",
        ),
        (
            {"rope_type": "yarn", "truncate": 1, "original_max_position_embeddings": 64},
            "truncate is 1, expected true or false",
        ),
    ],
)
def test_rotary_parameters_that_cannot_be_are_refused(parameters: dict[str, Any], text: str) -> None:
    with pytest.raises(SpecError) as caught:
        nn.RotaryEmbedding(16, parameters)
    assert text in str(caught.value)


def test_parameters_of_other_scalings_have_no_say_as_in_transformers() -> None:
    plain, more = nn.RotaryEmbedding(16), nn.RotaryEmbedding(16, {"factor": 2.0, "beta_fast": 8})
    assert torch.equal(plain.frequencies.inv_freq, more.frequencies.inv_freq)


@dataclass(frozen=True)
class Windowed(nn.WindowedConfig):
    model_types: ClassVar = {"windowed": {}}
    only: ClassVar = {"hidden_act": ("silu",)}

    def is_sliding(self, layer: int) -> bool:
        return layer % 2 == 0


class TestWindows:
    def test_layers_that_are_not_listed_see_what_the_model_says(self) -> None:
        config = Windowed.from_hf({"num_hidden_layers": 3, "sliding_window": 8})
        assert [config.window(i) for i in range(3)] == [8, None, 8]

    def test_a_list_of_types_says_what_each_layer_sees(self) -> None:
        types = ["full_attention", "sliding_attention"]
        config = Windowed.from_hf({"num_hidden_layers": 2, "sliding_window": 8, "layer_types": types})
        assert [config.window(i) for i in range(2)] == [None, 8]
        assert [config.layer_type(i) for i in range(2)] == types

    def test_a_list_of_another_length_is_refused(self) -> None:
        with pytest.raises(LoadError) as caught:
            Windowed.from_hf({"num_hidden_layers": 2, "layer_types": ["full_attention"] * 3})
        assert caught.value.what == "layer_types has 3 entries for 2 layers"

    def test_a_type_that_is_not_known_is_refused_beside_what_the_file_itself_restricts(self) -> None:
        with pytest.raises(LoadError) as caught:
            Windowed.from_hf({"layer_types": ["chunked_attention"] * 32, "hidden_act": "gelu"})
        types, act = caught.value.details
        assert types.endswith("expected 'full_attention' or 'sliding_attention'")
        assert act == "hidden_act is 'gelu', expected 'silu'"


def test_rotary_defaults_of_a_model_hold_where_nothing_else_is_said() -> None:
    defaults = {"rope_theta": 5e5, "partial_rotary_factor": 0.5}
    assert nn.rope_parameters({}, defaults) == {"rope_type": "default", **defaults}
    assert nn.rope_parameters({"rope_theta": 1e4}, defaults)["rope_theta"] == 1e4
    whole = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}
    assert nn.rope_parameters({}, whole) == whole
    said = {"rope_parameters": {"rope_type": "default"}}
    assert nn.rope_parameters(said, whole) == {"rope_type": "default", "rope_theta": 5e5}


def test_rotary_parameters_by_the_type_of_layer_are_read_of_either_generation_of_keys() -> None:
    defaults = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}
    scaled = {"rope_type": "linear", "factor": 8.0}
    plain = {"rope_type": "default"}
    old = {"rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": scaled}
    assert nn.rope_parameters(old, defaults) == {
        "sliding_attention": {**plain, "rope_theta": 2e4},
        "full_attention": {**scaled, "rope_theta": 2e6},
    }
    new = {"rope_parameters": {"sliding_attention": plain, "full_attention": scaled}}
    assert nn.rope_parameters(new, defaults) == {
        "sliding_attention": {**plain, "rope_theta": 1e4},
        "full_attention": {**scaled, "rope_theta": 1e6},
    }
