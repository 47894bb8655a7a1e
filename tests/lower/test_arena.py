# SPDX-License-Identifier: Apache-2.0
"""Places in one memory: none lies over another that is alive, and a tape's memory is what the plan of its method has alive at once."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

import pytest
import torch
from few_of import few_of
from hypothesis import given
from hypothesis import strategies as st

import nnfront as nn
from nnfront.backends.cpu import tape
from nnfront.backends.cpu.extension import NATIVE
from nnfront.backends.table import memory_policy
from nnfront.lower import Run
from nnfront.memory.arena import ALIGNMENT, Arena
from nnfront.memory.plan import plan_memory

CHECKPOINT = Path(__file__).parents[2] / "examples" / "checkpoints" / "pylib-3m"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 400), st.integers(1, 3)), max_size=40), st.randoms())
def test_places_that_are_alive_do_not_lie_over_one_another(steps, random):
    arena, alive, together, most = Arena(), [], set(), 0
    for is_taken, count, slots in steps:
        if is_taken or not alive:
            piece = arena.take(count)
            assert piece.bytes >= max(count, 1)
            for _ in range(slots - 1):
                arena.hold(piece)
            together |= {(other, piece) for other in alive}
            alive.append(piece)
        else:
            piece = random.choice(alive)
            arena.release(piece)
            if not piece.slots:
                alive.remove(piece)
        most = max(most, sum(piece.bytes for piece in alive))
    size = arena.place()
    assert size >= most
    assert all(piece.offset % ALIGNMENT == 0 and piece.offset + piece.bytes <= size for piece in arena.pieces)
    for one, two in together:
        assert one.offset + one.bytes <= two.offset or two.offset + two.bytes <= one.offset


def test_a_large_value_that_comes_late_does_not_lie_behind_small_ones_that_are_gone():
    arena = Arena()
    small, middle = arena.take(ALIGNMENT), arena.take(2 * ALIGNMENT)
    arena.release(small)
    arena.take(4 * ALIGNMENT)
    arena.release(middle)
    assert arena.place() == 6 * ALIGNMENT


@pytest.mark.skipif(NATIVE is None, reason="no kernels in C")
@pytest.mark.parametrize("quant", few_of([None, "int8", "int4"], 2))
@pytest.mark.parametrize("batch", few_of([1, 5, 64], 2))
def test_the_memory_of_a_tape_is_what_the_plan_has_alive_at_once(batch: int, quant: str | None) -> None:
    session = nn.LLM.load(CHECKPOINT, quant=quant).session
    cache = session.make_cache(batch=batch, max_seq=32)
    session["prefill"](torch.ones(batch, 3, dtype=torch.int64), cache)
    session["decode"](torch.ones(batch, 1, dtype=torch.int64), cache)
    method = session.program.methods["decode"]
    plan = plan_memory(method, {"batch": batch, "max_seq": 32}, memory_policy("cpu"))
    number = {i.outputs: n for n, i in enumerate(method.body.instructions) if isinstance(i, Run)}
    checked = 0
    for step in session["decode"]._route.code.steps:
        for part in (
            [p for parts in step.plans.values() for p in parts] if isinstance(step, tape.TapeStep) else ()
        ):
            if isinstance(part, tape.TapePart):
                steps = [number[run.outputs] for _, run in part.steps if isinstance(run, Run)]
                first, last = min(steps), max(steps)
                change = [0] * (last + 2)
                for buffer in plan.buffers:
                    for begin, end in buffer.ranges:
                        if first <= begin and end <= last and not {*buffer.slots} & part.tape.returned.keys():
                            change[begin] += -(-buffer.bytes // ALIGNMENT) * ALIGNMENT
                            change[end + 1] -= -(-buffer.bytes // ALIGNMENT) * ALIGNMENT
                alive = max(accumulate(change))
                assert part.tape.size == alive
                checked += 1
    assert checked
