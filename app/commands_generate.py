"""`videospark generate`: one clip from a prompt, a picture, or the sidecar of an earlier clip."""

from __future__ import annotations

import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from .console import check_writable, dump_json, parse_size, quiet_loading, require_at_least
from .model_folder import locate_model, read_defaults, stand_in

# What the diffusers pipelines make when nobody says a size.
DIFFUSERS_SIZE = {"height": 480, "width": 832, "num_frames": 81}


def generate(
    prompt: str | None = typer.Option(None, "--prompt", "-p", help="What the clip shows."),
    image: Path | None = typer.Option(None, "--image", help="A picture: the clip's first frame."),
    negative_prompt: str | None = typer.Option(None, "--negative-prompt", help="What it must not show."),
    height: int | None = typer.Option(None, "--height", help="Pixels."),
    width: int | None = typer.Option(None, "--width", help="Pixels."),
    size: str | None = typer.Option(None, "--size", help="WIDTHxHEIGHT, as in 96x96."),
    frames: int | None = typer.Option(None, "--frames", help="Number of frames."),
    seed: int | None = typer.Option(None, "--seed", help="0 or more; left out or -1: drawn, and reported."),
    steps: int | None = typer.Option(None, "--steps", help="Denoising steps."),
    guidance: float | None = typer.Option(None, "--guidance", help="Guidance scale; 1 is without."),
    fps: int | None = typer.Option(None, "--fps", help="Frames per second of the mp4."),
    recipe: str | None = typer.Option(None, "--recipe", help="Preset name or recipe file; default: the model's own."),
    model: str | None = typer.Option(None, "--model", help="Folder or hub id; default: the embedded tiny model."),
    lora: list[str] = typer.Option(
        [], "--lora", help="FILE[:WEIGHT][@high|@low|@both]; several times for several. Of two experts both by default."
    ),
    offload: str = typer.Option(
        "none", "--offload", help="none, experts, model, group, or auto: the first that fits by the planner."
    ),
    device: str | None = typer.Option(None, "--device", help="cpu, cuda, cuda:1, ...; default: the best one."),
    output: Path = typer.Option(Path("outputs/clip.mp4"), "--output", "-o", help="The mp4 to write."),
    from_sidecar: Path | None = typer.Option(
        None, "--from-sidecar", help="Repeat an earlier clip from its JSON; options given here override it."
    ),
    allow_untrained: bool = typer.Option(
        False, "--allow-untrained", help="Run a recipe that needs training on weights that do not declare it."
    ),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON on stdout."),
) -> None:
    """Generate one clip: an mp4, a contact sheet and a JSON sidecar that reproduces it."""
    if size is not None:
        if height is not None or width is not None:
            raise ValueError(f"size: got {size!r} together with --height or --width; must be one or the other")
        height, width = parse_size(size)
    given = {
        "prompt": prompt, "image": image, "negative_prompt": negative_prompt, "height": height, "width": width,
        "num_frames": frames, "seed": seed, "num_inference_steps": steps, "guidance_scale": guidance, "fps": fps,
    }  # fmt: skip
    given = {name: value for name, value in given.items() if value is not None}
    _check_numbers(given)

    job = _prepare(given, recipe, model, lora, offload, device, output, from_sidecar, allow_untrained)
    result, paths, recipe_table, load_seconds = _run(job, output)
    report = {
        "video": str(paths["video"]),
        "sheet": str(paths["sheet"]),
        "sidecar": str(paths["sidecar"]),
        "seed": result.request.seed,
        "load_seconds": load_seconds,
        "stages": read_sidecar(paths["sidecar"])["stages"],  # with the saving, which the result cannot know
        "report": result.report,
        "loras": list(result.loras),
    }
    typer.echo(dump_json(report) if as_json else _render(report, recipe_table), nl=not as_json)


def _check_numbers(given: dict[str, Any]) -> None:
    for name, least in (("height", 1), ("width", 1), ("num_frames", 1), ("num_inference_steps", 1), ("fps", 1)):
        require_at_least(name, given.get(name), least)
    require_at_least("seed", given.get("seed"), -1)
    require_at_least("guidance_scale", given.get("guidance_scale"), 0)
    if "prompt" in given and not given["prompt"].strip():
        raise ValueError("prompt: got an empty text; must say what the clip shows")


