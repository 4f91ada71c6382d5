"""Runs a batch in this process: what is missing, broken, changed or failed before, one job after the other."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from .batch_folder import BatchFolder, Runner
from .estimate import Estimator
from .jobs import Job, grouped

WAIT_SECONDS = 0.5
"""Pause between two looks at jobs that other processes work on."""


@dataclass
class Summary:
    """What one run of a batch did; the lists hold ids."""

    made: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    elsewhere: list[str] = field(default_factory=list)
    """Made by other processes while this one ran."""
    left: list[str] = field(default_factory=list)
    """Not begun, as a limit was reached."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data: numbers, and the failed with their reasons."""
        numbers = {name: len(getattr(self, name)) for name in ("made", "kept", "elsewhere", "left")}
        return {**numbers, "failed": len(self.failed), "errors": dict(self.failed)}


class Observer(Protocol):
    """Hears what a batch does; its methods do nothing and may be overridden."""

    def states(self, states: Mapping[str, str]) -> None:
        """The state of every job before the first is made."""
        return None

    def begins(self, job: Job) -> None:
        """A job begins."""
        return None

    def step(self, job: Job, index: int, steps: int, seconds: float) -> None:
        """A denoising step of it is done."""
        return None

    def ended(self, job: Job, record: Mapping[str, Any], seconds_left: float | None) -> None:
        """It is done or failed; the time that the rest takes, by what was measured."""
        return None

    def waiting(self, jobs: Sequence[Job]) -> None:
        """Nothing is left but what other processes work on."""
        return None


class _Silent(Observer):
    """Nobody listens."""


def run_batch(
    jobs: Sequence[Job],
    folder: BatchFolder,
    runner: Callable[[], Runner],
    observer: Observer | None = None,
    *,
    limit: int | None = None,
) -> Summary:
    """Makes what is missing, broken, changed or failed before, and returns when every job is settled.

    Jobs that another process works on are waited for; if it dies they are made here.

    Args:
        jobs: with resolved requests and different ids.
        folder: where to.
        runner: loads the model; called once, before the first job that has to be made.
        observer: hears of the progress.
        limit: most jobs to make now.
    """
    observer = observer or _Silent()
    pending, known, summary = begin(jobs, folder, observer)
    estimator = Estimator()
    loaded: Runner | None = None
    while pending:
        busy: list[Job] = []
        for position, job in enumerate(pending):
            if limit is not None and len(summary.made) + len(summary.failed) >= limit:
                summary.left = [other.id for other in [*busy, *pending[position:]]]
                folder.finish(jobs)
                return summary
            with folder.claim(job.id) as ours:
                if not ours:
                    busy.append(job)
                    continue
                if settled_by_others(job, folder, known[job.id], summary):
                    continue
                loaded = loaded if loaded is not None else runner()
                observer.begins(job)
                record = folder.make(job, loaded, functools.partial(observer.step, job))
            note(job, record, summary)
            if record["status"] == "done":
                estimator.add(job, record["seconds"])
            observer.ended(job, record, estimator.seconds([*busy, *pending[position + 1 :]]))
        pending = busy
        if pending:
            observer.waiting(pending)
            time.sleep(WAIT_SECONDS)
    folder.finish(jobs)
    return summary


def begin(
    jobs: Sequence[Job], folder: BatchFolder, observer: Observer
) -> tuple[list[Job], dict[str, dict[str, Any] | None], Summary]:
    """What is to be made, by shape; the records that these jobs have now; and a summary of what is kept."""
    records = folder.records()
    states = {job.id: folder.state(job, records.get(job.id)) for job in jobs}
    observer.states(states)
    for job in jobs:
        if states[job.id] == "done" and not folder.is_current(job, records.get(job.id)):
            folder.adopt(job)
    pending = [job for job in grouped(jobs) if states[job.id] != "done"]
    summary = Summary(kept=[job.id for job in jobs if states[job.id] == "done"])
    return pending, {job.id: records.get(job.id) for job in pending}, summary


def settled_by_others(job: Job, folder: BatchFolder, known: Mapping[str, Any] | None, summary: Summary) -> bool:
    """Whether another process made the job, or failed with it, since this one began."""
    record = folder.records().get(job.id)
    if record == known:
        return False
    state = folder.state(job, record)
    if state == "done":
        summary.elsewhere.append(job.id)
        return True
    if state == "failed":
        assert record is not None
        summary.failed[job.id] = record["error"]
        return True
    return False


def note(job: Job, record: Mapping[str, Any], summary: Summary) -> None:
    if record["status"] == "done":
        summary.made.append(job.id)
    else:
        summary.failed[job.id] = record["error"]
