"""What the page shows, as plain data and escaped HTML: no gradio in here, so that every line can be tested alone."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..pipelines.recipe import Recipe
from ..pipelines.sizes import strides
from .block_maps import BlockMaps
from .history import Clip
from .service_data import ServiceLimits, Snapshot, Status

OWN_RECIPE = "model's own"
STAGE_COLUMNS = ("stage", "seconds", "peak memory", "share")
JOB_COLUMNS = ("job", "state", "progress", "request", "problem")


@dataclass(frozen=True)
class Range:
    """Values that a model allows: `first`, `first + step`, ... up to `last`."""

    first: int
    last: int
    step: int

    def nearest(self, value: int) -> int:
        """The allowed value that is nearest to this one."""
        steps = round((value - self.first) / self.step)
        return self.first + max(0, min(steps, (self.last - self.first) // self.step)) * self.step


def size_ranges(pipe: Any, defaults: Mapping[str, Any], limits: ServiceLimits) -> dict[str, Range]:
    """Widths, heights and numbers of frames that a pipeline (or a stand-in) allows, up to twice its usual ones.

    Args:
        pipe: with strides and configurations.
        defaults: its usual height, width and num_frames.
        limits: a size over them is left out.
    """
    step = strides(pipe)
    denoiser = pipe.transformer if pipe.transformer is not None else pipe.transformer_2
    positions = getattr(denoiser.config, "rope_max_seq_len", None) or 2**31
    patch = denoiser.config.patch_size
    offset = 1 if step.frame_patch == 1 else step.frames * (step.frame_patch - 1) + 1
    period = step.frames * step.frame_patch
    ranges = {}
    for name, first, by, limit in (
        ("height", step.height, step.height, positions * pipe.vae_scale_factor_spatial * patch[1]),
        ("width", step.width, step.width, positions * pipe.vae_scale_factor_spatial * patch[2]),
        ("num_frames", offset, period, (positions * step.frame_patch - 1) * step.frames + 1),
    ):
        others = [defaults[other] for other in ("height", "width", "num_frames") if other != name]
        room = limits.max_pixels // max(others[0] * others[1], 1)
        last = max(first, min(2 * defaults[name], limit, max(room, defaults[name])))
        ranges[name] = Range(first, first + (last - first) // by * by, by)
    return ranges


def recipe_choices(recipes: Sequence[Recipe], own: Recipe) -> list[tuple[str, str]]:
    """Label and value of the recipes, the model's own first."""
    described = own.description or own.name
    return [(f"{OWN_RECIPE}: {described}", OWN_RECIPE)] + [
        (f"{recipe.name}: {recipe.description or recipe.name}", recipe.name) for recipe in recipes
    ]


def chosen_recipe(name: str | None, keep_ratio: float | None, recipes: Sequence[Recipe], own: Recipe) -> Any:
    """The recipe for the service: None, a name, or a Recipe whose keep ratio was moved."""
    wanted = None if name in (None, "", OWN_RECIPE) else name
    recipe = own if wanted is None else next((r for r in recipes if r.name == wanted), None)
    if recipe is None or keep_ratio is None or not is_sparse(recipe) or keep_ratio == recipe.attention.keep_ratio:
        return wanted
    attention = dataclasses.replace(recipe.attention, keep_ratio=keep_ratio)
    return dataclasses.replace(recipe, attention=attention)


def is_sparse(recipe: Recipe) -> bool:
    """Whether the recipe leaves out key blocks."""
    return recipe.attention.keep_ratio < 1


def differs_from_dense(recipe: Recipe) -> bool:
    """Whether there is something to compare with the dense model."""
    return is_sparse(recipe) or recipe.sampler.sigmas is not None or recipe.quantization.mode != "none"


def is_guided(recipe: Recipe) -> bool:
    """Whether a guidance scale acts: a student distilled to run without is made worse by it."""
    scale = recipe.sampler.guidance_scale
    return recipe.sampler.sigmas is None or scale is None or scale > 1


