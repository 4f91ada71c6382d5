"""`videospark evaluate`: does the model show what the captions say, and how varied is the rest?"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer

from .console import check_writable, dump_json, quiet_loading, require_at_least, write_text
from .model_folder import locate_model

SPEED_ROUNDS = 3
NUM_CAPTIONS = 64


def evaluate(
    recipe: str | None = typer.Option(None, "--recipe", help="Preset name or recipe file; default: the model's own."),
    model: str | None = typer.Option(None, "--model", help="Model folder; default: the embedded tiny model."),
    captions: int | None = typer.Option(
        None, "--captions", help="Held-out captions for the accuracy, 64 by default; with --prompts, its first lines."
    ),
    seeds: int = typer.Option(8, "--seeds", help="Clips per caption for the diversity."),
    diversity_captions: int = typer.Option(8, "--diversity-captions", help="Captions for the diversity; 0: skip it."),
    prompts: Path | None = typer.Option(
        None, "--prompts", help="File with a prompt a line, for any model: no accuracy, everything else."
    ),
    feature: str | None = typer.Option(
        None, "--feature", help="Folder or Hub id of a CLIP or DINO model that looks at the clips."
    ),
    image_to_video: bool = typer.Option(
        False, "--image-to-video", help="Start from each scene's true first frame: is it kept, is the motion right?"
    ),
    against: str | None = typer.Option(None, "--against", help="Recipe of the teacher to compare with, or 'dense'."),
    against_model: str | None = typer.Option(None, "--against-model", help="The teacher's folder; default: --model."),
    against_steps: int | None = typer.Option(None, "--against-steps", help="The teacher's steps; default: --steps."),
    against_guidance: float | None = typer.Option(None, "--against-guidance", help="Its guidance; default: its own."),
    steps: int | None = typer.Option(None, "--steps", help="Denoising steps; default: the recipe's or the model's."),
    guidance: float | None = typer.Option(None, "--guidance", help="Guidance scale; default: the recipe's or model's."),
    batch_size: int = typer.Option(8, "--batch-size", help="Clips denoised together."),
    device: str | None = typer.Option(None, "--device", help="cpu, cuda, ...; default: the best one."),
    allow_untrained: bool = typer.Option(
        False, "--allow-untrained", help="Run recipes that need training on weights that do not declare it."
    ),
    json_file: Path | None = typer.Option(None, "--json", help="Write all numbers to this file."),
    markdown: Path | None = typer.Option(None, "--markdown", help="Write the tables to this file."),
    sheet: Path | None = typer.Option(None, "--sheet", help="Write a picture of the first clips to this PNG."),
) -> None:
    """Measure caption accuracy and diversity of the tiny model, or with --prompts what can be said of any model; with
    --against, relative to a teacher."""
    for name, value, least in (
        ("captions", captions, 1), ("seeds", seeds, 1), ("diversity_captions", diversity_captions, 0),
        ("steps", steps, 1), ("against_steps", against_steps, 1), ("guidance", guidance, 0),
        ("against_guidance", against_guidance, 0), ("batch_size", batch_size, 1),
    ):  # fmt: skip
        require_at_least(name, value, least)
    for name, path in (("json", json_file), ("markdown", markdown), ("sheet", sheet)):
        if path is not None:
            check_writable(path, name)
    if image_to_video and (prompts is not None or feature is not None):
        raise ValueError("image_to_video: got true; must be false with --prompts and --feature")
    texts_given = None if prompts is None else read_prompts(prompts)
    lonely: dict[str, object] = {
        "against_model": against_model,
        "against_steps": against_steps,
        "against_guidance": against_guidance,
    }
    for name, given in lonely.items():
        if against is None and given is not None:
            raise ValueError(f"{name}: got {given!r} without --against; must come with the teacher's recipe")

    from ..core.devices import pick_device
    from ..pipelines.recipe import resolve

    shared = {
        "batch_size": batch_size, "device": pick_device(device), "image_to_video": image_to_video,
        "allow_untrained": allow_untrained,
    }  # fmt: skip
    counts: dict[str, Any] = {"batch_size": batch_size}
    if texts_given is not None:
        if captions is not None and captions > len(texts_given):
            raise ValueError(f"captions: got {captions}; must be at most {len(texts_given)}, the prompts of {prompts}")
        texts_given = texts_given[:captions]  # all of them where no number is asked for
        counts |= {"prompts": texts_given, "diversity_prompts": min(diversity_captions, len(texts_given))}
    else:
        captions = NUM_CAPTIONS if captions is None else captions
        counts["num_captions"] = captions
        if not image_to_video:
            counts["diversity_captions"] = min(diversity_captions, captions)
    if not image_to_video:
        counts["diversity_seeds"] = seeds
    if feature is not None:
        from ..evaluation.distribution import ImageModelFeature

        counts["feature"] = ImageModelFeature(feature, device=pick_device(device))
    wish = resolve(recipe) if recipe is not None else None
    ours = _Candidate("ours", locate_model(model), wish, steps, guidance)
    teacher = None
    if against is not None:
        teacher = _Candidate(
            "teacher", locate_model(against_model or model), resolve(against), against_steps or steps, against_guidance
        )
    ours.prepare(shared)
    if teacher is not None:
        teacher.prepare(shared)

    if teacher is not None:
        teacher.crossover = ours.crossover = ours.first_inner_knot()
    texts = [ours.measure(counts)]
    report: dict[str, Any] = ours.report()
    if teacher is not None:
        from ..evaluation.run import compare

        texts.append(f"\n## Teacher: {against}\n\n{teacher.measure(counts)}")
        report["teacher"] = teacher.report()
        report |= compare(ours.result, teacher.result)
        report["denoise_speedup"] = denoise_speedup(ours.maker, teacher.maker)
        if report["distribution_to_teacher"]:
            texts.append("\n" + _distances(report["distribution_to_teacher"]))
        names = ("accuracy_over_teacher", "entropy_over_teacher", "denoise_speedup")
        texts.append("\n" + "\n".join(f"{name:<24}{_number(report[name])}" for name in names) + "\n")
    typer.echo("\n".join(texts))
    if json_file is not None:
        write_text(json_file, dump_json(report))
        typer.echo(str(json_file))
    if markdown is not None:
        write_text(markdown, "\n".join(texts))
        typer.echo(str(markdown))
    if sheet is not None:
        write_sheet(ours.maker.first_clips, sheet)
        typer.echo(str(sheet))


def read_prompts(path: Path) -> list[str]:
    """The lines of a file that are not empty.

    Raises:
        ValueError: no such file, or nothing in it.
    """
    if not path.is_file():
        raise ValueError(f"prompts: got {str(path)!r}; must be a file with a prompt a line")
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    found = [line for line in lines if line]
    if not found:
        raise ValueError(f"prompts: got {str(path)!r} without a prompt; must have one a line")
    return found


class _Candidate:
    """One model with its recipe: loaded, asked for clips, judged."""

    def __init__(self, name: str, model: str, recipe: Any, steps: int | None, guidance: float | None) -> None:
        self.name, self.model, self.recipe, self.steps, self.guidance = name, model, recipe, steps, guidance
        self.maker: Any = None
        self.result: Any = None
        self.crossover: float | None = None

    def prepare(self, shared: dict[str, Any]) -> None:
        """Load it; every setting is checked here, before a clip is made."""
        from ..pipelines import loading
        from .clip_maker import ClipMaker

        typer.echo(f"{self.name}: loading {self.model} on {shared['device']}", err=True)
        quiet_loading(self.model)
        pipe = loading.load(
            self.model,
            device=shared["device"],
            recipe=self.recipe,
            image_to_video=shared["image_to_video"],
            allow_untrained=shared["allow_untrained"],
        )
        pipe.set_progress_bar_config(disable=True)
        self.maker = ClipMaker(pipe, _settings(pipe, self.steps, self.guidance), batch_size=shared["batch_size"])

    def first_inner_knot(self) -> float | None:
        """Noise level at the end of a few-step student's first step; None for others."""
        from ..pipelines.scheduling_few_step import FewStepScheduler

        scheduler = self.maker.pipe.scheduler
        sigmas = scheduler.config.sigmas if isinstance(scheduler, FewStepScheduler) else None
        return float(sigmas[1]) if sigmas is not None and len(sigmas) > 1 else None

    def measure(self, counts: dict[str, Any]) -> str:
        """Make its clips and judge them; returns the tables."""
        from ..evaluation.distribution import SampleStates
        from ..evaluation.run import evaluate as evaluate_text_to_video
        from ..evaluation.run import evaluate_image_to_video, evaluate_prompts

        self.maker.warm_up()
        settings = self.maker.settings
        with _clip_progress(self.name) as progress:
            if self.maker.image_to_video:
                size = (settings["height"], settings["width"])
                self.result = evaluate_image_to_video(self.maker, size=size, progress=progress, **counts)
            else:
                self.maker.states = SampleStates(self.crossover)
                measure: Any = evaluate_prompts if "prompts" in counts else evaluate_text_to_video
                self.result = measure(self.maker, progress=progress, states=self.maker.states, **counts)
        return self.result.markdown()

    def report(self) -> dict[str, Any]:
        """Everything about it as plain data."""
        name = None if self.recipe is None else self.recipe.name
        plain = {"model": self.model, "recipe": name, "settings": self.maker.settings}
        return {**plain, **self.result.to_dict(), "seconds": self.maker.seconds.to_dict()}


