"""`videospark compare` with an untrained tiny pipeline in both roles: its files, the same noise, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from videospark.app.cli import app

runner = CliRunner()


def run(*arguments):
    return runner.invoke(app, ["compare", "--device", "cpu", *(str(a) for a in arguments)])


@pytest.fixture(scope="module")
def shown(model_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("compare") / "clip.mp4"
    both = ("--model", model_folder, "--against", model_folder)
    result = run(*both, "--prompt", "a red circle", "--seed", 3, "--output", output, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout), output


def test_both_clips_and_both_beside_each_other_are_written(shown):
    report, output = shown
    student, teacher = (imageio.imread(report[role]["video"]) for role in ("student", "teacher"))
    assert report["student"]["video"] == str(output)
    assert np.array_equal(student, teacher), "one model and one seed"
    both = imageio.imread(report["side_by_side"]["video"])
    frames, height, width, _ = student.shape
    assert both.shape[0] == frames and both.shape[2] == 2 * width and both.shape[1] > height
    with Image.open(report["side_by_side"]["gif"]) as gif:
        assert gif.is_animated and gif.n_frames == frames and gif.size[0] == 2 * width
    assert report["denoise_speedup"] > 0
    for role in ("student", "teacher"):
        assert json.loads(Path(report[role]["sidecar"]).read_text(encoding="utf-8"))["seed"] == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--output", "clip.gif"], "must end in .mp4"),
        (["--prompt", " "], "prompt"),
        (["--seed", -1], "seed"),
        (["--against", "no-such"], "model: got 'no-such'"),
    ],
)
def test_wrong_input_is_refused_before_loading(arguments, words, model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run("--model", model_folder, "--prompt", "a red circle", *arguments)
    assert result.exit_code == 2 and words in result.stderr
    assert not list(tmp_path.rglob("*.mp4"))
