"""Finds what a clip of the synthetic world shows, and compares it with a caption.

`detect` looks only at pixels. It names the background by its nearest palette tones, separates each shape by
its colour, and measures a soft coverage mask per frame; from that mask follow size, form and path. A value
that matches none of the world's choices clearly is None ("neither") and counts as wrong, never as a guess.
Thresholds sit between the world's ranges and leave room for the blur and noise of a video autoencoder.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as functional

from ..tiny.dataset import (
    BACKGROUND_COLORS,
    COLORS,
    PATTERN_CONTRAST,
    SCENE_ATTRIBUTES,
    SHAPE_ATTRIBUTES,
    SHAPES,
    Caption,
    coverage,
)
from .motion import detect_motion

SMALL_RADIUS = (0.055, 0.103)
LARGE_RADIUS = (0.117, 0.180)
COLOR_TOLERANCE = 0.30
"""Largest RGB distance (channels in [0, 1]) at which a pixel still counts as a palette colour."""
BACKGROUND_TOLERANCE = 0.20
MIN_SHAPE_IOU = 0.70
MIN_SHAPE_MARGIN = 0.012
MIN_PRESENCE = 0.6
"""Share of frames in which a shape must be seen."""
PLAIN_STD = 0.18
"""A pattern's two tones are 0 and 1, so a full pattern has standard deviation 0.5 and a plain one 0."""
PATTERN_SHARE = 0.55
MAX_SHAPES = 3

_COLOR_NAMES: tuple[str | None, ...] = (*COLORS, None)
_PALETTE = torch.tensor(list(COLORS.values()))
_BASES = torch.tensor(list(BACKGROUND_COLORS.values()))
# The second tone lies on the side of the base where there is room, as in the renderer.
_TOWARD = torch.where(_BASES.mean(dim=1) < 0.5, 1.0, -1.0)


@dataclass
class DetectedShape:
    """One shape of a clip; attributes are None where they match none of the world's values.

    `area` (pixels) and `track` (x, y as shares of the frame) have one row per frame, NaN where the shape is
    absent. `track_error` is the RMS distance from the best fit of the best motion, in shorter sides.
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
    """What a clip shows: its shapes, largest first, and its background."""

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
    coarse = functional.avg_pool2d(planes, pool, ceil_mode=True) if pool > 1 else planes
    coarse = coarse.permute(0, 2, 3, 1)
    base_index = _vote_background(coarse)
    classes, background_distance = _classify(coarse, base_index)
    cores = _find_cores(classes)
    regions = {index: _grow(core, 3) for index, core in cores.items()}

    covered = torch.zeros(coarse.shape[:3], dtype=torch.bool)
    for region in regions.values():
        covered |= region
    is_base = ~covered & (classes == len(COLORS) + 1)
    distance = float(background_distance[~covered].mean()) if bool((~covered).any()) else math.inf
    free_share = float(is_base.sum()) / max(1, int((~covered).sum()))
    known = distance <= BACKGROUND_TOLERANCE and free_share >= 0.6
    background = list(BACKGROUND_COLORS)[base_index] if known else None

    tone = _tone_image(planes, _enlarge(covered, pool, height, width), base_index)
    local = _BASES[base_index] + _TOWARD[base_index] * PATTERN_CONTRAST * tone[..., None]
    shapes = []
    for index, region in regions.items():
        found = _measure_shape(planes, local, region, cores[index], _COLOR_NAMES[index], pool)
        if found is not None:
            shapes.append(found)
    shapes.sort(key=lambda s: -s.radius)
    return Detection(tuple(shapes), background, _detect_pattern(tone))


def _tones(base_index: int) -> torch.Tensor:
    base = _BASES[base_index]
    return torch.stack([base, base + _TOWARD[base_index] * PATTERN_CONTRAST])


def _vote_background(coarse: torch.Tensor) -> int:
    """Index of the background whose two tones are nearest to the most pixels."""
    sample = coarse[:: max(1, len(coarse) // 4), ::2, ::2].reshape(-1, 3)
    tones = torch.cat([_tones(i) for i in range(len(_BASES))] + [_PALETTE])
    nearest = torch.cdist(sample, tones).argmin(dim=1)
    votes = torch.bincount(nearest, minlength=len(tones))[: 2 * len(_BASES)]
    return int(votes.view(-1, 2).sum(dim=1).argmax())


def _classify(coarse: torch.Tensor, base_index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Class of each pixel (palette index, then 'other', then background) and distance to the background."""
    flat = coarse.reshape(-1, 3)
    tones = _tones(base_index)
    # Pattern edges lie between the two tones, so the distance is that to the segment.
    along = ((flat - tones[0]).mean(dim=1) * _TOWARD[base_index] / PATTERN_CONTRAST).clamp_(0, 1)
    nearest_tone = tones[0] + along[:, None] * (tones[1] - tones[0])
    background = (flat - nearest_tone).square().sum(dim=1)
    palette = flat.square().sum(dim=1, keepdim=True) - 2 * flat @ _PALETTE.T + _PALETTE.square().sum(dim=1)
    best, index = palette.min(dim=1)
    index[best > COLOR_TOLERANCE**2] = len(COLORS)
    is_background = (background <= best) & (background < COLOR_TOLERANCE**2)
    index[is_background] = len(COLORS) + 1
    return index.view(coarse.shape[:3]), background.clamp_(min=0).sqrt().view(coarse.shape[:3])


