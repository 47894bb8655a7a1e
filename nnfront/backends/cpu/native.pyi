# SPDX-License-Identifier: Apache-2.0
# The extension is optional: where it could not be built, importing it fails.

is_able: int
kernels: str

def append_and_attend(
    q: int,
    k: int,
    v: int,
    keys: int,
    values: int,
    lengths: int,
    y: int,
    batch: int,
    groups: int,
    shared: int,
    size: int,
    capacity: int,
    window: int,
    next_q: int,
    next_k: int,
    next_v: int,
    threads: int,
    scale: float,
    /,
) -> None: ...
def gate(both: int, y: int, rows: int, size: int, activation: int, /) -> None: ...
def multiply(
    weight: int,
    x: int,
    bias: int,
    added: int,
    y: int,
    rows: int,
    columns: int,
    outputs: int,
    is_wide: int,
    threads: int,
    /,
) -> None: ...
def multiply_gated(
    weight: int,
    x: int,
    bias: int,
    y: int,
    rows: int,
    columns: int,
    outputs: int,
    activation: int,
    threads: int,
    /,
) -> None: ...
def multiply_quantized(
    stored: int,
    codes: int,
    scales: int,
    zeros: int,
    x: int,
    bias: int,
    added: int,
    y: int,
    rows: int,
    columns: int,
    outputs: int,
    group: int,
    threads: int,
    /,
) -> None: ...
def rms_norm(
    x: int, added: int, total: int, weight: int, y: int, rows: int, size: int, epsilon: float, /
) -> None: ...
def rotate(
    x: int, cos: int, sin: int, y: int, rows: int, heads: int, size: int, next_row: int, next_table: int, /
) -> None: ...
def run_sequence(rows: int, count: int, /, *addresses: int) -> None: ...
def use_openmp(parallel: int, thread_count: int, /) -> None: ...
