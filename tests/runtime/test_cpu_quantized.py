# SPDX-License-Identifier: Apache-2.0
"""Products with weights in groups of codes on a CPU, in regions and in language models, with the kernels in C and without them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from few_of import few_of
from nnfront_models import llama

import nnfront as nn
from nnfront import ops
from nnfront.backends.cpu import in_c, quantized_pieces, tape
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.table import resolver
from nnfront.lower import Run, Structure
from nnfront.quant_format import FORMATS

resolve = resolver("cpu")

FOLDER = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"
OUTPUTS, COLUMNS = 14, 256


@pytest.fixture(params=["in C", "without"])
def extension(request, monkeypatch):
    """The kernels in C, if there are any here, and their absence."""
    if request.param == "without":
        for module in (in_c, quantized_pieces, tape):
            monkeypatch.setattr(module, "NATIVE", None)
    elif NATIVE is None:
        pytest.skip("no kernels in C")
    return request.param


def stored(way: str, group: int | None, dtype: torch.dtype):
    """Codes, scales and zero points of one way, what they stand for, and their format."""
    groups = 1 if group is None else COLUMNS // group
    scales = (torch.rand(OUTPUTS, groups) / 32).to(dtype)
    low, high = {"uint4": (0, 16), "int4": (-8, 8)}.get(way.removesuffix(" with zeros"), (-127, 128))
    is_unsigned, is_packed = way == "uint4", "int4" in way
    q = torch.randint(low, high, (OUTPUTS, COLUMNS), dtype=torch.uint8 if is_unsigned else torch.int8)
    zeros = (
        torch.randint(max(low, -8), 8, (OUTPUTS, groups), dtype=q.dtype)
        if is_unsigned or "zeros" in way
        else None
    )
    exact = q.double().unflatten(1, (groups, -1))
    exact = (exact if zeros is None else exact - zeros.double().unsqueeze(-1)) * scales.double().unsqueeze(-1)
    if is_packed:
        q = ops.pack_int4.run((q,), {"axis": 1})
    format = replace(FORMATS[way.removesuffix(" with zeros")], group_size=group, symmetric=zeros is None)
    return q, scales, zeros, exact.flatten(1), format


WAYS = [
    ("int4", 32),
    ("int4", 128),
    ("int4", 16),
    ("int4", None),
    ("int4 with zeros", 32),
    ("uint4", 32),
    ("uint4", 64),
]
WAYS += [("int8", 64), ("int8", 8), ("int8 with zeros", None)]


@pytest.mark.usefixtures("extension")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", few_of([0, 1, 8, 70], 3))
@pytest.mark.parametrize("bias", few_of([True, False]), ids=["bias", "no bias"])
@pytest.mark.parametrize(("way", "group"), WAYS, ids=str)
def test_products_with_groups_of_codes_agree_with_float64(way, group, rows, bias, dtype, monkeypatch):
    monkeypatch.setattr(quantized_pieces, "PIECE", 3 * COLUMNS)  # pieces that do not divide the rows
    monkeypatch.setattr(quantized_pieces, "NEAR_PIECE", 3 * COLUMNS)
    q, scales, zeros, dense, format = stored(way, group, dtype)
    x, residual = torch.randn(rows, COLUMNS).to(dtype), torch.randn(rows, OUTPUTS).to(dtype)
    b = torch.randn(OUTPUTS).to(dtype) if bias else None
    name = "int4" if "int4" in way else "int8_groups"
    after = {"activation": "silu", "scale": 0.5, "dtype": "float32"}
    multiply = resolve(
        Run(f"{name}_product", "quantized_product", (), Structure(), {**format.attrs, **after})
    )
    got = multiply(x, q, scales, zeros, b, None, residual)
    product = x.double() @ dense.T + (0 if b is None else b.double())
    exact = torch.nn.functional.silu(product) * 0.5 + residual.double()
    eps, most = torch.finfo(dtype).eps, max([1.0, *product.abs().flatten().tolist()])
    torch.testing.assert_close(got.double(), exact, rtol=8 * eps, atol=16 * eps * most)
    assert got.dtype == torch.float32
    kind = {**format.attrs, "activation": "relu"}
    gated = resolve(Run(f"{name}_gated_product", "quantized_gated_product", (), Structure(), kind))
    gate, up = product.split(OUTPUTS // 2, -1)
    expected = gate.relu() * up
    torch.testing.assert_close(
        gated(x, q, scales, zeros, b).double(), expected, rtol=8 * eps, atol=16 * eps * most**2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("way", "group"), [("int4", 32), ("uint4", 64), ("int4 with zeros", 8), ("int8", 32)], ids=str
)
def test_what_pieces_are_dequantised_to_is_what_the_op_gives(way, group, dtype):
    q, scales, zeros, _, format = stored(way, group, dtype)
    found = quantized_pieces.dequantized(format, q, scales, zeros, dtype)
    if format.packing is not None:
        q = ops.unpack_int4.run((q,), {"axis": 1, "signed": way != "uint4"})
    expected = ops.dequantize.run((q, scales, zeros), {"group_size": group, "axis": 1})
    assert found.dtype == dtype
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("scheme", "group"), [("int4", None), ("int4", 16), ("int8", 16)])
def test_a_language_model_in_groups_runs_on_their_kernels_on_a_cpu(scheme, group):
    model = llama.build(llama.TINY)
    ir = nn.passes.quantize_weights(
        model.export(llama.export_spec(llama.TINY)), f"{scheme}:{group}" if group else scheme
    )
    executable = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True))
    runs = [i for m in executable.program.methods.values() for i in m.body.walk() if isinstance(i, Run)]
    name = scheme if scheme == "int4" else f"{scheme}_groups"
    assert {f"{name}_product", f"{name}_gated_product"} <= {run.kernel for run in runs}
    assert not [run for run in runs if run.op == "dequantize" and run.module != "model.embed_tokens"]


@pytest.mark.skipif(NATIVE is None, reason="no kernels in C")
@pytest.mark.parametrize("quant", ["int4", "int8", "fp8"])
def test_a_language_model_says_the_same_with_the_kernels_in_c_and_without_them(quant, monkeypatch):
    calls = []
    written = in_c.written

    def counted(*args):
        calls.append(written(*args) is not None)
        return written(*args)

    monkeypatch.setattr(in_c, "written", counted)
    ids = torch.randint(5, 500, (1, 7), generator=torch.Generator().manual_seed(1))
    with_c = nn.LLM.load(FOLDER, quant=quant).logits(ids)
    assert any(calls)
    calls.clear()
    for module in (in_c, quantized_pieces, tape):
        monkeypatch.setattr(module, "NATIVE", None)
    without = nn.LLM.load(FOLDER, quant=quant).logits(ids)
    assert calls
    assert not any(calls)
    # Each layer rounds its results to bfloat16, whose last bit the order of sums decides; so are logits: 0.06 or 0.03 sigma for the largest.
    assert (with_c - without).abs().max() < 0.1 * without.std()
    assert (with_c - without).abs().mean() < 0.01 * without.std()
