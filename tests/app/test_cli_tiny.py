"""`videospark tiny`: info, sample, and the call into the training."""

from __future__ import annotations

import json

import imageio.v3 as imageio
import pytest
from typer.testing import CliRunner

from videospark.app.cli import app

runner = CliRunner()


def test_info_counts_the_parameters(model_folder):
    from diffusers import WanTransformer3DModel

    result = runner.invoke(app, ["tiny", "info", "--model", str(model_folder), "--json"])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    transformer = WanTransformer3DModel.from_pretrained(model_folder / "transformer")
    assert report["parameters"]["transformer"] == sum(p.numel() for p in transformer.parameters())
    assert report["defaults"]["num_frames"] == 5
    assert "checkered" in report["vocabulary"]
    assert "transformer" in runner.invoke(app, ["tiny", "info", "--model", str(model_folder)]).stdout
    assert runner.invoke(app, ["tiny", "info", "--model", str(model_folder / "vae")]).exit_code == 2


def test_sample_writes_captioned_clips(tmp_path):
    arguments = [
        "tiny",
        "sample",
        "--count",
        "2",
        "--size",
        "64x48",
        "--frames",
        "5",
        "--output",
        str(tmp_path / "out"),
    ]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    captions = json.loads((tmp_path / "out" / "captions.json").read_text())
    assert sorted(captions) == ["000000.mp4", "000001.mp4"]
    assert imageio.imread(tmp_path / "out" / "000001.mp4").shape == (5, 48, 64, 3)
    assert (tmp_path / "out" / "000001.png").is_file()


@pytest.mark.parametrize("wrong", [["--size", "big"], ["--count", "0"], ["--seed", "-1"], ["--fps", "0"]])
def test_sample_refuses_wrong_numbers_and_leaves_nothing(tmp_path, wrong):
    result = runner.invoke(app, ["tiny", "sample", "--output", str(tmp_path / "out"), *wrong])
    assert result.exit_code == 2
    assert wrong[0].lstrip("-") in result.stderr
    assert not (tmp_path / "out").exists()


def test_train_passes_its_options_on(tmp_path, monkeypatch):
    import videospark.tiny.train

    calls = []

    def record(*arguments, **options):
        calls.append((arguments, options))
        return tmp_path

    monkeypatch.setattr(videospark.tiny.train, "train", record)
    result = runner.invoke(
        app, ["tiny", "train", "--output", str(tmp_path), "--stage", "vae", "--quick", "--no-compile"]
    )
    assert result.exit_code == 0, result.stderr
    assert calls == [((tmp_path, "vae"), {"quick": True, "compile_kernels": False})]
    assert runner.invoke(app, ["tiny", "train", "--stage", "all-of-it"]).exit_code == 2
