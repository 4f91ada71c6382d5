"""Finds what a clip of the synthetic world shows.

`detect` looks only at pixels. It names the background by its nearest palette tones, separates each shape by
its colour, and measures a soft coverage mask per frame; from that mask follow size, form and path. A value
that matches none of the world's choices clearly is None ("neither") and counts as wrong, never as a guess.
Thresholds sit between the world's ranges and leave room for the blur and noise of a video autoencoder.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as functional

from ..tiny.dataset import BACKGROUND_COLORS, COLORS, PATTERN_CONTRAST, SHAPES, coverage
from . import regions
from .motion import detect_motion
from .regions import MIN_PRESENCE, SMALLEST_RADIUS

SMALL_RADIUS = (SMALLEST_RADIUS, 0.192)
LARGE_RADIUS = (0.204, 0.280)
BACKGROUND_TOLERANCE = 0.20
MIN_SHAPE_IOU = 0.70
MAX_MISFIT_SHARE = 0.85
"""The best template's squared difference over the second best one's must stay below."""
MAX_SOFTENINGS = 4
CONTOUR_BAND = 0.2
"""How far from half coverage a pixel may be to count as one of the contour."""
MEASURES = ("shape_iou", "track_error", "area_unsteadiness", "color_unsteadiness", "sharpness")
"""The continuous measures of a shape, which still differ where the attributes are all right."""

_COLOR_NAMES: tuple[str | None, ...] = (*COLORS, None)


@dataclass
class DetectedShape:
    """One shape of a clip; attributes are None where they match none of the world's values.

    Attributes:
        radius: that of the circle of equal area, in shorter sides.
        area: pixels per frame, NaN where the shape is absent.
        track: centre (x, y) per frame as shares of the frame, NaN where the shape is absent.
        shape_iou: intersection over union with the best form of equal area and centre, median over frames.
        track_error: RMS distance from the best fit of the best motion, in shorter sides.
        area_unsteadiness: standard deviation over mean of the area.
        color_unsteadiness: RMS distance (RGB in [0, 1]) of the frames' colours from their mean.
        sharpness: steepness of the contour over that of the renderer's anti-aliased one; 1 is as sharp.
    """

    size: str | None
    color: str | None
    shape: str | None
    motion: str | None
    radius: float
    area: np.ndarray = field(repr=False)
    track: np.ndarray = field(repr=False)
    shape_iou: float
    track_error: float
    area_unsteadiness: float
    color_unsteadiness: float
    sharpness: float


@dataclass
class Detection:
    """What a clip shows: its shapes, from left to right by their mean position, and its background.

    The order must say nothing about an attribute, as it decides between shapes that a caption does not tell apart.
    """

    shapes: tuple[DetectedShape, ...]
    background: str | None
    pattern: str | None


def detect(frames: np.ndarray | torch.Tensor) -> Detection:
    """Find shapes and background.

    Args:
        frames: uint8 `[num_frames, height, width, 3]`, RGB, shorter side at least 48.

    Raises:
        ValueError: wrong dtype or shape.
    """
    clip = torch.as_tensor(np.ascontiguousarray(frames))
    if clip.dtype != torch.uint8 or clip.ndim != 4 or clip.shape[-1] != 3 or min(clip.shape[1:3]) < 48:
        raise ValueError(
            f"frames: got {clip.dtype} {list(clip.shape)}; must be uint8 [frames, height, width, 3], sides >= 48"
        )
    with torch.inference_mode():
        return _detect(clip)


def _detect(clip: torch.Tensor) -> Detection:
    height, width = clip.shape[1:3]
    # Classify on a coarser copy: a quarter of the work at 192 pixels, and less noise.
    pool = max(1, min(height, width) // 96)
    planes = clip.permute(0, 3, 1, 2).float().div_(255)
    coarse = clip
    if pool > 1:
        means = functional.avg_pool2d(planes, pool, ceil_mode=True)
        coarse = means.mul_(255).round_().to(torch.uint8).permute(0, 2, 3, 1)
    base_index = regions.vote_background(coarse)
    classes, background_distance = regions.classify(coarse, base_index)
    cores = regions.find_cores(classes)
    grown = {index: regions.grow(core, 3) for index, core in cores.items()}

    covered = torch.zeros(classes.shape, dtype=torch.bool)
    for region in grown.values():
        covered |= region
    free = ~covered
    num_free = int(free.sum())
    distance = float(background_distance[free].mean()) if num_free else math.inf
    free_share = float((free & (classes == regions.BACKGROUND)).sum()) / max(1, num_free)
    known = distance <= BACKGROUND_TOLERANCE and free_share >= 0.6
    background = list(BACKGROUND_COLORS)[base_index] if known else None

    tone = regions.tone_image(planes, _enlarge(covered, pool, height, width), base_index)
    local = regions.BASES[base_index] + regions.TOWARD[base_index] * PATTERN_CONTRAST * tone[..., None]
    shapes = []
    for index, region in grown.items():
        found = _measure_shape(planes, local, region, cores[index], _COLOR_NAMES[index], pool)
        if found is not None:
            shapes.append(found)
    shapes.sort(key=lambda s: float(np.nanmean(s.track[:, 0])))
    return Detection(tuple(shapes), background, regions.name_pattern(tone))


def _enlarge(mask: torch.Tensor, pool: int, height: int, width: int) -> torch.Tensor:
    if pool == 1:
        return mask
    return mask.repeat_interleave(pool, dim=1).repeat_interleave(pool, dim=2)[:, :height, :width]


def _centroids(alpha: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Areas `[F]` and centres `[F, 2]` (x, y in pixels) of soft masks `[F, h, w]`."""
    columns, rows = alpha.sum(dim=1), alpha.sum(dim=2)
    area = rows.sum(dim=1)
    safe = area.clamp(min=1e-6)
    x = (columns @ (torch.arange(alpha.shape[2]) + 0.5)) / safe
    y = (rows @ (torch.arange(alpha.shape[1]) + 0.5)) / safe
    return area, torch.stack([x, y], dim=1)


