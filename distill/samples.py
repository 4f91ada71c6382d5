"""Pictures of what the student makes while it trains, always of the same captions and the same noise."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..pipelines.video_io import contact_sheet, frames_to_uint8
from .config import DistillConfig
from .data import PreparedData, padded_embeds
from .flow import Condition, GuidanceScale, VelocityField, euler_step, guided_velocity, levels, shift_time
from .method import teacher_guidance

SAMPLES_FOLDER = "samples"


def uniform_sigmas(steps: int, shift: float) -> tuple[float, ...]:
    """Noise levels of a sampler with steps equal in unshifted time, from 1 to 0."""
    return tuple(shift_time(1 - index / steps, shift) for index in range(steps + 1))


@torch.no_grad()
def decode_latents(vae: Any, processor: Any, latents: torch.Tensor) -> list[np.ndarray]:
    """Normalised latents [B, C, F, h, w] -> clips, uint8 [F, H, W, 3] each."""
    latents = latents.to(vae.device, vae.dtype)
    mean, std = (
        torch.tensor(values, device=latents.device, dtype=latents.dtype).view(1, -1, 1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    video = processor.postprocess_video(vae.decode(latents * std + mean).sample, output_type="np")
    return [frames_to_uint8(clip) for clip in video]


@torch.no_grad()
def sample_latents(
    field: VelocityField,
    noise: torch.Tensor,
    sigmas: tuple[float, ...],
    condition: Condition,
    *,
    guidance_scale: GuidanceScale = 1.0,
    renoise: Callable[[int], torch.Tensor] | None = None,
    visit: Callable[[float, torch.Tensor], None] | None = None,
) -> torch.Tensor:
    """Latents from noise through the given noise levels, the last one 0.

    Args:
        field: velocity of the student.
        noise: state at the first level, [B, C, F, h, w].
        sigmas: levels, descending.
        condition: prompts.
        guidance_scale: of the field; 1 for none.
        renoise: noise after step i; then the clean prediction is noised again instead of Euler's step.
        visit: called with every level that is reached and the state there.
    """
    latents = condition.hold(noise)
    for index, (sigma, target) in enumerate(pairwise(sigmas)):
        start, end = levels(sigma, latents), levels(target, latents)
        velocity = guided_velocity(field, latents, start, condition, guidance_scale)
        if renoise is not None and target > 0:
            clean = euler_step(latents, velocity, start, levels(0.0, latents))
            latents = condition.hold((1 - target) * clean + target * renoise(index))
        else:
            latents = euler_step(latents, velocity, start, end)
        if visit is not None:
            visit(target, latents)
    return latents


class SampleSheets:
    """Draws the pictures of a run; no random number of the training is touched.

    Args:
        config: of the run.
        data: prepared; its first clips give the captions.
        pipe: gives the decoder.
        shift: of the noise levels.
        max_sequence_length: prompts are padded to so many tokens.
        device: of the training.
        uses_dmd: whether the student was trained by distribution matching, so that `dmd.stochastic` counts.
        writes: false for a process that runs the network along with the one that decodes and writes.
    """

    def __init__(
        self,
        config: DistillConfig,
        data: PreparedData,
        pipe: Any,
        *,
        shift: float,
        max_sequence_length: int,
        device: torch.device,
        uses_dmd: bool,
        writes: bool = True,
    ) -> None:
        self._settings, self._vae, self._processor, self._device = (
            config.samples,
            pipe.vae,
            pipe.video_processor,
            device,
        )
        self._folder, self._writes = Path(config.folder) / SAMPLES_FOLDER, writes
        few = config.model.sigmas
        self._sigmas = (*few, 0.0) if few is not None else uniform_sigmas(config.samples.steps, shift)
        model = config.model
        scale = teacher_guidance(model.guidance_scale, model.guidance_scale_2, pipe.config.boundary_ratio)
        self._guidance = 1.0 if few is not None else scale
        self._stochastic = few is not None and uses_dmd and config.dmd.stochastic
        rows = [data.read(index % len(data)) for index in range(min(config.samples.count, len(data)))]
        self.captions = [data.items[index][2] for index in range(len(rows))]
        embeds = padded_embeds([row[1] for row in rows], max_sequence_length).to(device)
        negative = padded_embeds([data.negative_embeds], max_sequence_length).to(device)
        images = data.read_images(range(len(rows)))
        latents, picture = (None if part is None else part.to(device) for part in images)
        self._condition = Condition(embeds, negative, image_latents=latents, image_embeds=picture)
        self._shape = tuple(torch.stack([row[0] for row in rows]).shape)

    def due(self, step: int, last: bool) -> bool:
        """Whether a picture is wanted after `step` iterations."""
        return self._settings.every > 0 and (step % self._settings.every == 0 or last)

    def draw(self, field: VelocityField, step: int) -> Path:
        """Makes the clips, and writes `samples/step-NNNNNNNN.png`: a row per caption, evenly spaced frames."""

        def noise(place: int) -> torch.Tensor:
            generator = torch.Generator().manual_seed(1000 * self._settings.seed + place)
            return torch.randn(self._shape, generator=generator).to(self._device)

        latents = sample_latents(
            field,
            noise(0),
            self._sigmas,
            self._condition,
            guidance_scale=self._guidance,
            renoise=(lambda index: noise(index + 1)) if self._stochastic else None,
        )
        if not bool(torch.isfinite(latents).all()):
            raise FloatingPointError(f"step {step}, samples: got latents that are not finite; must be finite")
        count = self._settings.frames
        path = self._folder / f"step-{step:08d}.png"
        if not self._writes:
            return path
        rows = []
        for start in range(len(latents)):  # one at a time: the decoder needs the most memory
            (clip,) = decode_latents(self._vae, self._processor, latents[start : start + 1])
            rows.append(clip[np.linspace(0, len(clip) - 1, count).round().astype(int)])
        self._folder.mkdir(parents=True, exist_ok=True)
        return contact_sheet(np.concatenate(rows), path, max_frames=count * len(rows), columns=count)
