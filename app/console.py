"""What every command shares: errors as one line with an exit code, sizes, versions, output streams.

Exit codes: 0 done, 1 something broke while working, 2 what was asked for is wrong, 130 interrupted.
Results go to stdout; progress, warnings and errors go to stderr, so that `--json` output can be piped.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import tempfile
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import typer

WRONG_INPUT = 2
FAILED = 1
INTERRUPTED = 130

# Raised for what the user typed or pointed at. (ConfigError is a ValueError.)
_INPUT_ERRORS = (ValueError, FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)


def package_version(distribution: str = "videospark") -> str | None:
    """Version of an installed distribution, None if it is not installed; imports nothing."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def describe_error(error: BaseException) -> str:
    """One line that says what went wrong.

    Errors whose text does not explain itself (a bare key, an empty message) are prefixed with their type.
    """
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{error.filename}: {error.strerror}"
    text = " ".join(str(error).split())
    explains_itself = isinstance(error, (*_INPUT_ERRORS, FloatingPointError, ImportError, RuntimeError)) and text
    return text if explains_itself else f"{type(error).__name__}: {text}".rstrip(": ")


def exit_code(error: BaseException) -> int:
    """2 for an input that cannot be right, 1 for a failure on the way."""
    return WRONG_INPUT if isinstance(error, _INPUT_ERRORS) else FAILED


def guarded(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the option `--debug`, and turn its errors into one line on stderr and an exit code.

    The option is added to the signature here, so that it stands on every command and is never forgotten.
    """
    signature = inspect.signature(command)
    option = typer.Option(False, "--debug", help="Show the traceback of an error.")
    debug_parameter = inspect.Parameter("debug", inspect.Parameter.KEYWORD_ONLY, default=option, annotation=bool)

    @functools.wraps(command)
    def run(*args: Any, debug: bool = False, **kwargs: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _show_warning
                return command(*args, **kwargs)
        except KeyboardInterrupt:
            typer.echo("interrupted", err=True)
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:  # the outermost frame of the program: the only place that may catch everything
            if debug or isinstance(error, _flow_control()):
                raise
            typer.echo(f"error: {describe_error(error)}", err=True)
            raise typer.Exit(exit_code(error)) from None

    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), debug_parameter])  # type: ignore[attr-defined]
    run.__annotations__ = {**command.__annotations__, "debug": bool}
    return run


def _show_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    typer.echo(f"warning: {' '.join(str(message).split())}", err=True)


def _flow_control() -> tuple[type[BaseException], ...]:
    """Exceptions that typer itself uses to end a command with a code, or to complain about an option."""
    return (typer.Exit, typer.Abort, typer.BadParameter)


def parse_size(text: str) -> tuple[int, int]:
    """`WIDTHxHEIGHT` in pixels -> (height, width). Raises ValueError for anything else."""
    found = re.fullmatch(r"\s*(\d+)\s*[xX*]\s*(\d+)\s*", text)
    if not found:
        raise ValueError(f"size: got {text!r}; must be WIDTHxHEIGHT in pixels, as in 96x96")
    width, height = int(found[1]), int(found[2])
    return height, width


def require_at_least(name: str, value: int | float | None, minimum: int | float) -> None:
    """Refuse a number below its minimum; None means unset and passes."""
    if value is not None and not value >= minimum:
        raise ValueError(f"{name}: got {value!r}; must be at least {minimum}")


def check_writable(path: Path, name: str) -> None:
    """Refuse an output file that could not be written at the end: called before anything slow."""
    if path.is_dir():
        raise ValueError(f"{name}: got {str(path)!r}; must be a file, and this is a folder")
    folder = path.absolute().parent
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        raise ValueError(f"{name}: got {str(path)!r}; {folder} is a file, so nothing can be written below it")
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{name}: got {str(path)!r}; the folder {folder} is not writable")


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all, making its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def dump_json(data: Any) -> str:
    """Indented JSON; NaN and Inf are refused (they are not JSON)."""
    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    """JSON form of what the standard encoder does not know: paths, numpy scalars and arrays, dataclasses."""
    if isinstance(value, Path):
        return str(value)
    for converter in ("to_dict", "tolist"):
        if hasattr(value, converter):
            return getattr(value, converter)()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def quiet_loading(model: str) -> None:
    """Silence the loading bars of diffusers and transformers for a local folder, whose reading takes moments.

    For a hub id they stay: a download is long. Meant for a command's own process; a library leaves them alone.
    """
    if not Path(model).is_dir():
        return
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
