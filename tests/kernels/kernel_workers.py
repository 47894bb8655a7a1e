# SPDX-License-Identifier: Apache-2.0
"""The process that runs kernels for the tests. A module of its own: work is found by name in the process that does it."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

# pytest shows what this process prints, and torch's profiler tells of each run of it.
QUIET = {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@contextmanager
def worker(interpret: str) -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=_start
    ) as process:
        # It is started by the first work there is, and inherits the environment then.
        with pytest.MonkeyPatch.context() as environment:
            for name, value in {**QUIET, "TRITON_INTERPRET": interpret}.items():
                environment.setenv(name, value)
            process.submit(os.getpid).result()
        yield process


def _start() -> None:
    torch.set_num_threads(1)
    if os.environ["TRITON_INTERPRET"] == "1":
        patch_once_a_launch()
    # The interpreter computes what a mask throws away, infinities among it.
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton.runtime.interpreter")


def patch_once_a_launch() -> None:
    """Have the interpreter put its functions in the place of Triton's when a kernel starts, and not again with each function that the kernel calls.

    To look for what is still to be replaced took half of the time that kernels took.
    """
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[str] = set()

    def once(function: Callable[..., Any]) -> Any:
        module = function.__globals__["__name__"]  # what is replaced depends on what its file imports
        if module in done:
            return None  # only a kernel takes back what was replaced, and it comes first
        done.add(module)
        return patch(function)

    def launched(*arguments: Any, **options: Any) -> None:
        done.clear()
        launch(*arguments, **options)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = once, launched
