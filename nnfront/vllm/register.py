# SPDX-License-Identifier: Apache-2.0
"""`register`: what vLLM calls in each of its processes when nnfront is installed beside it."""

from __future__ import annotations

ARCHITECTURE = "NnfrontForCausalLM"
"""What a model's `architectures` are to say."""


def register() -> None:
    """Tell vLLM of the architecture. Called again it does the same; it imports no more of nnfront, and refuses no vLLM: a model does."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, f"nnfront.vllm.model:{ARCHITECTURE}")
