"""`videospark plan`: will a clip fit on a card, stage by stage, and what makes it fit; nothing is loaded."""

from __future__ import annotations

from typing import Any

import typer

from .console import dump_json

GIB = 2**30


def plan(
    context: typer.Context,
    model: str | None = typer.Option(
        None, "--model", help="wan2.1-t2v-1.3b, ..., a checkpoint of docs/models.md, or a diffusers folder."
    ),
    size: str | None = typer.Option(
        None, "--size", help="WIDTHxHEIGHTxFRAMES, as in 1280x720x81; default: the checkpoint's, or 832x480x81."
    ),
    recipe: str | None = typer.Option(
        None, "--recipe", help="A preset's name or a recipe file; default: the checkpoint's or folder's own, or dense."
    ),
    gpu: str | None = typer.Option(
        None, "--gpu", help="rtx5090, rtx4090, rtx3060-12, h100, ..., or a memory as in 16gb; default: the one here."
    ),
    offload: str = typer.Option("none", "--offload", help="none, model or group."),
    free_text_encoder: bool = typer.Option(False, "--free-text-encoder", help="Once the prompt is encoded."),
    text_bits: int = typer.Option(16, "--text-bits", help="16, or 8 for a text encoder in INT8."),
    vae_tiling: bool = typer.Option(False, "--vae-tiling", help="Decode in tiles."),
    vae_dtype: str = typer.Option("float32", "--vae-dtype", help="float32 or bfloat16."),
    swap_experts: bool = typer.Option(False, "--swap-experts", help="Only the expert that runs is on the GPU."),
    quantization: str | None = typer.Option(
        None, "--quantization", help="Mode instead of the recipe's, as in fp8; fused."
    ),
    ram: float | None = typer.Option(None, "--ram", help="GiB of the machine, to be held against it as well."),
    compiled: bool = typer.Option(False, "--compiled", help="Time blocks that torch.compile has fused."),
    published: bool = typer.Option(False, "--published", help="Instead: the planner beside figures of others."),
    checkpoints: bool = typer.Option(False, "--checkpoints", help="Instead: published checkpoints on some cards."),
    as_json: bool = typer.Option(False, "--json", help="Print the plan as JSON on stdout."),
) -> None:
    """Say what a clip takes on a card: memory by stage, seconds by a roofline, and settings that make it fit."""
    from ..core.config import require

    if published or checkpoints:
        table = "--published" if published else "--checkpoints"
        given = {name.removeprefix("as_") for name in context.params if _is_given(context, name)}
        others = ", ".join(sorted(given - {"published", "checkpoints"}))
        require(not others, others, "given", f"left out with {table}, a fixed table")
        typer.echo(tables(published, checkpoints), nl=False)
        return
    from ..pipelines.plan import Settings, make_plan, parse_size
    from ..pipelines.plan_checkpoints import find_checkpoint

    rule = "given: a name or a diffusers folder"
    require(model is not None, "model", model, rule)
    assert model is not None

    settings = Settings(
        offload=offload, text_encoder="freed" if free_text_encoder else "resident", text_bits=text_bits,  # type: ignore[arg-type]
        vae_tiling=vae_tiling, vae_dtype=vae_dtype, swap_experts=swap_experts, quantization=quantization,  # type: ignore[arg-type]
    )  # fmt: skip
    entry = find_checkpoint(model)
    own = None if entry is None else entry.recipe()
    model, size = (model, size) if entry is None else (entry.model, size or entry.size)
    made = make_plan(
        model,
        parse_size(size or "832x480x81"),
        recipe if recipe is not None else own,
        gpu,
        settings,
        compiled=compiled,
        ram=ram,
    )
    typer.echo(dump_json(made.to_dict()) if as_json else render(made), nl=not as_json)


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def tables(published: bool, checkpoints: bool) -> str:
    """The tables of the documentation, in Markdown."""
    made = []
    if published:
        from ..pipelines.plan_published import published_table

        made.append(published_table())
    if checkpoints:
        from ..pipelines.plan_checkpoints import checkpoint_table, expectation_table

        made += [checkpoint_table(), expectation_table()]
    return "\n".join(made)


def render(made: Any) -> str:
    """The plan as text."""
    clip = made.clip
    lines = [
        f"{made.model.name} at {clip.width}x{clip.height}x{clip.frames} ({made.tokens:,} tokens), recipe "
        f"{made.recipe.name}, {made.card.name}: {made.settings.words()}",
        "",
        f"{'GiB':<10}{'weights':>9}{'activations':>13}{'workspace':>11}{'GPU peak':>10}{'RAM':>8}",
    ]
    for stage in made.stages:
        values = (stage.weights, stage.activations, stage.workspace, stage.gpu_peak, stage.ram)
        cells = [f"{value / GIB:.1f}" for value in values]
        lines.append(f"{stage.name:<10}{cells[0]:>9}{cells[1]:>13}{cells[2]:>11}{cells[3]:>10}{cells[4]:>8}")
    verdict = "fits" if made.fits else "does not fit"
    lines += ["", f"{verdict}: {made.peak_gib:.1f} GiB at most, {made.budget_gib:.1f} GiB usable"]
    given = "" if made.ram_budget_gib is None else f", {made.ram_budget_gib:g} GiB there"
    lines.append(f"RAM: {made.ram_gib:.1f} GiB at most{given}")
    if made.times is not None:
        parts = ", ".join(f"{name.replace('_', ' ')} {value:.2f}" for name, value in made.times.parts.items() if value)
        lines.append(f"about {made.times.step:.2f} s a step ({parts})")
        lines.append(
            f"about {made.times.denoise:.1f} s for {made.times.steps} steps, {made.times.decode:.1f} s to decode"
        )
    if made.options:
        lines += ["", "what would fit:"]
        fitting = [option for option in made.options if option.fits]
        lines += [_option(option) for option in fitting[:4]] or ["nothing here; a smaller size or another card"]
    return "\n".join([*lines, "", "assumed:", *(f"- {text}" for text in made.assumptions)])


def _option(option: Any) -> str:
    seconds = "" if option.seconds is None else f", about {option.seconds:.0f} s"
    return f"- {option.settings.words()}: {option.gpu_gib:.1f} GiB on the GPU, {option.ram_gib:.0f} GiB RAM{seconds}"
