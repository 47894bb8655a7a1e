# SPDX-License-Identifier: Apache-2.0
"""Weights of a folder, rounded by what they are multiplied with on some text: nearer to the model as it is on other text, and refused where that cannot be."""

from __future__ import annotations

import argparse
import inspect
from pathlib import Path

import pytest
import torch
from few_of import few_of
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import nnfront as nn
from nnfront.cli import main
from nnfront.errors import LoadError, RunError
from nnfront.passes import QuantScheme

FOLDER = Path(__file__).parents[1] / "examples" / "checkpoints" / "pylib-3m"
TEXT = "".join(Path(inspect.getfile(module)).read_text(encoding="utf-8") for module in (argparse, inspect))


@pytest.fixture(scope="module")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibration")
    (folder / "text.py").write_text(TEXT[:24000], encoding="utf-8")
    assert (
        main(["calibrate", str(FOLDER), "--text", f"{folder}/text.py", "-o", f"{folder}/it.safetensors"]) == 0
    )
    return folder / "it.safetensors"  # fmt: skip


def heldout(model: nn.LLM) -> torch.Tensor:
    text = (FOLDER / "heldout.txt").read_text(encoding="utf-8")[:6000]
    return torch.tensor(model.tokenizer.encode(text))[None, :512]


@pytest.fixture(scope="module")
def as_it_is() -> torch.Tensor:
    model = nn.LLM.load(FOLDER)
    return model.logits(heldout(model)).double().log_softmax(-1)


def divergence(model: nn.LLM, of: torch.Tensor) -> float:
    found = model.logits(heldout(model)).double().log_softmax(-1)
    return float((of.exp() * (of - found)).sum(-1).mean())


@pytest.mark.parametrize(
    "format", few_of(["int4", "q4_k", "nvfp4", "fp8_e5m2:block", "fp8:tensor", "fp8:block"])
)
def test_a_calibrated_model_diverges_less_on_other_text(format, calibration, as_it_is):
    plain = nn.LLM.load(FOLDER, quant=QuantScheme(format, head=format))
    model = nn.LLM.load(FOLDER, quant=QuantScheme(format, head=format, calibration=calibration))
    assert divergence(model, as_it_is) < 0.75 * divergence(plain, as_it_is)
    assert "17 of 17 calibrated" in str(model.quantized)
    assert model.session.weights.keys() == plain.session.weights.keys()
    for name, weight in model.session.weights.items():
        assert weight.shape == plain.session.weights[name].shape


def test_moments_are_those_of_what_the_products_of_the_model_were_given(calibration):
    """Of a layer's first product by the reference in transformers' place: its norm of the embedding."""
    model, weights = nn.LLM.load(FOLDER), load_file(FOLDER / "model.safetensors")
    ids = torch.tensor(model.tokenizer.encode(TEXT[:24000]))
    x = weights["model.embed_tokens.weight"][ids].float()
    normed = (x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()).bfloat16().float()
    given = (normed.bfloat16() * weights["model.layers.0.input_layernorm.weight"]).double()
    found = load_file(calibration)["model.layers.0.self_attn.qkv.weight"]
    assert torch.allclose(
        found[0].double(), given.T @ given / len(ids), rtol=0.02, atol=1e-3 * float(found.max())
    )


def test_what_an_artefact_holds_is_calibrated(calibration, tmp_path, capsys):
    out = tmp_path / "made.nnfront"
    flags = ["--quant", "int4", "--calibration", str(calibration), "--keep", "*.o_proj"]
    assert main(["export", str(FOLDER), "-o", str(out), *flags]) == 0
    assert "13 of 13 calibrated" in capsys.readouterr().err
    loaded = nn.LLM.load(FOLDER, quant=QuantScheme("int4", None, (("*.o_proj", "keep"),), calibration))
    ids = heldout(loaded)
    assert torch.equal(nn.LLM.load(out).logits(ids), loaded.logits(ids))


def test_weights_that_stay_take_nothing_of_a_calibration(calibration):
    model = nn.LLM.load(FOLDER, quant=QuantScheme("int8", calibration=calibration, rules=(("*", "keep"),)))
    assert "0 of 0 calibrated" in str(model.quantized)


