"""Flow matching in the words of Wan: noise levels, the shift, Euler steps and guidance.

x_s = (1 - s) x_0 + s e with e normal; the velocity is v = e - x_0, so x_0 = x_s - s v and e = x_s + (1 - s) v. The
network is given the time 1000 s. A schedule is uniform in the unshifted time u; for a shift k,
s = k u / (1 + (k - 1) u).

Shapes: latents [B, C, F, h, w]; noise levels float32 [B].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

import torch

Number = TypeVar("Number", float, torch.Tensor)


@dataclass(frozen=True)
class Condition:
    """What the clips of a batch are conditioned on.

    Attributes:
        prompt_embeds: [B, S, text_dim], padded with zeros as the Wan pipelines do.
        negative_embeds: the same for the negative prompt, [1, S, text_dim].
        first_frame: clean first latent frame [B, C, 1, h, w] for image-to-video, or None.
        keeps_first: bool [B], which clips are given that frame; None where `first_frame` is None.
        image_latents: [B, channels, F, h, w], for models that are given the first frame in channels beside the noisy
            latents (Wan 2.1 and 2.2 I2V): which frames are given, and the latents of those; else None.
        image_embeds: [B, tokens, image_dim] of the first frame, for models that attend to it (Wan 2.1 I2V); else None.
    """

    prompt_embeds: torch.Tensor
    negative_embeds: torch.Tensor
    first_frame: torch.Tensor | None = None
    keeps_first: torch.Tensor | None = None
    image_latents: torch.Tensor | None = None
    image_embeds: torch.Tensor | None = None

    def unconditional(self) -> Condition:
        """The same with the negative prompt for every clip; a given first frame stays, as in the pipelines."""
        return replace(self, prompt_embeds=self.negative_embeds.expand_as(self.prompt_embeds))

    def rows(self, chosen: torch.Tensor) -> Condition:
        """Of the clips that `chosen` (bool [B] or indices) names."""
        names = ("prompt_embeds", "first_frame", "keeps_first", "image_latents", "image_embeds")
        given = {name: value[chosen] for name in names if (value := getattr(self, name)) is not None}
        return replace(self, **given)

    def hold(self, latents: torch.Tensor) -> torch.Tensor:
        """`latents` with the given first frames in their place."""
        if self.first_frame is None:
            return latents
        first = torch.where(self._mask(), self.first_frame.to(latents.dtype), latents[:, :, :1])
        return torch.cat([first, latents[:, :, 1:]], dim=2)

    def still(self, velocity: torch.Tensor) -> torch.Tensor:
        """`velocity` with zeros where a first frame is given: it does not move, and is not scored."""
        if self.first_frame is None:
            return velocity
        first = torch.where(self._mask(), torch.zeros_like(velocity[:, :, :1]), velocity[:, :, :1])
        return torch.cat([first, velocity[:, :, 1:]], dim=2)

    def _mask(self) -> torch.Tensor:
        assert self.keeps_first is not None
        return self.keeps_first.view(-1, 1, 1, 1, 1)


@dataclass(frozen=True)
class TwoScales:
    """Guidance scales of two experts: `high` at noise levels from `boundary` on, `low` below it."""

    high: float
    low: float
    boundary: float

    def at(self, sigma: torch.Tensor) -> torch.Tensor:
        """The scale of each noise level, of the shape of `sigma`."""
        return torch.where(sigma >= self.boundary, self.high, self.low)


GuidanceScale = float | TwoScales
"""Of the teacher: one, or one of each expert."""

VelocityField = Callable[[torch.Tensor, torch.Tensor, Condition], torch.Tensor]
"""Maps latents, noise levels and condition to the velocity, float32 of the latents' shape."""


def shift_time(time: Number, shift: float) -> Number:
    """Noise level s of the unshifted time u."""
    return shift * time / (1 + (shift - 1) * time)


def unshift_time(sigma: Number, shift: float) -> Number:
    """Unshifted time u of the noise level s; the inverse of `shift_time`."""
    return sigma / (shift - (shift - 1) * sigma)


