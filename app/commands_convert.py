"""`videospark convert`: checkpoints of Wan and of published students into folders that load, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from .console import dump_json


def convert(
    source: Path = typer.Argument(help="A .pth or .safetensors file, or a folder; of a pair the high-noise expert."),
    to: Path = typer.Option(..., "--to", help="The folder to make; with --reverse the .safetensors file."),
    base: Path | None = typer.Option(
        None, "--base", help="A diffusers folder of the same model: gives text encoder, VAE, tokenizer and scheduler."
    ),
    format: str = typer.Option("auto", "--format", help="auto, spark, wan, turbodiffusion, lightx2v or fastvideo."),
    low: Path | None = typer.Option(None, "--low", help="The low-noise expert, where its name does not tell."),
    sparsity: float | None = typer.Option(None, "--sparsity", help="Of a student, where the file's name does not say."),
    steps: int | None = typer.Option(None, "--steps", help="Of a student, likewise."),
    backend: str = typer.Option("auto", "--backend", help="That the recipe names for sparse attention."),
    dtype: str = typer.Option("keep", "--dtype", help="keep, bfloat16, float16 or float32, of the backbone."),
    drop_gate: bool = typer.Option(False, "--drop-gate", help="Leave FastVideo's gate out, which nothing here runs."),
    quantize: str = typer.Option("none", "--quantize", help="fp8 or int8: store the products of the blocks so."),
    shard: float = typer.Option(5.0, "--shard", help="Largest file to write, in GiB."),
    reverse: bool = typer.Option(False, "--reverse", help="From a folder back to a file with Wan's names."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON on stdout."),
) -> None:
    """Convert a checkpoint, tensor by tensor; nothing is left behind where something does not fit."""
    if reverse:
        changed = {"backend": (backend, "auto"), "dtype": (dtype, "keep"), "drop_gate": (drop_gate, False),
                   "quantize": (quantize, "none"), "shard": (shard, 5.0)}  # fmt: skip
        given = {name: value for name, (value, default) in changed.items() if value != default}
        _refuse_forward_options(base=base, low=low, sparsity=sparsity, steps=steps, **given)
        _reverse(source, to, format, as_json)
        return
    from ..core.config import require
    from ..pipelines.convert import convert_checkpoint

    require(2**-10 <= shard < 2**20, "shard", shard, "at least a MiB (0.001) and finite, in GiB")
    report = convert_checkpoint(
        source, to, low=low, base=base, format=format, sparsity=sparsity, steps=steps, backend=backend, dtype=dtype,
        drop_gate=drop_gate, quantize=quantize, max_shard_bytes=int(shard * 2**30),
    )  # fmt: skip
    typer.echo(dump_json(report.to_dict()) if as_json else _render(report), nl=not as_json)


def _reverse(source: Path, to: Path, format: str, as_json: bool) -> None:
    from ..pipelines.convert import revert_checkpoint

    files = [str(path) for path in revert_checkpoint(source, to, format=format)]
    typer.echo(dump_json({"files": files}) if as_json else "\n".join(files), nl=not as_json)


def _refuse_forward_options(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name}: got {str(value)!r}; must be left out with --reverse")


def _render(report: Any) -> str:
    lines = [f"format   {report.format}", f"folder   {report.folder}", f"recipe   {report.recipe or 'none'}"]
    for name, counts in report.transformers.items():
        size = f"{counts['bytes'] / 2**30:.2f} GiB in {counts['files']} file(s)"
        branch = f" and {counts['branch_tensors']} of the linear branch" if counts["branch_tensors"] else ""
        lines.append(f"{name}: {counts['tensors']} tensors{branch}, {counts['parameters']:,} numbers, {size}")
    return "\n".join([*lines, *(f"note: {note}" for note in report.notes)])
