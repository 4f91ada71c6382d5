"""`videospark recipes`: the presets, and whether a recipe file is right."""

from __future__ import annotations

import typer

from .console import dump_json, guarded

app = typer.Typer(help="List, show and check acceleration recipes.", no_args_is_help=True)


@app.command("list")
@guarded
def list_recipes(
    as_json: bool = typer.Option(False, "--json", help="Print JSON: name -> recipe."),
) -> None:
    """Every preset with its attention and sampling settings, one line each."""
    from ..core.config import to_dict
    from ..pipelines.recipe import preset, preset_names

    recipes = [preset(name) for name in preset_names()]
    if as_json:
        typer.echo(dump_json({recipe.name: to_dict(recipe) for recipe in recipes}), nl=False)
        return
    width = max(len(recipe.name) for recipe in recipes)
    for recipe in recipes:
        typer.echo(f"{recipe.name:<{width}}  {recipe.description or summary(recipe)}")


def summary(recipe) -> str:
    """What a recipe changes, in a few words."""
    attention, sampler = recipe.attention, recipe.sampler
    parts = [f"attention {attention.backend}"]
    if attention.keep_ratio < 1:
        parts.append(f"keeps {attention.keep_ratio:.0%} of the blocks")
    steps = len(sampler.sigmas) if sampler.sigmas else sampler.num_inference_steps
    if steps:
        parts.append(f"{steps} steps")
    return ", ".join(parts)


@app.command("show")
@guarded
def show(
    name: str = typer.Argument(help="A preset's name, or the path of a recipe file."),
) -> None:
    """Print a recipe as JSON: save it, change it, and pass the file as --recipe."""
    from ..core.config import to_dict
    from ..pipelines.recipe import resolve

    typer.echo(dump_json(to_dict(resolve(name))), nl=False)


@app.command("validate")
@guarded
def validate(
    file: str = typer.Argument(help="A .toml or .json recipe file."),
) -> None:
    """Check every field of a recipe file; exit code 2 names the field, the value and the rule."""
    from pathlib import Path

    from ..core.config import load_file
    from ..pipelines.recipe import Recipe

    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"file: got {file!r}; no such file")
    recipe = load_file(Recipe, path)
    typer.echo(f"{file}: valid recipe {recipe.name!r} ({summary(recipe)})")
