# SPDX-License-Identifier: Apache-2.0
"""Weights to a device: every byte, in pieces, from a ring whose slots are not filled before their copies are done."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
from fake_link import FakeLink
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

import nnfront as nn
from nnfront import op, spec
from nnfront.backends.cuda import upload
from nnfront.backends.cuda.upload import Upload, pieces

SLOT = 256
CPU = torch.device("cpu")


def values(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of up to three axes in some order, with gaps or not."""
    shape = draw(st.lists(st.integers(0, 9), max_size=3))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.int64]))
    whole = torch.randint(0, 2, [2 * n for n in shape]).to(dtype)
    if draw(st.booleans()):
        whole = whole[tuple(slice(0, None, 2) for _ in shape)]
    return whole.permute(draw(st.permutations(range(len(shape))))) if shape else whole


@given(data=st.data())
@settings(max_examples=60)
def test_every_byte_arrives_however_late_the_device_copies(data):
    tensors = [values(data.draw) for _ in range(data.draw(st.integers(0, 6)))]
    link = FakeLink(eager=data.draw(st.booleans()))
    sent = Upload(
        link, CPU, slots=data.draw(st.integers(1, 3)), slot_bytes=data.draw(st.sampled_from([8, 64]))
    )
    found = [sent.send(f"w{i}", tensor) for i, tensor in enumerate(tensors)]
    sent.finish()
    assert not link.pending
    for tensor, copy in zip(tensors, found, strict=True):
        assert copy.is_contiguous()
        assert torch.equal(copy, tensor)


@pytest.mark.parametrize("shape", [(5, 7, 3), (1, 1, 200), (200,), (2, 100, 1)])
@pytest.mark.parametrize("turned", [False, True])
def test_pieces_are_small_and_cover_a_tensor_once(shape, turned):
    source = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
    source = source.permute(tuple(reversed(range(len(shape))))) if turned else source
    target = torch.zeros(source.shape)
    for part, place in pieces(source, target, 40):
        assert part.nbytes <= 40
        assert place.is_contiguous()
        place += part
    assert torch.equal(target, source)


def test_the_ring_is_all_the_pinned_memory_there_is_and_its_slots_are_used_again():
    link = FakeLink()
    sent = Upload(link, CPU, slots=3, slot_bytes=SLOT)
    sent.send("w", torch.zeros(100 * SLOT, dtype=torch.uint8))
    sent.finish()
    assert [slot.nbytes for slot in link.slots] == [SLOT] * 3
    assert link.copies == 100


@pytest.mark.parametrize("there", [1, 3])
def test_a_ring_for_which_there_is_too_little_pinned_memory_has_fewer_slots(there):
    def fails(what: str, size: int) -> None:
        if what == "pinned" and len(link.slots) == there:
            raise RuntimeError("CUDA error: out of memory")

    link = FakeLink(fails=fails)
    sent = Upload(link, CPU, slots=4, slot_bytes=SLOT)
    value = torch.arange(20 * SLOT, dtype=torch.int32)
    copy = sent.send("w", value)
    sent.finish()
    assert len(link.slots) == there
    assert torch.equal(copy, value)


def test_without_anything_to_send_nothing_is_taken():
    link = FakeLink()
    sent = Upload(link, CPU, slots=3, slot_bytes=SLOT)
    sent.send("dim", 7)
    sent.finish()
    assert not link.slots


def test_what_was_sent_is_let_go_of():
    sent = Upload(FakeLink(), CPU, slots=1, slot_bytes=SLOT)
    gone = []
    for i in range(4):
        value = torch.ones(SLOT)
        gone.append(weakref.ref(value))
        sent.send(f"w{i}", value)
        del value
    sent.finish()
    del sent
    gc.collect()
    assert [ref() for ref in gone] == [None] * 4


def test_what_is_on_the_device_already_is_not_sent():
    link = FakeLink()
    sent = Upload(link, CPU, slots=1, slot_bytes=SLOT)
    there = sent.send("w", torch.ones(3))
    assert sent.send("again", there) is there
    assert sent.send("dim", 7) == 7
    sent.finish()
    assert link.copies == 1


def test_progress_counts_bytes_up_to_all_of_them():
    told: list[tuple[int, int]] = []
    sent = Upload(
        FakeLink(), CPU, lambda done, total: told.append((done, total)), 600, slots=2, slot_bytes=100
    )
    for name in "ab":
        sent.send(name, torch.zeros(300, dtype=torch.uint8))
    sent.finish()
    assert told == [(100 * i, 600) for i in range(1, 7)]


