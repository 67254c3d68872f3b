"""PNG plots of the kept results: `python -m bench.plots [bench/results/h200]`. Needs matplotlib (the extra `plots`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from bench.tables import best_of_ours

OURS, LIMIT = "#1b6ca8", "#c0392b"


def draw_all(directory: Path) -> list[Path]:
    """One PNG for each known result file of the directory; answers what was written."""
    import matplotlib

    matplotlib.use("Agg")
    made = []
    for name, source_name, draw in (
        ("kernels", "kernels", _kernels),
        ("rank", "rank", _rank),
        ("prefill", "rank", _sweep),
    ):
        source = directory / f"{source_name}.json"
        if source.exists():
            figure = draw(json.loads(source.read_text(encoding="utf-8")))
            figure.savefig(directory / f"{name}.png", dpi=90, bbox_inches="tight", metadata={"Software": None})
            made.append(directory / f"{name}.png")
    return made


def _kernels(result: dict[str, Any]):
    """Each op and shape: the fraction of the hardware's limit that ours and the best public kernel reached."""
    import matplotlib.pyplot as plt

    rows = best_of_ours(result)
    figure, axis = plt.subplots(figsize=(8, 0.16 * len(rows) + 1))
    places = range(len(rows))
    axis.barh(places, [100 * row["fraction_of_limit"] for row in rows], color=OURS, height=0.7, label="ours")
    public = [
        (place, 100 * row["fraction_of_limit"] / row["ratio_to_best_public"])
        for place, row in enumerate(rows)
        if row["ratio_to_best_public"]
    ]
    axis.plot([x for _, x in public], [y for y, _ in public], "|", color=LIMIT, markersize=6, label="best public")
    axis.set_yticks(places, [f"{row['op']} {row['shape']}" for row in rows], fontsize=5)
    axis.set_ylim(len(rows), -1)
    axis.set_xlim(0, 110)
    axis.set_xlabel("% of the limit measured in the same run")
    axis.legend(fontsize=7, loc="lower right")
    return figure


def _rank(result: dict[str, Any]):
    """Tokens per second of one rank beside the roofline: decode by batch, prefill by tokens a step."""
    import matplotlib.pyplot as plt

    phases = [phase for phase in ("decode", "prefill") if any(row["phase"] == phase for row in result["rows"])]
    figure, axes = plt.subplots(1, len(phases), figsize=(5 * len(phases), 4), squeeze=False)
    for axis, phase in zip(axes[0], phases, strict=True):
        rows = [row for row in result["rows"] if row["phase"] == phase and "skipped" not in row]
        for kv in sorted({row["kv_dtype"] for row in rows}):
            kept = (row for row in rows if row["kv_dtype"] == kv and not row.get("moe_chunk_tokens"))
            some = sorted(kept, key=lambda row: row["tokens_per_step"])
            steps = [row["tokens_per_step"] for row in some]
            axis.plot(steps, [row["tokens_per_s"] for row in some], "o-", label=f"measured, {kv} KV")
            axis.plot(steps, [row["roofline_tokens_per_s"] for row in some], "--", label=f"roofline, {kv} KV")
        axis.set_xscale("log", base=2)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("tokens a step")
        axis.set_ylabel("tokens per second and rank")
        axis.set_title(f"{result['model']} {phase}, communication not included", fontsize=9)
        axis.legend(fontsize=7)
    return figure


def _sweep(result: dict[str, Any]):
    """Where prefill flattens: achieved TFLOP/s of attention and of the experts by tokens a step."""
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(6, 4))
    whole = (row for row in result["rows"] if row.get("moe_chunk_tokens") == 0 and "skipped" not in row)
    rows = sorted(whole, key=lambda row: row["tokens_per_step"])
    steps = [row["tokens_per_step"] for row in rows]
    for name in ("mla_tflops", "moe_tflops"):
        axis.plot(steps, [row[name] for row in rows], "o-", label=name.removesuffix("_tflops").upper())
    axis.set_xscale("log", base=2)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("prefill tokens a step")
    axis.set_ylabel("TFLOP/s")
    axis.legend()
    return figure


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "results" / "h200"
    for path in draw_all(folder):
        print(path)
