"""A seeded world of captioned clips: one or two shapes that move over a background.

Every clip is a pure function of an integer seed: `sample_scene(seed)` draws what is in it,
`render(scene, ...)` draws the pixels, `caption(scene, seed)` says it in words. Each attribute is left out
of the caption with probability `DROP_PROBABILITY`; what the caption leaves open varies from seed to seed,
and that is what makes diversity measurable. Scenes whose combination of attributes hashes into the held-out
sixteenth are never drawn for training.

What moves and how is drawn freely; where and how far, from a lattice: a small denoiser then learns forms instead of
fractions of pixels.

Coordinates: x to the right and y downwards, both in [0, 1] of the frame; a shape's radius is that of the
circle of equal area, in units of the shorter frame side.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

SIZES: dict[str, float] = {"small": 0.16, "large": 0.24}
COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.90, 0.12, 0.12),
    "green": (0.10, 0.72, 0.20),
    "blue": (0.15, 0.25, 0.95),
    "yellow": (0.96, 0.86, 0.10),
    "purple": (0.62, 0.15, 0.80),
    "cyan": (0.10, 0.82, 0.88),
}
SHAPES = ("circle", "square", "triangle", "cross")
MOTIONS = ("left", "right", "up", "down", "bouncing", "circling")
BACKGROUND_COLORS: dict[str, tuple[float, float, float]] = {
    "black": (0.06, 0.06, 0.06),
    "gray": (0.48, 0.48, 0.48),
    "white": (0.94, 0.94, 0.94),
    "brown": (0.42, 0.27, 0.13),
}
PATTERNS = ("plain", "striped", "checkered")

SHAPE_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "size": tuple(SIZES),
    "color": tuple(COLORS),
    "shape": SHAPES,
    "motion": MOTIONS,
}
SCENE_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "background": tuple(BACKGROUND_COLORS),
    "pattern": PATTERNS,
}
ATTRIBUTES: dict[str, tuple[str, ...]] = SHAPE_ATTRIBUTES | SCENE_ATTRIBUTES

LATTICE = 8
"""Starts are whole eighths of a side; in the time of one latent frame a shape moves by half of one, or one."""
TRAVELS = {"linear": 0.25, "bouncing": 0.25, "circling": 0.125}
TURN_STARTS = 2
"""Directions in which a circling shape's path may begin."""

DROP_PROBABILITY = 0.3
TWO_SHAPES_PROBABILITY = 1 / 3
"""At each draw. Two that would touch in the paths tried are drawn anew, so that a tenth of all scenes have two."""
HELD_OUT_SHARE = 1 / 16
PATTERN_CONTRAST = 0.16
PATTERN_CELLS = 8
"""Number of stripes or checks along the shorter side."""

# Half extents (left, right, up, down) of each shape of equivalent radius 1.
_SQUARE = math.sqrt(math.pi) / 2
_TRIANGLE = math.sqrt(4 * math.pi / (3 * math.sqrt(3)))
_CROSS = math.sqrt(9 * math.pi / 20)
EXTENTS: dict[str, tuple[float, float, float, float]] = {
    "circle": (1.0, 1.0, 1.0, 1.0),
    "square": (_SQUARE,) * 4,
    "triangle": (_TRIANGLE * math.sqrt(3) / 2, _TRIANGLE * math.sqrt(3) / 2, _TRIANGLE, _TRIANGLE / 2),
    "cross": (_CROSS,) * 4,
}


@dataclass(frozen=True)
class MovingShape:
    """One shape and its path; `travel` is the distance, amplitude or turning radius, `phase` in radians."""

    size: str
    color: str
    shape: str
    motion: str
    radius: float
    start_x: float
    start_y: float
    travel: float
    phase: float = 0.0

    def positions(self, num_frames: int) -> np.ndarray:
        """Centre (of area) at each frame, `[num_frames, 2]` as (x, y)."""
        u = np.linspace(0.0, 1.0, num_frames) if num_frames > 1 else np.zeros(1)
        dx, dy = np.zeros_like(u), np.zeros_like(u)
        if self.motion in ("left", "right"):
            dx = u * self.travel * (1 if self.motion == "right" else -1)
        elif self.motion in ("up", "down"):
            dy = u * self.travel * (1 if self.motion == "down" else -1)
        elif self.motion == "bouncing":  # falls, is thrown back, and is where it began
            dy = self.travel * (1 - np.abs(2 * u - 1))
        else:  # circling: one clockwise turn (y points down, so growing angles are clockwise)
            angle = self.phase + 2 * math.pi * u
            dx, dy = self.travel * np.cos(angle), self.travel * np.sin(angle)
        return np.stack([self.start_x + dx, self.start_y + dy], axis=-1)