def recipe_html(recipe: Recipe, defaults: Mapping[str, Any], measured: Mapping[str, Any] | None) -> str:
    """What a recipe costs and gives, as far as it says so itself or a clip was measured.

    Args:
        recipe: which one.
        defaults: the model's, for what the recipe leaves open.
        measured: sidecar of the latest clip made with it; None where there is none.
    """
    attention, sampler, precision = recipe.attention, recipe.sampler, recipe.quantization
    steps = len(sampler.sigmas or ()) or sampler.num_inference_steps or defaults.get("num_inference_steps")
    guidance = defaults.get("guidance_scale") if sampler.guidance_scale is None else sampler.guidance_scale
    chips = [] if steps is None else [f"{steps} steps"]
    chips.append("no guidance" if guidance is not None and guidance <= 1 else "guidance: each step computed twice")
    chips.append(f"attends to {attention.keep_ratio:.0%} of the blocks" if is_sparse(recipe) else "dense attention")
    if attention.branch != "none":
        chips.append(f"{attention.branch} branch")
    if precision.mode != "none":
        chips.append(f"products in {precision.mode.upper()}")
    if measured is None:
        chips.append("not measured here yet")
    else:
        size = measured["size"]
        seconds = f"{measured['stages']['total_seconds']:.1f} s"
        chips.append(f"latest clip here: {seconds} for {size['width']}x{size['height']}, {size['num_frames']} frames")
    words = html.escape(recipe.description or "The model as it is.")
    return f'<div class="vs-card"><p>{words}</p>{_chips(chips)}</div>'


def _chips(texts: Sequence[str]) -> str:
    inner = "".join(f'<span class="vs-chip">{html.escape(text)}</span>' for text in texts)
    return f'<div class="vs-chips">{inner}</div>'


def status_html(snapshot: Snapshot | None, idle: str = "Ready.") -> str:
    """A line and a bar that say where the request stands; for screen readers too."""
    if snapshot is None:
        return _line(idle, None)
    if snapshot.status is Status.queued:
        return _line(f"Waiting: {snapshot.position} before this one.", 0.0)
    if snapshot.status is Status.running:
        left = "" if snapshot.seconds_left is None else f", about {snapshot.seconds_left:.0f} s left"
        text = f"Step {snapshot.step} of {snapshot.steps}{left}"
        return _line(
            text if snapshot.step else "Reading the prompt, first step ...", snapshot.step / (snapshot.steps or 1)
        )
    texts = {Status.done: "Done.", Status.cancelled: "Stopped.", Status.failed: f"Failed: {snapshot.error}"}
    failed = snapshot.status is Status.failed
    return _line(texts[snapshot.status], 1.0 if snapshot.status is Status.done else None, "vs-failed" if failed else "")


def _line(text: str, share: float | None, kind: str = "") -> str:
    words = f'<div class="vs-status {kind}" role="status" aria-live="polite">{html.escape(text)}</div>'
    if share is None:
        return words
    percent = round(100 * share)
    bar = f'<div class="vs-fill" style="width:{percent}%"></div>'
    attributes = (
        f'role="progressbar" aria-label="progress" aria-valuemin="0" aria-valuemax="100" aria-valuenow="{percent}"'
    )
    return f'{words}<div class="vs-bar" {attributes}>{bar}</div>'


def progress_html(text: str, share: float) -> str:
    """A line and a bar at this share, 0 to 1."""
    return _line(text, share)


def look_html(maps: BlockMaps, step: int, layer: int, head: int | None, share: float) -> str:
    """What a picture of a block map shows, in words; step is an index into the recorded ones."""
    where = f"step {maps.steps[step] + 1}, layer {layer}, " + ("mean of all heads" if head is None else f"head {head}")
    what = f"{share:.0%} of the blocks kept" if maps.sparse[step, layer] else "dense here: everything is kept"
    return f'<div class="vs-status" role="status">{where}: <b>{what}</b></div>'


def stage_rows(stages: Mapping[str, Any]) -> list[list[str]]:
    """One row per stage of a sidecar, and the total; columns as in `STAGE_COLUMNS`."""
    total = stages["total_seconds"] or 1.0
    rows = []
    for name, seconds in stages["seconds"].items():
        peaks = stages.get("peak_memory", {}).get(name, {})
        memory = ", ".join(f"{key.split('_')[0]} {size / 2**30:.2f} GiB" for key, size in peaks.items())
        rows.append([name, f"{seconds:.2f}", memory, f"{seconds / total:.0%}"])
    rows.append(["total", f"{stages['total_seconds']:.2f}", "", "100%"])
    return rows


