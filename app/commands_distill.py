"""`videospark distill`: prepare data, train sparse and few-step students, list the settings that come along."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from .console import FAILED, check_writable, dump_json, guarded, parse_size, require_at_least

STEPS_PER_PHASE = 5
"""Of the solver of trajectories, unless --steps says otherwise."""

app = typer.Typer(help="Train sparse and few-step students.", no_args_is_help=True)


@app.command("recipes")
@guarded
def recipes(
    show: str | None = typer.Option(None, "--show", help="Print the file of this name: copy it and change it."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON: name -> settings."),
) -> None:
    """The training settings that come with the package."""
    from ..core.config import ConfigError, to_dict
    from ..distill.run import example_configs, load_config

    known = example_configs()
    if show is not None:
        if show not in known:
            raise ConfigError(f"show: got {show!r}; must be one of {', '.join(known)}")
        typer.echo(known[show].read_text(encoding="utf-8"), nl=False)
        return
    configs = {name: load_config(name) for name in known}
    if as_json:
        typer.echo(dump_json({name: to_dict(config) for name, config in configs.items()}), nl=False)
        return
    width = max(len(name) for name in configs)
    for name, config in configs.items():
        typer.echo(f"{name:<{width}}  {config.method:<13}  {config.description}")


@app.command("prepare")
@guarded
def prepare(
    output: Path = typer.Option(..., "--output", help="Folder for the prepared data; what is there already is kept."),
    model: str = typer.Option("tiny", "--model", help="The teacher: a folder, a Hub id, or 'tiny'."),
    clips: Path | None = typer.Option(None, "--clips", help="Folder of videos, or a CSV/JSONL with path and caption."),
    prompts: Path | None = typer.Option(None, "--prompts", help="Prompt list; the teacher makes the clips."),
    tiny_world: int | None = typer.Option(None, "--tiny-world", help="So many clips of the tiny model's own world."),
    size: str | None = typer.Option(None, "--size", help="WIDTHxHEIGHT in pixels; default: the model's."),
    frames: int | None = typer.Option(None, "--frames", help="Frames per clip; default: the model's."),
    fps: float | None = typer.Option(None, "--fps", help="Frames per second taken from videos; default: the model's."),
    negative_prompt: str = typer.Option("", "--negative-prompt", help="Of the unguided half of the teacher."),
    trajectories: str | None = typer.Option(
        None,
        "--trajectories",
        help="Noise levels where a student's steps start, as in 0.999,0.93,0.63: the teacher makes "
        "the clips, and its states there are stored, for the method ode_regression.",
    ),
    image_share: float = typer.Option(0.0, "--image-share", help="Of the trajectories, that start from a picture."),
    mixed_precision: bool = typer.Option(False, "--mixed-precision", help="Follow trajectories in bfloat16."),
    steps: int | None = typer.Option(None, "--steps", help="Steps of the teacher, where it makes the clips."),
    guidance_scale: float | None = typer.Option(None, "--guidance-scale", help="Of the teacher, likewise."),
    guidance_scale_2: float | None = typer.Option(
        None, "--guidance-scale-2", help="Of the second of two experts; default: the model's, else the same."
    ),
    seed: int | None = typer.Option(None, "--seed", help="Of the teacher's noise, likewise; default: 0."),
    shard_size: int = typer.Option(64, "--shard-size", help="Clips per file."),
    part: str | None = typer.Option(
        None, "--part", help="K/N: every N-th clip from the K-th on; N commands, one folder."
    ),
    device: str | None = typer.Option(None, "--device", help="cpu, cuda, ...; default: the best one."),
) -> None:
    """Encode clips and captions into latents and prompt embeddings. Interrupted, it goes on where it was.

    Exit code 1 where some clips could not be used; bad.jsonl lists them with the reason.
    """
    chosen = [name for name, value in (("clips", clips), ("prompts", prompts), ("tiny-world", tiny_world)) if value]
    if len(chosen) != 1:
        raise ValueError(f"source: got {', '.join(chosen) or 'none'}; must be one of --clips, --prompts, --tiny-world")
    least: tuple[tuple[str, Any, float], ...] = (
        ("frames", frames, 1), ("steps", steps, 1), ("seed", seed, 0), ("shard-size", shard_size, 1),
        ("tiny-world", tiny_world, 1), ("guidance-scale", guidance_scale, 0),
        ("guidance-scale-2", guidance_scale_2, 0),
    )  # fmt: skip
    for name, value, minimum in least:
        require_at_least(name, value, minimum)
    _check_teacher_options(
        prompts is not None,
        trajectories is not None,
        {"steps": steps, "guidance-scale": guidance_scale, "guidance-scale-2": guidance_scale_2, "seed": seed},
        {"image-share": image_share, "mixed-precision": mixed_precision},
    )
    share = (1, 1) if part is None else _parse_part(part)
    sigmas = None if trajectories is None else _parse_sigmas(trajectories)
    for path, name in ((clips, "clips"), (prompts, "prompts")):
        if path is not None and not path.exists():
            raise FileNotFoundError(f"{name}: got {str(path)!r}; no such file or folder")
    check_writable(output / "dataset.json", "output")

    from ..core.devices import default_dtype, pick_device
    from ..distill import prepare as preparation
    from ..distill import sources as source
    from ..distill.data import TeacherSampling
    from ..distill.run import DEFAULT_SEQUENCE_LENGTH, stock_pipeline

    target = pick_device(device)
    pipe = stock_pipeline(model, default_dtype(target))
    pipe.to(target)
    pipe.set_progress_bar_config(disable=True)
    defaults = pipe.videospark_defaults
    if size is not None:
        height, width = parse_size(size)
    else:
        height, width = (_default(defaults, name, "--size") for name in ("height", "width"))
    clip_size = source.ClipSize(
        height=height,
        width=width,
        num_frames=frames or _default(defaults, "num_frames", "--frames"),
        fps=fps or defaults.get("fps"),
    )
    sampling = None
    if prompts is not None or sigmas is not None:
        sampling = TeacherSampling(
            num_inference_steps=steps
            or (STEPS_PER_PHASE * len(sigmas) if sigmas else defaults.get("num_inference_steps", 50)),
            guidance_scale=guidance_scale if guidance_scale is not None else defaults.get("guidance_scale", 5.0),
            guidance_scale_2=guidance_scale_2 if guidance_scale_2 is not None else defaults.get("guidance_scale_2"),
            seed=seed or 0,
            sigmas=sigmas,
            image_share=image_share,
        )
    if clips is not None:
        kind = "clips"
        items = (source.clips_from_folder if clips.is_dir() else source.clips_from_table)(clips, clip_size)
    elif prompts is not None:
        kind = "prompts"
        items = source.prompts_from_file(prompts, clip_size)
    else:
        assert tiny_world is not None
        kind = "tiny-world"
        items = source.clips_from_tiny_world(tiny_world, clip_size)
    report = preparation.prepare(
        pipe,
        items,
        output,
        source=kind,
        model=model,
        size=clip_size,
        max_sequence_length=int(defaults.get("max_sequence_length", DEFAULT_SEQUENCE_LENGTH)),
        negative_prompt=negative_prompt,
        sampling=sampling,
        mixed_precision=mixed_precision,
        shard_size=shard_size,
        part=share,
        progress=_print_progress,
    )
    typer.echo(f"{output}: {report.total} clips, {report.made} of them new")
    if report.bad:
        typer.echo(f"{len(report.bad)} clips could not be used: {output / preparation.BAD_FILE}", err=True)
        raise typer.Exit(FAILED)


def _check_teacher_options(
    prompts: bool, trajectories: bool, of_teacher: dict[str, Any], of_trajectories: dict[str, Any]
) -> None:
    """Refuses options of a teacher that makes no clips."""
    for name, value in of_teacher.items():
        if value is not None and not (prompts or trajectories):
            raise ValueError(f"{name}: got {value}; must be left out, as the teacher makes no clips")
    for name, value in of_trajectories.items():
        if value and not trajectories:
            raise ValueError(f"{name}: got {value}; must be left out without --trajectories")


def _parse_part(text: str) -> tuple[int, int]:
    place, slash, parts = text.partition("/")
    good = bool(slash) and place.isdecimal() and parts.isdecimal() and 1 <= int(place) <= int(parts)
    if not good:
        raise ValueError(f"part: got {text!r}; must be K/N with K from 1 to N, as in 2/8")
    return int(place), int(parts)


def _parse_sigmas(text: str) -> tuple[float, ...]:
    from ..pipelines.scheduling_few_step import check_sigmas

    try:
        sigmas = tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ValueError(f"trajectories: got {text!r}; must be numbers with commas between them") from None
    check_sigmas(sigmas)
    return sigmas


def _default(defaults: dict[str, Any], name: str, option: str) -> int:
    if name not in defaults:
        raise ValueError(f"{name}: got nothing; must be given by {option}, as the model has no default")
    return int(defaults[name])


def _print_progress(done: int, total: int) -> None:
    if done == total or done % max(1, total // 20) == 0:
        typer.echo(f"{done}/{total}", err=True)


@app.command("run")
@guarded
def run(
    config: str = typer.Argument(help="A .toml file, or a name from `videospark distill recipes`."),
    resume: bool = typer.Option(False, "--resume", help="Go on from the newest complete checkpoint."),
    output: str | None = typer.Option(None, "--output", help="Folder of the run, instead of the file's."),
    data: str | None = typer.Option(None, "--data", help="Folder of the prepared data, instead of the file's."),
    device: str | None = typer.Option(None, "--device", help="cpu to stay on the CPU; default: what accelerate finds."),
) -> None:
    """Train a student; at the end OUTPUT/student is a model that `videospark generate --model` takes."""
    if device not in (None, "cpu"):
        raise ValueError(f"device: got {device!r}; must be cpu or left out (`accelerate launch` chooses among GPUs)")

    from ..distill.run import load_config, with_overrides
    from ..distill.run import run as run_training

    settings = with_overrides(load_config(config), output=output, data=data)
    check_writable(Path(settings.folder) / "config.toml", "output")
    result = run_training(settings, resume=resume, device=device)
    if result.student is not None:
        typer.echo(f"{result.training.step} steps ({result.training.reason})", err=True)
        typer.echo(str(result.student))


@app.command("plan")
@guarded
def plan(
    config: str = typer.Argument(help="A .toml file, or a name from `videospark distill recipes`."),
    gpu: str = typer.Option(..., "--gpu", help="rtx4090, h100, ..., or a memory as in 24gb."),
    processes: int = typer.Option(1, "--processes", help="One per GPU."),
    size: str | None = typer.Option(None, "--size", help="WIDTHxHEIGHTxFRAMES; default: that of a published model."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Say what a training takes: memory of a GPU, RAM, seconds of an iteration; nothing is loaded."""
    import dataclasses

    from ..distill.plan import plan_training
    from ..distill.run import load_config
    from ..pipelines.plan import parse_size as parse_clip

    clip = None if size is None else parse_clip(size)
    made = plan_training(load_config(config), gpu=gpu, processes=processes, size=clip)
    if as_json:
        facts = dataclasses.asdict(made) | {"peak_gib": made.peak_gib, "fits": made.fits}
        typer.echo(dump_json(facts), nl=False)
        return
    size_text = f"{made.clip.width}x{made.clip.height}x{made.clip.frames}"
    typer.echo(f"{made.model} at {size_text} ({made.tokens:,} tokens), {made.processes} x {made.card}")
    for part, gib in made.gpu_gib.items():
        typer.echo(f"{part:<12}{gib:>8.1f} GiB")
    verdict = "fits" if made.fits else "does not fit"
    typer.echo(f"{verdict}: {made.peak_gib:.1f} GiB of {made.budget_gib:.1f} GiB usable; {made.ram_gib:.0f} GiB of RAM")
    if made.seconds is not None and made.hours is not None:
        typer.echo(f"about {made.seconds:.1f} s an iteration, {made.hours:.0f} h in all")


