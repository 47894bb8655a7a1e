# SPDX-License-Identifier: Apache-2.0
"""Texts of valid modules, changed by their grammar: whatever comes of it is an error of ours or runs, within seconds and 1 GB.

Each case is parsed, compiled, given weights of the types that it declares, and called. Words are exchanged for others that may stand there,
so that much of it gets beyond the parser; functions claim to be regions that kernels compute.
"""

from __future__ import annotations

import contextlib
import io
import random
import re
import warnings
from collections import Counter
from math import prod
from typing import Any

import pytest
import torch
from hostile import NUMBERS, STRINGS, limits

import nnfront as nn
from nnfront import op, spec
from nnfront.dims import Dim, evaluate
from nnfront.errors import NnfrontError
from nnfront.ir import KINDS, OPS, parse
from nnfront.ir.literals import quote
from nnfront.lower import ScalarType, TensorType

HEADS = "float32[batch, seq, 2, 4]"
REGIONS = [
    "product",
    "gated_product",
    "qkv_attention",
    "norm_residual",
    "experts",
    "sampling",
    "embedding",
    "linear",
]


class Block(nn.Module):
    def __init__(self) -> None:
        self.norm = nn.RMSNorm(8, -1, bias=False)
        self.up = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(6, 8)

    def forward(self, x: Any) -> Any:
        gate, up = op.split(self.up(self.norm(x)), 2, axis=-1)
        return x + self.down(op.silu(gate) * up)


class Model(nn.Module):
    """Shared layers, a branch, a special case, tables, an index and sizes that are computed."""

    def __init__(self) -> None:
        self.embed = nn.Embedding("vocab", 8)
        self.layers = [Block(), Block()]
        self.head = op.permute_dims(self.embed.weight)

    def forward(self, ids: Any, flag: Any) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        x = op.cond(flag, lambda: x * 2.0, lambda: op.tanh(x))
        op.print_(flag, format="{0}")
        return {"logits": op.matmul(x, self.head), "last": x[:, -1], "flat": op.reshape(x, (-1, 4))}


def bases() -> dict[str, str]:
    ids = spec.Tensor([nn.Dim("batch", min=1), nn.Dim("seq", min=1, max=64)], "int64")
    plain = Model().export({"forward": {"ids": ids, "flag": spec.Tensor([], "bool")}})
    lifted = nn.passes.lift_transform_params(plain, shared_transform=True)
    cases = nn.passes.special_cases(
        lifted, "forward", [{"batch": 1}, {"seq": (2, 8), "batch": nn.multiple_of(2)}]
    )
    attention = f"""
        def main[batch, seq, max_seq](q: input {HEADS}, k: input {HEADS}, v: input {HEADS}, cos: input float32[seq, 2], n: input int64(max_seq)) -> {HEADS} {{
            a: {HEADS} = rope(q, cos, cos)
            b: {HEADS} = rope(k, cos, cos)
            y: {HEADS} = attention(a, b, v, window=3, scale=0.5)
            c: bool = within(dim(seq), dim(batch), ranges=((1, 4, None), (2, None, 2)))
            z: {HEADS} = if c {{ e: {HEADS} = multiply(y, 2.0) yield e }} else {{ m: {HEADS} = match_shape(y, {HEADS}) yield m }}
            t: float32[max_seq, seq] = zeros(shape=(max_seq, seq))
            u: () = print_(n, format="{{0:>4}} of {{}}")
            return z
        }}
    """
    attention = attention.replace(" of {}", "")
    return {
        "plain": str(plain),
        "lifted": lifted.text(provenance=True),
        "cases": str(cases),
        "outlined": str(nn.passes.outline(cases)),
        "attention": str(parse(attention)),
    }


