# SPDX-License-Identifier: Apache-2.0
"""Functions in TIR, which TVM reads when it defines them. A module of its own: it is imported where they are used."""

from tvm.script import tirx as T


@T.prim_func(private=True, s_tir=True)
def scaled_rows(var_x: T.handle, var_out: T.handle, by: T.int64):
    T.func_attr({"tirx.noalias": True})
    n = T.int64()
    x = T.match_buffer(var_x, (n, 4), "float32")
    out = T.match_buffer(var_out, (n, 4), "float32")
    for i, j in T.grid(n, 4):
        with T.sblock("rows"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = x[vi, vj] * T.cast(by, "float32") + T.cast(vi, "float32")


@T.prim_func(private=True, s_tir=True)
def negated(var_x: T.handle, var_out: T.handle):
    n = T.int64()
    x = T.match_buffer(var_x, (n, 4), "float32")
    out = T.match_buffer(var_out, (n, 4), "float32")
    for i, j in T.grid(n, 4):
        with T.sblock("rows"):
            vi, vj = T.axis.remap("SS", [i, j])
            out[vi, vj] = -x[vi, vj]


@T.prim_func(private=True, s_tir=True)
def first_row_added(var_row: T.handle, var_x: T.handle):
    n = T.int64()
    row = T.match_buffer(var_row, (4,), "float32")
    x = T.match_buffer(var_x, (n, 4), "float32")
    for j in T.serial(4):
        with T.sblock("row"):
            vj = T.axis.spatial(4, j)
            x[0, vj] = x[0, vj] + row[vj]


@T.prim_func(private=True, s_tir=True)
def on_a_gpu(var_x: T.handle, var_out: T.handle):
    T.func_attr({"tirx.is_scheduled": True})
    x = T.match_buffer(var_x, (8, 4), "float32")
    out = T.match_buffer(var_out, (8, 4), "float32")
    for i in T.thread_binding(8, "threadIdx.x"):
        for j in T.serial(4):
            with T.sblock("rows"):
                vi, vj = T.axis.remap("SS", [i, j])
                out[vi, vj] = x[vi, vj]
