# SPDX-License-Identifier: Apache-2.0
"""Folders of compressed-tensors: groups of modules, each with a scheme for its weights, in one of these formats.

pack-quantized       weight_packed int32 [out, in / per word], 4 or 8 bits, the first in the lowest bits, from -8 or -128 on; weight_scale [out, groups];
                     weight_zero_point int32 [out / per word, groups], packed along the outputs, if the scheme is not symmetric
int-quantized        weight int8 [out, in], weight_scale [1], [out, 1] or [out, groups], weight_zero_point int8 likewise
float-quantized      weight float8_e4m3fn [out, in], weight_scale [1], [out, 1], or one for each block
naive-quantized      as one of the two before
nvfp4-pack-quantized, mxfp4-pack-quantized   see `nvfp4`

How inputs and caches were to be rounded is not followed: they are multiplied as they are.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from nnfront import ops
from nnfront.files import shown
from nnfront.ir import FunctionBuilder, Scalar, TensorType, Var
from nnfront.ops.encoded import Encoded
from nnfront.quantized.blocks import float8, int8
from nnfront.quantized.formula import Formula
from nnfront.quantized.nvfp4 import mxfp4_packed, nvfp4_packed
from nnfront.quantized.settings import Settings
from nnfront.quantized.stored import (
    Layout,
    StoredTensors,
    as_bytes,
    first,
    for_outputs,
    grouped,
    matrix,
    transposed,
    ungrouped,
    unpacked,
)

FORMATS_READ = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
)


@dataclass(frozen=True)
class Scheme:
    """How the weights of a group of modules are stored. `group` is None for one scale for each output, or for all."""

    targets: tuple[str, ...]
    format: str
    bits: int
    is_float: bool
    is_symmetric: bool
    group: int | None
    block: tuple[int, int] | None
    is_ordered: bool


def compressed_tensors(settings: Settings) -> Layout:
    format = settings.get("format", "dense")
    groups = settings.within("config_groups")
    schemes = [_scheme(groups.within(name), format) for name in groups.values]
    sparsity = settings.within("sparsity_config")
    sparsity.get("format", "dense", only=("dense",))
    settings.get("transform_config", {}, only=({},))
    settings.unused("ignore", "quantization_status", "global_compression_ratio", "version", "kv_cache_scheme")
    settings.ignored += ["*.weight_shape", "*.input_scale", "*.input_zero_point", "*.input_global_scale"]
    settings.ignored += ["*.k_scale", "*.v_scale", "*.output_scale"]
    if not any(scheme.is_ordered for scheme in schemes):
        settings.ignored.append("*.weight_g_idx")

    def layout(stored: StoredTensors, name: str, type: TensorType) -> Formula | None:
        sizes, base = matrix(type), name.removesuffix(".weight")
        if sizes is None or base == name or f"{name}_scale" not in stored:
            return None
        scheme = _of(schemes, base)
        return None if scheme is None else _formula(scheme, stored, name, sizes)

    return layout


def _scheme(settings: Settings, format: Any) -> Scheme:
    """Read one group of `config_groups`."""
    targets, weights = settings.get("targets", []), settings.within("weights")
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        settings.problems.append(f"targets is {shown(targets)}, expected a list of names")
        targets = []
    own = settings.get("format", format, only=FORMATS_READ)
    settings.unused("input_activations", "output_activations")
    kind = weights.get("type", "int", only=("int", "float"))
    is_float = kind == "float"
    bits = weights.get("num_bits", 8, only=(4, 8))
    strategy = weights.get("strategy", "tensor", only=("tensor", "channel", "group", "tensor_group", "block"))
    group = weights.get("group_size")
    if strategy in ("group", "tensor_group"):
        group = weights.positive("group_size")
    shape = weights.get("block_structure")
    block = tuple(shape) if isinstance(shape, list) and len(shape) == 2 else None
    if strategy == "block" and (block is None or not all(type(n) is int and n > 0 for n in block)):
        weights.problems.append(f"block_structure is {shown(shape)}, expected [outputs, inputs]")
        block = (128, 128)
    is_ordered = weights.get("actorder", False, only=(None, False, "group", "weight", "static", "dynamic"))
    weights.get("dynamic", False, only=(False,))
    is_symmetric = weights.get("symmetric", True, only=(True, False))
    weights.unused("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
    weights.close()
    settings.close()
    return Scheme(
        tuple(targets),
        own,
        bits,
        is_float,
        is_symmetric,
        group if strategy in ("group", "tensor_group") else None,
        block if strategy == "block" else None,
        is_ordered in ("group", "dynamic"),
    )


def _of(schemes: Sequence[Scheme], module: str) -> Scheme | None:
    """The scheme of a module: by its name or a pattern, else by its kind."""
    for scheme in schemes:
        for target in scheme.targets:
            pattern = target.removeprefix("re:")
            if target == module or (pattern != target and re.match(pattern, module)):
                return scheme
    return next((scheme for scheme in schemes if "Linear" in scheme.targets), None)


def _formula(scheme: Scheme, stored: StoredTensors, name: str, sizes: tuple[int, int]) -> Formula | None:
    if scheme.format == "nvfp4-pack-quantized":
        return nvfp4_packed(
            stored, f"{name}_packed", f"{name}_scale", f"{name}_global_scale", sizes, is_inverse=True
        )
    if scheme.format == "mxfp4-pack-quantized":
        return mxfp4_packed(f"{name}_packed", f"{name}_scale", sizes)
    if scheme.format == "pack-quantized":
        return _packed(scheme, stored, name, sizes)
    if scheme.is_float:
        return float8(stored, name, f"{name}_scale", sizes, scheme.block)
    return _integers(scheme, stored, name, sizes)


def _groups(scheme: Scheme, inputs: int) -> int:
    return 1 if scheme.group is None else -(-inputs // scheme.group)


def _scale(scheme: Scheme, stored: StoredTensors, name: str, sizes: tuple[int, int]) -> TensorType:
    """The type of the scales."""
    groups = _groups(scheme, sizes[1])
    if groups == 1:
        return stored.scale_type(f"{name}_scale", sizes[0])
    return stored.type(f"{name}_scale", (sizes[0], groups), "bfloat16")


def _packed(scheme: Scheme, stored: StoredTensors, name: str, sizes: tuple[int, int]) -> Formula:
    """Words of int32 in the place of a weight."""
    (outputs, inputs), bits = sizes, scheme.bits
    groups, per_word = _groups(scheme, inputs), 32 // bits
    scale = _scale(scheme, stored, name, sizes)
    sources = {
        f"{name}_packed": TensorType((outputs, -(-inputs // per_word)), "int32"),
        f"{name}_scale": scale,
    }
    if not scheme.is_symmetric:
        sources[f"{name}_zero_point"] = TensorType((-(-outputs // per_word), groups), "int32")
    has_order = scheme.is_ordered and f"{name}_g_idx" in stored
    if has_order:
        sources[f"{name}_g_idx"] = TensorType((inputs,), "int32")
    format = grouped(
        f"{'int' if scheme.is_symmetric else 'uint'}{bits}", scheme.group if groups > 1 else None
    )
    is_plain = not has_order and inputs % (scheme.group or 1) == 0 and inputs % per_word == 0

    def make(b: FunctionBuilder, found: Sequence[Var]) -> Encoded | Var:
        packed, scales, others = as_bytes(b, found[0]), found[1], list(found[2:])
        zeros = None
        if not scheme.is_symmetric:
            zeros = first(b, unpacked(b, as_bytes(b, transposed(b, others.pop(0))), bits), outputs)
            zeros = transposed(b, zeros)
        if groups == 1:
            scales = for_outputs(b, scales, outputs)
        if not is_plain:
            q = first(b, unpacked(b, packed, bits), inputs)
            middle = Scalar(2 ** (bits - 1)) if zeros is None else zeros
            return ungrouped(b, q, middle, scales, scheme.group or inputs, others[0] if others else None)
        if scheme.is_symmetric:  # numbers from 0 on to numbers with a sign: the highest bit changes
            packed = b.call(ops.bitwise_xor, packed, Scalar(0x88 if bits == 4 else 0x80))
            packed = packed if bits == 4 else b.call(ops.bitcast, packed, dtype="int8")
        return Encoded(format, packed, scales, zeros)

    scheme_text = f"compressed-tensors of {bits} bits"
    return Formula(scheme_text, sources, make, format if is_plain else None, scale.dtype)


def _integers(scheme: Scheme, stored: StoredTensors, name: str, sizes: tuple[int, int]) -> Formula:
    """int8 with scales, and zero points unless the scheme is symmetric."""
    names = name, f"{name}_scale", f"{name}_zero_point"
    group = None if _groups(scheme, sizes[1]) == 1 else scheme.group
    return int8(
        "compressed-tensors of 8 bits",
        stored,
        names[: 2 if scheme.is_symmetric else 3],
        sizes,
        _scale(scheme, stored, name, sizes),
        group,
    )
