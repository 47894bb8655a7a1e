# SPDX-License-Identifier: Apache-2.0
"""Every pass is verified in every test."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def check_after_every_pass(monkeypatch):
    monkeypatch.setenv("NNFRONT_CHECK", "1")
