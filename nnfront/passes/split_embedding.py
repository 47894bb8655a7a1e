# SPDX-License-Identifier: Apache-2.0
"""Make a method of its own of the table in which a method looks tokens up.

example: split_embedding(ir, "hidden", "tokens", "embed")
before:
    def hidden[n](tokens: input int64[n], table: weight float32[8, 4], w: weight float32[4, 4]) -> float32[n, 4] {
        x: float32[n, 4] = take(table, tokens, axis=0)
        y: float32[n, 4] = linear(x, w)
        return y
    }
after:
    def embed[n](tokens: input int64[n], table: weight float32[8, 4]) -> float32[n, 4] {
        x: float32[n, 4] = take(table, tokens, axis=0)
        return x
    }
    def hidden[n](embedded: input float32[n, 4], w: weight float32[4, 4]) -> float32[n, 4] {
        y: float32[n, 4] = linear(embedded, w)
        return y
    }

Whoever has embeddings that are no token's gives them to the second method.

leaves:  a module as it is whose method reads tokens otherwise, or more than once.
"""

from __future__ import annotations

from nnfront import ops
from nnfront.ir import Call, IRModule, Mutator, Names, Param, used_vars
from nnfront.passes.base import module_pass


@module_pass()
def split_embedding(ir: IRModule, method: str, tokens: str, embedding: str) -> IRModule:
    """Split `method` where it has looked its argument `tokens` up in a weight, into a method `embedding` and the rest."""
    old = ir[method]
    given = next(p for p in old.inputs if p.name == tokens)
    readers = [b for b in old.bindings if given in used_vars(b.value)]
    found = readers[0].value if len(readers) == 1 else None
    if not isinstance(found, Call) or found.op is not ops.take or found.args[0] not in old.weights:
        return ir
    table = found.args[0]
    embedded = Param(Names.of(old).unique("embedded"), readers[0].var.type, "input")
    rest = Mutator()
    rest.replaced[readers[0].var] = embedded
    new = rest.function(old.with_(bindings=[b for b in old.bindings if b is not readers[0]]))
    reads = {var for b in new.bindings for var in used_vars(b.value)}
    params = [embedded if p is given else p for p in old.params if p is not table or p in reads]
    first = old.with_(
        name=embedding,
        params=(given, table),
        bindings=(readers[0],),
        result=readers[0].var,
        attrs={},
    )
    return ir.with_functions(
        each
        for f in ir.functions
        for each in ((first, new.with_(params=tuple(params))) if f is old else (f,))
    )
