"""Runs a model over the held-out captions and sums up what its clips show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ..tiny.dataset import Caption, Scene, held_out_captions, render
from .distribution import (
    ClipSamples,
    Feature,
    SampleStates,
    clip_features,
    compare_samples,
    motion_magnitude,
    plain,
)
from .diversity import data_entropy, entropy
from .fidelity import psnr
from .matching import answers, match
from .report import Table
from .shapes import MEASURES, Detection, detect

MakeClips = Callable[[list[str], list[int]], Sequence[np.ndarray]]
MakeClipsFromImages = Callable[[list[str], list[int], list[np.ndarray]], Sequence[np.ndarray]]
Progress = Callable[[int, int], None]
DIVERSITY_FIRST_SEED = 100_000
_BOOTSTRAP_DRAWS = 1000


@dataclass(frozen=True)
class Accuracy:
    """Share of captioned values that are right, its 95 % bootstrap interval (over captions) and their number."""

    value: float
    low: float
    high: float
    count: int


@dataclass
class EvaluationResult:
    """What the clips of one model show.

    Attributes:
        accuracy: by attribute, and "count" for the number of shapes.
        entropy_ratio: by attribute, entropy of what captions leave open over that of the data; None where the data has
            none. Empty where diversity was not measured.
        continuous: means of the measures of `MEASURES`, None where no clip had a shape.
        first_frame_psnr_db: for image-to-video, first frame against the given picture: mean and the worst clip's.
        samples: features, motion and latents of the clips, for diversity and for distances to another model.
    """

    accuracy: dict[str, Accuracy]
    entropy_ratio: dict[str, float | None] = field(default_factory=dict)
    continuous: dict[str, float | None] = field(default_factory=dict)
    first_frame_psnr_db: dict[str, float] | None = None
    samples: ClipSamples | None = None

    @property
    def mean_accuracy(self) -> float:
        """Share of all captioned values that are right; "count" is no captioned value."""
        rows = [a for name, a in self.accuracy.items() if name != "count"]
        total = sum(a.count for a in rows)
        return sum(a.value * a.count for a in rows) / total if total else math.nan

    @property
    def mean_entropy(self) -> float | None:
        """Mean of the entropy ratios; None where there is none."""
        values = [v for v in self.entropy_ratio.values() if v is not None]
        return sum(values) / len(values) if values else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON: `accuracy` and `entropy` by attribute, their means, intervals and the measures."""
        return {
            "accuracy": {name: a.value for name, a in self.accuracy.items()},
            "accuracy_mean": self.mean_accuracy if self.accuracy else None,
            "accuracy_detail": {name: asdict(a) for name, a in self.accuracy.items()},
            "entropy": dict(self.entropy_ratio),
            "entropy_mean": self.mean_entropy,
            "measures": dict(self.continuous),
            "first_frame_psnr_db": self.first_frame_psnr_db,
            "distribution": {} if self.samples is None else plain(self.samples.describe()),
        }

    def markdown(self) -> str:
        """A table per kind of measure."""
        tables = []
        if self.accuracy:
            tables.append(Table("Caption accuracy", ("attribute", "accuracy", "low", "high", "count")))
            for name, a in self.accuracy.items():
                tables[-1].add(name, a.value, a.low, a.high, a.count)
            tables[-1].add("mean", self.mean_accuracy, None, None, None)
        if self.entropy_ratio:
            tables.append(Table("Diversity", ("attribute", "entropy / data")))
            for name, value in [*self.entropy_ratio.items(), ("mean", self.mean_entropy)]:
                tables[-1].add(name, value)
        if self.continuous or self.first_frame_psnr_db:
            tables.append(Table("Measures", ("measure", "mean")))
        for name, value in self.continuous.items():
            tables[-1].add(name, value)
        for name, value in (self.first_frame_psnr_db or {}).items():
            tables[-1].add(f"first_frame_psnr_db ({name})", value)
        if self.samples is not None:
            tables.append(Table("Distribution", ("measure", "value", "low", "high", "count")))
            for name, found in self.samples.describe().items():
                tables[-1].add(name, found.value, found.low, found.high, found.count)
        return "\n\n".join(t.markdown() for t in tables) + "\n"


