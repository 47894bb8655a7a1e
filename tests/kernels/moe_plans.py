# SPDX-License-Identifier: Apache-2.0
"""Plans of a small kernel. A module of its own: processes that tests start need no more than this of them."""

from __future__ import annotations

from nnfront_kernels import moe_combine
from nnfront_kernels.common import Plan, launched_by


def moe_plans() -> list[Plan]:
    """Two specialisations of a small kernel."""
    plans: list[Plan] = []
    with launched_by(plans.append):
        for width in (64, 37):
            arguments, options = moe_combine.KERNEL.example(moe_combine.CombineShape(3, 2, width), "float16")
            moe_combine.KERNEL.launch(*arguments, **options, arch="sm_90")
    return plans
