# SPDX-License-Identifier: Apache-2.0
"""A GGUF file's tensors as the weights of a model file: names, the order of rows, and what blocks stand for.

The settings are those that `nnfront.llm.gguf_folder` writes of a file's metadata. Files of the architecture `llama` hold the rows of q and k in pairs of neighbours that are rotated
together, model files in halves of each head; rows are put back in order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from nnfront import ops
from nnfront.ir import FunctionBuilder, TensorType, Var
from nnfront.ops.encoded import Encoded, cast
from nnfront.quantized.formula import Formula
from nnfront.quantized.gguf_types import ENCODINGS, Blocks, Encoding
from nnfront.quantized.settings import Settings
from nnfront.quantized.stored import Layout, StoredTensors

ARCHITECTURES = ("llama", "qwen2", "qwen3")
INTERLEAVED = ("llama",)
"""Architectures whose rows of q and k are pairs of neighbours."""

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Names of modules, in a model file and in GGUF."""

PIECE = 1 << 24
"""Elements that are made at a time, where they are made in float32 with several intermediates."""


def name_in_gguf(name: str) -> str:
    """The name of a model file's weight in GGUF; empty if it has none."""
    module, _, kind = name.rpartition(".")
    if module in NAMES:
        return f"{NAMES[module]}.{kind}"
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    return f"blk.{layer[1]}.{LAYER_NAMES[layer[2]]}.{kind}" if layer and layer[2] in LAYER_NAMES else ""


def gguf(settings: Settings) -> Layout:
    """Read what is said of a file."""
    architecture = settings.get("architecture", only=ARCHITECTURES)
    head_size = settings.positive("head_dim") or 1
    settings.ignored.append("rope_freqs.weight")  # it is in config.json

    def layout(stored: StoredTensors, name: str, type: TensorType) -> Formula | None:
        source, shape = name_in_gguf(name), type.static_shape
        if source not in stored or shape is None or not 1 <= type.ndim <= 2:
            return None
        is_interleaved = architecture in INTERLEAVED and re.search(r"\.attn_[qk]\.", source) is not None
        interleaved = head_size if is_interleaved and shape[0] % head_size == 0 and head_size % 2 == 0 else 0
        scheme = stored.encoding(source)
        if scheme in ENCODINGS and shape[-1] % ENCODINGS[scheme].numbers == 0:
            return _of_blocks(source, scheme, shape, type.dtype, interleaved)
        kind = stored.type(source, shape, "float32")

        def make(b: FunctionBuilder, found: Sequence[Var]) -> Var:
            return _in_halves(b, found[0], interleaved)

        return Formula(f"GGUF's {kind.dtype}", {source: kind}, make, is_plain=True)

    return layout


def _of_blocks(source: str, scheme: str, shape: Sequence[int], dtype: str, interleaved: int) -> Formula:
    """A weight in blocks of some type."""
    encoding = ENCODINGS[scheme]
    blocks = shape[-1] // encoding.numbers
    stored = TensorType((*shape[:-1], blocks * encoding.size_bytes), "uint8")
    rows = shape[0] if len(shape) == 2 else 1

    def make(b: FunctionBuilder, found: Sequence[Var]) -> Encoded | Var:
        data = b.call(ops.reshape, found[0], shape=(rows, blocks, encoding.size_bytes))
        if encoding.format is not None and len(shape) == 2:
            made = encoding.make(Blocks(b, data))
            assert isinstance(made, Encoded)
            return made.with_parts([_in_halves(b, part, interleaved) for part in made.parts])
        dense = _dense(b, encoding, data, max(PIECE // shape[-1], 1), dtype)
        return _in_halves(b, b.call(ops.reshape, dense, shape=tuple(shape)), interleaved)

    format = encoding.format if len(shape) == 2 else None
    return Formula(f"GGUF's {scheme}", {source: stored}, make, format, encoding.scale_dtype)


def _dense(b: FunctionBuilder, encoding: Encoding, data: Var, step: int, dtype: str) -> Var:
    """Emit numbers in a dtype, so many rows at a time."""
    rows, parts = Blocks.sizes(data)[0], []
    for begin in range(0, rows, step):
        piece = (
            data
            if step >= rows
            else b.call(ops.getitem, data, index=(slice(begin, min(begin + step, rows)),))
        )
        made = encoding.make(Blocks(b, piece))
        parts.append(made.dense(b, dtype) if isinstance(made, Encoded) else cast(b, made, dtype))
    return parts[0] if len(parts) == 1 else b.call(ops.concat, *parts, dim=0)


def _in_halves(b: FunctionBuilder, x: Var, head_size: int) -> Var:
    """Emit rows of heads with the first of all pairs in front of the second ones; x itself if heads have no size."""
    if not head_size:
        return x
    assert isinstance(x.type, TensorType)
    rows, *rest = x.type.shape
    pairs = b.call(ops.reshape, x, shape=(-1, head_size // 2, 2, *rest))
    halves = b.call(ops.permute_dims, pairs, axes=(0, 2, 1, *range(3, 3 + len(rest))))
    return b.call(ops.reshape, halves, shape=(rows, *rest))
