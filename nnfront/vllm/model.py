# SPDX-License-Identifier: Apache-2.0
"""A model as vLLM takes one: a class that it makes, asks for tokens' vectors, hidden states and logits, and whose attention layers it finds."""

from __future__ import annotations

import copy
import importlib
import os
from collections.abc import Iterable
from typing import Any

import torch

from nnfront.errors import LoadError
from nnfront.passes.external_attention import AttentionCall
from nnfront.vllm.parts import Parts

VERSION = "0.32.0"
DEVICE = "cpu"
"""The one vLLM that models are made for. Its interfaces change from one version to the next, and tests run with this one."""
OPTIONS_KEY = "nnfront"
"""Where options stand in vLLM's `additional_config`."""


class NnfrontForCausalLM(torch.nn.Module):
    """A decoder of nnfront over vLLM's attention and cache. T: tokens of all requests of a step, in one row."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        """Compile the model of `vllm_config`. Raises LoadError for what vLLM is asked for and cannot have of it, PassError for a model with other state than keys and values."""
        require_vllm()
        super().__init__()
        _check(vllm_config)
        model, options = vllm_config.model_config, vllm_config.additional_config or {}
        self.parts = Parts(model.model, model.dtype, options.get(OPTIONS_KEY, {}))
        self.attention = torch.nn.ModuleList()
        for number, call in enumerate(self.parts.attention):
            self.attention.append(_attention(call, number, prefix, vllm_config.cache_config))

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Tokens [T] to vectors [T, hidden_size]."""
        return self.parts.embed(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Tokens [T], or the vectors that stand for them, at positions [T] to hidden states [T, hidden_size]."""
        return self.parts.hidden(input_ids, positions, self, inputs_embeds)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] to float32 [T, vocab_size]."""
        return self.parts.head(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the folder's weights by the model's own transform; `weights`, which vLLM reads as it yields them, are left unread but for the first."""
        next(iter(weights), None)  # vLLM times what follows from there
        self.parts.load()
        return {name for name, _ in self.named_parameters()}

    def attend(self, number: int, q: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Attention `number` of the model, as `nnfront.passes.external_attention` says, by the layer of vLLM that stands for it."""
        layer: Any = self.attention[number]
        if self.parts.attention[number].has_sinks:
            layer.impl.sinks.copy_(others[-1])
            others = others[:-1]
        k, v = (each.flatten(1) for each in others) if others else (None, None)
        y: torch.Tensor = layer(q.flatten(1), k, v)
        return y.reshape(q.shape)


def _attention(call: AttentionCall, number: int, prefix: str, cache_config: Any) -> Any:
    """The layer of vLLM for an attention. Raises LoadError for one that vLLM cannot compute here."""
    from vllm.model_executor.layers.attention import Attention

    own = copy.copy(cache_config)
    own.sliding_window = None  # it would stand in where a layer sees everything
    options: dict[str, Any] = {}
    if call.has_sinks:
        options["sinks"] = torch.zeros(call.heads)
    if call.reads is not None:
        options["kv_sharing_target_layer_name"] = _name(prefix, call.reads)
    layer = Attention(
        call.heads,
        call.head_size,
        call.scale,
        call.kv_heads,
        cache_config=own,
        logits_soft_cap=call.softcap,
        per_layer_sliding_window=call.window,
        prefix=_name(prefix, number),
        **options,
    )
    if not layer.attn_backend.supports_head_size(call.head_size):
        sizes = ", ".join(map(str, layer.attn_backend.get_supported_head_sizes()))
        raise LoadError(
            f"vLLM does not compute the attention of {call.module}",
            details=[f"got heads of {call.head_size}", f"expected heads of one of {sizes}"],
            help="run this model by itself",
        )
    return layer


def _name(prefix: str, number: int) -> str:
    """What vLLM calls a layer of its own: it reads the number."""
    return f"{prefix}{'.' if prefix else ''}layers.{number}.attn"


def _check(vllm_config: Any) -> None:
    """Refuse what vLLM may be asked for and a model here does not do."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    for asked, number in (
        ("tensor_parallel_size", parallel.tensor_parallel_size),
        ("pipeline_parallel_size", parallel.pipeline_parallel_size),
    ):
        if number != 1:
            raise LoadError(
                f"vLLM is asked to divide the model: {asked} is {number}",
                details=["expected 1"],
                help="several ranks are nnfront's own: nnfront serve DIR --tp N",
            )
    if model.revision is not None and not os.path.isdir(model.model):
        raise LoadError(
            f"vLLM is asked for the revision {model.revision} of {model.model}",
            help="download it, and give its folder",
        )


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
