# SPDX-License-Identifier: Apache-2.0
"""Packed weights: the orders are those of the kernels, results stay the same, and one copy is what the transform gives."""

from __future__ import annotations

from functools import partial

import nnfront_kernels.quantized as stored
import pytest
import torch
from nnfront_kernels.epilogue import interleave
from pass_checks import expect_same_results

import nnfront as nn
from nnfront import op, spec
from nnfront.backends.cpu.backend import KERNELS as CPU
from nnfront.backends.cuda.table import KERNELS as CUDA
from nnfront.ir import first_difference, parse
from nnfront.passes import bubble_up_slices, lift_transform_params, outline, pack_weights
from nnfront.passes.weight_layouts import LAYOUTS

D, F, GROUP = 64, 6, 32
X = spec.Tensor(["n", D], "float32")


class Gated(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        self.gate, self.up = nn.Linear(D, F, bias=bias), nn.Linear(D, F, bias=bias)
        self.weight = op.concat([self.gate.weight, self.up.weight], 0)
        self.bias = op.concat([self.gate.bias, self.up.bias], 0) if bias else None

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        gate, up = op.split(op.linear(x, self.weight, self.bias), 2, -1)
        return op.silu(gate) * up


class Quantized(nn.Module):
    """A linear over a weight that is quantised when it is loaded."""

    def __init__(self, bits: int, symmetric: bool = True) -> None:
        self.proj = nn.Linear(D, F, bias=False)
        self.bits = bits
        found = op.quantize(self.proj.weight, bits, GROUP, symmetric=symmetric)
        self.q, self.scales, self.zeros = (*found, None) if symmetric else found
        if bits == 4:
            self.q = op.pack_int4(self.q)
        self.symmetric = symmetric

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        q = op.unpack_int4(self.q, signed=self.symmetric) if self.bits == 4 else self.q
        return op.linear(x, op.dequantize(q, self.scales, self.zeros, GROUP))


class QuantizedGated(nn.Module):
    """Gate and up of one weight that is quantised when it is loaded."""

    def __init__(self, bits: int, dtype: str | None = None) -> None:
        self.proj = nn.Linear(D, 2 * F, bias=True)
        self.bits = bits
        self.group = GROUP if dtype is None else None
        self.q, self.scales = op.quantize(self.proj.weight, bits, self.group, dtype=dtype)
        if bits == 4:
            self.q = op.pack_int4(self.q)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        q = op.unpack_int4(self.q) if self.bits == 4 else self.q
        weight = op.dequantize(q, self.scales, None, self.group)
        gate, up = op.split(op.linear(x, weight, self.proj.bias), 2, -1)
        return op.silu(gate) * up


MODELS = {
    "gated int4": (lambda: QuantizedGated(4), "int4_gated_product"),
    "gated int8": (lambda: QuantizedGated(8), "int8_gated_product"),
    "gated float8": (lambda: QuantizedGated(8, "float8_e4m3fn"), "fp8_gated_product"),
    "gated": (Gated, "interleaved_product"),
    "gated without bias": (lambda: Gated(False), "interleaved_product"),
    "int4": (lambda: Quantized(4), "int4_product"),
    "int4 with zero points": (lambda: Quantized(4, symmetric=False), "int4_product"),
    "int8": (lambda: Quantized(8), "int8_product"),
}


class Integers(nn.Module):
    """A product of integers of a weight that is quantised when it is loaded; gate and up of it."""

    def __init__(self, format: str, gated: bool) -> None:
        self.proj = nn.Linear(D, 64, bias=True)
        self.format, self.gated = format, gated
        found = op.quantize(self.proj.weight, int(format[-1]), GROUP, symmetric=format[0] == "i")
        self.q, self.scales, self.zeros = (*found, None)[:3]
        if format[-1] == "4":
            self.q = op.pack_int4(self.q)

    def forward(self, x: nn.Tensor) -> nn.Tensor:
        attrs = {"bias": self.proj.bias, "format": self.format, "group_size": GROUP}
        y = op.linear_int8(x, self.q, self.scales, self.zeros, **attrs)
        gate, up = op.split(y, 2, -1)
        return op.silu(gate) * up if self.gated else y


MODELS |= {
    f"{'gated ' * gated}{format} by int8": (
        partial(Integers, format, gated),
        f"packed_int8_activations_{'gated_' * gated}product",
    )
    for format in ("int8", "int4", "uint4")
    for gated in (False, True)
}


def lifted(name: str):
    model = MODELS[name][0]()
    return outline(lift_transform_params(model.export({"forward": {"x": X}}), shared_transform=True))


@pytest.mark.parametrize("name", MODELS)
def test_results_stay_the_same_packed_and_lifted_again(name):
    ir = lifted(name)
    packed = pack_weights(ir)
    assert MODELS[name][1] in [f.attrs.get("region") for f in packed.functions]
    expect_same_results(ir, packed)
    assert first_difference(parse(str(packed)), packed) is None
    assert pack_weights(packed) is packed
    again = lift_transform_params(packed, shared_transform=True)
    expect_same_results(ir, again)
    # Nothing of the order is left to compute on a call.
    assert [type(b.value).__name__ for b in again["forward"].bindings] == ["FunctionCall"]


def transformed(name: str) -> tuple[dict, torch.Tensor, torch.Tensor | None]:
    torch.manual_seed(0)
    ir = lift_transform_params(pack_weights(lifted(name)), shared_transform=True)
    executable = nn.compile(ir)
    weights = {
        w.name: torch.randn(*w.type.shape) for t in executable.program.transforms.values() for w in t.weights
    }
    results = executable.transform_params(weights)
    call = ir["forward"].bindings[-1].value
    names = [p.name for p in ir[call.function].params]
    return (
        {n: results.get(getattr(a, "name", "")) for n, a in zip(names, call.args, strict=True)},
        weights,
        executable,
    )


def test_gate_and_up_alternate_as_the_epilogue_wants_them():
    operands, weights, _ = transformed("gated")
    assert torch.equal(operands["weight"], interleave(weights["gate.weight"], weights["up.weight"]))
    assert torch.equal(operands["bias"], interleave(weights["gate.bias"], weights["up.bias"]))


@pytest.mark.parametrize("name", ["int4", "int4 with zero points"])
def test_4_bit_weights_lie_as_the_kernel_unpacks_them(name):
    operands, weights, _ = transformed(name)
    weight = weights["proj.weight"]
    assert operands["weight"].dtype == torch.uint8
    dense = stored.dequantize_int4(operands["weight"], operands["scales"], operands.get("zero_points"), GROUP)
    # The kernel's own unpacking gives what quantising the weight and dequantising it gives.
    symmetric = name == "int4"
    quantized = [t for t in op.quantize(weight, 4, GROUP, symmetric=symmetric)]
    expected = op.dequantize(*quantized, *([None] if symmetric else []), GROUP)
    torch.testing.assert_close(dense, expected)
    most = (weight.unflatten(1, (-1, GROUP)).abs().amax(-1) / 7).repeat_interleave(GROUP, 1)
    assert ((dense - weight).abs() <= most).all()


def test_scales_of_8_bit_weights_are_turned():
    operands, weights, _ = transformed("int8")
    dense = stored.dequantize_int8(operands["weight"], operands["scales"])
    assert ((dense - weights["proj.weight"]).abs() <= operands["scales"].amax() * 0.51).all()


@pytest.mark.parametrize("name", ["int8 by int8", "gated uint4 by int8"])
def test_panels_hold_four_bytes_of_each_of_16_outputs_after_one_another(name):
    operands, weights, _ = transformed(name)
    plain = nn.compile(lifted(name)).transform_params(weights).values()
    for part, word in (("weight", 4), ("scales", 1), ("zero_points", 1)):
        packed = operands.get(part)
        if packed is None:
            continue
        (as_is,) = [x for x in plain if x.shape == packed.shape and x.dtype == packed.dtype]
        rows, size = packed.shape
        for output in (0, 15, 16, rows - 1):
            for at in (0, size // word - 1):
                begin = (output // 16 * 16 * size // word + at * 16 + output % 16) * word
                found = packed.flatten()[begin : begin + word]
                assert torch.equal(found, as_is[output, at * word : (at + 1) * word])


def test_only_what_is_lifted_is_packed_where_nothing_lifts_it_afterwards():
    ir = outline(MODELS["int8 by int8"][0]().export({"forward": {"x": X}}))
    assert pack_weights(ir, only_lifted=True) is ir
    packed = pack_weights(lifted("int8 by int8"), only_lifted=True)
    again = lift_transform_params(packed, only_lifted=True)
    assert [type(b.value).__name__ for b in again["forward"].bindings] == ["FunctionCall"]
    assert lift_transform_params(again, only_lifted=True) is again
    assert lift_transform_params(ir, only_lifted=True) is ir


def test_packing_adds_no_bytes():
    for name in MODELS:
        ir = lifted(name)
        before, after = (
            sum(p.type.shape[0] * p.type.shape[-1] for p in i["forward"].weights)
            for i in (ir, lift_transform_params(pack_weights(ir), shared_transform=True))
        )
        assert before == after, name


@pytest.mark.parametrize("gated", [False, True])
def test_blocks_are_read_where_they_lie(gated):
    class Blocks(nn.Module):
        def __init__(self) -> None:
            self.proj = nn.Linear(256, 64, bias=False)
            self.blocks = op.quantize_blocks(self.proj.weight, "q4_k")

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            y = op.linear_int8(x, self.blocks, format="q4_k")
            gate, up = op.split(y, 2, -1)
            return op.silu(gate) * up if gated else y

    ir = Blocks().export({"forward": {"x": spec.Tensor(["n", 256], "float32")}})
    ir = outline(lift_transform_params(ir, shared_transform=True))
    of = f"int8_activations_{'gated_' * gated}product"
    assert [f.attrs["region"] for f in ir.functions if f.kind == "fused"] == [of]
    assert pack_weights(ir) is ir


def test_a_weight_that_is_an_input_stays_as_it_is():
    class Given(nn.Module):
        def forward(self, x: nn.Tensor, w: nn.Tensor) -> nn.Tensor:
            gate, up = op.split(op.linear(x, w), 2, -1)
            return op.silu(gate) * up

    ir = outline(Given().export({"forward": {"x": X, "w": spec.Tensor([2 * F, D], "float32")}}))
    assert [f.attrs["region"] for f in ir.functions if f.kind == "fused"] == ["gated_product"]
    assert pack_weights(ir) is ir


def test_methods_and_shared_layers_read_one_packed_copy():
    class Model(nn.Module):
        def __init__(self) -> None:
            self.layers = [Gated(), Gated()]
            self.back = nn.Linear(F, D, bias=False)

        def run(self, x: nn.Tensor) -> nn.Tensor:
            for layer in self.layers:
                x = self.back(layer(x))
            return x

        def one(self, x: nn.Tensor) -> nn.Tensor:
            return self.run(x)

        def two(self, x: nn.Tensor) -> nn.Tensor:
            return self.run(x) * 2.0

    ir = Model().export({"one": {"x": X}, "two": {"x": spec.Tensor([3, D], "float32")}})
    ir = outline(lift_transform_params(ir, shared_transform=True))
    again = lift_transform_params(pack_weights(ir), shared_transform=True)
    expect_same_results(ir, again)
    packed = [p.name for p in again["one"].weights]
    assert packed == [p.name for p in again["two"].weights]
    assert len(packed) == 5


def test_a_method_and_a_layer_that_others_call_read_one_packed_copy():
    class Model(nn.Module):
        def __init__(self) -> None:
            self.layers = [Gated(), Gated()]
            self.back = nn.Linear(F, D, bias=False)

        def all(self, x: nn.Tensor) -> nn.Tensor:
            for layer in self.layers:
                x = self.back(layer(x))
            return x

        def last(self, x: nn.Tensor) -> nn.Tensor:
            return self.all(x)[-1:]

    x = {"x": spec.Tensor([nn.Dim("n", min=1), D], "float32")}
    ir = bubble_up_slices(lift_transform_params(Model().export({"all": x, "last": x}), shared_transform=True))
    assert str(ir["last"]).count("@Gated(") < str(ir["all"]).count("@Gated(") == 2
    again = lift_transform_params(pack_weights(outline(ir)), shared_transform=True)
    expect_same_results(ir, again)
    assert [p.name for p in again["last"].weights] == [p.name for p in again["all"].weights]
    assert len(again["all"].weights) == 5
    assert str(again).count("@interleaved_product") == 3  # in the layer, and of one row


def test_a_weight_that_something_else_reads_is_not_packed_beside_it():
    class Model(nn.Module):
        def __init__(self) -> None:
            self.gated = Gated()

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return self.gated(x)

        def rows(self, indices: nn.Tensor) -> nn.Tensor:
            return op.take(self.gated.weight, indices, axis=0)

    ir = Model().export({"forward": {"x": X}, "rows": {"indices": spec.Tensor(["m"], "int64")}})
    ir = outline(lift_transform_params(ir, shared_transform=True))
    assert pack_weights(ir) is ir


def test_private_functions_have_names_of_their_own_for_weights():
    text = """
    private def rows(i: input int64[2], w: weight float16[6, 4]) -> float16[2, 4] {
        y: float16[2, 4] = take(w, i, axis=0)
        return y
    }
    def main[n](x: input float16[n, 4], i: input int64[2], w: weight float16[6, 4], table: weight float16[6, 4])
            -> (float16[n, 3], float16[2, 4]) {
        linear: float16[n, 6] = linear(x, w)
        split: (float16[n, 3], float16[n, 3]) = split(linear, indices_or_sections=2, axis=1)
        gate: float16[n, 3] = split[0]
        up: float16[n, 3] = split[1]
        silu: float16[n, 3] = silu(gate)
        y: float16[n, 3] = multiply(silu, up)
        z: float16[2, 4] = @rows(i, table)
        both: (float16[n, 3], float16[2, 4]) = (y, z)
        return both
    }
    """
    assert "interleaved_product" in pack_weights(outline(parse(text)))


def test_weights_are_stored_as_kernels_say_and_otherwise_as_they_are():
    """A kernel's record has the layout that it wants, which is that of its own region."""
    kernels = [kernel for kernel in (*CUDA, *CPU) if kernel.layout is not None]
    assert {kernel.layout.region for kernel in kernels} == {*LAYOUTS}
    assert all(kernel.layout.region == kernel.op for kernel in kernels)
    ir = lifted("gated")
    assert pack_weights(ir, layouts=()) is ir
    of_others = [layout for layout in LAYOUTS.values() if layout.of != "gated_product"]
    assert pack_weights(ir, layouts=of_others) is ir
    assert "interleaved_product" in str(pack_weights(ir, layouts=[LAYOUTS["interleaved_product"]]))
