# SPDX-License-Identifier: Apache-2.0
"""A head that is the embedding as well: stored once, in the order that products of integers read, in which rows are taken too."""

import pytest
import torch
from int8_case import as_stored, is_packed

import nnfront as nn
from nnfront import op, ops, spec
from nnfront.passes.quantizing.scheme import named
from nnfront.quant_format import QuantFormat

pytestmark = pytest.mark.usefixtures("instructions")


class Tied(nn.Module):
    def __init__(self, count: int) -> None:
        self.embed = nn.Embedding(count, 128)

    def forward(self, tokens: nn.Tensor) -> nn.Tensor:
        return op.linear(self.embed(tokens), self.embed.weight)


def dense_row(parts: list[torch.Tensor | None], format: QuantFormat, row: int) -> torch.Tensor:
    """A row that is stored so, in bfloat16."""
    quantized, scales, zeros = (None if part is None else part[row] for part in parts)
    if format.packing is not None:
        quantized = (
            torch.stack([quantized.view(torch.uint8) % 16, quantized.view(torch.uint8) // 16], -1)
            .flatten()
            .float()
        )
        quantized = quantized if format.name == "uint4" else (quantized + 8) % 16 - 8
    each = 128 // len(scales)
    less = 0 if zeros is None else zeros.float().repeat_interleave(each)
    return ((quantized.float() - less) * scales.float().repeat_interleave(each)).bfloat16()


@pytest.mark.parametrize("count", [48, 50])
@pytest.mark.parametrize("format", ["int8", "int4", "uint4:64"])
@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_a_head_that_is_the_embedding_as_well_is_stored_once_as_products_read_it(format, count, shape):
    model = Tied(count)
    model.to("bfloat16")
    tokens = spec.Tensor(["n", *shape[1:]], "int64")
    ir = nn.passes.quantize_weights(
        model.export({"forward": {"tokens": tokens}}), nn.passes.QuantScheme(format, head=format)
    )
    executable = nn.compile(
        nn.passes.lift_transform_params(nn.passes.quantize_activations(ir), shared_transform=True)
    )
    known = named(format)
    kernels = {run.kernel for run in executable.program.methods["forward"].body.instructions}
    panels = {"packed_quantized_embedding", "packed_int8_activations_product"}
    assert panels <= kernels if is_packed(known, count) else panels.isdisjoint(kernels)
    torch.manual_seed(0)
    weight = torch.randn(count, 128).bfloat16()
    session = executable.load({"embed.weight": weight})
    assert len(session.weights) == len(known.parts)
    ids = torch.randint(count, shape)
    parts = [as_stored(session, f"embed.weight.{name}") for name in (known.name, "scales", "zero_points")]
    attrs = {"format": known.name, "group_size": known.group_size}
    dense = torch.stack([dense_row(parts, known, row) for row in ids.flatten()]).view(*shape, 128)
    torch.testing.assert_close(session["forward"](ids), ops.linear_int8.run((dense, *parts, None), attrs))
    for beyond in (count, 63, 64, -1):
        with pytest.raises(nn.errors.RunError, match="index out of range"):
            session["forward"](torch.full(shape, beyond))
