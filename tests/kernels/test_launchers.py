# SPDX-License-Identifier: Apache-2.0
"""Who runs a plan: Triton, unless another launcher is named for a while."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread

import torch
from nnfront_kernels import rms_norm
from nnfront_kernels.common import Plan, launched_by


def name_a_launcher() -> None:
    x, weight = torch.full((3, 8), 2.0), torch.ones(8)
    outputs = []

    def elsewhere() -> None:
        outputs.append(rms_norm.launch(x, weight, eps=0.0))

    plans: list[Plan] = []
    with launched_by(plans.append):
        taken = rms_norm.launch(x, weight, eps=0.0)
        other = Thread(target=elsewhere)
        other.start()
        other.join()
    elsewhere()
    assert [plan.output.data_ptr() for plan in plans] == [taken.data_ptr()]
    assert len(outputs) == 2
    assert all((y == 1.0).all() for y in outputs)


def launch_nothing() -> None:
    plans: list[Plan] = []
    with launched_by(plans.append):
        rms_norm.launch(torch.ones(0, 8), torch.ones(8), eps=0.0)
    assert not plans


def test_a_named_launcher_gets_every_plan_of_its_thread_until_its_block_ends(
    interpreted: Callable[..., object],
) -> None:
    interpreted(name_a_launcher)


def test_an_empty_output_is_given_to_no_launcher(interpreted: Callable[..., object]) -> None:
    interpreted(launch_nothing)
