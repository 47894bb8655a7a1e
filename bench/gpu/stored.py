# SPDX-License-Identifier: Apache-2.0
"""Operands with values for the kernels that write or read a cache: lengths that fit, and pages in random order."""

from __future__ import annotations

from typing import Any

import torch
from nnfront_kernels import Kernel

KERNELS = ("rope_append", "attention_decode", "attention_prefill")


def operands(kernel: Kernel, shape: Any, dtype: str, device: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the kernel's `plan`: random floats, and integers that mean something to it."""
    arguments, options = kernel.example(shape, dtype, device)

    def filled(tensor: Any) -> Any:
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if tensor.is_floating_point():
            return torch.randn(tensor.shape, device=device).to(tensor.dtype)
        if tensor.ndim == 2:  # pages
            return torch.randperm(tensor.numel(), device=device).view(tensor.shape).int()
        if kernel.name == "rope_append":
            return torch.randint(0, shape.tokens + 1, tensor.shape, device=device).int()  # tokens before
        if kernel.name == "attention_prefill":
            if tensor.numel() == shape.batch + 1:
                return shape.seq * torch.arange(shape.batch + 1, device=device).int()  # starts
            return torch.full_like(tensor, shape.before)
        return torch.randint(shape.longest // 2, shape.longest + 1, tensor.shape, device=device).int()

    return tuple(map(filled, arguments)), {name: filled(value) for name, value in options.items()}


def stated_and_found(
    kernel: Kernel, arguments: tuple[Any, ...], options: dict[str, Any], results: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """What the definition gives, what a launch gave (its result, and the cache that it wrote to), and the size of the terms."""
    stated = kernel.reference(*arguments, **options, compute=torch.float64)
    if kernel.name == "rope_append":
        return list(stated), [results[0], *arguments[6:8]], list(stated)
    q, keys, values, *others = arguments
    size = kernel.reference(q, keys, values.abs(), *others, **options, compute=torch.float64)
    return [stated], results, [size]
