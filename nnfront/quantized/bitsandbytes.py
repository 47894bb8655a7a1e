# SPDX-License-Identifier: Apache-2.0
"""bitsandbytes' folders: nf4 and fp4 in blocks of the flattened weight, or int8 with a scale for each output.

4 bits: weight uint8 [out * in / 2, 1], the first of two in the high half; weight.quant_map float32 [16], what they stand for; weight.absmax, a scale for each block, or, if those
are quantised again, uint8 with weight.nested_absmax and weight.nested_quant_map; weight.quant_state.bitsandbytes__nf4, a JSON text as bytes: sizes, blocks and an offset.
8 bits: weight int8 [out, in], SCB float32 [out], the greatest magnitude of each output, for which 127 stands.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from math import isfinite
from typing import Any

from nnfront import dtypes, ops
from nnfront.errors import LoadError
from nnfront.files import parse_json, shown
from nnfront.ir import FunctionBuilder, Scalar, TensorType, Var
from nnfront.ops.encoded import Encoded, cast
from nnfront.quant_format import FORMATS
from nnfront.quantized.formula import Formula
from nnfront.quantized.settings import Settings
from nnfront.quantized.stored import Layout, StoredTensors, as_bytes, first, looked_up, matrix

BLOCK, NESTED_BLOCK = 64, 256


def bitsandbytes(settings: Settings) -> Layout:
    kind = settings.get("bnb_4bit_quant_type", "fp4", only=("nf4", "fp4"))
    is_nested = settings.get("bnb_4bit_use_double_quant", False, only=(True, False))
    settings.unused(
        *("load_in_4bit", "load_in_8bit", "_load_in_4bit", "_load_in_8bit", "bnb_4bit_compute_dtype"),
        *("bnb_4bit_quant_storage", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight"),
        *("llm_int8_skip_modules", "llm_int8_threshold"),
    )
    settings.ignored += ["*.weight_format", "*.quant_state.bitsandbytes__*"]

    def layout(stored: StoredTensors, name: str, type: TensorType) -> Formula | None:
        sizes, scale = matrix(type), f"{name.removesuffix('weight')}SCB"
        if sizes is None:
            return None
        if scale in stored:
            return _int8(stored, name, scale, sizes)
        return _blocks(stored, name, sizes, kind, is_nested) if f"{name}.absmax" in stored else None

    return layout


def _int8(stored: StoredTensors, name: str, scale: str, sizes: tuple[int, int]) -> Formula:
    sources = {name: TensorType(sizes, "int8"), scale: stored.type(scale, sizes[:1], "float32")}

    def make(b: FunctionBuilder, found: Sequence[Var]) -> Encoded:
        column = b.call(ops.reshape, cast(b, found[1], "float32"), shape=(-1, 1))
        return Encoded(FORMATS["int8"], found[0], b.call(ops.divide, column, Scalar(127.0)))

    return Formula("bitsandbytes' int8", sources, make, FORMATS["int8"])


def _blocks(stored: StoredTensors, name: str, sizes: tuple[int, int], kind: str, is_nested: bool) -> Formula:
    outputs, inputs = sizes
    count, state = outputs * inputs, f"{name}.quant_state.bitsandbytes__{kind}"
    said = _state(stored, state, sizes)
    block, nested_block = said["blocksize"], said["nested_blocksize"]
    blocks = -(-count // block)
    storage = stored.tensors[name].dtype if name in stored else "uint8"
    storage = storage if storage in dtypes.DTYPES and storage != "bool" else "uint8"
    sources = {
        name: TensorType((-(-count // 2) // dtypes.size_bytes(storage), 1), storage),
        f"{name}.quant_map": TensorType((16,), "float32"),
        f"{name}.absmax": TensorType((blocks,), "uint8" if is_nested else "float32"),
    }
    if is_nested:
        sources[f"{name}.nested_absmax"] = TensorType((-(-blocks // nested_block),), "float32")
        sources[f"{name}.nested_quant_map"] = TensorType((256,), "float32")

    def make(b: FunctionBuilder, found: Sequence[Var]) -> Var:
        packed, values, scales = found[:3]
        packed = b.call(ops.reshape, as_bytes(b, packed), shape=(-1,))
        halves = [b.call(ops.right_shift, packed, Scalar(4)), b.call(ops.bitwise_and, packed, Scalar(15))]
        elements = b.call(ops.reshape, b.call(ops.stack, *halves, dim=1), shape=(-1,))
        if is_nested:
            greatest = b.call(ops.repeat, found[3], repeats=nested_block, axis=0)
            scales = b.call(ops.multiply, looked_up(b, found[4], scales), first(b, greatest, blocks))
            scales = b.call(ops.add, scales, Scalar(said["nested_offset"]))
        each = first(b, b.call(ops.repeat, scales, repeats=block, axis=0), count)
        dense = b.call(ops.multiply, first(b, looked_up(b, values, elements), count), each)
        return b.call(ops.reshape, dense, shape=sizes)

    text = f"bitsandbytes' {kind}" + (" with quantised scales" if is_nested else "")
    return Formula(text, sources, make)


def _state(stored: StoredTensors, name: str, sizes: tuple[int, int]) -> dict[str, Any]:
    """What is said of a weight's blocks; where the data are not there, what is usual. Raises LoadError for what cannot be."""
    data = stored.read(name) if name in stored and stored.read is not None else None
    said: Any = {}
    if data is not None:
        try:
            said = parse_json(data)
        except ValueError as error:
            raise LoadError(f"{name} is no JSON: {error}") from None
    found: dict[str, Any] = {"blocksize": BLOCK, "nested_blocksize": NESTED_BLOCK, "nested_offset": 0.0}
    found |= {"shape": [*sizes], **(said if isinstance(said, dict) else {})}
    offset = found["nested_offset"]
    if (
        not isinstance(said, dict)
        or not all(
            type(found[key]) is int and 1 <= found[key] <= 1 << 20
            for key in ("blocksize", "nested_blocksize")
        )
        or type(offset) not in (int, float)
        or not isfinite(offset)
        or found["shape"] != [*sizes]
    ):
        raise LoadError(
            f"{name} says what cannot be: {shown(json.dumps(said))}",
            details=[
                f"expected shape {[*sizes]}, blocksize and nested_blocksize >= 1, nested_offset a number"
            ],
        )
    return found
