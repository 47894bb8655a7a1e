# SPDX-License-Identifier: Apache-2.0
"""Products of integers with weights in blocks: scales, minima and numbers of all sizes, each in its own place; and where there are no kernels in C."""

import sys

import pytest
import torch
from int8_case import BLOCKS, Case, any_blocks, rounded

import nnfront as nn
from nnfront import spec
from nnfront.backends.cpu.extension import NATIVE

pytestmark = [
    pytest.mark.usefixtures("instructions"),
    pytest.mark.skipif(NATIVE is None, reason="no kernels in C"),
]


@pytest.mark.parametrize("columns", [128, 256, 640])
@pytest.mark.parametrize(("name", "group"), BLOCKS, ids=str)
def test_one_number_is_the_product_of_its_own_scale_less_its_own_minimum(name, group, columns):
    torch.manual_seed(0)
    case = Case(name, group, columns, columns, 9, is_wide=True)
    case.x = torch.diag(torch.tensor([3.0, -1.0]).repeat(columns // 2)).bfloat16()
    exact = rounded(case.x) @ case.dense.T
    case.check(case.run(case.x), exact)
    for column in (0, 17, 127, columns - 1):
        case.check(case.run(case.x[column : column + 1].clone()), exact[column : column + 1])


@pytest.mark.parametrize("fills", [(0x00, 0xFF), (0xFF, 0xFF), (0x00, 0x80), (0xFF, 0x80), (0xFF, 0x7F)])
@pytest.mark.parametrize(("name", "group"), BLOCKS, ids=str)
def test_a_sum_of_the_largest_integers_is_the_product_of_them(name, group, fills):
    torch.manual_seed(0)
    case = Case(name, group, 21, 896, 18, is_wide=True)
    case.use_blocks(any_blocks(name, 18, 896, 1.0, fills))
    signs = torch.tensor([1.0, -1.0])
    case.x[:3] = torch.stack([torch.ones(896), -torch.ones(896), signs.repeat(448)])
    case.x[3] = signs.repeat_interleave(16).repeat(28)
    exact = rounded(case.x) @ case.dense.T
    case.check(case.run(case.x), exact)
    for row in range(4):
        assert torch.equal(case.run(case.x[row : row + 1].clone())[0], case.run(case.x)[row])


class Product(nn.Module):
    def __init__(self) -> None:
        self.up = nn.Linear(384, 32, bias=True)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return x + nn.op.concat([self.up(x)] * 12, -1)


@pytest.mark.parametrize("name", ["q4_k", "q6_k"])
def test_an_artefact_runs_where_there_are_no_kernels_in_c(tmp_path, monkeypatch, name):
    model = Product()
    model.to("bfloat16")
    ir = model.export({"forward": {"x": spec.Tensor(["n", 384], "bfloat16")}})
    ir = nn.passes.quantize_activations(nn.passes.quantize_weights(ir, name))
    session = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True)).load(
        {"up.weight": torch.randn(32, 384).bfloat16(), "up.bias": torch.randn(32).bfloat16()}
    )
    assert "int8_activations_product" in str(session.explain())
    x = torch.randn(5, 384).bfloat16()
    expected = session["forward"](x)
    session.save(tmp_path / "artefact")
    for module_name, module in [*sys.modules.items()]:
        if module_name.startswith("nnfront.") and "NATIVE" in vars(module):
            monkeypatch.setattr(module, "NATIVE", None)
    alone = nn.load(tmp_path / "artefact")
    assert "the kernels in C are not there" in str(alone.explain())
    found = alone["forward"](x)
    assert (found.float() - expected.float()).abs().max() <= expected.float().abs().max() / 60
