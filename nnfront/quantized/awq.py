# SPDX-License-Identifier: Apache-2.0
"""AWQ's folders in the layout `gemm`: `qweight`, `qzeros` and `scales` in the place of `weight`.

Shapes: qweight int32 [in, out / 8], qzeros int32 [groups, out / 8], scales [groups, out]. A word holds eight neighbouring outputs of 4 bits; from its lowest bits on
these are outputs 0, 2, 4, 6, 1, 3, 5 and 7.
"""

from __future__ import annotations

from collections.abc import Sequence

from nnfront import ops
from nnfront.ir import FunctionBuilder, TensorType, Var
from nnfront.ops.encoded import Encoded
from nnfront.quantized.formula import Formula
from nnfront.quantized.settings import Settings
from nnfront.quantized.stored import Layout, StoredTensors, as_bytes, grouped, matrix, transposed, unpacked


def awq(settings: Settings) -> Layout:
    settings.get("bits", only=(4,))
    group = settings.positive("group_size", 128, or_all=True)
    settings.get("zero_point", True, only=(True,))
    version = settings.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        settings.problems.append(f"version is {version!r}, expected 'gemm'")
    settings.unused(
        "modules_to_not_convert",
        "backend",
        "do_fuse",
        "fuse_max_seq_len",
        "modules_to_fuse",
        "exllama_config",
    )

    def layout(stored: StoredTensors, name: str, type: TensorType) -> Formula | None:
        sizes, base = matrix(type), name.removesuffix("weight")
        if sizes is None or base == name or f"{base}qweight" not in stored:
            return None
        (outputs, inputs), each = sizes, group or sizes[1]
        groups = inputs // each
        sources = {
            f"{base}qweight": TensorType((inputs, outputs // 8), "int32"),
            f"{base}qzeros": TensorType((groups, outputs // 8), "int32"),
            f"{base}scales": stored.type(f"{base}scales", (groups, outputs), "float16"),
        }
        format = grouped("uint4", None if each == inputs else each)

        def make(b: FunctionBuilder, found: Sequence[Var]) -> Encoded:
            words, zero_words, scales = found
            packed = b.call(ops.pack_int4, transposed(b, _in_order(b, words)), axis=1)
            return Encoded(format, packed, transposed(b, scales), transposed(b, _in_order(b, zero_words)))

        return Formula("AWQ of 4 bits", sources, make, format, sources[f"{base}scales"].dtype)

    return layout


def _in_order(b: FunctionBuilder, words: Var) -> Var:
    """Emit [n, out] numbers from words [n, out / 8]: a word's even outputs are in its lower half, its odd ones in its upper half."""
    assert isinstance(words.type, TensorType)
    rows, count = words.type.shape
    numbers = b.call(ops.reshape, unpacked(b, as_bytes(b, words), 4), shape=(rows, count, 2, 4))
    return b.call(ops.reshape, b.call(ops.permute_dims, numbers, axes=(0, 1, 3, 2)), shape=(rows, count * 8))
