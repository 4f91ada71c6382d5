"""Clips for the evaluation: prompts and seeds in batches through a pipeline, with the time of each part."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

SHEET_CLIPS = 8
"""Number of clips kept for a picture."""


@dataclass
class PartSeconds:
    """Seconds spent in each part of the generation, and the number of clips they bought."""

    encode: float = 0.0
    denoise: float = 0.0
    decode: float = 0.0
    clips: int = 0
    denoise_per_clip: list[float] = field(default_factory=list)
    """One value per batch: its denoising seconds divided by its clips."""

    def to_dict(self) -> dict[str, float | int]:
        """Totals, and the denoising seconds per clip."""
        return {
            "encode_seconds": round(self.encode, 4),
            "denoise_seconds": round(self.denoise, 4),
            "decode_seconds": round(self.decode, 4),
            "clips": self.clips,
            "denoise_seconds_per_clip": round(self.denoise / max(self.clips, 1), 5),
        }


class ClipMaker:
    """`maker(prompts, seeds)` -> clips, uint8 `[F, H, W, 3]` each; clip i depends on prompt i and seed i alone.

    Args:
        pipe: A loaded pipeline, already accelerated or not.
        settings: height, width, num_frames, num_inference_steps, guidance_scale, max_sequence_length.
        batch_size: Clips denoised together.
        on_clips: Called with the number of clips each time a batch is ready.
    """

    def __init__(
        self, pipe: Any, settings: dict[str, Any], *, batch_size: int, on_clips: Callable[[int], None] | None = None
    ) -> None:
        self.pipe, self.settings, self.batch_size = pipe, dict(settings), batch_size
        self.seconds = PartSeconds()
        self.first_clips: list[np.ndarray] = []
        self._on_clips = on_clips

    def __call__(self, prompts: Sequence[str], seeds: Sequence[int]) -> list[np.ndarray]:
        if len(prompts) != len(seeds):
            raise ValueError(f"seeds: got {len(seeds)} for {len(prompts)} prompts; must be one per prompt")
        clips: list[np.ndarray] = []
        for start in range(0, len(prompts), self.batch_size):
            chosen = slice(start, start + self.batch_size)
            clips += self._batch(list(prompts[chosen]), list(seeds[chosen]))
        self.first_clips += clips[: SHEET_CLIPS - len(self.first_clips)] if len(self.first_clips) < SHEET_CLIPS else []
        return clips

    def warm_up(self) -> None:
        """Pay the first call's one-off costs (allocation, kernel choice) outside of the measured seconds."""
        seconds, on_clips = self.seconds, self._on_clips
        self.seconds, self._on_clips = PartSeconds(), None
        try:
            self._batch(["a circle"] * self.batch_size, [0] * self.batch_size)
        finally:
            self.seconds, self._on_clips = seconds, on_clips

    @torch.inference_mode()
    def _batch(self, prompts: list[str], seeds: list[int]) -> list[np.ndarray]:
        from ..pipelines.video_io import frames_to_uint8

        pipe, settings = self.pipe, self.settings
        before = self.seconds.denoise
        with self._timed("encode"):
            positive, negative = pipe.encode_prompt(
                prompt=prompts,
                negative_prompt=[""] * len(prompts),
                do_classifier_free_guidance=settings["guidance_scale"] > 1,
                max_sequence_length=settings["max_sequence_length"],
                device=pipe._execution_device,
            )
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
        with self._timed("denoise"), _noise_from(pipe.scheduler, generators):
            latents = pipe(
                prompt_embeds=positive,
                negative_prompt_embeds=negative,
                generator=generators,
                output_type="latent",
                **settings,
            ).frames
        with self._timed("decode"):
            video = decode(pipe, latents)
        self.seconds.clips += len(prompts)
        self.seconds.denoise_per_clip.append((self.seconds.denoise - before) / len(prompts))
        if self._on_clips:
            self._on_clips(len(prompts))
        return [frames_to_uint8(clip) for clip in video]

    @contextmanager
    def _timed(self, part: str):
        start = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # kernels run behind the calls; without this the next part pays for them
        setattr(self.seconds, part, getattr(self.seconds, part) + time.perf_counter() - start)


@contextmanager
def _noise_from(scheduler: Any, generators: list[torch.Generator]) -> Iterator[None]:
    """A stochastic few-step scheduler draws noise of its own: from these, and afterwards from nobody's."""
    if not hasattr(scheduler, "set_generator"):
        yield
        return
    scheduler.set_generator(generators)
    try:
        yield
    finally:
        scheduler.set_generator(None)


def decode(pipe: Any, latents: torch.Tensor) -> np.ndarray:
    """Latents `[B, C, f, h, w]` -> frames `[B, F, H, W, 3]`, float in [0, 1]."""
    config = pipe.vae.config
    latents = latents.to(pipe.vae.device, pipe.vae.dtype)
    mean, std = (
        torch.tensor(values, device=latents.device, dtype=latents.dtype).view(1, -1, 1, 1, 1)
        for values in (config.latents_mean, config.latents_std)
    )
    return pipe.video_processor.postprocess_video(pipe.vae.decode(latents * std + mean).sample, output_type="np")
