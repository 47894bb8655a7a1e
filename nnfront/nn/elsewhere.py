# SPDX-License-Identifier: Apache-2.0
"""How that is written here which torch, numpy, Keras, JAX or TVM call otherwise: the help of errors about names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from nnfront.errors import nearest
from nnfront.ir import OPS

# Functions and methods; one that has the same name here needs no entry.
_WRITTEN: dict[str, str] = {
    "__getitem__": "op.take(table, indices, 0)",
    "T": "op.permute_dims(x)",
    "addmm": "op.matmul(a, b) + c",
    "amax": "op.max(x, axis)",
    "amin": "op.min(x, axis)",
    "array": "nn.Tensor.from_const(data), or op.stack([a, b]) for tensors",
    "at": "op.scatter(x, indices, updates, axis) or op.scatter_add",
    "batch_matmul": "op.matmul(a, b)",
    "bfloat16": "x.astype('bfloat16')",
    "bmm": "op.matmul(a, b)",
    "bool": "x.astype('bool')",
    "byte": "x.astype('uint8')",
    "cast": "x.astype(dtype)",
    "cat": "op.concat([a, b], dim)",
    "clamp": "op.clip(x, min, max)",
    "concatenate": "op.concat([a, b], dim)",
    "dense": "op.linear(x, weight, bias)",
    "dim": "x.ndim",
    "div": "op.divide(a, b)",
    "dot": "op.matmul(a, b)",
    "double": "x.astype('float64')",
    "embedding": "op.take(weight, x, 0)",
    "eq": "op.equal(a, b)",
    "expand": "op.broadcast_to(x, shape)",
    "expand_as": "op.broadcast_to(x, y.shape)",
    "expand_dims": "op.unsqueeze(x, dim)",
    "flatten": "op.reshape(x, shape)",
    "float": "x.astype('float32')",
    "fmod": "op.remainder(a, b)",
    "ge": "op.greater_equal(a, b)",
    "gt": "op.greater(a, b)",
    "half": "x.astype('float16')",
    "hardtanh": "op.clip(x, -1.0, 1.0)",
    "index_add": "op.scatter_add(x, indices, updates, axis)",
    "index_select": "op.take(x, indices, axis)",
    "int": "x.astype('int32')",
    "le": "op.less_equal(a, b)",
    "long": "x.astype('int64')",
    "lt": "op.less(a, b)",
    "mT": "op.permute_dims(x, axes)",
    "masked_fill": "op.where(mask, value, x)",
    "mm": "op.matmul(a, b)",
    "moveaxis": "op.permute_dims(x, axes)",
    "movedim": "op.permute_dims(x, axes)",
    "mul": "op.multiply(a, b)",
    "narrow": "x[:, start:end]",
    "ne": "op.not_equal(a, b)",
    "neg": "op.negative(x)",
    "new_ones": "op.ones(shape, dtype)",
    "new_zeros": "op.zeros(shape, dtype)",
    "numel": "nn.dims.product(x.shape)",
    "one_hot": "op.equal(op.unsqueeze(x, -1), op.arange(n, dtype='int64'))",
    "permute": "op.permute_dims(x, axes)",
    "pow": "op.power(a, b)",
    "print": "op.print_(x)",
    "repeat_interleave": "op.repeat(x, repeats, axis)",
    "select": "x[:, i]",
    "size": "x.shape",
    "slice": "x[:, start:end]",
    "std": "op.sqrt(op.var(x, axis, correction=1))",
    "strided_slice": "x[:, start:end:step]",
    "sub": "op.subtract(a, b)",
    "swapaxes": "op.permute_dims(x, axes)",
    "swish": "op.silu(x)",
    "take_along_axis": "op.gather(x, indices, axis)",
    "take_along_dim": "op.gather(x, indices, axis)",
    "tensor": "nn.Tensor.from_const(data)",
    "top_k": "op.topk(x, k)",
    "transpose": "op.permute_dims(x, axes)",
    "true_divide": "op.divide(a, b)",
    "type": "x.astype(dtype)",
    "view": "op.reshape(x, shape)",
    "view_as": "op.reshape(x, y.shape)",
}

# What has no counterpart: why, for each group of names.
_ABSENT: dict[str, str] = {
    name: said
    for said, names in {
        "a tensor has its values only when a method runs: compute with ops": "item tolist data values",
        "a model has no device: nnfront.compile(ir, target) says where it runs": "cpu cuda device to_device is_cuda",
        "layouts are chosen when a method is compiled: leave it out": "contiguous stride strides is_contiguous",
        "there is no training: leave it out": (
            "detach backward grad requires_grad requires_grad_ zero_grad retain_grad train eval training"
        ),
        "a tensor never changes, so it needs no copy: leave it out": "clone copy",
        "values come with the weights: load_state_dict binds them, Executable.load takes them": (
            "normal_ uniform_ zero_ fill_ copy_ constant_ ones_ zeros_ "
            "xavier_uniform_ xavier_normal_ kaiming_uniform_ kaiming_normal_ trunc_normal_"
        ),
        "assign it: self.weight = nn.Parameter(shape, dtype)": "register_parameter Parameter Variable add_weight",
        "assign the torch tensor: self.table = tensor": "register_buffer",
        "assign the module: self.layer = layer": "register_module add_module",
        "the functions are nnfront.op": "functional F",
        "ops draw nothing: give random numbers as an argument": "rand randn normal uniform bernoulli dropout",
    }.items()
    for name in names.split()
}

# Names of arguments; one stands for any of those that the function has.
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "axes": ("axis", "dim"),
    "axis": ("axes", "dim"),
    "dim": ("axis", "axes"),
    "dims": ("axes", "axis"),
    "eps": ("epsilon",),
    "epsilon": ("eps",),
    "input": ("x", "data", "ary"),
    "keep_dims": ("keepdims",),
    "keepdim": ("keepdims",),
    "mask": ("attn_mask",),
    "negative_slope": ("alpha",),
    "other": ("b", "x2"),
    "self": ("x",),
    "size": ("shape",),
    "split_size_or_sections": ("indices_or_sections",),
    "tensors": ("x",),
    "unbiased": ("correction",),
}


def known(name: str) -> str:
    """Return the help for what is called `name` elsewhere or here; empty if it is nothing that is known."""
    if name in _ABSENT:
        return _ABSENT[name]
    if name in _WRITTEN:
        return f"use {_WRITTEN[name]}"
    if name in OPS:
        return f"use op.{name}{signature_text(name)}"
    if name.endswith("_") and known(name[:-1]):
        return f"a tensor does not change in place: {known(name[:-1])}"
    return ""


def how(name: str, others: Iterable[str] = ()) -> str:
    """Return the help for a name that does not exist: how it is written here, else which op or other name is nearest."""
    return known(name) or nearest(name, [*others, *OPS])


def argument(name: str, arguments: tuple[str, ...]) -> str:
    """Return the help for an argument that a function with these arguments does not have."""
    meant = next((other for other in _ARGUMENTS.get(name, ()) if other in arguments), name)
    return nearest(meant, arguments)


def signature_text(name: str) -> str:
    """Return the signature of an op as an author sees it, without types."""
    signature = OPS[name].signature
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=inspect.Signature.empty))
