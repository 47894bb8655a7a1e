# SPDX-License-Identifier: Apache-2.0
"""What `verify` compares of a model: which method, on which tensors, and what of transformers' gives the same.

Of a model that writes, the logits of a text, after a source if it has an encoder that reads one; of an encoder what each token has become.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from nnfront.dims import Dim
from nnfront.errors import LoadError
from nnfront.ir import IRModule, TensorType
from nnfront.packages import transformers

TOKENS = 48
"""How many tokens of a text, if its method takes as many."""

Tensors: TypeAlias = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """What a module was given, and what it gave: the tensors among both."""

    given: Tensors
    gave: Tensors


@dataclass(frozen=True, slots=True)
class Reference:
    """The first call of each of transformers' modules, by path, the class of each, and what the model gives."""

    calls: Mapping[str, Call]
    classes: Mapping[str, str]
    result: torch.Tensor


@dataclass(frozen=True, slots=True)
class Comparison:
    """method, arguments: of ours. kind: transformers' auto class; names: what it calls the arguments; result: and what it gives."""

    method: str
    arguments: tuple[torch.Tensor, ...]
    kind: str
    names: tuple[str, ...]
    result: str

    @staticmethod
    def of(module: IRModule, config: Any, tokens: Sequence[int] | None) -> Comparison | None:
        """What to compare of a model's methods, on these tokens or some that differ; None if it has neither logits nor what an encoder gives."""
        methods = {method.name: method for method in module.methods}
        name = next((name for name in ("logits", "hidden") if name in methods), None)
        if name is None:
            return None
        types = {p.name: p.type for p in methods[name].params if p.role == "input"}
        arguments = {
            argument: _argument(argument, type, config, tokens)
            for argument, type in types.items()
            if isinstance(type, TensorType)
        }
        values = tuple(arguments.values())
        if name == "hidden":
            given = {"tokens": "input_ids", "mask": "attention_mask", "types": "token_type_ids"}
            names = tuple(given.get(argument, argument) for argument in arguments)
            return Comparison(name, values, "AutoModel", names, "last_hidden_state")
        if "source" not in arguments:
            return Comparison(name, values, "AutoModelForCausalLM", ("input_ids",), "logits")
        is_text = arguments["source"].dtype == torch.int64
        kind = "AutoModelForSeq2SeqLM" if is_text else "AutoModelForSpeechSeq2Seq"
        source = "input_ids" if is_text else "input_features"
        return Comparison(name, values, kind, (source, "decoder_input_ids"), "logits")

    def run_theirs(self, path: Path, **options: Any) -> Reference:
        """Run transformers' model of a folder in float32; `options` are of its `from_pretrained`. Raises LoadError without transformers, and if it cannot load the folder."""
        try:
            model = (
                getattr(transformers(), self.kind)
                .from_pretrained(
                    path, dtype=torch.float32, attn_implementation="eager", local_files_only=True, **options
                )
                .eval()
            )
        except LoadError:
            raise
        except Exception as error:
            text = next(iter(str(error).splitlines()), "")
            raise LoadError(
                f"transformers cannot load {path}", details=[f"{type(error).__name__}: {text}"]
            ) from error
        calls: dict[str, Call] = {}

        def noted(name: str) -> Any:
            def hook(module: Any, args: Any, kwargs: Any, result: Any) -> None:
                given = (*args, *kwargs.values())
                calls.setdefault(name, Call(tensors_in(given), tensors_in(result)))

            return hook

        for name, module in model.named_modules():
            module.register_forward_hook(noted(name), with_kwargs=True)
        with torch.no_grad():
            result: torch.Tensor = model(**dict(zip(self.names, self.arguments, strict=True)))[self.result]
        classes = {name: type(module).__name__ for name, module in model.named_modules()}
        return Reference(calls, classes, result)


def _argument(name: str, type: TensorType, config: Any, tokens: Sequence[int] | None) -> torch.Tensor:
    """A value for an argument: tokens from all over the vocabulary, no two neighbours alike; a mask without padding; noise for floats."""
    if type.dtype != "int64":
        sizes = [1, *(size if isinstance(size, int) else TOKENS for size in type.shape[1:])]
        return torch.randn(sizes, generator=torch.Generator().manual_seed(0))
    if tokens is not None and name == "tokens":
        return torch.tensor([[*tokens]])
    (_, seq), length = type.shape, TOKENS if tokens is None else len(tokens)
    at = torch.arange(min(length, seq.max or length) if isinstance(seq, Dim) else length)[None]
    if name == "mask":
        return torch.ones_like(at)
    if name == "types":
        return at % int(config.type_vocab_size)
    return ((7 if name == "tokens" else 11) + 7919 * at) % int(config.vocab_size)


def tensors_in(tree: Any, kind: type = torch.Tensor) -> tuple[Any, ...]:
    """The tensors in tuples, lists and dicts of them, in order."""
    if isinstance(tree, kind):
        return (tree,)
    if isinstance(tree, Mapping):
        tree = tuple(tree.values())
    return tuple(x for p in tree for x in tensors_in(p, kind)) if isinstance(tree, tuple | list) else ()
