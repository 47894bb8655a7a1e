# SPDX-License-Identifier: Apache-2.0
"""How many of MLC-LLM's model files export: through TVM, and through `nnfront.compat.tvm` with nothing changed but their import lines.

    python bench/model_files.py CHECKOUT

CHECKOUT is a clone of MLC-LLM, of which `python/mlc_llm` is read. Each registered architecture is one file and a small config, a preset
of the checkout's where it has one. An export that calls external functions counts: running it takes those functions, as with TVM.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from machine import describe, keep, measure, table

PEER = Path(__file__).parent / "peers" / "tvm_model_files.py"


def main() -> None:
    """Export with both, print a table and keep it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkout", type=Path)
    checkout = parser.parse_args().checkout.resolve()
    tvm, ours = measure(PEER, "tvm", checkout), measure(PEER, "nnfront", checkout)
    rows: list[dict[str, Any]] = [
        {
            "model": name,
            "preset": row["preset"],
            "TVM": tvm[name]["result"].splitlines()[0][:120],
            "nnfront": row["result"].splitlines()[0],
            "functions in TIR": ", ".join(row["tir"]),
        }
        for name, row in ours.items()
    ]
    print(keep("model_files", describe("apache-tvm"), rows))
    print(table(rows))
    for of, among in (("all", rows), ("those with a preset", [r for r in rows if r["preset"]])):
        counts = [f"{who} {sum(r[who] == 'ok' for r in among)}" for who in ("nnfront", "TVM")]
        print(f"of {len(among)} ({of}): {', '.join(counts)}")


if __name__ == "__main__":
    main()
