# SPDX-License-Identifier: Apache-2.0
"""Weights onto a GPU, through a small ring of pinned memory, from mapped files or from the transforms that make them.

    the caller   makes the weights one after the other: maps, joins, computes. `send` returns a tensor on the GPU whose bytes are on the way
    a reader     a thread that copies each of them piece by piece into the ring, which faults the pages of files in, and queues the copies
    the GPU      copies from the ring on a stream of its own, while the reader fills the next slot

A slot is filled again when its copy is done and no sooner. The host holds the ring, the weight that is read, one that waits and one that is made; what
was computed is let go of as soon as it has been read.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import Queue
from threading import Thread
from typing import Any, Protocol, TypeAlias

import torch

from nnfront.backends.device import current
from nnfront.errors import LoadError
from nnfront.ir.summary import bytes_text
from nnfront.memory.free_memory import free_memory_on, is_out_of_memory

# Enough for copies of two slots to be under way while two are filled; a slot takes 0.6 ms at 55 GB/s, so what a copy costs besides
# (some 10 us) does not show.
SLOTS = 4
SLOT_BYTES = 32 << 20

# A weight's name and value to the value that methods run with.
Send: TypeAlias = Callable[[str, Any], Any]
# Told how many bytes of how many are there.
Progress: TypeAlias = Callable[[int, int], None]


class Link(Protocol):
    """The way to a device. Copies run in the order in which they are queued."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device already."""

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Host memory that the device copies from by itself: uint8 [size_bytes]."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the device, without values, its elements in order."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> Any:
        """Queue the copy of pinned memory into part of a tensor on the device; returns what to `wait` for."""

    def wait(self, copied: Any) -> None:
        """Return when a copy is done."""


