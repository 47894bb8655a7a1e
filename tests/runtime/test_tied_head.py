# SPDX-License-Identifier: Apache-2.0
"""A head that is the embedding as well: stored once, in the order that products of integers read, in which rows are taken too."""

import pytest
import torch
from int8_case import as_stored

import nnfront as nn
from nnfront import op, ops, spec
from nnfront.backends.cpu import embedding
from nnfront.passes.quantizing.scheme import named
from nnfront.quant_format import QuantFormat

pytestmark = pytest.mark.usefixtures("instructions")

D = 128


class Tied(nn.Module):
    def __init__(self, count: int) -> None:
        self.embed = nn.Embedding(count, D)

    def forward(self, tokens: nn.Tensor) -> nn.Tensor:
        return op.linear(self.embed(tokens), self.embed.weight)


class Untied(nn.Module):
    def __init__(self, count: int) -> None:
        self.embed, self.head = nn.Embedding(count, D), nn.Linear(D, count, bias=False)

    def forward(self, tokens: nn.Tensor) -> nn.Tensor:
        return self.head(self.embed(tokens))


def compiled(model: nn.Module, format: str, *more_axes: int) -> nn.Executable:
    """All in one format, multiplied with activations in 8 bits."""
    model.to("bfloat16")
    ir = model.export({"forward": {"tokens": spec.Tensor(["n", *more_axes], "int64")}})
    ir = nn.passes.quantize_weights(ir, nn.passes.QuantScheme(format, head=format))
    return nn.compile(
        nn.passes.lift_transform_params(nn.passes.quantize_activations(ir), shared_transform=True)
    )


def kernels(executable: nn.Executable) -> set[str]:
    return {run.kernel for run in executable.program.methods["forward"].body.instructions}


def dense_row(parts: list[torch.Tensor | None], format: QuantFormat, row: int) -> torch.Tensor:
    """A row that is stored so, in bfloat16."""
    numbers, scales, zeros = (None if part is None else part[row] for part in parts)
    if format.packing is not None:
        both = numbers.view(torch.uint8)
        numbers = torch.stack([both % 16, both // 16], -1).flatten().float()
        numbers = numbers if format.name == "uint4" else (numbers + 8) % 16 - 8
    each = D // len(scales)
    less = 0 if zeros is None else zeros.float().repeat_interleave(each)
    return ((numbers.float() - less) * scales.float().repeat_interleave(each)).bfloat16()


@pytest.mark.parametrize("count", [48, 50])
@pytest.mark.parametrize("format", ["int8", "int4", "uint4:64"])
@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_it_is_stored_once_in_panels_and_rows_are_taken_from_them(format, count, shape):
    executable = compiled(Tied(count), format, *shape[1:])
    assert {"packed_quantized_embedding", "packed_int8_activations_product"} <= kernels(executable)
    torch.manual_seed(0)
    session = executable.load({"embed.weight": torch.randn(count, D).bfloat16()})
    known = named(format)
    assert len(session.weights) == len(known.parts)
    parts = [as_stored(session, f"embed.weight.{name}") for name in (known.name, "scales", "zero_points")]
    ids = torch.randint(count, shape)
    dense = torch.stack([dense_row(parts, known, row) for row in ids.flatten()]).view(*shape, D)
    attrs = {"format": known.name, "group_size": known.group_size}
    torch.testing.assert_close(session["forward"](ids), ops.linear_int8.run((dense, *parts, None), attrs))
    for beyond in (count, 63, 64, -1):
        with pytest.raises(nn.errors.RunError, match="index out of range"):
            session["forward"](torch.full(shape, beyond))


@pytest.mark.parametrize("count", [48, 50])
@pytest.mark.parametrize("format", ["int8", "int4", "uint4:64"])
def test_rows_have_the_same_bits_where_c_does_not_dequantise_them(format, count, monkeypatch):
    torch.manual_seed(0)
    weights, ids = {"embed.weight": torch.randn(count, D).bfloat16()}, torch.arange(count)
    expected = compiled(Tied(count), format).load(weights)["forward"](ids)
    monkeypatch.setattr(embedding, "NATIVE", None)
    assert torch.equal(compiled(Tied(count), format).load(weights)["forward"](ids), expected)


@pytest.mark.parametrize("format", ["int8", "int4", "q4_k"])
def test_an_embedding_that_no_product_reads_keeps_the_order_of_its_rows(format):
    count = 48
    executable = compiled(Untied(count), format)
    assert "packed_quantized_embedding" not in kernels(executable)
    assert ("quantized_embedding" in kernels(executable)) == (format != "q4_k")
    torch.manual_seed(0)
    weight, ids = torch.randn(count, D).bfloat16(), torch.arange(count)
    apart = executable.load({"embed.weight": weight, "head.weight": weight})["forward"](ids)
    assert torch.equal(apart, compiled(Tied(count), format).load({"embed.weight": weight})["forward"](ids))
