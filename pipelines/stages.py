"""Where the time and the memory of one video went."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def peak_memory() -> dict[str, int | None]:
    """Peak bytes of this process so far: `rss_bytes` (None where unknown) and, on a GPU, `cuda_bytes`."""
    try:
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        # macOS counts bytes, Linux KiB.
        rss: int | None = peak if sys.platform == "darwin" else peak * 1024
    except ImportError:
        rss = None
    memory: dict[str, int | None] = {"rss_bytes": rss}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        memory["cuda_bytes"] = torch.cuda.max_memory_allocated()
    return memory


def _now() -> float:
    # GPU work is asynchronous: without waiting, one stage would be charged for another's kernels.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


class StageTimer:
    """Collects wall-clock seconds per named stage, in order, and per denoising step.

    Example:
        timer = StageTimer()
        with timer.stage("denoise"):
            timer.start_steps()
            ...
            timer.step_done()
    """

    def __init__(self) -> None:
        self.stages: dict[str, float] = {}
        self.memory: dict[str, dict[str, int | None]] = {}
        self.steps: list[float] = []
        self._step_start: float | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times the block; a name used twice adds up. Timed also where the block raises."""
        start = _now()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + _now() - start
            self.memory[name] = peak_memory()

    def start_steps(self) -> None:
        """Starts the clock of the first step."""
        self._step_start = _now()

    def step_done(self) -> float:
        """Ends one step, starts the next; returns its seconds."""
        now = _now()
        seconds = now - (self._step_start if self._step_start is not None else now)
        self.steps.append(seconds)
        self._step_start = now
        return seconds

    @property
    def total(self) -> float:
        """Seconds of all stages together."""
        return sum(self.stages.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data: seconds by stage, by step, their total, and peak bytes after each stage."""
        return {
            "seconds": dict(self.stages),
            "step_seconds": list(self.steps),
            "total_seconds": self.total,
            "peak_memory": {name: dict(values) for name, values in self.memory.items()},
        }

    def table(self) -> str:
        """The same as text, with shares of the total."""
        width = max([len(name) for name in self.stages] + [5])
        total = self.total or 1.0
        rows = [f"{name:<{width}} {s:9.2f} s {100 * s / total:5.1f} %" for name, s in self.stages.items()]
        if self.steps:
            rows.append(f"{'steps':<{width}} " + " ".join(f"{s:.2f}" for s in self.steps) + " s")
        rows.append(f"{'total':<{width}} {self.total:9.2f} s")
        return "\n".join(rows)
