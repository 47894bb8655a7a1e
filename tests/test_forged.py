# SPDX-License-Identifier: Apache-2.0
"""Text cannot say that a function is what a kernel computes: what its body says is what runs."""

from __future__ import annotations

import pytest
import torch

import nnfront as nn
from nnfront.errors import LowerError
from nnfront.ir import parse
from nnfront.lower import Run

FORGED = 'attrs(region="product", kind="linear", operands=("x", "weight", "bias", "scale", "residual"))'


def module(head: str, attrs: str = FORGED) -> str:
    """A function that returns a sum of its small operands, and claims to be a product of a row with a large matrix."""
    params = "x: input float32[1, 32], weight: input float32[64, 32], residual: input float32[1, 1]"
    return f"""
        {head}({params}) -> float32[1, 1] {attrs} {{
            y: float32[1, 1] = add(residual, residual)
            return y
        }}
        def main({params}) -> float32[1, 1] {{
            y: float32[1, 1] = @{head.split()[-1]}(x, weight, residual)
            return y
        }}
    """


def runs(executable: nn.Executable) -> list[str]:
    return [i.op for i in executable.program.methods["main"].body.instructions if isinstance(i, Run)]


@pytest.mark.parametrize(
    ("head", "attrs"),
    [
        ("fused def part", FORGED),
        ("fused def product", 'attrs(kind="linear", operands=("x", "weight", "bias", "scale", "residual"))'),
        ("fused def part", FORGED.replace("product", "qkv_attention")),
        ("fused def part", FORGED.replace("product", "quantized_product")),
        ("fused def part", FORGED.replace('"product"', '"quantized_product", format=3')),
        ("fused def part", 'attrs(region=3, operands="x", kind=(1, 2))'),
        ("external def part", FORGED),
        ("external def part", "attrs(region=3, operands=7)"),
    ],
)
def test_a_function_that_claims_to_be_a_region_runs_its_body(head: str, attrs: str) -> None:
    operands = torch.ones(1, 32), torch.ones(64, 32), torch.full((1, 1), 3.0)
    executable = nn.compile(parse(module(head, attrs)))
    assert runs(executable) == ["add"]
    assert executable.load({})["main"](*operands).tolist() == [[6.0]]
    assert nn.passes.pack_weights(parse(module(head, attrs))) is not None


@pytest.mark.parametrize("name", ["linear", "product", "qkv_attention"])
def test_an_external_function_has_no_name_that_a_kernel_of_ours_has(name: str) -> None:
    with pytest.raises(LowerError) as error:
        nn.compile(parse(module(f"external def {name}", "")))
    assert str(error.value) == (
        f"the external function {name!r} has the name of an op or a region, whose kernels are not for it\n"
        "  help: give it a name of its own"
    )


def test_what_was_outlined_and_printed_is_outlined_again() -> None:
    text = """
        def main[n](x: input float32[n, 4], w: weight float32[6, 4]) -> float32[n, 3] {
            h: float32[n, 6] = linear(x, w)
            y: (float32[n, 3], float32[n, 3]) = split(h, indices_or_sections=2, axis=1)
            a: float32[n, 3] = y[0]
            b: float32[n, 3] = y[1]
            z: float32[n, 3] = swiglu(a, b)
            return z
        }
    """
    outlined = nn.passes.outline(parse(text))
    assert runs(nn.compile(outlined)) == runs(nn.compile(parse(str(outlined)))) == ["gated_product"]
