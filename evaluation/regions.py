"""Tells background, pattern and colours of a clip of the synthetic world apart, pixel by pixel.

Every pixel is classified through a table over coarse colours (six bits a channel), made once per background: the
rule is written out once, in `_color_table`, and a clip costs one look-up per pixel.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as functional

from ..tiny.dataset import BACKGROUND_COLORS, COLORS, PATTERN_CONTRAST

SMALLEST_RADIUS = 0.12
"""Below every shape of the world, in shorter sides."""
COLOR_TOLERANCE = 0.30
"""Largest RGB distance (channels in [0, 1]) at which a pixel still counts as a palette colour."""
MIN_PRESENCE = 0.6
"""Share of frames in which a shape must be seen."""
PLAIN_STD = 0.18
"""A pattern's two tones are 0 and 1, so a full pattern has standard deviation 0.5 and a plain one 0."""
PATTERN_SHARE = 0.55
MAX_SHAPES = 3

OTHER = len(COLORS)
"""Class of a pixel that is near no colour of the palette; smaller numbers are the palette's."""
BACKGROUND = OTHER + 1
BASES = torch.tensor(list(BACKGROUND_COLORS.values()))
# The second tone lies on the side of the base where there is room, as in the renderer.
TOWARD = torch.where(BASES.mean(dim=1) < 0.5, 1.0, -1.0)
_PALETTE = torch.tensor(list(COLORS.values()))
_TABLE_BITS = 6


def vote_background(pixels: torch.Tensor) -> int:
    """Index of the background whose two tones are nearest to the most pixels (uint8 `[F, H, W, 3]`)."""
    sample = pixels[:: max(1, len(pixels) // 4), ::2, ::2].reshape(-1, 3).float() / 255
    tones = torch.cat([_tones(i) for i in range(len(BASES))] + [_PALETTE])
    nearest = torch.cdist(sample, tones).argmin(dim=1)
    votes = torch.bincount(nearest, minlength=len(tones))[: 2 * len(BASES)]
    return int(votes.view(-1, 2).sum(dim=1).argmax())


def _tones(base_index: int) -> torch.Tensor:
    base = BASES[base_index]
    return torch.stack([base, base + TOWARD[base_index] * PATTERN_CONTRAST])


def classify(pixels: torch.Tensor, base_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Class of each pixel, and its RGB distance to the background; `[F, H, W]` of uint8 `[F, H, W, 3]`."""
    classes, distances = _color_table(base_index)
    drop = 8 - _TABLE_BITS
    red, green, blue = (pixels[..., i].to(torch.int64) >> drop for i in range(3))
    cell = (((red << _TABLE_BITS) + green) << _TABLE_BITS) + blue
    return classes[cell], distances[cell]


@functools.cache
def _color_table(base_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Class (uint8) and distance to the background of every coarse colour, red slowest."""
    width = 1 << (8 - _TABLE_BITS)
    level = (torch.arange(1 << _TABLE_BITS) * width + (width - 1) / 2) / 255
    color = torch.cartesian_prod(level, level, level)
    tones = _tones(base_index)
    # Pattern edges lie between the two tones, so the distance is that to the segment.
    along = ((color - tones[0]).mean(dim=1) * TOWARD[base_index] / PATTERN_CONTRAST).clamp_(0, 1)
    background = (color - (tones[0] + along[:, None] * (tones[1] - tones[0]))).square().sum(dim=1)
    best, index = (color[:, None] - _PALETTE).square().sum(dim=2).min(dim=1)
    index[best > COLOR_TOLERANCE**2] = OTHER
    index[(background <= best) & (background < COLOR_TOLERANCE**2)] = BACKGROUND
    return index.to(torch.uint8), background.sqrt()


def grow(mask: torch.Tensor, reach: int) -> torch.Tensor:
    """Dilate each frame's mask (bool `[F, H, W]`) by a square of `reach` pixels to each side."""
    for axis in (1, 2):
        length = mask.shape[axis]
        grown = mask.clone()
        for shift in range(1, min(reach, length - 1) + 1):
            grown.narrow(axis, shift, length - shift).logical_or_(mask.narrow(axis, 0, length - shift))
            grown.narrow(axis, 0, length - shift).logical_or_(mask.narrow(axis, shift, length - shift))
        mask = grown
    return mask


def find_cores(classes: torch.Tensor) -> dict[int, torch.Tensor]:
    """Inner pixels of each colour that is present in most frames, the largest `MAX_SHAPES` of them.

    Erosion by one pixel removes what blends at an edge into some third colour.
    """
    smallest = math.pi * (SMALLEST_RADIUS * min(classes.shape[1:])) ** 2
    found: list[tuple[float, int, torch.Tensor]] = []
    taken = torch.zeros(classes.shape, dtype=torch.bool)
    totals = torch.bincount(classes.flatten(), minlength=BACKGROUND + 1)
    for index in range(OTHER + 1):
        other = index == OTHER
        threshold = smallest * (0.5 if other else 0.1)
        if float(totals[index]) < threshold * len(classes) * MIN_PRESENCE:
            continue
        core = ~grow(classes != index, 1)
        if other:  # the soft edge of a known colour is no shape of its own
            core &= ~grow(taken, 4)
        counts = core.sum(dim=(1, 2))
        if float((counts > threshold).float().mean()) < MIN_PRESENCE:
            continue
        taken |= core
        found.append((float(counts.float().mean()), index, core))
    found.sort(key=lambda item: -item[0])
    return {index: core for _, index, core in found[:MAX_SHAPES]}


def tone_image(planes: torch.Tensor, covered: torch.Tensor, base_index: int) -> torch.Tensor:
    """Mean over time of the uncovered background: 0 at the first tone, 1 at the second; `[height, width]`."""
    level = planes.mean(dim=1).sub_(BASES[base_index].mean()).mul_(TOWARD[base_index] / PATTERN_CONTRAST)
    weight = (~covered).sum(dim=0)
    tone = level.masked_fill_(covered, 0.0).sum(dim=0) / weight.clamp(min=1)
    seen = weight > 0
    fill = tone[seen].mean() if bool(seen.any()) else torch.tensor(0.0)
    return torch.where(seen, tone, fill).clamp_(-0.5, 1.5)


def name_pattern(tone: torch.Tensor) -> str | None:
    """Plain without a second tone; striped if columns explain it; checkered if a product of both axes does."""
    small = functional.avg_pool2d(tone[None], 2)[0]
    small = small - small.mean()
    energy = float(small.square().sum())
    if math.sqrt(energy / small.numel()) < PLAIN_STD:
        return "plain"
    by_column = float(small.mean(dim=0).square().sum()) * small.shape[0] / energy
    by_row = float(small.mean(dim=1).square().sum()) * small.shape[1] / energy
    if by_column > PATTERN_SHARE:
        return "striped"
    by_product = float(torch.linalg.svdvals(small)[0]) ** 2 / energy
    if by_product > PATTERN_SHARE and by_column < 0.3 and by_row < 0.3:
        return "checkered"
    return None
