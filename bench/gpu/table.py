# SPDX-License-Identifier: Apache-2.0
"""The results as a Markdown table, for people."""

from __future__ import annotations

from typing import Any


def table(results: dict[str, Any]) -> str:
    """One line for each timed config, with its share of torch's speed and of the copy's bandwidth; * is the choice."""
    lines = [
        ", ".join(f"{name} {value}" for name, value in results["machine"].items()),
        ", ".join(f"{name} {value:,.0f}" for name, value in results["ceilings"].items()),
        "| kernel | shape | config | µs | TFLOP/s | GB/s | of copy | torch µs | of torch |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    return "\n".join(lines + [_line(row, results["ceilings"]["copy_gb_s"]) for row in results["rows"]])


def _line(row: dict[str, Any], copy_gb_s: float) -> str:
    shape = " ".join(
        f"{name}={value}" for name, value in row["shape"].items() if value not in (False, True, 0)
    )
    c = row["config"]
    tile = (
        f"{c['block_m']}x{c['block_n']}x{c['block_k']} w{c['num_warps']} s{c['num_stages']} k{c['split_k']}"
    )
    versus = row["versus_us"]
    cells = [
        f"{row['kernel']} {row['dtype']}",
        shape,
        tile + " *" * row["chosen"],
        f"{row['us']:.1f}",
        f"{row['tflop_s']:.1f}",
        f"{row['gb_s']:,.0f}",
        f"{row['gb_s'] / copy_gb_s:.0%}",
        "" if versus is None else f"{versus:.1f}",
        "" if versus is None else f"{versus / max(row['us'], 1e-9):.0%}",
    ]
    return f"| {' | '.join(cells)} |"
