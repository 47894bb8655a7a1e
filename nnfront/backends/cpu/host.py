# SPDX-License-Identifier: Apache-2.0
"""Instructions of a program that no op stands behind, and questions that the host answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from nnfront.backends.kernel import NOTHING, Kernel
from nnfront.lower import PACK, Run


def _within(run: Run) -> Callable[..., Any]:
    """The question of a special case as one Python expression: 0.2 us for a dim, where the reference takes 1.2."""
    names = [f"v{i}" for i in range(len(run.inputs))]
    scope: dict[str, Any] = {"Tensor": torch.Tensor}
    asked = []
    for name, (low, high, step) in zip(names, run.attrs["ranges"], strict=True):
        scope |= {f"low_{name}": low, f"high_{name}": high, f"step_{name}": step}
        if low is not None and low == high:
            asked.append(f"{name} == low_{name}")
        else:
            asked += [f"{name} >= low_{name}"] if low is not None else []
            asked += [f"{name} <= high_{name}"] if high is not None else []
        asked += [f"{name} % step_{name} == 0"] if step is not None else []
    numbers = "".join(f"    if {name}.__class__ is Tensor: {name} = {name}.item()\n" for name in names)
    exec(f"def within({', '.join(names)}):\n{numbers}    return {' and '.join(asked) or 'True'}", scope)
    within: Callable[..., Any] = scope["within"]
    return within


KERNELS = (
    Kernel(PACK, "", lambda run: lambda *values: values, workspace=NOTHING),
    Kernel("within", "", _within, workspace=NOTHING, reads_back=True),
)
