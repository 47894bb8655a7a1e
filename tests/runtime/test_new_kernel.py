# SPDX-License-Identifier: Apache-2.0
"""A kernel in C is a `.c` that each set of instructions includes, an entry of the table and a record: one that nobody else knows of is built here and runs on a tape."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch
from extension_of import extension_of

import nnfront as nn
from nnfront import op, spec
from nnfront.backends.cpu import backend, extension, tape_builder
from nnfront.backends.cpu.tape_builder import Operand, TapeBuilder, Value
from nnfront.backends.kernel import Kernel
from nnfront.lower import Run
from nnfront.lower.reference import reference

pytestmark = [
    pytest.mark.skipif(extension.NATIVE is None, reason="the processor does not run the extension"),
    pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler"),
]

ENTRY = """
KERNEL(twice_floor,
    SIZE(count)
    IN(x, 2 * count)
    OUT(y, 2 * count))

"""
SOURCE = """
#include <math.h>
#include "words.h"
FAST static const char *twice_floor(const struct twice_floor *n) {
    for (Py_ssize_t i = 0; i < n->count; i++) ((uint16_t *)n->y)[i] = rounded(2 * floorf(widened(((const uint16_t *)n->x)[i])));
    return NULL;
}
"""


def write(builder: TapeBuilder, run: Run, x: Value) -> Sequence[Operand]:
    y = builder.make(run.outputs[0], x.shape)
    builder.call("twice_floor", x.shape[-1], x.place, y.place)
    return (y,)


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> ModuleType:
    """The extension with this kernel alone, which takes a second to build."""
    folder = tmp_path_factory.mktemp("c")
    sets = sorted(path.name for path in extension.TABLE.parent.glob("set_*.c"))
    for name in ("module.c", "native.h", "words.h", *sets):
        shutil.copy(extension.TABLE.parent / name, folder)
    # The kernels of each set begin where it asks whether there are tiles, and end with the last that is included before the table of them. Where there is a base, this one is its.
    of_sets = (extension.TABLE.parent / "set.h").read_text()
    kernels = 'static bool has_tiles(void) { return false; }\n#include "twice_floor.c"\n'
    (folder / "set.h").write_text(
        re.sub(r"#if HAS_TILES.*(?=\nstatic bool runs)", kernels, of_sets, flags=re.S)
    )
    with_base = (extension.TABLE.parent / "set_with_base.h").read_text()
    own = r'#include "int8_product.c"|\.multiply_integers = .*'
    (folder / "set_with_base.h").write_text(re.sub(own, "", with_base))
    text, table = extension.TABLE.read_text(), folder / "kernels.def"
    table.write_text(text[: text.index("KERNEL(")] + ENTRY + text[text.index("#undef KERNEL") :])
    (folder / "twice_floor.c").write_text(SOURCE)
    return extension_of(folder, ("module.c", *sets))


def test_a_kernel_in_c_is_one_file_that_sets_include_one_entry_and_one_record(built: ModuleType, monkeypatch):
    record = Kernel("floor", "floor", reference, write=write)
    monkeypatch.setitem(backend.WRITERS, record.name, record.write)
    monkeypatch.setattr(tape_builder, "NATIVE", built)
    monkeypatch.setattr(tape_builder, "KERNELS", {"twice_floor": ["count", "x", "y"]})
    monkeypatch.setattr(tape_builder, "ROW", 2 + 3)

    class Model(nn.Module):
        def forward(self, x: nn.Tensor) -> nn.Tensor:
            return op.floor(op.floor(op.floor(x)))  # the last makes the result, by itself

    ir = Model().export({"forward": {"x": spec.Tensor([8], "bfloat16")}})
    x = torch.linspace(-3, 3, 8).bfloat16()
    found = nn.compile(ir).load({})["forward"](x)
    assert torch.equal(found, (4 * x.floor()))  # which torch's floor is not: the kernel was at work
    for name in built.sets:
        built.use_set(name)
        assert torch.equal(nn.compile(ir).load({})["forward"](x), found), name