BASES = bases()
WORD = re.compile(r'"(?:[^"\\]|\\.)*"|[A-Za-z_][\w.]*|\d+\.\d+|\d+|\s+|->|\.\.|//|.')
TYPE = re.compile(r"\b(?:bool|int64|float32|bfloat16|int8)\[[^\]\n]*\]")
TYPES = [
    *(
        "float32[]",
        "float32[1]",
        "float32[1, 1]",
        "float32[n]",
        "float32[65536, 32]",
        "int64[batch, seq]",
        "int8[8, 8]",
    ),
    *(
        "float32[9223372036854775807]",
        "float32[batch*batch*seq, 8]",
        "float32[seq // 0]",
        "float32[seq // 3]",
        "bool[]",
        "int64(seq)",
    ),
    *(
        "()",
        "(float32[1], float32[1])",
        'object("x")',
        "fn(float32[1]) -> float32[1]",
        "shape[seq, 3]",
        "float8_e5m2[4]",
        "int64",
    ),
    "layer(kv_heads=2, head_size=4, dtype=float32, batch=batch, max_seq=seq)",
]


def attrs(rng: random.Random) -> str:
    """Attributes of a function, as passes read and make them."""
    operands = ", ".join(
        quote(name)
        for name in rng.sample(["x", "weight", "bias", "scale", "residual", "qkv", "cos", "cache"], 4)
    )
    pairs = {
        "region": quote(rng.choice(REGIONS)),
        "kind": rng.choice(['"linear"', '"matmul"', "3"]),
        "operands": rng.choice([f"({operands},)", "()", '"x"', "(1, 2)"]),
        "activation": rng.choice(['"silu"', "None", '"x"']),
        "axis": rng.choice(["1", "-1", '"a"']),
        "transform": rng.choice(['"transform_params"', "3"]),
        "derived": rng.choice(["(1,)", '("a",)', "3"]),
        "special_cases": rng.choice(
            ["({batch: 1},)", "({x: (1, nan)},)", "({batch: (8, 2)},)", '({seq: "a"},)', "3"]
        ),
        "cases": rng.choice(["{a: {batch: 1}}", "{a: 3}", '{a: {batch: "b"}}']),
    }
    return ", ".join(
        f"{name}={value}" for name, value in rng.sample(sorted(pairs.items()), rng.randrange(1, 5))
    )


def changed(rng: random.Random, text: str) -> str:
    """The text with one change."""
    words = WORD.findall(text)
    numbers = [i for i, word in enumerate(words) if word[0].isdigit()]
    names = [i for i, word in enumerate(words) if word[0].isalpha()]
    strings = [i for i, word in enumerate(words) if word[0] == '"']
    types = list(TYPE.finditer(text))
    match rng.randrange(11):
        case 0:
            words[rng.choice(numbers)] = (
                str(rng.choice(NUMBERS)) if rng.random() < 0.5 else str(rng.randrange(20))
            )
        case 1:
            words[rng.choice(names)] = words[rng.choice(names)]
        case 2 if strings:
            words[rng.choice(strings)] = quote(rng.choice(STRINGS)[:20_000])
        case 3:
            calls = [i for i in names if words[i] in OPS]
            words[rng.choice(calls)] = rng.choice(sorted(OPS))
        case 4:
            where = rng.choice(types)
            new = rng.choice([*TYPES, *(each[0] for each in types)])
            return f"{text[: where.start()]}{new}{text[where.end() :]}"
        case 5:  # everywhere: what a value is said to be in one place fits the others
            return text.replace(rng.choice(types)[0], rng.choice([*TYPES, *(each[0] for each in types)]))
        case 6:
            heads = list(re.finditer(r"^(?:\w+ )?def ", text, re.MULTILINE))
            where = rng.choice(heads)
            return f"{text[: where.start()]}{rng.choice(KINDS)} def {text[where.end() :]}".replace(
                "public def", "def"
            )
        case 7:
            ends = list(re.finditer(r"( attrs\((?:[^()]|\([^()]*\))*\))? \{\n", text))
            where = rng.choice(ends)
            return f"{text[: where.start()]} attrs({attrs(rng)}) {{\n{text[where.end() :]}"
        case 8:
            lines = text.split("\n")
            first, second = rng.randrange(len(lines)), rng.randrange(len(lines))
            lines[first], lines[second] = lines[second], rng.choice([lines[first], ""])
            return "\n".join(lines)
        case 9:  # facts of a dim
            facts = rng.choice(["8..8", "..3", "4.. % 2", "% 64", "0..0", "9223372036854775807..", "1..1"])
            return re.sub(r"\b(batch|seq|max_seq)(: [\d.% ]+)?(?=[,\]]\w*)", rf"\1: {facts}", text, count=1)
        case _:
            closing = [i for i, word in enumerate(words) if word == ")" and i > 2]
            value = rng.choice(
                [*map(str, NUMBERS), "type(float32[3])", "((1, 2), None)", "{a: 1}", "dim(seq)"]
            )
            words[rng.choice(closing)] = (
                f", {rng.choice(['axis', 'shape', 'ranges', 'format', 'dtype', 'scale'])}={value})"
            )
    return "".join(words)


