"""A stand-in for the engine: real results without a model, as fast or slow, and as faulty, as a test wants."""

from __future__ import annotations

import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch

from videospark.pipelines.generation import GenerationResult

SIZE = {"height": 32, "width": 32, "num_frames": 5, "num_inference_steps": 3, "guidance_scale": 1.0, "fps": 8}


class FakeEngine:
    """Frames of one colour that follows from prompt and seed; "fail", "memory" or "nan" in a prompt goes wrong so."""

    def __init__(self, step_seconds=0.0, log=None):
        self.step_seconds, self.log = step_seconds, log
        self.pipe = SimpleNamespace(config=SimpleNamespace())
        self.ran, self.freed, self.running = [], 0, 0
        self.gate = None

    def load(self):
        """Nothing to load."""

    def resolve(self, request, recipe=None):
        values = {name: getattr(request, name) or value for name, value in SIZE.items()}
        return replace(request, seed=0 if request.seed is None else request.seed, **values)

    def free_memory(self):
        self.freed += 1

    def preview(self, latents):
        return np.full((8, 8, 3), int(latents[0, 0, 0, 0, 0]), np.uint8)

    def run(self, request, recipe=None, *, on_step=None, on_clean_latents=None):
        assert self.running == 0, "two jobs at once on one device"
        self.running += 1
        try:
            return self._run(request, recipe, on_step, on_clean_latents)
        finally:
            self.running -= 1

    def _run(self, request, recipe, on_step, on_clean_latents):
        self.ran.append((request.prompt, request.seed))
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(f"{request.prompt}\n")
        if "fail" in request.prompt:
            raise ValueError("prompt: got one that fails; must not")
        if "memory" in request.prompt:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB")
        if "nan" in request.prompt:
            raise FloatingPointError("latents: NaN or infinite after step 1 of 3")
        for index in range(request.num_inference_steps):
            if self.gate is not None:
                assert self.gate.acquire(timeout=30)
            time.sleep(self.step_seconds)
            if on_clean_latents is not None:
                on_clean_latents(index, torch.full((1, 4, 2, 4, 4), float(index)))
            if on_step is not None:
                on_step(index, request.num_inference_steps, self.step_seconds)
        colour = (hash_of(request.prompt) + request.seed * 40) % 256
        frames = np.full((request.num_frames, request.height, request.width, 3), colour, np.uint8)
        stages = {"seconds": {"text": 0.1, "denoise": 0.2, "decode": 0.1}, "step_seconds": [0.1] * 3,
                  "total_seconds": 0.4, "peak_memory": {}, "process_peak_rss_bytes": 1}  # fmt: skip
        return GenerationResult(frames, request, stages, None)


def hash_of(text):
    """The same in every process, unlike `hash`."""
    return sum(text.encode()) % 200
