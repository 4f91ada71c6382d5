"""Distances between the clips of two models, and how varied those of one are, each with a bootstrap interval.

Every distance is between samples that belong together: the same captions, the same seeds. All arithmetic is float64 on
the CPU.

The feature of a clip (`clip_features`) is fixed and has no weights, so that numbers of different versions and machines
can be compared: 18 numbers that say how bright, how varied in space and time, and how coarse a clip is, and where its
light lies. `ImageModelFeature` is the same interface over a CLIP or DINO model, for clips of the real world.

Intervals hold 95 % of the bootstrap draws, after these are moved so that their median is the value. Drawing with
replacement makes every distance between two samples larger by itself (and every diversity smaller), so the draws tell
the spread and not the place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

BOOTSTRAP_DRAWS = 200
NUM_PROJECTIONS = 128
FEATURE_NAMES = (
    *(f"mean_{c}" for c in "rgb"),
    *(f"std_space_{c}" for c in "rgb"),
    *(f"std_time_{c}" for c in "rgb"),
    "change_x", "change_y", "change_t",
    "first_x", "first_y", "first_xy",
    "move_x", "move_y", "move_xy",
)  # fmt: skip
SMALLEST_SCALE = 1e-3
"""Lower bound of the reference's standard deviation by which a feature is divided."""
_POOL = 4
"""Side of the squares whose means count as motion: noise of single pixels is no motion."""

Feature = Callable[[np.ndarray], np.ndarray]
"""Maps a clip, uint8 [F, H, W, 3], to a vector of fixed length."""


@dataclass(frozen=True)
class Measure:
    """A value, its 95 % interval (None with a single sample to draw from), and how many samples it is of."""

    value: float
    low: float | None
    high: float | None
    count: int


def bootstrap(statistic: Callable[[np.ndarray], float], count: int, draws: int = BOOTSTRAP_DRAWS) -> Measure:
    """A statistic of samples 0 ... count - 1 with its interval.

    Args:
        statistic: from indices of samples, which may repeat, to its value.
        count: number of samples.
        draws: how often they are drawn again.

    Raises:
        ValueError: no samples.
    """
    if count < 1:
        raise ValueError(f"count: got {count}; must be at least 1")
    value = float(statistic(np.arange(count)))
    if count == 1:
        return Measure(value, None, None, 1)
    rng = np.random.default_rng(0)
    drawn = np.array([statistic(rng.integers(0, count, count)) for _ in range(draws)], dtype=float)
    low, middle, high = np.quantile(drawn, (0.025, 0.5, 0.975))
    return Measure(value, float(value + low - middle), float(value + high - middle), count)


def clip_features(clip: np.ndarray) -> np.ndarray:
    """The fixed feature of a clip, uint8 [F, H, W, 3] -> float64 [18]; colours in [0, 1].

    In the order of `FEATURE_NAMES`, with y the mean of the three channels:
    - mean of each channel; its standard deviation over the pixels of a frame, mean over the frames; its standard
      deviation over the frames at a pixel, mean over the pixels;
    - mean |difference| of y to the next column, row and frame;
    - first frame: mean of y times cos(pi x), cos(pi y), and their product, x and y from 0 to 1 over the frame: on which
      side and in which corner the light lies. Last frame minus first frame of the same three: where it goes.

    Raises:
        ValueError: another dtype or shape, or a side or a number of frames below 2.
    """
    if clip.dtype != np.uint8 or clip.ndim != 4 or clip.shape[-1] != 3 or min(clip.shape[:3]) < 2:
        raise ValueError(f"clip: got {clip.dtype} {clip.shape}; must be uint8 [F, H, W, 3] with 2 or more of F, H, W")
    pixels = torch.from_numpy(np.ascontiguousarray(clip)).float() / 255
    light = pixels.mean(dim=3)
    height, width = clip.shape[1:3]
    across = torch.cos(math.pi * (torch.arange(width) + 0.5) / width)[None, :]
    down = torch.cos(math.pi * (torch.arange(height) + 0.5) / height)[:, None]
    waves = [across.expand(height, width), down.expand(height, width), across * down]
    first, last = (torch.stack([(light[i] * wave).mean() for wave in waves]) for i in (0, -1))
    changes = [light.diff(dim=dim).abs().mean() for dim in (2, 1, 0)]
    parts = [
        pixels.mean(dim=(0, 1, 2)),
        pixels.std(dim=(1, 2), unbiased=False).mean(dim=0),
        pixels.std(dim=0, unbiased=False).mean(dim=(0, 1)),
        torch.stack(changes),
        first,
        last - first,
    ]
    return torch.cat(parts).double().numpy()


