# SPDX-License-Identifier: Apache-2.0
"""Operands with values for the kernels that write or read a cache: lengths that fit, and pages in random order."""

from __future__ import annotations

from typing import Any

import torch
from nnfront_kernels import Kernel, attention_decode

KERNELS = ("rope_append", "attention_decode", "attention_latent", "attention_prefill")


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

    made = {name: filled(value) for name, value in options.items()}
    for name in ("key_scales", "value_scales"):
        if name in made:
            made[name] = torch.rand(made[name].shape, device=device) / 100 + 0.001
    return tuple(map(filled, arguments)), made


def longest(run_shape: Any, arguments: tuple[Any, ...]) -> None:
    """Let every sequence that is decoded have the length that its cost is for."""
    next(x for x in arguments if x.dtype == torch.int32).fill_(run_shape.longest)


def stated_and_found(
    kernel: Kernel, arguments: tuple[Any, ...], options: dict[str, Any], results: list[torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """What the definition gives, what a launch gave (its result, and the cache that it wrote to), and the size of the terms."""
    stated = kernel.reference(*arguments, **options, compute=torch.float64)
    if kernel.name == "rope_append":
        found = [results[0], *arguments[6:8]]
        if "key_scales" not in options:
            return list(stated), found, list(stated)
        q, *codes = stated
        scales = codes[2:], [options["key_scales"], options["value_scales"]]
        values = [
            [c.float() * s[..., None] for c, s in zip(pair, scale, strict=True)]
            for pair, scale in zip((codes[:2], found[1:]), scales, strict=True)
        ]
        # Codes may be a step apart where rounding is close: 1/8 of the value, or 2^-9 of the scale.
        step = 2.0**-24 * 3
        terms = [(x.abs() / 8 + s[..., None] / 512) / step for x, s in zip(values[0], scales[0], strict=True)]
        return [q, *values[0]], [results[0], *values[1]], [q, *terms]
    if kernel.name == "attention_latent":
        q, latents, lengths = arguments
        values = latents[..., : options["value_size"]].abs()
        others = {name: value for name, value in options.items() if name != "value_size"}
        seq = q.shape[1]
        sizes = [
            attention_decode.reference(
                q[:, t], latents, values, lengths - (seq - 1 - t), **others, compute=torch.float64
            )
            for t in range(seq)
        ]
        return [stated], results, [torch.stack(sizes, 1)]
    q, keys, values, *others = arguments
    magnitudes = values.float().abs().to(values.dtype)
    if "new_values" in options:
        options = options | {"new_values": options["new_values"].abs()}
    size = kernel.reference(q, keys, magnitudes, *others, **options, compute=torch.float64)
    return [stated], results, [size]
