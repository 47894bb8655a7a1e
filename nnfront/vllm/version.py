# SPDX-License-Identifier: Apache-2.0
"""The one vLLM that models are made for. Its interfaces change from one version to the next, and tests run with this one."""

from __future__ import annotations

import importlib

from nnfront.errors import LoadError

VERSION = "0.32.0"
DEVICE = "cpu"


def require_vllm() -> None:
    """Raise LoadError unless vLLM is here, of the version and for the device that tests run with."""
    try:
        vllm = importlib.import_module("vllm")
    except ImportError as error:
        raise _wrong("there is no vLLM here", str(error)) from None
    found = str(getattr(vllm, "__version__", "of no version"))
    if found.partition("+")[0] != VERSION:
        raise _wrong(f"vLLM {found} is not the one that this is made for", f"vLLM {found}")
    device = str(importlib.import_module("vllm.platforms").current_platform.device_type)
    if device != DEVICE:
        raise _wrong(
            f"vLLM runs on {device} here, where nothing of this has been tried", f"vLLM {found} on {device}"
        )


def _wrong(what: str, got: str) -> LoadError:
    return LoadError(
        what,
        details=[f"got {got}", f"expected vLLM {VERSION} on {DEVICE}"],
        help=f"install nnfront[vllm], which is vllm-{DEVICE} {VERSION}, in an environment of its own",
    )
