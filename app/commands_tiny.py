"""`videospark tiny`: the embedded model, its world of moving shapes, and its training."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import Any

import typer

from .console import check_writable, dump_json, guarded, require_at_least, write_text

app = typer.Typer(help="The embedded tiny model: describe it, draw from its world, train it.", no_args_is_help=True)


class Stage(str, enum.Enum):
    """Stages of the training, in order; each needs the ones before it."""

    all = "all"
    vae = "vae"
    stills = "stills"
    motion = "motion"
    teacher = "teacher"
    grid = "grid"
    export = "export"


def count_parameters(folder: Path) -> dict[str, int]:
    """Parameters per part of a diffusers folder, from the safetensors headers alone: no tensor is read.

    Raises:
        ValueError: a file is no safetensors file.
    """
    counts: dict[str, int] = {}
    for file in sorted(folder.glob("*/*.safetensors")):
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= file.stat().st_size:
                raise ValueError(f"{file}: not a safetensors file (its header claims {length} bytes)")
            header = json.loads(stream.read(length))
        total = 0
        for name, tensor in header.items():
            if name == "__metadata__":
                continue
            size = 1
            for extent in tensor["shape"]:
                size *= extent
            total += size
        counts[file.parent.name] = counts.get(file.parent.name, 0) + total
    return counts


@app.command("info")
@guarded
def info(
    model: Path | None = typer.Option(None, "--model", help="A model folder; default: the embedded one."),
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Where the embedded model is, its parts and defaults, and the words that its captions use."""
    from ..tiny import checkpoint_path
    from ..tiny.dataset import ATTRIBUTES, vocabulary

    folder = model or Path(checkpoint_path())
    if not (folder / "model_index.json").is_file():
        raise FileNotFoundError(
            f"model: got {str(folder)!r}; must be a folder with model_index.json "
            "(`videospark tiny train` makes the embedded one)"
        )
    defaults_file = folder / "videospark_defaults.json"
    report: dict[str, Any] = {
        "path": str(folder),
        "megabytes": round(sum(f.stat().st_size for f in folder.rglob("*") if f.is_file()) / 1e6, 2),
        "parameters": count_parameters(folder),
        "defaults": json.loads(defaults_file.read_text(encoding="utf-8")) if defaults_file.is_file() else {},
        "attributes": {name: list(values) for name, values in ATTRIBUTES.items()},
        "vocabulary": vocabulary(),
    }
    if as_json:
        typer.echo(dump_json(report), nl=False)
        return
    typer.echo(f"{report['path']} ({report['megabytes']} MB)")
    for part, count in report["parameters"].items():
        typer.echo(f"  {part:<16}{count / 1e6:8.2f} M parameters")
    if report["defaults"]:
        typer.echo("defaults: " + ", ".join(f"{key} {value}" for key, value in report["defaults"].items()))
    for name, values in report["attributes"].items():
        typer.echo(f"{name:<12}{', '.join(values)}")
    typer.echo('captions read like: "a large red circle moving left on a striped gray background"')


@app.command("sample")
@guarded
def sample(
    output: Path = typer.Option(Path("outputs/tiny"), "--output", help="Folder for the clips."),
    seed: int = typer.Option(0, "--seed", help="First seed; each clip takes the next."),
    count: int = typer.Option(4, "--count", help="Number of clips."),
    size: str = typer.Option("96x96", "--size", help="WIDTHxHEIGHT in pixels."),
    frames: int = typer.Option(17, "--frames", help="Frames per clip."),
    fps: int = typer.Option(8, "--fps", help="Frames per second."),
    held_out: bool = typer.Option(False, "--held-out", help="Draw from the combinations never trained on."),
) -> None:
    """Draw clips of the world that the tiny model learns: mp4, contact sheet, and captions.json."""
    from .console import parse_size

    height, width = parse_size(size)
    for name, value, least in (
        ("seed", seed, 0), ("count", count, 1), ("frames", frames, 1), ("fps", fps, 1),
        ("size height", height, 16), ("size width", width, 16),
    ):  # fmt: skip
        require_at_least(name, value, least)
    check_writable(output / "captions.json", "output")

    from ..pipelines.video_io import contact_sheet, save_video
    from ..tiny.dataset import caption, render, sample_scene

    output.mkdir(parents=True, exist_ok=True)
    captions = {}
    for clip_seed in range(seed, seed + count):
        scene = sample_scene(clip_seed, held_out=held_out)
        pixels = render(scene, num_frames=frames, height=height, width=width).numpy()
        video = output / f"{clip_seed:06d}.mp4"
        save_video(pixels, video, fps)
        contact_sheet(pixels, video.with_suffix(".png"))
        captions[video.name] = caption(scene, clip_seed).text
        typer.echo(f"{video}  {captions[video.name]}")
    write_text(output / "captions.json", dump_json(captions))
    typer.echo(str(output / "captions.json"))


@app.command("train")
@guarded
def train(
    output: Path = typer.Option(Path("outputs/tiny-training"), "--output", help="Folder for checkpoints and logs."),
    stage: Stage = typer.Option(Stage.all, "--stage", help="Which stage to run."),
    quick: bool = typer.Option(False, "--quick", help="A few steps of everything: checks that training runs."),
    compile_kernels: bool = typer.Option(True, "--compile/--no-compile", help="torch.compile; needs a C++ compiler."),
) -> None:
    """Train the tiny model from nothing. Stopped runs resume; hours on a CPU, see --quick."""
    check_writable(output / "log.jsonl", "output")

    from ..tiny.train import train as run_training

    typer.echo(str(run_training(output, stage.value, quick=quick, compile_kernels=compile_kernels)))
