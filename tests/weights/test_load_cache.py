# SPDX-License-Identifier: Apache-2.0
"""`load(..., cache=DIR)`: the second load computes nothing and reads no source; no kill, full disk or changed file makes it wrong."""

import errno
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

import nnfront as nn
from nnfront import op, spec
from nnfront.errors import LoadError
from nnfront.weights import content_hashes as contents
from nnfront.weights import transform_store as cache_module
from nnfront.weights import write


class Model(nn.Module):
    """Per layer a quantised weight with its scale and a folded norm; a table that is stored under two names and turned."""

    def __init__(self, layers: int):
        self.embed = nn.Embedding(96, 64)
        self.head = nn.Linear(64, 96, bias=False)
        self.head.weight = self.embed.weight
        self.table = op.permute_dims(self.embed.weight) * 0.5
        self.w = [nn.Linear(64, 64, bias=False) for _ in range(layers)]
        self.norm = [nn.Parameter((64,)) for _ in range(layers)]
        self.packed = [op.quantize(each.weight) for each in self.w]
        self.shifted = [each + 1.0 for each in self.norm]

    def forward(self, tokens):
        x = op.take(op.permute_dims(self.table), tokens, 0)
        for (packed, scale), norm in zip(self.packed, self.shifted, strict=True):
            x = op.linear(x, op.dequantize(packed, scale)) * norm
        return x


LAYERS = 2
IR = Model(LAYERS).export({"forward": {"tokens": spec.Tensor(["n"], "int64")}})
EXECUTABLE = nn.compile(nn.passes.lift_transform_params(IR, shared_transform=True))


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {f"w.{i}.weight": torch.randn(64, 64, generator=generator) for i in range(LAYERS)}
    found |= {f"norm.{i}": torch.randn(64, generator=generator) for i in range(LAYERS)}
    embed = torch.randn(96, 64, generator=generator)
    return found | {"embed.weight": embed, "head.weight": embed.clone()}


