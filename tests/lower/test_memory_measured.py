# SPDX-License-Identifier: Apache-2.0
"""Plans against the bytes that torch's allocator gives out: language models, kernels with a workspace, every op."""

import contextlib
import dataclasses
import functools
import io
from typing import Any

import pytest
import torch
from few_of import few_of
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from memory_checks import measured_peak
from nnfront_models import llama
from op_cases import Layer, type_of
from op_strategies import CASES
from test_every_op_runs import ELSEWHERE, canonical_attrs
from torch.nn import functional as F

import nnfront as nn
from nnfront import op, spec
from nnfront.backends.cpu import in_c, quantized_pieces
from nnfront.backends.cpu.backend import CPU
from nnfront.backends.lowering import lower
from nnfront.backends.table import memory_policy
from nnfront.errors import NnfrontError
from nnfront.ir import OPS, FunctionBuilder, IRModule, Scalar, TensorType, parse
from nnfront.lower import Argument, Program, Run
from nnfront.memory.allocations import Footprints, metered
from nnfront.memory.layout import contiguous
from nnfront.memory.plan import plan_memory
from nnfront.session import Session

MEMORY = memory_policy("cpu")

CONFIG = llama.Config(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=4096,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    max_position_embeddings=1024,
)
SEQ = 512
# What libraries keep for each thread is not planned: 100 to 250 KiB.
SCRATCH = 256 * 1024


@functools.cache
def library_scratch(dtype: str, rows: int = 512, outputs: int = 384, columns: int = 2048) -> int:
    """What torch's product and attention hold by themselves, which no plan knows: with AMX they lay their operands out anew."""
    kind = getattr(torch, dtype)
    x, weight = torch.randn(rows, columns).to(kind), torch.randn(outputs, columns).to(kind)
    q = torch.randn(1, 8, rows, 64).to(kind)
    calls = {
        "linear": (lambda: F.linear(x, weight), rows * outputs),
        "attention": (lambda: F.scaled_dot_product_attention(q, q, q, is_causal=True), q.numel()),
    }
    return max([SCRATCH, *(measured_peak(call) - count * kind.itemsize for call, count in calls.values())])


def random(argument: Argument) -> torch.Tensor:
    assert isinstance(argument.type, TensorType)
    return torch.randn([int(s) for s in argument.type.shape]).to(getattr(torch, argument.type.dtype))


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request):
    config = dataclasses.replace(CONFIG, dtype=request.param)
    ir = llama.build(config).export(llama.export_spec(config))
    executable = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True))
    weights = {w.name: random(w) for t in executable.program.transforms.values() for w in t.weights}
    return executable, executable.load(weights), request.param


@pytest.mark.parametrize("name", ["logits", "prefill"])
def test_a_language_model_takes_what_its_plan_says(model, name):
    executable, session, dtype = model
    plan = executable.memory(batch=1, seq=SEQ, max_seq=SEQ).methods[name].plan
    ids = torch.randint(0, CONFIG.vocab_size, (1, SEQ))
    caches = [] if name == "logits" else [session.make_cache(batch=1, max_seq=SEQ)]
    peak = measured_peak(lambda: session[name](ids, *caches))
    assert plan.peak > 4 * SCRATCH
    libraries = library_scratch(dtype, SEQ, CONFIG.intermediate_size, CONFIG.hidden_size)
    # Calls of C that are one hold their operands and their results, which are what a slice behind them reads, and their memory has a gap: no library
    # holds anything beside them where none multiplies bfloat16.
    held = 4 * SEQ * CONFIG.hidden_size * 2 if dtype == "bfloat16" else 0
    assert plan.peak <= peak <= 1.05 * plan.peak + libraries + held


