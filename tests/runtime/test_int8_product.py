# SPDX-License-Identifier: Apache-2.0
"""Products of integers, by the kernel in C, against float64, and by sessions against the op's reference."""

import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from int8_case import BESIDE, BLOCKS, HALF_BLOCK, WAYS, Case, as_stored, columns_for, is_packed, rounded
from torch.nn import functional as F

import nnfront as nn
from nnfront import op, ops, spec
from nnfront.backends.cpu.activations import ACTIVATIONS, GATES, NO_ACTIVATION
from nnfront.backends.cpu.extension import NATIVE
from nnfront.passes.quantizing.scheme import named

pytestmark = [
    pytest.mark.usefixtures("instructions"),
    pytest.mark.skipif(NATIVE is None, reason="no kernels in C"),
]


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_it_is_the_product_of_what_rows_are_rounded_to(data: st.DataObject):
    name, group = data.draw(st.sampled_from(WAYS))
    step = HALF_BLOCK if (name, group) in BLOCKS else group or 1
    columns = step * data.draw(st.integers(1, 9 if group else 1100))
    rows = data.draw(st.sampled_from([*range(1, 18), 31]))
    outputs = data.draw(st.integers(1, 37))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    case = Case(name, group, rows, columns, outputs, is_wide=data.draw(st.booleans()))
    bias = torch.randn(outputs).bfloat16() if data.draw(st.booleans()) else None
    added = torch.randn(rows, outputs).bfloat16() if data.draw(st.booleans()) else None
    exact = rounded(case.x) @ case.dense.T
    exact = exact + (0 if bias is None else bias.double()) + (0 if added is None else added.double())
    case.check(case.run(case.x, bias, added), exact)


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("outputs", [5, 16, 37, 130])
@pytest.mark.parametrize(("name", "group"), WAYS, ids=str)
def test_gates_are_applied_to_sums_before_they_are_rounded(name, group, outputs, gate):
    torch.manual_seed(0)
    case = Case(name, group, 81, 640, 2 * outputs, is_wide=outputs > 16, size=1 / 64)
    bias = torch.randn(2 * outputs).bfloat16()
    product = rounded(case.x) @ case.dense.T + bias.double()
    before, after = product.chunk(2, -1)
    expected = ACTIVATIONS[gate](before.clone()) * after
    sizes = case.x.double().abs() @ case.terms.T + bias.double().abs()
    slack = (before.abs() + 1) * sizes[:, outputs:] + (after.abs() + 1) * 2 * sizes[:, :outputs]
    for rows in (1, 3, 8, 17, 64, 81):
        y = case.run(case.x[:rows].clone(), bias, gate=GATES.index(gate))
        assert (
            (y.double() - expected[:rows]).abs() <= expected[:rows].abs() * 2.0**-8 + slack[:rows] * 2.0**-19
        ).all()
        together = y
    for row in (0, 15, 16, 80):
        assert torch.equal(
            case.run(case.x[row : row + 1].clone(), bias, gate=GATES.index(gate))[0], together[row]
        )


@pytest.mark.parametrize("outputs", [64, 224], ids=lambda count: f"{count} outputs")
@pytest.mark.parametrize("gate", [NO_ACTIVATION, 0])
@pytest.mark.parametrize(("name", "group"), BESIDE, ids=str)
def test_packed_weights_give_the_same_bits(name, group, gate, outputs):
    torch.manual_seed(0)
    case = Case(name, group, 97, columns_for(name, group, 672), outputs, is_wide=group == 128)
    bias = torch.randn(outputs).bfloat16()
    for rows in (*range(1, 18), 33, 48, 49, 65, 96, 97):
        x = case.x[:rows].clone()
        assert torch.equal(case.run(x, bias, gate=gate, is_packed=True), case.run(x, bias, gate=gate)), rows
    if gate == NO_ACTIVATION:
        case.check(case.run(case.x, is_packed=True), rounded(case.x) @ case.dense.T)


