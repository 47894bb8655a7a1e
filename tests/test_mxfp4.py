# SPDX-License-Identifier: Apache-2.0
"""MXFP4 weights, against plain numpy by the text of OCP Microscaling Formats 1.0: e2m1 elements, a power of two for each 32."""

from pathlib import Path

import numpy as np
import pytest
import torch
from nnfront_models import llama

import nnfront as nn
from nnfront import op, spec
from nnfront.backends.cpu import quantized_pieces
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.table import resolver
from nnfront.cli import main
from nnfront.lower import Run, Structure
from nnfront.quant_format import FORMATS

FOLDER = Path(__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m"
MXFP4 = FORMATS["mxfp4"]


def rounded_to_e2m1(v: np.ndarray) -> np.ndarray:
    """To the nearest number with 2 bits of exponent, 1 of mantissa and bias 1, a tie to the even mantissa, beyond 6 to 6."""
    exponent = np.floor(
        np.log2(np.maximum(np.abs(v), 1))
    )  # below 1 numbers are subnormal: in steps of a half
    step = 2.0 ** (np.minimum(exponent, 2) - 1)
    return np.copysign(np.minimum(np.round(np.abs(v) / step) * step, 6), v)


def mxfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes of elements [rows, columns / 2], bytes of scales [rows, columns / 32], and what they stand for."""
    blocks = weight.astype(np.float64).reshape(len(weight), -1, 32)
    largest = np.abs(blocks).max(-1)
    exponents = np.floor(np.log2(np.where(largest == 0, 2.0**-126, largest))) - 2
    exponents = np.clip(exponents, -127, 127)
    elements = rounded_to_e2m1(blocks / 2.0 ** exponents[..., None])
    sizes = np.searchsorted([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.abs(elements))
    codes = (sizes + 8 * np.signbit(elements)).reshape(weight.shape).astype(np.uint8)
    dense = (elements * 2.0 ** exponents[..., None]).reshape(weight.shape)
    return codes[:, ::2] | codes[:, 1::2] << 4, (exponents + 127).astype(np.uint8), dense


def hard(rows: int, columns: int, seed: int) -> np.ndarray:
    """Numbers of all sizes, many of them just between two elements, groups of zeros and of the least numbers among them."""
    rng = np.random.default_rng(seed)
    quarters = rng.integers(-32, 33, (rows, columns)) / 4.0
    scales = 2.0 ** rng.integers(-20, 20, (rows, columns // 32)).repeat(32, 1)
    weight = np.where(rng.random((rows, columns)) < 0.5, quarters, rng.standard_normal((rows, columns)) * 3)
    weight = (weight * scales).astype(np.float32)
    weight[0, :32], weight[1, :32], weight[2, :32] = 0, 1e-45, 3e38
    weight[3, :32] = np.copysign(weight[3, :32] * 2.0**-100, -1)
    return weight


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_and_values_are_those_of_the_specification(seed, dtype):
    weight = torch.from_numpy(hard(8, 128, seed)).to(dtype)
    packed, exponents, dense = mxfp4(weight.double().numpy())
    codes, scales = op.quantize(weight, format="mxfp4")
    assert np.array_equal(op.pack_int4(codes).numpy(), packed)
    assert np.array_equal(scales.numpy(), exponents)
    back = op.dequantize(codes, scales, format="mxfp4", dtype="float32")
    assert np.array_equal(back.double().numpy(), dense)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_finite_number_makes_its_group_nan_and_no_other(value):
    weight = torch.ones(1, 64)
    weight[0, 3] = value
    codes, scales = op.quantize(weight, format="mxfp4")
    assert scales.tolist() == [[255, 125]]
    back = op.dequantize(codes, scales, format="mxfp4", dtype="float32")
    assert back[0, :32].isnan().all()
    assert (back[0, 32:] == 1).all()


@pytest.fixture(scope="module")
def loaded() -> nn.LLM:
    return nn.LLM.load(FOLDER, quant="mxfp4")


def test_a_checkpoint_is_held_in_four_and_a_quarter_bits_a_weight(loaded):
    stored = {n: t for n, t in loaded.session.weights.items() if t.dtype == torch.uint8}
    checkpoint, bits = nn.Checkpoint(FOLDER), 0
    for i in range(4):
        layer = f"model.layers.{i}"
        parts = {
            "self_attn.qkv.weight": [f"self_attn.{n}_proj.weight" for n in "qkv"],
            "self_attn.o_proj.weight": ["self_attn.o_proj.weight"],
            "mlp.gate_up.weight": ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
            "mlp.down_proj.weight": ["mlp.down_proj.weight"],
        }
        for name, sources in parts.items():
            weight = torch.cat([checkpoint[f"{layer}.{source}"] for source in sources])
            packed, exponents, _ = mxfp4(weight.double().numpy())
            assert np.array_equal(stored.pop(f"{layer}.{name}.mxfp4").numpy(), packed)
            assert np.array_equal(stored.pop(f"{layer}.{name}.scales").numpy(), exponents)
            bits += 8 * (packed.nbytes + exponents.nbytes) / (4.25 * weight.numel())
    assert not stored
    assert bits == 16


def test_logits_are_those_of_the_weights_that_the_bytes_stand_for(loaded):
    checkpoint = nn.Checkpoint(FOLDER)
    given = {
        name: torch.from_numpy(mxfp4(checkpoint[name].double().numpy())[2]).to(torch.bfloat16)
        if "proj" in name
        else checkpoint[name]
        for name in checkpoint
    }
    dense = nn.compile(nn.passes.lift_transform_params(nn.export_folder(FOLDER), shared_transform=True))
    ids = torch.randint(5, 500, (1, 9), generator=torch.Generator().manual_seed(1))
    expected, got = dense.load(given)["logits"](ids).float(), loaded.logits(ids).float()
    # Each layer rounds its results to bfloat16, whose last bit the order of sums decides.
    assert (got - expected).abs().max() < 0.1 * expected.std()
    assert (got - expected).abs().mean() < 0.01 * expected.std()
    # What was rounded to 4 bits is further away than that.
    raw = nn.LLM.load(FOLDER).logits(ids).float()
    assert (raw - expected).abs().mean() > 0.05 * expected.std()


def test_it_runs_from_the_command_line(capsys):
    assert main(["run", str(FOLDER), "--quant", "mxfp4", "-p", "def main():", "-n", "2"]) == 0
    assert "decode" in capsys.readouterr().err


def test_an_artefact_holds_it(loaded, tmp_path):
    loaded.save(tmp_path / "artefact")
    ids = torch.randint(5, 500, (1, 7), generator=torch.Generator().manual_seed(2))
    assert torch.equal(nn.LLM.load(tmp_path / "artefact").logits(ids), loaded.logits(ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [0, 1, 9])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_products_agree_with_float64_and_decode_no_more_than_a_piece_at_a_time(
    rows, bias, dtype, monkeypatch
):
    sizes, looked_up = [], quantized_pieces.looked_up

    def measured(*operands):
        found = looked_up(*operands)
        sizes.append(found.numel())
        return found

    monkeypatch.setattr(quantized_pieces, "PIECE", 3 * 64)
    monkeypatch.setattr(quantized_pieces, "looked_up", measured)
    packed, exponents, dense = mxfp4(hard(14, 64, 5) / 2.0**8)
    packed, exponents = torch.from_numpy(packed), torch.from_numpy(exponents).clamp_(100, 130)
    codes = op.unpack_int4(packed, signed=False)
    dense = op.dequantize(codes, exponents, format="mxfp4", dtype=str(dtype).removeprefix("torch.")).double()
    x, b = torch.randn(rows, 64).to(dtype), torch.randn(14).to(dtype) if bias else None
    kernel = resolver("cpu")(
        Run("mxfp4_product", "quantized_product", (), Structure(), {**MXFP4.attrs, "activation": "relu"})
    )
    got = kernel(x, packed, exponents, None, b, None, None)
    product = x.double() @ dense.T + (0 if b is None else b.double())
    eps, most = torch.finfo(dtype).eps, max([1.0, *product.abs().flatten().tolist()])
    torch.testing.assert_close(got.double(), product.relu(), rtol=8 * eps, atol=16 * eps * most)
    assert got.dtype == dtype
    # The kernels in C look nothing up here.
    is_in_c = NATIVE is not None and dtype == torch.bfloat16
    assert sizes == ([] if is_in_c else [3 * 64, 3 * 64, 3 * 64, 3 * 64, 2 * 64])


def exported(quantized: bool = True):
    model = llama.build(llama.TINY)
    ir = model.export(llama.export_spec(llama.TINY))
    ir = nn.passes.quantize_weights(ir, "mxfp4") if quantized else ir
    return nn.passes.lift_transform_params(ir, shared_transform=True)


def test_each_quantised_product_of_a_language_model_has_its_kernel():
    executable = nn.compile(exported())
    runs = [i for m in executable.program.methods.values() for i in m.body.walk() if isinstance(i, Run)]
    assert {"mxfp4_product", "mxfp4_gated_product"} <= {run.kernel for run in runs}
    assert not [
        run for run in runs if run.op in ("dequantize", "unpack_int4") and run.module != "model.embed_tokens"
    ]


def test_a_target_without_a_kernel_for_it_multiplies_dequantised_weights_and_names_both_sides():
    executable = nn.compile(exported(), target="cuda:sm_90")
    runs = [i for m in executable.program.methods.values() for i in m.body.walk() if isinstance(i, Run)]
    assert [run for run in runs if run.op == "dequantize"]
    text = executable.explain()
    assert "not triton_fp8: the format is mxfp4, it takes fp8" in text
    assert "not triton_norm_gated: the format is mxfp4, it takes int4, uint4, int8, fp8" in text


def test_blocks_that_a_checkpoint_holds_are_written_by_hand():
    class Blocks(nn.Module):
        def __init__(self) -> None:
            self.blocks, self.scales = nn.Parameter((6, 32), "uint8"), nn.Parameter((6, 2), "uint8")

        def forward(self, x: nn.Tensor) -> nn.Tensor:
            q = op.unpack_int4(self.blocks, signed=False)
            return op.linear(x, op.dequantize(q, self.scales, format="mxfp4", dtype=x.dtype))

    weight = hard(6, 64, 3) / 2.0**8
    packed, exponents, dense = mxfp4(weight)
    executable = nn.compile(Blocks().export({"forward": {"x": spec.Tensor(["n", 64], "float32")}}))
    (run,) = executable.program.methods["forward"].body.instructions
    assert run.kernel == "mxfp4_product"
    session = executable.load({"blocks": torch.from_numpy(packed), "scales": torch.from_numpy(exponents)})
    x = torch.randn(3, 64)
    expected = x.double() @ torch.from_numpy(dense).T
    torch.testing.assert_close(
        session["forward"](x).double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max())
    )
