# SPDX-License-Identifier: Apache-2.0
"""Positions as rotations and as sinusoids."""

from __future__ import annotations

import math

import torch

from nnfront.dims import Size, less_equal
from nnfront.ir.op import op
from nnfront.ir.types import TensorType
from nnfront.ops.rules import Dtype, Flag, Whole, require, require_float, require_same, wide


@op(stricter="all operands are floats, where the reference would convert", dtype_policy="first")
def rope(x: TensorType, cos: TensorType, sin: TensorType, *, interleaved: bool = False) -> TensorType:
    """Rotate pairs of features of each head by angles given by their cosines and sines.

    Shapes: x [batch, seq, heads, head_size]; cos and sin [batch, seq, pairs], [1, seq, pairs] or [seq, pairs]; the result has
    x's type. The first 2 * pairs features are rotated, the rest stay. A pair is (i, i + pairs), or with `interleaved`
    (2 i, 2 i + 1). Computed in float32 and rounded once.
    Source: RoFormer (arXiv 2104.09864), eq. 34; the half-split layout is that of Llama checkpoints on Hugging Face.
    """
    require_float(x)
    require_float(cos, "cos")
    require_float(sin, "sin")
    require(x.ndim == 4, "x must be [batch, seq, heads, head_size], got {} axes", x.ndim)
    require(cos.ndim == sin.ndim, "cos has {} axes, sin has {}", cos.ndim, sin.ndim)
    require(cos.ndim in (2, 3), "cos must be [batch, seq, pairs] or [seq, pairs], got {} axes", cos.ndim)
    batch, seq, _, size = x.shape
    for mine, its in zip(cos.shape, sin.shape, strict=True):
        require_same(mine, its, "cos and sin differ: {} and {}")
    require_same(cos.shape[-2], seq, "cos has {} positions, x has {}")
    if cos.ndim == 3 and not (isinstance(cos.shape[0], int) and cos.shape[0] == 1):
        require_same(cos.shape[0], batch, "cos has a batch of {}, x has {}")
    rotated: Size = 2 * cos.shape[-1]
    require(
        less_equal(rotated, size) is True, "{} pairs do not fit in a head of size {}", cos.shape[-1], size
    )
    return x


@rope.reference
def _(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool) -> torch.Tensor:
    pairs = cos.shape[-1]
    cos, sin = (table.to(wide(x.dtype)).unsqueeze(-2) for table in (cos, sin))  # an axis for the heads
    rotated, rest = x[..., : 2 * pairs].to(wide(x.dtype)), x[..., 2 * pairs :]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :pairs], rotated[..., pairs:]
    both = (first * cos - second * sin, second * cos + first * sin)
    result = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, -1)
    return torch.cat([result.to(x.dtype), rest], -1)


@op(stricter="time steps are numbers that can be computed with, where the reference would convert")
def get_timestep_embedding(
    x: TensorType,
    embedding_dim: Whole,
    flip_sin_to_cos: Flag = False,
    downscale_freq_shift: float = 1,
    scale: float = 1,
    max_period: int = 10000,
    dtype: Dtype = "float32",
) -> TensorType:
    """Sines, then cosines (or the reverse, if flipped), of each time step at geometrically falling frequencies.

    Shapes: x [n], result [n, embedding_dim] of type `dtype`; an odd embedding_dim ends in a column of zeros. Frequency i of
    half = embedding_dim // 2 is max_period ** (-i / (half - downscale_freq_shift)); angles are multiplied by `scale`.
    Source: Denoising Diffusion Probabilistic Models (arXiv 2006.11239), as in the Hugging Face diffusers.
    """
    require(x.ndim == 1, "x must have one axis, got {}", x.ndim)
    require(not x.dtype.startswith("float8") and x.dtype != "bool", "x must hold time steps, got {}", x.dtype)
    require_float(TensorType((), dtype), "the result")
    half = embedding_dim // 2
    require(embedding_dim > 0, "embedding_dim must be positive, got {}", embedding_dim)
    require(
        half != downscale_freq_shift,
        "downscale_freq_shift {} leaves no range of frequencies for size {}",
        downscale_freq_shift,
        embedding_dim,
    )
    return TensorType((x.shape[0], embedding_dim), dtype)


@get_timestep_embedding.reference
def _(
    x: torch.Tensor,
    embedding_dim: int,
    flip_sin_to_cos: bool,
    downscale_freq_shift: float,
    scale: float,
    max_period: int,
    dtype: str,
) -> torch.Tensor:
    half = embedding_dim // 2
    steps = torch.arange(half, dtype=torch.float32, device=x.device)
    angles = (
        scale
        * x.float()[:, None]
        * torch.exp(steps * (-math.log(max_period) / (half - downscale_freq_shift)))
    )
    waves = [angles.cos(), angles.sin()] if flip_sin_to_cos else [angles.sin(), angles.cos()]
    padding = torch.zeros(x.shape[0], embedding_dim % 2, device=x.device)
    return torch.cat([*waves, padding], -1).to(getattr(torch, dtype))
