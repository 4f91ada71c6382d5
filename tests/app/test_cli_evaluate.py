"""`videospark evaluate` on real clips of an untrained pipeline."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from PIL import Image
from typer.testing import CliRunner

from videospark.app.cli import app
from videospark.app.commands_evaluate import denoise_speedup

runner = CliRunner()


def run(*arguments):
    return runner.invoke(app, ["evaluate", *(str(a) for a in arguments)])


def test_numbers_against_a_teacher(model_folder, tmp_path):
    numbers, sheet, tables = (tmp_path / "sub" / name for name in ("numbers.json", "sheet.png", "tables.md"))
    result = run(
        "--model", model_folder, "--recipe", "tiny-sparse-50", "--against", "dense", "--captions", 3, "--batch-size", 2,
        "--diversity-captions", 1, "--seeds", 2, "--json", numbers, "--sheet", sheet, "--markdown", tables,
        "--device", "cpu", "--guidance", 1,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    report = json.loads(numbers.read_text())
    assert report["recipe"] == "tiny-sparse-50" and report["teacher"]["recipe"] == "dense"
    assert set(report["accuracy"]) == {"size", "color", "shape", "motion", "background", "pattern", "count"}
    assert 0 <= report["accuracy_mean"] < 0.6  # untrained
    assert set(report["entropy"]) <= {"size", "color", "shape", "motion", "background", "pattern"}
    assert {"accuracy_over_teacher", "entropy_over_teacher"} <= set(report)
    assert report["denoise_speedup"] > 0
    assert report["seconds"]["clips"] == 5 == report["teacher"]["seconds"]["clips"]
    assert report["settings"]["guidance_scale"] == 1
    assert Image.open(sheet).size == (4 * 64, 5 * 64)
    assert (
        set(report["distribution"])
        == {"motion", "vendi", "pairwise_distance"}
        == set(report["teacher"]["distribution"])
    )
    distances = report["distribution_to_teacher"]
    assert distances["end_distance"]["count"] == 3 and distances["end_distance"]["value"] > 0
    assert {"frechet", "sliced_wasserstein", "squared_mmd", "motion_over_teacher"} <= set(distances)
    assert "crossover_distance" not in distances  # neither is a few-step student
    assert "Distance to the teacher" in tables.read_text()
    assert "denoise_speedup" in result.stdout and "Caption accuracy" in tables.read_text()


def test_image_to_video_keeps_its_first_frame(model_folder, tmp_path):
    numbers = tmp_path / "numbers.json"
    result = run(
        "--model", model_folder, "--image-to-video", "--captions", 2, "--json", numbers, "--device", "cpu",
        "--guidance", 1, "--steps", 1,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    report = json.loads(numbers.read_text())
    assert report["first_frame_psnr_db"]["worst"] <= report["first_frame_psnr_db"]["mean"]
    assert report["entropy"] == {} and report["seconds"]["clips"] == 2


def test_speed_is_the_ratio_of_medians_taken_in_turns():
    order = []

    class Maker:
        def __init__(self, name, seconds):
            self.name, self.measured = name, iter(seconds)
            self.seconds = SimpleNamespace(denoise_per_clip=[])

        def warm_up(self, *, keep_seconds):
            assert keep_seconds
            order.append(self.name)
            self.seconds.denoise_per_clip.append(next(self.measured))

    assert denoise_speedup(Maker("ours", [1.0, 2.0, 90.0]), Maker("teacher", [6.0, 4.0, 8.0])) == 3.0
    assert order == ["ours", "teacher"] * 3


@pytest.mark.parametrize(
    "wrong",
    [
        ["--captions", "0"],
        ["--against-model", "x"],
        ["--against-guidance", "2"],
        ["--recipe", "no-such"],
        ["--json", "."],
    ],
)
def test_wrong_options_end_before_loading(wrong, model_folder, monkeypatch):
    from videospark.pipelines import loading

    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("loaded the model before checking"))
    result = runner.invoke(app, ["evaluate", "--model", str(model_folder), *wrong])
    assert result.exit_code == 2 and result.stderr.startswith("error: ")
