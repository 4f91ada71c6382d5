"""Clips for the evaluation: prompts and seeds in batches through a pipeline, with the time of each part."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..evaluation.distribution import SampleStates

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

    An image-to-video pipeline also takes pictures, uint8 `[H, W, 3]`, one per prompt.

    Args:
        pipe: A loaded pipeline, already accelerated or not.
        settings: height, width, num_frames, num_inference_steps, guidance_scale, max_sequence_length.
        batch_size: Clips denoised together.
        on_clips: Called with the number of clips each time a batch is ready.

    Attributes:
        states: Takes the latents of every clip that is returned; None for none.
    """

    def __init__(
        self, pipe: Any, settings: dict[str, Any], *, batch_size: int, on_clips: Callable[[int], None] | None = None
    ) -> None:
        self.pipe, self.settings, self.batch_size = pipe, dict(settings), batch_size
        self.seconds = PartSeconds()
        self.first_clips: list[np.ndarray] = []
        self.states: SampleStates | None = None
        self.image_to_video = "image" in inspect.signature(type(pipe).__call__).parameters
        self._on_clips = on_clips

    def __call__(
        self, prompts: Sequence[str], seeds: Sequence[int], pictures: Sequence[np.ndarray] | None = None
    ) -> list[np.ndarray]:
        for name, given in (("seeds", seeds), ("pictures", pictures)):
            if given is not None and len(given) != len(prompts):
                raise ValueError(f"{name}: got {len(given)} for {len(prompts)} prompts; must be one per prompt")
        clips: list[np.ndarray] = []
        # The stock image-to-video pipeline takes one picture for all of its prompts.
        step = self.batch_size if pictures is None else 1
        for start in range(0, len(prompts), step):
            picture = None if pictures is None else pictures[start]
            chosen = slice(start, start + step)
            clips += self._batch(list(prompts[chosen]), list(seeds[chosen]), picture)
        self.first_clips += clips[: SHEET_CLIPS - len(self.first_clips)] if len(self.first_clips) < SHEET_CLIPS else []
        return clips

    def warm_up(self, *, keep_seconds: bool = False) -> None:
        """One batch that nobody sees: it pays the first call's one-off costs outside of the measured seconds.

        With `keep_seconds` its denoising seconds per clip are appended to `seconds.denoise_per_clip`, for a comparison.
        """
        seconds, on_clips, states = self.seconds, self._on_clips, self.states
        self.seconds, self._on_clips, self.states = PartSeconds(), None, None
        try:
            picture = (
                None if not self.image_to_video else np.zeros((self.settings["height"], self.settings["width"], 3))
            )
            number = self.batch_size if picture is None else 1
            self._batch(["a circle"] * number, [0] * number, None if picture is None else picture.astype(np.uint8))
        finally:
            if keep_seconds:
                seconds.denoise_per_clip += self.seconds.denoise_per_clip
            self.seconds, self._on_clips, self.states = seconds, on_clips, states

    @torch.inference_mode()
    def _batch(self, prompts: list[str], seeds: list[int], picture: np.ndarray | None = None) -> list[np.ndarray]:
        from PIL import Image

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
        extra: dict[str, Any] = {} if picture is None else {"image": Image.fromarray(picture)}
        crossing = None
        if self.states is not None and self.states.crossover is not None:
            crossing = Crossing(self.states.crossover)
            extra["callback_on_step_end"] = crossing
        with self._timed("denoise"), _noise_from(pipe.scheduler, generators):
            latents = pipe(
                prompt_embeds=positive,
                negative_prompt_embeds=negative,
                generator=generators,
                output_type="latent",
                **settings,
                **extra,
            ).frames
        if self.states is not None:
            self.states.final.append(latents.float().cpu())
            if crossing is not None and crossing.state is not None:
                self.states.on_the_way.append(crossing.state.float().cpu())
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


class Crossing:
    """A pipeline's `callback_on_step_end` that keeps the state at one noise level.

    Between two steps the state is a straight line in the noise level, which is what a step of Euler's rule follows.
    There is none where the level lies inside the first step, whose start the pipeline does not show.

    Attributes:
        state: latents at the level; None before it is reached, or inside the first step.
    """

    def __init__(self, level: float) -> None:
        self.level = level
        self.state: torch.Tensor | None = None
        self._before: tuple[float, torch.Tensor] | None = None
        self._passed = False

    def __call__(self, pipe: Any, index: int, time: Any, values: dict[str, Any]) -> dict[str, Any]:
        sigma, latents = float(pipe.scheduler.sigmas[index + 1]), values["latents"]
        if not self._passed and sigma <= self.level + 1e-6:
            self._passed = True
            if abs(sigma - self.level) <= 1e-6:
                self.state = latents.clone()
            elif self._before is not None:
                start, state = self._before
                self.state = latents + (self.level - sigma) / (start - sigma) * (state - latents)
        self._before = (sigma, latents.clone())
        return {}


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