class ImageModelFeature:
    """Mean over evenly spaced frames of the picture embeddings of a CLIP or DINO model in the transformers layout.

    Args:
        folder: of the model with its image processor, or a Hub id.
        num_frames: how many frames are looked at.
        device: of the model.
    """

    def __init__(self, folder: str, *, num_frames: int = 8, device: str | torch.device = "cpu") -> None:
        from transformers import AutoImageProcessor, AutoModel

        self._model: Any = AutoModel.from_pretrained(folder, use_safetensors=True).to(device).eval()
        self._processor: Any = AutoImageProcessor.from_pretrained(folder)
        self._num_frames, self._device = num_frames, device

    @torch.no_grad()
    def __call__(self, clip: np.ndarray) -> np.ndarray:
        chosen = np.linspace(0, len(clip) - 1, min(self._num_frames, len(clip))).round().astype(int)
        inputs = self._processor(images=list(clip[chosen]), return_tensors="pt").to(self._device)
        if hasattr(self._model, "get_image_features"):
            out = self._model.get_image_features(**inputs)
        else:
            out = self._model(**inputs)
        embeds = out if isinstance(out, torch.Tensor) else out.pooler_output
        mean: np.ndarray = embeds.double().mean(dim=0).cpu().numpy()
        return mean


def motion_magnitude(clip: np.ndarray) -> float:
    """Mean |difference| between neighbouring frames of a clip's 4 x 4 pixel means, colours in [0, 1]."""
    frames = torch.from_numpy(np.ascontiguousarray(clip)).permute(0, 3, 1, 2).float() / 255
    coarse = torch.nn.functional.avg_pool2d(frames, _POOL, ceil_mode=True)
    return float(coarse.diff(dim=0).abs().mean()) if len(clip) > 1 else 0.0


def frechet_distance(ours: np.ndarray, reference: np.ndarray) -> float:
    """Squared Frechet distance |m - m'|^2 + tr(S + S' - 2 (S S')^(1/2)) of two samples, [N, D] and [N', D].

    Features are divided by the reference's standard deviation first. With fewer samples than a few times D the value is
    biased upwards, so compare only numbers of as many samples.
    """
    scale = np.maximum(reference.std(axis=0), SMALLEST_SCALE)
    a, b = ours / scale, reference / scale
    cov_a, cov_b = (np.atleast_2d(np.cov(x, rowvar=False, bias=True)) for x in (a, b))
    values, vectors = np.linalg.eigh(cov_b)
    root = (vectors * np.sqrt(values.clip(min=0))) @ vectors.T
    inner = np.linalg.eigvalsh(root @ cov_a @ root)
    cross = float(np.sqrt(inner.clip(min=0)).sum())
    mean = float(np.square(a.mean(axis=0) - b.mean(axis=0)).sum())
    return max(0.0, mean + float(np.trace(cov_a) + np.trace(cov_b)) - 2 * cross)


def _projected(samples: np.ndarray, num_projections: int) -> np.ndarray:
    """Onto fixed random directions of unit length: [N, D] -> [N, P]."""
    directions = np.random.default_rng(0).standard_normal((samples.shape[1], num_projections))
    projected: np.ndarray = samples @ (directions / np.linalg.norm(directions, axis=0))
    return projected


def _sliced(ours: np.ndarray, reference: np.ndarray) -> float:
    """Root of the mean squared difference of the quantiles, over projections; [N, P] and [N', P]."""
    count = max(len(ours), len(reference))
    places = (np.arange(count) + 0.5) / count
    a, b = (np.quantile(x, places, axis=0, method="hazen") for x in (ours, reference))
    return float(np.sqrt(np.square(a - b).mean()))


def sliced_wasserstein(ours: np.ndarray, reference: np.ndarray, num_projections: int = NUM_PROJECTIONS) -> float:
    """Sliced 2-Wasserstein distance of two samples, [N, D] and [N', D].

    For two normal distributions with the identity times s^2 and t^2 as covariance and equal means it is |s - t|.
    """
    return _sliced(_projected(ours, num_projections), _projected(reference, num_projections))


def squared_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """|a_i - b_j|^2 of rows, [N, M]."""
    squares = np.square(a).sum(axis=1)[:, None] + np.square(b).sum(axis=1)[None, :]
    return np.maximum(squares - 2 * a @ b.T, 0.0)


def median_bandwidth(reference: np.ndarray) -> float:
    """Median distance between two different reference samples; of the reference alone, so that all models share it."""
    distances = squared_distances(reference, reference)[~np.eye(len(reference), dtype=bool)]
    return max(float(np.sqrt(np.median(distances))), 1e-12) if distances.size else 1.0