@pytest.mark.parametrize("outputs", [50, 224])
@pytest.mark.parametrize(("name", "group"), WAYS, ids=str)
def test_results_in_float32_are_those_that_bfloat16_rounds(name, group, outputs):
    torch.manual_seed(0)
    case = Case(name, group, 17, 640, outputs, is_wide=True, size=1 / 64)
    bias, terms = torch.randn(outputs).bfloat16(), case.x.double().abs() @ case.terms.T
    exact = rounded(case.x) @ case.dense.T + bias.double()
    for rows in (1, 2, 5, 17):
        x = case.x[:rows].clone()
        y = case.run(x, bias, dtype=torch.float32)
        assert torch.equal(y.bfloat16(), case.run(x, bias))
        assert ((y.double() - exact[:rows]).abs() <= (terms[:rows] + bias.double().abs()) * 2.0**-20).all()


@pytest.mark.parametrize("outputs", [1, 8, 50, 72, 201])
@pytest.mark.parametrize(("name", "group"), BESIDE, ids=str)
def test_outputs_that_fill_no_panel_lie_behind(name, group, outputs):
    torch.manual_seed(0)
    case = Case(name, group, 65, columns_for(name, group, 672), outputs, is_wide=outputs == 50)
    bias = torch.randn(outputs).bfloat16()
    for rows in (1, 2, 3, 13, 65):
        x = case.x[:rows].clone()
        assert torch.equal(case.run(x, bias, is_packed=True), case.run(x, bias)), rows
    case.check(case.run(case.x, is_packed=True), rounded(case.x) @ case.dense.T)


