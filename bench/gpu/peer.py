# SPDX-License-Identifier: Apache-2.0
"""The same model in transformers: random weights on the device, a static cache, and decode steps through torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
)


class Peer:
    """Calls to time; each keeps the state that it needs. Decode steps are compiled on a GPU."""

    def __init__(self, config: dict[str, Any], device: torch.device) -> None:
        self.device = device
        self.label = f"transformers {transformers.__version__} {config['dtype']}"
        self.config = LlamaConfig(**{name: config[name] for name in FIELDS})
        with device:
            self.model = LlamaForCausalLM._from_config(
                self.config, dtype=getattr(torch, config["dtype"])
            ).eval()
        self.step: Callable[..., Any] = self._forward
        if device.type == "cuda":
            self.step = torch.compile(self._forward, mode="reduce-overhead", dynamic=False)

    def _forward(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        made = self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        token: torch.Tensor = made.logits[:, -1:].argmax(-1)
        return token

    def _ids(self, batch: int, length: int) -> torch.Tensor:
        return torch.randint(0, self.config.vocab_size, (batch, length), device=self.device)

    def prefill(self, length: int) -> Callable[[], Any]:
        """A prompt into a new cache."""
        ids = self._ids(1, length)
        return lambda: self._forward(ids, StaticCache(config=self.config, max_cache_len=length))

    def decode(self, batch: int, length: int, room: int) -> Callable[[], Any]:
        """One more token for each sequence after `length` of them; there is room for `room`.

        The tokens before are zeros: attention reads all slots of a static cache, whatever is in them.
        """
        cache = StaticCache(config=self.config, max_cache_len=length + room)
        self._forward(self._ids(batch, 1), cache)
        for layer in cache.layers:
            layer.cumulative_length.fill_(length)
        state = {"token": self._ids(batch, 1)}

        def step() -> None:
            state["token"] = self.step(state["token"], cache).clone()  # the next step overwrites it

        return step