def evaluate(
    make_clips: MakeClips,
    *,
    num_captions: int = 256,
    diversity_captions: int = 16,
    diversity_seeds: int = 16,
    batch_size: int = 8,
    progress: Progress | None = None,
    feature: Feature = clip_features,
    states: SampleStates | None = None,
) -> EvaluationResult:
    """Generate for held-out captions and measure.

    Args:
        make_clips: prompts and seeds -> as many uint8 clips `[frames, height, width, 3]`.
        num_captions: held-out captions, each made with its own seed, for accuracy and measures.
        diversity_captions: the first of them are made again with further seeds; 0 leaves diversity out.
        diversity_seeds: how many further seeds.
        batch_size: prompts handed over together.
        progress: called with clips done and clips in all after each batch.
        feature: of the clips, for the Frechet distance to another model.
        states: where `make_clips` puts the latents of the clips, in their order.

    Raises:
        ValueError: a count below 1, more diversity captions than captions, or a wrong number of clips.
    """
    _require_positive(num_captions=num_captions, batch_size=batch_size, diversity_seeds=diversity_seeds)
    if not 0 <= diversity_captions <= num_captions:
        raise ValueError(f"diversity_captions: got {diversity_captions}; must be from 0 to num_captions={num_captions}")
    captions = [c for _, c in held_out_captions(num_captions)]
    jobs = _jobs([c.text for c in captions], diversity_captions, diversity_seeds)
    detections, features, motion = [], [], []
    for clip in _clips(make_clips, jobs, batch_size, progress):
        detections.append(detect(clip))
        features.append(feature(clip))
        motion.append(motion_magnitude(clip))
    starts = range(num_captions, len(jobs), diversity_seeds)
    varied = [detections[start : start + diversity_seeds] for start in starts]
    return EvaluationResult(
        _accuracy([match(d, c) for d, c in zip(detections[:num_captions], captions, strict=True)]),
        _entropy_ratios(varied, captions[:diversity_captions]),
        _continuous(detections[:num_captions]),
        samples=ClipSamples.collect(features, motion, num_captions=num_captions, seeds=diversity_seeds, states=states),
    )


def evaluate_prompts(
    make_clips: MakeClips,
    prompts: Sequence[str],
    *,
    diversity_prompts: int = 8,
    diversity_seeds: int = 8,
    batch_size: int = 1,
    progress: Progress | None = None,
    feature: Feature = clip_features,
    states: SampleStates | None = None,
) -> EvaluationResult:
    """As `evaluate`, for any prompts: motion, diversity and what is compared with a teacher, but no accuracy.

    Args:
        make_clips: prompts and seeds -> as many uint8 clips `[frames, height, width, 3]`.
        prompts: each made with its own seed.
        diversity_prompts: the first of them are made again with further seeds; 0 leaves diversity out.
        diversity_seeds: how many further seeds.
        batch_size: prompts handed over together.
        progress: called with clips done and clips in all after each batch.
        feature: of the clips, for the diversity and for the Frechet distance to another model.
        states: where `make_clips` puts the latents of the clips, in their order.

    Raises:
        ValueError: a count below 1, more diversity prompts than prompts, or a wrong number of clips.
    """
    _require_positive(prompts=len(prompts), batch_size=batch_size, diversity_seeds=diversity_seeds)
    if not 0 <= diversity_prompts <= len(prompts):
        raise ValueError(f"diversity_prompts: got {diversity_prompts}; must be from 0 to {len(prompts)}, the prompts")
    jobs = _jobs(prompts, diversity_prompts, diversity_seeds)
    features, motion = [], []
    for clip in _clips(make_clips, jobs, batch_size, progress):
        features.append(feature(clip))
        motion.append(motion_magnitude(clip))
    samples = ClipSamples.collect(
        features,
        motion,
        num_captions=len(prompts),
        seeds=diversity_seeds,
        states=states,
        features_vary=feature is not clip_features,
    )
    return EvaluationResult({}, samples=samples)


def evaluate_image_to_video(
    make_clips: MakeClipsFromImages,
    *,
    num_captions: int = 64,
    size: tuple[int, int],
    batch_size: int = 1,
    progress: Progress | None = None,
) -> EvaluationResult:
    """As `evaluate`, from the true first frame of each held-out scene and the caption that belongs to it.

    The picture gives away everything but the motion, so the motion's accuracy is the one that counts.

    Args:
        make_clips: prompts, seeds and pictures (uint8 `[height, width, 3]`) -> as many clips.
        size: height and width of the pictures.
    """
    _require_positive(num_captions=num_captions, batch_size=batch_size)
    pairs = list(held_out_captions(num_captions))
    pictures = [_first_frame(scene, size) for scene, _ in pairs]
    place = {id(c): picture for (_, c), picture in zip(pairs, pictures, strict=True)}

    jobs = [(c, i) for i, (_, c) in enumerate(pairs)]
    made: list[np.ndarray] = []
    for start in range(0, len(jobs), batch_size):
        batch = jobs[start : start + batch_size]
        clips = make_clips([c.text for c, _ in batch], [s for _, s in batch], [place[id(c)] for c, _ in batch])
        made += _checked(clips, len(batch))
        if progress is not None:
            progress(len(made), len(jobs))
    detections = [detect(clip) for clip in made]
    kept = [psnr(clip[:1], picture[None]) for clip, picture in zip(made, pictures, strict=True)]
    return EvaluationResult(
        _accuracy([match(d, c) for d, (_, c) in zip(detections, pairs, strict=True)]),
        continuous=_continuous(detections),
        first_frame_psnr_db={"mean": float(np.mean(kept)), "worst": float(np.min(kept))},
    )


