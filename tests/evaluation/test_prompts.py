"""Any model by prompts of one's own, through the eyes of a picture model."""

import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from videospark.app.cli import app
from videospark.evaluation.distribution import SampleStates
from videospark.evaluation.run import compare, evaluate_prompts


def test_prompts_are_made_once_and_some_again_with_further_seeds():
    asked = []

    def make_clips(prompts, seeds):
        asked.extend(zip(prompts, seeds, strict=True))
        generators = [np.random.default_rng(seed) for seed in seeds]
        clips = [g.integers(0, 256, (5, 16, 16, 3), dtype=np.uint8) for g in generators]
        states.final.append(torch.stack([torch.full((2,), float(seed)) for seed in seeds]))
        return clips

    states = SampleStates()
    feature = lambda clip: clip[0, 0, 0].astype(float)  # noqa: E731
    result = evaluate_prompts(
        make_clips,
        ["a", "b", "c"],
        diversity_prompts=1,
        diversity_seeds=2,
        batch_size=2,
        feature=feature,
        states=states,
    )
    assert [p for p, _ in asked] == ["a", "b", "c", "a", "a"] and len({s for _, s in asked}) == 5
    assert result.samples.features.shape == (3, 3) and result.samples.latents.shape == (3, 2)
    assert result.samples.varied_space == "features" and result.samples.varied[0].shape == (2, 3)
    assert "accuracy" not in result.markdown() and "motion" in result.markdown()
    same = compare(result, result)
    assert same["accuracy_over_teacher"] is None
    assert same["distribution_to_teacher"]["end_distance"]["value"] == 0
    json.dumps(result.to_dict(), allow_nan=False)
    with pytest.raises(ValueError, match="diversity_prompts: got 4"):
        evaluate_prompts(make_clips, ["a"], diversity_prompts=4)


def test_the_command_line_takes_prompts_and_a_picture_model(tiny_pipeline, tmp_path):
    from transformers import Dinov2Config, Dinov2Model, ViTImageProcessor

    config = Dinov2Config(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14)
    Dinov2Model(config).save_pretrained(tmp_path / "dino")
    ViTImageProcessor(size={"height": 28, "width": 28}).save_pretrained(tmp_path / "dino")
    tiny_pipeline.save_pretrained(tmp_path / "model")
    defaults = {"height": 32, "width": 32, "num_frames": 5, "fps": 8, "num_inference_steps": 1, "guidance_scale": 1.0}
    (tmp_path / "model" / "videospark_defaults.json").write_text(json.dumps(defaults | {"max_sequence_length": 16}))
    (tmp_path / "prompts.txt").write_text("a red circle\n\na blue square\n")
    options = ["--model", tmp_path / "model", "--prompts", tmp_path / "prompts.txt", "--feature", tmp_path / "dino",
               "--against", "dense", "--seeds", 2, "--diversity-captions", 1, "--device", "cpu",
               "--json", tmp_path / "numbers.json"]  # fmt: skip
    result = CliRunner().invoke(app, ["evaluate", *map(str, options)])
    assert result.exit_code == 0, result.stderr
    report = json.loads((tmp_path / "numbers.json").read_text())
    assert report["accuracy"] == {} and report["accuracy_mean"] is None
    assert report["seconds"]["clips"] == 4
    assert set(report["distribution"]) == {"motion", "vendi", "pairwise_distance"}
    found = report["distribution_to_teacher"]
    assert found["end_distance"]["value"] == 0 and found["frechet"]["count"] == 2  # the same model
    for wrong, message in (
        (["--image-to-video"], "image_to_video"),
        (["--prompts", str(tmp_path / "x")], "prompts: got"),
        (["--captions", "3"], "captions: got 3; must be at most 2"),
    ):
        refused = CliRunner().invoke(app, ["evaluate", *map(str, options), *wrong])
        assert refused.exit_code == 2 and message in refused.stderr
