# SPDX-License-Identifier: Apache-2.0
"""Every kernel of the CPU against the reference of its op, on odd, tiny and strided operands."""

import itertools

import pytest
import torch
from few_of import few_of
from nnfront_models import llama

import nnfront as nn
from nnfront import op, ops
from nnfront.backends.cpu import in_c
from nnfront.backends.cpu import linear as cpu
from nnfront.backends.lowering import lower
from nnfront.backends.table import resolver
from nnfront.lower import Run, Structure, kv_layer
from nnfront.passes import outline
from nnfront.state.ring import make_layer

resolve = resolver("cpu")


def both(kernel: str, op, operands, **attrs):
    """The kernel's result and the reference's."""
    run = Run(kernel, op.name, (), Structure(), attrs)
    return resolve(run)(*operands), op.run(operands, attrs)


def assert_same(got: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor | None = None) -> None:
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    if exact is None:
        torch.testing.assert_close(got, expected)
    else:
        # As near to the float64 result as rounding the result once or twice allows, or a sum in float32.
        eps = torch.finfo(got.dtype).eps * (20 if got.dtype == torch.float32 else 2)
        scale = max([1.0, *exact.abs().reshape(-1).tolist()])
        torch.testing.assert_close(got.double(), exact, rtol=eps, atol=eps * scale)


ROWS = [(), (1,), (1, 1), (0,), (2,), (3, 5), (1, 17)]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("columns", few_of([257, 1, 31, 64]))
@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [("linear_bfloat16", torch.bfloat16), ("linear_float32", torch.float32), ("linear_plain", torch.float16)],
)
def test_linear_kernels_agree_with_float64(kernel, dtype, shape, columns, bias):
    x, w = torch.randn(*shape, columns).to(dtype), torch.randn(33, columns).to(dtype)
    b = torch.randn(33).to(dtype) if bias else None
    got, expected = both(kernel, ops.linear, (x, w, b))
    exact = x.double() @ w.double().T + (0 if b is None else b.double())
    assert_same(got, expected, exact)


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_linear_wide_is_the_reference_in_pieces(dtype, shape, bias, monkeypatch):
    monkeypatch.setattr(cpu, "PIECE", 40)
    x, w = torch.randn(*shape, 9).to(dtype), torch.randn(33, 9).to(dtype)
    operands = (x, w, torch.randn(33) if bias else None)
    got, expected = both("linear_wide", ops.linear, operands, out_dtype="float32")
    assert_same(got, expected)


@pytest.mark.parametrize("kernel", ["linear_bfloat16", "linear_float32"])
def test_linear_kernels_take_strided_operands(kernel):
    dtype = torch.bfloat16 if kernel == "linear_bfloat16" else torch.float32
    w = torch.randn(40, 12).to(dtype)
    x = torch.randn(3, 40).to(dtype)
    for weight, row in itertools.product(
        [w.T, w.T.contiguous(), w.T[::2]], [x[1:2], x.T.contiguous().T[:1], x]
    ):
        got, expected = both(kernel, ops.linear, (row, weight, None))
        assert_same(got, expected, row.double() @ weight.double().T)


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_linear_without_rows_or_columns(rows):
    for kernel, dtype in (("linear_bfloat16", torch.bfloat16), ("linear_float32", torch.float32)):
        got, expected = both(
            kernel, ops.linear, (torch.ones(1, 8, dtype=dtype), torch.ones(rows, 8, dtype=dtype), None)
        )
        assert_same(got, expected)
        got, expected = both(
            kernel, ops.linear, (torch.ones(rows, 0, dtype=dtype), torch.ones(3, 0, dtype=dtype), None)
        )
        assert_same(got, expected)


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (2, 8), (3, 33), (100, 511), (513, 64)])
def test_one_row_of_bfloat16_writes_every_element(rows, columns, monkeypatch):
    empty = torch.empty

    def filled(*shape, **options):
        made = empty(*shape, **options)
        return made.fill_(torch.nan if made.is_floating_point() else 255)

    monkeypatch.setattr(torch, "empty", filled)
    # As in a file that is mapped, neither starts at a multiple of more than its element.
    w = torch.randn(rows * columns + 1).bfloat16()[1:].view(rows, columns)
    x = torch.randn(columns + 1).bfloat16()[1:].view(1, columns)
    got, _ = both("linear_bfloat16", ops.linear, (x, w, None))
    assert_same(got, got, x.double() @ w.double().T)