def assert_right(session, expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit what a load without a cache gives."""
    fresh = EXECUTABLE.load(expected)
    assert session.weights.keys() == fresh.weights.keys()
    assert all(torch.equal(session.weights[name], value) for name, value in fresh.weights.items())


def kept(cache: Path) -> set[str]:
    return set(os.listdir(cache / "results"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    save_file(weights(), tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


@pytest.fixture
def reads(monkeypatch, folder: Path) -> list[str]:
    """Every tensor of the model's folder that is mapped or read, whichever way."""
    seen: list[str] = []

    def noting(method, names_of):
        def call(self, what, *args):
            if folder in self.path.parents or self.path == folder:
                seen.extend(names_of(what))
            return method(self, what, *args)

        return call

    for name, names_of in (
        ("_laid_out", lambda infos: [info.name for info in infos]),
        ("read_into", lambda name: [name]),
        ("blocks", lambda name: [name]),
    ):
        monkeypatch.setattr(nn.Checkpoint, name, noting(getattr(nn.Checkpoint, name), names_of))
    return seen


@pytest.fixture
def computed(monkeypatch) -> list[str]:
    """Every result that a load with a cache computes."""
    seen: list[str] = []
    stream = cache_module.stream_transform

    def noting(*args, **kwargs):
        for name, value in stream(*args, **kwargs):
            seen.append(name)
            yield name, value

    monkeypatch.setattr(cache_module, "stream_transform", noting)
    return seen


class TestAgain:
    def test_the_second_load_computes_nothing_and_reads_no_source(self, folder, tmp_path, reads, computed):
        first = EXECUTABLE.load(nn.Checkpoint(folder), cache=tmp_path / "cache")
        assert sorted(first.weights) == sorted(computed)
        assert set(reads) == weights().keys()
        reads.clear()
        computed.clear()
        second = EXECUTABLE.load(nn.Checkpoint(folder), cache=tmp_path / "cache")
        assert reads == computed == []
        assert_right(second, weights())

    @pytest.mark.parametrize(
        ("name", "parts"),
        [("w.1.weight", 2), ("norm.1", 1), ("embed.weight", 1)],
    )
    def test_a_changed_tensor_renews_what_is_made_of_it(
        self, folder, tmp_path, computed, name: str, parts: int
    ):
        EXECUTABLE.load(nn.Checkpoint(folder), cache=tmp_path / "cache")
        computed.clear()
        changed = weights() | {name: weights(1)[name]}
        changed["head.weight"] = changed["embed.weight"].clone()
        save_file(changed, folder / "model.safetensors")
        session = EXECUTABLE.load(nn.Checkpoint(folder), cache=tmp_path / "cache")
        assert len(computed) == parts
        assert_right(session, changed)

    def test_ties_are_compared_by_content(self, folder, tmp_path, reads):
        different = weights() | {"head.weight": weights(1)["embed.weight"]}
        for _ in range(2):
            save_file(different, folder / "model.safetensors")
            with pytest.raises(LoadError, match=r"tied in the model, but their bytes differ"):
                EXECUTABLE.load(nn.Checkpoint(folder), cache=tmp_path / "cache")

    def test_a_cache_that_has_everything_may_be_read_only(self, folder, tmp_path, monkeypatch):
        EXECUTABLE.load(nn.Checkpoint(folder), cache=tmp_path / "cache")
        monkeypatch.setattr(os, "open", _refusing(os.open, os.O_WRONLY | os.O_CREAT, errno.EROFS))
        assert_right(EXECUTABLE.load(nn.Checkpoint(folder), cache=tmp_path / "cache"), weights())


class TestChangedFiles:
    """A file is known by path, inode, size and two times. None of these tricks passes old results off as new ones."""

    def change(self, file: Path, seed: int) -> None:
        """Write other bytes into the same file, of the same size, and set its time back."""
        before = os.stat(file)
        save_file(weights(seed), file.with_name("other"))
        with open(file, "r+b") as target:
            target.write(file.with_name("other").read_bytes())
        file.with_name("other").unlink()
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        after = os.stat(file)
        assert (after.st_ino, after.st_size, after.st_mtime_ns) == (
            before.st_ino,
            before.st_size,
            before.st_mtime_ns,
        )

    def test_a_time_that_was_set_back_does_not_help(self, folder, tmp_path):
        EXECUTABLE.load(nn.Checkpoint(folder), cache=tmp_path / "cache")
        self.change(folder / "model.safetensors", 1)
        assert_right(EXECUTABLE.load(nn.Checkpoint(folder), cache=tmp_path / "cache"), weights(1))

    def test_changes_faster_than_the_clock_are_seen(self, folder, tmp_path):
        for seed in range(1, 11):
            EXECUTABLE.load(nn.Checkpoint(folder), cache=tmp_path / "cache")
            self.change(folder / "model.safetensors", seed)
            assert_right(EXECUTABLE.load(nn.Checkpoint(folder), cache=tmp_path / "cache"), weights(seed))

    def test_a_file_that_changes_while_it_is_hashed_is_an_error(self, folder, tmp_path, monkeypatch):
        blocks, test = nn.Checkpoint.blocks, self

        def changing(self, name):
            yield from blocks(self, name)
            test.change(folder / "model.safetensors", 1)

        monkeypatch.setattr(os, "cpu_count", lambda: 1)  # one thread: no other sees the file half changed
        monkeypatch.setattr(nn.Checkpoint, "blocks", changing)
        with pytest.raises(LoadError, match=r"model.safetensors: the file was changed while it was read"):
            EXECUTABLE.load(nn.Checkpoint(folder), cache=tmp_path / "cache")
        monkeypatch.undo()
        assert_right(EXECUTABLE.load(nn.Checkpoint(folder), cache=tmp_path / "cache"), weights(1))

    def test_a_file_that_is_replaced_after_its_header_was_read_stays_what_it_was(self, folder, tmp_path):
        checkpoint = nn.Checkpoint(folder)
        save_file(weights(1), folder / "new")
        os.replace(folder / "new", folder / "model.safetensors")
        for cache in (None, tmp_path / "cache"):
            assert_right(EXECUTABLE.load(checkpoint, cache=cache), weights(0))

    def test_a_file_that_is_written_over_after_its_header_was_read_is_an_error(self, folder):
        checkpoint = nn.Checkpoint(folder)
        self.change(folder / "model.safetensors", 1)
        os.utime(folder / "model.safetensors", (1, 1))
        text = r"the file has been changed since its header was read\n  help: open the checkpoint again"
        with pytest.raises(LoadError, match=text):
            EXECUTABLE.load(checkpoint)


def _refusing(call, flags: int, code: int, after: int = 0):
    """`os.open` that fails for writers, from some call on."""
    count = iter(range(10**9))

    def refuse(path, given, *args, **kwargs):
        if given & flags and next(count) >= after:
            raise OSError(code, os.strerror(code), str(path))
        return call(path, given, *args, **kwargs)

    return refuse


class TestNoRoom:
    """Whatever the folder refuses, the error says so, and what was there before stays usable."""

    def assert_usable(self, folder: Path, cache: Path) -> None:
        assert not [file for file in cache.rglob(".*")], "something half-written is left"
        assert_right(EXECUTABLE.load(nn.Checkpoint(folder), cache=cache), weights())

    @pytest.mark.parametrize("after", [0, 3])
    def test_a_folder_that_is_read_only(self, folder, tmp_path, monkeypatch, after: int):
        cache = tmp_path / "cache"
        with monkeypatch.context() as patch:
            patch.setattr(os, "open", _refusing(os.open, os.O_WRONLY | os.O_CREAT, errno.EROFS, after))
            with pytest.raises(
                LoadError, match=rf"{cache}/\w+: weights cannot be written: Read-only file system"
            ):
                EXECUTABLE.load(nn.Checkpoint(folder), cache=cache)
        assert len(kept(cache)) <= after
        self.assert_usable(folder, cache)

    def test_a_folder_that_cannot_be_made(self, folder, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(LoadError, match=r"file/cache/results: the cache cannot be made: Not a directory"):
            EXECUTABLE.load(nn.Checkpoint(folder), cache=tmp_path / "file" / "cache")
        with pytest.raises(LoadError, match=r"/proc/nnfront/results: the cache cannot be made: "):
            EXECUTABLE.load(nn.Checkpoint(folder), cache="/proc/nnfront")

    def test_a_disk_without_room_for_a_file(self, folder, tmp_path):
        """The limit on the size of files is the one that can be had without a disk of one's own."""
        cache = tmp_path / "cache"
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
        try:
            with pytest.raises(
                LoadError,
                match=r"weights cannot be written: File too large\n  0.00 GB are needed, .* GB are free",
            ):
                EXECUTABLE.load(nn.Checkpoint(folder), cache=cache)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        self.assert_usable(folder, cache)

    @pytest.mark.parametrize("after", [0, 2, 7])
    def test_a_disk_that_fills_up_on_the_way(self, folder, tmp_path, monkeypatch, after: int):
        cache, written, count = tmp_path / "cache", write._write_at, iter(range(10**9))

        def full(*args):
            if next(count) >= after:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written(*args)

        with monkeypatch.context() as patch:
            patch.setattr(write, "_write_at", full)
            with pytest.raises(
                LoadError, match=r"weights cannot be written: No space left on device\n  .* GB are needed"
            ):
                EXECUTABLE.load(nn.Checkpoint(folder), cache=cache)
        self.assert_usable(folder, cache)

    @pytest.mark.skipif(not os.path.exists("/dev/full"), reason="the device is Linux's")
    def test_hashes_on_a_full_disk(self, folder, tmp_path, monkeypatch):
        """/dev/full is a disk that is always full."""
        cache, make_file = tmp_path / "cache", write.make_file

        def to_full(file: Path, suffix: str) -> tuple[Path, int]:
            place, fd = make_file(file, suffix)
            if file.suffix == ".json":
                os.close(fd)
                fd = os.open("/dev/full", os.O_WRONLY)
            return place, fd

        with monkeypatch.context() as patch:
            patch.setattr(write, "make_file", to_full)
            with pytest.raises(
                LoadError, match=r"sources: weights cannot be written: No space left on device"
            ):
                EXECUTABLE.load(nn.Checkpoint(folder), cache=cache)
        self.assert_usable(folder, cache)


def test_weights_in_memory_have_no_cache(tmp_path):
    with pytest.raises(
        LoadError,
        match=r"only weights from files can be cached\n  help: load a Checkpoint, or leave the cache out",
    ):
        EXECUTABLE.load(weights(), cache=tmp_path)


def test_conversions_are_kept_too(tmp_path, computed):
    """Floats that are converted while they are read take memory, and a second load spares it."""

    class Raw(nn.Module):
        def __init__(self):
            self.a, self.b = nn.Linear(1024, 512, bias=False), nn.Linear(1024, 512, bias=False)
            self.ab = op.concat([self.a.weight, self.b.weight], dim=0)

        def forward(self, x):
            return op.linear(x, self.ab)

    ir = Raw().export({"forward": {"x": spec.Tensor(["n", 1024], "float32")}})
    executable = nn.compile(nn.passes.lift_transform_params(ir))
    given = {f"{n}.weight": torch.randn(512, 1024).to(torch.bfloat16) for n in "ab"}
    save_file(given, tmp_path / "model.safetensors")
    for expected in (["ab"], []):
        computed.clear()
        session = executable.load(
            nn.Checkpoint(tmp_path / "model.safetensors"), cast=True, cache=tmp_path / "cache"
        )
        assert computed == expected
        assert torch.equal(session.weights["ab"], torch.cat([*given.values()]).float())


def test_hashing_waits_until_the_clock_has_ticked(folder, tmp_path, monkeypatch):
    slept: list[float] = []
    os.utime(folder / "model.safetensors")  # changes it
    changed = (folder / "model.safetensors").stat().st_ctime_ns
    now = SimpleNamespace(time_ns=lambda: changed + contents.TICK_NS // 2, sleep=slept.append)
    monkeypatch.setattr(contents, "time", now)
    EXECUTABLE.load(nn.Checkpoint(folder), cache=tmp_path / "cache")
    assert slept
    assert set(slept) == {contents.TICK_NS / 2 / 1e9}
