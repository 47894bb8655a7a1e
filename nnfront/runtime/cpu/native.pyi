# SPDX-License-Identifier: Apache-2.0
# The extension is optional: where it could not be built, importing it fails.

is_able: int

def multiply(
    weight: int,
    x: int,
    bias: int,
    y: int,
    rows: int,
    columns: int,
    outputs: int,
    is_wide: int,
    threads: int,
    /,
) -> None: ...
def use_openmp(parallel: int, thread_number: int, thread_count: int, /) -> None: ...