@pytest.mark.parametrize(("name", "group"), BESIDE, ids=str)
def test_sums_of_the_largest_numbers_of_any_signs_are_exact(name, group):
    torch.manual_seed(0)
    # All signs that eight neighbours have.
    of_neighbours = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    columns = columns_for(name, group, 640)
    signs = of_neighbours.repeat(1, columns // 8)
    if name == "int8":
        weight = torch.where(signs == 0, 127, -128).to(torch.int8)
    else:
        largest = torch.where(signs == 0, 7, 8) if name == "int4" else 15 * signs
        weight = (largest[:, ::2] + 16 * largest[:, 1::2]).to(torch.uint8)
    case = Case(name, group, 256, columns, 256, is_wide=True, weight=weight)
    case.x = (1 - 2 * signs).bfloat16()
    exact = rounded(case.x) @ case.dense.T
    for packed in (False, True):
        together = case.run(case.x, is_packed=packed)
        case.check(together, exact)
        for rows in (1, 2, 8):
            for first in (0, 15, 85, 170, 248):
                few = case.run(case.x[first : first + rows].clone(), is_packed=packed)
                assert torch.equal(few, together[first : first + rows])


@pytest.mark.parametrize("size", [2.0**-133, 2.0**-126, 2.0**-119, 2.0**-117, 1.0, 2.0**120])
def test_rows_are_rounded_as_divisions_are(size):
    """All that two bfloat16 may be to each other: a row for each of the largest, and a weight that tells the integers."""
    largest = (1 + torch.arange(128) / 128) * size
    columns = torch.cat([-(1 + torch.arange(128) / 128) * 2.0**-power for power in range(9)]).double()
    x = torch.minimum(largest.double()[:, None], (columns * size)[None].abs()) * columns.sign()
    x[:, 0] = largest
    x = x.bfloat16()
    case = Case("int8", None, 128, 1152, 1152, is_wide=True)
    case.x, case.weight, case.scales = x, torch.eye(1152).to(torch.int8), torch.ones(1152, 1)
    scale = x.float().abs().amax(1, keepdim=True) / 127
    expected = ((x.float() / scale).round() * scale).bfloat16()
    assert torch.equal(case.run(x), expected)
    assert torch.equal(torch.cat([case.run(row[None].clone()) for row in x[::16]]), expected[::16])


@pytest.mark.parametrize(("name", "group"), WAYS, ids=str)
def test_a_row_is_the_same_bits_alone_and_among_many(name, group):
    torch.manual_seed(0)
    # What vectors divide, and what they do not.
    case = Case(name, group, 540, columns_for(name, group, 672), 21, is_wide=False)
    together = case.run(case.x)
    case.check(together, rounded(case.x) @ case.dense.T)
    for row in (0, 11, 12, 527, 528, 539):
        assert torch.equal(case.run(case.x[row : row + 1].clone())[0], together[row])
    for rows in (2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33):
        assert torch.equal(case.run(case.x[:rows].clone()), together[:rows])


@pytest.mark.parametrize(
    ("name", "group"), BESIDE, ids=str
)  # sums over blocks are added up in as many lanes as a set has
def test_sets_that_round_products_and_sums_once_give_the_same_bits(instructions, name, group):
    torch.manual_seed(0)
    case = Case(name, group, 21, columns_for(name, group, 704), 37, is_wide=True)
    of_rows = {}
    for of_set in (name for name in NATIVE.sets if name != "portable"):
        NATIVE.use_set(of_set)
        of_rows[of_set] = torch.cat([case.run(case.x[:rows].clone()) for rows in (1, 2, 4, 7, 8, 15, 21)])
    NATIVE.use_set(instructions)
    for of_set, found in of_rows.items():
        assert torch.equal(found, of_rows[NATIVE.sets[0]]), of_set


@pytest.mark.parametrize(("name", "group"), [("int4", 32), *BLOCKS], ids=str)
def test_rows_of_zeros_are_zeros_and_what_is_not_finite_is_its_own_row_alone(name, group):
    torch.manual_seed(0)
    case = Case(name, group, 16, columns_for(name, group, 64), 18, is_wide=True)
    plain = case.run(case.x)
    case.x[3], case.x[5, 7], case.x[14, 0] = 0, torch.inf, torch.nan
    y = case.run(case.x)
    assert (y[3] == 0).all()
    assert y[[5, 14]].isnan().all()
    others = [row for row in range(16) if row not in (3, 5, 14)]
    assert torch.equal(y[others], plain[others])


@pytest.mark.parametrize("size", [1e-30, 3e38])
def test_rows_of_any_size_are_rounded_by_their_own(size):
    torch.manual_seed(0)
    case = Case("int8", None, 3, 96, 17, is_wide=True, size=2.0**-20)  # so that sums are finite
    case.x[1] = (case.x[1].float() / case.x[1].float().abs().max() * size).bfloat16()
    case.check(case.run(case.x), rounded(case.x) @ case.dense.T)


def test_wrong_numbers_are_refused_before_memory_is_touched():
    y = torch.full((512,), torch.nan)

    def call(
        stored: int,
        columns: int,
        groups: int,
        kind: int = 0,
        gate: int = 4,
        *,
        packed: int = 0,
        rounded: bool = True,
    ) -> None:
        outputs = packed or 4
        operands = torch.zeros(512), torch.zeros(512), torch.zeros(512), torch.zeros(512)
        NATIVE.multiply_integers(
            *(stored, 1, columns, outputs, groups, kind, gate, packed > 0, rounded, 0, 1),
            *(*operands, None, None, torch.zeros(4096), y),
        )

    for stored in (2, 3, 6):
        with pytest.raises(ValueError, match=f"integers of a weight, got {stored}"):
            call(stored, 128, 1 if stored != 6 else 4)
    with pytest.raises(ValueError, match="0 to 9 for how values are stored, got 10"):
        call(10, 128, 4)
    with pytest.raises(ValueError, match="columns that 128 divides, got 64"):
        call(7, 64, 2)
    with pytest.raises(ValueError, match="scales that are floats, got 2"):
        call(0, 64, 1, 2)
    with pytest.raises(ValueError, match="0 to 4 for gates, got 5"):
        call(0, 64, 1, 0, 5)
    with pytest.raises(ValueError, match="groups of 32, 64 or 128, got 3 of 64 columns"):
        call(1, 64, 3)
    for stored, columns, groups, outputs, gate in (
        (0, 64, 1, 4, 0),
        (0, 63, 1, 4, 4),
        (7, 128, 4, 16, 4),
    ):
        with pytest.raises(ValueError, match=f"a multiple of 4 bytes, .* got {outputs} x {columns}"):
            call(stored, columns, groups, gate=gate, packed=outputs)
    with pytest.raises(ValueError, match="columns, got none"):
        call(0, 0, 1)
    with pytest.raises(ValueError, match="a packed weight where rows are not rounded"):
        call(0, 64, 1, rounded=False)
    assert y.isnan().all()


class Product(nn.Module):
    def __init__(self, outputs: int) -> None:
        self.up = nn.Linear(128, outputs, bias=True)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.relu(self.up(x))


@pytest.mark.parametrize("format", ["int8", "int8:32", "int4", "uint4:64", "q4_k", "q6_k"])
@pytest.mark.parametrize("outputs", [40, 48])
@pytest.mark.parametrize("rows", [1, 5, 70])
def test_a_session_runs_it_and_computes_what_the_reference_does(format, rows, outputs):
    model = Product(outputs)
    model.to("bfloat16")
    ir = model.export({"forward": {"x": spec.Tensor(["n", 2, 128], "bfloat16")}})
    ir = nn.passes.quantize_activations(nn.passes.quantize_weights(ir, format))
    executable = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True))
    (product, _) = executable.program.methods["forward"].body.instructions
    known = named(format)
    assert product.kernel == "packed_" * is_packed(known, outputs) + "int8_activations_product"
    torch.manual_seed(rows)
    weights = {"up.weight": torch.randn(outputs, 128).bfloat16(), "up.bias": torch.randn(outputs).bfloat16()}
    x = torch.randn(rows, 2, 128).bfloat16()
    session = executable.load(weights)
    parts = [as_stored(session, f"up.weight.{name}") for name in (known.name, "scales", "zero_points")]
    attrs = {"format": known.name, "group_size": None if known.block else known.group_size}
    expected = ops.linear_int8.run((x, *parts, weights["up.bias"]), attrs).relu()
    torch.testing.assert_close(session["forward"](x), expected, rtol=2**-7, atol=0.02)
    assert torch.equal(
        session["forward"](x.transpose(0, 1).contiguous().transpose(0, 1)), session["forward"](x)
    )


