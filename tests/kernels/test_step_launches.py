# SPDX-License-Identifier: Apache-2.0
"""What a decode step launches on sm_90, counted without a GPU: the session's tensors have no data, and a launcher keeps the names of kernels."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from graph_runs import captured_by
from nnfront_kernels.common import Plan, launched_by, planning_for
from nnfront_models import llama
from torch.utils._python_dispatch import TorchDispatchMode

import nnfront as nn
from nnfront.backends.cuda.sampling import DeviceSampler
from nnfront.backends.device import META, default_device, overriding_device
from nnfront.backends.registry import backend_of
from nnfront.backends.table import resolver
from nnfront.lower import Run

CONFIG = dataclasses.replace(
    llama.TINY, dtype="bfloat16", hidden_size=256, intermediate_size=512, head_dim=64, vocab_size=512
)
# What torch does without a launch, beside views: memory that is asked for.
NO_LAUNCHES = ("empty", "empty_strided", "empty_like", "lift_fresh")


class Ops(TorchDispatchMode):
    """Writes down which ops of torch run on the tensors of a device, or of any."""

    def __init__(self, names: list[str], device: str | None = "meta") -> None:
        super().__init__()
        self._names, self._device = names, device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # an op that is several others comes as these
            result = func.decompose(*args, **(kwargs or {}))
        if result is not NotImplemented:
            return result
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        on_device = isinstance(result, torch.Tensor) and self._device in (None, result.device.type)
        is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if name not in NO_LAUNCHES and on_device and not is_view:
            self._names.append(name)
        return result


class Noting:
    """A capturer that runs what it captures once, and keeps the names of what that does."""

    def __init__(self, names: list[str]) -> None:
        self._names = names

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self._names.clear()
        run()
        self.captured = [*self._names]
        return lambda: None

    def is_capturing(self) -> bool:
        return False

    def turn(self) -> AbstractContextManager[None]:
        return nullcontext()


@cache
def launched(
    layers: int, quant: str | None, batch: int, adapters: bool = False, captured: bool = False
) -> Counter[str]:
    """The launches of a step of a Llama with so many layers, or of what is captured of one, by the kernel's name or by that of torch's op."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=layers)
    model = llama.build(config)
    weights = {
        name: torch.zeros([int(size) for size in p.shape], dtype=torch.bfloat16)
        for name, p in model.named_parameters()
    }
    ir = model.export(llama.export_spec(config))
    more: tuple[torch.Tensor, ...] = ()
    if adapters:
        changed = {name: 8 for name in weights if name.endswith("o_proj.weight")}
        ir = nn.passes.add_adapters(ir, changed, 3)
        for name in changed:
            out, into = weights[name].shape
            weights[f"{name}.lora_a"] = torch.zeros(3, 8, into, dtype=torch.bfloat16)
            weights[f"{name}.lora_b"] = torch.zeros(3, out, 8, dtype=torch.bfloat16)
        more = (torch.zeros(batch, dtype=torch.int32, device=META),)
    if quant is not None:
        ir = nn.passes.quantize_weights(ir, quant)
    ir = nn.passes.lift_transform_params(ir, shared_transform=True)
    executable = nn.compile(ir, target="cuda:sm_90")
    backend_of("cpu")  # it looks at what torch computes, on tensors that have data
    names: list[str] = []

    def kept(plan: Plan) -> None:
        names.append(plan.kernel.__name__.removesuffix("_kernel"))

    noting = Noting(names)
    with overriding_device(META), default_device(META), torch.no_grad():
        with planning_for("sm_90"), launched_by(kept):
            with captured_by(noting if captured else None):
                session = executable.load(weights)
            tokens = session.make_cache(batch=batch, max_seq=128)
            session["prefill"](torch.zeros(batch, 9, dtype=torch.int64), tokens, *more)
            names.clear()
            with Ops(names, None if captured else "meta"):  # weights stay where they are
                for _ in range(1 + captured):
                    session["decode"](torch.zeros(batch, 1, dtype=torch.int64), tokens, *more)
    return Counter(noting.captured if captured else names)


def of_a_layer(quant: str | None, batch: int, *, adapters: bool = False) -> dict[str, int]:
    return dict(launched(3, quant, batch, adapters) - launched(2, quant, batch, adapters))


ATTENTION = {"attention_decode": 1}
LAYERS = [
    # qkv, output and its residual, gate and up, down and its residual; the first and third normalise what they read
    (None, 1, ATTENTION | {"matmul_small_m": 4}),
    (None, 16, ATTENTION | {"matmul_small_m": 4}),
    (None, 17, ATTENTION | {"matmul_small_m": 4, "norm": 2}),
    ("int4", 1, ATTENTION | {"matmul_int4": 4}),
    ("int8", 16, ATTENTION | {"matmul_int8": 4}),
    ("fp8", 1, ATTENTION | {"matmul_fp8": 4, "quantize_fp8": 4}),
    ("fp8", 32, ATTENTION | {"matmul_fp8": 4, "quantize_fp8": 4}),
]


