"""The embedded student: small, at home in stock diffusers, three steps by its own recipe, as good as measured."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import WanPipeline
from typer.testing import CliRunner

import videospark
from videospark import tiny
from videospark.app.cli import app
from videospark.evaluation.run import evaluate
from videospark.pipelines.acceleration import current_report
from videospark.pipelines.generation import GenerationRequest, generate
from videospark.tiny import EMBEDDED, checkpoint_path

STUDENT = "tiny-3step"


def test_all_embedded_models_together_are_small_and_hold_nothing_but_data():
    package = Path(tiny.__file__).parent
    files = [f for folder in EMBEDDED.values() for f in (package / folder).rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= 16 * 2**20
    assert {f.suffix for f in files} <= {".json", ".safetensors"}
    with pytest.raises(ValueError, match="must be one of tiny, tiny-3step"):
        checkpoint_path("tiny-4step")


def test_stock_diffusers_loads_it():
    pipe = WanPipeline.from_pretrained(checkpoint_path(STUDENT))
    teacher = WanPipeline.from_pretrained(checkpoint_path())
    student_weights, teacher_weights = pipe.transformer.state_dict(), teacher.transformer.state_dict()
    assert student_weights.keys() == teacher_weights.keys()
    assert any(not torch.equal(student_weights[k].float(), teacher_weights[k].float()) for k in teacher_weights)


def test_it_takes_three_steps_without_guidance_and_sparsely():
    pipe = videospark.load(checkpoint_path(STUDENT), device="cpu")
    pipe.set_progress_bar_config(disable=True)
    result = generate(pipe, GenerationRequest("a large red circle moving right on a plain white background", seed=0))
    assert result.request.num_inference_steps == 3 and result.request.guidance_scale == 1.0
    assert result.frames.shape == (17, 192, 192, 3)
    report = current_report(pipe)
    kept = {row.get("keep_ratio") for row in report.layers}
    assert kept == {
        json.loads((checkpoint_path(STUDENT) / "videospark_recipe.json").read_text())["attention"]["keep_ratio"]
    }


def test_its_clips_show_what_their_captions_say():
    """Eight held-out captions; the measured shares are in docs/quality.md."""
    pipe = videospark.load(checkpoint_path(STUDENT), device="cpu")
    pipe.set_progress_bar_config(disable=True)

    def make(prompts, seeds):
        return [generate(pipe, GenerationRequest(p, seed=s)).frames for p, s in zip(prompts, seeds, strict=True)]

    result = evaluate(make, num_captions=8, diversity_captions=0)
    assert result.accuracy["background"].value >= 0.9 and result.accuracy["color"].value >= 0.7
    assert result.mean_accuracy >= 0.6


def test_commands_know_it_by_name(tmp_path):
    arguments = ["--model", STUDENT, "--prompt", "a red circle", "--device", "cpu", "--output", str(tmp_path / "a.mp4")]
    result = CliRunner().invoke(app, ["generate", *arguments])
    assert result.exit_code == 0, result.stderr
    sidecar = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert STUDENT in sidecar["model"]
    again = CliRunner().invoke(
        app,
        [
            "generate",
            "--from-sidecar",
            str(tmp_path / "a.json"),
            "--output",
            str(tmp_path / "b.mp4"),
            "--device",
            "cpu",
        ],
    )
    assert again.exit_code == 0, again.stderr
    import imageio.v3 as imageio

    assert np.array_equal(*(imageio.imread(tmp_path / f"{name}.mp4") for name in "ab"))
