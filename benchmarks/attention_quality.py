"""Quality versus keep ratio, without training: dense, sparse, sparse with a calibrated RoLA branch, and with SLA.

Every method makes the same held-out captions from the same seeds through the stock pipeline. What is looked at: whether
the clips show what the captions say, and how far they are from those of the dense model. Branches are calibrated on
other captions (`attention.calibration`), so nothing is measured on what it was set with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ..attention.calibration import CalibratedBranch, calibrate_branch
from ..attention.config import AttentionConfig, RoLAConfig
from ..core.config import require
from ..evaluation.distribution import SampleStates
from ..evaluation.fidelity import psnr
from ..evaluation.run import EvaluationResult, compare, evaluate
from ..pipelines.acceleration import accelerate, current_report, restore, state_of
from ..pipelines.calibration import RecordedForward, record_forwards
from ..pipelines.generation import GenerationRequest
from ..pipelines.recipe import Recipe
from ..pipelines.video_io import write_atomically
from ..tiny.dataset import held_out_captions

METHODS = ("sparse", "rola", "sla")
"""The sparse softmax alone, and with a calibrated branch; "dense" always comes first."""

EQUAL_DB = 100.0
"""What a clip counts that is the dense one bit for bit, whose ratio is infinite."""

PICTURE_STEPS = 5
"""Columns of the picture of the kept blocks, at most."""


class Maker(Protocol):
    """Clips of the pipeline that is measured: uint8 [frames, height, width, 3], one for each prompt and seed."""

    settings: dict[str, Any]
    states: SampleStates | None

    def __call__(self, prompts: Sequence[str], seeds: Sequence[int]) -> list[np.ndarray]:
        """Make them; final latents go into `states`."""
        ...


class Recorder(Protocol):
    """Notes which blocks are kept while clips are made."""

    def record(self, pipe: Any) -> AbstractContextManager[None]:
        """While this lasts."""
        ...


@dataclasses.dataclass(frozen=True)
class QualityRow:
    """One method at one keep ratio.

    Attributes:
        method: "dense" or one of `METHODS`.
        keep_ratio: that was asked for; 1 for "dense".
        sparsity: share of the token pairs left out, mean over the layers of the last forward pass; None without one.
        accuracy: share of captioned attributes that the clips show.
        accuracy_by_attribute: value, and its 95 % interval over captions.
        measures: means of the continuous measures of the shapes, None where no clip had one.
        psnr_db: of the clips against the dense ones of the same seeds, mean; None for "dense".
        distances: to the dense model, by measure: value, interval and count (`compare_samples`); empty for "dense".
        attention_error: largest relative error of a layer's attention output on the calibration's samples, of the
            sparse softmax alone and with the calibrated branch; None without a branch.
    """

    method: str
    keep_ratio: float
    sparsity: float | None
    accuracy: float
    accuracy_by_attribute: dict[str, dict[str, float]]
    measures: dict[str, float | None]
    psnr_db: float | None
    distances: dict[str, Any]
    attention_error: dict[str, float] | None

    @property
    def end_distance(self) -> float | None:
        """Same-seed distance of the final latents to the dense ones, relative to their norm."""
        found = self.distances.get("end_distance")
        return None if found is None else float(found["value"])

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; a number that is not finite is None there."""
        data: dict[str, Any] = _finite({**dataclasses.asdict(self), "end_distance": self.end_distance})
        return data


