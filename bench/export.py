# SPDX-License-Identifier: Apache-2.0
"""Export and lifting of a Llama with 70B dimensions (no weights), against TVM and torch.export in the same run.

    python bench/export.py [--layers 1 16 32 80] [--without-torch]
    python bench/export.py --alternating 5

nnfront and TVM export prefill and decode; torch.export one method. Times are the least of several in one process.
The second form has processes of TVM and of nnfront take turns, with 80 layers and with 16: on a busy machine processor time says more, and pairs.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from machine import describe, keep, measure, table

PEERS = Path(__file__).parent / "peers"


def alternate(count: int) -> None:
    """Export in turn; print a table, a row for each turn, and keep it."""
    rows: list[dict[str, Any]] = []
    for _ in range(count):
        row: dict[str, Any] = {}
        for name, script, mode in (
            ("tvm", "tvm_export.py", "export"),
            ("nnfront", "nnfront_export.py", "shared"),
        ):
            some, many = (measure(PEERS / script, layers, mode) for layers in (16, 80))
            for unit, key in (("ms", "export_s"), ("cpu ms", "export_cpu_s")):
                row[f"{name} {unit}"] = 1e3 * many[key]
                row[f"{name} a layer {unit}"] = 1e3 * (many[key] - some[key]) / 64
        row["nnfront/tvm"] = row["nnfront ms"] / row["tvm ms"]
        row["nnfront/tvm cpu"] = row["nnfront cpu ms"] / row["tvm cpu ms"]
        rows.append(row)
        print(table([row]), flush=True)
    print(keep("export_alternating", describe("torch", "apache-tvm"), rows))
    print(table(rows))


def main() -> None:
    """Measure, print a table and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 16, 32, 80])
    parser.add_argument("--without-torch", action="store_true", help="leave torch.export out")
    parser.add_argument("--alternating", type=int, metavar="N", help="only export, N times in turn")
    args = parser.parse_args()
    if args.alternating:
        alternate(args.alternating)
        return
    rows: list[dict[str, Any]] = []
    for layers in args.layers:
        tvm = measure(PEERS / "tvm_export.py", layers)
        shared = measure(PEERS / "nnfront_export.py", layers, "shared")
        unshared = measure(PEERS / "nnfront_export.py", layers, "unshared")
        row: dict[str, Any] = {"layers": layers}
        for name, result in (("tvm", tvm), ("shared", shared), ("unshared", unshared)):
            row[f"{name} export ms"] = 1e3 * result["export_s"]
            row[f"{name} lift ms"] = 1e3 * result["lift_s"]
            row[f"{name} bindings"] = result["bindings"]
        row["export shared/tvm"] = shared["export_s"] / tvm["export_s"]
        row["export unshared/tvm"] = unshared["export_s"] / tvm["export_s"]
        row["lift tvm/shared"] = tvm["lift_s"] / shared["lift_s"]
        row["lift tvm/unshared"] = tvm["lift_s"] / unshared["lift_s"]
        if not args.without_torch:
            seconds = measure(PEERS / "torch_export.py", layers)["export_s"]
            row["torch.export s"] = seconds
            row["torch.export/shared"] = seconds / shared["export_s"]
            row["torch.export/unshared"] = seconds / unshared["export_s"]
        rows.append(row)
        print(table([row]), flush=True)
    machine = describe("torch", "apache-tvm", "transformers")
    print(keep("export", machine, rows))
    print(table(rows))


if __name__ == "__main__":
    main()
