"""`videospark batch`: a file of jobs into a folder, resumed by running the same command again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import typer

from .console import dump_json, parse_size, require_at_least
from .model_folder import locate_model

SOME_FAILED = 3
"""Exit code of a batch that ran to its end and in which jobs failed."""


def batch(
    jobs: Path = typer.Argument(help="A .jsonl, .csv or .txt file; see docs/batch.md for the keys."),
    output: Path = typer.Option(..., "--output", "-o", help="Folder for clips and manifest; run again to resume."),
    recipe: str | None = typer.Option(None, "--recipe", help="For jobs that name none; default: the model's own."),
    size: str | None = typer.Option(None, "--size", help="WIDTHxHEIGHT for jobs that name none."),
    frames: int | None = typer.Option(None, "--frames", help="Frames for jobs that name none."),
    steps: int | None = typer.Option(None, "--steps", help="Denoising steps for jobs that name none."),
    guidance: float | None = typer.Option(None, "--guidance", help="Guidance scale for jobs that name none."),
    fps: float | None = typer.Option(None, "--fps", help="Frames per second for jobs that name none."),
    seed: int = typer.Option(0, "--seed", help="First seed of jobs that name none."),
    seeds: int = typer.Option(1, "--seeds", help="Clips of each job that names no seed."),
    model: str | None = typer.Option(None, "--model", help="Folder or hub id; default: the embedded tiny model."),
    device: str | None = typer.Option(None, "--device", help="cpu, cuda, cuda:1, ...; default: the best one."),
    offload: str = typer.Option(
        "none", "--offload", help="none, experts, model, group, or auto: the first that fits the largest job."
    ),
    limit: int | None = typer.Option(None, "--limit", help="Make at most this many clips now."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Check everything, say what would be made, and stop."),
    ray: str | None = typer.Option(None, "--ray", help="auto, or the address of a Ray cluster: one worker per GPU."),
    workers: int | None = typer.Option(None, "--workers", help="Workers with --ray; default: as many as fit."),
    copy_to: str | None = typer.Option(None, "--copy-to", help="URL to copy the clips to, such as s3://bucket/night."),
    as_json: bool = typer.Option(False, "--json", help="Print the summary as JSON on stdout."),
) -> None:
    """Make all clips of a job file. Exit code 3: some jobs failed or were not copied, the others are made."""
    _check_options(output, seed, seeds, limit, ray, workers)
    _check_offload(offload)
    defaults = {
        "recipe": recipe, "size": size, "frames": frames, "steps": steps, "guidance": guidance, "fps": fps, "seed": seed
    }  # fmt: skip
    if size is not None:
        parse_size(size)
    plan = _plan(jobs, output, {key: value for key, value in defaults.items() if value is not None}, seeds, model)
    if dry_run:
        report = _dry_report(plan)
        typer.echo(dump_json(report) if as_json else _render_dry(report), nl=not as_json)
        return
    summary, not_copied = _run(plan, device, offload, limit, ray, workers, copy_to)
    report = {**summary.to_dict(), "jobs": len(plan.jobs), "manifest": str(output / "manifest.jsonl")}
    if copy_to is not None:
        report |= {"copied_to": copy_to, "not_copied": not_copied}
    typer.echo(dump_json(report) if as_json else _render(report), nl=not as_json)
    if summary.failed or not_copied:
        raise typer.Exit(SOME_FAILED)


class _Plan:
    """A batch that was checked and not begun."""

    def __init__(self, jobs: Sequence[Any], folder: Any, model: str) -> None:
        self.jobs, self.folder, self.model = jobs, folder, model


def _check_options(
    output: Path, seed: int, seeds: int, limit: int | None, ray: str | None, workers: int | None
) -> None:
    for name, value, least in (("seed", seed, 0), ("seeds", seeds, 1), ("limit", limit, 1), ("workers", workers, 1)):
        require_at_least(name, value, least)
    if workers is not None and ray is None:
        raise ValueError(f"workers: got {workers!r} without --ray; must come with it")
    if output.exists() and not output.is_dir():
        raise NotADirectoryError(f"output: got {str(output)!r}; must be a folder, and this is a file")


def _check_offload(offload: str) -> None:
    from ..core.config import require
    from ..pipelines.offload import MODES

    require(offload in MODES, "offload", offload, f"one of {', '.join(MODES)}")


def _plan(jobs_file: Path, output: Path, defaults: dict[str, Any], seeds: int, model: str | None) -> _Plan:
    """Everything that can be known before a weight is read; problems of the file are printed line by line."""
    from ..pipelines.recipe import resolve
    from .batch_folder import BatchFolder, settings_hash
    from .engine import model_fingerprint, planned_pipeline, resolve_for
    from .jobs import JobFileError, check_jobs, read_jobs

    located = locate_model(model)
    if "recipe" in defaults:
        resolve(defaults["recipe"])
    try:
        found = read_jobs(jobs_file, defaults=defaults, num_seeds=seeds)
        planned, own = planned_pipeline(located)
        known = {name: resolve(name) for name in _recipe_names(found, resolve)}
        checked = check_jobs(
            found,
            lambda job: resolve_for(
                planned, job.request, own if job.recipe is None else known.get(job.recipe) or resolve(job.recipe)
            ),
            str(jobs_file),
        )
    except JobFileError as error:
        for line in error.lines()[:50]:
            typer.echo(line, err=True)
        raise ValueError(f"jobs: {len(error.problems)} problems in {error.name}; nothing was made") from None
    fingerprint = model_fingerprint(located)
    settings = {job.id: settings_hash(job, fingerprint, own) for job in checked}
    return _Plan(checked, BatchFolder(output, settings, {"model": located}), located)


def _recipe_names(jobs: Sequence[Any], resolve: Any) -> list[str]:
    """Recipes of the jobs that resolve: each is read once, and a wrong one is told with its line later."""
    names = []
    for name in dict.fromkeys(job.recipe for job in jobs if job.recipe is not None):
        try:
            resolve(name)
        except (ValueError, FileNotFoundError):
            continue
        names.append(name)
    return names


def _run(
    plan: _Plan, device: str | None, offload: str, limit: int | None, ray: str | None, workers: int | None,
    copy_to: str | None,
) -> tuple[Any, dict[str, str]]:  # fmt: skip
    """The summary, and what could not be copied, with the reasons."""
    from .remote_copy import CopyingObserver, RemoteCopy

    remote = None if copy_to is None else RemoteCopy(copy_to)
    if remote is not None:
        remote.check()
    with Reporter() as reporter:
        copying = None if remote is None else CopyingObserver(reporter, remote, plan.folder)
        observer = copying or reporter
        if ray is not None:
            from .engine import loaded_engine
            from .ray_batch import run_on_ray

            make = None if offload == "none" else partial(loaded_engine, offload=offload, size=_largest(plan.jobs))
            summary = run_on_ray(
                plan.jobs, plan.folder, plan.model, ray, observer, workers=workers, limit=limit, make_runner=make
            )
        else:
            summary = _run_here(plan, device, offload, limit, observer)
        return summary, {} if copying is None else copying.finish(plan.jobs)


def _largest(jobs: Sequence[Any]) -> tuple[int, int, int]:
    """Width, height and frames of the job with the most pixels."""
    sizes = [(job.request.width, job.request.height, job.request.num_frames) for job in jobs]
    return max(sizes, key=math.prod)


def _run_here(plan: _Plan, device: str | None, offload: str, limit: int | None, observer: Any) -> Any:
    from ..core.devices import pick_device
    from .batch import run_batch
    from .engine import Engine

    chosen = pick_device(device)

    def load() -> Engine:
        typer.echo(f"loading {plan.model} on {chosen}", err=True)
        engine = Engine(plan.model, chosen, None, offload, _largest(plan.jobs))
        engine.load()
        seconds = getattr(engine, "load_seconds", None)
        if seconds is not None:
            typer.echo(f"loaded in {duration(seconds)}", err=True)
        return engine

    return run_batch(plan.jobs, plan.folder, load, observer, limit=limit)


class Reporter:
    """An observer that writes one line per job to stderr and, on a terminal, shows the steps of the present one."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            console=self._console, disable=not self._console.is_terminal, transient=True,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=None, visible=False)
        self._total = self._settled = 0
        self._is_waiting = False

    def __enter__(self) -> Reporter:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def states(self, states: Mapping[str, str]) -> None:
        """Say how many jobs there are, and why they have to be made."""
        self._total = len(states)
        self._settled = sum(state == "done" for state in states.values())
        self._say(f"{self._total} jobs: {count_states(states)}")

    def begins(self, job: Any) -> None:
        """Show the job's bar."""
        self._progress.update(self._task, description=job.id, completed=0, total=None, visible=True)

    def step(self, job: Any, index: int, steps: int, seconds: float) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=index + 1, total=steps)

    def ended(self, job: Any, record: Mapping[str, Any], seconds_left: float | None) -> None:
        """Say what became of the job, and how long the rest takes."""
        self._settled += 1
        what = f"{record['seconds']:.1f} s" if record["status"] == "done" else f"FAILED: {record['error']}"
        left = f", {duration(seconds_left)} left" if seconds_left else ""
        self._say(f"[{self._settled}/{self._total}] {job.id}: {what}{left}")

    def waiting(self, jobs: Sequence[Any]) -> None:
        """Say it once."""
        if not self._is_waiting:
            self._say(f"waiting for {len(jobs)} jobs that other processes work on")
        self._is_waiting = True

    def _say(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)


