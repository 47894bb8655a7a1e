# SPDX-License-Identifier: Apache-2.0
"""The back end of a CPU: torch's best op for the case, and kernels in C that run in a row as one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from nnfront.backends.backend import Backend, Pair
from nnfront.backends.cpu import (
    attention,
    einsum,
    elementwise,
    embedding,
    host,
    int8_linear,
    linear,
    low_rank,
    moe,
    norm,
    qkv_attention,
    quantized_linear,
    recurrent,
    rope,
    rows,
    state,
    tape,
    weight_layout,
)
from nnfront.backends.cpu.extension import (
    NATIVE,
    TILES,
    end_threads,
    instructions,
    multiplies_pairs,
    say_what_is_missing,
)
from nnfront.backends.cpu.in_c import refusal
from nnfront.backends.cpu.quantized_gemv import MOST_ROWS, stored_as
from nnfront.backends.cpu.quantized_pieces import DECODINGS
from nnfront.backends.lowering import takes
from nnfront.backends.table import kernels_of
from nnfront.ir import OPS
from nnfront.lower import MethodProgram, Program, Run, Slot
from nnfront.passes import PIPELINES
from nnfront.passes.pack_weights import with_layouts
from nnfront.quant_format import QuantFormat

KERNELS = (
    *qkv_attention.KERNELS,
    *linear.KERNELS,
    *quantized_linear.KERNELS,
    *quantized_linear.PACKED,
    *int8_linear.KERNELS,
    *embedding.KERNELS,
    *low_rank.KERNELS,
    *moe.KERNELS,
    *norm.KERNELS,
    *rope.KERNELS,
    *attention.KERNELS,
    *recurrent.KERNELS,
    *einsum.KERNELS,
    *rows.KERNELS,
    *elementwise.KERNELS,
    *state.KERNELS,
    *host.KERNELS,
    *weight_layout.KERNELS,
)
ELEMENTWISE = (
    "cache_positions",
    "cache_split",
    "cos",
    "dequantize",
    "dequantize_blocks",
    "packed_quantized_embedding",
    "quantized_embedding",
    "rope",
    "sin",
    "unpack_int4",
)
"""Ops in front of a call's layers that compute each element for itself, by torch."""
WRITERS = {kernel.name: kernel.write for kernel in KERNELS if kernel.write is not None}


class CpuBackend(Backend):
    """Tensors in the host's memory, weights mapped from files where they can be."""

    name = "cpu"
    kernels = KERNELS
    reads_experts = True
    rows_together = 16 if TILES else 4
    adds_single_rows_otherwise = NATIVE is None

    def end_threads(self) -> None:
        end_threads()

    def passes(self, target: str) -> Sequence[Any]:
        return self._passes(target, in_panels=multiplies_pairs())

    def other_passes(self, target: str) -> Sequence[Sequence[Any]]:
        return (self._passes(target, in_panels=not multiplies_pairs()),)

    def _passes(self, target: str, *, in_panels: bool) -> Sequence[Any]:
        """Where bfloat16 is not multiplied in pairs, or is by tiles, weights whose products are not rounded stay in rows: other kernels are faster there."""
        unused = () if in_panels else quantized_linear.PACKED
        layouts = (kernel.layout for kernel in self.kernels if kernel not in unused)
        return with_layouts(PIPELINES["cpu"], layouts, partial(takes, target))

    def reads(self, format: QuantFormat) -> bool:
        return any(not decoding.refusal(format) for decoding in DECODINGS)

    def reads_wide_scales(self, format: QuantFormat) -> bool:
        return NATIVE is not None and stored_as(format) is not None

    def refuses_int8(self, format: QuantFormat, dtype: str) -> str:
        return int8_linear.refusal(format, dtype)

    def laid_out(self, program: Program) -> Program:
        return weight_layout.laid_out(program, {k.name for k in kernels_of(program.target) if k.in_rows})

    def notes(self, program: Program) -> Iterator[str]:
        for name, method in program.methods.items() if NATIVE is not None else ():
            runs = [run for run in method.body.walk() if isinstance(run, Run)]
            alone = dict.fromkeys(filter(None, (_alone(run, method) for run in runs)))
            if alone:
                yield f"{name}: run by themselves, between tapes of calls in C: {', '.join(alone)}"
        yield f"kernels in C: {instructions()}"

    def packs(self, method: MethodProgram, rows: int) -> bool:
        runs = (run for run in method.body.walk() if isinstance(run, Run))
        return NATIVE is not None and all(_is_by_rows(run, method, rows) for run in runs)

    def join(self, pairs: Sequence[Pair], slots: Sequence[Slot], method: str) -> list[Pair]:
        say_what_is_missing()
        return tape.join(pairs, slots, method, WRITERS)


def _alone(run: Run, method: MethodProgram) -> str:
    """The kernel of an instruction that is on no tape, and if it has calls in C why not; "" for one that may be on one."""
    if run.kernel in tape.JOINED:
        return ""
    if run.kernel not in WRITERS:
        return run.kernel
    why = refusal(WRITERS[run.kernel], run, method.slots)
    return f"{run.kernel} ({why})" if why else ""


def _is_by_rows(run: Run, method: MethodProgram, rows: int) -> bool:
    """Whether one row of an instruction's batch is the same among so many as alone: C that takes them all, or what treats each element for itself."""
    if run.op in ELEMENTWISE or (run.op in OPS and (OPS[run.op].moves or OPS[run.op].is_view)):
        return True
    if run.kernel not in WRITERS:
        return False
    # What takes few rows alone may have another order of sums for one of them.
    sizes = ({"batch": count} for count in (1, max(rows, MOST_ROWS + 1)))
    return not any(refusal(WRITERS[run.kernel], run, method.slots, known) for known in sizes)


CPU = CpuBackend()
