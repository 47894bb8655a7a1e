# SPDX-License-Identifier: Apache-2.0
"""What all tests share: one thread for torch (the tensors are tiny) and a fixed seed for each test."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
