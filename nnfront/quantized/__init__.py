# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that others have quantised: each way to store weights is a reader, which says how a weight is made of what is stored.

`quantization_config` of a config.json names the way. A reader is a function from its settings to a `Layout`, from the name of a weight to its `Formula`; `derive` puts formulas in
the place of weights, so that they are checked by types, lifted and streamed like all that a model's author derives.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from nnfront.errors import LoadError
from nnfront.files import shown
from nnfront.ir import IRModule, TensorType
from nnfront.quantized.awq import awq
from nnfront.quantized.bitsandbytes import bitsandbytes
from nnfront.quantized.blocks import fp8, mxfp4
from nnfront.quantized.compressed_tensors import compressed_tensors
from nnfront.quantized.derive import derive_weights
from nnfront.quantized.formula import Formula
from nnfront.quantized.gguf import gguf
from nnfront.quantized.gptq import gptq
from nnfront.quantized.nvfp4 import modelopt
from nnfront.quantized.report import StoredReport, StoredWeight
from nnfront.quantized.settings import Settings
from nnfront.quantized.stored import Layout, StoredTensors
from nnfront.quantized.torchao import torchao
from nnfront.quantized.uses import Takes

READERS: Mapping[str, Callable[[Settings], Layout]] = {
    "awq": awq,
    "bitsandbytes": bitsandbytes,
    "compressed-tensors": compressed_tensors,
    "fp8": fp8,
    "gguf": gguf,
    "gptq": gptq,
    "modelopt": modelopt,
    "mxfp4": mxfp4,
    "torchao": torchao,
}
"""By `quant_method`."""

KEYS = ("quantization_config", "compression_config")
"""Where a config.json says how weights are quantised."""


@dataclass(frozen=True)
class Quantization:
    """How a checkpoint's weights are quantised, and patterns of what it holds besides."""

    layout: Layout
    ignored: tuple[str, ...] = ()

    def formulas(self, ir: IRModule, stored: StoredTensors) -> dict[str, Formula]:
        """How each weight of a module that is quantised is made, by its name there."""
        formulas: dict[str, Formula] = {}
        others: dict[str, list[str]] = {}
        for alias, name in ir.aliases.items():
            others.setdefault(name, []).append(alias)
        for weight in (p for f in ir.methods for p in f.weights):
            if weight.name in formulas or not isinstance(weight.type, TensorType):
                continue
            for name in (weight.name, *others.get(weight.name, ())):
                formula = self.layout(stored, name, weight.type)
                if formula is not None:
                    formulas[weight.name] = formula
                    break
        return formulas

    def derive(self, ir: IRModule, stored: StoredTensors, takes: Takes) -> tuple[IRModule, StoredReport]:
        """Put formulas in the place of the weights of a module that is not lifted yet; `takes` says which formats products read as they are."""
        module, report = derive_weights(ir, self.formulas(ir, stored), takes)
        ignored = (*ir.attrs.get("ignored", ()), *self.ignored)
        return IRModule(module.functions, {**module.attrs, "ignored": ignored}), report


def quantization_of(hf_config: Mapping[str, Any]) -> Quantization | None:
    """Read how a config.json says that weights are quantised; None if they are not. Raises LoadError for what is not read."""
    key = next((key for key in KEYS if hf_config.get(key)), None)
    if key is None:
        return None
    values = hf_config[key]
    if not isinstance(values, dict):
        raise LoadError(f"config.json: {key} is {shown(values)}, expected an object")
    settings = Settings(values, f"config.json: {key}")
    method = settings.get("quant_method", "compressed-tensors" if key == "compression_config" else None)
    if not isinstance(method, str) or method not in READERS:
        raise LoadError(
            f"config.json: {key}.quant_method is {shown(method)}, and no reader knows it",
            details=[f"known: {', '.join(READERS)}"],
            help="load a checkpoint that is not quantised, or quantised in one of these ways",
        )
    layout = READERS[method](settings)
    settings.check()
    return Quantization(layout, tuple(settings.ignored))
