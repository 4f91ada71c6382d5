"""How varied a model is in what a caption leaves open, relative to the data itself."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence

from ..tiny.dataset import Scene, sample_scene


def entropy(values: Sequence[str | None]) -> float:
    """Plug-in entropy (nats) of the values, times the share of them that is not None.

    None is "neither": a clip whose colour is no colour of the world is not one more colour, so it adds nothing. Noise
    alone has entropy 0.
    """
    counts = Counter(v for v in values if v is not None)
    total = sum(counts.values())
    if total == 0:
        return 0.0
    return -sum(n / total * math.log(n / total) for n in counts.values()) * total / len(values)


def scenes_with(num_shapes: int, num_scenes: int, *, first_seed: int = 0) -> Iterator[Scene]:
    """Training scenes with this number of shapes, in the order of their seeds."""
    seed = first_seed
    while num_scenes > 0:
        scene = sample_scene(seed)
        seed += 1
        if len(scene.shapes) == num_shapes:
            num_scenes -= 1
            yield scene


@functools.lru_cache(maxsize=8)
def _scenes(num_shapes: int, num_scenes: int) -> tuple[Scene, ...]:
    return tuple(scenes_with(num_shapes, num_scenes))


def data_entropy(attribute: str, num_shapes: int, num_samples: int, *, repeats: int = 16) -> float:
    """Mean of the same estimator over `repeats` draws of `num_samples` scenes, so that its bias cancels."""
    scenes = _scenes(num_shapes, num_samples * repeats)
    values = [getattr(s.shapes[0] if hasattr(s.shapes[0], attribute) else s, attribute) for s in scenes]
    return sum(entropy(values[i * num_samples : (i + 1) * num_samples]) for i in range(repeats)) / repeats
