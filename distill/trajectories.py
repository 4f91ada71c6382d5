"""Follows the teacher from noise to a clip and keeps its states at a student's knots, for methods/ode_regression.py."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from ..core.config import require
from .data import TeacherSampling, padded_embeds
from .denoiser import as_field, denoiser_of, scheduler_shift
from .draws import derived_seed
from .flow import Condition, states_at_knots
from .method import teacher_guidance


@dataclass(frozen=True)
class TrajectoryStart:
    """What a trajectory starts from.

    Attributes:
        id: of the clip; it decides the noise, and whether a first frame is given.
        prompt_embeds: [tokens, text_dim].
        first_frame: clean first latent frame [C, 1, h, w]; None where there is no picture.
        image_latents: [channels, F, h, w] for models with such channels, else None.
        image_embeds: [tokens, image_dim] for models that attend to the picture, else None.
    """

    id: str
    prompt_embeds: torch.Tensor
    first_frame: torch.Tensor | None = None
    image_latents: torch.Tensor | None = None
    image_embeds: torch.Tensor | None = None


class TeacherTrajectories:
    """The teacher's guided flow, by `states_at_knots`.

    Args:
        pipe: a stock pipeline; a model that is asked for first frames must take one time per token.
        sampling: knots, solver, guidance and noise.
        negative_embeds: of the negative prompt, [tokens, text_dim].
        max_sequence_length: prompts are padded to so many tokens.
        mixed_precision: compute in bfloat16 under autocast.
    """

    def __init__(
        self,
        pipe: Any,
        sampling: TeacherSampling,
        negative_embeds: torch.Tensor,
        max_sequence_length: int,
        *,
        mixed_precision: bool = False,
    ) -> None:
        assert sampling.sigmas is not None
        share, expands = sampling.image_share, bool(pipe.config.expand_timesteps)
        rule = "0 for a teacher without one time per token (expand_timesteps)"
        require(share == 0 or expands, "image_share", share, rule)
        self._sampling, self._length, self._mixed = sampling, max_sequence_length, mixed_precision
        self._knots = (*sampling.sigmas, 0.0)
        self._shift = scheduler_shift(pipe)
        boundary = pipe.config.boundary_ratio
        self._guidance = teacher_guidance(sampling.guidance_scale, sampling.guidance_scale_2, boundary)
        self._device = torch.device(pipe.transformer.device)
        self._field = as_field(denoiser_of(pipe).requires_grad_(False).eval())
        self._negative = padded_embeds([negative_embeds], max_sequence_length).to(self._device)

    def keeps_first(self, identity: str) -> bool:
        """Whether the trajectory of this clip is given its first latent frame."""
        drawn = derived_seed(self._sampling.seed, "trajectory-image", identity) / 2**63
        return drawn < self._sampling.image_share

    def follow(
        self, starts: Sequence[TrajectoryStart], shape: tuple[int, int, int, int]
    ) -> list[dict[str, torch.Tensor]]:
        """Of each start "states" [N, C, F, h, w], "latents" [C, F, h, w] and "keeps_first" [1], float32 on the CPU."""
        generators = [
            torch.Generator().manual_seed(derived_seed(self._sampling.seed, "trajectory", s.id)) for s in starts
        ]
        noise = torch.stack([torch.randn(shape, generator=generator) for generator in generators]).to(self._device)
        condition = self._condition(starts)
        with self._precision():
            states = states_at_knots(
                self._field,
                noise,
                self._knots,
                self._sampling.num_inference_steps // (len(self._knots) - 1),
                self._shift,
                condition,
                self._guidance,
            ).cpu()
        kept = [self.keeps_first(start.id) for start in starts]
        return [
            {"states": rows[:-1], "latents": rows[-1], "keeps_first": torch.tensor([float(given)])}
            for rows, given in zip(states, kept, strict=True)
        ]

    def _condition(self, starts: Sequence[TrajectoryStart]) -> Condition:
        embeds = padded_embeds([start.prompt_embeds for start in starts], self._length).to(self._device)
        first = keeps = None
        if self._sampling.image_share > 0:
            kept = [self.keeps_first(start.id) for start in starts]
            missing = [s.id for s, given in zip(starts, kept, strict=True) if given and s.first_frame is None]
            require(not missing, "image_share", missing[:3], "0 where clips have no picture")
            some = next((s.first_frame for s in starts if s.first_frame is not None), None)
            if some is not None:
                frames = [torch.zeros_like(some) if s.first_frame is None else s.first_frame for s in starts]
                first, keeps = torch.stack(frames).to(self._device), torch.tensor(kept, device=self._device)
        pictures = [
            _stacked([getattr(s, name) for s in starts], self._device) for name in ("image_latents", "image_embeds")
        ]
        return Condition(embeds, self._negative, first, keeps, *pictures)

    def _precision(self) -> AbstractContextManager[Any]:
        return torch.autocast(self._device.type, torch.bfloat16, enabled=self._mixed)


def _stacked(rows: Sequence[torch.Tensor | None], device: torch.device) -> torch.Tensor | None:
    given = [row for row in rows if row is not None]
    return torch.stack(given).to(device) if given else None
