"""`import videospark` is cheap, and its public names are there."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import videospark

HEAVY = ("torch", "diffusers", "transformers", "numpy", "triton", "gradio", "ray")


def modules_after(statement: str) -> set[str]:
    code = f"{statement}; import sys, json; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_importing_the_package_loads_nothing_heavy():
    # The modules are counted and not the seconds: a machine's load cannot make this fail.
    modules = modules_after("import videospark")
    assert not modules & set(HEAVY)
    added = modules - modules_after("pass")
    assert len(added) < 60, sorted(added)


def test_importing_the_command_line_loads_nothing_heavy():
    assert not modules_after("import videospark.app.cli") & set(HEAVY)


@pytest.mark.parametrize("name", [n for n in videospark.__all__ if n != "__version__"])
def test_every_public_name_is_found(name):
    assert callable(getattr(videospark, name))
    assert name in dir(videospark)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'acelerate'"):
        videospark.acelerate  # noqa: B018


@pytest.mark.parametrize("package", ["core", "attention", "pipelines", "evaluation", "app", "tiny"])
def test_a_package_refuses_its_bare_name(package, tmp_path):
    from importlib import import_module
    from pathlib import Path

    folder = Path(import_module(f"videospark.{package}").__file__).parent
    code = f"import sys; sys.path.insert(0, {str(folder.parent)!r}); import {package}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0
    assert f"videospark.{package}" in done.stderr
