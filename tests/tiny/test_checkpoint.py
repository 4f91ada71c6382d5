"""The embedded model: small, plain safetensors, and at home in stock diffusers."""

import json

import numpy as np
import pytest
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from PIL import Image

import videospark
from videospark.core.config import ConfigError
from videospark.pipelines.generation import GenerationRequest, generate
from videospark.tiny import EMBEDDED, checkpoint_path, components

LIMIT_BYTES = {"tiny": 16 * 2**20, "tiny-3step": 12 * 2**20}


def _generate(pipe, **inputs):
    pipe.set_progress_bar_config(disable=True)
    return pipe(
        prompt="a large red circle moving right on a plain white background",
        height=64,
        width=64,
        num_frames=5,
        num_inference_steps=2,
        guidance_scale=3.0,
        max_sequence_length=32,
        generator=torch.Generator().manual_seed(0),
        output_type="np",
        **inputs,
    ).frames[0]


@pytest.mark.parametrize("name", EMBEDDED)
def test_it_is_small_and_holds_nothing_but_data(name):
    files = [f for f in checkpoint_path(name).rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= LIMIT_BYTES[name]
    assert {f.suffix for f in files} <= {".json", ".safetensors"}
    assert not [f for f in files if f.name == "config.json" and "_name_or_path" in f.read_text(encoding="utf-8")]


def test_stock_pipelines_generate_from_it():
    pipe = WanPipeline.from_pretrained(checkpoint_path())
    frames = _generate(pipe)
    assert frames.shape == (5, 64, 64, 3) and np.isfinite(frames).all() and frames.std() > 0.01
    image = Image.new("RGB", (64, 64), (240, 240, 240))
    parts = {k: v for k, v in pipe.components.items() if k in ("tokenizer", "text_encoder", "vae", "scheduler")}
    to_video = WanImageToVideoPipeline(transformer=pipe.transformer, expand_timesteps=True, **parts)
    frames = _generate(to_video, image=image)
    assert frames.shape == (5, 64, 64, 3) and np.isfinite(frames).all()


def test_the_student_comes_with_its_recipe_and_runs_in_three_steps():
    pipe = videospark.load(checkpoint_path("tiny-3step"), device="cpu")
    result = generate(pipe, GenerationRequest("a large red circle", seed=0, height=64, width=64, num_frames=5))
    assert result.request.num_inference_steps == 3 and result.request.guidance_scale == 1.0
    assert len(result.stages["step_seconds"]) == 3
    rows = result.report["layers"]
    assert len(rows) == 6 and all(row["branch"] == "rola" and row["branch_weights"] == "given" for row in rows)
    assert all(row["backend"] not in ("dense", "auto") for row in rows)
    assert all(row["nominal_sparsity"] == pytest.approx(0.9) for row in rows)
    with pytest.raises(ConfigError, match="num_inference_steps"):
        generate(pipe, GenerationRequest("a circle", seed=0, num_inference_steps=50))


def test_an_unknown_name_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="tiny-3step"):
        checkpoint_path("tiny-5step")


def test_its_tokenizer_and_defaults_are_those_of_the_code():
    pipe = WanPipeline.from_pretrained(checkpoint_path())
    assert pipe.tokenizer.get_vocab() == components.build_tokenizer().get_vocab()
    defaults = json.loads((checkpoint_path() / "videospark_defaults.json").read_text(encoding="utf-8"))
    assert defaults["num_frames"] == components.NUM_FRAMES and defaults["fps"] == components.FPS