def _kernel(a: np.ndarray, b: np.ndarray, bandwidth: float) -> np.ndarray:
    kernel: np.ndarray = np.exp(-squared_distances(a, b) / (2 * bandwidth**2))
    return kernel


def _mmd(ours: np.ndarray, reference: np.ndarray, cross: np.ndarray) -> float:
    n, m = len(ours), len(reference)
    within = [(k.sum() - np.trace(k)) / (size * (size - 1)) for k, size in ((ours, n), (reference, m))]
    return float(within[0] + within[1] - 2 * cross.mean())


def squared_mmd(ours: np.ndarray, reference: np.ndarray, bandwidth: float | None = None) -> float:
    """Squared maximum mean discrepancy with a Gaussian kernel, without bias: near 0, and below it as often as not, for
    two samples of one distribution.

    Args:
        ours: [N, D], two or more rows.
        reference: [N', D], likewise.
        bandwidth: of the kernel; None takes `median_bandwidth`.
    """
    if min(len(ours), len(reference)) < 2:
        raise ValueError(f"samples: got {len(ours)} and {len(reference)}; must be at least 2 each")
    width = median_bandwidth(reference) if bandwidth is None else bandwidth
    return _mmd(_kernel(ours, ours, width), _kernel(reference, reference, width), _kernel(ours, reference, width))


def vendi_score(samples: np.ndarray) -> float:
    """How many different samples there are in effect, from 1 (all alike) to N (all at right angles).

    exp of the entropy of the eigenvalues of K / N with K the cosine of the angle between rows of [N, D]; source: arXiv
    2210.02410.
    """
    norms = np.maximum(np.linalg.norm(samples, axis=1, keepdims=True), 1e-12)
    unit = samples / norms
    values = np.linalg.eigvalsh(unit @ unit.T / len(samples)).clip(min=0)
    values = values[values > 1e-12]
    values = values / values.sum()
    return float(np.exp(-(values * np.log(values)).sum()))


def mean_pairwise_distance(samples: np.ndarray) -> float:
    """Mean over pairs of different rows of [N, D] of their root mean squared difference; 0 for a single row."""
    count = len(samples)
    if count < 2:
        return 0.0
    distances = np.sqrt(squared_distances(samples, samples) / samples.shape[1])
    return float(distances[~np.eye(count, dtype=bool)].mean())


