# SPDX-License-Identifier: Apache-2.0
"""The process that runs kernels for the tests. A module of its own: work is found by name in the process that does it."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import pytest
import quick_interpreter
import torch

# pytest shows what this process prints, and torch's profiler tells of each run of it.
QUIET = {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}
# Matrix tiles (AMX) add up a row of half numbers in another order where more rows are beside it, and padded calls are compared with others bit by bit.
ALIKE = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}


@contextmanager
def worker(interpret: str) -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=_start
    ) as process:
        # It is started by the first work there is, and inherits the environment then.
        with pytest.MonkeyPatch.context() as environment:
            for name, value in {**QUIET, **ALIKE, "TRITON_INTERPRET": interpret}.items():
                environment.setenv(name, value)
            process.submit(os.getpid).result()
        yield process


def _start() -> None:
    torch.set_num_threads(1)
    if os.environ["TRITON_INTERPRET"] == "1":
        quick_interpreter.install()
    # The interpreter computes what a mask throws away, infinities among it.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")
