"""The command line: lean help, recipes, doctor, versions, errors as one line."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from videospark.app import commands_doctor, console
from videospark.app.cli import app

runner = CliRunner()


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["tiny", "--help"], ["recipes", "--help"]])
def test_help_imports_nothing_heavy(arguments):
    program = (
        "import sys\nsys.argv[1:] = sys.argv[1:]\nfrom videospark.app.cli import app\n"
        "code = app(standalone_mode=False)\n"
        "print('HEAVY', [m for m in ('torch', 'diffusers', 'transformers', 'numpy', 'imageio') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
    assert "HEAVY []" in done.stdout


def test_version():
    result = runner.invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith("videospark ")


def test_every_command_offers_debug():
    for command in (["generate"], ["evaluate"], ["doctor"], ["recipes", "show"], ["tiny", "train"]):
        assert "--debug" in runner.invoke(app, [*command, "--help"], env={"COLUMNS": "200"}).stdout


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("steps: got 0; must be at least 1"), 2),
        (FileNotFoundError(2, "No such file or directory", "x.png"), 2),
        (FloatingPointError("step 3: the latents hold NaN"), 1),
        (RuntimeError("CUDA out of memory"), 1),
        (KeyError("frames"), 1),
    ],
)
def test_errors_are_one_line_with_a_code(error, code):
    def fail() -> None:
        raise error

    small = typer.Typer()
    small.command()(console.guarded(fail))
    result = runner.invoke(small, [])
    assert result.exit_code == code
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert str(error.args[-1]) in result.stderr
    assert runner.invoke(small, ["--debug"]).exception is error


def test_recipes_list_shows_every_preset():
    from videospark.pipelines.recipe import preset_names

    text = runner.invoke(app, ["recipes", "list"]).stdout
    assert [line.split()[0] for line in text.splitlines()] == list(preset_names())
    assert set(json.loads(runner.invoke(app, ["recipes", "list", "--json"]).stdout)) == set(preset_names())


def test_a_shown_recipe_is_a_valid_recipe_file(tmp_path):
    shown = runner.invoke(app, ["recipes", "show", "tiny-sparse-50"])
    assert shown.exit_code == 0
    assert json.loads(shown.stdout)["attention"]["keep_ratio"] == 0.5
    file = tmp_path / "mine.json"
    file.write_text(shown.stdout)
    result = runner.invoke(app, ["recipes", "validate", str(file)])
    assert result.exit_code == 0 and "valid" in result.stdout


def test_a_wrong_recipe_file_is_explained(tmp_path):
    recipe = json.loads(runner.invoke(app, ["recipes", "show", "tiny-sparse-50"]).stdout)
    recipe["attention"]["keep_ratio"] = 1.5
    file = tmp_path / "wrong.json"
    file.write_text(json.dumps(recipe))
    result = runner.invoke(app, ["recipes", "validate", str(file)])
    assert result.exit_code == 2
    assert "keep_ratio" in result.stderr and "1.5" in result.stderr
    assert runner.invoke(app, ["recipes", "validate", str(tmp_path / "absent.json")]).exit_code == 2
    unknown = runner.invoke(app, ["recipes", "show", "tiny-sparse-51"])
    assert unknown.exit_code == 2 and "tiny-sparse-50" in unknown.stderr


def test_doctor_reports_what_is_there_and_how_to_get_the_rest(monkeypatch):
    real = console.package_version
    monkeypatch.setattr(
        commands_doctor, "package_version", lambda name="videospark": None if name == "ray" else real(name)
    )
    result = runner.invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    rows = {row["name"]: row for row in report["software"]}
    assert rows["torch"]["version"] and rows["torch"]["get"] is None
    assert rows["ray"]["version"] is None and "pip install ray" in rows["ray"]["get"]
    assert rows["ffmpeg"]["version"]
    assert report["device"]["device"] and report["device"]["dtype"]
    assert "dense" in report["attention"]["backends"]
    assert "present" in report["embedded_model"]
    text = runner.invoke(app, ["doctor"])
    assert text.exit_code == 0 and "pip install ray" in text.stdout


def test_doctor_survives_a_broken_installation(monkeypatch):
    def broken(name):
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(commands_doctor.importlib, "import_module", broken)
    result = runner.invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "libcudart" in result.stdout and "not ready" in result.stdout


def test_parse_size_takes_width_first():
    assert console.parse_size("832x480") == (480, 832)
    for text in ("832", "832x", "-8x8", "8x8x8"):
        with pytest.raises(ValueError, match="WIDTHxHEIGHT"):
            console.parse_size(text)


def test_plans_fixed_tables_ignore_no_option():
    result = runner.invoke(app, ["plan", "--published", "--json", "--gpu", "h100"])
    assert result.exit_code != 0 and "gpu, json: got 'given'; must be left out with --published" in result.stderr
    assert runner.invoke(app, ["plan", "--published"]).exit_code == 0
