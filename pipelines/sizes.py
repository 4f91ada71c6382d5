"""Which heights, widths and frame counts a model can make: one rule, read from the loaded model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..core.config import require

_PIPELINE_MULTIPLE = 16
"""The Wan pipelines of diffusers refuse any height or width that 16 does not divide."""


@dataclass(frozen=True)
class Strides:
    """Pixels per token along height and width; frames per latent frame, and latent frames per token."""

    height: int
    width: int
    frames: int
    frame_patch: int


def _denoiser(pipe: Any) -> Any:
    return pipe.transformer if pipe.transformer is not None else pipe.transformer_2


def strides(pipe: Any) -> Strides:
    """Strides of VAE and patch embedding together."""
    patch_t, patch_h, patch_w = _denoiser(pipe).config.patch_size
    spatial = pipe.vae_scale_factor_spatial
    return Strides(
        math.lcm(spatial * patch_h, _PIPELINE_MULTIPLE),
        math.lcm(spatial * patch_w, _PIPELINE_MULTIPLE),
        pipe.vae_scale_factor_temporal,
        patch_t,
    )


def _nearest(value: int, step: int, offset: int = 0) -> str:
    below = max((value - offset) // step * step, 0 if offset else step)
    above = -(-(value - offset) // step) * step
    candidates = sorted({below + offset, max(above, below) + offset})
    return " or ".join(map(str, candidates))


def check_size(pipe: Any, height: int, width: int, num_frames: int) -> None:
    """Raises ConfigError, naming the nearest valid values, unless the model can make exactly this size.

    Args:
        pipe: a Wan pipeline of diffusers.
        height: pixels.
        width: pixels.
        num_frames: frames of the video.
    """
    step = strides(pipe)
    for field, value in (("height", height), ("width", width), ("num_frames", num_frames)):
        integral = isinstance(value, int) and not isinstance(value, bool)
        require(integral and value > 0, field, value, "a positive whole number")
    for field, value, multiple in (("height", height, step.height), ("width", width, step.width)):
        rule = f"a multiple of {multiple}; nearest: {_nearest(value, multiple)}"
        require(value % multiple == 0, field, value, rule)
    period = step.frames * step.frame_patch
    offset = 1 if step.frame_patch == 1 else step.frames * (step.frame_patch - 1) + 1
    rule = f"{offset} plus a multiple of {period}; nearest: {_nearest(num_frames, period, offset)}"
    require(num_frames >= offset and (num_frames - offset) % period == 0, "num_frames", num_frames, rule)
    _check_positions(pipe, height, width, num_frames, step)


def _check_positions(pipe: Any, height: int, width: int, num_frames: int, step: Strides) -> None:
    """Rotary positions are tabulated up to a length; beyond it the model fails deep inside."""
    config = _denoiser(pipe).config
    limit = getattr(config, "rope_max_seq_len", None)
    if limit is None:
        return
    spatial = pipe.vae_scale_factor_spatial
    limits = (
        ("height", height, limit * spatial * config.patch_size[1]),
        ("width", width, limit * spatial * config.patch_size[2]),
        ("num_frames", num_frames, (limit * step.frame_patch - 1) * step.frames + 1),
    )
    for field, value, largest in limits:
        require(value <= largest, field, value, f"at most {largest}, the {limit} positions this model knows")
