# SPDX-License-Identifier: Apache-2.0
"""The element types, by name: size, category and promotion. Names are torch's, so that `getattr(torch, name)` is the dtype."""

from __future__ import annotations

from enum import IntEnum

from nnfront.errors import InferError, nearest


class Category(IntEnum):
    """Promotion moves up this ladder, as in torch: bool, then integers, then floats."""

    BOOL = 0
    INT = 1
    FLOAT = 2


# name -> (category, size in bytes)
_DTYPES: dict[str, tuple[Category, int]] = {
    "bool": (Category.BOOL, 1),
    "uint8": (Category.INT, 1),
    "int8": (Category.INT, 1),
    "int16": (Category.INT, 2),
    "int32": (Category.INT, 4),
    "int64": (Category.INT, 8),
    "float8_e4m3fn": (Category.FLOAT, 1),
    "float8_e5m2": (Category.FLOAT, 1),
    "float16": (Category.FLOAT, 2),
    "bfloat16": (Category.FLOAT, 2),
    "float32": (Category.FLOAT, 4),
    "float64": (Category.FLOAT, 8),
}

DTYPES: tuple[str, ...] = tuple(_DTYPES)

COMPUTED: tuple[str, ...] = ("float16", "bfloat16", "float32", "float64")
"""Dtypes that a model can compute in."""

# Other names for some of them, for messages.
_ELSEWHERE = {
    "bf16": "bfloat16",
    "double": "float64",
    "float": "float32",
    "fp16": "float16",
    "fp32": "float32",
    "half": "float16",
    "int": "int64",
    "long": "int64",
}
_DEVICES = ("cpu", "cuda", "mps", "xpu")


def check(dtype: str) -> str:
    """Return `dtype` if it names an element type, else raise InferError with the list of names."""
    if dtype in _DTYPES:
        return dtype
    if str(dtype).partition(":")[0] in _DEVICES:
        raise InferError(
            f"{dtype!r} is a device, not a dtype",
            help="a model has no device: nnfront.compile(ir, target) says where it runs",
        )
    near = nearest(_ELSEWHERE.get(dtype, dtype), DTYPES)
    raise InferError(f"unknown dtype {dtype!r}", help=f"{near} use one of {', '.join(DTYPES)}".strip())


def category(dtype: str) -> Category:
    """Return the rung of the promotion ladder that `dtype` stands on."""
    return _DTYPES[check(dtype)][0]


def size_bytes(dtype: str) -> int:
    """Return the size of one element in bytes."""
    return _DTYPES[check(dtype)][1]


def is_float(dtype: str) -> bool:
    """Say whether `dtype` is a floating-point type."""
    return category(dtype) is Category.FLOAT


def is_integer(dtype: str) -> bool:
    """Say whether `dtype` is an integer type; bool is not."""
    return category(dtype) is Category.INT


def promote(a: str, b: str) -> str:
    """Return the dtype that holds both, as `torch.promote_types` does for these names.

    Raises InferError for a pair that torch refuses (float8 with anything else).
    """
    if a == b:
        return check(a)
    (category_a, size_a), (category_b, size_b) = _DTYPES[check(a)], _DTYPES[check(b)]
    if (Category.FLOAT, 1) in ((category_a, size_a), (category_b, size_b)):
        raise InferError(f"{a} and {b} have no common dtype", help="cast one of them with astype first")
    if category_a != category_b:
        return a if category_a > category_b else b
    if category_a is Category.FLOAT:
        if size_a == size_b:  # float16 with bfloat16: neither holds the other
            return "float32"
        return a if size_a > size_b else b
    if "uint8" in (a, b):
        other = b if a == "uint8" else a
        return "int16" if other == "int8" else other
    return a if size_a > size_b else b
