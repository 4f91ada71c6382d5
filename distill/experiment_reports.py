"""Tables and pictures of the experiments; what they say is counted from the results, whatever comes out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..evaluation.report import Table
from ..pipelines.video_io import write_atomically
from .experiments import Settings

Results = dict[str, list[dict[str, Any]]]
"""By arm, one result per seed."""

LOCAL_FALL = 0.2
TERMINAL_CHANGE = 0.02
"""The trap: over the second half of the warm-up the local loss falls by the former share at least, the terminal error
by less than the latter."""

RANDOM_WEIGHTS = "**A rehearsal on random weights with a few iterations: no number below means anything.**"


def write_report(folder: Path, settings: Settings, results: Results) -> Path:
    """Writes `report.md` and its pictures; returns the former."""
    make = {"trap": _trap, "branch": _branch, "frontier": _frontier}[settings.experiment]
    seeds = len(next(iter(results.values())))
    lines = [f"# Experiment: {settings.experiment}", ""]
    if settings.quick:
        lines += [RANDOM_WEIGHTS, ""]
    lines += [
        f"Teacher: {settings.model}. {seeds} seeds for each arm; numbers are means over seeds, in brackets the "
        "smallest and the largest seed.",
        "",
        _scale_line(settings),
        "",
        *make(folder, results),
    ]
    text = "\n".join(lines).rstrip() + "\n"
    return write_atomically(folder / "report.md", lambda partial: partial.write_text(text, encoding="utf-8"))


def _scale_line(settings: Settings) -> str:
    parts = [f"{name.replace('_', ' ')} {value}" for name, value in vars(settings.scale).items()]
    return "Scale: " + ", ".join(parts) + "."


def spread(values: Sequence[float | None]) -> str:
    """Mean over seeds, with the smallest and largest one; "n/a" where a seed has none."""
    if any(v is None for v in values):
        return "n/a"
    numbers = np.array(values, dtype=float)
    mean = f"{numbers.mean():.3g}"
    return mean if len(numbers) == 1 else f"{mean} [{numbers.min():.3g}, {numbers.max():.3g}]"


def _figure(columns: int = 1) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.5 * columns, 4), layout="constrained")
    return figure, np.atleast_1d(figure.subplots(1, columns)).ravel()


def _save(figure: Any, path: Path, text: str) -> str:
    write_atomically(path, lambda partial: figure.savefig(partial, dpi=110))
    return f"![{text}]({path.name})"


def trap_found(point_results: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Relative fall of the mean local loss and of the terminal error over the second half of a warm-up, of one seed."""
    middle, last = point_results[len(point_results) // 2 - 1 if len(point_results) > 1 else 0], point_results[-1]
    pairs = [(float(np.mean(p["local"])), p["terminal"]) for p in (middle, last)]
    falls = [(a - b) / a if a > 0 else 0.0 for a, b in zip(*pairs, strict=True)]
    return falls[0], falls[1]


def _trap(folder: Path, results: Results) -> list[str]:
    falls = Table(
        "Second half of the warm-up",
        ("arm", "fall of the local loss", "fall of the terminal error", "seeds with the trap"),
    )
    ends = Table(
        "Terminal error",
        ("arm", "warm-up, many steps", "warm-up, three steps", "CrossDistill", "sliced W2 of each", "", ""),
    )
    origin = {
        stage: Table(
            f"Where the error comes from, {label} (noisiest interval first)",
            ("arm", *(f"swap {i + 1}" for i in range(3)), *(f"restore {i + 1}" for i in range(3))),
        )
        for stage, label in (("warmup", "after the warm-up: thirds of unshifted time"),
                             ("few_steps", "after the warm-up: steps of the student"),
                             ("crossdistill", "after CrossDistill: steps of the student"))
    }  # fmt: skip
    for arm, seeds in results.items():
        both = [trap_found(r["points"]) for r in seeds]
        caught = sum(local >= LOCAL_FALL and terminal < TERMINAL_CHANGE for local, terminal in both)
        falls.add(arm, spread([b[0] for b in both]), spread([b[1] for b in both]), f"{caught} of {len(seeds)}")
        cells = [spread([r[s][key] for r in seeds]) for key in ("terminal", "sliced_wasserstein") for s in origin]
        ends.add(arm, *cells)
        for stage, table in origin.items():
            parts = [[r[stage][kind][i] for r in seeds] for kind in ("swap", "restore") for i in range(3)]
            table.add(arm, *map(spread, parts))
    rule = (
        f"A seed counts as trapped where over the second half of the warm-up the local loss falls by at least "
        f"{LOCAL_FALL:.0%} and the terminal error by less than {TERMINAL_CHANGE:.0%}. "
        f"Swap: error with the student in that interval alone. Restore: by how much the error falls with the teacher "
        f"in that interval alone. Errors are same-seed distances relative to the teacher's norm."
    )
    pictures = [_draw_trap(folder, results), _draw_bins(folder, results)]
    blocks = [falls.markdown(), ends.markdown(), *(t.markdown() for t in origin.values())]
    return [rule, "", *_separated([*pictures, *blocks])]


def _separated(blocks: Sequence[str]) -> list[str]:
    return [line for block in blocks for line in (block, "")]


def _draw_trap(folder: Path, results: Results) -> str:
    figure, (left, right) = _figure(2)
    values: tuple[tuple[Any, str, Callable[[dict[str, Any]], float]], ...] = (
        (left, "local loss", lambda p: float(np.mean(p["local"]))),
        (right, "terminal error", lambda p: p["terminal"]),
    )
    for panel, title, value in values:
        for arm, seeds in results.items():
            steps = [p["step"] for p in seeds[0]["points"]]
            curves = np.array([[value(p) for p in r["points"]] for r in seeds])
            if (curves <= 0).all():
                continue  # the dense student is the teacher
            (line,) = panel.plot(steps, curves.mean(axis=0), marker="o", label=arm)
            panel.fill_between(steps, curves.min(axis=0), curves.max(axis=0), alpha=0.2, color=line.get_color())
        panel.set(title=title, xlabel="iteration of the warm-up", yscale="log")
        panel.grid(alpha=0.3)
    right.legend(fontsize=8)
    return _save(figure, folder / "trap-curves.png", "Local loss and terminal error along the warm-up")


def _draw_bins(folder: Path, results: Results) -> str:
    figure, (panel,) = _figure()
    for arm, seeds in results.items():
        curves = np.array([r["points"][-1]["local"] for r in seeds])
        if (curves > 0).all():
            panel.plot(range(1, curves.shape[1] + 1), curves.mean(axis=0), marker="o", label=arm)
    panel.set(title="local loss at the end, by noise bin", xlabel="bin, noisiest first", yscale="log")
    panel.legend(fontsize=8)
    panel.grid(alpha=0.3)
    return _save(figure, folder / "trap-bins.png", "Local loss by noise bin")


QUALITY: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "accuracy / teacher": lambda r: r["accuracy_over_teacher"],
    "entropy / teacher": lambda r: r["entropy_over_teacher"],
}
_MEASURES = {
    "Frechet": "frechet",
    "sliced W2": "sliced_wasserstein",
    "MMD^2": "squared_mmd",
    "Vendi / teacher": "vendi_over_teacher",
    "pairs / teacher": "pairwise_distance_over_teacher",
    "motion / teacher": "motion_over_teacher",
    "at the crossover": "crossover_distance",
    "at the end": "end_distance",
}


