# SPDX-License-Identifier: Apache-2.0
"""The experts of a feed-forward layer on a CPU against a loop over tokens in float64, plain and quantised."""

import pytest
import torch
from few_of import few_of

import nnfront as nn
from nnfront import op, ops, spec
from nnfront.backends.cpu import in_c, quantized_pieces
from nnfront.backends.table import resolver
from nnfront.lower import Run, Structure

resolve = resolver("cpu")
EXPERTS, HIDDEN, SIZE = 5, 64, 32


def one_by_one(x, gate_up, down, chosen, weights, gate_up_bias=None, down_bias=None, **options):
    """Each choice of each token by itself, written out; and the sizes of what is added up."""
    expected, sizes = torch.zeros(x.shape).double(), torch.zeros(x.shape).double()
    activations = {
        "silu": lambda z: z * torch.sigmoid(options.get("alpha", 1.0) * z),
        "gelu_tanh": lambda z: 0.5 * z * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3))),
        "relu2": lambda z: z.clamp(min=0) ** 2,
    }
    act, limit = activations[options.get("activation", "silu")], options.get("limit") or torch.inf
    for token, slot in torch.cartesian_prod(torch.arange(len(x)), torch.arange(chosen.shape[1])).tolist():
        expert = int(chosen[token, slot])
        if not 0 <= expert < len(gate_up):
            continue
        inner = gate_up[expert].double() @ x[token].double()
        inner = inner if gate_up_bias is None else inner + gate_up_bias[expert].double()
        if options.get("gated", True):
            half = len(inner) // 2
            gate, up = (
                (inner[::2], inner[1::2]) if options.get("interleaved") else (inner[:half], inner[half:])
            )
            inner = act(gate.clamp(max=limit)) * (up.clamp(-limit, limit) + options.get("up_offset", 0.0))
        else:
            inner = act(inner)
        weight = weights[token, slot].double()
        bias = 0 if down_bias is None else down_bias[expert].double()
        expected[token] += (down[expert].double() @ inner + bias) * weight
        sizes[token] += (down[expert].double().abs() @ inner.abs() + 1) * weight.abs()
    return expected, sizes


def made(tokens: int, dtype: torch.dtype, gated: bool = True):
    width = 2 * SIZE if gated else SIZE
    return {
        "x": torch.randn(tokens, HIDDEN).to(dtype),
        "gate_up": torch.randn(EXPERTS, width, HIDDEN).to(dtype) / 4,
        "down": torch.randn(EXPERTS, HIDDEN, SIZE).to(dtype) / 4,
        "chosen": torch.randint(-1, EXPERTS + 1, (tokens, 3)),  # -1 and 5 are no experts: they give nothing
        "weights": torch.rand(tokens, 3).to(dtype),
    }


def assert_close(got, expected, sizes, dtype):
    # Gate, up, their product and the result are rounded.
    assert got.dtype == dtype
    assert ((got.double() - expected).abs() <= sizes * torch.finfo(dtype).eps * 4 + 1e-5).all()


