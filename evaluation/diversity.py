"""How varied a model is in what a caption leaves open, relative to the data itself."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from ..tiny.dataset import Scene, sample_scene


def entropy(values: Iterable[str | None]) -> float:
    """Plug-in entropy (nats) of the values that are not None; 0 when there are none."""
    counts = Counter(v for v in values if v is not None)
    total = sum(counts.values())
    return -sum(n / total * math.log(n / total) for n in counts.values()) if total else 0.0


def scenes_with(num_shapes: int, num_scenes: int, *, first_seed: int = 0) -> Iterator[Scene]:
    """Training scenes with this number of shapes, in the order of their seeds."""
    seed = first_seed
    while num_scenes > 0:
        scene = sample_scene(seed)
        seed += 1
        if len(scene.shapes) == num_shapes:
            num_scenes -= 1
            yield scene


def data_entropy(attribute: str, num_shapes: int, num_samples: int, *, repeats: int = 16) -> float:
    """Mean of the same estimator over `repeats` draws of `num_samples` scenes, so that its bias cancels."""
    scenes = list(scenes_with(num_shapes, num_samples * repeats))
    values = [getattr(s.shapes[0] if hasattr(s.shapes[0], attribute) else s, attribute) for s in scenes]
    return sum(entropy(values[i * num_samples : (i + 1) * num_samples]) for i in range(repeats)) / repeats
