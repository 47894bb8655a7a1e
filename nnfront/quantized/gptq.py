# SPDX-License-Identifier: Apache-2.0
"""GPTQ's folders: `qweight`, `qzeros`, `scales` and `g_idx` in the place of `weight`.

Shapes, with 32 / bits numbers to a word of int32, the first in the lowest bits:
qweight [in / per word, out], qzeros [groups, out / per word], scales [groups, out], g_idx [in], the group of each input.
The first version of the format holds zero points less one. Inputs that were quantised in the order of their activations (`desc_act`) are not in groups of neighbours: such weights are
dequantised when they are loaded.
"""

from __future__ import annotations

from collections.abc import Sequence

from nnfront import ops
from nnfront.ir import FunctionBuilder, Scalar, TensorType, Var
from nnfront.ops.encoded import Encoded
from nnfront.quantized.formula import Formula
from nnfront.quantized.settings import Settings
from nnfront.quantized.stored import (
    Layout,
    StoredTensors,
    as_bytes,
    grouped,
    matrix,
    transposed,
    ungrouped,
    unpacked,
)

FORMATS_BY_BITS = {4: "uint4", 8: "uint8"}


def gptq(settings: Settings) -> Layout:
    bits = settings.get("bits", only=(2, 4, 8))
    group = settings.positive("group_size", 128, or_all=True)
    is_ordered = settings.get("desc_act", False, only=(True, False))
    name = "checkpoint_format" if "checkpoint_format" in settings.values else "format"
    version = settings.get(name, "gptq", only=("gptq", "gptq_v2"))
    settings.get("pack_dtype", "int32", only=("int32",))
    settings.get("is_marlin_format", False, only=(False,))
    settings.get("dynamic", {}, only=({},))
    settings.unused(
        "sym",  # zero points are stored all the same
        "format",
        "lm_head",
        *(
            "backend",
            "batch_size",
            "block_name_to_quantize",
            "cache_block_outputs",
            "damp_percent",
            "dataset",
        ),
        *("exllama_config", "max_input_length", "meta", "model_file_base_name", "model_name_or_path"),
        *(
            "model_seqlen",
            "module_name_preceding_first_block",
            "modules_in_block_to_quantize",
            "pad_token_id",
        ),
        *("quantizer", "static_groups", "tokenizer", "true_sequential", "use_cuda_fp16", "use_exllama"),
        *("damp_auto_increment", "act_group_aware", "hyb_act", "mse", "uri", "disable_exllama"),
    )
    if not is_ordered:
        settings.ignored.append("*.g_idx")
    offset = int(version == "gptq")

    def layout(stored: StoredTensors, name: str, type: TensorType) -> Formula | None:
        sizes, base = matrix(type), name.removesuffix("weight")
        if sizes is None or base == name or f"{base}qweight" not in stored:
            return None
        (outputs, inputs), each = sizes, group or sizes[1]
        groups, per_word = -(-inputs // each), 32 // bits
        sources = {
            f"{base}qweight": TensorType((inputs // per_word, outputs), "int32"),
            f"{base}qzeros": TensorType((groups, outputs // per_word), "int32"),
            f"{base}scales": stored.type(f"{base}scales", (groups, outputs), "float16"),
        }
        if is_ordered:
            sources[f"{base}g_idx"] = TensorType((inputs,), "int32")

        is_plain = not is_ordered and inputs % each == 0 and bits in FORMATS_BY_BITS
        format = grouped(FORMATS_BY_BITS[bits], None if each == inputs else each) if is_plain else None

        def make(b: FunctionBuilder, found: Sequence[Var]) -> Encoded | Var:
            words, zero_words, scales, *places = found
            packed = as_bytes(b, transposed(b, words))
            zeros = unpacked(b, as_bytes(b, zero_words), bits)
            if offset:
                zeros = b.call(ops.add, zeros, Scalar(1))
                zeros = b.call(ops.bitwise_and, zeros, Scalar(2**bits - 1))
            if format is not None:
                return Encoded(format, packed, transposed(b, scales), transposed(b, zeros))
            q = unpacked(b, packed, bits)
            return ungrouped(
                b, q, transposed(b, zeros), transposed(b, scales), each, places[0] if places else None
            )

        scheme = f"GPTQ of {bits} bits" + (", in the order of activations" if is_ordered else "")
        return Formula(scheme, sources, make, format, sources[f"{base}scales"].dtype)

    return layout
