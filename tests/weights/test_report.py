# SPDX-License-Identifier: Apache-2.0
"""The report on a checkpoint: from headers alone, every tensor with its formula and readers, every problem."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import nnfront as nn
from nnfront import op, spec
from nnfront.transform.weight_usage import weight_uses
from nnfront.weights import Checkpoint, check_report


class Attention(nn.Module):
    def __init__(self, d: int):
        self.q = nn.Parameter((d, d))
        self.k = nn.Parameter((4, d))
        self.qk = op.concat([self.q, self.k], dim=0)

    def forward(self, x):
        return op.linear(x, self.qk)


class Model(nn.Module):
    def __init__(self, d: int = 8, layers: int = 3):
        self.layers = [Attention(d) for _ in range(layers)]
        self.head = nn.Parameter(("vocab", d))

    def forward(self, x):
        total = op.linear(x, self.head)
        for layer in self.layers:
            total = total + op.sum(layer(x), axis=-1, keepdims=True)
        return total

    def head_only(self, x):
        return op.linear(x, self.head)


@pytest.fixture(scope="module")
def uses():
    x = spec.Tensor(["n", 8], "float32")
    ir = Model().export({"forward": {"x": x}, "head_only": {"x": x}})
    ir = nn.passes.lift_transform_params(ir, shared_transform=True)
    return weight_uses(nn.compile(ir).program)


def tensors() -> dict[str, torch.Tensor]:
    found = {f"layers.{i}.{part}": torch.zeros(n, 8) for i in range(3) for part, n in (("q", 8), ("k", 4))}
    return found | {"head": torch.zeros(50, 8)}


def report(uses, folder: Path, found: dict[str, torch.Tensor], **options):
    save_file(found, folder / "model.safetensors")
    return check_report(uses, Checkpoint(folder), **options)


def test_uses_are_found_through_formulas(uses):
    assert uses.needed_by["head"] == ["forward", "head_only"]
    assert uses.needed_by["layers.1.k"] == ["forward"]
    assert set(uses.wanted) == set(tensors())


def test_a_checkpoint_that_fits_is_a_table_with_a_line_for_all_layers(uses, tmp_path: Path):
    text = report(uses, tmp_path, tensors() | {"extra": torch.zeros(3)}, ignored=["ex*"]).text()
    assert text.splitlines() == [
        f"Checkpoint {tmp_path}: 8 tensors, 0.00 GB in 1 files",
        "head        float32[50, 8]      as it is  [forward, head_only]",
        "layers.*.k  float32[4, 8]   ×3  qk = concat(q, k)  [forward]",
        "layers.*.q  float32[8, 8]   ×3  qk = concat(q, k)  [forward]",
        "extra       float32[3]          ignored",
        "dims: vocab = 50",
        "fits: every weight has its tensor, every tensor its use",
    ]


def test_problems_follow_the_table_with_names_and_methods(uses, tmp_path: Path):
    found = tensors()
    found["layers.0.queue"] = found.pop("layers.0.q")
    found["layers.2.k"] = torch.zeros(8, 4)
    lines = report(uses, tmp_path, found).text().splitlines()
    assert lines[lines.index("does not fit:") :] == [
        "does not fit:",
        "  missing: 'layers.0.q': float32[8, 8], needed by forward; nearest unexpected: 'layers.0.queue'",
        "  unexpected: 'layers.0.queue': float32[8, 8]",
        "  shape: 'layers.2.k': float32[8, 4], expected float32[4, 8]; the stored one is its transpose",
    ]


def test_json_has_every_tensor_with_its_uses(uses, tmp_path: Path):
    data = json.loads(json.dumps(report(uses, tmp_path, tensors()).json()))
    assert data["fits"] is True
    assert data["dims"] == {"vocab": 50}
    assert data["tensors"]["layers.1.q"] == {
        "dtype": "float32",
        "shape": [8, 8],
        "file": "model.safetensors",
        "bytes": 256,
        "uses": [
            {"name": "layers.1.qk", "formula": "concat(layers.1.q, layers.1.k)", "methods": ["forward"]}
        ],
    }


def test_conversion_and_ties_are_told(uses, tmp_path: Path):
    found = {name: t.to(torch.bfloat16) for name, t in tensors().items()}
    text = report(
        uses, tmp_path, found | {"tied": found["head"].clone()}, cast=True, aliases={"tied": "head"}
    ).text()
    assert "converted on load: bfloat16 to float32" in text
    assert "tied: head and tied must hold equal bytes" in text


def test_a_hundred_shards_are_checked_from_headers_alone(tmp_path: Path):
    names = {f"layers.{i}.{part}": (n, 8) for i in range(400) for part, n in (("q", 8), ("k", 4))} | {
        "head": (50, 8)
    }
    where = {}
    for shard in range(100):
        begin, header = 0, {}
        for name in list(names)[shard::100]:
            size = 4 * names[name][0] * names[name][1]
            header[name] = {"dtype": "F32", "shape": list(names[name]), "data_offsets": [begin, begin + size]}
            begin += size
        text = json.dumps(header).encode()
        (tmp_path / f"{shard}.safetensors").write_bytes(
            struct.pack("<Q", len(text)) + text
        )  # no data follows
        where |= dict.fromkeys(header, f"{shard}.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    ir = Model(layers=400).export({"forward": {"x": spec.Tensor(["n", 8], "float32")}})
    uses = weight_uses(nn.compile(nn.passes.lift_transform_params(ir)).program)
    found = check_report(uses, Checkpoint(tmp_path, headers_only=True))
    assert found.fits
    assert len(found.text().splitlines()) == 6