def forged(path: Path, calibration: Path, **changes) -> Path:
    with safe_open(calibration, "pt") as file:
        metadata, found = file.metadata(), {name: file.get_tensor(name) for name in file.keys()}
    found = {name: tensor for name, tensor in {**found, **changes}.items() if tensor is not None}
    save_file(found, path, metadata)
    return path


QKV = "model.layers.0.self_attn.qkv.weight"
REMAKE = "help: make one of this model: nnfront calibrate DIR --text FILE -o OUT"


@pytest.mark.parametrize(
    ("changes", "details"),
    [
        ({"other.weight": torch.zeros(1, 8, 8)}, "the model has no weight 'other.weight'"),
        ({QKV: torch.eye(8)[None]}, f"'{QKV}' is float32[1, 8, 8], and has 256 inputs here"),
        ({QKV: torch.zeros(256)}, f"'{QKV}' is float32[256], and has 256 inputs here"),
        ({QKV: torch.eye(256, dtype=torch.float64)[None]}, f"'{QKV}' is float64[1, 256, 256], and has 256 inputs here"),
    ],
)  # fmt: skip
def test_a_calibration_of_another_model_is_refused(changes, details, calibration, tmp_path):
    path = forged(tmp_path / "it.safetensors", calibration, **changes)
    with pytest.raises(LoadError) as error:
        nn.LLM.load(FOLDER, quant=QuantScheme("int4", calibration=path))
    assert str(error.value) == f"it.safetensors is a calibration of another model\n  {details}\n  {REMAKE}"


def test_a_file_that_is_no_calibration_is_refused(calibration, tmp_path):
    with pytest.raises(LoadError, match=r"model\.safetensors is no calibration"):
        nn.LLM.load(FOLDER, quant=QuantScheme("int4", calibration=FOLDER / "model.safetensors"))
    path = forged(tmp_path / "it.safetensors", calibration, **{QKV: torch.full((1, 256, 256), torch.nan)})
    with pytest.raises(LoadError) as error:
        nn.LLM.load(FOLDER, quant=QuantScheme("int4", calibration=path))
    assert (
        str(error.value) == f"{path} holds NaN or infinities\n  in the moments of '{QKV}'\n  {REMAKE}"
    )  # fmt: skip


def test_a_text_in_the_place_of_a_calibration_is_refused_with_what_makes_one_of_it():
    with pytest.raises(LoadError) as error:
        nn.LLM.load(FOLDER, quant=QuantScheme("int4", calibration=FOLDER / "heldout.txt"))
    first, *_, last = str(error.value).splitlines()
    assert first.endswith("heldout.txt is no calibration")
    assert last == f"  {REMAKE}"


def test_a_calibration_beside_nothing_to_quantise_is_refused(calibration, capsys):
    assert main(["run", str(FOLDER), "-p", "a", "--calibration", str(calibration)]) == 1
    assert "it is said how weights are to be quantised, but not to what" in capsys.readouterr().err


def test_a_text_of_no_tokens_is_refused(tmp_path):
    with pytest.raises(RunError, match="the text to calibrate on has no tokens"):
        nn.calibrate(FOLDER, "", tmp_path / "it.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_what_inputs_without_numbers_give_is_refused_and_nothing_is_written(tmp_path):
    for file in FOLDER.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.1.input_layernorm.weight"][:] = torch.inf
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        RunError, match=r"the inputs of model\.layers\.1\.self_attn\.qkv\.weight are no finite numbers"
    ):
        nn.calibrate(tmp_path, TEXT[:100], tmp_path / "it.safetensors")
    assert not (tmp_path / "it.safetensors").exists()


def test_ranks_are_not_calibrated(calibration, tmp_path):
    with pytest.raises(LoadError, match="a model that ranks divide is not calibrated"):
        nn.artefact.export(
            FOLDER, tmp_path / "out", quant=QuantScheme("int4", calibration=calibration), ranks=2
        )
