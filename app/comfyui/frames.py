"""Pictures between ComfyUI and the service, and an engine that keeps the frames of its latest clip."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL import Image

from ...core.config import require
from ...pipelines.generation import GenerationRequest, GenerationResult
from ...pipelines.recipe import Recipe
from ..engine import Engine


class FrameKeepingEngine(Engine):
    """An engine whose latest frames can be taken as they are: the service itself keeps the mp4 alone, which loses a
    little.
    """

    _frames: np.ndarray | None = None

    def run(self, request: GenerationRequest, recipe: str | Recipe | None = None, **listeners: Any) -> GenerationResult:
        """As `Engine.run`."""
        self._frames = None
        result = super().run(request, recipe, **listeners)
        self._frames = result.frames
        return result

    def take_frames(self) -> np.ndarray:
        """The frames of the latest clip, uint8 [F, H, W, 3], once."""
        frames, self._frames = self._frames, None
        assert frames is not None, "no clip was made"
        return frames


def first_picture(images: Any) -> Image.Image | None:
    """The first picture of ComfyUI's images, float [B, H, W, C] in 0 to 1; None for None."""
    if images is None:
        return None
    shape = tuple(images.shape)
    fits = len(shape) == 4 and shape[0] >= 1 and shape[3] in (3, 4)
    require(fits, "image", shape, "images [batch, height, width, 3], as ComfyUI passes them")
    array = images[0, ..., :3].detach().float().cpu().clamp(0, 1).mul(255).round().to(torch.uint8).numpy()
    return Image.fromarray(array)


def to_images(frames: np.ndarray) -> torch.Tensor:
    """Frames uint8 [F, H, W, 3] as ComfyUI's images: float32 in 0 to 1."""
    return torch.from_numpy(np.ascontiguousarray(frames)).float().div_(255)