class Logits(nn.Module):
    def __init__(self, dtype: str) -> None:
        self.head, self.result = nn.Linear(128, 48, bias=False), dtype

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        return op.astype(self.head(x), self.result)


@pytest.mark.parametrize("format", ["int8", "int4", "q6_k"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_cast_is_part_of_the_product(format, dtype):
    model = Logits(dtype)
    model.to("bfloat16")
    ir = model.export({"forward": {"x": spec.Tensor(["n", 128], "bfloat16")}})
    ir = nn.passes.quantize_activations(nn.passes.quantize_weights(ir, format))
    executable = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True))
    (product,) = executable.program.methods["forward"].body.instructions
    assert product.attrs["dtype"] == dtype
    torch.manual_seed(0)
    x = torch.randn(3, 128).bfloat16()
    session = executable.load({"head.weight": torch.randn(48, 128).bfloat16()})
    known = named(format)
    parts = [as_stored(session, f"head.weight.{name}") for name in (known.name, "scales", "zero_points")]
    attrs = {"format": known.name, "group_size": None if known.block else known.group_size}
    expected = ops.linear_int8.run((x.float(), *parts, None), attrs)
    y = session["forward"](x)
    assert y.dtype == getattr(torch, dtype)
    # In float32 nothing is rounded to bfloat16 on the way.
    torch.testing.assert_close(
        y.float(),
        expected,
        **({"rtol": 2**-16, "atol": 1e-4} if dtype == "float32" else {"rtol": 2**-7, "atol": 0.02}),
    )


class FeedForward(nn.Module):
    def __init__(self, act, inner: int, outputs: int) -> None:
        self.both, self.down, self.act = nn.Linear(128, 2 * inner), nn.Linear(inner, outputs), act

    def forward(self, x: nn.Tensor, residual: nn.Tensor) -> nn.Tensor:
        gate, up = op.split(self.both(x), 2, -1)
        return residual + self.down(self.act(gate) * up)