class CudaLink:
    """The way to a GPU: copies on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the GPU already."""
        return tensor.device == self._device

    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Pinned memory, of the GPU: in a new thread another one is the current one, where nothing is to be."""
        with current(self._device):
            return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor on the GPU."""
        made = torch.empty(tuple(shape), dtype=dtype, device=self._device)
        # The memory may have been another tensor's, with work on it that is still queued.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return made

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> torch.cuda.Event:
        """Queue a copy, and an event behind it."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return event

    def wait(self, copied: torch.cuda.Event) -> None:
        """Let this thread sleep until the event has come."""
        copied.synchronize()


def link_to(device: torch.device) -> Link | None:
    """The way to a GPU; None to any other device, where weights stay as they are."""
    return CudaLink(device) if device.type == "cuda" else None


@contextmanager
def uploading(device: torch.device, progress: Progress | None = None, total: int = 0) -> Iterator[Send]:
    """Give a function that sends weights to a device. What it returns is there when the block has ended.

    Their elements are in order. `progress` is told how many of `total` bytes have been sent, by the thread that reads. An
    error in that thread is raised by the next call, or by the end of the block.
    """
    link = link_to(device)
    if link is None:
        yield lambda name, value: value.contiguous() if isinstance(value, torch.Tensor) else value
        return
    upload = Upload(link, device, progress, total)
    try:
        yield upload.send
    except BaseException:
        upload.stop()
        raise
    upload.finish()


class Upload:
    """One reader, its ring, and the copies that are under way."""

    def __init__(
        self,
        link: Link,
        device: torch.device,
        progress: Progress | None = None,
        total: int = 0,
        *,
        slots: int = SLOTS,
        slot_bytes: int = SLOT_BYTES,
    ) -> None:
        self._link = link
        self._device = device
        self._progress = progress
        self._total = total
        self._sent = 0
        self._placed = 0
        self._slots = slots
        self._slot_bytes = slot_bytes
        self._busy: deque[tuple[Any, torch.Tensor]] = deque()
        self._error: BaseException | None = None
        self._is_stopped = False
        # One may wait while another is read: with more of them, more of what transforms compute would be held.
        self._queue: Queue[tuple[str, torch.Tensor, torch.Tensor] | None] = Queue(1)
        self._reader: Thread | None = None

    def send(self, name: str, value: Any) -> Any:
        """Return a weight on the device, whose bytes are on the way; what is there already, or is no tensor, as it is.

        Raises LoadError if the device has no room for it.
        """
        if self._error is not None:
            raise self._error
        if not isinstance(value, torch.Tensor):
            return value
        if self._link.holds(value):
            return value.contiguous()
        target = self._place(name, value)
        if self._reader is None:  # nothing is taken for weights that are all there
            self._reader = Thread(target=self._read, name="nnfront upload", daemon=True)
            self._reader.start()
        self._queue.put((name, value.detach(), target))
        return target

    def _place(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Memory for a weight on the device."""
        try:
            target = self._link.empty(value.shape, value.dtype)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            room = free_memory_on(self._device)
            whole = f" of {bytes_text(self._total)} that all weights take" if self._total else ""
            raise LoadError(
                f"there is no room for weight {name!r}: it takes {bytes_text(value.nbytes)}",
                details=[
                    *([] if room is None else [str(room)]),
                    f"weights before it took {bytes_text(self._placed)}{whole}",
                ],
                help="store the weights in fewer bits (quant='int8' or 'int4'), or free memory that others hold",
            ) from error
        self._placed += value.nbytes
        return target

    def finish(self) -> None:
        """Return when all is there. Raises the reader's error."""
        self._end()
        if self._error is not None:
            raise self._error
        if self._progress is not None and self._total:
            self._progress(self._total, self._total)

    def stop(self) -> None:
        """Leave out what has not been read; return when nothing is under way any more."""
        self._is_stopped = True
        self._end()

    def _end(self) -> None:
        if self._reader is not None:
            self._queue.put(None)
            self._reader.join()
        # Even after an error: the device must not write to memory, nor read from it, that is somebody else's by then.
        while self._busy:
            self._link.wait(self._busy.popleft()[0])

    def _read(self) -> None:
        """The reader: takes weights until there is None, those after an error or a stop without reading them."""
        while (work := self._queue.get()) is not None:
            if self._error is None and not self._is_stopped:
                try:
                    self._copy(*work)
                except BaseException as error:
                    error.add_note(f"while weight {work[0]!r} was sent to the device")
                    self._error = error
            del work  # or it would live until the next one comes

    def _copy(self, name: str, value: torch.Tensor, target: torch.Tensor) -> None:
        for source, part in pieces(value, target, self._slot_bytes):
            if self._is_stopped:
                return
            slot = self._slot()
            filled = slot[: source.nbytes].view(source.dtype).view(source.shape)
            filled.copy_(source)
            self._busy.append((self._link.copy(filled, part), slot))
            self._sent += source.nbytes
            if self._progress is not None and self._sent < self._total:
                self._progress(self._sent, self._total)

    def _slot(self) -> torch.Tensor:
        """A slot that no copy reads: a new one while the ring is not complete, else the one that has been busy for longest."""
        if len(self._busy) < self._slots:
            try:
                return self._link.pinned(self._slot_bytes)
            except RuntimeError as error:
                if not self._busy:
                    raise LoadError(
                        f"there is no pinned memory to load through: {bytes_text(self._slot_bytes)} were asked for",
                        details=[str(error).splitlines()[0]],
                        help="free memory of the host, or raise what the system lets a process lock (ulimit -l, a container's limits)",
                    ) from error
                self._slots = len(self._busy)
        copied, slot = self._busy.popleft()
        self._link.wait(copied)
        return slot


def pieces(
    source: torch.Tensor, target: torch.Tensor, limit: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield parts of a tensor of at most `limit` bytes, each with the same part of another one, whose elements are in order."""
    if source.nbytes <= limit:
        if source.numel():
            yield source, target
        return
    if source.is_contiguous():
        source, target = source.view(-1), target.view(-1)
    row_bytes = source[0].nbytes
    if row_bytes > limit:
        for row, place in zip(source, target, strict=True):
            yield from pieces(row, place, limit)
        return
    count = limit // row_bytes
    yield from zip(torch.split(source, count), torch.split(target, count), strict=True)
