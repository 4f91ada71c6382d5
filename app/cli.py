"""The `videospark` command.

The commands live in `commands_*.py`; each imports torch and diffusers only once it runs, so that
`videospark --help` answers at once and `videospark doctor` works where they are broken.
"""

from __future__ import annotations

import typer

from . import (
    commands_batch,
    commands_bench,
    commands_calibrate,
    commands_compare,
    commands_convert,
    commands_distill,
    commands_doctor,
    commands_evaluate,
    commands_generate,
    commands_plan,
    commands_recipes,
    commands_serve,
    commands_tiny,
)
from .console import guarded, package_version
from .process import prepare_process, quiet_remarks

app = typer.Typer(
    name="videospark",
    help="Fast video generation: stock Wan pipelines, made sparse, few-step and measured.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # with --debug, Python's own traceback
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"videospark {package_version() or 'not installed (running from a source folder)'}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
    ),
) -> None:
    """Fast video generation: stock Wan pipelines, made sparse, few-step and measured."""


app.command("generate")(guarded(commands_generate.generate))
app.command("compare")(guarded(commands_compare.compare))
app.command("batch")(guarded(commands_batch.batch))
app.command("serve")(guarded(commands_serve.serve))
app.command("evaluate")(guarded(commands_evaluate.evaluate))
app.command("calibrate")(guarded(commands_calibrate.calibrate))
app.command("convert")(guarded(commands_convert.convert))
app.command("plan")(guarded(commands_plan.plan))
app.command("doctor")(guarded(commands_doctor.doctor))
app.add_typer(commands_bench.app, name="bench")
app.add_typer(commands_distill.app, name="distill")
app.add_typer(commands_recipes.app, name="recipes")
app.add_typer(commands_tiny.app, name="tiny")


def main() -> None:
    """Entry point of the console script."""
    prepare_process()
    quiet_remarks()
    app()


if __name__ == "__main__":
    main()
