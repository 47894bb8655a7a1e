# SPDX-License-Identifier: Apache-2.0
"""Products of rows as they are with packed weights in integers, by the kernel in C, against float64, and by sessions against the ops of the model."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from int8_case import BESIDE, Case, as_stored, columns_for
from torch.nn import functional as F

import nnfront as nn
from nnfront import op, spec
from nnfront.backends.cpu import backend
from nnfront.backends.cpu.activations import ACTIVATIONS, GATES
from nnfront.backends.cpu.extension import NATIVE
from nnfront.passes.quantizing.scheme import named

pytestmark = [
    pytest.mark.usefixtures("instructions"),
    pytest.mark.skipif(NATIVE is None, reason="no kernels in C"),
]


def product(case: Case, x: torch.Tensor, *others: torch.Tensor | None, **kind) -> torch.Tensor:
    return case.run(x, *others, is_packed=True, is_rounded=False, **kind)


def numbers_of(name: str, weight: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
    """What is scaled: integers, or halves of bytes less their zero points."""
    if name == "int8":
        return weight.float()
    halves = torch.stack([weight % 16, weight // 16], -1).flatten(1).float()
    if zeros is None:
        return (halves + 8) % 16 - 8
    return halves - zeros.float().repeat_interleave(halves.shape[1] // zeros.shape[1], 1)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_it_is_the_product_of_rows_as_they_are(data: st.DataObject):
    name, group = data.draw(st.sampled_from(BESIDE))
    columns = (group or 4) * data.draw(st.integers(1, 20 if group else 300))
    rows = data.draw(st.integers(1, 27))
    outputs = data.draw(st.one_of(st.integers(1, 37), st.sampled_from([64, 112, 130])))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    case = Case(name, group, rows, columns, outputs, is_wide=data.draw(st.booleans()))
    bias = torch.randn(outputs).bfloat16() if data.draw(st.booleans()) else None
    added = torch.randn(rows, outputs).bfloat16() if data.draw(st.booleans()) else None
    exact = case.x.double() @ case.dense.T
    exact = exact + (0 if bias is None else bias.double()) + (0 if added is None else added.double())
    case.check(product(case, case.x, bias, added), exact)


@pytest.mark.parametrize("outputs", [21, 224])
@pytest.mark.parametrize(("name", "group"), BESIDE, ids=str)
def test_a_row_has_the_same_bits_alone_and_among_any_number(name, group, outputs):
    torch.manual_seed(0)
    case = Case(name, group, 150, columns_for(name, group, 672), outputs, is_wide=False)
    bias = torch.randn(outputs).bfloat16()
    together = product(case, case.x, bias)
    case.check(together, case.x.double() @ case.dense.T + bias.double())
    for rows in (*range(1, 26), 37, 64):
        assert torch.equal(product(case, case.x[:rows].clone(), bias), together[:rows]), rows
    for row in (11, 12, 13, 148, 149):
        assert torch.equal(product(case, case.x[row : row + 1].clone(), bias)[0], together[row]), row


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("outputs", [16, 144])
@pytest.mark.parametrize(("name", "group"), BESIDE, ids=str)
def test_gates_are_applied_to_sums_before_they_are_rounded(name, group, outputs, gate):
    torch.manual_seed(0)
    case = Case(name, group, 29, 640, 2 * outputs, is_wide=outputs > 16, size=1 / 64)
    bias = torch.randn(2 * outputs).bfloat16()
    before, after = (case.x.double() @ case.dense.T + bias.double()).chunk(2, -1)
    expected = ACTIVATIONS[gate](before.clone()) * after
    sizes = case.x.double().abs() @ case.terms.T + bias.double().abs()
    slack = (before.abs() + 1) * sizes[:, outputs:] + (after.abs() + 1) * 2 * sizes[:, :outputs]
    for rows in (1, 2, 3, 4, 5, 6, 8, 17, 29):
        y = product(case, case.x[:rows].clone(), bias, gate=GATES.index(gate))
        error = (y.double() - expected[:rows]).abs()
        assert (error <= expected[:rows].abs() * 2.0**-8 + slack[:rows] * 2.0**-19).all()


@pytest.mark.parametrize(("name", "group"), BESIDE, ids=str)
def test_every_number_is_multiplied_exactly(name, group):
    """Columns of ones and zeros pick each number out of the weight."""
    torch.manual_seed(0)
    columns = columns_for(name, group, 256)
    case = Case(name, group, columns, columns, 48, is_wide=True)
    case.scales, case.x = torch.ones_like(case.scales), torch.eye(columns).bfloat16()
    y = product(case, case.x, dtype=torch.float32)
    assert torch.equal(y, numbers_of(name, case.weight, case.zeros).T)


@pytest.mark.parametrize(("name", "group"), BESIDE, ids=str)
def test_what_is_not_finite_is_its_own_rows_alone(name, group):
    torch.manual_seed(0)
    case = Case(name, group, 16, columns_for(name, group, 64), 18, is_wide=True)
    plain = product(case, case.x)
    case.x[3], case.x[5, 7], case.x[14, 0] = 0, torch.inf, torch.nan
    y = product(case, case.x)
    assert (y[3] == 0).all()
    assert y[14].isnan().all()
    # An infinity times each number, which is none of zero.
    expected = case.dense[:, 7] * torch.inf
    same = (y[5].double() == expected) | (y[5].isnan() & expected.isnan())
    assert same.all()
    others = [row for row in range(16) if row not in (3, 5, 14)]
    assert torch.equal(y[others], plain[others])


class FeedForward(nn.Module):
    def __init__(self, inner: int, outputs: int) -> None:
        self.both, self.down = nn.Linear(128, 2 * inner), nn.Linear(inner, outputs)

    def forward(self, x: nn.Tensor, residual: nn.Tensor) -> nn.Tensor:
        gate, up = op.split(self.both(x), 2, -1)
        return residual + self.down(op.silu(gate) * up)


def executable(format: str, inner: int, outputs: int) -> nn.Executable:
    model = FeedForward(inner, outputs)
    model.to("bfloat16")
    sizes = {"x": 128, "residual": outputs}
    arguments = {name: spec.Tensor(["n", size], "bfloat16") for name, size in sizes.items()}
    ir = nn.passes.quantize_weights(model.export({"forward": arguments}), format)
    return nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True))


def kernels(of: nn.Executable | nn.Session) -> set[str]:
    return {run.kernel for run in of.program.methods["forward"].body.instructions}


def weights(inner: int, outputs: int) -> dict[str, torch.Tensor]:
    shapes = {"both.weight": (2 * inner, 128), "both.bias": (2 * inner,)}
    shapes |= {"down.weight": (outputs, inner), "down.bias": (outputs,)}
    return {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("format", "kind"), [("int8", "int8"), ("int8:32", "int8_groups"), ("int4", "int4"), ("uint4", "int4")]
)
@pytest.mark.parametrize(("inner", "outputs"), [(64, 48), (96, 40)])
@pytest.mark.parametrize("are_packed", [False, True])
def test_sessions_compute_the_same_with_weights_in_panels_and_in_rows(
    format, kind, inner, outputs, are_packed, monkeypatch
):
    monkeypatch.setattr(backend, "multiplies_pairs", lambda: are_packed)
    made = executable(format, inner, outputs)
    packed = "packed_" * are_packed
    assert {f"{packed}{kind}_gated_product", f"{packed}{kind}_product"} <= kernels(made)
    torch.manual_seed(0)
    given = weights(inner, outputs)
    session, known = made.load(given), named(format)

    def dense(name: str) -> torch.Tensor:
        stored, scales, zeros = (
            as_stored(session, f"{name}.{part}") for part in (known.name, "scales", "zero_points")
        )
        numbers = numbers_of(known.name, stored, zeros)
        return numbers * scales.float().repeat_interleave(numbers.shape[1] // scales.shape[1], 1)

    for rows in (1, 2, 5, 13, 70, 200):
        x, residual = torch.randn(rows, 128).bfloat16(), torch.randn(rows, outputs).bfloat16()
        gate, up = (F.linear(x.float(), dense("both.weight"), given["both.bias"].float())).chunk(2, -1)
        inside = (F.silu(gate) * up).bfloat16().float()
        expected = residual + F.linear(inside, dense("down.weight"), given["down.bias"].float())
        y = session["forward"](x, residual)
        assert (y.float() - expected).abs().max() <= expected.abs().max() / 100, rows
        in_pieces = x.T.contiguous().T, residual.T.contiguous().T
        assert torch.equal(session["forward"](*in_pieces), y)


def test_weights_are_in_panels_where_pairs_are_multiplied_by_vectors(instructions):
    assert ("packed_int4_product" in kernels(executable("int4", 64, 48))) == backend.multiplies_pairs()


@pytest.mark.parametrize("are_packed", [False, True])
def test_an_artefact_keeps_the_order_of_its_machine_on_another(are_packed, tmp_path, monkeypatch):
    monkeypatch.setattr(backend, "multiplies_pairs", lambda: are_packed)
    torch.manual_seed(0)
    session = executable("int4", 64, 48).load(weights(64, 48))
    operands = torch.randn(5, 128).bfloat16(), torch.randn(5, 48).bfloat16()
    session.save(tmp_path / "artefact")
    monkeypatch.setattr(backend, "multiplies_pairs", lambda: not are_packed)
    alone, packed = nn.load(tmp_path / "artefact"), "packed_" * are_packed
    assert {f"{packed}int4_gated_product", f"{packed}int4_product"} <= kernels(alone)
    assert torch.equal(alone["forward"](*operands), session["forward"](*operands))