def _check_steps(recipe: Any, steps: int | None) -> None:
    """A recipe with a list of noise levels fixes the number of steps."""
    if recipe is not None and recipe.sampler.sigmas is not None and steps not in (None, recipe.sampler.steps):
        rule = f"{recipe.sampler.steps}, the steps of recipe {recipe.name!r}, or left out"
        raise ValueError(f"num_inference_steps: got {steps!r}; must be {rule}")


class _Job:
    """Everything that is known before a weight is read."""

    def __init__(
        self, request: Any, recipe: Any, model: str, device: Any, allow_untrained: bool, loras: list[Any], offload: str
    ) -> None:
        self.request, self.recipe, self.model, self.device = request, recipe, model, device
        self.allow_untrained, self.loras, self.offload = allow_untrained, loras, offload


def _prepare(
    given: dict[str, Any],
    recipe: str | None,
    model: str | None,
    lora: list[str],
    offload: str,
    device: str | None,
    output: Path,
    from_sidecar: Path | None,
    allow_untrained: bool,
) -> _Job:
    """Check all that can be checked without the weights: the output, the recipe, the model's place, the size."""
    if output.suffix.lower() != ".mp4":
        raise ValueError(f"output: got {str(output)!r}; must end in .mp4")
    check_writable(output, "output")
    sidecar: dict[str, Any] = {}
    if from_sidecar is not None:
        if not from_sidecar.is_file():
            raise FileNotFoundError(f"from_sidecar: got {str(from_sidecar)!r}; no such file")
        sidecar = read_sidecar(from_sidecar)
    elif "prompt" not in given:
        raise ValueError("prompt: got nothing; must be given with --prompt, or by --from-sidecar")

    from ..pipelines.recipe import resolve

    recipe = recipe if recipe is not None else sidecar.get("recipe")
    resolved_recipe = resolve(recipe) if recipe is not None else None
    model = locate_model(model if model is not None else sidecar.get("model"))

    from ..core.devices import pick_device
    from ..pipelines.generation import GenerationRequest, resolve_seed
    from ..pipelines.sidecar import request_from_sidecar
    from ..pipelines.sizes import check_size
    from ..pipelines.video_io import check_output, read_image

    if from_sidecar is not None:
        request = replace(request_from_sidecar(from_sidecar), **given)
    else:
        request = GenerationRequest(**given)
    if isinstance(request.image, (str, Path)):
        read_image(request.image)  # read again when it is used; here only to complain early
        request = replace(request, image=str(Path(request.image).resolve()))  # the sidecar is read from anywhere
    from ..core.config import require
    from ..pipelines.offload import MODES

    require(offload in MODES, "offload", offload, f"one of {', '.join(MODES)}")
    loras = _choose_loras(lora, sidecar, from_sidecar)
    resolve_seed(request.seed)
    _check_steps(resolved_recipe, request.num_inference_steps)
    strides = stand_in(model)
    if strides is not None:
        size = {**DIFFUSERS_SIZE, **read_defaults(model)}
        check_size(strides, *(getattr(request, name) or size[name] for name in DIFFUSERS_SIZE))
    chosen_device = pick_device(device)
    check_output(output)  # last: it makes the folder, which a refused request must not leave behind
    untrained = allow_untrained or bool(sidecar.get("allow_untrained"))
    return _Job(request, resolved_recipe, model, chosen_device, untrained, loras, offload)


def _choose_loras(given: list[str], sidecar: dict[str, Any], place: Path | None) -> list[Any]:
    """Those of the command line, else those of the sidecar, which must be the same files still."""
    from ..pipelines.lora import LoRAChoice, check_choice, file_digest, parse_choice

    if given:
        return [check_choice(parse_choice(text)) for text in given]
    chosen = []
    for entry in sidecar.get("loras", []):
        path = Path(entry["path"])
        if not path.is_file() and place is not None and place.with_name(path.name).is_file():
            path = place.with_name(path.name)  # moved along with the sidecar
        chosen.append(check_choice(LoRAChoice(path, entry["weight"], entry["expert"])))
        if file_digest(path) != entry["sha256"]:
            rule = "the file that made the clip (its SHA-256 differs), or one given with --lora"
            raise ValueError(f"lora: got {str(path)!r}; must be {rule}")
    return chosen


