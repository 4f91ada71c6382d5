"""What a calibration found, as a Markdown table and as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..attention.calibration_grid import DENSE, GridRow
from .video_io import write_atomically

if TYPE_CHECKING:
    from ..attention.auto import Crossover
    from .calibration import Calibration


def markdown(result: Calibration) -> str:
    """Errors by layer and step, times, memory, the proposed keep ratios and what the branch gains."""
    lines = [f"# Calibration: {result.recipe.name}", "", *_summary(result)]
    for name, rows in result.grid.items():
        lines += ["", f"## {name}: error of the attention output", "", *_errors(rows, result)]
        lines += ["", f"## {name}: time and memory of the attention of one layer", "", *_costs(rows)]
    if result.crossover is not None:
        lines += ["", "## Dense below, sparse above", "", *_crossover(result.crossover)]
    for name, branch in result.branches.items():
        kind = result.recipe.attention.branch
        lines += ["", f"## {name}: branch {kind!r}", ""]
        lines += ["| layer | keep ratio | sparse alone | branch as it was | calibrated |", "|--:|--:|--:|--:|--:|"]
        lines += [
            f"| {row.layer} | {row.keep_ratio:g} | {row.sparse:.4f} | {row.before:.4f} | {row.after:.4f} |"
            for row in branch.layers
        ]
    return "\n".join(lines) + "\n"


def _summary(result: Calibration) -> list[str]:
    budget = result.budget
    dense = ", ".join(map(str, budget.dense_layers)) or "none"
    return [
        f"- largest error allowed: {budget.bound:g} of the attention output of a layer, at every measured step",
        f"- keep ratios by layer: {', '.join(f'{ratio:g}' for ratio in budget.keep_ratios)}",
        f"- layers that stay dense: {dense}",
        f"- attention of one forward pass, as measured: {budget.seconds_dense:.4g} s dense, {budget.seconds:.4g} s so",
    ]


def _crossover(found: Crossover) -> list[str]:
    first = "at no measured length" if found.tokens is None else f"from {found.tokens:,} tokens on"
    text = [f"`{found.backend}` was faster than dense attention {first}; forward, random tokens, this machine.", ""]
    text += ["| tokens | dense, s | sparse, s |", "|--:|--:|--:|"]
    return text + [f"| {tokens} | {dense:.3g} | {sparse:.3g} |" for tokens, dense, sparse in found.rows]


def _errors(rows: list[GridRow], result: Calibration) -> list[str]:
    """One line per layer, one column per keep ratio: the error at each step; the chosen ratio in bold."""
    steps = sorted({row.step for row in rows})
    ratios = sorted({row.keep_ratio for row in rows if row.keep_ratio < DENSE})
    found = {(row.layer, row.step, row.keep_ratio): row.error for row in rows}
    text = [f"Steps {', '.join(map(str, steps))}, in this order; bold is the proposed keep ratio.", ""]
    text += ["| layer | " + " | ".join(f"{ratio:g}" for ratio in ratios) + " |", "|--:" * (len(ratios) + 1) + "|"]
    for layer in sorted({row.layer for row in rows}):
        cells = []
        for ratio in ratios:
            cell = " / ".join(f"{found[layer, step, ratio]:.3f}" for step in steps)
            cells.append(f"**{cell}**" if result.budget.keep_ratios[layer] == ratio else cell)
        text.append(f"| {layer} | " + " | ".join(cells) + " |")
    return text


def _costs(rows: list[GridRow]) -> list[str]:
    """Means over layers and steps by keep ratio."""
    text = ["| keep ratio | pairs left out | seconds | over dense | peak MiB |", "|--:|--:|--:|--:|--:|"]

    def mean(ratio: float, name: str) -> float:
        values = [getattr(row, name) for row in rows if row.keep_ratio == ratio]
        return sum(values) / len(values)

    dense = mean(DENSE, "seconds")
    for ratio in sorted({row.keep_ratio for row in rows}):
        seconds = mean(ratio, "seconds")
        label = "dense" if ratio == DENSE else f"{ratio:g}"
        cells = (label, f"{mean(ratio, 'sparsity'):.3f}", f"{seconds:.3g}", f"{dense / seconds:.2f}x")
        text.append(f"| {' | '.join(cells)} | {mean(ratio, 'peak_bytes') / 2**20:.2f} |")
    tokens = rows[0].tokens
    return [f"{tokens} tokens; means over layers and steps.", "", *text]


def plot(result: Calibration, path: Path) -> None:
    """Left the error of each layer against the keep ratio, right the error against the time over dense.

    Raises:
        ImportError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("the plot needs matplotlib: pip install matplotlib") from None
    figure: Any = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for name, rows in result.grid.items():
        ratios = sorted({row.keep_ratio for row in rows if row.keep_ratio < DENSE})
        for layer in sorted({row.layer for row in rows}):
            worst = [max(r.error for r in rows if (r.layer, r.keep_ratio) == (layer, ratio)) for ratio in ratios]
            left.plot(ratios, worst, marker="o", markersize=3, label=f"{name} {layer}")
        dense = sum(row.seconds for row in rows if row.keep_ratio == DENSE)
        times = [sum(row.seconds for row in rows if row.keep_ratio == ratio) / dense for ratio in ratios]
        means = [_mean([row.error for row in rows if row.keep_ratio == ratio]) for ratio in ratios]
        right.plot(times, means, marker="o", label=name)
        for ratio, x, y in zip(ratios, times, means, strict=True):
            right.annotate(f"{ratio:g}", (x, y), textcoords="offset points", xytext=(4, 4), fontsize=8)
    left.axhline(result.budget.bound, color="grey", linestyle="--", linewidth=1, label="bound")
    left.set(xlabel="keep ratio", ylabel="relative error of the attention output (worst step)", xscale="log")
    right.set(xlabel="time over dense attention", ylabel="mean relative error", title="by keep ratio")
    shown = sorted({row.keep_ratio for rows in result.grid.values() for row in rows if row.keep_ratio < DENSE})
    left.set_xticks(shown, [f"{ratio:g}" for ratio in shown])
    left.minorticks_off()
    if len(left.get_lines()) <= 16:
        left.legend(fontsize=7)
    right.legend(fontsize=8)
    write_atomically(path, lambda part: figure.savefig(part, dpi=120, format="png"))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