def denoise_speedup(ours: Any, teacher: Any) -> float:
    """The teacher's denoising seconds per clip over ours: medians of a few batches, taken in turns."""
    seconds: dict[str, list[float]] = {"ours": [], "teacher": []}
    for _ in range(SPEED_ROUNDS):
        for name, maker in (("ours", ours), ("teacher", teacher)):
            maker.warm_up(keep_seconds=True)
            seconds[name].append(maker.seconds.denoise_per_clip.pop())
    return statistics.median(seconds["teacher"]) / statistics.median(seconds["ours"])


def _distances(measures: dict[str, dict[str, Any]]) -> str:
    """The distances to the teacher as a table."""
    from ..evaluation.report import Table

    table = Table("Distance to the teacher", ("measure", "value", "low", "high", "count"))
    for name, found in measures.items():
        table.add(name, found["value"], found["low"], found["high"], found["count"])
    return table.markdown() + "\n"


def _number(value: float | None) -> str:
    return "not measured" if value is None else f"{value:.3f}"


def write_sheet(clips: list[Any], path: Path, columns: int = 4) -> None:
    """One row per clip (uint8 `[F, H, W, 3]`): evenly spaced frames from its first to its last."""
    import numpy as np

    from ..pipelines.video_io import contact_sheet

    rows = [clip[np.linspace(0, len(clip) - 1, columns).round().astype(int)] for clip in clips]
    path.parent.mkdir(parents=True, exist_ok=True)
    contact_sheet(np.concatenate(rows), path, max_frames=columns * len(rows), columns=columns)


def _settings(pipe: Any, steps: int | None, guidance: float | None) -> dict[str, Any]:
    """Everything a call of the pipeline needs besides prompts and seeds: ours, the recipe's, the model's."""
    from ..pipelines.generation import GenerationRequest, resolve_request

    wish = GenerationRequest("a circle", seed=0, num_inference_steps=steps, guidance_scale=guidance)
    resolved = resolve_request(pipe, wish)
    names = ("height", "width", "num_frames", "num_inference_steps", "guidance_scale")
    length = (pipe.videospark_defaults or {}).get("max_sequence_length", 512)
    return {name: getattr(resolved, name) for name in names} | {"max_sequence_length": length}


@contextmanager
def _clip_progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar of finished clips on stderr, with the time that is left."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("clips"), TimeElapsedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(name, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
