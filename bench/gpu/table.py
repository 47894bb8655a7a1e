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
    lines += [_line(row, results["ceilings"].get("copy_gb_s")) for row in results["rows"]]
    return "\n".join(lines)


def model_table(rows: list[dict[str, Any]]) -> str:
    """One line for each step of a model: its time, its share of the memory's limit, and how long the device waited."""
    lines = [
        "| model | step | ms | tokens/s | TFLOP/s | of memory | gap ms |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        if "first_token_s" in row:
            cells = [f"{row['first_token_s'] * 1e3:.0f}", *[""] * 4]
        else:
            cells = [
                f"{row['ms']:.3f}",
                f"{row['tokens_s']:,.0f}",
                _shown(row, "tflop_s", ".0f"),
                _shown(row, "share", ".0%"),
                _shown(row, "gap_ms", ".3f"),
            ]
        lines.append(f"| {' | '.join([row['who'], row['what'], *cells])} |")
    return "\n".join(lines)


def _shown(row: dict[str, Any], name: str, style: str) -> str:
    value = row.get(name)
    return "" if value is None else format(value, style)


def shown(shape: dict[str, Any]) -> str:
    """The sizes of a shape that are not 0, and the names of what is true of it."""
    return " ".join(name if value is True else f"{name}={value}" for name, value in shape.items() if value)


def _line(row: dict[str, Any], copy_gb_s: float | None) -> str:
    c = row["config"]
    tile = (
        f"{c['block_m']}x{c['block_n']}x{c['block_k']} w{c['num_warps']} s{c['num_stages']} k{c['split_k']}"
    )
    versus = row["versus_us"]
    cells = [
        f"{row['kernel']} {row['dtype']}",
        shown(row["shape"]),
        tile + " *" * row["chosen"],
        f"{row['us']:.1f}",
        f"{row['tflop_s']:.1f}",
        f"{row['gb_s']:,.0f}",
        "" if copy_gb_s is None else f"{row['gb_s'] / copy_gb_s:.0%}",
        "" if versus is None else f"{versus:.1f} {row['versus'].removeprefix('torch').strip()}".strip(),
        "" if versus is None else f"{versus / max(row['us'], 1e-9):.0%}",
    ]
    return f"| {' | '.join(cells)} |"