@pytest.mark.parametrize("is_wide", [False, True])
@pytest.mark.parametrize(
    ("format", "inner", "outputs"),
    [("int8", 64, 48), ("int8", 72, 40), ("int4", 64, 48), ("int4", 96, 40), ("q4_k", 128, 40)],
)
@pytest.mark.parametrize(("act", "activate"), [(op.silu, F.silu), (op.gelu, F.gelu), (op.relu, F.relu)])
@pytest.mark.parametrize("rows", [1, 5, 70, 2100])
def test_gates_and_residuals_are_those_of_the_ops_one_by_one(
    is_wide, format, act, activate, rows, inner, outputs
):
    model = FeedForward(act, inner, outputs)
    model.to("bfloat16")
    residual = ["n", outputs] if is_wide else [outputs]
    arguments = {"x": spec.Tensor(["n", 128], "bfloat16"), "residual": spec.Tensor(residual, "bfloat16")}
    ir = model.export({"forward": arguments})
    ir = nn.passes.quantize_activations(nn.passes.quantize_weights(ir, format))
    executable = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True))
    kernels = {run.kernel for run in executable.program.methods["forward"].body.instructions}
    ends = ("gated_product", inner, 2), ("product", outputs, 1)
    known = named(format)
    assert {f"{'packed_' * is_packed(known, *size)}int8_activations_{end}" for end, *size in ends} <= kernels
    torch.manual_seed(rows)
    shapes = {"both.weight": (2 * inner, 128), "both.bias": (2 * inner,)}
    shapes |= {"down.weight": (outputs, inner), "down.bias": (outputs,)}
    weights = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    session = executable.load(weights)
    attrs = {"format": format, "group_size": None if known.block else known.group_size}

    def product(name: str, x: torch.Tensor) -> torch.Tensor:
        stored = [as_stored(session, f"{name}.weight.{part}") for part in (format, "scales")]
        return ops.linear_int8.run((x, *stored, None, weights[f"{name}.bias"]), attrs)

    def close(y: torch.Tensor, expected: torch.Tensor) -> bool:
        """But for elements of what is rounded to 8 bits that are next to each other in it."""
        return bool((y.float() - expected.float()).abs().max() <= expected.float().abs().max() / 60)

    x = torch.randn(128, rows).bfloat16().T  # in pieces, as which it is left to others where it is large
    added = torch.randn([rows if size == "n" else size for size in residual]).bfloat16()
    gate, up = product("both", x).chunk(2, -1)
    expected = added + product("down", activate(gate) * up)
    assert close(session["forward"](x, added), expected)
    assert close(session["forward"](x.contiguous(), added), expected)


def test_an_artefact_with_packed_weights_runs_where_there_are_no_kernels_in_c(tmp_path, monkeypatch):
    model = FeedForward(op.silu, 64, 48)
    model.to("bfloat16")
    arguments = {name: spec.Tensor(["n", size], "bfloat16") for name, size in (("x", 128), ("residual", 48))}
    ir = nn.passes.quantize_weights(model.export({"forward": arguments}), "int4")
    ir = nn.passes.lift_transform_params(nn.passes.quantize_activations(ir), shared_transform=True)
    torch.manual_seed(0)
    shapes = {"both.weight": (128, 128), "both.bias": (128,), "down.weight": (48, 64), "down.bias": (48,)}
    session = nn.compile(ir).load({name: torch.randn(shape).bfloat16() for name, shape in shapes.items()})
    operands = torch.randn(5, 128).bfloat16(), torch.randn(5, 48).bfloat16()
    expected = session["forward"](*operands)
    session.save(tmp_path / "artefact")
    for name, module in [*sys.modules.items()]:
        if name.startswith("nnfront.") and "NATIVE" in vars(module):
            monkeypatch.setattr(module, "NATIVE", None)
    alone = nn.load(tmp_path / "artefact")
    kernels = {run.kernel for run in alone.program.methods["forward"].body.instructions}
    assert {"packed_int8_activations_gated_product", "packed_int8_activations_product"} <= kernels
    found = alone["forward"](*operands)
    assert (found.float() - expected.float()).abs().max() <= expected.float().abs().max() / 60
