"""How long clips take, from clips that were measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from .jobs import Job


class Estimator:
    """How long jobs take, from those that were measured: of the same shape, else in proportion to their cost."""

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        self._by_shape: dict[str, list[float]] = {}
        self._seconds = self._cost = 0.0
        for record in records:
            if record.get("status") == "done" and record.get("seconds") and record.get("cost"):
                self._add(_shape_key(record.get("recipe"), record["shape"]), record["cost"], record["seconds"])

    def add(self, job: Job, seconds: float) -> None:
        """One more measured job."""
        self._add(_shape_key(job.recipe, list(job.shape[1:])), job.cost, seconds)

    def seconds(self, jobs: Iterable[Job]) -> float | None:
        """Seconds for these jobs one after the other; None where nothing is measured yet."""
        if not self._cost:
            return None
        total = 0.0
        for job in jobs:
            same = self._by_shape.get(_shape_key(job.recipe, list(job.shape[1:])))
            total += sum(same) / len(same) if same else job.cost * self._seconds / self._cost
        return total

    def measured(self, job: Job) -> bool:
        """Whether a job of this one's shape was measured."""
        return _shape_key(job.recipe, list(job.shape[1:])) in self._by_shape

    def _add(self, key: str, cost: float, seconds: float) -> None:
        self._by_shape.setdefault(key, []).append(seconds)
        self._seconds += seconds
        self._cost += cost


def _shape_key(recipe: str | None, shape: list[Any]) -> str:
    return json.dumps([recipe, *shape])