@dataclass(frozen=True)
class Scene:
    """What a clip shows. `pattern_phase` shifts the background's pattern, in cells."""

    shapes: tuple[MovingShape, ...]
    background: str
    pattern: str
    pattern_phase: tuple[float, float]

    def key(self) -> tuple[str, ...]:
        """The discrete attributes in caption order: what decides whether the scene is held out."""
        parts = [getattr(s, name) for s in self.shapes for name in SHAPE_ATTRIBUTES]
        return (*parts, self.background, self.pattern)


@dataclass(frozen=True)
class Caption:
    """A caption and what it says: for each shape and for the scene, attribute -> value, None where left open."""

    text: str
    shapes: tuple[dict[str, str | None], ...]
    scene: dict[str, str | None]


def is_held_out(scene: Scene) -> bool:
    """Whether this combination of attributes belongs to the evaluation's sixteenth."""
    digest = hashlib.sha256(" ".join(scene.key()).encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32 < HELD_OUT_SHARE


def sample_scene(seed: int, *, held_out: bool = False) -> Scene:
    """Draw the scene of `seed` from the training combinations, or from the held-out ones."""
    rng = np.random.default_rng([seed, int(held_out)])
    while True:
        scene = _draw_scene(rng)
        if scene is not None and is_held_out(scene) == held_out:
            return scene


def _draw_scene(rng: np.random.Generator) -> Scene | None:
    num_shapes = 2 if rng.random() < TWO_SHAPES_PROBABILITY else 1
    colors = rng.choice(list(COLORS), size=num_shapes, replace=False)  # two shapes never share a colour
    specs = [(str(rng.choice(list(SIZES))), str(c), str(rng.choice(SHAPES)), str(rng.choice(MOTIONS))) for c in colors]
    background = str(rng.choice(list(BACKGROUND_COLORS)))
    pattern = str(rng.choice(PATTERNS))
    phase = (float(rng.integers(2)), 0.0)  # which of the two tones comes first
    for _ in range(60):  # paths that stay in the frame and never let two shapes touch
        shapes = tuple(_draw_shape(rng, *spec) for spec in specs)
        if num_shapes == 1 or not _touch(shapes[0], shapes[1]):
            return Scene(shapes, background, pattern, phase)
    return None


def _draw_shape(rng: np.random.Generator, size: str, color: str, shape: str, motion: str) -> MovingShape:
    radius = SIZES[size]
    left, right, up, down = (e * radius + 0.01 for e in EXTENTS[shape])
    travel = TRAVELS.get(motion, TRAVELS["linear"])
    reach = {  # how far the path leads from its start: left, right, up, down
        "left": (travel, 0, 0, 0),
        "right": (0, travel, 0, 0),
        "up": (0, 0, travel, 0),
        "down": (0, 0, 0, travel),
        "bouncing": (0, 0, 0, travel),
        "circling": (travel,) * 4,
    }[motion]

    def start(before: float, after: float) -> float:
        first, last = math.ceil(before * LATTICE), math.floor((1 - after) * LATTICE)
        return float(rng.integers(first, last + 1)) / LATTICE

    return MovingShape(
        size,
        color,
        shape,
        motion,
        radius,
        start_x=start(left + reach[0], right + reach[1]),
        start_y=start(up + reach[2], down + reach[3]),
        travel=travel,
        phase=float(rng.integers(TURN_STARTS)) * 2 * math.pi / TURN_STARTS,
    )


def _touch(a: MovingShape, b: MovingShape, gap: float = 0.02) -> bool:
    """Whether the bounding boxes of two shapes come within `gap` in any of 33 moments."""
    boxes = []
    for s in (a, b):
        left, right, up, down = (e * s.radius for e in EXTENTS[s.shape])
        p = s.positions(33)
        boxes.append((p[:, 0] - left, p[:, 0] + right, p[:, 1] - up, p[:, 1] + down))
    (l0, r0, u0, d0), (l1, r1, u1, d1) = boxes
    apart = (l0 > r1 + gap) | (l1 > r0 + gap) | (u0 > d1 + gap) | (u1 > d0 + gap)
    return not bool(apart.all())


def moment(scene: Scene, u: float) -> Scene:
    """The scene as it stands at time `u` in [0, 1]: its first frame is that moment."""

    def at(s: MovingShape) -> MovingShape:
        x, y = s.positions(1025)[round(u * 1024)]
        start = s.positions(1)[0] - (s.start_x, s.start_y)  # a circling shape begins away from its centre
        return replace(s, start_x=float(x - start[0]), start_y=float(y - start[1]))

    return replace(scene, shapes=tuple(at(s) for s in scene.shapes))


def signed_distance(shape: str, x: torch.Tensor, y: torch.Tensor, radius: float | torch.Tensor) -> torch.Tensor:
    """Signed distance of points (x, y) to a shape of equivalent radius `radius` at the origin; negative inside."""
    if shape == "circle":
        return torch.sqrt(x * x + y * y) - radius
    if shape == "square":
        return torch.maximum(x.abs(), y.abs()) - _SQUARE * radius
    if shape == "triangle":  # upright, equilateral, centred at its centroid
        inner = _TRIANGLE / 2 * radius
        return torch.maximum(y, x.abs() * (math.sqrt(3) / 2) - y * 0.5) - inner
    if shape == "cross":
        arm = _CROSS * radius
        bar_x = torch.maximum(x.abs() - arm, y.abs() - arm / 3)
        bar_y = torch.maximum(x.abs() - arm / 3, y.abs() - arm)
        return torch.minimum(bar_x, bar_y)
    raise ValueError(f"shape: got {shape!r}; must be one of {SHAPES}")


def coverage(shape: str, radius: float, positions: np.ndarray | torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Share of each pixel that the shape covers (anti-aliased), float32 `[num_frames, height, width]`."""
    side = min(height, width)
    centers = torch.as_tensor(np.asarray(positions), dtype=torch.float32)
    x = (torch.arange(width) + 0.5)[None, None, :] - centers[:, 0, None, None] * width
    y = (torch.arange(height) + 0.5)[None, :, None] - centers[:, 1, None, None] * height
    x, y = torch.broadcast_tensors(x, y)
    return (0.5 - signed_distance(shape, x, y, radius * side)).clamp_(0, 1)


def _background(scene: Scene, height: int, width: int) -> torch.Tensor:
    base = torch.tensor(BACKGROUND_COLORS[scene.background])
    if scene.pattern == "plain":
        return base.expand(height, width, 3)
    cell = min(height, width) / PATTERN_CELLS

    def square_wave(length: int, phase: float) -> torch.Tensor:  # +1 / -1, edges one pixel wide
        t = ((torch.arange(length) + 0.5) / cell + phase) % 2
        distance = torch.minimum((t - 1).abs(), torch.minimum(t, 2 - t)) * cell
        return torch.where(t < 1, 1.0, -1.0) * (2 * distance).clamp(max=1.0)

    wave = square_wave(width, scene.pattern_phase[0])[None, :].expand(height, width)
    if scene.pattern == "checkered":
        wave = wave * square_wave(height, scene.pattern_phase[1])[:, None]
    # The second tone lies on the side of the base colour where there is room.
    toward = 1.0 if base.mean() < 0.5 else -1.0
    return (base + toward * PATTERN_CONTRAST * (wave[..., None] + 1) / 2).clamp(0, 1)


def render(scene: Scene, *, num_frames: int, height: int, width: int) -> torch.Tensor:
    """Draw the clip: uint8 `[num_frames, height, width, 3]`."""
    image = _background(scene, height, width).expand(num_frames, height, width, 3)
    for s in scene.shapes:
        alpha = coverage(s.shape, s.radius, s.positions(num_frames), height, width)[..., None]
        image = image + alpha * (torch.tensor(COLORS[s.color]) - image)
    return (image * 255).round().to(torch.uint8)


def motion_words(motion: str) -> str:
    """The phrase for a motion: 'moving left', 'bouncing', ..."""
    return motion if motion in ("bouncing", "circling") else f"moving {motion}"


def write_caption(shapes: tuple[dict[str, str | None], ...], scene: dict[str, str | None]) -> str:
    """Word order of every caption: shapes, then background; what is None is left out."""
    phrases = []
    for s in shapes:
        words = ["a", s["size"], s["color"], s["shape"] or "shape", motion_words(s["motion"]) if s["motion"] else None]
        phrases.append(" ".join(w for w in words if w))
    text = " and ".join(phrases)
    tail = [w for w in (scene["pattern"], scene["background"]) if w]
    return f"{text} on a {' '.join(tail)} background" if tail else text


def caption(
    scene: Scene, seed: int, *, drop_probability: float = DROP_PROBABILITY, unsaid: tuple[str, ...] = ()
) -> Caption:
    """Describe a scene, leaving out each attribute with probability `drop_probability`, those in `unsaid` always."""
    rng = np.random.default_rng([seed, 7919])

    def keep(name: str, value: str) -> str | None:
        return None if rng.random() < drop_probability or name in unsaid else value

    shapes = tuple({name: keep(name, getattr(s, name)) for name in SHAPE_ATTRIBUTES} for s in scene.shapes)
    said = {name: keep(name, getattr(scene, name)) for name in SCENE_ATTRIBUTES}
    return Caption(write_caption(shapes, said), shapes, said)


def held_out_captions(num_captions: int, *, first_seed: int = 0) -> Iterator[tuple[Scene, Caption]]:
    """The evaluation's captions, each with the scene that it was made from."""
    for seed in range(first_seed, first_seed + num_captions):
        scene = sample_scene(seed, held_out=True)
        yield scene, caption(scene, seed)


def vocabulary() -> list[str]:
    """Every word a caption can hold, in a fixed order."""
    words = ["a", "and", "on", "background", "shape", "moving"]
    for values in ATTRIBUTES.values():
        words += [v for v in values if v not in words]
    return words
