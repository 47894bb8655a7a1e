# SPDX-License-Identifier: Apache-2.0
"""Who runs a plan: Triton, unless another launcher is named for a while."""

from __future__ import annotations

from threading import Thread

import torch
from nnfront_kernels import rms_norm
from nnfront_kernels.common import Plan, launched_by


def test_a_named_launcher_gets_every_plan_of_its_thread_until_its_block_ends() -> None:
    x, weight = torch.ones(3, 8), torch.ones(8)
    plans: list[Plan] = []
    with launched_by(plans.append):
        y = rms_norm.launch(x, weight, eps=0.0)
        other = Thread(target=lambda: rms_norm.launch(x, weight, eps=0.0))
        other.start()
        other.join()
    assert [plan.output.data_ptr() for plan in plans] == [y.data_ptr()]
    rms_norm.launch(x, weight, eps=0.0)
    assert len(plans) == 1


def test_an_empty_output_is_given_to_no_launcher() -> None:
    plans: list[Plan] = []
    with launched_by(plans.append):
        rms_norm.launch(torch.ones(0, 8), torch.ones(8), eps=0.0)
    assert not plans