@pytest.mark.parametrize("nth", [1, 3, 6])
def test_an_error_of_the_reader_reaches_the_caller_once_nothing_is_under_way(nth):
    calls = []

    def fails(what: str, size: int) -> None:
        calls.append(what)
        if what == "copy" and calls.count("copy") == nth:
            raise RuntimeError("the wire is cut")

    link = FakeLink(fails=fails)
    with pytest.raises(RuntimeError, match="the wire is cut") as caught:  # noqa: PT012
        sent = Upload(link, CPU, slots=2, slot_bytes=SLOT)
        try:
            for i in range(8):
                sent.send(f"w{i}", torch.ones(SLOT, dtype=torch.uint8))
        finally:
            sent.finish()
    assert caught.value.__notes__ == [f"while weight 'w{nth - 1}' was sent to the device"]
    assert not link.pending
    assert link.copies == nth - 1


def test_a_stop_waits_for_what_is_under_way_and_reads_no_more():
    link = FakeLink()
    sent = Upload(link, CPU, slots=4, slot_bytes=SLOT)
    sent.send("w", torch.ones(SLOT, dtype=torch.uint8))
    sent.stop()
    assert not link.pending
    assert link.copies <= 1
    assert not any(thread.name == "nnfront upload" for thread in threading.enumerate())


class TwoLayers(nn.Module):
    """A fused weight, one that is read as it is by both methods, and a tie."""

    def __init__(self) -> None:
        self.a, self.b = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)
        self.c = nn.Linear(32, 4, bias=False)
        self.fused = op.concat([self.a.weight, self.b.weight], dim=0)

    def first(self, x: nn.Tensor) -> nn.Tensor:
        return self.c(op.matmul(x, op.permute_dims(self.fused)))

    def second(self, x: nn.Tensor) -> nn.Tensor:
        return op.relu(self.first(x))


@pytest.fixture
def links(monkeypatch):
    """A GPU that is not there, for sessions of the target cuda: the links to it so far."""
    made: list[FakeLink] = []
    device: list[torch.Tensor] = []

    def link_to(where: torch.device) -> FakeLink:
        made.append(FakeLink(device=device))
        return made[-1]

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(upload, "link_to", link_to)
    return made


def compiled(**lift) -> tuple[nn.Executable, dict[str, torch.Tensor]]:
    model = TwoLayers()
    ir = model.export({name: {"x": spec.Tensor(["n", 8])} for name in ("first", "second")})
    weights = {name: torch.randn([int(s) for s in p.shape]) for name, p in model.named_parameters()}
    return nn.compile(nn.passes.lift_transform_params(ir, **lift), target="cuda"), weights


@pytest.mark.parametrize("shared", [True, False])
def test_a_session_for_cuda_holds_each_weight_once_on_the_device(links, shared):
    executable, weights = compiled(shared_transform=shared)
    session = executable.load(weights)
    fused = torch.cat([weights["a.weight"], weights["b.weight"]])  # in the order of the kernels
    assert sorted(tuple(t.shape) for t in links[0].made) == [(4, 32), (32, 8)]
    assert {t.data_ptr() for t in session.weights.values()} == {t.data_ptr() for t in links[0].made}
    by_shape = {tuple(t.shape): t for t in session.weights.values()}
    assert torch.equal(by_shape[32, 8], fused)
    assert torch.equal(by_shape[4, 32], weights["c.weight"])


def test_a_load_holds_three_computed_weights_at_most(links, monkeypatch):
    class Many(nn.Module):
        def __init__(self) -> None:
            self.parts = nn.ModuleList([nn.Linear(8, 16, bias=False) for _ in range(8)])
            self.scaled = [part.weight * 2.0 for part in self.parts]

        def forward(self, x: nn.Tensor) -> list[nn.Tensor]:
            return [op.linear(x, weight) for weight in self.scaled]

    model = Many()
    ir = model.export({"forward": {"x": spec.Tensor(["n", 8])}})
    executable = nn.compile(nn.passes.lift_transform_params(ir, shared_transform=True), target="cuda")
    alive, most = [], []
    plain = Upload.send

    def send(self: Upload, name: str, value: object) -> object:
        alive.append(weakref.ref(value))
        most.append(sum(ref() is not None for ref in alive))
        return plain(self, name, value)

    monkeypatch.setattr(Upload, "send", send)
    executable.load({name: torch.randn(16, 8) for name, _ in model.named_parameters()})
    assert len(most) >= 8
    # One that is read, one that waits, one that is made.
    assert max(most[:8]) <= 3


