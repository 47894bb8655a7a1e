# SPDX-License-Identifier: Apache-2.0
"""A session written back as a checkpoint: what went in comes out bit for bit, whole or not at all."""

import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transform_cases import LiveBytes

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import LoadError


class Layer(nn.Module):
    """Fused QKV and gate/up, a stack, a transpose, a split and a norm."""

    def __init__(self):
        self.q, self.k, self.v, self.gate, self.up, self.o, self.both = (
            nn.Linear(8, n, bias=False) for n in (8, 4, 4, 8, 8, 8, 8)
        )
        self.norm = nn.Parameter((8,))
        self.qkv = op.concat([self.q.weight, self.k.weight, self.v.weight], dim=0)
        self.gate_up = op.permute_dims(op.stack([self.gate.weight, self.up.weight]), [0, 2, 1])
        self.turned = op.permute_dims(self.o.weight)
        self.first, self.second = op.split(self.both.weight, 2, axis=0)

    def forward(self, x):
        q, k, v = op.split(op.linear(x, self.qkv), [8, 12], axis=-1)
        x = q + op.concat([k, v], dim=-1)
        gate, up = op.split(op.matmul(x, self.gate_up), 2, axis=0)
        x = op.matmul(op.reshape(gate * up, (-1, 8)), self.turned) * self.norm
        return op.concat([op.linear(x, self.first), op.linear(x, self.second)], dim=-1)


class Model(nn.Module):
    def __init__(self, layers: int = 2):
        self.embed = nn.Embedding(8, 8)
        self.layers = [Layer() for _ in range(layers)]
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight
        self.unread = nn.Parameter((3,))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def executable(model: nn.Module, dtype: str = "float32"):
    ir = model.to(dtype).export({"forward": {"tokens": spec.Tensor(["n"], "int64")}})
    return nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True))


EXECUTABLE = executable(Model())


def weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: torch.randn([int(s) for s in p.shape]).to(dtype) for name, p in Model().named_parameters()}


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for f in sorted(folder.glob("*.safetensors")) for n, t in load_file(f).items()}


def assert_equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name].dtype == value.dtype
        assert torch.equal(got[name].contiguous().view(torch.uint8), value.contiguous().view(torch.uint8)), (
            name
        )


