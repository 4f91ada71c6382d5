"""Accelerate a stock diffusers pipeline, use it, undo it: `python examples/diffusers_import.py [FOLDER or hub id]`."""

import sys

from diffusers import WanPipeline
from diffusers.utils import export_to_video

import videospark
from videospark.tiny import checkpoint_path

pipe = WanPipeline.from_pretrained(sys.argv[1] if len(sys.argv) > 1 else checkpoint_path())
print(videospark.accelerate(pipe, "sparse-50"))  # a preset, a Recipe, or the path of a recipe file
frames = pipe("a large red circle", height=64, width=64, num_frames=17, num_inference_steps=4).frames[0]
print(export_to_video(frames, "accelerated.mp4", fps=8))
videospark.restore(pipe)  # the very objects that were there before
