"""What the tiny autoencoder's latents hold: mean colours, how they change in time, and what they belong to.

An autoencoder that is free to choose its latents packs pixels into codes that a small denoiser learns slowly. Given
mean colours alone, denoisers of this size learned colours and backgrounds and drew shapes as smears: what makes a
square a square lies in a few cells at its edge, and is decided late. So form and size are latents of their own, as
plain as a colour is, wherever a shape is. The encoder is taught to see them, as autoencoders of large models are held
to the features of a vision network (VA-VAE, arXiv 2501.01423), and the decoder to draw from them.

Shapes: B batch, F frames, T = 1 + (F - 1) / 4 latent frames; the first frame stands alone, as in Wan.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.nn.functional as functional

from .dataset import SHAPES, SIZES, MovingShape, Scene, coverage, render, sample_scene

SPATIAL_STRIDE = 8
TEMPORAL_STRIDE = 4
LATENT_CHANNELS = 10
NUM_STATISTICS_CLIPS = 64
STATISTICS_SIZE = 128
FORM_CODES = torch.tensor([[1.0, 1.0, 1.0], [1.0, -1.0, -1.0], [-1.0, 1.0, -1.0], [-1.0, -1.0, 1.0]])
"""One corner of a tetrahedron for each shape: all are equally far apart."""
FORM_SCALE = 1.5
"""Value of a form's latents where a shape is, once normalised."""
SLOW = 1 / 16
"""Displacement per latent frame, in shares of a side, of a shape that moves in a line: 1 in the latents of motion."""
MOTION_SCALE = 1.25
"""Value of those latents, once normalised."""


def space_time_means(video: torch.Tensor) -> torch.Tensor:
    """Means over cells of 8 x 8 pixels and four frames: `[B, C, F, H, W]` -> `[B, C, T, H / 8, W / 8]`."""
    first, rest = _cells(video)
    return torch.cat([first, rest.mean(2)], dim=1).transpose(1, 2)


def _cells(video: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cell means of the first frame `[B, 1, C, h, w]` and of the rest, `[B, T - 1, 4, C, h, w]`."""
    batch = video.shape[0]
    cells = functional.avg_pool2d(video.transpose(1, 2).flatten(0, 1), SPATIAL_STRIDE).unflatten(0, (batch, -1))
    return cells[:, :1], cells[:, 1:].unflatten(1, (-1, TEMPORAL_STRIDE))


def brightness_change(video: torch.Tensor) -> torch.Tensor:
    """How a cell's brightness changes over its four frames, `[B, 1, T, H / 8, W / 8]`.

    It is the projection on (-3, -1, 1, 3) / sqrt(20), scaled as the mean is; a single first frame has no change.
    """
    first, rest = _cells(video)
    wave = torch.tensor([-3.0, -1.0, 1.0, 3.0]).view(-1, 1, 1, 1) / (2 * 20**0.5)
    change = (rest * wave).sum(2).mean(2, keepdim=True)
    return torch.cat([torch.zeros_like(first[:, :, :1]), change], dim=1).transpose(1, 2)


def form_video(scene: Scene, *, num_frames: int, height: int, width: int) -> torch.Tensor:
    """What each pixel belongs to, `[1, 6, F, H, W]`: form's code, +1 or -1 for the size, motion, over a shape's disc.

    The disc has the shape's area; outside of all discs everything is 0. Motion (to the right, downwards) is the
    displacement over the four frames that share a latent frame, in units of `SLOW`; a first frame has none.
    """
    video = torch.zeros(6, num_frames, height, width)
    for shape in scene.shapes:
        size = 1.0 if shape.size == max(SIZES, key=SIZES.__getitem__) else -1.0
        code = torch.cat([FORM_CODES[SHAPES.index(shape.shape)], torch.tensor([size])])
        disc = coverage("circle", shape.radius, shape.positions(num_frames), height, width)
        video[:4] += code.view(-1, 1, 1, 1) * disc
        video[4:] += motion(shape, num_frames).T[..., None, None] * disc
    return video[None]


def motion(shape: MovingShape, num_frames: int) -> torch.Tensor:
    """Displacement over the four frames of each frame's latent frame, in units of `SLOW`, `[num_frames, 2]`."""
    places = shape.positions(num_frames)
    steps = np.diff(places[::TEMPORAL_STRIDE], axis=0) / SLOW
    still = np.zeros((1, 2))
    return torch.from_numpy(np.concatenate([still, steps.repeat(TEMPORAL_STRIDE, axis=0)])).float()


def scene_latents(video: torch.Tensor, forms: torch.Tensor) -> torch.Tensor:
    """Latents before normalisation, `[B, 10, T, H / 8, W / 8]`, of clips `[B, 3, F, H, W]` in [-1, 1] and their forms.

    Channels 0 to 2 are the mean colour of a cell, 3 its change of brightness, 4 to 6 the form, 7 the size, 8 and 9 the
    motion to the right and downwards over the cell's four frames.
    """
    return torch.cat([space_time_means(video), brightness_change(video), space_time_means(forms)], dim=1)


@functools.cache
def latent_statistics() -> tuple[list[float], list[float]]:
    """Per-channel mean and scale of the latents of training clips.

    The change over time is divided by the colours' scale, not by its own: it is small, and should weigh little.
    """
    rows = []
    for seed in range(NUM_STATISTICS_CLIPS):
        clip = render(sample_scene(seed), num_frames=17, height=STATISTICS_SIZE, width=STATISTICS_SIZE)
        rows.append(space_time_means(clip.permute(3, 0, 1, 2)[None].float() / 127.5 - 1))
    colors = torch.cat(rows).transpose(0, 1).flatten(1)
    mean, scale = colors.mean(1).tolist(), colors.std(1).tolist()
    mean += [0.0] * (LATENT_CHANNELS - len(mean))
    scale += [sum(scale) / len(scale)] + [1 / FORM_SCALE] * 4 + [1 / MOTION_SCALE] * 2
    return [round(v, 4) for v in mean], [round(v, 4) for v in scale]


def normalise(latents: torch.Tensor) -> torch.Tensor:
    """Latents of `scene_latents` as the denoiser sees them."""
    mean, scale = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in latent_statistics())
    return (latents - mean) / scale
