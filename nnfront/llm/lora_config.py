# SPDX-License-Identifier: Apache-2.0
"""What an adapter_config.json says: rank and scale of each module's low-rank product, and that nothing else is meant."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nnfront.files import Folder, shown
from nnfront.llm.folder_files import read_json
from nnfront.quantized import Settings

CONFIG = "adapter_config.json"
MOST = 1e18
"""No number that an adapter is multiplied with is as large: the product of two is a float of 32 bits still."""

# How the product was begun with. Others change the base as well, so the adapter is of no use to what the checkpoint holds.
_BEGINNINGS = (True, False, "gaussian", "orthogonal", "eva")
# How training went, where the adapter comes from, and which modules have a product: the tensors say that themselves.
_NO_SAY = (
    "task_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "lora_dropout",
    "megatron_core",
    "runtime_config",
    "eva_config",
    "loftq_config",
    "qalora_group_size",
)
# A pattern is run over names of modules: one that could take long on them is not.
_PATTERN = re.compile(r"[\w.\\^$|\[\]-]*(?:[*+?][\w.\\^$|\[\]-]*){0,3}")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """An adapter_config.json, read. `base` is the name of the model that it was trained on, as far as that is said."""

    rank: int
    alpha: float
    ranks: Mapping[str, Any]
    alphas: Mapping[str, Any]
    is_rank_stabilised: bool
    is_transposed: bool
    has_magnitudes: bool
    replaced: tuple[str, ...]
    base: str

    def rank_of(self, module: str) -> int:
        """The rank of a module's product."""
        rank: int = _matching(self.ranks, module, self.rank)
        return rank

    def scale_of(self, module: str) -> float:
        """What a module's product is multiplied with."""
        alpha, rank = _matching(self.alphas, module, self.alpha), self.rank_of(module)
        return float(alpha) / (math.sqrt(rank) if self.is_rank_stabilised else rank)


def _matching(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first pattern that fits a module's path, or the end of it."""
    found = (value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, default)


def read_lora_config(folder: Folder) -> LoraConfig:
    """Read a folder's adapter_config.json. Raises LoadError with all keys that say what is not read."""
    values = read_json(folder, CONFIG, "give a folder that holds an adapter in PEFT's layout")
    settings = Settings(
        values,
        str(folder.path / CONFIG),
        "merge the adapter where it was trained, or take out keys that do not change what weights are",
    )
    settings.get("peft_type", only=("LORA",))
    settings.get("bias", "none", only=("none", "all", "lora_only"))
    settings.get("init_lora_weights", True, only=_BEGINNINGS)
    flags = {
        key: settings.get(key, False, only=(True, False))
        for key in ("use_rslora", "fan_in_fan_out", "use_dora", "lora_bias")
    }
    rank = settings.positive("r", 8)
    alpha = settings.get("lora_alpha", 8)
    if not _is_number(alpha):
        settings.problems.append(f"lora_alpha is {shown(alpha)}, expected a number")
    ranks = _patterns(
        settings, "rank_pattern", "an int >= 1", lambda value: type(value) is int and 1 <= value < 2**31
    )
    alphas = _patterns(settings, "alpha_pattern", "a number", _is_number)
    replaced = settings.get("modules_to_save", [])
    if not isinstance(replaced, list) or not all(isinstance(each, str) for each in replaced):
        settings.problems.append(f"modules_to_save is {shown(replaced)}, expected a list of modules")
    settings.unused(*_NO_SAY)
    settings.check()
    assert rank is not None
    base = values.get("base_model_name_or_path")
    return LoraConfig(
        rank,
        alpha,
        ranks,
        alphas,
        flags["use_rslora"],
        flags["fan_in_fan_out"],
        flags["use_dora"],
        tuple(replaced),
        base if isinstance(base, str) else "",
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < MOST


def _patterns(settings: Settings, key: str, expected: str, fits: Any) -> Mapping[str, Any]:
    """A map from patterns of modules to values."""
    found = settings.get(key, {})
    if not isinstance(found, dict):
        settings.problems.append(f"{key} is {shown(found)}, expected an object")
        return {}
    for pattern, value in found.items():
        if not fits(value):
            settings.problems.append(f"{key}[{shown(pattern)}] is {shown(value)}, expected {expected}")
        if not _is_pattern(pattern):
            settings.problems.append(
                f"{key} has the pattern {shown(pattern)}, expected a module's name or the end of it"
            )
    return found


def _is_pattern(text: str) -> bool:
    """Whether a text is a regular expression, and a simple one."""
    try:
        re.compile(text)
    except re.error:
        return False
    return len(text) <= 300 and _PATTERN.fullmatch(text) is not None
