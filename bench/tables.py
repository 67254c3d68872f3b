"""Markdown tables of kept results, for docs/performance.md: `python -m bench.tables [bench/results/h200]`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_cell(value) for value in row) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return str(value)


def kernels(result: dict[str, Any]) -> str:
    """Every op and shape, best of our back ends first within each."""
    rows = sorted(result["rows"], key=lambda row: (row["op"], row["shape"], row["us"]))
    return table(
        ("op", "shape", "back end", "us", "of limit", "best public / this", "best public", "error"),
        (
            (
                row["op"],
                row["shape"],
                row["backend"],
                row["us"],
                f"{row['fraction_of_limit']:.0%}",
                row["ratio_to_best_public"] and f"{row['ratio_to_best_public']:.2f}x",
                row["best_public"],
                None if row["max_error"] is None else f"{row['max_error']:.1e}",
            )
            for row in rows
        ),
    )


OURS = ("triton", "cuda", "gluon")


def best_of_ours(result: dict[str, Any]) -> list[dict[str, Any]]:
    """The fastest row of our own for each op and shape."""
    best: dict[tuple[str, str], dict[str, Any]] = {}
    for row in result["rows"]:
        key = row["op"], row["shape"]
        if row["backend"] in OURS and (key not in best or row["us"] < best[key]["us"]):
            best[key] = row
    return list(best.values())


def kernels_short(result: dict[str, Any]) -> str:
    """One line an op and shape: our fastest back end beside the best public kernel."""
    return table(
        ("op", "shape", "ours", "us", "of limit", "best public", "public / ours", "error"),
        (
            (
                row["op"],
                row["shape"],
                row["backend"],
                row["us"],
                f"{row['fraction_of_limit']:.0%}",
                row["best_public"],
                row["ratio_to_best_public"] and f"{row['ratio_to_best_public']:.2f}x",
                None if row["max_error"] is None else f"{row['max_error']:.1e}",
            )
            for row in best_of_ours(result)
        ),
    )


def rank(result: dict[str, Any]) -> str:
    """Decode and prefill rows of one rank."""
    return table(
        (
            "phase",
            "batch",
            "context",
            "KV",
            "tokens a step",
            "MoE chunk",
            "ms a step",
            "tokens/s",
            "roofline",
            "fraction",
        ),
        (
            (
                row["phase"],
                row["batch"],
                round(row["context"]),
                row["kv_dtype"],
                row["tokens_per_step"],
                row.get("moe_chunk_tokens") or "",
                *(
                    (row["skipped"],)
                    if "skipped" in row
                    else (
                        row["step_ms"],
                        row["tokens_per_s"],
                        row["roofline_tokens_per_s"],
                        f"{row['fraction']:.1%}",
                    )
                ),
            )
            for row in result["rows"]
        ),
    )


def ops_of(result: dict[str, Any], phase: str, tokens: int, kv_dtype: str = "bf16", least_us: float = 50.0) -> str:
    """Where one step's time went, op by op, in milliseconds of a whole step."""
    chosen = [
        entry
        for entry in result["per_op"]
        if (entry["phase"], entry["tokens_per_step"], entry["kv_dtype"]) == (phase, tokens, kv_dtype)
    ]
    unique = {
        entry["op"]: entry for entry in reversed(chosen)
    }  # a chunked row of the same size comes after the whole one
    return table(
        ("op", "roofline ms", "measured ms"),
        (
            (entry["op"], entry["roofline_us"] / 1e3, entry["measured_us"] and entry["measured_us"] / 1e3)
            for entry in sorted(unique.values(), key=lambda entry: -(entry["measured_us"] or 0.0))
            if max(entry["roofline_us"], entry["measured_us"] or 0.0) >= least_us
        ),
    )


def sweep(result: dict[str, Any]) -> str:
    """Prefill by tokens a step: what attention and the experts reached."""
    rows = [row for row in result["rows"] if row["phase"] == "prefill" and "skipped" not in row]
    return table(
        ("tokens a step", "MoE chunk", "tokens/s", "MLA TFLOP/s", "MoE TFLOP/s"),
        (
            (
                row["tokens_per_step"],
                row["moe_chunk_tokens"] or "",
                row["tokens_per_s"],
                row["mla_tflops"],
                row["moe_tflops"],
            )
            for row in rows
        ),
    )


def transfer(result: dict[str, Any]) -> str:
    """Rows between two processes."""
    names = [name for name in ("link", "memory", "shape", "bytes", "us", "gb_s") if name in result["rows"][0]]
    return table(names, ([row[name] for name in names] for row in result["rows"]))


def main(directory: Path) -> None:
    found = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(directory.glob("*.json"))}
    if "rank" in found:
        print(rank(found["rank"]), sweep(found["rank"]), sep="\n\n", end="\n\n")
        print(ops_of(found["rank"], "decode", 256), ops_of(found["rank"], "prefill", 65536), sep="\n\n", end="\n\n")
    if "kernels" in found:
        print(kernels_short(found["kernels"]), kernels(found["kernels"]), sep="\n\n", end="\n\n")
    if "transfer" in found:
        print(transfer(found["transfer"]))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results" / "h200")
