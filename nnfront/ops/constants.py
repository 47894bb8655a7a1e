# SPDX-License-Identifier: Apache-2.0
"""Constants as torch tensors, and back."""

from __future__ import annotations

import torch

from nnfront.dims import Dim
from nnfront.ir import Atom, Constant, Scalar, TensorType, Var


def constant(data: torch.Tensor) -> Constant:
    """Return the constant with the elements of a tensor."""
    dtype = str(data.dtype).removeprefix("torch.")
    flat = data.detach().cpu().contiguous().reshape(-1)
    return Constant(TensorType(tuple(data.shape), dtype), flat.view(torch.uint8).numpy().tobytes())


def value_of(atom: Atom) -> torch.Tensor | bool | int | float:
    """Return the tensor or number that a constant or literal stands for."""
    assert not isinstance(atom, Var)
    if isinstance(atom, Scalar):
        assert not isinstance(atom.value, Dim)
        return atom.value
    dtype = getattr(torch, atom.type.dtype)
    shape = [int(size) for size in atom.type.shape if isinstance(size, int)]
    if not atom.data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(atom.data), dtype=dtype).reshape(shape)