def read_sidecar(path: Path) -> dict[str, Any]:
    """The plain data of a clip's sidecar."""
    import json

    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"from_sidecar: got {str(path)!r}; not JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError(f"from_sidecar: got {str(path)!r}; must hold a JSON object")
    return data


def _run(job: _Job, output: Path) -> tuple[Any, dict[str, Path], str, float]:
    """Load, generate with a progress bar on stderr, and write the three files; also the recipe's table, and the seconds
    that loading took."""
    from ..pipelines import loading
    from ..pipelines.acceleration import current_report
    from ..pipelines.generation import generate as generate_clip
    from ..pipelines.lora import load_lora
    from ..pipelines.offload import offload_of
    from ..pipelines.sidecar import write_result

    typer.echo(f"loading {job.model} on {job.device}", err=True)
    with_image = job.request.image is not None
    quiet_loading(job.model)
    start = time.perf_counter()
    pipe = loading.load(
        job.model,
        device=job.device,
        recipe=job.recipe,
        image_to_video=with_image,
        allow_untrained=job.allow_untrained,
        offload=job.offload,
        size=_size_of(job),
    )
    if (placed := offload_of(pipe)) is not None:
        typer.echo(str(placed), err=True)
    for choice in job.loras:
        loaded = load_lora(pipe, choice)
        for note in loaded.notes:
            warnings.warn(f"lora {loaded.name}: {note}", stacklevel=2)
    load_seconds = time.perf_counter() - start
    pipe.set_progress_bar_config(disable=True)  # ours shows the same on every pipeline
    with StepProgress() as progress:
        result = generate_clip(pipe, job.request, on_step=progress.on_step)
    # --from-sidecar loads the same model again.
    paths = write_result(result, output, extra={"model": job.model, "allow_untrained": job.allow_untrained})
    return result, paths, str(current_report(pipe) or "no recipe: the model as it is"), load_seconds


def _size_of(job: _Job) -> tuple[int, int, int] | None:
    """Width, height and frames, where they can be known before the weights."""
    known = {**DIFFUSERS_SIZE, **read_defaults(job.model)}
    wanted = [getattr(job.request, name) or known[name] for name in ("width", "height", "num_frames")]
    return int(wanted[0]), int(wanted[1]), int(wanted[2])


class StepProgress:
    """A bar on stderr that counts denoising steps and shows the last one's seconds."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[pace]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("denoising", total=None, pace="")

    def __enter__(self) -> StepProgress:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def on_step(self, step: int, total: int, seconds: float) -> None:
        """A step is done; `step` counts from 0."""
        self._progress.update(self._task, completed=step + 1, total=total, pace=f"{seconds:.2f} s/step")


def stage_table(stages: dict[str, Any]) -> str:
    """Seconds, share and peak memory per stage, as aligned text."""
    seconds, memory = stages["seconds"], stages.get("peak_memory", {})
    total = stages["total_seconds"] or 1.0
    lines = [f"{'stage':<10}{'seconds':>10}{'share':>8}  peak memory"]
    for name, value in seconds.items():
        peaks = [
            f"{key.removesuffix('_bytes')} {size / 2**30:.2f} GiB" for key, size in memory.get(name, {}).items() if size
        ]
        lines.append(f"{name:<10}{value:>10.2f}{value / total:>8.0%}  {', '.join(peaks)}".rstrip())
    lines.append(f"{'total':<10}{stages['total_seconds']:>10.2f}")
    if stages.get("step_seconds"):
        lines.append("steps     " + " ".join(f"{value:.2f}" for value in stages["step_seconds"]))
    return "\n".join(lines)


def _render(report: dict[str, Any], recipe_table: str) -> str:
    """The three paths, the seed, the stage table and what was accelerated."""
    lines = [f"{name:<9}{report[name]}" for name in ("video", "sheet", "sidecar", "seed")]
    for lora in report["loras"]:
        changed = ", ".join(f"{count} modules of {part}" for part, count in lora["modules"].items())
        lines.append(f"{'lora':<9}{lora['name']}, weight {lora['weight']:g}, {changed}")
    cold = f"loading {report['load_seconds']:.2f} s before that: a process that stays pays it once"
    return "\n".join([*lines, "", stage_table(report["stages"]), cold, "", recipe_table])
