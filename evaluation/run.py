"""Runs a model over the held-out captions and sums up what its clips show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from ..tiny.dataset import SCENE_ATTRIBUTES, SHAPE_ATTRIBUTES, Caption, held_out_captions
from .diversity import data_entropy, entropy
from .report import Table
from .shapes import Detection, assign, detect, match

MakeClips = Callable[[list[str], list[int]], Sequence[np.ndarray]]
CONTINUOUS = ("shape_iou", "track_error", "area_unsteadiness", "color_unsteadiness", "sharpness")


@dataclass(frozen=True)
class Accuracy:
    """Share of captioned values that are right, its 95 % bootstrap interval (over captions) and their number."""

    value: float
    low: float
    high: float
    count: int


@dataclass
class EvaluationResult:
    """Accuracy, diversity (entropy over the data's) and means of the continuous measures."""

    accuracy: dict[str, Accuracy]
    entropy_ratio: dict[str, float]
    continuous: dict[str, float]

    def to_dict(self) -> dict:
        """Plain data for JSON."""
        return asdict(self)

    def markdown(self) -> str:
        """Three tables."""
        first = Table("Caption accuracy", ("attribute", "accuracy", "low", "high", "count"))
        for name, a in self.accuracy.items():
            first.add(name, a.value, a.low, a.high, a.count)
        second = Table("Diversity", ("attribute", "entropy / data"))
        for name, value in self.entropy_ratio.items():
            second.add(name, value)
        third = Table("Measures", ("measure", "mean"))
        for name, value in self.continuous.items():
            third.add(name, value)
        return "\n\n".join(t.markdown() for t in (first, second, third)) + "\n"


def evaluate(
    make_clips: MakeClips,
    *,
    num_captions: int = 256,
    diversity_captions: int = 16,
    diversity_seeds: int = 16,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
) -> EvaluationResult:
    """Generate for held-out captions and measure.

    Args:
        make_clips: prompts and seeds -> as many uint8 clips `[frames, height, width, 3]`.
        progress: called with clips done and clips in all after each batch.

    Raises:
        ValueError: a count below 1, more diversity captions than captions, or a wrong number of clips.
    """
    for name, number in (("num_captions", num_captions), ("batch_size", batch_size)):
        if number < 1:
            raise ValueError(f"{name}: got {number}; must be at least 1")
    if diversity_captions > num_captions:
        raise ValueError(f"diversity_captions: got {diversity_captions}; must be at most num_captions={num_captions}")
    captions = [c for _, c in held_out_captions(num_captions)]
    jobs = [(c, i) for i, c in enumerate(captions)]
    jobs += [(c, 100_000 + s) for c in captions[:diversity_captions] for s in range(diversity_seeds)]
    detections = list(_detections(make_clips, jobs, batch_size, progress))
    varied = [
        detections[num_captions + i * diversity_seeds : num_captions + (i + 1) * diversity_seeds]
        for i in range(diversity_captions)
    ]
    return EvaluationResult(
        _accuracy(detections[:num_captions], captions),
        _entropy_ratios(varied, captions) if diversity_seeds > 1 else {},
        _continuous(detections[:num_captions]),
    )


def _detections(
    make_clips: MakeClips,
    jobs: list[tuple[Caption, int]],
    batch_size: int,
    progress: Callable[[int, int], None] | None,
) -> Iterator[Detection]:
    for start in range(0, len(jobs), batch_size):
        batch = jobs[start : start + batch_size]
        clips = make_clips([c.text for c, _ in batch], [s for _, s in batch])
        if len(clips) != len(batch):
            raise ValueError(f"make_clips: got {len(clips)} clips; must be {len(batch)}, one for each prompt")
        for clip in clips:
            yield detect(clip)
        if progress is not None:
            progress(start + len(batch), len(jobs))


def _accuracy(detections: list[Detection], captions: list[Caption]) -> dict[str, Accuracy]:
    matches = [match(d, c) for d, c in zip(detections, captions, strict=True)]
    rng = np.random.default_rng(0)
    draws = rng.integers(0, len(matches), size=(1000, len(matches)))
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


def _entropy_ratios(varied: list[list[Detection]], captions: list[Caption]) -> dict[str, float]:
    """For each attribute: mean entropy over captions that leave it open, over the data's mean."""
    found: dict[str, list[float]] = {}
    data: dict[str, list[float]] = {}
    for group, caption in zip(varied, captions[: len(varied)], strict=True):
        partners = [assign(d, caption) for d in group]
        values = {n: [getattr(d, n) for d in group] for n in SCENE_ATTRIBUTES if caption.scene[n] is None}
        for name in SHAPE_ATTRIBUTES:
            for index, said in enumerate(caption.shapes):
                if said[name] is None:
                    shapes = [p[index] for p in partners]
                    values[name] = [None if s is None else getattr(s, name) for s in shapes]
        for name, seen in values.items():
            found.setdefault(name, []).append(entropy(seen))
            data.setdefault(name, []).append(data_entropy(name, len(caption.shapes), len(group)))
    return {n: float(np.mean(found[n]) / np.mean(data[n])) for n in found if np.mean(data[n]) > 0}


def _continuous(detections: list[Detection]) -> dict[str, float]:
    shapes = [s for d in detections for s in d.shapes]
    return {n: float(np.nanmean([getattr(s, n) for s in shapes])) if shapes else math.nan for n in CONTINUOUS}


def compare(student: EvaluationResult, teacher: EvaluationResult) -> dict[str, dict[str, float]]:
    """Student over teacher for every attribute that both have and the teacher's value is not zero."""
    return {
        "accuracy_over_teacher": {
            n: a.value / teacher.accuracy[n].value
            for n, a in student.accuracy.items()
            if n in teacher.accuracy and teacher.accuracy[n].value > 0
        },
        "entropy_over_teacher": {
            n: value / teacher.entropy_ratio[n]
            for n, value in student.entropy_ratio.items()
            if teacher.entropy_ratio.get(n, 0) > 0
        },
    }