@app.command("experiment")
@guarded
def experiment(
    name: str = typer.Argument(help="trap, branch or frontier."),
    output: Path = typer.Option(..., "--output", help="Folder of the experiment; what is there already is kept."),
    model: str = typer.Option("tiny", "--model", help="The teacher: 'tiny', or a folder with a model of its world."),
    seeds: int = typer.Option(3, "--seeds", help="Trainings of every arm."),
    quick: bool = typer.Option(False, "--quick", help="Rehearse: a few iterations; random weights without --model."),
    budget: float = typer.Option(1.0, "--budget", help="So many times the iterations."),
    device: str | None = typer.Option(None, "--device", help="cpu to stay on the CPU; default: what accelerate finds."),
) -> None:
    """Train and measure the arms of an experiment; write report.md with tables and plots. Given again, it goes on."""
    if device not in (None, "cpu"):
        raise ValueError(f"device: got {device!r}; must be cpu or left out")
    require_at_least("seeds", seeds, 1)
    check_writable(output / "report.md", "output")

    from ..distill.experiments import run_experiment

    report = run_experiment(
        name,
        output,
        model=model,
        seeds=seeds,
        quick=quick,
        budget=budget,
        device=device,
        say=lambda text: typer.echo(text, err=True),
    )
    typer.echo(str(report))
