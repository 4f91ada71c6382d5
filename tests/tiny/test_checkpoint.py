"""The embedded model: small, plain safetensors, and at home in stock diffusers."""

import json

import numpy as np
import torch
from diffusers import WanImageToVideoPipeline, WanPipeline
from PIL import Image

from videospark.tiny import checkpoint_path, components

LIMIT_BYTES = 16 * 2**20


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


def test_it_is_small_and_holds_nothing_but_data():
    files = [f for f in checkpoint_path().rglob("*") if f.is_file()]
    assert sum(f.stat().st_size for f in files) <= LIMIT_BYTES
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


def test_its_tokenizer_and_defaults_are_those_of_the_code():
    pipe = WanPipeline.from_pretrained(checkpoint_path())
    assert pipe.tokenizer.get_vocab() == components.build_tokenizer().get_vocab()
    defaults = json.loads((checkpoint_path() / "videospark_defaults.json").read_text(encoding="utf-8"))
    assert defaults["num_frames"] == components.NUM_FRAMES and defaults["fps"] == components.FPS
