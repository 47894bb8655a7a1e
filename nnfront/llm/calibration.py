# SPDX-License-Identifier: Apache-2.0
"""What was measured of a model on some text, as a file: the moments of the inputs of each weight, which quantising rounds by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from nnfront.errors import LoadError
from nnfront.files import shown_text
from nnfront.ir import IRModule, TensorType, type_text
from nnfront.passes import QuantizeReport, QuantScheme, quantize_weights
from nnfront.passes.quantize_weights import MOMENTS
from nnfront.weights import Checkpoint

TOKENS = "calibrated_tokens"
"""What the file's metadata say: of how many tokens it is."""


def quantized_by(
    module: IRModule, scheme: QuantScheme, checkpoint: Checkpoint
) -> tuple[IRModule, QuantizeReport, Checkpoint]:
    """Quantise a module as a scheme says, with its calibration if it has one: the module, what became of the weights, and the checkpoint that holds the moments as well.

    Raises LoadError for a file that is none, or of another model.
    """
    if scheme.calibration is None:
        return quantize_weights(module, scheme), quantize_weights.report(module, scheme), checkpoint
    found = _opened(Path(scheme.calibration))
    types = {name: TensorType(info.shape, info.dtype) for name, info in found.infos.items()}
    report = quantize_weights.report(module, scheme, types)
    wrong = next(_misfits(types, {weight.name: weight.inputs for weight in report.weights}), None)
    if wrong is not None:
        raise LoadError(f"{found.path.name} is a calibration of another model", details=[wrong], help=HELP)
    new = quantize_weights(module, scheme, types)
    read = {param.name for function in new.functions for param in function.params}
    unread = (MOMENTS + name for name in types if MOMENTS + name not in read)
    attrs = {**new.attrs, "ignored": (*new.attrs.get("ignored", ()), *unread)}
    return IRModule(new.functions, attrs), report, checkpoint.with_others(found, MOMENTS)


HELP = "make one of this model: nnfront calibrate DIR --text FILE -o OUT"


def _misfits(types: Mapping[str, TensorType], inputs: Mapping[str, tuple[int, ...]]) -> Iterator[str]:
    """Say which moments are not those of weights with so many inputs."""
    for name, type in types.items():
        blocks, size, again = type.shape if type.ndim == 3 else (0, 0, 0)
        if type.dtype != "float32" or size != again or blocks * size not in inputs.get(name, [blocks * size]):
            there = f"{shown_text(repr(name))} is {type_text(type)}"
            known = f"{' or '.join(map(str, inputs.get(name, ()))) or 'no'} inputs"
            yield f"{there}, " + (
                f"and has {known} here" if name in inputs else "expected float32 [blocks, size, size]"
            )
    for name in types:
        if name not in inputs:
            yield f"the model has no weight {shown_text(repr(name))}"


def _opened(path: Path) -> Checkpoint:
    """The file, all of it read once. Raises LoadError for one that `calibrate` did not write, and for moments that are no finite numbers."""
    try:
        found = Checkpoint(path)
    except LoadError as error:
        details = str(error).splitlines()
        raise LoadError(f"{shown_text(str(path))} is no calibration", details=details, help=HELP) from error
    if TOKENS not in found.metadata:
        raise LoadError(f"{shown_text(str(path))} is no calibration", help=HELP)
    for name in found.infos:
        if not bool(torch.isfinite(found.tensor(name)).all()):
            raise LoadError(
                f"{shown_text(str(path))} holds NaN or infinities",
                details=[f"in the moments of {shown_text(repr(name))}"],
                help=HELP,
            )
    return found
