# SPDX-License-Identifier: Apache-2.0
"""A transform into files: the values of a run in memory, within the memory of the plan."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transform_cases import CopyingSource, LiveBytes

import nnfront as nn
from nnfront import op, spec
from nnfront.artefact.save import result_types
from nnfront.errors import LoadError
from nnfront.transform.plan import plan_transform
from nnfront.transform.run import stream_transform, weight_dims
from nnfront.transform.source import as_source
from nnfront.weights import write_tensors


def write(program, weights, folder: Path, **options) -> list[Path]:
    source = as_source(weights)
    types = result_types(program, weight_dims(program, source))
    return write_tensors(folder, "transformed", types, stream_transform(program, source), **options)


class Model(nn.Module):
    def __init__(self, layers: int):
        self.w = [nn.Parameter(("n", 256)) for _ in range(layers)]
        self.turned = [op.permute_dims(w) * 2.0 for w in self.w]
        self.fused = op.concat(self.w[:2], dim=0)

    def forward(self, x):
        total = op.sum(op.linear(x, self.fused))
        for turned in self.turned:
            total = total + op.sum(op.matmul(x, turned))
        return total


@pytest.fixture(scope="module")
def program():
    ir = Model(6).export({"forward": {"x": spec.Tensor(["batch", 256], "float32")}})
    return nn.compile(
        nn.passes.lift_transform_params(ir, shared_transform=True, allow_growth=True)
    ).program.transforms["transform_params"]


@pytest.fixture(scope="module")
def weights():
    return {f"w.{i}": torch.randn(128, 256) for i in range(6)}


def test_files_hold_what_a_run_gives(program, weights, tmp_path: Path):
    files = write(program, weights, tmp_path, shard_bytes=300_000)
    assert files[-1].name == "transformed.safetensors.index.json"
    read = {name: tensor for file in files[:-1] for name, tensor in load_file(file).items()}
    fused = [name for name in read if "fused" in name]
    turned = sorted(name for name in read if "turned" in name)
    assert len(fused) == 1
    assert len(turned) == 6
    assert torch.equal(read[fused[0]], torch.cat([weights["w.0"], weights["w.1"]]))
    assert all(torch.equal(read[name], weights[f"w.{i}"].T * 2) for i, name in enumerate(turned))


def test_memory_stays_within_the_plan_for_files(program, weights, tmp_path: Path):
    source = CopyingSource(weights)
    plan = plan_transform(program, source)
    with LiveBytes() as memory:
        write(program, source, tmp_path)
    assert memory.peak <= plan.peak_bytes
    assert plan.peak_bytes < plan.resident_bytes


def test_a_weight_that_cannot_be_read_leaves_nothing_behind(program, weights, tmp_path: Path):
    class Broken(CopyingSource):
        def tensor(self, name: str) -> torch.Tensor:
            if name == "w.4":
                raise LoadError("w.4: reading failed: Input/output error")
            return super().tensor(name)

    with pytest.raises(LoadError, match="Input/output error"):
        write(program, Broken(weights), tmp_path)
    assert not list(tmp_path.iterdir())
