# SPDX-License-Identifier: Apache-2.0
"""Processes that run kernels for the tests. A module of its own: work is found by name in the process that does it."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager

import torch

WORKERS = min(os.cpu_count() or 1, 4)


@contextmanager
def worker_pool(interpret: str) -> Iterator[ProcessPoolExecutor]:
    before = os.environ.get("TRITON_INTERPRET")
    with ProcessPoolExecutor(
        WORKERS, mp_context=multiprocessing.get_context("spawn"), initializer=_start
    ) as pool:
        os.environ["TRITON_INTERPRET"] = interpret
        try:  # a process is started by the first work there is, and inherits the variable then
            for started in [pool.submit(os.getpid) for _ in range(WORKERS)]:
                started.result()
        finally:
            if before is None:
                del os.environ["TRITON_INTERPRET"]
            else:
                os.environ["TRITON_INTERPRET"] = before
        try:
            yield pool
        finally:
            pool.shutdown(cancel_futures=True)


def _start() -> None:
    torch.set_num_threads(1)
    os.nice(5)  # tests that wait for nobody go first
