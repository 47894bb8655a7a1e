# SPDX-License-Identifier: Apache-2.0
"""torch's first calls of elementary functions, made here by one thread.

On x86 torch computes them by MKL, which chooses the code of a function when it is called first. Where several threads make that call, one of them may compute its part with other
code: cosines of a prompt's positions are wrong by 1.5e-4 then, in the first call of a process alone (github.com/pytorch/pytorch/issues/188792, with oneMKL before 2025).
"""

import torch

_FUNCTIONS = (
    "acos acosh asin asinh atan atanh cos cosh erf erfc erfinv exp expm1 "
    "lgamma log log10 log1p log2 rsqrt sigmoid sin sinh sqrt tan tanh"
).split()


def make_first_calls() -> None:
    """Call each function once for a number of each dtype that MKL has it for; 2 ms."""
    for dtype in (torch.float32, torch.float64):
        one = torch.ones(1, dtype=dtype)
        for name in _FUNCTIONS:
            getattr(torch, name)(one)
