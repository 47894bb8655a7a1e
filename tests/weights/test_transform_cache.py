# SPDX-License-Identifier: Apache-2.0
"""Kept results: found again by content, made again only where a source changed, taken up after a kill."""

import os
import signal
from pathlib import Path

import pytest
import torch
from children import code_of, in_child
from safetensors.torch import save_file

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import LoadError
from nnfront.weights import BoundWeights, Checkpoint, TransformCache, check_weights, stored_type
from nnfront.weights.temporary import make_file


class Layer(nn.Module):
    def __init__(self, factor: float):
        self.w = nn.Parameter((512, 1024))
        self.scaled = op.permute_dims(self.w) * factor  # 2 MB

    def forward(self, x):
        return op.matmul(x, self.scaled)


class Model(nn.Module):
    def __init__(self, factors):
        self.layers = [Layer(f) for f in factors]
        self.bias = nn.Parameter((512,))

    def forward(self, x):
        return sum((layer(x) for layer in self.layers), self.bias * 1.0)


def program_of(*factors: float):
    ir = Model(factors).export({"forward": {"x": spec.Tensor(["n", 1024], "float32")}})
    ir = nn.passes.lift_transform_params(ir, shared_transform=True, allow_growth=True)
    return nn.compile(ir).program.transforms["transform_params"]


def weights(count: int = 3) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"bias": torch.randn(512)} | {f"layers.{i}.w": torch.randn(512, 1024) for i in range(count)}


def save(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Put a checkpoint in place by renaming, as everyone should."""
    save_file(tensors, folder / "new")
    os.replace(folder / "new", folder / "model.safetensors")


def bound(folder: Path, count: int = 3) -> BoundWeights:
    wanted = {name: stored_type(t) for name, t in weights(count).items()}
    checkpoint = Checkpoint(folder)
    return BoundWeights(checkpoint, check_weights(wanted, checkpoint.infos, ignored=["layers.*"]))


def cached_transform(program, weights: BoundWeights, folder: Path, progress=None):
    return TransformCache(folder, weights).transform(program, progress=progress)


def kept(cache: Path) -> set[str]:
    return {file.name for file in (cache / "results").iterdir()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    save(tmp_path / "model", weights())
    return tmp_path / "model"


def assert_right(results, tensors, factors):
    for i, factor in enumerate(factors):
        (name,) = (n for n in results if n.startswith(f"layers.{i}."))
        assert torch.equal(results[name], tensors[f"layers.{i}.w"].T * factor)


def test_the_first_run_keeps_and_the_second_reads_no_source(folder: Path, tmp_path: Path, monkeypatch):
    cache, program = tmp_path / "cache", program_of(2.0, 3.0, 4.0)
    assert_right(cached_transform(program, bound(folder), cache), weights(), (2.0, 3.0, 4.0))
    assert len(kept(cache)) == 4
    source, read = bound(folder), []
    monkeypatch.setattr(source.weights, "blocks", read.append)
    monkeypatch.setattr(type(source), "tensor", lambda self, name: read.append(name) or weights()[name])
    assert_right(cached_transform(program, source, cache), weights(), (2.0, 3.0, 4.0))
    assert not read


def test_a_changed_tensor_renews_only_what_is_made_of_it(folder: Path, tmp_path: Path):
    cache, program = tmp_path / "cache", program_of(2.0, 3.0, 4.0)
    cached_transform(program, bound(folder), cache)
    before = kept(cache)
    changed = weights() | {"layers.1.w": torch.ones(512, 1024)}
    save(folder, changed)
    assert_right(cached_transform(program, bound(folder), cache), changed, (2.0, 3.0, 4.0))
    assert before < kept(cache)
    assert len(kept(cache) - before) == 1


def test_a_changed_formula_renews_and_a_model_of_other_size_shares(folder: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    cached_transform(program_of(2.0, 3.0, 4.0), bound(folder), cache)
    before = kept(cache)
    assert_right(cached_transform(program_of(2.0, 3.0), bound(folder, 2), cache), weights(), (2.0, 3.0))
    assert kept(cache) == before
    assert_right(cached_transform(program_of(2.0, 5.0), bound(folder, 2), cache), weights(), (2.0, 5.0))
    assert len(kept(cache) - before) == 1


def test_equal_formulas_over_equal_bytes_are_kept_once(folder: Path, tmp_path: Path):
    same = torch.ones(512, 1024)
    save(folder, weights() | {f"layers.{i}.w": same.clone() for i in range(3)})
    cached_transform(program_of(2.0, 2.0, 2.0), bound(folder), tmp_path / "cache")
    assert len(kept(tmp_path / "cache")) == 2  # one for all layers, one for the bias


def test_a_damaged_result_is_made_again(folder: Path, tmp_path: Path):
    cache, program = tmp_path / "cache", program_of(2.0, 3.0, 4.0)
    cached_transform(program, bound(folder), cache)
    os.truncate(cache / "results" / min(kept(cache)), 5000)
    for record in (cache / "sources").iterdir():
        record.write_text("{half")
    assert_right(cached_transform(program, bound(folder), cache), weights(), (2.0, 3.0, 4.0))


def test_a_run_that_is_killed_is_taken_up_where_it_stopped(folder: Path, tmp_path: Path):
    def stop(done: int, total: int) -> None:
        if done == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    program = program_of(2.0, 3.0, 4.0)
    child = in_child(lambda: cached_transform(program, bound(folder), tmp_path / "cache", progress=stop))
    assert code_of(child) == -signal.SIGKILL
    first = kept(tmp_path / "cache")
    assert 1 <= len(first) <= 2
    told = []
    results = cached_transform(
        program_of(2.0, 3.0, 4.0), bound(folder), tmp_path / "cache", progress=lambda *a: told.append(a)
    )
    assert_right(results, weights(), (2.0, 3.0, 4.0))
    assert told[0][0] == len(first) + 1
    assert first < kept(tmp_path / "cache")


def test_what_killed_writers_left_goes_and_what_is_being_written_stays(folder: Path, tmp_path: Path):
    cache = tmp_path / "cache"
    (cache / "results").mkdir(parents=True)
    (cache / "results" / ".a.tmp").touch()
    living, fd = make_file(cache / "results" / "b", ".tmp")
    cached_transform(program_of(2.0, 3.0, 4.0), bound(folder), cache)
    assert ".a.tmp" not in kept(cache)
    assert living.name in kept(cache)
    os.close(fd)
    cached_transform(program_of(2.0, 3.0, 4.0), bound(folder), cache)
    assert living.name not in kept(cache)


def test_a_cache_that_cannot_be_made_is_an_error(folder: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(LoadError, match=r"the cache cannot be made: (Not a directory|File exists)"):
        cached_transform(program_of(2.0, 3.0, 4.0), bound(folder), tmp_path / "file")


def test_weights_in_memory_cannot_be_cached(tmp_path: Path):
    wanted = {name: stored_type(t) for name, t in weights().items()}
    source = BoundWeights(weights(), check_weights(wanted, wanted))
    with pytest.raises(LoadError, match="only weights from files can be cached"):
        cached_transform(program_of(2.0, 3.0, 4.0), source, tmp_path)
