# SPDX-License-Identifier: Apache-2.0
"""Models as plugins of vLLM: its scheduler, its cache and its attention, around what is computed of each token here.

vLLM finds `register` by itself, by an entry point; `--hf-overrides '{"architectures": ["NnfrontForCausalLM"]}'` has a model run through it.

    version     the one vLLM that this is made for
    parts       a model folder in parts, over flat tokens and somebody's attention; knows nothing of vLLM
    model       those parts as vLLM's class of a model, with a layer of its attention for each of theirs

Nothing of vLLM is imported before a model of it is made.
"""

from nnfront.vllm.register import ARCHITECTURE, register

__all__ = ["ARCHITECTURE", "register"]
