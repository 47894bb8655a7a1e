# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding with every scaling that Hugging Face configurations name as `rope_type`.

A scaling is a rule for the frequencies of a head's feature pairs and a factor for the cosines and sines. Two of them depend
on how long the text has become (`dynamic`, `longrope`); that choice is part of the traced method.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from nnfront.errors import LoadError, SpecError
from nnfront.nn.functional import op
from nnfront.nn.module import Module
from nnfront.nn.tensor import Tensor

Rotation: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines of the angles by which `op.rope` rotates."""


@dataclass(frozen=True)
class Frequencies:
    """What a scaling gives.

    `inv_freq` [pairs] float32, radians per position; `attention_factor` multiplies cosines and sines. Beyond `original` positions
    `long` takes the place of inv_freq, or, where `base_growth` is given, the base grows with the length.
    """

    inv_freq: torch.Tensor
    attention_factor: float = 1.0
    original: int = 0
    long: torch.Tensor | None = None
    base_growth: float | None = None


BESIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
ROPE_KEYS = ("rope_parameters", "rope_scaling", *BESIDE)
"""Keys of config.json that `rope_parameters` reads."""


def rope_parameters(config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the rotary parameters of a config.json, of either generation of keys, in the newer form.

    The newer form is one dict with `rope_type` and `rope_theta`; the older one has `rope_theta` beside `rope_scaling`, whose type
    may be called `type`. Values that stand beside the dict (`partial_rotary_factor`, `original_max_position_embeddings`) are taken in.
    `defaults` are the model's for what is absent; without one `rope_theta` is 10000. With a `rope_type` among them they are one whole, taken where
    nothing is said; where they are one dict for each type of layer, so is
    the result; parameters of an older form are then those of full attention, but for `rope_local_base_freq`.
    Raises LoadError where the two generations contradict each other.
    """
    defaults = defaults or {}
    if "full_attention" in defaults:
        return {kind: rope_parameters(_of_type(config, kind), own) for kind, own in defaults.items()}
    said = [(key, config[key]) for key in ("rope_parameters", "rope_scaling") if config.get(key) is not None]
    for key, value in said:
        if not isinstance(value, Mapping):
            raise LoadError(f"{key} is {value!r}, expected an object")
    if "rope_type" in defaults:
        said = said or [("rope_parameters", defaults)]
        defaults = {"rope_theta": defaults["rope_theta"]}
    found = dict(said[0][1]) if said else {}
    theta = config.get("rope_theta")
    if any(value != said[0][1] for _, value in said):
        raise LoadError("rope_parameters and rope_scaling differ")
    if theta is not None and found.get("rope_theta") not in (None, theta):
        raise LoadError(f"rope_theta is {theta!r}, but {said[0][0]} has {found['rope_theta']!r}")
    found["rope_type"] = found.pop("rope_type", None) or found.get("type") or "default"
    found.pop("type", None)
    beside = {key: config.get(key) for key in BESIDE}
    for values in (beside, defaults, {"rope_theta": 10000.0}):
        for key, value in values.items():
            if value is not None and found.get(key) is None:
                found[key] = value
    return found


