# SPDX-License-Identifier: Apache-2.0
"""A language model in parts, for an engine that keeps the cache itself: `embed`, `hidden` and `head`, each of one token of each sequence."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from nnfront import passes
from nnfront.errors import LoadError
from nnfront.ir import IRModule, TensorType, TupleType
from nnfront.llm.methods import PARTS

if TYPE_CHECKING:
    from nnfront.nn.module import Module

EMBED, HIDDEN, HEAD = PARTS


def export_parts(model: Module, methods: Mapping[str, Any]) -> IRModule:
    """Export `hidden` and `head` of a model whose spec is `methods`. Raises LoadError if it generates no text by them."""
    from nnfront.nn import spec

    given = methods.get("decode", {})
    names = {name: _arguments(model, name) for name in (HIDDEN, HEAD)}
    if len(given) != 2 or len(names[HIDDEN]) != 2 or len(names[HEAD]) != 1:
        has = ", ".join(f"{name}({', '.join(args)})" for name, args in names.items() if args)
        raise LoadError(
            f"the model has no parts that another engine could run: {type(model).__name__}",
            details=[f"got {has or 'no such methods'}", "expected hidden(tokens, cache) and head(x), of which decode is made"],
            help="derive the model from nnfront.CausalLM, or run it by itself",
        )  # fmt: skip
    hidden = {HIDDEN: dict(zip(names[HIDDEN], given.values(), strict=True))}
    result = model.export(hidden)[HIDDEN].result_type
    assert isinstance(result, TupleType)  # as there is a cache
    x = result.fields[0]
    assert isinstance(x, TensorType)
    tokens = next(iter(given.values()))
    head = {names[HEAD][0]: spec.Tensor([*tokens.shape, *x.shape[2:]], x.dtype)}
    return model.export({**hidden, HEAD: head})


def for_engine(module: IRModule) -> IRModule:
    """What `export_parts` returned, over the attention of an engine. Raises PassError for a model that has other state than keys and values."""
    module = passes.external_attention(module)
    return passes.split_embedding(module, HIDDEN, module[HIDDEN].inputs[0].name, EMBED)


def _arguments(model: Module, name: str) -> list[str]:
    method = getattr(model, name, None)
    return [] if method is None else list(inspect.signature(method).parameters)
