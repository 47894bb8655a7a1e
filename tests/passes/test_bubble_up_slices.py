# SPDX-License-Identifier: Apache-2.0
"""Slices that move to operands: what is computed in part, what stays whole, and that results stay the same."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from nnfront_models import llama
from pass_checks import expect_same_results, module
from rewrite_checks import check, main

import nnfront as nn
from nnfront import op, ops, spec
from nnfront.ir import Call, first_difference, parse, tensor_type, verify
from nnfront.llm.model_files import find_architecture, known_architectures
from nnfront.passes import bubble_up_slices, lift_transform_params

W = "w: weight float32[4, 4]"
X = f"x: input float32[b, n, 4], {W}"
DIMS = "[b, n: 1..]"


def sliced(before: str, index: str, result: str = "float32[b, 1, 4]") -> str:
    return main(
        f"""{before}
        s: {result} = getitem(h, index={index})
        return s""",
        X,
        result,
        DIMS,
    )


PRODUCT = "h: float32[b, n, 4] = linear(x, w)"


@pytest.mark.parametrize(
    "index", ['(":", (n - 1, n, 1))', '(":", (0, 1, 1))', '(":", (0, n, 2))'], ids=["last", "first", "second"]
)
def test_a_product_is_computed_of_the_rows_that_are_read(index):
    result = "float32[b, ceildiv(n, 2), 4]" if "2" in index else "float32[b, 1, 4]"
    body = f"getitem: {result} = getitem(x, index={index})\nh: {result} = linear(getitem, w)\nreturn h"
    check(bubble_up_slices, sliced(PRODUCT, index, result), main(body, X, result, DIMS))


def test_a_position_is_read_of_the_row_that_is_computed():
    check(
        bubble_up_slices,
        sliced(PRODUCT, '(":", n - 1)', "float32[b, 4]"),
        main(
            """getitem: float32[b, 1, 4] = getitem(x, index=(":", (n - 1, n, 1)))
            h: float32[b, 1, 4] = linear(getitem, w)
            s: float32[b, 4] = getitem(h, index=(":", 0))
            return s""",
            X,
            "float32[b, 4]",
            DIMS,
        ),
    )


def test_two_readers_of_one_part_share_it():
    x, dims = f"x: input float32[1, n, 4], {W}", "[n: 1..]"
    before = """h: float32[1, n, 4] = linear(x, w)
        s: float32[1, 1, 4] = getitem(h, index=(":", (0, 1, 1)))
        t: float32[1, 4] = getitem(h, index=(":", 0))
        u: float32[1, 1, 4] = add(s, t)
        return u"""
    after = """getitem: float32[1, 1, 4] = getitem(x, index=(":", (0, 1, 1)))
        h: float32[1, 1, 4] = linear(getitem, w)
        t: float32[1, 4] = getitem(h, index=(":", 0))
        u: float32[1, 1, 4] = add(h, t)
        return u"""
    check(bubble_up_slices, *[main(body, x, "float32[1, 1, 4]", dims) for body in (before, after)])


def test_what_is_read_whole_beside_a_part_may_itself_be_a_part_of_something_else():
    entry = '(":", (n - 1, n, 1))'
    before = f"""h: float32[b, n, 4] = linear(x, w)
        s: float32[b, 1, 4] = getitem(h, index={entry})
        k: float32[b, n, 4] = matmul(x, w)
        u: float32[b, n, 4] = add(k, s)
        t: float32[b, 1, 4] = getitem(u, index={entry})
        return t"""
    after = f"""getitem: float32[b, 1, 4] = getitem(x, index={entry})
        h: float32[b, 1, 4] = linear(getitem, w)
        k: float32[b, 1, 4] = matmul(getitem, w)
        u: float32[b, 1, 4] = add(k, h)
        return u"""
    check(bubble_up_slices, *[main(body, X, "float32[b, 1, 4]", DIMS) for body in (before, after)])


@pytest.mark.parametrize(
    "before",
    [
        # another row is read
        f"{PRODUCT}\n a: float32[b, 1, 4] = getitem(h, index=(\":\", (0, 1, 1)))\n p: () = print_(a)",
        # all is read
        f"{PRODUCT}\n p: () = print_(h)",
        # rows are mixed
        "y: float32[b, n, 4] = linear(x, w)\n h: float32[b, n, 4] = cumsum(y, axis=1)",
        "y: float32[b, n, 4] = linear(x, w)\n h: float32[b, n, 4] = softmax(y, axis=1)",
        "y: float32[b, n, 4] = linear(x, w)\n z: float32[n, b, 4] = reshape(y, shape=(n, b, 4))\n"
        " h: float32[b, n, 4] = reshape(z, shape=(b, n, 4))",
        # there is no product
        "y: float32[b, n, 4] = exp(x)\n h: float32[b, n, 4] = add(y, x)",
    ],
)  # fmt: skip
def test_what_is_read_otherwise_is_left_alone(before):
    check(bubble_up_slices, sliced(before, '(":", (n - 1, n, 1))'))


def test_a_row_that_may_not_be_there_is_read_of_what_is_computed_whole():
    check(
        bubble_up_slices,
        main(
            f'{PRODUCT}\n s: float32[b, 4] = getitem(h, index=(":", 5))\n return s', X, "float32[b, 4]", DIMS
        ),
    )


class Block(nn.Module):
    def __init__(self) -> None:
        self.mix, self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 24), nn.Linear(12, 8)
        self.norm = nn.RMSNorm(8, -1, 1e-6, False)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        x = x + op.cumsum(self.mix(x), axis=1)
        gate, up = op.split(self.up(self.norm(x)), 2, axis=-1)
        return x + self.down(op.silu(gate) * up)


class Blocks(nn.Module):
    def __init__(self) -> None:
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def last(self, x: nn.Tensor) -> nn.Tensor:
        return self.blocks(x)[:, -1:]

    def all(self, x: nn.Tensor) -> nn.Tensor:
        return self.blocks(x)


def test_the_last_of_equal_blocks_computes_one_row_and_the_others_stay_one_function():
    x = {"x": spec.Tensor(["batch", nn.Dim("seq", min=1), 8], "float32")}
    ir = lift_transform_params(Blocks().export({"last": x, "all": x}), shared_transform=True)
    new = bubble_up_slices(ir)
    expect_same_results(ir, new)
    assert first_difference(parse(str(new)), new) is None
    assert bubble_up_slices(new) is new
    assert new["all"] is ir["all"]
    last = str(new["last"])
    assert last.count("@Block(") == 2
    assert last.count("float32[batch, 1, 8] = linear(") == 1  # down
    assert last.count("float32[batch, 1, 24] = linear(") == 1
    assert last.count("float32[batch, seq, 8] = linear(") == 1  # of what the rows are summed


def test_a_prompt_computes_one_token_behind_the_last_attention():
    config = dataclasses.replace(llama.TINY, num_hidden_layers=3)
    ir = llama.build(config).export(llama.export_spec(config))
    new = bubble_up_slices(ir)
    prefill = str(new["prefill"])
    assert prefill.count("@LlamaDecoderLayer") == config.num_hidden_layers - 1
    # Of all tokens queries, keys and values; of one the others and the head.
    assert prefill.count(" = linear(") == 5
    assert prefill.count("[batch, seq, 64] = linear(") == 0
    for name in ("logits", "decode"):
        assert new[name] is ir[name]


ROWS = [
    "linear({x}, w)",
    "matmul({x}, w)",
    "rms_norm({x}, None, axes=({last},))",
    "softmax({x}, axis={last})",
    "silu({x})",
]
PARTS = [("(n - 1, n, 1)", "1"), ("(0, 1, 1)", "1"), ("(0, n, 2)", "ceildiv(n, 2)"), ("(1, n, 1)", "n - 1")]


@given(data=st.data())
def test_parts_of_random_chains_are_what_they_were(data: st.DataObject) -> None:
    """What works on rows, some of it on those of all sequences one after the other, sums with what is before, and what mixes rows."""
    lines, x = [], "x"
    for i in range(data.draw(st.integers(1, 8))):
        other = data.draw(st.sampled_from(["x", *(f"v{k}" for k in range(i))]))
        kind = data.draw(st.sampled_from(["rows", "rows", "flat", "with", "mixed"]))
        of_rows = data.draw(st.sampled_from(ROWS))
        if kind == "flat":
            lines += [
                f"f{i}: float32[b * n, 4] = reshape({x}, shape=(b * n, 4))",
                f"g{i}: float32[b * n, 4] = {of_rows.format(x=f'f{i}', last=1)}",
            ]
        value = {
            "rows": of_rows.format(x=x, last=2),
            "flat": f"reshape(g{i}, shape=(b, n, 4))",
            "with": f"add({x}, {other})",
            "mixed": f"cumsum({x}, axis=1)",
        }[kind]
        x = f"v{i}"
        lines.append(f"{x}: float32[b, n, 4] = {value}")
    entry, size = data.draw(st.sampled_from(PARTS))
    lines += [f'part: float32[b, {size}, 4] = getitem({x}, index=(":", {entry}))', "return part"]
    ir = module(main("\n".join(lines), X, f"float32[b, {size}, 4]", DIMS))
    new = bubble_up_slices(ir)
    expect_same_results(ir, new)
    assert first_difference(bubble_up_slices(new), new) is None


def test_rows_of_all_sequences_one_after_the_other_are_computed_of_the_tokens_that_are_read():
    check(
        bubble_up_slices,
        sliced(
            """f: float32[b * n, 4] = reshape(x, shape=(b * n, 4))
            y: float32[b * n, 4] = linear(f, w)
            z: float32[b * n, 4] = cumsum(y, axis=1)
            u: float32[b * n, 4] = linear(z, w)
            h: float32[b, n, 4] = reshape(u, shape=(b, n, 4))""",
            '(":", (0, 1, 1))',
        ),
        main(
            """f: float32[b * n, 4] = reshape(x, shape=(b * n, 4))
            y: float32[b * n, 4] = linear(f, w)
            z: float32[b * n, 4] = cumsum(y, axis=1)
            reshape: float32[b, n, 4] = reshape(z, shape=(b, n, 4))
            getitem: float32[b, 1, 4] = getitem(reshape, index=(":", (0, 1, 1)))
            reshape_1: float32[b, 4] = reshape(getitem, shape=(b, 4))
            u: float32[b, 4] = linear(reshape_1, w)
            h: float32[b, 1, 4] = reshape(u, shape=(b, 1, 4))
            return h""",
            X,
            "float32[b, 1, 4]",
            DIMS,
        ),
    )


WRITERS = [
    name
    for name in known_architectures()
    if "prefill" in (file := find_architecture(name).file).export_spec(file.TINY)
]


@pytest.mark.parametrize("name", WRITERS)
def test_a_prompt_of_every_model_computes_one_token_behind_what_mixes_them_last(name):
    architecture = find_architecture(name)
    ir = architecture.export(architecture.file.TINY)
    new = bubble_up_slices(ir)
    verify(new)
    products = [
        [
            b
            for b in f.bindings
            if isinstance(b.value, Call) and b.value.op in (ops.linear, ops.matmul, ops.moe_mlp)
        ]
        for f in (ir["prefill"], new["prefill"])
    ]
    assert len(products[1]) > len(products[0]), "the last layer is inlined"
    assert all("seq" not in str(tensor_type(b.var).shape) for b in products[1][-2:])


def test_what_a_session_gives_is_what_a_session_gives_without_the_pass(monkeypatch):
    config = dataclasses.replace(llama.TINY, num_hidden_layers=3)
    model = llama.build(config)
    ir = lift_transform_params(model.export(llama.export_spec(config)), shared_transform=True)
    weights = {name: torch.randn([int(s) for s in p.shape]) for name, p in model.named_parameters()}
    found = []
    for pipeline in (
        nn.passes.PIPELINES["cpu"],
        [p for p in nn.passes.PIPELINES["cpu"] if p is not bubble_up_slices],
    ):
        monkeypatch.setitem(nn.passes.PIPELINES, "cpu", tuple(pipeline))
        session = nn.compile(ir).load(weights)
        cache = session.make_cache(batch=2, max_seq=12)
        tokens = torch.arange(14).view(2, 7)
        found.append([session["prefill"](tokens, cache), session["prefill"](tokens[:, :3], cache)])
    torch.testing.assert_close(*found)