def _windows(images: torch.Tensor, center: torch.Tensor, reach: int) -> torch.Tensor:
    """One window of 2 `reach` pixels a side around each frame's centre (x, y); `[F, ..., h, w]`, zeros outside.

    An image without a first axis of frames is passed expanded.
    """
    height, width = images.shape[-2:]
    result = images.new_zeros((*images.shape[:-2], 2 * reach, 2 * reach))
    for image, target, (x, y) in zip(images, result, center.tolist(), strict=True):
        left, top, right, bottom = max(x - reach, 0), max(y - reach, 0), min(x + reach, width), min(y + reach, height)
        into = target[..., top - y + reach : bottom - y + reach, left - x + reach : right - x + reach]
        into.copy_(image[..., top:bottom, left:right])
    return result


def _measure_shape(
    planes: torch.Tensor,
    local: torch.Tensor,
    region: torch.Tensor,
    core: torch.Tensor,
    color: str | None,
    pool: int,
) -> DetectedShape | None:
    """Soft coverage of one colour's region in every frame, and all that follows from it."""
    num_frames, _, height, width = planes.shape
    side = min(height, width)
    present = core.sum(dim=(1, 2)) > 0
    _, rough = _centroids(region.float())
    reach = math.ceil(1.7 * LARGE_RADIUS[1] * side)  # holds every shape of the world, tips and all
    middle = (rough * pool).round().long()
    pixels = _windows(planes, middle, reach)
    mask = _windows(_enlarge(region, pool, height, width), middle, reach)
    inner = _windows(_enlarge(core, pool, height, width), middle, reach).float()
    ground = _windows(local.permute(2, 0, 1).expand(num_frames, -1, -1, -1), middle, reach)

    weight = inner.sum(dim=(1, 2)).clamp(min=1)
    frame_colors = torch.einsum("fchw,fhw->fc", pixels, inner) / weight[:, None]
    typical = frame_colors[present].median(dim=0).values
    contrast = typical[None, :, None, None] - ground
    alpha = (pixels.sub_(ground).mul_(contrast)).sum(dim=1) / contrast.square_().sum(dim=1).clamp_(min=1e-3)
    alpha.mul_(mask)
    # Unclipped for the contour: clipping noise would pull both plateaus inwards and read as softness.
    raw, alpha = alpha, alpha.clamp(0, 1)
    area, center = _centroids(alpha)
    present &= area > 0.1 * math.pi * (SMALL_RADIUS[0] * side) ** 2
    if float(present.float().mean()) < MIN_PRESENCE:
        return None

    seen = present.numpy()
    areas = np.where(seen, area.numpy().astype(float), np.nan)
    radius = math.sqrt(float(np.nanmedian(areas)) / math.pi) / side
    shape, iou, template = _detect_form(alpha[present], area[present], center[present], 2 * reach)
    sharpness = contour_slope(raw[present]) / max(contour_slope(template), 1e-6)
    absolute = (center + middle - reach).numpy().astype(float) / np.array([width, height])
    track = np.where(seen[:, None], absolute, np.nan)
    motion, track_error = detect_motion(track, scale=(width / side, height / side))
    spread = frame_colors[present].std(dim=0, unbiased=False).square().sum().sqrt()
    return DetectedShape(
        size=_size_name(radius),
        color=color,
        shape=shape,
        motion=motion,
        radius=radius,
        area=areas,
        track=track,
        shape_iou=iou,
        track_error=track_error,
        area_unsteadiness=float(np.nanstd(areas) / np.nanmean(areas)),
        color_unsteadiness=float(spread),
        sharpness=sharpness,
    )