def _grow(mask: torch.Tensor, reach: int) -> torch.Tensor:
    """Dilate each frame's mask by a square of `reach` pixels to each side."""
    x = mask[:, None].float()
    x = functional.max_pool2d(x, (2 * reach + 1, 1), 1, (reach, 0))
    return functional.max_pool2d(x, (1, 2 * reach + 1), 1, (0, reach))[:, 0] > 0


def _find_cores(classes: torch.Tensor) -> dict[int, torch.Tensor]:
    """Inner pixels of each colour that is present in most frames, the largest `MAX_SHAPES` of them.

    Erosion by one pixel removes what blends at an edge into some third colour.
    """
    smallest = math.pi * (SMALL_RADIUS[0] * min(classes.shape[1:])) ** 2
    found: list[tuple[float, int, torch.Tensor]] = []
    taken = torch.zeros_like(classes, dtype=torch.bool)
    for index in range(len(COLORS) + 1):
        mask = classes == index
        other = index == len(COLORS)
        threshold = smallest * (0.5 if other else 0.1)
        if float(mask.sum()) < threshold * len(classes) * MIN_PRESENCE:
            continue
        core = ~_grow(~mask, 1)
        if other:  # the soft edge of a known colour is no shape of its own
            core &= ~_grow(taken, 4)
        counts = core.sum(dim=(1, 2))
        if float((counts > threshold).float().mean()) < MIN_PRESENCE:
            continue
        taken |= core
        found.append((float(counts.float().mean()), index, core))
    found.sort(key=lambda item: -item[0])
    return {index: core for _, index, core in found[:MAX_SHAPES]}


def _enlarge(mask: torch.Tensor, pool: int, height: int, width: int) -> torch.Tensor:
    if pool == 1:
        return mask
    return mask.repeat_interleave(pool, dim=1).repeat_interleave(pool, dim=2)[:, :height, :width]


def _tone_image(planes: torch.Tensor, covered: torch.Tensor, base_index: int) -> torch.Tensor:
    """Mean over time of the uncovered background: 0 at the first tone, 1 at the second; `[height, width]`."""
    free = (~covered).float()
    level = planes.mean(dim=1).sub_(_BASES[base_index].mean()).mul_(_TOWARD[base_index] / PATTERN_CONTRAST)
    weight = free.sum(dim=0)
    tone = (level * free).sum(dim=0) / weight.clamp(min=1)
    seen = weight > 0
    fill = tone[seen].mean() if bool(seen.any()) else torch.tensor(0.0)
    return torch.where(seen, tone, fill).clamp_(-0.5, 1.5)


def _detect_pattern(tone: torch.Tensor) -> str | None:
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