@pytest.mark.parametrize("stored", [["embed"], ["head"], ["embed", "head"]], ids=" and ".join)
def test_the_tensors_of_the_checkpoint_come_back(tmp_path: Path, stored: list[str]):
    given = weights()
    embed = given.pop("embed.weight")
    given |= {f"{name}.weight": embed.clone() for name in stored}
    save_file(given | {"inv_freq": torch.arange(3)}, tmp_path / "model.safetensors")
    session = EXECUTABLE.load(nn.Checkpoint(tmp_path), ignored=["inv_*"])
    files = session.export_checkpoint(tmp_path / "out")
    assert files == [tmp_path / "out" / "model.safetensors"]
    assert_equal(read(tmp_path / "out"), given | {"inv_freq": torch.arange(3)})
    with safe_open(files[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}
    again = EXECUTABLE.load(nn.Checkpoint(tmp_path / "out"), ignored=["inv_*"])
    ids = torch.arange(8)
    assert torch.equal(again["forward"](ids), session["forward"](ids))


def test_tensors_in_memory_and_bound_results_are_written_too(tmp_path: Path):
    given = weights()
    EXECUTABLE.load(given).export_checkpoint(tmp_path / "loaded")
    EXECUTABLE.bind(EXECUTABLE.transform_params(given)).export_checkpoint(tmp_path / "bound")
    del given["unread"]  # no method reads it, so only a checkpoint has it
    assert_equal(read(tmp_path / "loaded"), given)
    assert_equal(read(tmp_path / "bound"), given)


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_any_layout_of_moves_is_a_round_trip(tmp_path_factory, data):
    """A model whose derived tensors are random moves of its weights."""
    dtype = data.draw(st.sampled_from(["float16", "bfloat16", "float32"]))

    class Moved(nn.Module):
        def __init__(self):
            self.w = [nn.Parameter((4, 6), dtype) for _ in range(4)]
            values = list(self.w)
            for _ in range(data.draw(st.integers(1, 6))):
                x = values.pop(data.draw(st.integers(0, len(values) - 1)))
                kind = data.draw(st.sampled_from(["turn", "flat", "split", "cat", "stack", "wider"]))
                shape = [int(size) for size in x.shape]
                axis = data.draw(st.integers(0, len(shape) - 1))
                same = [y for y in values if [*y.shape] == shape and y.dtype == x.dtype]
                if kind == "turn":
                    values.append(op.permute_dims(x, data.draw(st.permutations(range(len(shape))))))
                elif kind == "flat":
                    values.append(op.reshape(x, (-1,)))
                elif kind == "split" and shape[axis] % 2 == 0:
                    values += op.split(x, 2, axis=axis)
                elif kind in ("cat", "stack"):
                    values = [y for y in values if all(y is not z for z in same)]
                    values.append(
                        op.concat([x, *same], dim=axis) if kind == "cat" else op.stack([x, *same], dim=axis)
                    )
                else:
                    values.append(op.astype(x, "float32"))
            self.made = values

        def forward(self, x):
            return [op.sum(op.astype(value, "float32") * x) for value in self.made]

    model = Moved()
    ir = model.export({"forward": {"x": spec.Tensor([], "float32")}})
    exe = nn.compile(nn.passes.lift_transform_params(ir))
    given = {f"w.{i}": torch.randn(4, 6).to(getattr(torch, dtype)) for i in range(4)}
    folder = tmp_path_factory.mktemp("x")
    save_file(given, folder / "model.safetensors")
    exe.load(nn.Checkpoint(folder)).export_checkpoint(folder / "out")
    assert_equal(read(folder / "out"), given)


def test_a_large_checkpoint_has_shards_and_an_index(tmp_path: Path):
    given = weights()
    del given["unread"]
    told = []
    files = EXECUTABLE.load(given).export_checkpoint(
        tmp_path / "out", shard_bytes=1000, progress=lambda *a: told.append(a)
    )
    assert files[-1].name == "model.safetensors.index.json"
    assert len(files) > 3
    assert {file.name for file in files} == set(os.listdir(tmp_path / "out"))
    index = json.loads(files[-1].read_text())["weight_map"]
    assert index.keys() == given.keys()
    assert_equal(dict(nn.Checkpoint(tmp_path / "out")), given)
    assert told[-1] == (sum(t.nbytes for t in given.values()),) * 2


def test_what_updates_have_brought_is_written(tmp_path: Path):
    save_file(weights(), tmp_path / "model.safetensors")
    given = load_file(tmp_path / "model.safetensors")
    session = EXECUTABLE.load(nn.Checkpoint(tmp_path))
    new = {name: weights()[name] for name in ("layers.0.q.weight", "layers.1.up.weight", "embed.weight")}
    session.update(new)
    session.export_checkpoint(tmp_path / "out")
    assert_equal(read(tmp_path / "out"), given | new)


class TestConverted:
    def test_a_wider_dtype_is_turned_back(self, tmp_path: Path):
        save_file(weights(torch.bfloat16), tmp_path / "model.safetensors")
        given = load_file(tmp_path / "model.safetensors")
        session = EXECUTABLE.load(nn.Checkpoint(tmp_path), cast=True)
        exact = torch.full((8, 8), 0.1)
        session.update({"layers.0.q.weight": exact})
        session.export_checkpoint(tmp_path / "out")
        assert_equal(read(tmp_path / "out"), given | {"layers.0.q.weight": exact})

    def test_a_narrower_one_cannot_be(self, tmp_path: Path):
        save_file(weights(), tmp_path / "model.safetensors")
        session = executable(Model(), "float16").load(nn.Checkpoint(tmp_path), cast=True)
        text = r"'embed.weight' was converted from float32 to float16 when it was loaded"
        with pytest.raises(LoadError, match=text):
            session.export_checkpoint(tmp_path / "out")
        assert not (tmp_path / "out").exists()


class Quantised(nn.Module):
    def __init__(self, layers: int):
        self.w = [nn.Linear(8, 8, bias=False) for _ in range(layers)]
        self.packed = [op.quantize(each.weight) for each in self.w]
        self.half = nn.Linear(8, 8, bias=False)
        self.narrow = op.astype(self.half.weight, "float16")

    def forward(self, x):
        for packed, scale in self.packed:
            x = op.linear(x, op.dequantize(packed, scale))
        return op.linear(op.astype(x, "float16"), self.narrow)


def quantised(layers: int):
    ir = Quantised(layers).export({"forward": {"x": spec.Tensor(["n", 8], "float32")}})
    given = {f"{n}.weight": torch.randn(8, 8) for n in ("half", *(f"w.{i}" for i in range(layers)))}
    return nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True)).load(given)


