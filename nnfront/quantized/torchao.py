# SPDX-License-Identifier: Apache-2.0
"""torchao's folders in safetensors: a weight's parts as tensors `MODULE._weight_PART`.

int8      qdata int8 [out, in], scale for each output, for all or for groups; zero_point likewise, if it is not symmetric
float8    qdata float8_e4m3fn [out, in], scale for each output or for all

How inputs were to be rounded is not followed. Parts of other kinds are not read: they are named as unexpected, and the weight as missing.
"""

from __future__ import annotations

from collections.abc import Sequence

from nnfront.ir import FunctionBuilder, TensorType, Var
from nnfront.ops.encoded import Encoded
from nnfront.quantized.blocks import float8
from nnfront.quantized.formula import Formula
from nnfront.quantized.settings import Settings
from nnfront.quantized.stored import Layout, StoredTensors, for_outputs, grouped, matrix


def torchao(settings: Settings) -> Layout:
    """Read torchao's settings; what parts there are says how each weight is stored."""
    settings.unused(
        *("quant_type", "quant_type_kwargs", "modules_to_not_convert"),
        *("include_input_output_embeddings", "untie_embedding_weights"),
    )

    def layout(stored: StoredTensors, name: str, type: TensorType) -> Formula | None:
        module, _, own = name.rpartition(".")
        part = f"{module}._{own}_"
        sizes = matrix(type)
        if sizes is None or f"{part}qdata" not in stored or f"{part}scale" not in stored:
            return None
        dtype = stored.tensors[f"{part}qdata"].dtype
        if dtype == "float8_e4m3fn":
            return float8(stored, f"{part}qdata", f"{part}scale", sizes, None)
        return _int8(stored, part, sizes) if dtype == "int8" else None

    return layout


def _int8(stored: StoredTensors, part: str, sizes: tuple[int, int]) -> Formula:
    """int8 in groups, whose number the shape of the scales says."""
    outputs, inputs = sizes
    shape = [int(size) for size in stored.tensors[f"{part}scale"].shape]
    groups = shape[1] if len(shape) == 2 and shape[0] == outputs and inputs % max(shape[1], 1) == 0 else 1
    each = inputs // max(groups, 1)
    scale = f"{part}scale"
    kind = (
        stored.scale_type(scale, outputs) if groups == 1 else stored.type(scale, (outputs, groups), "float32")
    )
    sources = {f"{part}qdata": TensorType(sizes, "int8"), scale: kind}
    has_zeros = f"{part}zero_point" in stored
    if has_zeros:
        sources[f"{part}zero_point"] = TensorType(kind.shape, "int8")
    format = grouped("int8", None if groups == 1 else each, has_zeros=has_zeros)

    def make(b: FunctionBuilder, found: Sequence[Var]) -> Encoded:
        columns = [for_outputs(b, x, outputs) if groups == 1 else x for x in found[1:]]
        return Encoded(format, found[0], columns[0], columns[1] if has_zeros else None)

    return Formula("torchao's int8", sources, make, format, kind.dtype)
