"""`videospark generate` with an untrained tiny pipeline: files, repetition, refusals before loading."""

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
    return runner.invoke(app, ["generate", "--device", "cpu", *(str(a) for a in arguments)])


@pytest.fixture(scope="module")
def first_clip(model_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("first") / "out" / "clip.mp4"
    result = run(
        "--prompt", "a red circle", "--model", model_folder, "--seed", 0, "--recipe", "tiny-sparse-50",
        "--size", "64x48", "--steps", 3, "--guidance", 2.5, "--output", output, "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout), output, result


def test_three_files_are_written_and_named(first_clip):
    report, output, _ = first_clip
    assert report["video"] == str(output)
    assert imageio.imread(report["video"]).shape == (5, 48, 64, 3)
    assert imageio.imread(report["sheet"]).ndim == 3
    assert json.loads(Path(report["sidecar"]).read_text(encoding="utf-8"))
    assert len(list(output.parent.iterdir())) == 3
    assert report["stages"]


def test_seed_zero_is_kept(first_clip):
    report, _, _ = first_clip
    assert report["seed"] == 0


def test_progress_goes_to_stderr(first_clip):
    _, _, result = first_clip
    assert "3/3" in result.stderr and "s/step" in result.stderr


def test_the_sidecar_repeats_the_clip(first_clip, tmp_path):
    report, _, _ = first_clip
    again = run("--from-sidecar", report["sidecar"], "--output", tmp_path / "again.mp4", "--json")
    assert again.exit_code == 0, again.stderr
    repeated = json.loads(again.stdout)
    assert np.array_equal(imageio.imread(report["video"]), imageio.imread(repeated["video"]))
    assert repeated["seed"] == 0
    other = run("--from-sidecar", report["sidecar"], "--seed", 1, "--output", tmp_path / "other.mp4", "--json")
    assert not np.array_equal(imageio.imread(report["video"]), imageio.imread(json.loads(other.stdout)["video"]))


def test_plain_output_names_files_stages_and_the_drawn_seed(model_folder, tmp_path):
    result = run("--prompt", "a circle", "--model", model_folder, "--output", tmp_path / "clip.mp4")
    assert result.exit_code == 0, result.stderr
    for part in ("clip.mp4", ".png", ".json", "seed", "denoise"):
        assert part in result.stdout


def test_a_picture_becomes_the_first_frame(model_folder, tmp_path):
    picture = tmp_path / "picture.png"
    Image.new("RGB", (64, 64), (200, 30, 30)).save(picture)
    output = tmp_path / "clip.mp4"
    result = run("--prompt", "a circle", "--image", picture, "--model", model_folder, "--seed", 0, "--output", output)
    assert result.exit_code == 0, result.stderr
    assert len(imageio.imread(output)) == 5


@pytest.mark.parametrize(
    ("options", "names"),
    [
        (["--size", "100x64"], ["100"]),
        (["--size", "huge"], ["size", "huge"]),
        (["--size", "64x64", "--height", "64"], ["size"]),
        (["--frames", "6"], ["6", "5"]),
        (["--frames", "0"], ["num_frames"]),
        (["--steps", "0"], ["steps"]),
        (["--seed", "-2"], ["seed"]),
        (["--prompt", "  "], ["prompt"]),
        (["--recipe", "no-such-recipe"], ["no-such-recipe"]),
        (["--model", "no/such/model"], ["model", "no/such/model"]),
        (["--image", "absent.png"], ["absent.png"]),
        (["--output", "clip.txt"], ["output", "clip.txt"]),
        (["--from-sidecar", "absent.json"], ["absent.json"]),
        (["--device", "abacus"], ["abacus"]),
    ],
)
def test_wrong_requests_end_before_loading_and_leave_nothing(options, names, model_folder, tmp_path, monkeypatch):
    from videospark.pipelines import loading

    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("loaded the model before checking"))
    monkeypatch.chdir(tmp_path)
    result = run("--prompt", "a circle", "--model", model_folder, "--output", "out/clip.mp4", *options)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    for name in names:
        assert name in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_output_below_a_file_is_refused(model_folder, tmp_path):
    (tmp_path / "file").write_text("")
    result = run("--prompt", "a circle", "--model", model_folder, "--output", tmp_path / "file" / "clip.mp4")
    assert result.exit_code == 2 and "output" in result.stderr


def test_without_a_prompt(model_folder):
    result = run("--model", model_folder)
    assert result.exit_code == 2 and "prompt" in result.stderr


def test_not_a_number_fails_with_code_one_and_writes_no_file(model_folder, tmp_path, monkeypatch):
    from videospark.pipelines import loading

    load = loading.load

    def load_broken(*arguments, **options):
        pipe = load(*arguments, **options)
        pipe.transformer.proj_out.weight.data.fill_(float("nan"))
        return pipe

    monkeypatch.setattr(loading, "load", load_broken)
    output = tmp_path / "out" / "clip.mp4"
    result = run("--prompt", "a circle", "--model", model_folder, "--output", output)
    assert result.exit_code == 1
    assert "step" in result.stderr
    assert not output.exists()
