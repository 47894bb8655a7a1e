# SPDX-License-Identifier: Apache-2.0
"""What all tests share: one thread for torch (the tensors are tiny), a fixed seed for each test, and the same examples each time.

Property tests draw the same examples in every run, and take as long as they take, so that a run tells about the code and not about luck or the
machine. To look for new ones: `HYPOTHESIS_PROFILE=search python -m pytest tests`.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fixed", settings.get_profile("search"), derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Without garbage collection, then or later: what is imported and collected stays, and to look through it again and again takes a third of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


# `torch.manual_seed` keeps a note of each call, with the lines of all its callers, for a GPU that may start later: half a millisecond.
SEED = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def _seed() -> None:
    SEED(0)