def relative_distances(ours: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Distance of each row to the same row of the reference, over the root mean square of the reference's norms."""
    scale = max(float(np.sqrt(np.square(reference).sum(axis=1).mean())), 1e-12)
    distances: np.ndarray = np.linalg.norm(ours - reference, axis=1) / scale
    return distances


@dataclass
class SampleStates:
    """Latents that whoever makes the clips hands over, in the order of the clips.

    Attributes:
        crossover: noise level at which the state on the way is wanted; None for none.
        final: latents at the end, [B, ...] per batch.
        on_the_way: latents at the level `crossover`, likewise; empty where they were not to be had.
    """

    crossover: float | None = None
    final: list[torch.Tensor] = field(default_factory=list)
    on_the_way: list[torch.Tensor] = field(default_factory=list)

    def rows(self, name: str) -> np.ndarray | None:
        """All latents of that attribute, float64 [N, D]; None without any."""
        given: list[torch.Tensor] = getattr(self, name)
        return torch.cat([t.detach().double().cpu().flatten(1) for t in given]).numpy() if given else None


@dataclass
class ClipSamples:
    """What is kept of the clips of one model.

    Attributes:
        features: [N, D], a row per caption.
        motion: [N], magnitudes.
        varied: by caption, latents (else features) of its clips from several seeds, [S, D].
        varied_space: "latents" or "features".
        latents: [N, D] at the end; None where they were not handed over.
        crossover: [N, D] at the crossover, likewise.
    """

    features: np.ndarray
    motion: np.ndarray
    varied: list[np.ndarray] = field(default_factory=list)
    varied_space: str = "features"
    latents: np.ndarray | None = None
    crossover: np.ndarray | None = None

    @classmethod
    def collect(
        cls,
        features: Sequence[np.ndarray],
        motion: Sequence[float],
        *,
        num_captions: int,
        seeds: int,
        states: SampleStates | None = None,
        features_vary: bool = False,
    ) -> ClipSamples:
        """From the features of all clips: one for each caption, then `seeds` for each of some captions.

        Diversity is that of the latents where they were handed over, unless `features_vary`.

        Raises:
            ValueError: latents were handed over, but not one per clip.
        """
        rows, finals, ways = np.stack(list(features)), None, None
        if states is not None:
            finals, ways = states.rows("final"), states.rows("on_the_way")
        for name, given in (("final", finals), ("on_the_way", ways)):
            if given is not None and len(given) != len(rows):
                raise ValueError(f"states.{name}: got {len(given)} latents; must be {len(rows)}, one for each clip")
        space = rows if finals is None or features_vary else finals
        return cls(
            rows[:num_captions],
            np.asarray(motion)[:num_captions],
            [space[start : start + seeds] for start in range(num_captions, len(rows), seeds)],
            "features" if finals is None or features_vary else "latents",
            None if finals is None else finals[:num_captions],
            None if ways is None else ways[:num_captions],
        )

    def describe(self) -> dict[str, Measure]:
        """What can be said of one model: motion, and diversity where captions were made with several seeds."""
        result = {"motion": bootstrap(lambda i: float(self.motion[i].mean()), len(self.motion))}
        if self.varied and len(self.varied[0]) > 1:
            for name, score in (("vendi", vendi_score), ("pairwise_distance", mean_pairwise_distance)):
                values = np.array([score(group) for group in self.varied])
                result[name] = bootstrap(lambda i, v=values: float(v[i].mean()), len(values))  # type: ignore[misc]
        return result


def compare_samples(ours: ClipSamples, teacher: ClipSamples) -> dict[str, Measure]:
    """Distances of a model to its teacher over the same captions and seeds; what was not handed over is left out.

    `motion_over_teacher`, `vendi_over_teacher` and `pairwise_distance_over_teacher` are ratios of means; captions are
    drawn together. `frechet` is of the features; `sliced_wasserstein` and `squared_mmd` of the latents at the end,
    divided by the square root of their number so that it does not depend on the size; `crossover_distance` and
    `end_distance` are same-seed distances relative to the teacher's norm.

    Raises:
        ValueError: other numbers of captions.
    """
    count = len(ours.features)
    if len(teacher.features) != count:
        raise ValueError(f"teacher: got {len(teacher.features)} captions; must be {count}")
    result = {}
    if float(teacher.motion.mean()) > 0:
        result["motion_over_teacher"] = _ratio(ours.motion, teacher.motion)
    if ours.varied and len(ours.varied) == len(teacher.varied) and ours.varied_space == teacher.varied_space:
        for name, score in (("vendi", vendi_score), ("pairwise_distance", mean_pairwise_distance)):
            mine, theirs = (np.array([score(group) for group in s.varied]) for s in (ours, teacher))
            if theirs.mean() > 0:
                result[f"{name}_over_teacher"] = _ratio(mine, theirs)
    result["frechet"] = _floored(bootstrap(lambda i: frechet_distance(ours.features[i], teacher.features[i]), count))
    if ours.latents is not None and teacher.latents is not None:
        result |= _latent_distances(ours.latents, teacher.latents)
        result["end_distance"] = _mean(relative_distances(ours.latents, teacher.latents))
    if ours.crossover is not None and teacher.crossover is not None:
        result["crossover_distance"] = _mean(relative_distances(ours.crossover, teacher.crossover))
    return result


def _latent_distances(ours: np.ndarray, teacher: np.ndarray) -> dict[str, Measure]:
    size, count = math.sqrt(ours.shape[1]), len(ours)
    a, b = ours / size, teacher / size
    # Directions of unit length have entries of order 1 / sqrt(D); this brings the distance back to that of one number.
    pa, pb = (_projected(x, NUM_PROJECTIONS) * size for x in (a, b))
    result = {"sliced_wasserstein": _floored(bootstrap(lambda i: _sliced(pa[i], pb[i]), count))}
    if count > 1:
        width = median_bandwidth(b)
        within, reference, cross = _kernel(a, a, width), _kernel(b, b, width), _kernel(a, b, width)

        def mmd(i: np.ndarray) -> float:
            grid = np.ix_(i, i)
            return _mmd(within[grid], reference[grid], cross[grid])

        result["squared_mmd"] = bootstrap(mmd, count)
    return result


def _mean(values: np.ndarray) -> Measure:
    return bootstrap(lambda i: float(values[i].mean()), len(values))


def _ratio(ours: np.ndarray, theirs: np.ndarray) -> Measure:
    return bootstrap(lambda i: float(ours[i].mean() / max(float(theirs[i].mean()), 1e-12)), len(ours))


def _floored(measure: Measure) -> Measure:
    """For what is never negative."""
    low = None if measure.low is None else max(0.0, measure.low)
    return Measure(measure.value, low, measure.high, measure.count)


def plain(measures: dict[str, Measure]) -> dict[str, dict[str, Any]]:
    """For JSON."""
    return {name: asdict(measure) for name, measure in measures.items()}
