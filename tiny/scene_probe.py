"""What each token should know: a linear probe of a middle layer on the scene's own description, for training alone.

Denoising teaches a small transformer late what a clip shows as a whole: without help it smooths each place by itself,
and forms differ from frame to frame. The probe asks the tokens around a shape for its form, size, colour, motion and
place, and all tokens for the background; the noisy clip and the caption are all they know, so the answers are beliefs,
which is what the layers after it need to draw from. (Aligning a middle layer with features of the clean picture speeds
such training many times: REPA, arXiv 2410.06940. Here the features are known exactly.) The probe is thrown away.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as functional
from torch import nn

from .dataset import ATTRIBUTES, SCENE_ATTRIBUTES, SHAPE_ATTRIBUTES, Scene
from .latents import TEMPORAL_STRIDE

NUM_OFFSETS = 4
REACH = 1.5
"""How far from a shape, in its radii and beyond one token, tokens still have to know it."""
WIDTHS = {name: len(values) for name, values in ATTRIBUTES.items()}
PROBE_WIDTH = sum(WIDTHS.values()) + NUM_OFFSETS


@dataclass(frozen=True)
class Targets:
    """Answers of a batch: class per attribute and token `[B, L]`, -1: not asked; offsets `[B, L, 4]`, their mask."""

    classes: dict[str, torch.Tensor]
    offsets: torch.Tensor
    asked: torch.Tensor


def scene_targets(scenes: list[Scene], num_frames: int, frames: int, side: int) -> Targets:
    """Answers for the tokens of square clips: `frames` latent frames of `side` x `side` tokens.

    A token answers for the nearest shape. Offsets lead from its centre to the shape's in the first and last frame of
    its latent frame, in eighths of the clip's side.
    """
    batch, length = len(scenes), frames * side * side
    classes = {name: np.full((batch, length), -1) for name in ATTRIBUTES}
    offsets, asked = np.zeros((batch, length, NUM_OFFSETS), np.float32), np.zeros((batch, length), bool)
    centre = (np.arange(side) + 0.5) / side
    places = np.stack(np.meshgrid(centre, centre), axis=-1)[None]  # [1, side, side, 2] as (x, y)
    first = [0, *range(1, num_frames, TEMPORAL_STRIDE)]
    last = [0, *range(TEMPORAL_STRIDE, num_frames, TEMPORAL_STRIDE)]
    for row, scene in enumerate(scenes):
        for name in SCENE_ATTRIBUTES:
            classes[name][row] = ATTRIBUTES[name].index(getattr(scene, name))
        ways = []
        for shape in scene.shapes:
            track = shape.positions(num_frames)
            ends = [track[index][:, None, None] - places for index in (first, last)]
            ways.append(np.concatenate(ends, axis=-1).reshape(length, NUM_OFFSETS))
        distance = np.stack([np.abs(way).max(1) - REACH * s.radius for way, s in zip(ways, scene.shapes, strict=True)])
        nearest = distance.argmin(0)
        asked[row] = distance.min(0) < 1 / side
        for index, shape in enumerate(scene.shapes):
            own = asked[row] & (nearest == index)
            offsets[row, own] = ways[index][own] * 8
            for name in SHAPE_ATTRIBUTES:
                classes[name][row, own] = ATTRIBUTES[name].index(getattr(shape, name))
    return Targets(
        {name: torch.from_numpy(values) for name, values in classes.items()},
        torch.from_numpy(offsets),
        torch.from_numpy(asked),
    )


class SceneProbe(nn.Module):
    """Layer norm and one linear map from a layer's tokens to all answers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.answers = nn.Linear(width, PROBE_WIDTH)

    def loss(self, hidden: torch.Tensor, targets: Targets) -> torch.Tensor:
        """Cross-entropies of all attributes plus the error of the offsets, each a mean over the tokens asked."""
        answers = self.answers(self.norm(hidden.float()))
        total = torch.zeros(())
        start = 0
        for name, width in WIDTHS.items():
            logits = answers[..., start : start + width]
            total = total + functional.cross_entropy(
                logits.flatten(0, 1).float(), targets.classes[name].flatten(), ignore_index=-1
            )
            start += width
        error = functional.smooth_l1_loss(answers[..., start:].float(), targets.offsets, reduction="none").mean(-1)
        return total + (error * targets.asked).sum() / targets.asked.sum().clamp(min=1)
