"""`videospark doctor`: what is installed, what was found, what will therefore be used."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable
from typing import Any

import typer

from .console import describe_error, dump_json, package_version

# Distribution, module, what it is for, how to get it. The first three are required.
_PACKAGES: tuple[tuple[str, str, str, str], ...] = (
    ("torch", "torch", "everything", "pip install torch (see pytorch.org for the build of your GPU)"),
    ("diffusers", "diffusers", "the pipelines", "pip install diffusers"),
    ("transformers", "transformers", "text encoders", "pip install transformers"),
    ("triton", "triton", "GPU kernels; without it the torch path runs", "comes with CUDA builds of torch on Linux"),
    ("transformer-engine", "transformer_engine", "FP8 layers (optional)", "pip install transformer-engine[pytorch]"),
    ("torchao", "torchao", "quantization (optional)", "pip install torchao"),
    ("torchvision", "torchvision", "prepares pictures for CLIP; without it PIL does", "pip install torchvision"),
    ("gradio", "gradio", "the web page (optional)", "pip install gradio"),
    ("ray", "ray", "batches over several machines (optional)", "pip install ray"),
)
_REQUIRED = ("torch", "diffusers", "transformers", "ffmpeg")


def doctor(
    as_json: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Say what is installed, which device was found, and what will be used. Always ends with exit code 0."""
    report = examine()
    typer.echo(dump_json(report) if as_json else _render(report), nl=not as_json)


def examine() -> dict[str, Any]:
    """All findings as plain data; a probe that fails becomes a finding, never an error."""
    software = [{"name": "python", "version": platform.python_version(), "purpose": "", "get": None, "problem": None}]
    software += [_probe_package(*package) for package in _PACKAGES]
    software.append(_probe_ffmpeg())
    by_name = {row["name"]: row for row in software}
    missing = [name for name in _REQUIRED if by_name[name]["version"] is None or by_name[name]["problem"]]
    return {
        "videospark": package_version(),
        "software": software,
        "device": _attempt(_probe_device),
        "attention": _attempt(_probe_attention),
        "embedded_model": _attempt(_probe_embedded_model),
        "missing": missing,
        "ready": not missing,
    }


def _attempt(probe: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Run a probe; whatever it raises is its finding."""
    try:
        return probe()
    except Exception as error:  # a diagnosis must survive every broken part
        return {"problem": describe_error(error)}


def _probe_package(name: str, module: str, purpose: str, how: str) -> dict[str, Any]:
    version = package_version(name)
    problem = None
    if version is not None and name in _REQUIRED:  # installed is not the same as importable
        try:
            importlib.import_module(module)
        except Exception as error:
            problem = f"does not import: {describe_error(error)}"
    return {
        "name": name,
        "version": version,
        "purpose": purpose,
        "get": None if version and not problem else how,
        "problem": problem,
    }


def _probe_ffmpeg() -> dict[str, Any]:
    row: dict[str, Any] = {"name": "ffmpeg", "version": None, "purpose": "writing mp4", "get": None, "problem": None}
    try:
        import imageio_ffmpeg

        row["version"] = imageio_ffmpeg.get_ffmpeg_version()
    except Exception as error:
        row["problem"] = describe_error(error)
        row["get"] = "pip install imageio imageio-ffmpeg"
    return row


def _probe_device() -> dict[str, Any]:
    from ..core.devices import default_dtype, describe_device, pick_device

    device = pick_device(None)
    found = {"device": str(device), **describe_device(device)}
    found["dtype"] = str(default_dtype(device)).removeprefix("torch.")
    found["cpu_cores"] = os.cpu_count()
    return found


def _probe_attention() -> dict[str, Any]:
    from ..attention.backends import available_backends

    return {"backends": [str(name) for name in available_backends()]}


def _probe_embedded_model() -> dict[str, Any]:
    from ..tiny import checkpoint_path

    try:
        return {"path": str(checkpoint_path()), "present": True, "problem": None}
    except FileNotFoundError as error:
        return {"path": None, "present": False, "problem": str(error)}


def _render(report: dict[str, Any]) -> str:
    lines = [f"videospark {report['videospark'] or '(not installed: running from a source folder)'}", ""]
    for row in report["software"]:
        state = row["version"] or "missing"
        detail = row["problem"] or row["purpose"]
        lines.append(f"  {row['name']:<20}{state:<17} {detail}".rstrip())
        if row["get"]:
            lines.append(f"  {'':<20}get it: {row['get']}")
    lines.append("")
    device = report["device"]
    if "device" in device:
        details = ", ".join(f"{key} {value}" for key, value in device.items() if key not in ("device", "type", "dtype"))
        lines.append(f"device           {device['device']} ({details})")
        lines.append(f"will be used     {device['dtype']} on {device['device']}")
    else:
        lines.append(f"device           unknown: {device['problem']}")
    attention = report["attention"]
    lines.append(f"attention        {', '.join(attention.get('backends', ())) or attention.get('problem', 'none')}")
    model = report["embedded_model"]
    lines.append(f"embedded model   {model['path'] if model.get('present') else model['problem']}")
    lines.append("")
    lines.append("ready" if report["ready"] else f"not ready: missing or broken: {', '.join(report['missing'])}")
    return "\n".join(lines)