def test_without_a_kernel_for_few_rows_linear_goes_to_onednn(monkeypatch):
    monkeypatch.setattr(in_c, "NATIVE", None)
    x, w = torch.randn(1, 16).bfloat16(), torch.randn(8, 16).bfloat16()
    got, expected = both("linear_bfloat16", ops.linear, (x, w, None))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("by", ["C", "torch"])
@pytest.mark.parametrize("weight", [True, False], ids=["weight", "no weight"])
@pytest.mark.parametrize("shape", [(7,), (1, 1), (1, 1, 257), (2, 3, 65), (0, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rms_norm_last_agrees_with_float64(dtype, shape, weight, by, monkeypatch):
    if by == "torch":
        monkeypatch.setattr(in_c, "NATIVE", None)
    x = (10 * torch.randn(shape)).to(dtype)
    w = torch.randn(shape[-1]).to(dtype) if weight else None
    got, expected = both("rms_norm_last", ops.rms_norm, (x, w, None), axes=(len(shape) - 1,), epsilon=1e-6)
    exact = torch.rms_norm(x.double(), x.shape[-1:], None if w is None else w.double(), 1e-6)
    assert_same(got, expected, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("rows", [1, 2])
def test_rms_norm_last_of_what_has_no_norm_is_what_the_reference_gives(rows, value, dtype):
    x, ones = torch.full((rows, 4), value, dtype=dtype), torch.ones(4, dtype=dtype)
    got, expected = both("rms_norm_last", ops.rms_norm, (x, ones, None), axes=(1,), epsilon=0.0)
    torch.testing.assert_close(got, expected, equal_nan=True)


@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "neighbours"])
@pytest.mark.parametrize("pairs", [1, 3, 5])
@pytest.mark.parametrize("tables", [(4, 0), (1, 4), (2, 4)], ids=["seq", "1, seq", "batch, seq"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rope_by_tables_is_rope(dtype, tables, pairs, interleaved):
    angles = torch.randn([n for n in tables if n] + [pairs])
    wide = "float64" if dtype == torch.float64 else "float32"
    attrs = {"interleaved": interleaved}
    make = resolve(Run("rope_tables", "rope", (), Structure(), {"dtype": wide, **attrs}))
    rotate = resolve(Run("rope_rotated", "rope", (), Structure(), attrs))
    x = torch.randn(2, 4, 3, 10).to(dtype)
    for part in (x, torch.randn(2, 4, 6, 10).to(dtype)[:, :, ::2]):
        kept = part.clone()
        got = rotate(part, *make(angles.cos(), angles.sin()))
        expected = ops.rope.run((part, angles.cos(), angles.sin()), attrs)
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected)
        assert torch.equal(part, kept)


HEADS = [(4, 4), (4, 2), (6, 1)]


def heads(batch, seq, keys, h, g, size=8, dtype=torch.float32):
    return [torch.randn(batch, n, m, size).to(dtype) for n, m in ((seq, h), (keys, g), (keys, g))]


@pytest.mark.parametrize(("h", "g"), HEADS)
@pytest.mark.parametrize(("batch", "seq"), [(1, 1), (2, 5), (3, 33), (0, 4), (2, 0)])
@pytest.mark.parametrize(
    "attrs", few_of([{}, {"window": 1}, {"window": 4}, {"window": 99}, {"scale": 0.5}], 3), ids=str
)
def test_attention_fused_is_attention(batch, seq, h, g, attrs):
    got, expected = both(
        "attention_fused", ops.attention, (*heads(batch, seq, seq, h, g), None, None), **attrs
    )
    assert_same(got, expected)


@pytest.mark.parametrize("seq", [9, 63, 64, 65, 130])
@pytest.mark.parametrize(("h", "g"), HEADS)
def test_attention_in_blocks_is_attention(h, g, seq):
    got, expected = both("attention_fused", ops.attention, (*heads(2, seq, seq, h, g), None, None))
    assert_same(got, expected)


@pytest.mark.parametrize("window", [None, 200], ids=["no window", "a window that is not reached"])
@pytest.mark.parametrize(("before", "seq"), [(0, 130), (1, 64), (70, 65), (63, 9)])
@pytest.mark.parametrize(("h", "g"), HEADS)
def test_a_chunk_after_stored_tokens_attends_in_blocks_to_all_of_them(h, g, before, seq, window):
    stored = before + seq
    q, k, v = heads(2, stored, stored, h, g)
    layer = make_layer(kv_layer(g, 8, "float32", 2, stored, window))
    layer.append(k[:, :before], v[:, :before])
    attend = resolve(
        Run("attention_cached", "attention", (), Structure(fields=(Structure(0), Structure(1))), {})
    )
    got, _ = attend(q[:, before:], k[:, before:], v[:, before:], layer, None)
    expected = ops.attention.run((q, k, v, None, None), {})[:, before:]
    assert_same(got, expected)


@pytest.mark.parametrize(("seq", "keys"), [(3, 7), (7, 3), (1, 1)])
def test_attention_that_is_not_causal_may_have_other_keys(seq, keys):
    operands = (*heads(2, seq, keys, 4, 2), None, None)
    got, expected = both("attention_fused", ops.attention, operands, is_causal=False)
    assert_same(got, expected)


@pytest.mark.parametrize("kind", [None, "bool", "float", "row", "hidden"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("seq", "keys"), few_of([(3, 6), (1, 1), (4, 4), (6, 3)]))
@pytest.mark.parametrize(("h", "g"), HEADS)
def test_sdpa_fused_is_scaled_dot_product_attention(h, g, seq, keys, is_causal, kind):
    mask = {
        None: None,
        "bool": torch.rand(2, 1, seq, keys) > 0.3,
        "float": torch.randn(seq, keys),
        "row": torch.randn(keys),
        "hidden": torch.zeros(1, h, seq, keys, dtype=torch.bool),
    }[kind]
    attrs = {"is_causal": True} if is_causal else {}
    operands = (*heads(2, seq, keys, h, g), mask)
    got, expected = both("sdpa_fused", ops.scaled_dot_product_attention, operands, **attrs)
    assert_same(got, expected)


def test_values_may_have_another_size_than_keys():
    q, k, v = heads(2, 5, 5, 4, 2)
    v = torch.randn(2, 5, 2, 3)
    got, expected = both("attention_fused", ops.attention, (q, k, v, None, None))
    assert_same(got, expected)
    assert got.shape == (2, 5, 4, 3)


def run_of(name: str, ir) -> Run:
    """The instruction that a module's first method gets for a region."""
    program = lower(outline(ir))
    (run,) = [
        i for m in program.methods.values() for i in m.body.walk() if isinstance(i, Run) and i.op == name
    ]
    assert run.body is not None
    return run


class Gated(nn.Module):
    def __init__(self, bias: bool, act) -> None:
        self.proj = nn.Linear(10, 14, bias=bias)
        self.act = act

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        gate, up = op.split(self.proj(x), 2, -1)
        return self.act(gate) * up


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "act", [op.silu, op.relu, op.gelu, lambda x: op.gelu(x, "tanh")], ids=["silu", "relu", "gelu", "tanh"]
)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("lies", ["row by row", "column by column"])
def test_a_gated_product_agrees_with_float64(lies, rows, bias, act, dtype):
    name = str(dtype).removeprefix("torch.")
    model = Gated(bias, act).to(name)
    run = run_of("gated_product", model.export({"forward": {"x": nn.spec.Tensor(["n", 10], name)}}))
    assert run.kernel == "gated_product"
    x, w, b = (
        torch.randn(rows, 10).to(dtype),
        torch.randn(14, 10).to(dtype),
        torch.randn(14).to(dtype) if bias else None,
    )
    if lies == "column by column":
        w = w.T.contiguous().T
    kept = x.clone()
    got = resolve(run)(x, w, b)
    gate, up = torch.nn.functional.linear(x.double(), w.double(), None if b is None else b.double()).split(
        7, -1
    )
    kind = {"silu": torch.nn.functional.silu, "relu": torch.relu, "gelu": torch.nn.functional.gelu}[
        run.attrs["activation"]
    ]
    exact = (kind(gate, approximate="tanh") if run.attrs.get("approximate") == "tanh" else kind(gate)) * up
    assert got.dtype == dtype
    eps = torch.finfo(dtype).eps
    # Gate, up and their product are each rounded once, after sums of 10 products.
    torch.testing.assert_close(
        got.double(), exact, rtol=8 * eps, atol=30 * eps * max([1.0, *exact.abs().flatten().tolist()])
    )
    assert torch.equal(x, kept)


@pytest.mark.parametrize("with_cache", [True, False], ids=["cache", "no cache"])
@pytest.mark.parametrize(("h", "g"), HEADS)
@pytest.mark.parametrize("seq", [1, 5, 70])
def test_attention_of_a_fused_projection_is_that_of_its_parts(seq, h, g, with_cache):
    size, batch = 6, 2
    qkv = torch.randn(batch, seq, (h + 2 * g) * size)
    angles = torch.randn(1, seq, size // 2)
    cos, sin = angles.cos(), angles.sin()
    tables = resolve(Run("rope_tables", "rope", (), Structure(), {"dtype": "float32"}))(cos, sin)
    fused = resolve(
        Run(
            "qkv_attention",
            "qkv_attention",
            (),
            Structure(fields=(Structure(0), Structure(1))),
            {"heads": h, "groups": g, "scale": 0.3},
        )
    )
    layer = make_layer(kv_layer(g, size, "float32", batch, seq)) if with_cache else None
    got = fused(qkv, *tables, layer, None)
    q, k, v = (part.unflatten(-1, (-1, size)) for part in qkv.split([h * size, g * size, g * size], -1))
    q, k = (ops.rope.run((x, cos, sin), {}) for x in (q, k))
    expected = ops.attention.run((q, k, v, None, None), {"scale": 0.3})
    assert_same(got[0] if with_cache else got, expected)
    if layer is not None:
        torch.testing.assert_close(layer.stored(0), k.transpose(1, 2))
        assert torch.equal(layer.stored(1), v.transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 8, 9])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_products_with_int8_weights_agree_with_float64(rows, bias, dtype):
    x, q = torch.randn(rows, 32).to(dtype), torch.randint(-127, 128, (14, 32), dtype=torch.int8)
    scales, b, residual = (
        (torch.rand(14, 1) / 32).to(dtype),
        torch.randn(14).to(dtype) if bias else None,
        torch.randn(rows, 14).to(dtype),
    )
    run = Run(
        "int8_product",
        "quantized_product",
        (),
        Structure(),
        {"format": "int8", "activation": "silu", "scale": 0.5, "dtype": "float32"},
    )
    got = resolve(run)(x, q, scales, None, b, None, residual)
    product = x.double() @ (q.double() * scales.double()).T + (0 if b is None else b.double())
    exact = torch.nn.functional.silu(product) * 0.5 + residual.double()
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(
        got.double(), exact, rtol=8 * eps, atol=16 * eps * max([1.0, *product.abs().flatten().tolist()])
    )
    assert got.dtype == torch.float32
    gated = resolve(
        Run(
            "int8_gated_product",
            "quantized_gated_product",
            (),
            Structure(),
            {"activation": "relu", "format": "int8"},
        )
    )
    gate, up = product.split(7, -1)
    torch.testing.assert_close(
        gated(x, q, scales, None, b).double(),
        gate.relu() * up,
        rtol=8 * eps,
        atol=16 * eps * max([1.0, *(gate * up).abs().flatten().tolist()]),
    )


def test_a_language_model_in_int8_runs_on_int8_kernels_on_a_cpu():
    model = llama.build(llama.TINY)
    ir = nn.passes.quantize_weights(model.export(llama.export_spec(llama.TINY)), "int8")
    executable = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True))
    runs = [i for m in executable.program.methods.values() for i in m.body.walk() if isinstance(i, Run)]
    assert {"int8_product", "int8_gated_product"} <= {run.kernel for run in runs}
    assert not [run for run in runs if run.op == "dequantize" and run.module != "model.embed_tokens"]


def test_sums_of_integers_that_float16_does_not_hold_do_not_overflow():
    x, q = torch.full((9, 64), 20.0).half(), torch.full((4, 64), 127, dtype=torch.int8)
    run = Run("int8_product", "quantized_product", (), Structure(), {"format": "int8"})
    got = resolve(run)(x, q, torch.full((4, 1), 1e-3).half(), None, None, None, None)
    torch.testing.assert_close(got.float(), torch.full((9, 4), 20 * 127 * 64 * 1e-3), rtol=5e-3, atol=0)