def _size_name(radius: float) -> str | None:
    for name, (low, high) in {"small": SMALL_RADIUS, "large": LARGE_RADIUS}.items():
        if low <= radius <= high:
            return name
    return None


def _detect_form(
    alpha: torch.Tensor, area: torch.Tensor, center: torch.Tensor, size: int
) -> tuple[str | None, float, torch.Tensor]:
    """Best template of equal area and centre: its name (None if unclear), its IoU, and its coverage per frame.

    The name goes by squared differences over all frames, to templates as soft as the mask is: a video autoencoder
    rounds the corners of a small square, which brings it near a sharp circle but not near a soft one.
    """
    radius = math.sqrt(float(area.median()) / math.pi) / size
    templates = torch.stack([coverage(name, radius, center / size, size, size) for name in SHAPES])
    overlap = torch.minimum(alpha, templates).sum(dim=(2, 3))
    union = area + templates.sum(dim=(2, 3)) - overlap
    iou = (overlap / union).median(dim=1).values

    misfit, soft = torch.full((len(SHAPES),), math.inf), templates
    for _ in range(MAX_SOFTENINGS + 1):
        misfit = torch.minimum(misfit, (alpha - soft).square().sum(dim=(1, 2, 3)))
        soft = _soften(soft)
    order = misfit.argsort().tolist()
    best, second = float(misfit[order[0]]), float(misfit[order[1]])
    clear = float(iou[order[0]]) >= MIN_SHAPE_IOU and best <= MAX_MISFIT_SHARE * second
    return (SHAPES[order[0]] if clear else None), float(iou[order[0]]), templates[order[0]]


def _soften(masks: torch.Tensor) -> torch.Tensor:
    """Means over (1, 2, 1) / 4 along both axes: a blur whose variance is half a pixel."""
    for axis in (-2, -1):
        left, right = masks.roll(1, axis), masks.roll(-1, axis)
        masks = masks * 0.5 + (left + right) * 0.25
    return masks


def contour_slope(alpha: torch.Tensor) -> float:
    """Mean steepness (coverage per pixel) where soft masks `[F, h, w]` cross one half; 0 where none does.

    Both the place and the slope are read from a smoothed copy, and only at the contour: pixel noise averages out,
    and noise elsewhere, which any measure over all half-covered pixels would take for softness, plays no part.
    """
    smooth = alpha
    for axis in (1, 2, 1, 2):  # means of three, twice along each axis; slices are quicker than pooling here
        length = smooth.shape[axis] - 2
        smooth = (smooth.narrow(axis, 0, length) + smooth.narrow(axis, 1, length) + smooth.narrow(axis, 2, length)) / 3
    across = (smooth[:, 1:-1, 2:] - smooth[:, 1:-1, :-2]) / 2
    down = (smooth[:, 2:, 1:-1] - smooth[:, :-2, 1:-1]) / 2
    contour = (smooth[:, 1:-1, 1:-1] - 0.5).abs_() < CONTOUR_BAND
    return float(torch.hypot(across[contour], down[contour]).mean()) if bool(contour.any()) else 0.0
