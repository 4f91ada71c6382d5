"""`videospark calibrate`: keep ratios by layer, and a linear branch set without training."""

from __future__ import annotations

from pathlib import Path

import typer

from .console import check_writable, parse_size, require_at_least
from .model_folder import locate_model


def calibrate(
    recipe: str = typer.Option(..., "--recipe", help="Preset name or recipe file of a sparse backend."),
    output: Path = typer.Option(..., "--output", help="Folder for recipe.toml, calibration.md, .png and branches."),
    prompts: str = typer.Option("4", "--prompts", help="File with one prompt a line; or, tiny model only, how many."),
    model: str | None = typer.Option(None, "--model", help="Model folder or hub id; default: the embedded tiny model."),
    error_bound: float = typer.Option(0.1, "--error-bound", help="Largest relative error of a layer's attention."),
    keep_ratios: str | None = typer.Option(None, "--keep-ratios", help="The grid, such as 0.05,0.1,0.2,0.5."),
    measured_steps: int = typer.Option(3, "--measured-steps", help="Steps of a clip that are looked at."),
    steps: int | None = typer.Option(None, "--steps", help="Denoising steps; default: the recipe's or the model's."),
    guidance: float | None = typer.Option(None, "--guidance", help="Guidance scale."),
    size: str | None = typer.Option(None, "--size", help="WIDTHxHEIGHT in pixels; default: the model's."),
    frames: int | None = typer.Option(None, "--frames", help="Frames of a clip; default: the model's."),
    seed: int = typer.Option(0, "--seed", help="Of the noise of the first prompt; the others count up."),
    device: str | None = typer.Option(None, "--device", help="cpu, cuda, ...; default: the best one."),
    save_model: bool = typer.Option(False, "--save-model", help="Also write the accelerated model to OUTPUT/model."),
) -> None:
    """Measure sparse attention on a model, propose a keep ratio for each layer, set RoLA or SLA without gradients."""
    for name, value, least in (
        ("measured-steps", measured_steps, 1), ("steps", steps, 1), ("guidance", guidance, 0), ("frames", frames, 1),
        ("seed", seed, 0),
    ):  # fmt: skip
        require_at_least(name, value, least)
    if not error_bound > 0:
        raise ValueError(f"error-bound: got {error_bound!r}; must be above 0")
    check_writable(output / "recipe.toml", "output")
    texts = read_prompts(prompts, tiny=model is None)
    folder = locate_model(model)

    from ..pipelines.recipe import resolve

    chosen = resolve(recipe)
    if chosen.attention.backend == "dense":
        raise ValueError(f"recipe: got {recipe!r}; must be one with a sparse attention backend")

    from ..core.devices import pick_device
    from ..pipelines import calibration, loading
    from ..pipelines.acceleration import accelerate, restore
    from ..pipelines.generation import GenerationRequest

    ratios = calibration.KEEP_RATIOS if keep_ratios is None else parse_ratios(keep_ratios)
    height, width = (None, None) if size is None else parse_size(size)
    request = GenerationRequest(
        texts[0], height=height, width=width, num_frames=frames, num_inference_steps=steps, guidance_scale=guidance
    )
    target = pick_device(device)
    typer.echo(f"loading {folder} on {target}", err=True)
    pipe = loading.load(folder, device=target, recipe="dense")
    pipe.set_progress_bar_config(disable=True)
    restore(pipe)  # the recipe "dense" kept the model's own from being applied
    result = calibration.calibrate(
        pipe, chosen, texts, keep_ratios=ratios, error_bound=error_bound, measured_steps=measured_steps, seed=seed,
        request=request, on_stage=lambda text: typer.echo(text, err=True),
    )  # fmt: skip
    paths = calibration.write_calibration(result, output)
    if save_model:
        accelerate(pipe, result.recipe, branch_state=result.branch_state, allow_untrained=True)
        paths["model"] = loading.save(pipe, output / "model")
    budget = result.budget
    typer.echo(f"keep ratios: {', '.join(f'{ratio:g}' for ratio in budget.keep_ratios)}")
    typer.echo(f"dense layers: {', '.join(map(str, budget.dense_layers)) or 'none'}")
    for name, branch in result.branches.items():
        if not branch.layers:
            continue
        before, after = (max(getattr(row, key) for row in branch.layers) for key in ("sparse", "after"))
        typer.echo(f"{name}: largest error {before:.4f} by sparse attention alone, {after:.4f} with the branch")
    for path in paths.values():
        typer.echo(str(path))


def read_prompts(given: str, *, tiny: bool) -> list[str]:
    """Prompts from a file, one a line; or that many captions of the tiny model's own world.

    Raises:
        ValueError: a number for another model, a number below 1, or a file without a prompt.
        FileNotFoundError: no such file.
    """
    if given.strip().isdigit():
        if not tiny:
            raise ValueError(f"prompts: got {given!r}; must be a file for a model that is not the embedded tiny one")
        require_at_least("prompts", int(given), 1)
        from ..tiny.dataset import held_out_captions

        return [caption.text for _, caption in held_out_captions(int(given))]
    path = Path(given)
    if not path.is_file():
        raise FileNotFoundError(f"prompts: got {given!r}; must be a file with one prompt a line, or a number")
    texts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not texts:
        raise ValueError(f"prompts: got {given!r}; must be a file with at least one prompt")
    return texts


def parse_ratios(text: str) -> tuple[float, ...]:
    """`0.05,0.1` -> (0.05, 0.1); ValueError unless all are numbers above 0 and below 1."""
    try:
        ratios = tuple(float(part) for part in text.split(","))
    except ValueError:
        ratios = ()
    if not ratios or not all(0 < ratio < 1 for ratio in ratios):
        raise ValueError(f"keep-ratios: got {text!r}; must be numbers above 0 and below 1, such as 0.05,0.1,0.2")
    return ratios