def broadcast(sigma: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
    """[B] as [B, 1, 1, ...] of the latents' rank."""
    return sigma.reshape(-1, *[1] * (latents.ndim - 1))


def add_noise(clean: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """(1 - s) x_0 + s e."""
    s = broadcast(sigma, clean)
    return (1 - s) * clean + s * noise


def euler_step(
    latents: torch.Tensor, velocity: torch.Tensor, sigma: torch.Tensor, target: torch.Tensor
) -> torch.Tensor:
    """x + (s' - s) v: along the velocity from the levels `sigma` to the levels `target`, both [B]."""
    return latents + broadcast(target - sigma, latents) * velocity


def guided_velocity(
    field: VelocityField,
    latents: torch.Tensor,
    sigma: torch.Tensor,
    condition: Condition,
    guidance_scale: GuidanceScale,
) -> torch.Tensor:
    """Classifier-free guidance u + g (c - u); a scale of 1 is the conditional velocity alone, at half the cost."""
    conditional = field(latents, sigma, condition)
    if guidance_scale == 1.0:
        return conditional
    unconditional = field(latents, sigma, condition.unconditional())
    difference = conditional - unconditional
    if isinstance(guidance_scale, TwoScales):
        return unconditional + broadcast(guidance_scale.at(sigma), latents) * difference
    return unconditional + guidance_scale * difference


def levels(sigma: float, latents: torch.Tensor) -> torch.Tensor:
    """The same noise level for every clip of a batch, float32 [B]."""
    return torch.full((latents.shape[0],), sigma, dtype=torch.float32, device=latents.device)


@torch.no_grad()
def solve(
    field: VelocityField,
    latents: torch.Tensor,
    sigmas: Sequence[float],
    condition: Condition,
    guidance_scale: GuidanceScale = 1.0,
) -> torch.Tensor:
    """Euler through the given noise levels, from `latents` at the first to the last; no gradient."""
    for sigma, target in pairwise(sigmas):
        start, end = levels(sigma, latents), levels(target, latents)
        velocity = guided_velocity(field, latents, start, condition, guidance_scale)
        latents = euler_step(latents, velocity, start, end)
    return latents


@torch.no_grad()
def states_at_knots(
    field: VelocityField,
    latents: torch.Tensor,
    knots: Sequence[float],
    steps_per_phase: int,
    shift: float,
    condition: Condition,
    guidance_scale: GuidanceScale = 1.0,
) -> torch.Tensor:
    """The trajectory that starts at `latents`, at every knot: [B, N + 1, C, F, h, w]; no gradient.

    Second-order Adams-Bashforth steps, as many in each phase, equal in unshifted time: with h and h' the lengths of
    this step and the last, x + h (v + h / (2 h') (v - v')).

    Args:
        field: the teacher.
        latents: noise, at knot 0.
        knots: k_0 > ... > k_N, noise levels.
        steps_per_phase: of the solver, between two knots.
        shift: of the unshifted time.
        condition: of the clips.
        guidance_scale: of classifier-free guidance.
    """
    latents = condition.hold(latents)
    states = [latents]
    before: tuple[torch.Tensor, float] | None = None
    for top, edge in pairwise(knots):
        high, low = unshift_time(top, shift), unshift_time(edge, shift)
        times = [high + (low - high) * index / steps_per_phase for index in range(steps_per_phase + 1)]
        sigmas = [top, *(shift_time(time, shift) for time in times[1:-1]), edge]
        for sigma, following in pairwise(sigmas):
            velocity = guided_velocity(field, latents, levels(sigma, latents), condition, guidance_scale)
            length, direction = following - sigma, velocity
            if before is not None:
                direction = velocity + length / (2 * before[1]) * (velocity - before[0])
            latents = condition.hold(latents + length * direction)
            before = velocity, length
        states.append(latents)
    return torch.stack(states, dim=1)
