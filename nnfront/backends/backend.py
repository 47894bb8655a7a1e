# SPDX-License-Identifier: Apache-2.0
"""`Backend`: what runs programs on one kind of device, as one value.

A back end is an instance of a subclass, listed under its name as an entry point `nnfront.backends` (`registry` finds it). What it does not
override is what a CPU needs with nothing but the ops' torch references: tensors stay where they are, instructions run one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeAlias

import torch

from nnfront.backends.kernel import Kernel
from nnfront.backends.workspace import metered
from nnfront.dims import Symbol
from nnfront.lower import Instruction, MethodProgram, Program, Slot
from nnfront.memory.allocations import Workspace
from nnfront.quant_format import QuantFormat

Frame: TypeAlias = list[Any]
Step: TypeAlias = Callable[[Frame], None]
Pair: TypeAlias = tuple[Step, Instruction | None]

Upload: TypeAlias = Callable[[str, Any], Any]
"""A weight's name and value to the value that methods run with."""

Progress: TypeAlias = Callable[[int, int], None]
"""Told how many of how many are done."""

_NOTHING = nullcontext()


class After(Protocol):
    """What is done to the result of each call, on the device alone."""

    def __call__(self, result: Any) -> torch.Tensor:
        """Return what the caller gets instead."""

    def state(self) -> Sequence[torch.Tensor]:
        """The tensors that a call of it changes; they stay where they are."""


class Capture(Protocol):
    """Runs a method's calls, some of them as what was captured of earlier ones."""

    def __call__(self, loaded: object, frame: Frame, result: Callable[[Frame], Any]) -> Any:
        """Run a call whose arguments and dims are in the frame, and return its result."""

    def followed_by(self, after: After) -> Capture:
        """The same for the method with something behind it, which is captured with its calls."""


class Backend:
    """What runs programs on one kind of device.

    name           what `compile(target=...)` calls it;  archs  what may follow it after a colon
    kernels        the first that accepts a call runs it
    numbered       whether a target may end with the number of a device, as in `cuda:1`
    captures       whether calls are captured and replayed, so that it pays to keep a cache where it lies
    decode_rows    rows of one decoding call of many sequences, at most
    rows_together  rows that its products take together: a call of fewer takes as long as one of so many
    prompt_tokens  tokens of a prompt that one call computes, at most: what it takes besides the cache does not grow beyond that
    uploads        whether `upload` does anything: weights that are mapped from files may stay so where it does not
    reads_experts  whether products of experts read weights in the formats that others do
    adds_single_rows_otherwise  whether products of a single row may have sums in another order than those of several
    gpus           how many GPUs a process computes on;  collectives  by which of torch's back ends ranks meet
    ring_windows   whether a layer of a cache with a window is a ring of the window's tokens
    """

    name: str
    archs: Sequence[str] = ()
    kernels: Sequence[Kernel] = ()
    numbered = False
    captures = False
    decode_rows = 32  # from two to so many, the kernels of a CPU add up each row in one order
    rows_together = 4
    prompt_tokens = 512
    adds_single_rows_otherwise = False
    uploads = False
    gpus = 0
    collectives = "gloo"
    ring_windows = True
    reads_experts = False

    def passes(self, target: str) -> Sequence[Any]:
        """What it does to the IR before lowering, in order."""
        return ()

    def other_passes(self, target: str) -> Iterable[Sequence[Any]]:
        """What it does on machines that want weights in another order: an artefact that one of them wrote has its weights in that."""
        return ()

    def end_threads(self) -> None:
        """Have the threads that computed for the calling one end, where another is to compute from now on: they would count as at work."""

    def device(self, target: str) -> torch.device:
        """Where the tensors of a target's programs live. Raises LoadError if there is no such device here."""
        return torch.device("cpu")

    def reads(self, format: QuantFormat) -> bool:
        """Whether products read weights in a format as they are stored, if sizes and dtypes allow it."""
        return False

    def reads_wide_scales(self, format: QuantFormat) -> bool:
        """Whether they do so as fast where scales are float32 and the weight that they stand for is not."""
        return False

    def refuses_int8(self, format: QuantFormat, dtype: str) -> str:
        """Why no kernel multiplies weights in a format, in integers, with activations of a dtype that it rounds to 8 bits; "" if one does."""
        return f"{self.name} has no kernel for them"

    def packs(self, method: MethodProgram, rows: int) -> bool:
        """Whether each row of a method's batch has the same bits among up to so many rows as alone."""
        return False

    def page_sizes(self, target: str) -> tuple[int, ...] | None:
        """How many tokens a page of a cache may hold; None if the kernels take any number."""
        return None

    def metered(self, kernel: Kernel, target: str) -> Workspace:
        """What a kernel that does not say it allocates while it runs."""
        return metered(kernel.bind)

    def laid_out(self, program: Program) -> Program:
        """Return the program whose transforms give weights as the kernels of its methods read them."""
        return program

    def join(self, pairs: Sequence[Pair], slots: Sequence[Slot], method: str) -> list[Pair]:
        """Return the steps of a method, those that can run as one call joined."""
        return list(pairs)

    def capture(
        self, program: MethodProgram, device: torch.device, run: Callable[[Frame], None]
    ) -> Capture | None:
        """Return what captures and replays a method's calls; None if they just run."""
        return None

    def why_not_captured(self, program: MethodProgram) -> str:
        """Say which instruction of a method cannot be captured and why; "" if all can, or if nothing is captured anyway."""
        return ""

    def notes(self, program: Program) -> Iterator[str]:
        """Lines for `explain` below the table of instructions."""
        return iter(())

    def upload(
        self, target: str, progress: Progress | None = None, total: int = 0
    ) -> AbstractContextManager[Upload]:
        """Give a function that puts weights where the kernels read them. What it returns is there when the block has ended."""
        return nullcontext(lambda name, value: value)

    def compile_ahead(
        self,
        program: Program,
        known: Mapping[Symbol, int],
        sizes: Mapping[str, Sequence[int]] | None = None,
        progress: Progress | None = None,
        *,
        draws: bool = False,
    ) -> Any:
        """Return all kernels that a program may launch, compiled for the architecture that its target names; None if it names none."""
        return None

    def launcher(self, compiled: Any, device: torch.device) -> Any:
        """Return what launches kernels that `compile_ahead` has made; None if they are not needed here."""
        return None

    def launching(self, launcher: Any) -> AbstractContextManager[object]:
        """Let kernels be launched by a launcher inside of this, in this thread; None: by what compiles them here."""
        return _NOTHING
