# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's floats: 4 bits (e2m1) with a scale of float8_e4m3fn for 16 inputs and one of float32 for all (NVFP4), or float8, in ModelOpt's folders.

Shapes: weight uint8 [out, in / 2], two to a byte, the first in the low half; weight_scale float8_e4m3fn [out, in / 16]; weight_scale_2 float32, one.
The same in compressed-tensors' folders, where the factor of all is stored as one by which scales were multiplied. Each output is given the factor, as our own format has it.
"""

from __future__ import annotations

from collections.abc import Sequence

from nnfront import ops
from nnfront.ir import FunctionBuilder, Scalar, TensorType, Var
from nnfront.ops.encoded import Encoded, cast
from nnfront.quant_format import FORMATS
from nnfront.quantized.blocks import float8
from nnfront.quantized.formula import Formula
from nnfront.quantized.settings import Settings
from nnfront.quantized.stored import Layout, StoredTensors, for_outputs, matrix

GROUP = 16


def modelopt(settings: Settings) -> Layout:
    algorithm = settings.get("quant_algo", only=("NVFP4", "FP8"))
    settings.get("group_size", GROUP, only=(GROUP,))
    settings.unused(
        "producer", "ignore", "exclude_modules", "config_groups", "kv_cache_scheme", "kv_cache_quant_algo"
    )
    settings.unused("has_zero_point", "pre_quant_scale", "quantization_status")
    settings.ignored += ["*.input_scale", "*.k_scale", "*.v_scale"]

    def layout(stored: StoredTensors, name: str, type: TensorType) -> Formula | None:
        sizes = matrix(type)
        if sizes is None or f"{name}_scale" not in stored:
            return None
        if algorithm == "FP8":
            return float8(stored, name, f"{name}_scale", sizes, None)
        return nvfp4_packed(stored, name, f"{name}_scale", f"{name}_scale_2", sizes, is_inverse=False)

    return layout


def nvfp4_packed(
    stored: StoredTensors, weight: str, scale: str, factor: str, sizes: tuple[int, int], *, is_inverse: bool
) -> Formula:
    """NVFP4 in tensors of these names. `is_inverse`: scales are divided by the factor of all."""
    outputs, inputs = sizes
    sources = {
        weight: TensorType((outputs, inputs // 2), "uint8"),
        scale: TensorType((outputs, inputs // GROUP), "float8_e4m3fn"),
        factor: stored.scale_type(factor, 1),
    }

    def make(b: FunctionBuilder, found: Sequence[Var]) -> Encoded:
        whole = cast(b, found[2], "float32")
        if is_inverse:
            whole = b.call(ops.divide, Scalar(1.0), whole)
        return Encoded(FORMATS["nvfp4"], found[0], found[1], for_outputs(b, whole, outputs))

    return Formula("NVFP4", sources, make, FORMATS["nvfp4"], "float8_e4m3fn")


def mxfp4_packed(weight: str, scale: str, sizes: tuple[int, int]) -> Formula:
    """MXFP4 in tensors of these names."""
    outputs, inputs = sizes
    sources = {
        weight: TensorType((outputs, inputs // 2), "uint8"),
        scale: TensorType((outputs, inputs // 32), "uint8"),
    }
    return Formula(
        "MXFP4",
        sources,
        lambda b, found: Encoded(FORMATS["mxfp4"], found[0], found[1]),
        FORMATS["mxfp4"],
        "uint8",
    )
