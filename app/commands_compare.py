"""`videospark compare`: a clip of a student beside one of its dense teacher, from the same prompt and seed."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from .commands_generate import StepProgress, stage_table
from .console import check_writable, dump_json, quiet_loading, require_at_least
from .model_folder import locate_model

CAPTION_HEIGHT = 18
BACKGROUND, INK = (255, 255, 255), (40, 40, 40)


def compare(
    model: str = typer.Option(..., "--model", help="The student: a folder or hub id."),
    against: str | None = typer.Option(
        None, "--against", help="The dense teacher, likewise, without its recipe; default: the embedded tiny model."
    ),
    prompt: str = typer.Option(..., "--prompt", "-p", help="What the clips show."),
    seed: int = typer.Option(0, "--seed", help="0 or more; the same noise for both."),
    device: str | None = typer.Option(None, "--device", help="cpu, cuda, cuda:1, ...; default: the best one."),
    output: Path = typer.Option(Path("outputs/compare.mp4"), "--output", "-o", help="The student's mp4."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON on stdout."),
) -> None:
    """Make a clip with a student and with its dense teacher, from the same noise, and both side by side."""
    if output.suffix.lower() != ".mp4":
        raise ValueError(f"output: got {str(output)!r}; must end in .mp4")
    if not prompt.strip():
        raise ValueError("prompt: got an empty text; must say what the clips show")
    require_at_least("seed", seed, 0)
    check_writable(output, "output")
    folders = {"student": locate_model(model), "teacher": locate_model(against)}

    from ..core.devices import pick_device
    from ..pipelines.generation import GenerationRequest
    from ..pipelines.sidecar import write_result

    where = pick_device(device)
    results: dict[str, Any] = {}
    report: dict[str, Any] = {}
    request = GenerationRequest(prompt=prompt, seed=seed)
    for role, folder in folders.items():
        results[role], load_seconds = _make(folder, role, request, where)
        made = results[role].request  # the teacher's clip has the student's size
        request = replace(request, **{name: getattr(made, name) for name in ("height", "width", "num_frames", "fps")})
        path = output if role == "student" else output.with_name(f"{output.stem}-dense.mp4")
        paths = write_result(results[role], path, extra={"model": folder})
        stages = results[role].stages
        report[role] = {**{k: str(v) for k, v in paths.items()}, "load_seconds": load_seconds, "stages": stages}
    both = _write_both(results["student"], results["teacher"], output.with_name(f"{output.stem}-side-by-side.mp4"))
    seconds = {role: result.stages["seconds"]["denoise"] for role, result in results.items()}
    report |= {"side_by_side": {k: str(v) for k, v in both.items()}, "seed": seed}
    report["denoise_speedup"] = seconds["teacher"] / seconds["student"]
    typer.echo(dump_json(report) if as_json else _render(report), nl=not as_json)


def _make(folder: str, role: str, request: Any, device: Any) -> tuple[Any, float]:
    """One clip and the seconds that loading took."""
    from ..pipelines.generation import generate
    from ..pipelines.loading import load

    typer.echo(f"{role}: loading {folder} on {device}", err=True)
    quiet_loading(folder)
    start = time.perf_counter()
    pipe = load(folder, device=device, recipe="dense" if role == "teacher" else None)
    load_seconds = time.perf_counter() - start
    pipe.set_progress_bar_config(disable=True)
    with StepProgress() as progress:
        return generate(pipe, request, on_step=progress.on_step), load_seconds


def _write_both(student: Any, teacher: Any, path: Path) -> dict[str, Path]:
    """The clips next to each other, as mp4 and, for pages that show pictures alone, as animated GIF."""
    import numpy as np
    from PIL import Image

    from ..pipelines.video_io import save_video, write_atomically

    halves = [_with_caption(result) for result in (student, teacher)]
    frames = np.concatenate(halves, axis=2)
    fps = student.request.fps
    pictures = [Image.fromarray(frame) for frame in frames]
    save_video(frames, path, fps)
    gif = write_atomically(
        path.with_suffix(".gif"),
        lambda partial: pictures[0].save(
            partial, format="GIF", save_all=True, append_images=pictures[1:], duration=round(1000 / fps), loop=0
        ),
    )
    return {"video": path, "gif": gif}


def _with_caption(result: Any) -> Any:
    """Frames with a line under them: steps, and seconds of denoising."""
    import numpy as np
    from PIL import Image, ImageDraw

    width = result.frames.shape[2]
    line = Image.new("RGB", (width, CAPTION_HEIGHT), BACKGROUND)
    text = f"{result.request.num_inference_steps} steps, denoised in {result.stages['seconds']['denoise']:.2f} s"
    ImageDraw.Draw(line).text((4, 3), text, fill=INK)
    below = np.broadcast_to(np.asarray(line), (len(result.frames), CAPTION_HEIGHT, width, 3))
    return np.concatenate([result.frames, below], axis=1)


def _render(report: dict[str, Any]) -> str:
    lines = []
    for role in ("student", "teacher"):
        part = report[role]
        lines += [f"{role}", *(f"  {name:<9}{part[name]}" for name in ("video", "sheet", "sidecar"))]
        lines += ["", stage_table(part["stages"]), f"loading {part['load_seconds']:.2f} s before that", ""]
    both = report["side_by_side"]
    lines.append(f"side by side: {both['video']}, {both['gif']}")
    lines.append(f"denoising, first clip of each: {report['denoise_speedup']:.1f} times faster")
    return "\n".join(lines)
