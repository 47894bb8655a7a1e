# SPDX-License-Identifier: Apache-2.0
# The extension is optional: where it could not be built, importing it fails.

from typing import TypeAlias

from torch import Tensor

is_able: int
table: str

# Memory of a tensor, or what lies some bytes behind its begin.
Operand: TypeAlias = Tensor | tuple[Tensor, int]

def append_and_attend(
    batch: int,
    groups: int,
    shared: int,
    size: int,
    value_size: int,
    capacity: int,
    window: int,
    next_q: int,
    next_k: int,
    next_v: int,
    positions: int,
    next_bias: int,
    next_bias_head: int,
    bias_bytes: int,
    has_wide_sinks: int,
    threads: int,
    scale: float,
    softcap: float,
    q: Operand,
    k: Operand | None,
    v: Operand | None,
    keys: Operand,
    values: Operand | None,
    lengths: Operand,
    sinks: Operand | None,
    bias: Operand | None,
    y: Operand,
    /,
) -> None: ...
def causal_conv1d_step(
    batch: int,
    channels: int,
    width: int,
    activation: int,
    is_wide: int,
    is_wide_state: int,
    threads: int,
    x: Operand,
    weight: Operand,
    bias: Operand | None,
    state: Operand | None,
    y: Operand,
    next: Operand,
    /,
) -> None: ...
def gate(rows: int, size: int, activation: int, both: Operand, y: Operand, /) -> None: ...
def gated_delta_rule_step(
    batch: int,
    groups: int,
    heads: int,
    key_size: int,
    value_size: int,
    has_gates_of_keys: int,
    is_normed: int,
    threads: int,
    scale: float,
    q: Operand,
    k: Operand,
    v: Operand,
    g: Operand,
    beta: Operand,
    state: Operand | None,
    y: Operand,
    next: Operand,
    /,
) -> None: ...
def multiply(
    rows: int,
    columns: int,
    outputs: int,
    is_wide: int,
    activation: int,
    with_tiles: int,
    threads: int,
    weight: Operand,
    x: Operand,
    bias: Operand | None,
    added: Operand | None,
    y: Operand,
    /,
) -> None: ...
def multiply_gated(
    rows: int,
    columns: int,
    outputs: int,
    activation: int,
    with_tiles: int,
    threads: int,
    weight: Operand,
    x: Operand,
    bias: Operand | None,
    y: Operand,
    /,
) -> None: ...
def multiply_quantized(
    stored: int,
    rows: int,
    columns: int,
    outputs: int,
    groups: int,
    threads: int,
    codes: Operand,
    scales: Operand,
    zeros: Operand | None,
    x: Operand,
    bias: Operand | None,
    added: Operand | None,
    y: Operand,
    /,
) -> None: ...
def norm(
    rows: int,
    size: int,
    is_centered: int,
    is_wide: int,
    threads: int,
    epsilon: float,
    x: Operand,
    added: Operand | None,
    total: Operand | None,
    weight: Operand | None,
    bias: Operand | None,
    y: Operand,
    /,
) -> None: ...
def rotate(
    rows: int,
    heads: int,
    size: int,
    rotated: int,
    is_interleaved: int,
    next_row: int,
    next_table: int,
    threads: int,
    x: Operand,
    cos: Operand,
    sin: Operand,
    y: Operand,
    /,
) -> None: ...
def ssm_scan_step(
    batch: int,
    heads: int,
    groups: int,
    size: int,
    states: int,
    threads: int,
    x: Operand,
    dt: Operand,
    a: Operand,
    b: Operand,
    c: Operand,
    d: Operand | None,
    state: Operand | None,
    y: Operand,
    next: Operand,
    /,
) -> None: ...
def run_sequence(rows: Tensor, /, *memories: Tensor | int | None) -> None: ...
def use_torch(exchange: object, parallel: int | None, thread_count: int | None, /) -> None: ...