def _distance(name: str) -> Callable[[dict[str, Any]], float | None]:
    def read(result: dict[str, Any]) -> float | None:
        found = result["distribution_to_teacher"].get(name)
        return None if found is None else float(found["value"])

    return read


def _quality_tables(results: Results, *, cost: bool) -> list[str]:
    """Quality and diversity; distances; and the bootstrap intervals of the first seed."""
    first = Table("Quality and diversity", ("arm", "accuracy", *QUALITY, *(("seconds per clip",) if cost else ())))
    second = Table("Distances to the teacher", ("arm", *_MEASURES))
    third = Table("95 % bootstrap intervals within the first seed", ("arm", *_MEASURES))
    for arm, seeds in results.items():
        cells = [spread([r["accuracy_mean"] for r in seeds])]
        cells += [spread([read(r) for r in seeds]) for read in QUALITY.values()]
        if cost:
            cells.append(spread([r["denoise_seconds_per_clip"] for r in seeds]))
        first.add(arm, *cells)
        second.add(arm, *(spread([_distance(name)(r) for r in seeds]) for name in _MEASURES.values()))
        third.add(arm, *(_interval(seeds[0]["distribution_to_teacher"].get(name)) for name in _MEASURES.values()))
    return [first.markdown(), second.markdown(), third.markdown()]