def bench_attention_quality(
    pipe: Any,
    maker: Maker,
    *,
    base: AttentionConfig,
    rola: RoLAConfig,
    keep_ratios: Sequence[float],
    methods: Sequence[str] = METHODS,
    captions: int = 64,
    calibration_captions: int = 4,
    measured_steps: int = 3,
    batch_size: int = 8,
    recorder: Recorder | None = None,
    recorded_ratio: float | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[QualityRow]:
    """Measure every method at every keep ratio.

    Args:
        pipe: a stock pipeline of the tiny world; it is stock again afterwards.
        maker: of its clips.
        base: backend, block sizes and token order; keep ratio and branch are set here.
        rola: settings of the branch "rola".
        keep_ratios: below 1.
        methods: of `METHODS`.
        captions: held-out captions that are measured, each with a seed of its own.
        calibration_captions: further held-out captions that branches are calibrated on.
        measured_steps: steps of those clips that the calibration looks at.
        batch_size: clips made together.
        recorder: listens to the method "sparse" at `recorded_ratio`, for a picture of the kept blocks.
        recorded_ratio: one of `keep_ratios`; None for the smallest.
        say: told what begins.

    Raises:
        ConfigError: an accelerated pipeline, an unknown method, or a number out of range.
    """
    require(state_of(pipe) is None, "pipeline", "an accelerated one", "restored first: call restore(pipe)")
    unknown = [name for name in methods if name not in METHODS]
    require(bool(methods) and not unknown, "methods", tuple(methods), f"of {', '.join(METHODS)}")
    within = bool(keep_ratios) and all(0 < ratio < 1 for ratio in keep_ratios)
    require(within, "keep_ratios", tuple(keep_ratios), "numbers above 0 and below 1")
    for name, number in (("captions", captions), ("calibration_captions", calibration_captions)):
        require(number >= 1, name, number, "at least 1")
    require(base.backend not in ("dense", "auto"), "backend", base.backend, "a sparse one by name")
    chosen = min(keep_ratios) if recorded_ratio is None else recorded_ratio
    lonely = recorded_ratio is not None and "sparse" not in methods
    require(not lonely, "recorded_ratio", recorded_ratio, "left out without the method 'sparse', which it is of")
    require(chosen in keep_ratios, "recorded_ratio", chosen, f"one of {', '.join(map(str, keep_ratios))}")
    counts = {"num_captions": captions, "diversity_captions": 0, "batch_size": batch_size}
    say(f"dense: {captions} clips")
    teacher = _measure(maker, counts)
    rows = [_row("dense", 1.0, 0.0, teacher, None, None)]
    calls: dict[str, list[RecordedForward]] = {}
    if set(methods) & {"rola", "sla"}:
        say(f"sampling {calibration_captions} clips for the calibration")
        calls = _record(pipe, maker, base, captions, calibration_captions, measured_steps)
    for keep in sorted(keep_ratios):
        for method in methods:
            config = _config(base, method, keep, rola)
            calibrated: dict[str, CalibratedBranch] = {}
            if method != "sparse":
                say(f"{method}, keep ratio {keep:g}: calibrating")
                calibrated = {
                    name: calibrate_branch(
                        getattr(pipe, name), config, [call.replay(getattr(pipe, name)) for call in own]
                    )
                    for name, own in calls.items()
                }
            say(f"{method}, keep ratio {keep:g}: {captions} clips")
            state = {name: branch.state for name, branch in calibrated.items()} or None
            accelerate(pipe, Recipe(f"{method} {keep:g}", attention=config), branch_state=state)
            try:
                if recorder is not None and method == "sparse" and keep == chosen:
                    with recorder.record(pipe):
                        found = _measure(maker, counts)
                else:
                    found = _measure(maker, counts)
                sparsity = _sparsity(pipe)
            finally:
                restore(pipe)
            rows.append(_row(method, keep, sparsity, found, teacher, calibrated))
            distance = _cell(rows[-1].end_distance)
            say(f"  accuracy {rows[-1].accuracy:.3f} (dense {rows[0].accuracy:.3f}), distance {distance}")
    return rows


@dataclasses.dataclass
class _Found:
    result: EvaluationResult
    clips: list[np.ndarray]


def _measure(maker: Maker, counts: Mapping[str, Any]) -> _Found:
    clips: list[np.ndarray] = []

    def keep(prompts: list[str], seeds: list[int]) -> list[np.ndarray]:
        made = maker(prompts, seeds)
        clips.extend(made)
        return made

    maker.states = SampleStates()
    try:
        return _Found(evaluate(keep, states=maker.states, **counts), clips)
    finally:
        maker.states = None


def _record(
    pipe: Any, maker: Maker, base: AttentionConfig, captions: int, count: int, measured_steps: int
) -> dict[str, list[RecordedForward]]:
    """Forward passes of the dense model over captions and seeds that come after those that are measured."""
    prompts = [caption.text for _, caption in held_out_captions(count, first_seed=captions)]
    names = ("height", "width", "num_frames", "num_inference_steps", "guidance_scale")
    request = GenerationRequest(prompts[0], **{name: maker.settings[name] for name in names})
    return record_forwards(pipe, Recipe("recorded", attention=base), prompts, measured_steps, captions, request)


def _config(base: AttentionConfig, method: str, keep_ratio: float, rola: RoLAConfig) -> AttentionConfig:
    config = dataclasses.replace(base, keep_ratio=keep_ratio)
    if method == "rola":
        return dataclasses.replace(config, branch="rola", rola=rola)
    return dataclasses.replace(config, branch="sla") if method == "sla" else config


def _sparsity(pipe: Any) -> float | None:
    report = current_report(pipe)
    assert report is not None
    shares = [row["actual_sparsity"] for row in report.layers if row["actual_sparsity"] is not None]
    return sum(shares) / len(shares) if shares else None


def _row(
    method: str,
    keep_ratio: float,
    sparsity: float | None,
    found: _Found,
    teacher: _Found | None,
    calibrated: dict[str, CalibratedBranch] | None,
) -> QualityRow:
    result, distances, fidelity, error = found.result, {}, None, None
    if teacher is not None:
        distances = compare(result, teacher.result)["distribution_to_teacher"]
        pairs = zip(found.clips, teacher.clips, strict=True)
        fidelity = float(np.mean([min(psnr(ours, theirs), EQUAL_DB) for ours, theirs in pairs]))
    layers = [layer for branch in (calibrated or {}).values() for layer in branch.layers]
    if layers:
        error = {"sparse": max(row.sparse for row in layers), "calibrated": max(row.after for row in layers)}
    detail = {name: dataclasses.asdict(value) for name, value in result.accuracy.items()}
    return QualityRow(
        method, keep_ratio, sparsity, result.mean_accuracy, detail, dict(result.continuous), fidelity, distances, error
    )


def _finite(data: Any) -> Any:
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    return None if isinstance(data, float) and not np.isfinite(data) else data


def markdown(rows: Sequence[QualityRow], title: str) -> str:
    """The rows as a table for people."""
    lines = [
        f"### {title}",
        "",
        "| method | keep ratio | pairs left out | accuracy | motion | distance to dense | PSNR to dense, dB "
        "| sliced W2 | shape IoU | attention error, sparse / with branch |",
        "|---|" + "--:|" * 9,
    ]
    for row in rows:
        error = row.attention_error
        cells = [
            row.method, f"{row.keep_ratio:g}", _cell(row.sparsity), f"{row.accuracy:.3f}",
            _cell(row.accuracy_by_attribute.get("motion", {}).get("value")), _cell(row.end_distance),
            _cell(row.psnr_db, 1), _cell(row.distances.get("sliced_wasserstein", {}).get("value")),
            _cell(row.measures.get("shape_iou")),
            "" if error is None else f"{error['sparse']:.3f} / {error['calibrated']:.3f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "Accuracy: share of captioned attributes that the clips show. Distance: of the final latents to those of the "
        "dense model from the same noise, relative to their norm. Attention error: largest of any layer, on the "
        "samples of the calibration.",
    ]
    return "\n".join(lines) + "\n"


def _cell(value: float | None, digits: int = 3) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def plot(rows: Sequence[QualityRow], path: Path) -> Path:
    """Accuracy and distance to the dense model over the keep ratio, one line per method, as a PNG.

    Raises:
        ImportError: matplotlib is missing.
    """
    figure, (left, right) = _figure(1, 2, (10.0, 4.0))
    dense = rows[0]
    left.axhline(dense.accuracy, color="black", linestyle="--", linewidth=1, label="dense")
    for method in dict.fromkeys(row.method for row in rows[1:]):
        own = sorted((row for row in rows if row.method == method), key=lambda row: row.keep_ratio)
        ratios = [row.keep_ratio for row in own]
        left.plot(ratios, [row.accuracy for row in own], marker="o", label=method)
        right.plot(ratios, [np.nan if row.end_distance is None else row.end_distance for row in own], marker="o")
    ticks = sorted({row.keep_ratio for row in rows[1:]})
    for panel, title in ((left, "caption accuracy"), (right, "distance of the latents to dense")):
        panel.set(title=title, xlabel="keep ratio", xscale="log")
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    left.legend(fontsize=8)
    return write_atomically(path, lambda partial: figure.savefig(partial, dpi=110, format="png"))


def draw_kept_blocks(maps: Any, layer: int, path: Path) -> Path:
    """Which key blocks each query block keeps: a row for each head of one layer, a column for some steps, as a PNG.

    Args:
        maps: as a recorder gives them: `steps`, `shares` uint8 [steps, layers, heads, query places, key places].
        layer: index of a layer.
        path: of the PNG.

    Raises:
        ConfigError: no such layer.
        ImportError: matplotlib is missing.
    """
    shares = maps.shares
    require(0 <= layer < shares.shape[1], "layer", layer, f"0 to {shares.shape[1] - 1}")
    count = min(PICTURE_STEPS, len(maps.steps))
    places = sorted({round(i * (len(maps.steps) - 1) / max(1, count - 1)) for i in range(count)})
    heads = shares.shape[2]
    figure, panels = _figure(heads, len(places), (2.2 * len(places) + 0.6, 2.2 * heads + 0.6))
    for head in range(heads):
        for column, place in enumerate(places):
            panel = panels[head * len(places) + column]
            panel.imshow(shares[place, layer, head] / 255.0, vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
            panel.set_xticks([])
            panel.set_yticks([])
            if head == 0:
                panel.set_title(f"step {maps.steps[place]}", fontsize=9)
            if column == 0:
                panel.set_ylabel(f"head {head}: query blocks", fontsize=8)
            if head == heads - 1:
                panel.set_xlabel("key blocks", fontsize=8)
    figure.suptitle(f"layer {layer}: kept blocks are bright", fontsize=10)
    return write_atomically(path, lambda partial: figure.savefig(partial, dpi=110, format="png"))


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, np.atleast_1d(figure.subplots(rows, columns)).ravel()