def value_of(rng: random.Random, type: Any, sizes: dict[str, int]) -> Any:
    if isinstance(type, ScalarType):
        number = rng.randrange(4) if type.value is None else evaluate(type.value, sizes)
        return {"bool": bool, "int64": int, "float64": float}[type.dtype](number)
    assert isinstance(type, TensorType)
    shape = [evaluate(size, sizes) if isinstance(size, Dim) else size for size in type.shape]
    if prod(shape) > 100_000:
        raise NnfrontError("larger than what is tried")
    return torch.randint(0, 2, shape).to(getattr(torch, type.dtype))


def use(rng: random.Random, text: str) -> str:
    """Do all with a text that can be done with one; say how far it came."""
    stage = "parsed"
    try:
        ir = parse(text)
        stage = "compiled"
        if rng.random() < 0.2:
            nn.compile(ir, "cuda:sm_90")
        executable = nn.compile(ir)
        stage = "loaded"
        sizes = {name: rng.choice([2, 3, 8]) for name in ("batch", "seq", "vocab", "max_seq", "n")}
        wanted = {
            p.name: p.type
            for f in ir.values()
            if f.kind in ("public", "transform")
            for p in f.weights
            if p.role == "weight"
        }
        session = executable.load({name: value_of(rng, type, sizes) for name, type in wanted.items()})
        stage = "called"
        for name in session:
            arguments = session.program.methods[name].arguments
            session[name](
                *(
                    value_of(rng, a.type, sizes)
                    for a in arguments
                    if isinstance(a.type, TensorType | ScalarType)
                )
            )
        stage = "ran"
    except NnfrontError:
        pass
    return stage


def fuzz(base: str, count: int, first: int = 0) -> Counter[str]:
    found: Counter[str] = Counter()
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for case in range(first, first + count):
            rng = random.Random(f"{base} {case}")
            text = BASES[base]
            for _ in range(rng.choice([1, 1, 2, 4])):
                with contextlib.suppress(
                    IndexError
                ):  # there is nothing left of the kind that is to be changed
                    text = changed(rng, text)
            try:
                with limits():
                    found[use(rng, text)] += 1
            except BaseException as error:
                error.add_note(f"case {case} of {base}:\n{text[:20_000]}")
                raise
    return found


@pytest.mark.parametrize("base", BASES)
def test_a_valid_text_runs(base: str) -> None:
    assert use(random.Random(0), BASES[base]) == "ran"


@pytest.mark.parametrize("base", BASES)
def test_a_changed_text_is_refused_or_runs(base: str) -> None:
    found = fuzz(base, 80)
    assert found["ran"] > 0
    assert found["compiled"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_a_changed_text_is_refused_or_runs_many_times(base: str) -> None:
    fuzz(base, 20_000, first=80)