def _interval(found: dict[str, Any] | None) -> str:
    if found is None or found["low"] is None:
        return "n/a"
    return f"{found['low']:.3g} to {found['high']:.3g}"


def _scatter(
    panel: Any,
    results: Results,
    across: Callable[[dict[str, Any]], float | None],
    up: Callable[[dict[str, Any]], float | None],
) -> None:
    for arm, seeds in results.items():
        pairs = [(across(r), up(r)) for r in seeds]
        known = np.array([p for p in pairs if None not in p], dtype=float)
        if len(known):
            x, y = known.mean(axis=0)
            reach = [np.abs(known[:, i] - c)[:, None].max(axis=0) for i, c in enumerate((x, y))]
            panel.errorbar(x, y, xerr=reach[0], yerr=reach[1], marker="o", linestyle="none", label=arm)
    panel.grid(alpha=0.3)
    panel.legend(fontsize=7)


def _branch(folder: Path, results: Results) -> list[str]:
    figure, (left, right) = _figure(2)
    seconds = lambda r: r["denoise_seconds_per_clip"]  # noqa: E731
    _scatter(left, results, seconds, QUALITY["accuracy / teacher"])
    left.set(title="quality against cost", xlabel="denoising seconds per clip", ylabel="accuracy / teacher")
    _scatter(right, results, seconds, _distance("sliced_wasserstein"))
    right.set(title="distance against cost", xlabel="denoising seconds per clip", ylabel="sliced W2 to the teacher")
    note = "Seconds are medians of this machine, sampling alone; every arm had the same number of iterations."
    return [note, "", *_separated([_save(figure, folder / "branch.png", "Quality against cost"),
                                   *_quality_tables(results, cost=True)])]  # fmt: skip


def dominated(results: Results, arm: str) -> list[str]:
    """Arms that are better than `arm` in accuracy and in entropy, in every seed."""
    better = []
    for other, seeds in results.items():
        if other == arm:
            continue
        wins = []
        for theirs, ours in zip(seeds, results[arm], strict=True):
            pairs = [(read(theirs), read(ours)) for read in QUALITY.values()]
            wins.append(all(a is not None and b is not None and a > b for a, b in pairs))
        if all(wins):
            better.append(other)
    return better


def _frontier(folder: Path, results: Results) -> list[str]:
    figure, (left, right) = _figure(2)
    _scatter(left, results, QUALITY["entropy / teacher"], QUALITY["accuracy / teacher"])
    left.set(title="quality against diversity", xlabel="entropy / teacher", ylabel="accuracy / teacher")
    _scatter(right, results, _distance("vendi_over_teacher"), _distance("sliced_wasserstein"))
    right.set(title="the same on latents", xlabel="Vendi / teacher", ylabel="sliced W2 to the teacher")
    table = Table("Better in accuracy and entropy, in every seed", ("arm", "is beaten by"))
    for arm in results:
        table.add(arm, ", ".join(dominated(results, arm)) or "none")
    note = (
        "Every arm starts from the warm-up of its seed and has the same number of iterations; where a critic is "
        "trained, most of them are the critic's. A crossover before the first step is `tdm`, one at the end is `pcm`."
    )
    return [note, "", *_separated([_save(figure, folder / "frontier.png", "Quality against diversity"),
                                   *_quality_tables(results, cost=False), table.markdown()])]  # fmt: skip
