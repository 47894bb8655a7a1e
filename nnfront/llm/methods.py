# SPDX-License-Identifier: Apache-2.0
"""What the methods of a language model take and give, and what those of another lack of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from nnfront import dtypes
from nnfront.dims import Dim
from nnfront.ir import Function, IRModule, StateType, TensorType, TupleType, Type, type_text

CACHE_DIMS = ("batch", "max_seq")
"""What caches are made by: `make_cache(batch=..., max_seq=...)`."""


def lacks_for_text(module: IRModule, config: Any) -> Iterator[str]:
    """What a model lacks that is to generate text, one sentence each."""
    vocab = getattr(config, "vocab_size", None)
    for name, seq in (("prefill", "seq"), ("decode", "1")):
        if name not in module:
            yield f"there is no method {name!r}, methods are {', '.join(repr(f.name) for f in module.methods)}"
        else:
            yield from _lacks_of(module[name], seq, vocab if isinstance(vocab, int) else None)
    for name in ("max_position_embeddings", "vocab_size"):
        if not isinstance(getattr(config, name, None), int):
            yield f"the model file's Config has no int {name!r}"


def _lacks_of(method: Function, seq: str, vocab: int | None) -> Iterator[str]:
    """`seq`: how many tokens a call has, "1" or any number; `vocab`: how many logits there are, None where the config does not say."""
    inputs = [param.type for param in method.params if param.role in ("input", "state")]
    match inputs:
        case [TensorType() as tokens, StateType() as cache]:
            pass
        case _:
            taken = ", ".join(map(type_text, inputs)) or "nothing"
            yield f"{method.name!r} takes {taken}, expected tokens and a cache"
            return
    if not _takes(tokens, seq):
        yield f"{method.name!r} takes tokens {type_text(tokens)}, expected int64[batch, {seq}]"
    sizes = {(str(layer.batch), str(layer.max_seq)) for layer in cache.layers}
    for found in sorted(sizes - {CACHE_DIMS}):
        yield f"{method.name!r} takes a cache of {' x '.join(found)}, expected {' x '.join(CACHE_DIMS)}"
    result = method.result_type
    assert isinstance(result, TupleType)  # as there is a state
    if not _gives(result.fields[0], vocab):
        logits = vocab or "vocab_size"
        yield f"{method.name!r} gives {type_text(result.fields[0])}, expected floats [batch, 1, {logits}]"


def _takes(tokens: TensorType, seq: str) -> bool:
    if tokens.dtype != "int64" or tokens.ndim != 2:
        return False
    batch, count = tokens.shape
    return str(batch) == "batch" and (isinstance(count, Dim) or str(count) == seq)


def _gives(result: Type, vocab: int | None) -> bool:
    """Whether it is logits, of the last token or of all."""
    if not isinstance(result, TensorType) or result.dtype not in dtypes.COMPUTED or result.ndim != 3:
        return False
    batch, count, logits = result.shape
    return (
        str(batch) == "batch"
        and (isinstance(count, Dim) or count == 1)
        and (vocab is None or logits == vocab)
    )