def test_a_load_that_fails_leaves_nothing_under_way(links, monkeypatch):
    executable, weights = compiled(shared_transform=True)

    def fails(what: str, size: int) -> None:
        if what == "copy":
            raise RuntimeError("the wire is cut")

    monkeypatch.setattr(upload, "link_to", lambda device: links.append(FakeLink(fails=fails)) or links[-1])
    with pytest.raises(RuntimeError, match="the wire is cut"):
        executable.load(weights)
    assert not links[0].pending
    monkeypatch.setattr(upload, "link_to", lambda device: FakeLink())
    assert len(executable.load(weights).weights) == 2


@pytest.mark.parametrize("cached", [False, True])
def test_weights_of_files_arrive_whatever_is_kept_of_them(links, tmp_path, cached):
    executable, weights = compiled(shared_transform=True)
    save_file(weights, tmp_path / "model.safetensors")
    options = {"cache": tmp_path / "cache"} if cached else {}
    for _ in range(2):
        session = executable.load(nn.Checkpoint(tmp_path), **options)
        by_shape = {tuple(t.shape): t for t in session.weights.values()}
        assert torch.equal(by_shape[32, 8], torch.cat([weights["a.weight"], weights["b.weight"]]))
        assert torch.equal(by_shape[4, 32], weights["c.weight"])


def test_an_artefact_is_sent_as_well(links, tmp_path):
    executable, weights = compiled(shared_transform=True)
    executable.load(weights).save(tmp_path / "artefact")
    links.clear()
    session = nn.load(tmp_path / "artefact")
    assert {t.data_ptr() for t in session.weights.values()} <= {t.data_ptr() for t in links[-1].made}
    found = next(t for t in session.weights.values() if t.shape == (4, 32))
    assert torch.equal(found, weights["c.weight"])


def test_an_update_sends_what_is_new(links):
    executable, weights = compiled(shared_transform=True)
    session = executable.load(weights)
    before = len(links[0].made)
    new = torch.randn(16, 8)
    assert len(session.update({"b.weight": new})) == 1
    assert [tuple(t.shape) for t in links[0].made[before:]] == [(32, 8)]
    fused = next(t for t in session.weights.values() if t.shape == (32, 8))
    assert torch.equal(fused, torch.cat([weights["a.weight"], new]))


def test_progress_of_a_load_is_in_bytes(links):
    executable, weights = compiled(shared_transform=True)
    told: list[tuple[int, int]] = []
    executable.load(weights, progress=lambda done, total: told.append((done, total)))
    assert told[-1] == (12 * 32 * 4, 12 * 32 * 4)


class FakeStream:
    """A stream of torch.cuda, or an event, as far as a link uses one; what happens to it is written down."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def record(self, stream: FakeStream) -> None:
        self.log.append(f"event on {stream.name}")

    def synchronize(self) -> None:
        self.log.append(f"the host waits for the {self.name}")


def test_a_gpu_copies_on_a_stream_of_its_own_behind_what_used_the_memory_before(monkeypatch):
    log: list[str] = []
    plain = torch.empty

    def empty(*shape, dtype, device=None, pin_memory=False):
        log.append("pinned" if pin_memory else f"memory on {device}")
        return plain(*shape, dtype=dtype)

    @contextmanager
    def stream(made: FakeStream):
        log.append(f"copy on {made.name}")
        yield

    device = torch.device("cuda", 0)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(torch.cuda, "Stream", lambda where: FakeStream("side", log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda where: FakeStream("main", log))
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeStream("event", log))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "device", lambda where: nullcontext())
    link = upload.link_to(device)
    assert not link.holds(torch.ones(1))
    target = link.empty((2, 3), torch.float32)
    slot = link.pinned(64)
    slot[:24].view(torch.float32).copy_(torch.arange(6.0))
    link.wait(link.copy(slot[:24].view(torch.float32).view(2, 3), target))
    assert torch.equal(target, torch.arange(6.0).view(2, 3))
    assert log == [
        "memory on cuda:0",
        "side waits for main",
        "pinned",
        "copy on side",
        "event on side",
        "the host waits for the event",
    ]


def test_there_is_a_link_to_gpus_alone():
    assert upload.link_to(torch.device("cpu")) is None
    assert upload.link_to(torch.device("meta")) is None
