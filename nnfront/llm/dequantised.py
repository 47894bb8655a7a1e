# SPDX-License-Identifier: Apache-2.0
"""The weights that a quantised checkpoint stands for, in float32: what `verify` gives a model file and transformers to compute with."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file

from nnfront.compiler import compile
from nnfront.errors import LoadError
from nnfront.ir import FunctionBuilder, IRModule
from nnfront.llm.comparison import Comparison, Reference
from nnfront.llm.folder_files import CONFIG
from nnfront.llm.hf_folder import CompiledFolder, stored_tensors
from nnfront.llm.model_files import Architecture
from nnfront.ops.encoded import Encoded
from nnfront.quantized import KEYS, Formula, quantization_of
from nnfront.weights import Checkpoint
from nnfront.weights.bound_checkpoint import BoundWeights
from nnfront.weights.checkpoint import SINGLE

BY_US = "transformers computes with the weights as nnfront dequantises them"
BY_THEM = "transformers reads and dequantises the file itself"


@dataclass(frozen=True)
class Dequantised:
    """Weights by the names of a model file. `formulas` are those of the quantised ones."""

    checkpoint: Checkpoint
    weights: BoundWeights
    formulas: Mapping[str, Formula]

    def __contains__(self, name: str) -> bool:
        return name in self.formulas or name in self.weights

    def tensor(self, name: str) -> torch.Tensor:
        """A weight in float32, made op by op of what is stored: products that read it as it is stored are not asked."""
        formula = self.formulas.get(name)
        if formula is None:
            return self.weights.tensor(name)
        builder = FunctionBuilder("weight")
        sources = [builder.param(source, type, "input") for source, type in formula.sources.items()]
        made = formula.make(builder, sources)
        dense = made.dense(builder, "float32") if isinstance(made, Encoded) else made
        session = compile(IRModule([builder.finish(dense)])).load({})
        found: torch.Tensor = session["weight"](*map(self.checkpoint.tensor, formula.sources))
        return found.float()


def stored_weights(
    compiled: CompiledFolder,
    architecture: Architecture,
    config: Any,
    hf_config: dict[str, Any],
    ignored: Sequence[str],
) -> Dequantised:
    """The weights of a compiled folder's model, which computes in float32. Raises LoadError for weights that the model does not take."""
    checkpoint = compiled.checkpoint
    weights = compiled.executable.named(checkpoint, ignored, cast=True)
    quantization = quantization_of(hf_config)
    if quantization is None:
        return Dequantised(checkpoint, weights, {})
    module = architecture.export(config, checkpoint.infos)
    return Dequantised(checkpoint, weights, quantization.formulas(module, stored_tensors(checkpoint)))


def run_dequantised(
    compared: Comparison,
    files: Sequence[Path],
    weights: Mapping[str, torch.Tensor],
    hf_config: Mapping[str, Any],
) -> tuple[Reference, str]:
    """Run transformers' model of quantised files, and say who has dequantised their weights.

    A GGUF file is read by transformers, if it can; else it gets a folder of `weights`, which lasts as long as it runs. Raises LoadError if it cannot load that.
    """
    is_gguf = hf_config.get(KEYS[0], {}).get("quant_method") == "gguf"
    if is_gguf and len(files) == 1:
        with suppress(LoadError):  # an architecture, a type or a package that it lacks
            return compared.run_theirs(files[0].parent, gguf_file=files[0].name), BY_THEM
    with _folder(weights, hf_config) as folder:
        return compared.run_theirs(folder), BY_US


@contextmanager
def _folder(weights: Mapping[str, torch.Tensor], hf_config: Mapping[str, Any]) -> Iterator[Path]:
    with TemporaryDirectory(prefix="nnfront-") as name:
        folder = Path(name)
        said = {key: value for key, value in hf_config.items() if key not in KEYS}
        (folder / CONFIG).write_text(json.dumps({**said, "dtype": "float32"}), encoding="utf-8")
        save_file({k: v.contiguous().clone() for k, v in weights.items()}, folder / SINGLE, {"format": "pt"})
        yield folder
