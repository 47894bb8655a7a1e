# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: every layout of files, tensors equal to what the safetensors library reads, no copy where none is needed."""

import gc
import json
import os
import resource
import struct
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from nnfront.errors import LoadError
from nnfront.weights import Checkpoint

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
INTEGERS = (
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
)


def random_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    if dtype in FLOATS:
        return torch.randn(shape).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape).to(dtype)


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    flat = [t.reshape(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*flat)


def sharded(folder: Path, *shards: dict[str, torch.Tensor], index: dict[str, str] | None = None) -> Path:
    """A folder with shards and their index, or with another index."""
    where = {}
    for number, tensors in enumerate(shards):
        name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        save_file(tensors, folder / name)
        where |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index or where})
    )
    return folder


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS, ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (), (0, 4), (1,), (700, 401)], ids=str)
def test_tensor_has_the_bytes_that_were_saved(tmp_path: Path, dtype: torch.dtype, shape: tuple[int, ...]):
    saved = {"a": random_of(torch.int8, 3), "x": random_of(dtype, *shape)}
    save_file(saved, tmp_path / "x.safetensors")
    checkpoint = Checkpoint(tmp_path / "x.safetensors")
    assert same_bytes(checkpoint.tensor("x"), saved["x"])
    assert checkpoint.info("x").dtype == str(dtype).removeprefix("torch.")
    out = torch.empty(shape, dtype=dtype)
    checkpoint.read_into("x", out)
    assert same_bytes(out, saved["x"])


def test_single_file_shards_index_and_loose_files_read_alike(tmp_path: Path):
    tensors = {f"layer.{i}": random_of(torch.float32, 4, i + 1) for i in range(4)}
    halves = dict(list(tensors.items())[:2]), dict(list(tensors.items())[2:])
    for name in ("single", "sharded", "loose"):
        (tmp_path / name).mkdir()
    save_file(tensors, tmp_path / "single" / "model.safetensors", {"format": "pt"})
    sharded(tmp_path / "sharded", *halves)
    for number, half in enumerate(halves):
        save_file(half, tmp_path / "loose" / f"part{number}.safetensors")
    paths = ("single", "single/model.safetensors", "sharded", "sharded/model.safetensors.index.json", "loose")
    for checkpoint in (Checkpoint(tmp_path / path) for path in paths):
        assert set(checkpoint) == set(checkpoint.names) == set(tensors)
        assert len(checkpoint) == 4
        assert "layer.0" in checkpoint
        assert "layer.9" not in checkpoint
        assert all(same_bytes(checkpoint[name], tensors[name]) for name in tensors)
    assert Checkpoint(tmp_path / "single").metadata == {"format": "pt"}


def test_a_large_tensor_is_mapped_and_not_copied(tmp_path: Path):
    save_file({"x": torch.ones(16 << 20, dtype=torch.float32)}, tmp_path / "x.safetensors")  # 64 MB
    checkpoint = Checkpoint(tmp_path / "x.safetensors")
    before = resident_bytes()
    x = checkpoint.tensor("x")
    assert resident_bytes() - before < 1 << 20
    assert x[-1] == 1
    del x


def test_mapped_pages_leave_with_the_last_view(tmp_path: Path):
    save_file({"x": torch.ones(16 << 20, dtype=torch.float32)}, tmp_path / "x.safetensors")
    before = resident_bytes()
    view = Checkpoint(tmp_path / "x.safetensors").tensor("x")[1:]
    gc.collect()
    assert view.sum() == view.numel()
    assert resident_bytes() - before > 60e6
    del view
    assert resident_bytes() - before < 10e6


def test_writing_into_a_tensor_leaves_the_file_as_it_was(tmp_path: Path):
    save_file({"x": torch.ones(1 << 20)}, tmp_path / "x.safetensors")
    x = Checkpoint(tmp_path / "x.safetensors").tensor("x")
    x.zero_()
    assert load_file(tmp_path / "x.safetensors")["x"].sum() == 1 << 20
    assert Checkpoint(tmp_path / "x.safetensors")["x"].sum() == 1 << 20


@pytest.mark.parametrize("padding", range(9))
def test_data_at_any_offset_is_read(tmp_path: Path, padding: int):
    # The format asks for no alignment: a header of any length may precede the data.
    x = torch.arange(200_000, dtype=torch.float32)
    header = b'{"x":{"dtype":"F32","shape":[200000],"data_offsets":[0,800000]}}' + b" " * padding
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + x.numpy().tobytes())
    checkpoint = Checkpoint(tmp_path / "x.safetensors")
    read = checkpoint["x"]
    assert torch.equal(read, x)
    assert read.data_ptr() % 4 == 0
    assert torch.equal(checkpoint.joined(["x", "x"]), torch.cat([x, x]))


