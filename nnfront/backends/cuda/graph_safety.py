# SPDX-License-Identifier: Apache-2.0
"""Which methods can be captured: those whose instructions ask the host nothing about values, nor about what a cache holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nnfront.backends.cpu import attention as torch_attention
from nnfront.backends.cpu import state
from nnfront.backends.cuda import attention, latent_attention, recurrent, rope_angles
from nnfront.backends.table import kernels_of
from nnfront.lower import Branch, FunctionValue, MethodProgram, Program, Run, StateLayerType, StateType

# Rows (tokens of all sequences) up to which a call is captured. Beyond, a kernel runs for longer than it takes to launch the next one.
ROWS = 256
# Kernels that find the tokens of a cache by what they read on the device: lengths, tables of pages, bases.
FINDING = frozenset(
    {
        *("cache_split", "cache_join", "cache_positions", "tuple"),
        *(kernel.name for kernel in (*attention.KERNELS, *latent_attention.KERNELS, *rope_angles.KERNELS)),
    }
)
# Kernels that do with the layers of a cache only what a `CapturedLayer` can: those of attention, and what ops on caches are by definition.
STILL = FINDING | {
    *("cache_read", "cache_write", "attention"),
    *(kernel.name for kernel in (*torch_attention.KERNELS, *state.KERNELS)),
}


def why_not(program: MethodProgram) -> str:
    """Say which instruction of a method, the first one, cannot be captured and why; "" if all can."""
    # The reference of `dim_value` reads a result back, too.
    read_back = {"dim_value", *(k.name for k in kernels_of(program.target) if k.reads_back)}
    for instruction in program.body.walk():
        where = f" at {instruction.module}" if instruction.module else ""
        if isinstance(instruction, Branch):
            return f"the `if`{where} is decided on the host"
        if not isinstance(instruction, Run):
            continue
        has_cache = _has_cache(instruction, program)
        if has_cache and instruction.kernel not in STILL:
            return f"{instruction.kernel}{where} asks the host how many tokens the cache holds"
        if not instruction.is_pure and not has_cache:
            return f"{instruction.op}{where} acts on the host"
        bodies = [value for value in instruction.attrs.values() if isinstance(value, FunctionValue)]
        if instruction.kernel in read_back or any(body.asks_host(read_back) for body in bodies):
            return f"{instruction.kernel}{where} reads a result back to the host"
    return ""


def states_in_place(program: MethodProgram) -> frozenset[tuple[int, int, str]]:
    """The whole states that one kernel alone reads and writes, where they lie: by the cache's slot, the layer and the name."""
    layers: dict[
        int, tuple[int, int]
    ] = {}  # of each handle of a layer the cache's slot, and which layer it is
    states: dict[tuple[int, int, str], list[int]] = {}  # what is read and written, in order
    runs = [run for run in program.body.walk() if isinstance(run, Run)]
    for run in runs:
        if run.op == "cache_split":
            layers |= {slot: (run.inputs[0], i) for i, slot in enumerate(run.outputs)}
        given = next((layers[slot] for slot in run.inputs if slot in layers), None)
        if given is None:
            continue
        is_layer = (slot for slot in run.outputs if isinstance(program.slots[slot].type, StateLayerType))
        layers |= dict.fromkeys(is_layer, given)
        if run.op in ("cache_read", "cache_write"):
            state = run.outputs[0] if run.op == "cache_read" else run.inputs[1]
            states.setdefault((*given, run.attrs["name"]), []).append(state)
    return frozenset(at for at, slots in states.items() if _is_in_place(slots, runs, program))


def tokens_by_torch(program: MethodProgram) -> bool:
    """Whether torch reads or appends tokens of a cache."""
    runs = (run for run in program.body.walk() if isinstance(run, Run) and _has_cache(run, program))
    return any(run.kernel not in FINDING and run.op not in ("cache_read", "cache_write") for run in runs)


def _is_in_place(slots: Sequence[int], runs: Sequence[Run], program: MethodProgram) -> bool:
    """Whether one kernel alone reads a whole state, in the first slot, and makes the one that is written, in the second, which nothing else reads."""
    uses = [run for run in runs for slot in run.inputs if slot in slots]
    return (
        len(slots) == len(uses) == 2
        and recurrent.is_launched(uses[0], program.slots)
        and [uses[0].inputs[-1], uses[0].outputs[-1]] == slots
        and set(program.result.leaves()).isdisjoint(slots)
    )


def _has_cache(run: Run, program: MethodProgram) -> bool:
    types = (program.slots[slot].type for slot in run.inputs)
    return any(isinstance(type, (StateLayerType, StateType)) for type in types)


def captured(program: Program) -> Iterator[str]:
    """A line for each method of a program for CUDA: whether its calls are captured, and if not, why not."""
    if program.target == "cpu":
        return
    for method in program.methods.values():
        reason = why_not(method)
        yield f"{method.name}: " + (
            f"not captured, {reason}" if reason else f"captured, calls of up to {ROWS} rows"
        )
