"""`videospark evaluate`: real clips from an untrained pipeline, with the judging replaced by a fixed verdict."""

from __future__ import annotations

import json
import sys
import types

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from videospark.app.cli import app
from videospark.app.commands_evaluate import compare

runner = CliRunner()


@pytest.fixture
def judged(monkeypatch):
    """Every call of the evaluation: its options and the clips it asked for."""
    calls = []

    class Verdict:
        def to_dict(self):
            accuracy = {"color": {"value": 0.5 * len(calls), "count": 3}}
            return {"accuracy": accuracy, "entropy_ratio": {"color": 1.0, "shape": None}}

        def markdown(self):
            return "| accuracy |"

    def evaluate(make_clips, **options):
        calls.append((options, make_clips(["a red circle", "a square", "a cross"], [0, 1, 0])))
        return Verdict()

    module = types.ModuleType("videospark.evaluation.run")
    module.evaluate = evaluate
    monkeypatch.setitem(sys.modules, "videospark.evaluation.run", module)
    return calls


def test_numbers_against_a_teacher(judged, model_folder, tmp_path):
    numbers, sheet = tmp_path / "sub" / "numbers.json", tmp_path / "sub" / "sheet.png"
    arguments = ["--model", model_folder, "--recipe", "tiny-sparse-50", "--against", "dense", "--captions", 3]
    arguments += ["--batch-size", 2, "--json", numbers, "--sheet", sheet, "--device", "cpu", "--guidance", 1]
    result = runner.invoke(app, ["evaluate", *(str(a) for a in arguments)])
    assert result.exit_code == 0, result.stderr
    (options, clips), (_, teacher_clips) = judged
    assert options["num_captions"] == 3 and options["diversity_seeds"] == 8
    assert [clip.shape for clip in clips] == [(5, 64, 64, 3)] * 3
    assert not np.array_equal(clips[0], teacher_clips[0])  # the recipe was really applied to one of them alone
    report = json.loads(numbers.read_text())
    assert report["accuracy_over_teacher"] == 0.5 and report["entropy_over_teacher"] == 1.0
    assert report["denoise_speedup"] > 0
    assert report["seconds"]["clips"] == 3
    assert Image.open(sheet).size == (4 * 64, 3 * 64)
    assert "denoise_speedup" in result.stdout


def test_compare_uses_the_seconds_per_clip():
    def report(accuracy, entropy, seconds):
        return {"accuracy": accuracy, "entropy": entropy, "seconds": {"denoise_seconds_per_clip": seconds}}

    values = compare(report(0.8, {"color": 1.0}, 2.0), report(0.9, {"color": 2.0}, 6.0))
    assert values == pytest.approx(
        {"accuracy_over_teacher": 0.8 / 0.9, "entropy_over_teacher": 0.5, "denoise_speedup": 3.0}
    )
    assert compare(report(0.8, {}, 2.0), report(0.0, {}, 6.0))["entropy_over_teacher"] is None


@pytest.mark.parametrize(
    "wrong", [["--captions", "0"], ["--against-model", "x"], ["--recipe", "no-such"], ["--json", "."]]
)
def test_wrong_options_end_before_loading(wrong, model_folder, monkeypatch):
    from videospark.pipelines import loading

    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("loaded the model before checking"))
    result = runner.invoke(app, ["evaluate", "--model", str(model_folder), *wrong])
    assert result.exit_code == 2 and result.stderr.startswith("error: ")