def stages_html(stages: Mapping[str, Any]) -> str:
    """The same as a table, with a bar for each share."""
    head = "".join(f'<th scope="col">{name}</th>' for name in STAGE_COLUMNS)
    body = ""
    for *cells, share in stage_rows(stages):
        bar = (
            ""
            if cells[0] == "total"
            else f'<div class="vs-bar"><div class="vs-fill" style="width:{share}"></div></div>'
        )
        body += "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells)
        body += f'<td class="vs-share">{share}{bar}</td></tr>'
    return (
        f'<div class="vs-stages"><div class="vs-title">Where the time went</div>'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def report_html(sidecar: Mapping[str, Any]) -> str:
    """What really ran: settings, recipe, attention by layer, precision, notes."""
    request, report = sidecar["request"], sidecar.get("report")
    size = sidecar["size"]
    facts = [
        ("prompt", sidecar["prompt"]),
        ("seed", sidecar["seed"]),
        ("size", f"{size['width']}x{size['height']}, {size['num_frames']} frames, {sidecar['fps']:g} per second"),
        ("steps", request["num_inference_steps"]),
        ("guidance", request["guidance_scale"]),
        ("recipe", report["recipe"]["name"] if report else "none: the model as it is"),
    ]
    notes = list(sidecar.get("notes", []))
    if sidecar.get("unknown_words"):
        notes.append(f"words that the model does not know: {', '.join(sidecar['unknown_words'])}")
    parts = ['<div class="vs-title">What ran</div>', _table(None, facts)]
    if report:
        scheduler = report["scheduler"]
        notes = [f"scheduler {scheduler['before']} -> {scheduler['now']}", *report["notes"], *notes]
        columns = ("module", "layer", "backend", "keep_ratio", "actual_sparsity")
        rows = [[_cell(row.get(name)) for name in columns] for row in report["layers"]]
        if rows:
            parts.append(_table(columns, rows))
        for name, precision in report.get("quantization", {}).items():
            mode = precision.get("config", {}).get("mode", "none")
            notes.append(f"{name}: {mode}, {precision.get('num_quantized', 0)} layers quantized")
    if notes:
        parts.append("<ul>" + "".join(f"<li>{html.escape(str(note))}</li>" for note in notes) + "</ul>")
    return f'<div class="vs-report">{"".join(parts)}</div>'


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _table(columns: Sequence[str] | None, rows: Sequence[Sequence[Any]]) -> str:
    head = ""
    if columns:
        head = (
            "<thead><tr>" + "".join(f'<th scope="col">{html.escape(name)}</th>' for name in columns) + "</tr></thead>"
        )
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(value))}</td>" for value in row) + "</tr>" for row in rows
    )  # fmt: skip
    kind = "" if columns else ' class="vs-key"'
    return f"<table{kind}>{head}<tbody>{body}</tbody></table>"


def comparison_html(fast: Mapping[str, Any], teacher: Mapping[str, Any]) -> str:
    """What the two sidecars measured; both ran here, one after the other. Times of steps leave the previews out."""

    def seconds(sidecar: Mapping[str, Any]) -> tuple[float, float]:
        stages = sidecar["stages"]
        return sum(stages["step_seconds"]), stages["total_seconds"]

    (fast_loop, fast_total), (teacher_loop, teacher_total) = seconds(fast), seconds(teacher)
    if not (fast_loop > 0 and fast_total > 0):
        return '<p class="vs-note">The times were too short to compare.</p>'
    numbers = ""
    for what, ours, theirs in (
        ("Denoising", fast_loop, teacher_loop), ("From prompt to file", fast_total, teacher_total)
    ):  # fmt: skip
        numbers += (
            f'<div class="vs-number"><span>{what}</span><b>{theirs / ours:.2f} times as fast</b>'
            f"<span>{ours:.2f} s against {theirs:.2f} s</span></div>"
        )
    note = "One run each, measured on this machine; the first clip of a size is slower."
    return f'<div class="vs-numbers">{numbers}</div><p class="vs-note">{note}</p>'


def gallery_item(clip: Clip) -> tuple[str, str]:
    """Thumbnail and caption."""
    prompt = " ".join(str(clip.sidecar["prompt"]).split())
    return str(clip.thumbnail), prompt if len(prompt) <= 80 else prompt[:77] + "..."


def job_rows(snapshots: Sequence[Snapshot]) -> list[list[str]]:
    """One row per job of a file."""
    return [
        [one.label, one.status.value, f"{one.step}/{one.steps}", one.id, one.error or ""] for one in snapshots
    ]  # fmt: skip


def job_summary(snapshots: Sequence[Snapshot]) -> str:
    """As in "3 of 10 settled: 2 done, 1 failed"."""
    if not snapshots:
        return "No job file runs."
    counts = {status: sum(s.status is status for s in snapshots) for status in Status}
    settled = sum(count for status, count in counts.items() if status.settled)
    parts = ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)
    return f"{settled} of {len(snapshots)} settled: {parts}"