def _require_positive(**counts: int) -> None:
    for name, number in counts.items():
        if number < 1:
            raise ValueError(f"{name}: got {number}; must be at least 1")


def _first_frame(scene: Scene, size: tuple[int, int]) -> np.ndarray:
    return render(scene, num_frames=1, height=size[0], width=size[1])[0].numpy()


def _checked(clips: Sequence[np.ndarray], expected: int) -> Sequence[np.ndarray]:
    if len(clips) != expected:
        raise ValueError(f"make_clips: got {len(clips)} clips; must be {expected}, one for each prompt")
    return clips


def _jobs(prompts: Sequence[str], num_varied: int, num_seeds: int) -> list[tuple[str, int]]:
    """Every prompt with a seed of its own, then the first `num_varied` with `num_seeds` further ones each."""
    jobs = [(prompt, seed) for seed, prompt in enumerate(prompts)]
    return jobs + [(p, DIVERSITY_FIRST_SEED + s) for p in prompts[:num_varied] for s in range(num_seeds)]


def _clips(
    make_clips: MakeClips, jobs: list[tuple[str, int]], batch_size: int, progress: Progress | None
) -> Iterator[np.ndarray]:
    for start in range(0, len(jobs), batch_size):
        batch = jobs[start : start + batch_size]
        yield from _checked(make_clips([text for text, _ in batch], [seed for _, seed in batch]), len(batch))
        if progress is not None:
            progress(start + len(batch), len(jobs))


def _accuracy(matches: list[dict[str, list[bool]]]) -> dict[str, Accuracy]:
    draws = np.random.default_rng(0).integers(0, len(matches), size=(_BOOTSTRAP_DRAWS, len(matches)))
    result = {}
    for name in matches[0]:
        right = np.array([sum(m[name]) for m in matches])
        stated = np.array([len(m[name]) for m in matches])
        if stated.sum() == 0:
            continue
        number = stated[draws].sum(axis=1)
        rates = right[draws].sum(axis=1)[number > 0] / number[number > 0]
        low, high = np.quantile(rates, (0.025, 0.975))
        result[name] = Accuracy(float(right.sum() / stated.sum()), float(low), float(high), int(stated.sum()))
    return result


def _entropy_ratios(varied: list[list[Detection]], captions: list[Caption]) -> dict[str, float | None]:
    """For each attribute: mean entropy over captions that leave it open, over the data's mean."""
    found: dict[str, list[float]] = {}
    data: dict[str, list[float]] = {}
    for group, caption in zip(varied, captions, strict=True):
        values: dict[tuple[str, int | None], list[str | None]] = {}
        for detection in group:
            for answer in answers(detection, caption):
                if answer.said is None:
                    values.setdefault((answer.attribute, answer.slot), []).append(answer.found)
        for (name, _), seen in values.items():
            found.setdefault(name, []).append(entropy(seen))
            data.setdefault(name, []).append(data_entropy(name, len(caption.shapes), len(group)))
    return {n: float(np.mean(found[n]) / np.mean(data[n])) if np.mean(data[n]) > 0 else None for n in sorted(found)}


def _continuous(detections: list[Detection]) -> dict[str, float | None]:
    shapes = [s for d in detections for s in d.shapes]
    result: dict[str, float | None] = {}
    for name in MEASURES:
        values = [v for s in shapes if not math.isnan(v := getattr(s, name))]
        result[name] = float(np.mean(values)) if values else None
    return result


def compare(student: EvaluationResult, teacher: EvaluationResult) -> dict[str, Any]:
    """Student over teacher, of the means and by attribute; None where the teacher's value is 0 or absent.

    "distribution" holds the distances of `compare_samples`, where both have samples.
    """

    def ratio(ours: float | None, theirs: float | None) -> float | None:
        return ours / theirs if ours is not None and theirs and not math.isnan(theirs) else None

    def by_name(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, float | None]:
        return {name: ratio(ours[name], theirs[name]) for name in ours if name in theirs}

    values = [{name: a.value for name, a in result.accuracy.items()} for result in (student, teacher)]
    distances = {}
    if student.samples is not None and teacher.samples is not None:
        distances = plain(compare_samples(student.samples, teacher.samples))
    return {
        "accuracy_over_teacher": ratio(student.mean_accuracy, teacher.mean_accuracy),
        "entropy_over_teacher": ratio(student.mean_entropy, teacher.mean_entropy),
        "accuracy_over_teacher_detail": by_name(*values),
        "entropy_over_teacher_detail": by_name(student.entropy_ratio, teacher.entropy_ratio),
        "distribution_to_teacher": distances,
    }
