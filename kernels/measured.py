# SPDX-License-Identifier: Apache-2.0
"""Configs that were measured to be faster than what the model in `tiles.py` picks. `choose` looks here first.

MEASURED is empty: nothing has been measured yet. A row is kept only where it won by more than GAIN, and only for what
it was measured on: the GPU generation, the kernel, the dtype, the weight's sizes, a bucket of M and the version of
Triton. Everything else falls to the model. Nothing is tuned at run time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import triton
from nnfront_kernels.common import Config

GAIN = 1.03  # below this, two runs of one config differ as much


class Key(NamedTuple):
    """What a measurement holds for. `m` is a bucket (`tiles.bucket`), `group` a quantisation group, `triton` "3.6"."""

    arch: str
    kernel: str
    dtype: str
    n: int
    k: int
    group: int
    m: int
    triton: str


@dataclass(frozen=True)
class Measurement:
    """A config that won, its time and that of the modelled choice in microseconds, and where: "2026-01-31 H200"."""

    config: Config
    time_us: float
    modelled_us: float
    source: str


MEASURED: dict[Key, Measurement] = {}
TRITON = ".".join(triton.__version__.split(".")[:2])


def look_up(
    kernel: str,
    dtype: str,
    arch: str,
    *,
    n: int,
    k: int,
    m: int,
    group: int = 0,
    table: Mapping[Key, Measurement] = MEASURED,
) -> Config | None:
    """The measured config for a shape with the installed Triton, or None. `m` is already a bucket."""
    found = table.get(Key(arch, kernel, dtype, n, k, group, m, TRITON))
    return None if found is None else found.config