@given(rows=st.lists(st.integers(0, 400), min_size=1, max_size=5), columns=st.integers(1, 1100), seed=st.integers(0, 9),
       dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.int8]), order=st.randoms())  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_joined_is_torch_cat_whatever_the_sizes(tmp_path_factory, rows, columns, seed, dtype, order):
    torch.manual_seed(seed)
    folder = tmp_path_factory.mktemp("joined")
    tensors = {f"t{i}": random_of(dtype, count, columns) for i, count in enumerate(rows)}
    save_file(tensors, folder / "a.safetensors")
    save_file({"u": random_of(dtype, 300, columns)}, folder / "b.safetensors")
    names = [*tensors, "u"]
    order.shuffle(names)
    checkpoint = Checkpoint(folder)
    expected = load_file(folder / "a.safetensors") | load_file(folder / "b.safetensors")
    assert same_bytes(checkpoint.joined(names), torch.cat([expected[name].reshape(-1) for name in names]))


def test_joining_matrices_of_whole_pages_copies_nothing(tmp_path: Path):
    # Saved by descending alignment and name: k, o, q, v. None of q, k, v is next to another.
    tensors = {name: torch.randn(1024, 1024) for name in "qkvo"}  # 4 MB each
    save_file({**tensors, "norm": torch.randn(1024)}, tmp_path / "x.safetensors")
    checkpoint = Checkpoint(tmp_path / "x.safetensors")
    before = resident_bytes()
    assert checkpoint.copied_bytes(["q", "k", "v"]) < 64 << 10
    joined = checkpoint.joined(["q", "k", "v"]).view(3072, 1024)
    assert resident_bytes() - before < 1 << 20
    assert torch.equal(joined, torch.cat([tensors[name] for name in "qkv"]))
    joined.zero_()
    assert torch.equal(checkpoint["k"], tensors["k"])


def test_read_into_fills_a_slice_in_place_and_maps_nothing(tmp_path: Path):
    x = torch.randn(8 << 20)  # 32 MB: several chunks
    save_file({"x": x}, tmp_path / "x.safetensors")
    checkpoint = Checkpoint(tmp_path / "x.safetensors")
    out = torch.zeros(3, 8 << 20)
    before = resident_bytes()
    checkpoint.read_into("x", out[1])
    assert resident_bytes() - before < 4 << 20
    assert torch.equal(out[1], x)
    assert not out[0].any()
    assert not out[2].any()


@pytest.mark.parametrize(
    ("stored", "wanted"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32")]
)
def test_read_into_converts_as_torch_does(tmp_path: Path, stored: str, wanted: str):
    x = torch.randn(5_000_000).to(getattr(torch, stored))  # more than one chunk
    save_file({"x": x}, tmp_path / "x.safetensors")
    out = torch.empty(5_000_000, dtype=getattr(torch, wanted))
    Checkpoint(tmp_path / "x.safetensors").read_into("x", out)
    assert same_bytes(out, x.to(out.dtype))


def test_no_room_left_is_an_error(tmp_path: Path):
    save_file({"x": torch.zeros(64 << 20, dtype=torch.int8)}, tmp_path / "x.safetensors")
    checkpoint = Checkpoint(tmp_path)
    limit = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    try:
        resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), limit[1]))
        with pytest.raises(
            LoadError, match=r"there is no room for a weight of 67.1 MB: Cannot allocate memory"
        ):
            checkpoint.tensor("x")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
    assert checkpoint.tensor("x").shape == (64 << 20,)


def test_tensors_may_be_read_from_several_threads(tmp_path: Path):
    tensors = {f"t{i}": torch.full((1000, 100), float(i)) for i in range(40)}
    save_file(tensors, tmp_path / "x.safetensors")
    checkpoint, wrong = Checkpoint(tmp_path / "x.safetensors"), []

    def read() -> None:
        wrong.extend(name for name in tensors if not torch.equal(checkpoint[name], tensors[name]))

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_files_are_closed_with_the_checkpoint(tmp_path: Path):
    save_file({"x": torch.ones(4)}, tmp_path / "x.safetensors")
    gc.collect()  # files of others
    before = len(os.listdir("/proc/self/fd"))
    x = Checkpoint(tmp_path / "x.safetensors")["x"]
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before
    assert x.sum() == 4


def test_headers_only_has_shapes_and_no_data(tmp_path: Path):
    save_file({"x": torch.ones(4)}, tmp_path / "x.safetensors")
    os.truncate(tmp_path / "x.safetensors", (tmp_path / "x.safetensors").stat().st_size - 16)
    checkpoint = Checkpoint(tmp_path, headers_only=True)
    assert checkpoint.info("x").shape == (4,)
    with pytest.raises(LoadError, match="'x' has no data: the checkpoint was opened with headers_only=True"):
        checkpoint.tensor("x")