def count_states(states: Mapping[str, str]) -> str:
    """As in "3 done, 2 missing, 1 changed"."""
    names = ("done", "missing", "broken", "changed", "failed")
    values = list(states.values())
    return ", ".join(f"{values.count(name)} {name}" for name in names if name in values)


def duration(seconds: float) -> str:
    """Rounded for people: seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _dry_report(plan: _Plan) -> dict[str, Any]:
    from .estimate import Estimator
    from .jobs import grouped

    records = plan.folder.records()
    states = {job.id: plan.folder.state(job, records.get(job.id)) for job in plan.jobs}
    to_make = [job for job in grouped(plan.jobs) if states[job.id] != "done"]
    estimator = Estimator(records.values())
    shapes: dict[tuple[Any, ...], list[Any]] = {}
    for job in to_make:
        shapes.setdefault(job.shape, []).append(job)
    rows = [
        {
            "jobs": len(jobs), "recipe": jobs[0].recipe, "image": jobs[0].request.image is not None,
            "width": jobs[0].request.width, "height": jobs[0].request.height, "frames": jobs[0].request.num_frames,
            "steps": jobs[0].request.num_inference_steps, "guidance": jobs[0].shape[-1],
            "seconds": estimator.seconds(jobs), "measured": estimator.measured(jobs[0]),
        }
        for jobs in shapes.values()
    ]  # fmt: skip
    names = dict.fromkeys(states.values())
    return {
        "jobs": len(plan.jobs),
        "states": {name: list(states.values()).count(name) for name in names},
        "to_make": [job.id for job in to_make],
        "shapes": rows,
        "seconds": estimator.seconds(to_make),
        "model": plan.model,
    }


def _render_dry(report: dict[str, Any]) -> str:
    lines = [f"{report['jobs']} jobs: " + ", ".join(f"{count} {name}" for name, count in report["states"].items())]
    for row in report["shapes"]:
        time = "not measured" if row["seconds"] is None else f"about {duration(row['seconds'])}"
        if row["seconds"] is not None and not row["measured"]:
            time += " (in proportion to other shapes)"
        details = f"{row['width']}x{row['height']}, {row['frames']} frames, {row['steps']} steps"
        details += (", guidance" if row["guidance"] else "") + (", first frame given" if row["image"] else "")
        lines.append(f"{row['jobs']:>6} x {details}, recipe {row['recipe'] or 'of the model'}: {time}")
    if not report["to_make"]:
        lines.append("nothing to make")
    elif report["seconds"] is None:
        lines.append("time: not known, as no clip of this folder was measured; --limit 1 makes one")
    else:
        lines.append(f"time: about {duration(report['seconds'])} on the machine that made the clips there are")
    return "\n".join(lines)


def _render(report: dict[str, Any]) -> str:
    counts = ", ".join(f"{report[name]} {name}" for name in ("made", "kept", "elsewhere", "left", "failed"))
    failed = [f"failed: {name}: {reason}" for name, reason in report["errors"].items()]
    copies = [f"not copied: {name}: {reason}" for name, reason in report.get("not_copied", {}).items()]
    return "\n".join([f"{report['jobs']} jobs: {counts}", *failed, *copies, report["manifest"]])
