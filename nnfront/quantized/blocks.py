# SPDX-License-Identifier: Apache-2.0
"""Folders of float8 (`fp8`: a scale for each block of a weight, or for all of it) and of OCP's microscaling floats (`mxfp4`); float8 and int8 of other folders."""

from __future__ import annotations

from collections.abc import Sequence

from nnfront import ops
from nnfront.ir import FunctionBuilder, Scalar, TensorType, Var
from nnfront.ops.encoded import Encoded
from nnfront.quant_format import FORMATS, TOGETHER
from nnfront.quantized.formula import Formula
from nnfront.quantized.settings import Settings
from nnfront.quantized.stored import (
    Layout,
    StoredTensors,
    each_output,
    for_outputs,
    grouped,
    matrix,
    over_blocks,
    ungrouped,
)


def fp8(settings: Settings) -> Layout:
    """Read the settings of float8: `weight` float8_e4m3fn [out, in], `weight_scale_inv`, one factor for each block, or `weight_scale`."""
    block = settings.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(size) is int and size >= 1 for size in block)
    ):
        settings.problems.append(f"weight_block_size is {block!r}, expected [outputs, inputs]")
        block = None
    settings.get("fmt", "e4m3", only=("e4m3",))
    # How inputs were to be rounded; here they are not. How scales were rounded; they are as they are.
    settings.unused(
        "activation_scheme", "scale_fmt", "modules_to_not_convert", "ignored_layers", "dequantize"
    )
    settings.ignored += ["*.input_scale", "*.activation_scale", "*.k_scale", "*.v_scale"]

    def layout(stored: StoredTensors, name: str, type: TensorType) -> Formula | None:
        sizes = matrix(type)
        if sizes is None or name not in stored or stored.tensors[name].dtype != "float8_e4m3fn":
            return None
        scale = next((n for n in (f"{name}_scale_inv", f"{name}_scale") if n in stored), f"{name}_scale_inv")
        return float8(stored, name, scale, sizes, tuple(block) if block else None)

    return layout


def float8(
    stored: StoredTensors, name: str, scale: str, sizes: tuple[int, int], block: tuple[int, int] | None
) -> Formula:
    """A weight float8_e4m3fn [out, in] with one scale, one for each output, or one for each block.

    Blocks of as many inputs as groups that products read stay as they are stored: each of their outputs has its scale.
    """
    outputs, inputs = sizes
    weight = TensorType((outputs, inputs), "float8_e4m3fn")
    if block is None:
        kind = stored.scale_type(scale, outputs)

        def make(b: FunctionBuilder, found: Sequence[Var]) -> Encoded | Var:
            return Encoded(FORMATS["fp8"], found[0], for_outputs(b, found[1], outputs))

        return Formula("float8", {name: weight, scale: kind}, make, FORMATS["fp8"], kind.dtype)
    rows, columns = block
    kind = stored.type(scale, (-(-outputs // rows), -(-inputs // columns)), "float32")

    in_blocks, format = f"float8 in blocks of {rows} x {columns}", grouped("fp8", columns)
    if columns == TOGETHER and inputs % columns == 0:

        def make_groups(b: FunctionBuilder, found: Sequence[Var]) -> Encoded | Var:
            return Encoded(format, found[0], each_output(b, found[1], rows, outputs))

        return Formula(in_blocks, {name: weight, scale: kind}, make_groups, format, kind.dtype)

    def make_blocks(b: FunctionBuilder, found: Sequence[Var]) -> Encoded | Var:
        return over_blocks(b, found[0], found[1], (rows, columns), outputs, inputs)

    return Formula(in_blocks, {name: weight, scale: kind}, make_blocks)


def int8(
    scheme: str,
    stored: StoredTensors,
    names: Sequence[str],
    sizes: tuple[int, int],
    scales: TensorType,
    group: int | None = None,
) -> Formula:
    """A weight int8 [out, in] with scales, and with zero points where they are stored, by their names in this order.

    `scales` is the type of either: one, one for each output, or one for each `group` of inputs.
    """
    (name, scale, *more), (outputs, inputs) = names, sizes
    zeros = [each for each in more if each in stored]
    sources = {name: TensorType(sizes, "int8"), scale: scales}
    sources |= {each: TensorType(scales.shape, "int8") for each in zeros}
    is_whole = group is None or inputs % group == 0
    format = grouped("int8", group, has_zeros=bool(zeros)) if is_whole else None

    def make(b: FunctionBuilder, found: Sequence[Var]) -> Encoded | Var:
        factors, *others = [for_outputs(b, x, outputs) if group is None else x for x in found[1:]]
        middle = others[0] if others else None
        if format is not None:
            return Encoded(format, found[0], factors, middle)
        return ungrouped(b, found[0], middle or Scalar(0), factors, group or inputs)

    return Formula(scheme, sources, make, format, scales.dtype)


def mxfp4(settings: Settings) -> Layout:
    """Read the settings of MXFP4: `NAME_blocks` uint8 [..., groups, 16] and `NAME_scales` uint8 [..., groups] in the place of NAME.

    A matrix of experts [experts, in, out] is stored transposed, [experts, out, ...].
    """
    settings.unused("modules_to_not_convert", "dequantize", "use_kernels")

    def layout(stored: StoredTensors, name: str, type: TensorType) -> Formula | None:
        blocks, scales = f"{name}_blocks", f"{name}_scales"
        shape = type.static_shape
        if blocks not in stored or shape is None or len(shape) not in (2, 3):
            return None
        is_transposed = type.ndim == 3
        outer, inputs = (shape[:1] + shape[2:], shape[1]) if is_transposed else (shape[:1], shape[1])
        groups = inputs // 32
        sources = {
            blocks: TensorType((*outer, groups, 16), "uint8"),
            scales: TensorType((*outer, groups), "uint8"),
        }

        def make(b: FunctionBuilder, found: Sequence[Var]) -> Encoded | Var:
            packed = b.call(ops.reshape, found[0], shape=(*outer, groups * 16))
            return Encoded(FORMATS["mxfp4"], packed, found[1], is_transposed=is_transposed)

        return Formula("MXFP4", sources, make, FORMATS["mxfp4"], "uint8", is_transposed=is_transposed)

    return layout