def test_what_is_lost_is_named_with_its_formula_and_the_reason(tmp_path: Path):
    with pytest.raises(LoadError) as error:
        quantised(1).export_checkpoint(tmp_path / "out")
    assert str(error.value) == (
        "the session cannot give back every weight of the checkpoint\n"
        "  'w.0.weight' is part of packed.0.0 = quantize(w.0.weight, axis=1)[0], which cannot be undone: quantize has no inverse\n"
        "  'half.weight' is part of narrow = astype(half.weight, dtype='float16'), which cannot be undone: astype makes float16 of float32\n"
        "  help: keep the checkpoint that it was made of"
    )
    assert not list(tmp_path.iterdir())


def test_many_lost_weights_are_grouped(tmp_path: Path):
    with pytest.raises(
        LoadError, match=r"quantize has no inverse \(and 24 more like 'w\.\*\.weight'\)"
    ) as error:
        quantised(25).export_checkpoint(tmp_path / "out")
    assert len(error.value.details) == 2


class TestPlace:
    @pytest.fixture
    def session(self):
        return EXECUTABLE.load(weights())

    def test_a_folder_that_is_not_empty_stays(self, session, tmp_path: Path):
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(
            LoadError,
            match=r"is there already and is not empty\n  help: export to another folder, or replace its weights with overwrite=True",
        ):
            session.export_checkpoint(tmp_path)
        assert os.listdir(tmp_path) == ["notes.txt"]

    def test_an_empty_folder_will_do(self, session, tmp_path: Path):
        session.export_checkpoint(tmp_path)
        assert os.listdir(tmp_path) == ["model.safetensors"]

    def test_overwriting_replaces_weights_and_nothing_else(self, session, tmp_path: Path):
        place = tmp_path / "model"
        session.export_checkpoint(place, shard_bytes=1000)
        (place / "config.json").write_text("{}")
        (place / "adapter").mkdir()
        (place / "adapter" / "model.safetensors").write_text("not ours")
        session.export_checkpoint(place, overwrite=True)
        assert sorted(os.listdir(place)) == ["adapter", "config.json", "model.safetensors"]
        assert (place / "config.json").read_text() == "{}"
        assert (place / "adapter" / "model.safetensors").read_text() == "not ours"
        assert os.listdir(tmp_path) == ["model"]

    def test_the_checkpoint_that_a_session_reads_may_be_overwritten(self, tmp_path: Path):
        save_file(weights(), tmp_path / "model.safetensors")
        given = load_file(tmp_path / "model.safetensors")
        session = EXECUTABLE.load(nn.Checkpoint(tmp_path))
        before = session["forward"](torch.arange(8))
        session.export_checkpoint(tmp_path, overwrite=True)
        assert_equal(read(tmp_path), given)
        assert torch.equal(session["forward"](torch.arange(8)), before)

    def test_an_artefact_is_never_overwritten(self, session, tmp_path: Path):
        (tmp_path / "nnfront.json").write_text("{}")
        with pytest.raises(LoadError, match=r"is an nnfront artefact\n  help: export to another folder"):
            session.export_checkpoint(tmp_path, overwrite=True)

    def test_a_failure_leaves_nothing(self, session, tmp_path: Path):
        def stop(done: int, total: int) -> None:
            if done > total // 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            session.export_checkpoint(tmp_path / "out", progress=stop)
        assert not list(tmp_path.iterdir())

    def test_a_place_that_cannot_be_is_an_error(self, session, tmp_path: Path):
        (tmp_path / "file").touch()
        with pytest.raises(LoadError, match=r"out cannot be written: File exists"):
            session.export_checkpoint(tmp_path / "file" / "out")
        with pytest.raises(LoadError, match=r"file is there already and is no folder"):
            session.export_checkpoint(tmp_path / "file")


def test_views_are_written_without_a_copy_of_the_model(tmp_path: Path):
    class Large(nn.Module):
        def __init__(self):
            self.w = [nn.Linear(512, 512, bias=False) for _ in range(16)]
            self.fused = [
                op.concat([a.weight, b.weight], dim=0) for a, b in zip(self.w[::2], self.w[1::2], strict=True)
            ]

        def forward(self, x):
            return [op.linear(x, fused) for fused in self.fused]

    ir = Large().export({"forward": {"x": spec.Tensor(["n", 512], "float32")}})
    session = nn.compile(nn.passes.lift_transform_params(ir)).load(
        {f"w.{i}.weight": torch.randn(512, 512) for i in range(16)}
    )
    with LiveBytes() as memory:
        session.export_checkpoint(tmp_path / "out")
    assert memory.peak < 1 << 20