@pytest.mark.parametrize(("quant", "batch", "expected"), LAYERS)
def test_a_layer_of_a_decode_step_is_a_launch_for_each_product_and_one_for_attention(quant, batch, expected):
    assert of_a_layer(quant, batch) == expected


@pytest.mark.parametrize("batch", [1, 16])
def test_beside_its_layers_a_captured_step_looks_tokens_up_turns_positions_and_multiplies_with_the_head(
    batch,
):
    layers, found = of_a_layer(None, batch), launched(2, None, batch, captured=True)
    beside = found - Counter({name: 2 * count for name, count in layers.items()})
    ours = {"rope_angles": 1, "matmul_small_m": 1}
    # Tokens are looked up; lengths with the new token are for attention, and for the next step.
    assert beside == ours | {"index_select": 1, "add": 1, "add_": 1}


def test_an_adapter_of_a_product_takes_two_launches_more():
    plain = of_a_layer(None, 2)
    assert of_a_layer(None, 2, adapters=True) == plain | {"shrink": 1, "expand": 1}


def launches_of_experts(quant: str | None, top_k: int) -> list[str]:
    """Of a token's experts: launches, and ops of torch. Tensors are on the CPU: where experts are quantised, the host asks for values."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            sizes = (16, 256, 128), (16, 128, 128)
            self.gate_up, self.down = (nn.Parameter(size, "bfloat16") for size in sizes)

        def forward(self, x: nn.Tensor, experts: nn.Tensor, shares: nn.Tensor) -> nn.Tensor:
            return nn.op.moe_mlp(x, self.gate_up, self.down, experts, shares)

    choice = {
        "experts": nn.spec.Tensor(["n", top_k], "int32"),
        "shares": nn.spec.Tensor(["n", top_k], "bfloat16"),
    }
    ir = Layer().export({"forward": {"x": nn.spec.Tensor(["n", 128], "bfloat16"), **choice}})
    if quant is not None:
        ir = nn.passes.quantize_weights(ir, quant)
    ir = nn.passes.lift_transform_params(ir, shared_transform=True)
    method = nn.compile(ir, target="cuda:sm_90").program.methods["forward"]
    (run,) = (run for run in method.body.walk() if isinstance(run, Run) and "experts" in run.op)
    operands: list[torch.Tensor | None] = []
    for type in (method.slots[slot].type for slot in run.inputs):
        sizes = [size if isinstance(size, int) else 1 for size in type.shape] if type is not None else []
        operands.append(None if type is None else torch.zeros(sizes, dtype=getattr(torch, type.dtype)))
        if type is not None and type.dtype == "int32":
            operands[-1] = torch.arange(top_k, dtype=torch.int32)[None]
    names: list[str] = []
    computed = resolver("cuda:sm_90")(run)
    with planning_for("sm_90"), launched_by(lambda plan: names.append(plan.kernel.__name__)), torch.no_grad():
        with Ops(names, None):
            computed(*operands)
    return names


def test_experts_of_a_token_are_six_launches_however_many_there_are():
    assert len(launches_of_experts(None, 1)) == len(launches_of_experts(None, 8)) == 6


def test_quantised_experts_are_some_thirty_launches_of_torch_each_as_the_docs_say():
    one, eight = (len(launches_of_experts("int4", top_k)) for top_k in (1, 8))
    assert 25 <= (eight - one) / 7 <= 35


ONE_BLOCK, IN_PARTS = "sampling", ("largest_in_parts", "draw_in_parts")


@pytest.mark.parametrize(
    ("vocab", "options", "kernels"),
    [
        (1000, {"temperature": 1.0, "top_p": 0.9}, (ONE_BLOCK,)),
        (152064, {"temperature": 0.0}, IN_PARTS[:1]),
        (152064, {"temperature": 1.0}, IN_PARTS),
        (152064, {"temperature": 1.0, "top_k": 50, "top_p": 0.9}, IN_PARTS),
    ],
)
def test_a_draw_is_a_launch_or_two_for_many_tokens_and_fills_nothing(vocab, options, kernels):
    names: list[str] = []
    sampler = DeviceSampler({"top_k": None, "top_p": None, "min_p": None, **options}, 0)
    with planning_for("sm_90"), launched_by(lambda plan: names.append(plan.kernel.__name__)):
        for _ in range(2):
            names.clear()
            with Ops(names, device="cpu"):
                sampler(torch.empty(3, vocab), None)
    assert [name for name in names if name.endswith("_kernel")] == [f"{name}_kernel" for name in kernels]
    assert not {"zeros", "zero_", "fill_", "copy_"} & set(names)
