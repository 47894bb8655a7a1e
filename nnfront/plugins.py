# SPDX-License-Identifier: Apache-2.0
"""Kernels of a user's own: chosen like the project's, through the same table, without a change to it.

    import nnfront as nn
    from nnfront.ir import TensorType

    @nn.ir.op()                                   # a new op: what it takes and gives ...
    def double_relu(x: TensorType) -> TensorType:
        return x

    @double_relu.reference                        # ... what it means, which is what runs without a kernel ...
    def _(x):
        return x.relu() * 2

    nn.register_kernel("double_relu", "my_double_relu", lambda run: launch, why="one pass")    # ... and what runs instead

An op that nnfront has, or a region that `outline` makes by its pattern's name, gets another kernel in the same way.
"""

from __future__ import annotations

from difflib import get_close_matches

from nnfront.backends import table
from nnfront.backends.kernel import Accepts, Bind, Kernel, Rewrite, always, unchanged
from nnfront.backends.registry import names
from nnfront.errors import LowerError
from nnfront.ir import OPS, same_code


def register_kernel(
    op: str,
    name: str,
    make: Bind,
    *,
    target: str = "cpu",
    why: str = "registered",
    accepts: Accepts = always,
    view: Rewrite = unchanged,
) -> None:
    """Let calls of `op`, or of regions by that name, run a kernel of your own.

    make: gets the instruction (`run.attrs` are its constant attributes) and returns the function to run: operands by position, None
    for one that is absent, attributes that hold dims by keyword.
    accepts: gets the instruction and what is known about its operands, and returns "" or the reason why the kernel cannot run it;
    `exe.explain()` shows both. view: see the call as another one first.
    The kernel registered last is asked first; the target's own come after all of them. To register one again in the same words, as a
    file does that is run again, is to register it once.
    Raises LowerError for a target that does not exist, a name that is taken, and the name of an op that is mistyped.
    """
    if target not in names():
        known = ", ".join(map(repr, names()))
        raise LowerError(
            f"there is no target {target!r} to register a kernel for", help=f"targets are {known}"
        )
    _check_op(op, target)
    kernel = Kernel(name, op, make, why, accepts, view, in_rows=True)
    taken = [other for known in names() for other in table.kernels_of(known) if other.name == name]
    if not all(_is_same(kernel, other) for other in taken):
        raise LowerError(f"there is a kernel {name!r} already", help="choose another name")
    table.remove(target, name)  # a file that is run again has functions of its own
    table.add(target, kernel)


def _is_same(one: Kernel, two: Kernel) -> bool:
    parts = [(kernel.op, kernel.why, kernel.bind, kernel.accepts, kernel.rewrite) for kernel in (one, two)]
    return all(same_code(*pair) for pair in zip(*parts, strict=True))


def _check_op(name: str, target: str) -> None:
    """Refuse a name that is nearly an op's or a region's. Others may be those of external functions and regions to come."""
    known = [*OPS, *dict.fromkeys(kernel.op for kernel in table.kernels_of(target))]
    near = get_close_matches(str(name), known, 1, cutoff=0.87)
    if near and name not in known:
        raise LowerError(
            f"there is no op {name!r} to register a kernel for",
            help=f"did you mean {near[0]!r}? If it is an external function or a region of yours, give it another name",
        )


def unregister_kernel(name: str, *, target: str = "cpu") -> None:
    """Forget a registered kernel. What has been compiled keeps it. Raises LowerError for a name that was not registered."""
    if not table.remove(target, name):
        raise LowerError(f"no kernel {name!r} was registered for {target!r}")
