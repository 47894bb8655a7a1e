# SPDX-License-Identifier: Apache-2.0
"""Models as plugins of vLLM: its scheduler, its cache and its attention, around what is computed of each token here.

vLLM finds `register` by itself, by an entry point; `--hf-overrides '{"architectures": ["NnfrontForCausalLM"]}'` has a model run through it.

    parts       a model folder in parts, over flat tokens and somebody's attention; knows nothing of vLLM
    model       those parts as vLLM's class of a model, with a layer of its attention for each of theirs; which vLLM it is made for

Nothing of vLLM is imported before a model of it is made.
"""

from __future__ import annotations

ARCHITECTURE = "NnfrontForCausalLM"
"""What a model's `architectures` are to say."""


def register() -> None:
    """Tell vLLM of the architecture. Called again it does the same; it imports no more of nnfront, and refuses no vLLM: a model does."""
    from vllm import ModelRegistry

    ModelRegistry.register_model(ARCHITECTURE, f"nnfront.vllm.model:{ARCHITECTURE}")