def test_an_unknown_name_is_an_error_with_the_nearest(tmp_path: Path):
    save_file({"model.layers.0.weight": torch.ones(4)}, tmp_path / "x.safetensors")
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(
        LoadError, match=r"no tensor 'model.layer.0.weight'\n  help: nearest: 'model.layers.0.weight'"
    ):
        checkpoint.tensor("model.layer.0.weight")
    with pytest.raises(KeyError):
        checkpoint["model.layer.0.weight"]
    assert checkpoint.get("model.layer.0.weight") is None


def test_a_file_that_shrinks_after_opening_is_an_error_and_no_crash(tmp_path: Path):
    save_file({"x": torch.ones(1 << 20)}, tmp_path / "x.safetensors")
    checkpoint = Checkpoint(tmp_path)
    os.truncate(tmp_path / "x.safetensors", 1000)
    with pytest.raises(LoadError, match="the file has become shorter since its header was read"):
        checkpoint.tensor("x")


def test_a_dtype_torch_has_no_name_for_is_an_error_only_when_read(tmp_path: Path):
    header = b'{"x":{"dtype":"F6_E2M3","shape":[4],"data_offsets":[0,3]}}'
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"abc")
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(LoadError, match="tensor 'x' is float6_e2m3, for which torch has no dtype"):
        checkpoint.tensor("x")


class TestBrokenFolders:
    def test_every_broken_shard_is_listed(self, tmp_path: Path):
        sharded(tmp_path, {"a": torch.ones(4)}, {"b": torch.ones(4)}, {"c": torch.ones(4)})
        for number in (1, 3):
            os.truncate(tmp_path / f"model-0000{number}-of-00003.safetensors", 30)
        with pytest.raises(
            LoadError, match=r"00001-of-00003.safetensors: the header length(.|\n)*00003-of-00003"
        ) as caught:
            Checkpoint(tmp_path)
        assert "00002-of" not in str(caught.value)

    def test_an_index_that_names_an_absent_shard(self, tmp_path: Path):
        sharded(
            tmp_path,
            {"a": torch.ones(4)},
            index={"a": "model-00001-of-00001.safetensors", "b": "gone.safetensors"},
        )
        with pytest.raises(LoadError, match=r"it names 'gone.safetensors', which is not in this folder"):
            Checkpoint(tmp_path)

    @pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "."])
    def test_an_index_that_leads_out_of_the_folder(self, tmp_path: Path, name: str):
        (tmp_path / "model").mkdir()
        save_file({"a": torch.ones(4)}, tmp_path / "x.safetensors")
        sharded(tmp_path / "model", {"a": torch.ones(4)}, index={"a": name})
        with pytest.raises(LoadError, match=f"it names '{name}', which is not in this folder"):
            Checkpoint(tmp_path / "model")

    def test_index_and_shards_that_disagree(self, tmp_path: Path):
        one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
        shards = {"a": torch.ones(4), "b": torch.ones(4)}, {"c": torch.ones(4)}
        sharded(tmp_path, *shards, index={"a": two, "c": two, "d": one})
        with pytest.raises(LoadError) as caught:
            Checkpoint(tmp_path)
        assert caught.value.details == (
            f"{one}: has tensor 'a', which the index places in {two}",
            f"{one}: the index names tensor 'd', which is not in this file",
            f"{one}: tensor 'b' is not in the index",
        )

    def test_a_tensor_in_two_shards(self, tmp_path: Path):
        for name in "xy":
            save_file({"a": torch.ones(4)}, tmp_path / f"{name}.safetensors")
        with pytest.raises(LoadError, match=r"y.safetensors: tensor 'a' is in x.safetensors as well"):
            Checkpoint(tmp_path)

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {"a": 1}}', "[" * 99_999])
    def test_an_index_that_is_no_index(self, tmp_path: Path, text: str):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(LoadError, match=r"index.json(: 'weight_map' must map| is not valid JSON)"):
            Checkpoint(tmp_path)

    def test_a_folder_without_safetensors(self, tmp_path: Path):
        with pytest.raises(LoadError, match="there is no safetensors file in this folder"):
            Checkpoint(tmp_path)
        (tmp_path / "pytorch_model.bin").touch()
        with pytest.raises(LoadError, match=r"it has pytorch_model.bin, which may hold code and is not read"):
            Checkpoint(tmp_path)

    def test_a_path_that_is_not_there(self, tmp_path: Path):
        with pytest.raises(LoadError, match="no such file or folder"):
            Checkpoint(tmp_path / "absent")