HEADS = "D[1, 256, 8, 64]"
QKV = f"q: input {HEADS}, k: input {HEADS}, v: input {HEADS}"
# Parameters, D the dtype, and a call that gets the kernel.
KERNEL_CALLS = {
    "rms_norm_last": (
        "x: input D[256, 512], w: weight D[512]",
        "D[256, 512] = rms_norm(x, w, axes=(1,))",
    ),
    "rms_norm_last without weight": ("x: input D[256, 512]", "D[256, 512] = rms_norm(x, None, axes=(1,))"),
    "rms_norm_last with a wider weight": (
        "x: input D[256, 512], w: weight float32[512]",
        "D[256, 512] = rms_norm(x, w, axes=(1,))",
    ),
    "layer_norm_last": (
        "x: input D[256, 512], w: weight D[512], b: weight D[512]",
        "D[256, 512] = layer_norm(x, w, b, normalized_shape=(512,))",
    ),
    "rope_rotated": (
        f"x: input {HEADS}, cos: input D[1, 256, 32], sin: input D[1, 256, 32]",
        f"{HEADS} = rope(x, cos, sin)",
    ),
    "rope_rotated in part": (
        f"x: input {HEADS}, cos: input D[1, 256, 16], sin: input D[1, 256, 16]",
        f"{HEADS} = rope(x, cos, sin)",
    ),
    "linear_wide": (
        "x: input D[256, 512], w: weight D[1024, 512]",
        'float32[256, 1024] = linear(x, w, out_dtype="float32")',
    ),
    "attention_fused": (QKV, f"{HEADS} = attention(q, k, v)"),
    "attention_fused in a window": (QKV, f"{HEADS} = attention(q, k, v, window=16)"),
    "sdpa_fused": (
        f"{QKV}, mask: input D[256, 256]",
        f"{HEADS} = scaled_dot_product_attention(q, k, v, mask, is_causal=True)",
    ),
}


@pytest.mark.parametrize("dtype", few_of(["bfloat16", "float32", "float16"]))
@pytest.mark.parametrize("name", KERNEL_CALLS)
def test_a_kernel_holds_what_the_table_says(name, dtype):
    params, call = (text.replace("D[", f"{dtype}[") for text in KERNEL_CALLS[name])
    program = lower(parse(f"def main({params}) -> {call.partition(' =')[0]} {{ y: {call} return y }}"))
    method = program.methods["main"]
    inputs = [random(a) for a in method.arguments]
    run = Session(program, {w.name: random(w) for w in method.weights})["main"]
    run(*inputs)
    peak = measured_peak(lambda: run(*inputs))
    plan = plan_memory(method, {}, MEMORY)
    assert plan.peak <= peak <= plan.peak + library_scratch(dtype)


# What there is in C takes few rows of bfloat16.
ROWS = [(512, "float32"), (512, "bfloat16"), (512, "float16"), (1, "float16")]
ROWS += [(1, "bfloat16"), (8, "bfloat16"), ("1 without C", "bfloat16")]


class Quantized(nn.Module):
    def __init__(self, dtype: str) -> None:
        self.proj = nn.Linear(2048, 2048, bias=False, dtype=dtype)

    def plain(self, x: nn.Tensor) -> nn.Tensor:
        return self.proj(x)

    def finished(self, x: nn.Tensor) -> nn.Tensor:
        return op.gelu(self.proj(x)) + x

    def widened(self, x: nn.Tensor) -> nn.Tensor:
        return op.astype(self.proj(x) * 2.0, "float64")

    def gated(self, x: nn.Tensor) -> nn.Tensor:
        gate, up = op.split(self.proj(x), 2, -1)
        return op.silu(gate) * up


@pytest.mark.parametrize(("rows", "dtype"), few_of(ROWS, 2))
@pytest.mark.parametrize("name", few_of(["gated", "plain", "finished", "widened"]))
@pytest.mark.parametrize("quant", few_of(["fp8", "int8", "mxfp4", "int4"], 2))
def test_products_with_quantised_weights_hold_what_the_table_says(quant, name, rows, dtype, monkeypatch):
    monkeypatch.setattr(quantized_pieces, "PIECE", 3 << 18)  # pieces that do not divide the outputs
    monkeypatch.setattr(quantized_pieces, "NEAR_PIECE", 3 << 18)
    if rows == "1 without C":
        monkeypatch.setattr(in_c, "NATIVE", None)
        rows = 1
    ir = Quantized(dtype).export({name: {"x": spec.Tensor([rows, 2048], dtype)}})
    executable = nn.compile(
        nn.passes.lift_transform_params(nn.passes.quantize_weights(ir, quant), shared_transform=True)
    )
    assert any(quant in run.kernel for run in executable.program.methods[name].body.walk())
    kind = getattr(torch, dtype)
    run = executable.load({"proj.weight": torch.randn(2048, 2048).to(kind)})[name]
    x = torch.randn(rows, 2048).to(kind)
    run(x)
    peak = measured_peak(lambda: run(x))
    plan = executable.memory().methods[name].plan
    assert plan.peak <= peak <= plan.peak + library_scratch(dtype, x.shape[0])


