# SPDX-License-Identifier: Apache-2.0
"""Values of float8_e4m3fn on a CPU, from their bytes.

torch converts float8 element by element. Here a code is moved to where a half type has its sign, exponent and mantissa, and multiplied by the power
of two by which the biases of the exponents differ; both are exact. A NaN would become a number that way, so bytes among which there is one are converted by torch.
"""

from __future__ import annotations

import torch

# The half type that bytes are moved into, by the dtype that is wanted: how far, what is masked out then (copies of the sign), and the factor.
_DECODING = {
    torch.float32: (torch.float16, 7, -0x4001, 2.0**8),
    torch.bfloat16: (torch.bfloat16, 4, -0x7810, 2.0**120),
}
_NAN, _MINUS_NAN = 0x7F, 0xFF


def decode(quantized: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float8_e4m3fn values in float32 or bfloat16, which hold all of them, in new memory."""
    if quantized.numel() == 0 or _has_nan(quantized):
        return quantized.to(dtype)
    half, shift, mask, factor = _DECODING[dtype]
    moved = quantized.view(torch.int8).to(torch.int16).bitwise_left_shift_(shift).bitwise_and_(mask)
    return moved.view(half).to(dtype).mul_(factor)


def _has_nan(quantized: torch.Tensor) -> bool:
    """Each NaN is the greatest code, as a signed integer or as an unsigned one: two passes that read nothing but bytes."""
    return (
        int(quantized.view(torch.int8).amax()) == _NAN
        or int(quantized.view(torch.uint8).amax()) == _MINUS_NAN
    )
