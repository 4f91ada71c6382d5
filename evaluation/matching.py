"""Holds a detection against a caption, shape by shape."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from ..tiny.dataset import SCENE_ATTRIBUTES, SHAPE_ATTRIBUTES, Caption
from .shapes import DetectedShape, Detection

ATTRIBUTES = (*SHAPE_ATTRIBUTES, *SCENE_ATTRIBUTES)


@dataclass(frozen=True)
class Answer:
    """What a caption says of one attribute and what the clip shows there.

    Attributes:
        attribute: its name.
        slot: index of the caption's shape; None for what belongs to the whole scene.
        said: the caption's value; None where it leaves the attribute open.
        found: the clip's value; None for "neither", which includes a shape that is not there.
    """

    attribute: str
    slot: int | None
    said: str | None
    found: str | None

    @property
    def right(self) -> bool:
        """Whether the clip shows what was said; False where nothing was."""
        return self.said is not None and self.said == self.found


def answers(detection: Detection, caption: Caption) -> list[Answer]:
    """One answer for each attribute of each of the caption's shapes, then for those of the scene."""
    result = []
    for slot, (said, found) in enumerate(zip(caption.shapes, assign(detection, caption), strict=True)):
        result += [Answer(n, slot, said[n], None if found is None else getattr(found, n)) for n in SHAPE_ATTRIBUTES]
    return result + [Answer(n, None, caption.scene[n], getattr(detection, n)) for n in SCENE_ATTRIBUTES]


def match(detection: Detection, caption: Caption) -> dict[str, list[bool]]:
    """Right or wrong for everything the caption says.

    Returns:
        Attribute (and "count", whether the number of shapes agrees) -> one entry for each time the caption states
        it; attributes that it does not state have [].
    """
    result: dict[str, list[bool]] = {name: [] for name in ATTRIBUTES}
    for answer in answers(detection, caption):
        if answer.said is not None:
            result[answer.attribute].append(answer.right)
    result["count"] = [len(detection.shapes) == len(caption.shapes)]
    return result


def assign(detection: Detection, caption: Caption) -> tuple[DetectedShape | None, ...]:
    """The detected shape for each shape of the caption, None where there is none.

    No detected shape serves twice. Of all ways the one with the most attributes right is taken, and of equal ways
    the one that keeps the detection's order, which says nothing about any attribute.
    """
    candidates: list[DetectedShape | None] = list(detection.shapes)
    candidates += [None] * max(0, len(caption.shapes) - len(candidates))

    def score(order: tuple[DetectedShape | None, ...]) -> int:
        return sum(
            found is not None and value is not None and getattr(found, name) == value
            for said, found in zip(caption.shapes, order, strict=True)
            for name, value in said.items()
        )

    return max(itertools.permutations(candidates, len(caption.shapes)), key=score)
