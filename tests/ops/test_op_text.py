# SPDX-License-Identifier: Apache-2.0
"""Whatever attributes a call has, its text reads back as the same call."""

import pytest
from call import attrs_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from op_cases import type_of
from op_strategies import CASES

from nnfront.errors import NnfrontError
from nnfront.ir import FunctionBuilder, IRModule, Scalar, parse
from nnfront.ir.op import OPS


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
@pytest.mark.parametrize("name", sorted(CASES))
@settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(data=st.data())
def test_a_call_of_every_op_survives_its_text(name: str, data: st.DataObject) -> None:
    op, case = OPS[name], data.draw(CASES[name])
    types = [type_of(x) for x in case.operands]
    try:
        op.result_type(types, attrs_of(op, types, case.attrs))
    except NnfrontError:
        return
    builder = FunctionBuilder("main")
    args = []
    for i, (value, kind) in enumerate(zip(case.operands, types, strict=True)):
        number = isinstance(value, bool | int | float)
        args.append(
            None if kind is None else Scalar(value) if number else builder.param(f"x{i}", kind, "input")
        )
    module = IRModule([builder.finish(builder.call(op, *args, **case.attrs))])
    assert parse(str(module)) == module
