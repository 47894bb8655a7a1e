# SPDX-License-Identifier: Apache-2.0
"""Export and lifting of a Llama with 70B dimensions (no weights), against TVM and torch.export in the same run.

    python bench/export.py [--layers 1 16 32 80] [--without-torch]

nnfront and TVM export prefill and decode; torch.export one method. Times are the least of several in one process.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from machine import describe, keep, measure, table

PEERS = Path(__file__).parent / "peers"


def main() -> None:
    """Measure, print a table and keep the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 16, 32, 80])
    parser.add_argument("--without-torch", action="store_true", help="leave torch.export out")
    args = parser.parse_args()
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
