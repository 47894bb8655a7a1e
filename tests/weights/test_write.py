# SPDX-License-Identifier: Apache-2.0
"""Written files: read back by the safetensors library, whole or not there at all."""

import json
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from children import code_of, in_child
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_checks import measured_peak
from safetensors import safe_open
from safetensors.torch import load_file

from nnfront.errors import LoadError
from nnfront.weights import Checkpoint, stored_type, write_tensors

DTYPES = (torch.bool, torch.int8, torch.uint8, torch.int16, torch.int64, torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32, torch.float64)  # fmt: skip


def write(folder: Path, tensors: dict[str, torch.Tensor], **options) -> list[Path]:
    types = {name: stored_type(t) for name, t in tensors.items()}
    return write_tensors(folder, "model", types, reversed(tensors.items()), **options)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (t.contiguous().view(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(a, b)


@given(
    shapes=st.lists(
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 70), max_size=3), st.booleans()),
        max_size=8,
    ),
    shard_bytes=st.sampled_from([1, 5000, 10**9]),
)
@settings(max_examples=60, deadline=None)
def test_what_is_written_is_what_the_reference_library_reads(tmp_path_factory, shapes, shard_bytes: int):
    folder = tmp_path_factory.mktemp("written")
    tensors = {}
    for i, (dtype, shape, is_transposed) in enumerate(shapes):
        tensor = torch.randint(0, 2, shape).to(dtype)
        tensors[f"t{i}"] = tensor.permute(tuple(reversed(range(tensor.ndim)))) if is_transposed else tensor
    files = write(folder, tensors, shard_bytes=shard_bytes, metadata={"made": "here"})
    assert sorted(files) == sorted(folder.iterdir())
    shards = [file for file in files if file.suffix == ".safetensors"]
    read = {}
    for file in shards:
        read |= load_file(file)
        with safe_open(file, "pt") as peer:
            assert peer.metadata() == {"made": "here"}
    assert read.keys() == tensors.keys()
    assert all(
        read[n].shape == t.shape and read[n].dtype == t.dtype and same(read[n], t) for n, t in tensors.items()
    )
    if len(shards) > 1:
        index = json.loads(files[-1].read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
        assert set(index["weight_map"]) == set(tensors)
    if shapes:
        ours = Checkpoint(folder)
        assert all(same(ours[name], tensor) for name, tensor in tensors.items())


def test_a_shard_is_filled_in_order_up_to_its_size(tmp_path: Path):
    tensors = {name: torch.zeros(250) for name in "abcde"}  # 1000 bytes each
    write(tmp_path, tensors, shard_bytes=2000)
    where = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert [where[name][6:11] for name in "abcde"] == ["00001", "00001", "00002", "00002", "00003"]


def test_tensors_of_whole_pages_begin_on_pages_and_all_at_their_elements_size(tmp_path: Path):
    tensors = {"odd": torch.zeros(3, dtype=torch.int8), "two": torch.zeros(5, dtype=torch.int16), "page": torch.zeros(1024), "x": torch.zeros(7)}  # fmt: skip
    write(tmp_path, tensors)
    checkpoint = Checkpoint(tmp_path)
    assert checkpoint.info("page").offset % 4096 == 0
    assert all(checkpoint.info(name).offset % t.itemsize == 0 for name, t in tensors.items())
    assert min(info.offset for info in checkpoint.infos.values()) % 64 == 0


def test_what_is_not_contiguous_is_copied_in_blocks(tmp_path: Path):
    wide = torch.zeros(1, dtype=torch.bfloat16).expand(100_000, 1000)  # 200 MB that are nowhere
    assert measured_peak(lambda: write(tmp_path, {"wide": wide})) < 50e6  # a block, and the next
    assert (tmp_path / "model.safetensors").stat().st_size > 200e6


@pytest.mark.parametrize(("first", "second"), [(1, 10**9), (10**9, 1), (1, 500)])
def test_what_an_earlier_write_left_is_not_read_instead(tmp_path: Path, first: int, second: int):
    write(tmp_path, {name: torch.zeros(100) for name in "abc"}, shard_bytes=first)
    files = write(tmp_path, {name: torch.ones(100) for name in "abc"}, shard_bytes=second)
    assert sorted(files) == sorted(tmp_path.iterdir())
    assert Checkpoint(tmp_path)["b"].sum() == 100


def test_progress_counts_bytes_up_to_all(tmp_path: Path):
    told: list[tuple[int, int]] = []
    write(tmp_path, {"a": torch.zeros(100), "b": torch.zeros(10)}, progress=lambda *args: told.append(args))
    assert told == [(40, 440), (440, 440)]


class TestNothingIsLost:
    old = {"old": torch.ones(4)}  # noqa: RUF012

    def whole(self, folder: Path) -> bool:
        """Whether the old file is there as it was, and no other."""
        return [f.name for f in folder.iterdir()] == ["model.safetensors"] and same(
            load_file(folder / "model.safetensors")["old"], self.old["old"]
        )

    @pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()], ids=["error", "Ctrl-C"])
    def test_a_failure_in_the_middle(self, tmp_path: Path, error: BaseException):
        write(tmp_path, self.old)
        types = {name: stored_type(torch.zeros(1000)) for name in "ab"}

        def make():
            yield "a", torch.zeros(1000)
            raise error

        with pytest.raises(type(error)):
            write_tensors(tmp_path, "model", types, make())
        assert self.whole(tmp_path)

    def test_a_full_disk_is_noticed_before_anything_is_made(self, tmp_path: Path, monkeypatch):
        write(tmp_path, self.old)

        def full(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        types = {"a": stored_type(torch.zeros(1000))}
        with pytest.raises(
            LoadError,
            match=r"weights cannot be written: No space left on device\n  0.00 GB are needed, .* GB are free",
        ):
            write_tensors(tmp_path, "model", types, iter(lambda: pytest.fail("made"), None))
        assert self.whole(tmp_path)

    def test_a_disk_that_fills_while_writing(self, tmp_path: Path, monkeypatch):
        write(tmp_path, self.old)
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        try:
            resource.setrlimit(
                resource.RLIMIT_FSIZE, (100_000, limit[1])
            )  # the system's own way to refuse bytes
            with pytest.raises(LoadError, match="weights cannot be written: File too large"):
                write(tmp_path, {"a": torch.zeros(1_000_000)})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            signal.signal(signal.SIGXFSZ, before)
        assert self.whole(tmp_path)

    def test_a_folder_that_is_not_there_or_no_folder(self, tmp_path: Path):
        with pytest.raises(LoadError, match="weights cannot be written: No such file or directory"):
            write(tmp_path / "absent", self.old)
        (tmp_path / "file").touch()
        with pytest.raises(LoadError, match="weights cannot be written: Not a directory"):
            write(tmp_path / "file", self.old)

    def test_a_process_that_is_killed(self, tmp_path: Path):
        write(tmp_path, self.old)

        def make():
            yield "a", torch.zeros(1000)
            os.kill(os.getpid(), signal.SIGKILL)

        types = dict.fromkeys("ab", stored_type(torch.zeros(1000)))
        child = in_child(lambda: write_tensors(tmp_path, "model", types, make()))
        assert code_of(child) == -signal.SIGKILL
        assert same(load_file(tmp_path / "model.safetensors")["old"], self.old["old"])
        write(tmp_path, {"new": torch.ones(3)})
        assert list(load_file(tmp_path / "model.safetensors")) == ["new"]


def test_a_reader_keeps_what_it_has_while_the_file_is_replaced(tmp_path: Path):
    write(tmp_path, {"x": torch.ones(1 << 20)})
    x = Checkpoint(tmp_path)["x"]
    write(tmp_path, {"x": torch.zeros(1 << 20)})
    assert x.sum() == 1 << 20
    assert Checkpoint(tmp_path)["x"].sum() == 0