OPTIONS = {
    "silu": {},
    "gelu": {"activation": "gelu_tanh"},
    "clamped": {"alpha": 1.702, "limit": 0.7, "up_offset": 1.0, "interleaved": True},
    "interleaved": {"interleaved": True},
    "at most": {"limit": 0.5},
    "without a gate": {"activation": "relu2", "gated": False},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", few_of([0, 1, 9, 2, 40], 3))
@pytest.mark.parametrize("by", ["few rows", "torch"])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lies", few_of(["row by row", "column by column"]))
def test_chosen_experts_agree_with_a_loop_in_float64(lies, name, by, tokens, dtype, monkeypatch):
    if by == "torch":
        monkeypatch.setattr(in_c, "NATIVE", None)
    options, biases = OPTIONS[name], ()
    operands = made(tokens, dtype, options.get("gated", True))
    if name != "silu":
        widths = operands["gate_up"].shape[1], HIDDEN
        biases = tuple(torch.randn(EXPERTS, width).to(dtype) for width in widths)
    if lies == "column by column":
        operands |= {name: operands[name].mT.contiguous().mT for name in ("gate_up", "down")}
    run = Run("moe_mlp_sorted", ops.moe_mlp.name, (), Structure(), options)
    y = resolve(run)(*operands.values(), *biases)
    assert_close(y, *one_by_one(*operands.values(), *biases, **options), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("by", ["few rows", "torch"])
def test_tokens_and_what_is_chosen_for_them_may_be_some_of_more(by, dtype, monkeypatch):
    if by == "torch":
        monkeypatch.setattr(in_c, "NATIVE", None)
    operands = made(9, dtype)
    some = operands | {name: operands[name][::4] for name in ("x", "chosen", "weights")}
    assert not some["weights"].is_contiguous()
    run = Run("moe_mlp_sorted", ops.moe_mlp.name, (), Structure(), {})
    assert_close(resolve(run)(*some.values()), *one_by_one(*some.values()), dtype)


# A format, and how its scales are said: by the format's name, or in groups, with zero points or without.
FORMATS = {
    "int8": {"format": "int8"},
    "int8 in groups": {"format": "int8", "group_size": 8},
    "int4": {"format": "int4"},
    "uint4": {"format": "uint4", "group_size": 16},
    "fp8": {"format": "fp8"},
    "fp8 in groups": {"dtype": "float8_e4m3fn", "group_size": 16, "scale_dtype": "float32"},
    "mxfp4": {"format": "mxfp4"},
    "nvfp4": {"format": "nvfp4"},
}


class Experts(nn.Module):
    """Experts whose matrices are quantised, each in its own way or not at all."""

    def __init__(self, dtype: str, first: str | None, second: str | None, **options) -> None:
        self.options, self.dtype, self.ways = options, dtype, (first, second)
        self.bias = nn.Parameter([EXPERTS, 2 * SIZE], dtype)
        self.gate_up = nn.Parameter([EXPERTS, 2 * SIZE, HIDDEN], dtype)
        self.down = nn.Parameter([EXPERTS, HIDDEN, SIZE], dtype)
        self.stored = [
            (weight,) if way is None else op.quantize(weight, axis=-1, **FORMATS[way])
            for weight, way in ((self.gate_up, first), (self.down, second))
        ]
        self.stored = [
            (op.pack_int4(codes), *scales)
            if way and "4" in FORMATS[way].get("format", "")
            else (codes, *scales)
            for (codes, *scales), way in zip(self.stored, self.ways, strict=True)
        ]

    def matrix(self, i: int) -> nn.Tensor:
        (codes, *scales), name = self.stored[i], self.ways[i]
        if name is None:
            return codes
        way = FORMATS[name]
        format = way.get("format")
        if "4" in (format or ""):
            codes = op.unpack_int4(codes, signed=name == "int4")
        if name == "nvfp4":  # nothing of this may be left ahead of the experts
            scale, factor = scales
            scales = [op.astype(scale, "float32") * factor]
        return op.dequantize(
            codes, *scales, group_size=way.get("group_size"), dtype=self.dtype, format=format
        )

    def forward(self, x: nn.Tensor, chosen: nn.Tensor, weights: nn.Tensor) -> nn.Tensor:
        return op.moe_mlp(x, self.matrix(0), self.matrix(1), chosen, weights, self.bias, **self.options)


def quantized(dtype: str, first: str | None, second: str | None, **options):
    of_tokens = {"chosen": spec.Tensor(["n", 3], "int64"), "weights": spec.Tensor(["n", 3], dtype)}
    module = Experts(dtype, first, second, **options)
    ir = module.export({"forward": {"x": spec.Tensor(["n", HIDDEN], dtype), **of_tokens}})
    return module, nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True))


PAIRS = [(name, name) for name in FORMATS] + [("int4", "int8"), ("mxfp4", None), (None, "int4")]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_quantised_experts_are_what_their_dequantised_matrices_give(pair, dtype, monkeypatch):
    monkeypatch.setattr(quantized_pieces, "PIECE", 7 * HIDDEN)  # pieces that do not divide the outputs
    monkeypatch.setattr(quantized_pieces, "NEAR_PIECE", 7 * HIDDEN)
    module, executable = quantized(dtype, *pair, limit=2.0)
    (run,) = (r for r in executable.program.methods["forward"].body.walk() if r.op != "pack")
    assert run.kernel == "quantized_experts_sorted"
    kind = getattr(torch, dtype)
    weights = {n: torch.randn(p.shape).to(kind) / 4 for n, p in module.named_parameters()}
    session = executable.load(weights)
    module.load_state_dict(weights)
    gate_up, down = nn.eager(lambda: (module.matrix(0), module.matrix(1)))
    for tokens in (0, 1, 2, 40):
        operands = {**made(tokens, kind), "gate_up": gate_up, "down": down}
        got = session["forward"](operands["x"], operands["chosen"], operands["weights"])
        exact = one_by_one(*operands.values(), weights["bias"], limit=2.0)
        assert_close(got, *exact, kind)