class Experts(nn.Module):
    """Two experts, plain or quantised."""

    def __init__(self, quant: str | None, **options: Any) -> None:
        width = 2048 if options.get("gated", True) else 1024
        self.quant, self.options = quant, options
        self.weights = [nn.Parameter([2, width, 512]), nn.Parameter([2, 512, 1024])]
        if quant:
            self.stored = [op.quantize(w, axis=-1, format=quant) for w in self.weights]
            self.stored = [(op.pack_int4(q), scale) for q, scale in self.stored]

    def forward(self, x: nn.Tensor, chosen: nn.Tensor, shares: nn.Tensor) -> nn.Tensor:
        matrices = self.weights
        if self.quant:
            parts = [(op.unpack_int4(q, signed=self.quant == "int4"), s) for q, s in self.stored]
            matrices = [op.dequantize(q, s, format=self.quant, dtype="float32") for q, s in parts]
        return op.moe_mlp(x, *matrices, chosen, shares, **self.options)


@pytest.mark.parametrize(
    "options", few_of([{}, {"limit": 1.0, "interleaved": True}, {"gated": False}]), ids=str
)
@pytest.mark.parametrize("quant", [None, "int4", "mxfp4"])
def test_experts_hold_what_the_table_says_when_one_has_all_tokens(quant, options):
    module = Experts(quant, **options)
    of_tokens = {"chosen": spec.Tensor([512, 1], "int64"), "shares": spec.Tensor([512, 1])}
    ir = module.export({"forward": {"x": spec.Tensor([512, 512]), **of_tokens}})
    executable = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True))
    run = executable.load({n: torch.randn(p.shape) for n, p in module.named_parameters()})["forward"]
    operands = torch.randn(512, 512), torch.zeros(512, 1, dtype=torch.int64), torch.rand(512, 1)
    run(*operands)
    peak = measured_peak(lambda: run(*operands))
    plan = executable.memory().methods["forward"].plan
    assert plan.peak <= peak <= plan.peak + SCRATCH


def test_every_kernel_says_what_it_holds():
    assert {kernel.name for kernel in CPU.kernels} - OPS.keys() <= MEMORY.workspaces.keys()


def lowered(op, case) -> tuple[Program, list[torch.Tensor]]:
    """A program that is one call."""
    operands = [None if isinstance(x, Layer) else x for x in case.operands]
    types = [type_of(x) for x in operands]
    try:
        attrs = canonical_attrs(op, types, case.attrs)
    except NnfrontError:
        reject()  # some of the drawn calls are wrong on purpose
    builder = FunctionBuilder("main")
    atoms = [
        builder.param(f"x{i}", types[i], "input")
        if isinstance(x, torch.Tensor)
        else None
        if x is None
        else Scalar(x)
        for i, x in enumerate(operands)
    ]
    result = builder.call(op, *atoms, **attrs)
    return lower(IRModule([builder.finish(result)])), [x for x in operands if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("name", sorted(set(OPS) - ELSEWHERE - {"extern"}))
@settings(max_examples=2, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_result_shares_memory_with_an_operand_where_the_plan_says_so(name, data):
    program, inputs = lowered(OPS[name], data.draw(CASES[name]))
    run = Session(program, {})["main"]
    with contextlib.redirect_stdout(io.StringIO()):
        got = run(*inputs)
    results = got if isinstance(got, tuple) else () if got is None else (got,)
    plan = plan_memory(program.methods["main"], {}, MEMORY)
    own = {slot for buffer in plan.buffers for slot in buffer.slots}
    given_memory = {x.untyped_storage().data_ptr() for x in inputs if x.numel()}
    for slot, tensor in zip(program.methods["main"].result.leaves(), results, strict=True):
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            assert (tensor.untyped_storage().data_ptr() in given_memory) == (slot not in own)


@pytest.mark.parametrize("name", sorted(op.name for op in OPS.values() if not op.scratch and not op.is_view))
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_an_op_that_is_not_metered_takes_what_a_meter_would_find(name, data):
    program, _ = lowered(OPS[name], data.draw(CASES[name]))
    method = program.methods["main"]
    runs = [i for i in (*method.setup.instructions, *method.body.instructions) if isinstance(i, Run)]
    for run in [r for r in runs if r.kernel == name]:
        slots = [method.slots[i] for i in run.inputs]
        operands = [
            contiguous(s.type.shape, s.type.dtype) if isinstance(s.type, TensorType) else s.value
            for s in slots
        ]
        declared = [contiguous(t.shape, t.dtype) for t in (method.slots[i].type for i in run.outputs)]
        assert Footprints(MEMORY).of(run, operands, {}, declared) == metered(run, operands, {}, declared)
