# SPDX-License-Identifier: Apache-2.0
"""torchao's folders in safetensors: a weight's parts as tensors `MODULE._weight_PART`.

int8      qdata int8 [out, in], scale for each output, for all or for groups; zero_point likewise, if it is not symmetric
float8    qdata float8_e4m3fn [out, in], scale for each output or for all

How inputs were to be rounded is not followed. Parts of other kinds are not read: they are named as unexpected, and the weight as missing.
"""

from __future__ import annotations

from nnfront.ir import TensorType
from nnfront.quantized.blocks import float8, int8
from nnfront.quantized.formula import Formula
from nnfront.quantized.settings import Settings
from nnfront.quantized.stored import Layout, StoredTensors, matrix


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
    names = f"{part}qdata", f"{part}scale", f"{part}zero_point"
    shape = [int(size) for size in stored.tensors[names[1]].shape]
    groups = shape[1] if len(shape) == 2 and shape[0] == outputs and inputs % max(shape[1], 1) == 0 else 1
    if groups == 1:
        return int8("torchao's int8", stored, names, sizes, stored.scale_type(names[1], outputs))
    scales = stored.type(names[1], (outputs, groups), "float32")
    return int8("torchao's int8", stored, names, sizes, scales, inputs // max(groups, 1))