def _of_type(config: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
    """What a config.json says of the rotation in one type of layers."""
    given = config.get("rope_parameters")
    if isinstance(given, Mapping) and given and all(isinstance(each, Mapping) for each in given.values()):
        return {"rope_parameters": given.get(layer_type)}
    return config if layer_type == "full_attention" else {"rope_theta": config.get("rope_local_base_freq")}


class RotaryEmbedding(Module):
    """Cosines and sines of the angles by which `op.rope` rotates, for given positions.

    head_size: features of a head. parameters: as `rope_parameters` returns them (None: the default with theta 10000).
    max_positions: the model's maximum length, which some scalings refer to.
    Raises SpecError for an unknown `rope_type`, or one whose parameters are incomplete, unknown or no numbers.
    """

    def __init__(
        self, head_size: int, parameters: Mapping[str, Any] | None = None, max_positions: int = 2048
    ) -> None:
        given = {"rope_type": "default", "rope_theta": 10000.0, **(parameters or {})}
        given = {key: value for key, value in given.items() if value is not None}
        kind = given["rope_type"]
        if not isinstance(kind, str) or kind not in SCALINGS:
            raise SpecError(f"unknown rope_type {kind!r}", help=f"use one of {', '.join(SCALINGS)}")
        _check(kind, given)
        share = 1.0 if kind == "proportional" else given.get("partial_rotary_factor", 1.0)
        self.rope_type = kind
        self.rotary_size = int(head_size * share)
        self.rope_theta = float(given["rope_theta"])
        try:
            self.frequencies: Frequencies = SCALINGS[kind](self.rotary_size, given, max_positions)
        except (ArithmeticError, ValueError, RuntimeError) as error:
            raise SpecError(
                f"rope_type {kind!r}: no frequencies follow from the parameters",
                details=[str(error), f"got {_listed(given)}, head size {head_size}"],
            ) from None

    def forward(self, positions: Tensor) -> Rotation:
        """Integers [batch, seq] to cos and sin, each float32 [batch, seq, rotary_size / 2]."""
        frequencies = self._at(positions)
        angles = op.unsqueeze(op.astype(positions, "float32"), -1) * frequencies
        cos, sin = op.cos(angles), op.sin(angles)
        factor = self.frequencies.attention_factor
        return (cos, sin) if factor == 1.0 else (cos * factor, sin * factor)

    def _at(self, positions: Tensor) -> Any:
        """Return the frequencies for a text that has come to these positions."""
        f = self.frequencies
        if f.long is None and f.base_growth is None:
            return f.inv_freq
        length = op.max(positions) + 1
        if f.base_growth is None:
            return op.where(length > f.original, f.long, f.inv_freq)
        exponent = self.rotary_size / (self.rotary_size - 2)
        longer = op.astype(op.maximum(length, f.original), "float32")
        base = self.rope_theta * (f.base_growth * longer / f.original - (f.base_growth - 1)) ** exponent
        return 1.0 / base ** _exponents(self.rotary_size)


class RotaryByLayerType(Module):
    """A `RotaryEmbedding` for each type of layer: `parameters` by type, as `rope_parameters` returns them."""

    def __init__(
        self, head_size: int, parameters: Mapping[str, Mapping[str, Any]], max_positions: int = 2048
    ) -> None:
        self.types = {
            kind: RotaryEmbedding(head_size, each, max_positions) for kind, each in parameters.items()
        }

    def forward(self, positions: Tensor) -> dict[str, Rotation]:
        """Integers [batch, seq] to cos and sin for each type of layer."""
        return {kind: rotary(positions) for kind, rotary in self.types.items()}


def _exponents(size: int) -> torch.Tensor:
    """0, 2/size, 4/size, ...: the powers of the base that are the wavelengths, up to 2 pi."""
    return torch.arange(0, size, 2, dtype=torch.float32) / size


def _default(size: int, given: Mapping[str, Any], max_positions: int) -> Frequencies:
    """theta ** (-2 i / size). Source: RoFormer (arXiv 2104.09864), section 3.2.2."""
    return Frequencies(1.0 / given["rope_theta"] ** _exponents(size))


def _linear(size: int, given: Mapping[str, Any], max_positions: int) -> Frequencies:
    """Positions divided by `factor`. Source: position interpolation (arXiv 2306.15595)."""
    return Frequencies(_default(size, given, max_positions).inv_freq / given["factor"])


def _dynamic(size: int, given: Mapping[str, Any], max_positions: int) -> Frequencies:
    """The base grows with the text beyond the trained length. Source: dynamic NTK scaling, as transformers computes it."""
    inv_freq = _default(size, given, max_positions).inv_freq
    return Frequencies(inv_freq, original=max_positions, base_growth=float(given["factor"]))


def _llama3(size: int, given: Mapping[str, Any], max_positions: int) -> Frequencies:
    """Long wavelengths divided by `factor`, short ones kept, between them a smooth change. Source: Llama 3.1's configuration."""
    inv_freq = _default(size, given, max_positions).inv_freq
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    # The turns of a pair over the trained length.
    turns = given["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return Frequencies((1 - smooth) * inv_freq / given["factor"] + smooth * inv_freq)


def _yarn(size: int, given: Mapping[str, Any], max_positions: int) -> Frequencies:
    """Interpolate pairs that turn seldom, keep those that turn often. Source: YaRN (arXiv 2309.00071), section 3."""
    original = given["original_max_position_embeddings"]
    factor = given.get("factor") or max_positions / original
    theta = given["rope_theta"]

    def pair_of(turns: float) -> float:
        """The (fractional) pair that turns so often over the trained length."""
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_of(given.get("beta_fast") or 32), pair_of(given.get("beta_slow") or 1)
    if given.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    ramp = ((torch.arange(size // 2, dtype=torch.float32) - first) / ((last - first) or 0.001)).clamp(0, 1)
    wavelengths, kept = theta ** _exponents(size), 1 - ramp
    # In the reference's order of operations: at far positions the last bit of a frequency shows in the logits.
    inv_freq = 1.0 / (factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
    attention_factor = given.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all = given.get("mscale"), given.get("mscale_all_dim")
        attention_factor = (
            _mscale(factor, mscale) / _mscale(factor, mscale_all)
            if mscale and mscale_all
            else _mscale(factor, 1)
        )
    return Frequencies(inv_freq, float(attention_factor))


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _longrope(size: int, given: Mapping[str, Any], max_positions: int) -> Frequencies:
    """A searched factor for each pair, one list for short texts and one for long. Source: LongRoPE (arXiv 2402.13753)."""
    original = given["original_max_position_embeddings"]
    factor = given.get("factor") or max_positions / original
    wavelengths = given["rope_theta"] ** _exponents(size)
    short, long = (
        1.0 / (torch.tensor(given[key], dtype=torch.float32) * wavelengths)
        for key in ("short_factor", "long_factor")
    )
    attention_factor = given.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return Frequencies(short, float(attention_factor), original, long)


def _proportional(size: int, given: Mapping[str, Any], max_positions: int) -> Frequencies:
    """Only the first pairs turn, with the wavelengths of the whole head. Source: transformers' `proportional`."""
    turning = int((given.get("partial_rotary_factor") or 1.0) * size // 2)
    inv_freq = _default(size, given, max_positions).inv_freq
    inv_freq[turning:] = 0.0
    return Frequencies(inv_freq / given.get("factor", 1.0))


def _check(kind: str, given: Mapping[str, Any]) -> None:
    """Raise SpecError for a parameter that is missing, that the scaling does not know, or that is not what it must be."""
    required = REQUIRED.get(kind, ())
    missing = [key for key in required if key not in given]
    if missing:
        raise SpecError(
            f"rope_type {kind!r} needs {', '.join(map(repr, missing))}", details=[f"got {_listed(given)}"]
        )
    problems = []
    for key, value in given.items():
        is_right, expected = KINDS.get(key, NUMBER)
        if key not in KNOWN:
            problems.append(f"{key} is {value!r}, which no scaling reads")
        elif not is_right(value):
            problems.append(f"{key} is {value!r}, expected {expected}")
    if problems:
        raise SpecError(f"rope_type {kind!r} has wrong parameters", details=problems)


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


def _are_positive(values: Any) -> bool:
    return isinstance(values, list | tuple) and all(map(_is_positive, values))


def _listed(given: Mapping[str, Any]) -> str:
    return ", ".join(sorted(given))


SCALINGS: Mapping[str, Callable[[int, Mapping[str, Any], int], Frequencies]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}

# Parameters without which a rope_type cannot be computed.
REQUIRED: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("original_max_position_embeddings",),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}

# Parameters that some scaling reads.
KNOWN = {
    "rope_type",
    "rope_theta",
    "partial_rotary_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
}.union(*REQUIRED.values())

# What the value of a parameter must be, and the words for it.
NUMBER = (_is_positive, "a number > 0")
KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "rope_type": (lambda value: value in SCALINGS, "the name of a scaling"),
    "short_factor": (_are_positive, "a list of numbers > 0"),
    "long_factor": (_are_positive, "a list of numbers > 0"),
    "truncate": (lambda value: isinstance(value, bool), "true or false"),
}
