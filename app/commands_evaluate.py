"""`videospark evaluate`: does the model show what the captions say, and how varied is the rest?"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from .console import check_writable, dump_json, require_at_least, write_text
from .model_folder import locate_model


def evaluate(
    recipe: str | None = typer.Option(None, "--recipe", help="Preset name or recipe file; default: the model's own."),
    model: str | None = typer.Option(None, "--model", help="Model folder; default: the embedded tiny model."),
    captions: int = typer.Option(64, "--captions", help="Held-out captions for the accuracy."),
    seeds: int = typer.Option(8, "--seeds", help="Clips per caption for the diversity."),
    diversity_captions: int = typer.Option(8, "--diversity-captions", help="Captions for the diversity; 0: skip it."),
    against: str | None = typer.Option(None, "--against", help="Recipe of the teacher to compare with."),
    against_model: str | None = typer.Option(None, "--against-model", help="The teacher's folder; default: --model."),
    against_steps: int | None = typer.Option(None, "--against-steps", help="The teacher's steps; default: --steps."),
    steps: int | None = typer.Option(None, "--steps", help="Denoising steps; default: the recipe's or the model's."),
    guidance: float | None = typer.Option(None, "--guidance", help="Guidance scale."),
    batch_size: int = typer.Option(8, "--batch-size", help="Clips denoised together."),
    device: str | None = typer.Option(None, "--device", help="cpu, cuda, ...; default: the best one."),
    json_file: Path | None = typer.Option(None, "--json", help="Write all numbers to this file."),
    sheet: Path | None = typer.Option(None, "--sheet", help="Write a picture of the first clips to this PNG."),
) -> None:
    """Measure caption accuracy and diversity of the tiny model; with --against, relative to a teacher."""
    for name, value, least in (
        ("captions", captions, 1), ("seeds", seeds, 1), ("diversity_captions", diversity_captions, 0),
        ("steps", steps, 1), ("against_steps", against_steps, 1), ("guidance", guidance, 0),
        ("batch_size", batch_size, 1),
    ):  # fmt: skip
        require_at_least(name, value, least)
    for name, path in (("json", json_file), ("sheet", sheet)):
        if path is not None:
            check_writable(path, name)
    if against is None and against_model is not None:
        raise ValueError(f"against_model: got {against_model!r} without --against; must come with the teacher's recipe")

    from ..pipelines.recipe import resolve

    ours = (locate_model(model), resolve(recipe) if recipe is not None else None)
    teacher = None if against is None else (locate_model(against_model or model), resolve(against))

    from ..core.devices import pick_device

    diversity = min(diversity_captions, captions)  # they are the first of the captions
    options = {
        "evaluation": {
            "num_captions": captions,
            "diversity_captions": diversity,
            "diversity_seeds": seeds,
            "batch_size": batch_size,
        },
        "guidance": guidance,
        "batch_size": batch_size,
        "device": pick_device(device),
    }
    result, seconds = _measure("ours", *ours, steps, options, sheet)
    report: dict[str, Any] = {"model": ours[0], "recipe": recipe, **_plain(result), "seconds": seconds}
    typer.echo(result.markdown())
    if teacher is not None:
        teacher_result, teacher_seconds = _measure("teacher", *teacher, against_steps or steps, options, None)
        typer.echo(f"\nteacher ({against})\n\n{teacher_result.markdown()}")
        report["teacher"] = {
            "model": teacher[0], "recipe": against, **_plain(teacher_result), "seconds": teacher_seconds
        }  # fmt: skip
        report |= compare(report, report["teacher"])
        for name in ("accuracy_over_teacher", "entropy_over_teacher", "denoise_speedup"):
            typer.echo(f"{name:<24}{_number(report[name])}")
    if json_file is not None:
        write_text(json_file, dump_json(report))
        typer.echo(str(json_file))
    if sheet is not None:
        typer.echo(str(sheet))


def compare(ours: dict[str, Any], teacher: dict[str, Any]) -> dict[str, float | None]:
    """Ours relative to the teacher; None where the teacher's value is zero or was not measured.

    `denoise_speedup` is the teacher's denoising seconds per clip divided by ours: both were measured in this run.
    """

    def ratio(numerator: float | None, denominator: float | None) -> float | None:
        return numerator / denominator if numerator is not None and denominator else None

    entropies = [
        [value for value in report["entropy"].values() if value is not None] for report in (ours, teacher)
    ]  # fmt: skip
    means = [sum(values) / len(values) if values else None for values in entropies]
    return {
        "accuracy_over_teacher": ratio(ours["accuracy"], teacher["accuracy"]),
        "entropy_over_teacher": ratio(*means),
        "denoise_speedup": ratio(
            teacher["seconds"]["denoise_seconds_per_clip"], ours["seconds"]["denoise_seconds_per_clip"]
        ),
    }


def _plain(result: Any) -> dict[str, Any]:
    """The result's data, with `accuracy` as one number (share of all captioned attributes) beside the detail.

    An attribute that an evaluation calls `all` or `overall` repeats the others and is left out of the mean.
    """
    data = dict(result.to_dict())
    detail = data.pop("accuracy")
    rows = [row for name, row in detail.items() if name not in ("all", "overall")]
    count = sum(row["count"] for row in rows)
    accuracy = sum(row["value"] * row["count"] for row in rows if row["count"]) / count if count else None
    return {**data, "accuracy": accuracy, "accuracy_per_attribute": detail, "entropy": data.pop("entropy_ratio")}


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def _measure(
    name: str, model: str, recipe: Any, steps: int | None, options: dict[str, Any], sheet: Path | None
) -> tuple[Any, dict[str, float | int]]:
    """Load one pipeline, make its clips, judge them; the first clips become the sheet."""
    from ..evaluation.run import evaluate as run_evaluation
    from ..pipelines import loading
    from .clip_maker import ClipMaker

    typer.echo(f"{name}: loading {model} on {options['device']}", err=True)
    pipe = loading.load(model, device=options["device"], recipe=recipe)
    pipe.set_progress_bar_config(disable=True)
    with _clip_progress(name) as on_clips:
        maker = ClipMaker(pipe, _settings(pipe, steps, options), batch_size=options["batch_size"], on_clips=on_clips)
        maker.warm_up()
        result = run_evaluation(maker, **options["evaluation"])
    if sheet is not None:
        write_sheet(maker.first_clips, sheet)
    return result, maker.seconds.to_dict()


def write_sheet(clips: list[Any], path: Path, columns: int = 4) -> None:
    """One row per clip (uint8 `[F, H, W, 3]`): evenly spaced frames from its first to its last."""
    import numpy as np

    from ..pipelines.video_io import contact_sheet

    rows = [clip[np.linspace(0, len(clip) - 1, columns).round().astype(int)] for clip in clips]
    path.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(np.concatenate(rows), path, max_frames=columns * len(rows), columns=columns)


def _settings(pipe: Any, steps: int | None, options: dict[str, Any]) -> dict[str, Any]:
    """Everything a call of the pipeline needs besides prompts and seeds: ours, the recipe's, the model's."""
    from ..pipelines.generation import GenerationRequest, resolve_request

    wish = GenerationRequest("a circle", seed=0, num_inference_steps=steps, guidance_scale=options["guidance"])
    resolved = resolve_request(pipe, wish)
    names = ("height", "width", "num_frames", "num_inference_steps", "guidance_scale")
    length = (pipe.videospark_defaults or {}).get("max_sequence_length", 512)
    return {name: getattr(resolved, name) for name in names} | {"max_sequence_length": length}


@contextmanager
def _clip_progress(name: str) -> Iterator[Callable[[int], None]]:
    """A running count of finished clips on stderr."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}: {task.completed} clips"), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(name, total=None)
        yield lambda count: progress.advance(task, count)