def _centroids(alpha: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Areas `[F]` and centres `[F, 2]` (x, y in pixels) of soft masks `[F, h, w]`."""
    area = alpha.sum(dim=(1, 2))
    safe = area.clamp(min=1e-6)
    x = (alpha.sum(dim=1) @ (torch.arange(alpha.shape[2]) + 0.5)) / safe
    y = (alpha.sum(dim=2) @ (torch.arange(alpha.shape[1]) + 0.5)) / safe
    return area, torch.stack([x, y], dim=1)


def _crop(images: torch.Tensor, left: torch.Tensor, top: torch.Tensor, size: int) -> torch.Tensor:
    """One `size` x `size` window per frame of `[F, h, w]`-like images already padded to hold it."""
    windows = [
        image[..., t : t + size, x : x + size] for image, t, x in zip(images, top.tolist(), left.tolist(), strict=True)
    ]
    return torch.stack(windows)


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
    size = 2 * reach
    corner = (rough * pool).round().long()  # in the padded image this is the window's top left
    pad = (reach, reach, reach, reach)
    pixels = _crop(functional.pad(planes, pad), corner[:, 0], corner[:, 1], size)
    mask = _crop(functional.pad(_enlarge(region, pool, height, width).float(), pad), corner[:, 0], corner[:, 1], size)
    inner = _crop(functional.pad(_enlarge(core, pool, height, width).float(), pad), corner[:, 0], corner[:, 1], size)
    ground = functional.pad(local.permute(2, 0, 1), pad).expand(num_frames, -1, -1, -1)
    ground = _crop(ground, corner[:, 0], corner[:, 1], size)

    weight = inner.sum(dim=(1, 2)).clamp(min=1)
    frame_colors = (pixels * inner[:, None]).sum(dim=(2, 3)) / weight[:, None]
    typical = frame_colors[present].median(dim=0).values
    contrast = typical[None, :, None, None] - ground
    alpha = ((pixels - ground) * contrast).sum(dim=1) / contrast.square().sum(dim=1).clamp(min=1e-3)
    alpha = alpha.clamp_(0, 1) * mask
    area, center = _centroids(alpha)
    present &= area > 0.1 * math.pi * (SMALL_RADIUS[0] * side) ** 2
    if float(present.float().mean()) < MIN_PRESENCE:
        return None

    seen = present.numpy()
    areas = np.where(seen, area.numpy().astype(float), np.nan)
    radius = math.sqrt(float(np.nanmedian(areas)) / math.pi) / side
    shape, iou, sharpness = _detect_form(alpha[present], area[present], center[present], size)
    absolute = (center + corner - reach).numpy().astype(float) / np.array([width, height])
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
) -> tuple[str | None, float, float]:
    """Best template of equal area and centre: its name (None if unclear), IoU and relative edge sharpness."""
    radius = math.sqrt(float(area.median()) / math.pi) / size
    scores, edges = [], []
    for name in SHAPES:
        template = coverage(name, radius, center / size, size, size)
        overlap = torch.minimum(alpha, template).sum(dim=(1, 2))
        scores.append(float((overlap / torch.maximum(alpha, template).sum(dim=(1, 2))).median()))
        edges.append(float((template * (1 - template)).sum()))
    order = np.argsort(scores)[::-1]
    best, second = scores[order[0]], scores[order[1]]
    sharpness = edges[order[0]] / max(float((alpha * (1 - alpha)).sum()), 1e-6)
    clear = best >= MIN_SHAPE_IOU and best - second >= MIN_SHAPE_MARGIN
    return (SHAPES[order[0]] if clear else None), best, sharpness


def match(detection: Detection, caption: Caption) -> dict[str, list[bool]]:
    """Right or wrong for everything the caption says.

    Detected shapes are assigned to the caption's so that the most attributes are right. All that is said of
    a shape without a partner is wrong; `count` says whether the number of shapes agrees.

    Returns:
        Attribute (and "count") -> one entry for each time the caption states it; attributes not stated have [].
    """
    result: dict[str, list[bool]] = {name: [] for name in (*SHAPE_ATTRIBUTES, *SCENE_ATTRIBUTES)}
    for name in SCENE_ATTRIBUTES:
        if caption.scene[name] is not None:
            result[name].append(getattr(detection, name) == caption.scene[name])
    for said, found in zip(caption.shapes, assign(detection, caption), strict=True):
        for name in SHAPE_ATTRIBUTES:
            if said[name] is not None:
                result[name].append(found is not None and getattr(found, name) == said[name])
    result["count"] = [len(detection.shapes) == len(caption.shapes)]
    return result


def assign(detection: Detection, caption: Caption) -> tuple[DetectedShape | None, ...]:
    """The detected shape for each shape of the caption, None where there is none."""
    candidates: list[DetectedShape | None] = list(detection.shapes)
    candidates += [None] * max(0, len(caption.shapes) - len(candidates))

    def score(order: tuple[DetectedShape | None, ...]) -> int:
        return sum(
            found is not None and value is not None and getattr(found, name) == value
            for said, found in zip(caption.shapes, order, strict=False)
            for name, value in said.items()
        )

    return max(itertools.permutations(candidates, len(caption.shapes)), key=score)
