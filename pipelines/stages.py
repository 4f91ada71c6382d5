"""Where the time and the memory of one video went."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

SAMPLE_SECONDS = 0.02
"""Pause between two looks at the resident memory; a peak shorter than this can be missed."""


def process_peak_memory() -> int | None:
    """Largest resident bytes of this process since it began (not of any one stage); None where unknown."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # macOS counts bytes, Linux KiB.
    return peak if sys.platform == "darwin" else peak * 1024


def resident_bytes() -> int | None:
    """Resident bytes of this process now; None where unknown."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        pass
    try:
        import psutil  # comes with accelerate
    except ImportError:
        return None
    return int(psutil.Process().memory_info().rss)


class _ResidentPeak:
    """The largest resident memory seen by a thin thread between `start` and `stop`."""

    def __init__(self) -> None:
        self.peak = resident_bytes()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="videospark-memory", daemon=True)

    def start(self) -> None:
        if self.peak is not None:
            self._thread.start()

    def stop(self) -> int | None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        self._look()
        return self.peak

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self._look()

    def _look(self) -> None:
        now = resident_bytes()
        if now is not None:
            self.peak = now if self.peak is None else max(self.peak, now)


class StageTimer:
    """Collects wall-clock seconds and peak memory per named stage, in order, and seconds per denoising step.

    Memory of a stage, each where it can be known:

    - `rss_sampled_peak_bytes`: resident memory of the process, looked at every 20 ms while the stage ran. It holds
      everything that was resident before, too; a shorter peak can be missed.
    - `cuda_peak_bytes`: the most that PyTorch's allocator had handed out on `device` during the stage. For this the
      allocator's own peak counter is reset when a stage begins, so stages cannot be nested.

    Args:
        device: the one that is worked on; None is the CPU, or the current CUDA device once CUDA is in use.

    Example:
        timer = StageTimer()
        with timer.stage("denoise"):
            timer.start_steps()
            ...
            timer.step_done()
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        self.stages: dict[str, float] = {}
        self.memory: dict[str, dict[str, int]] = {}
        self.steps: list[float] = []
        self._step_start: float | None = None

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times the block; a name used twice adds up its seconds. Timed also where the block raises."""
        start = self._now()
        on_cuda = self._on_cuda()
        if on_cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        resident = _ResidentPeak()
        resident.start()
        try:
            yield
        finally:
            self.stages[name] = self.stages.get(name, 0.0) + self._now() - start
            found = {"rss_sampled_peak_bytes": resident.stop()}
            if on_cuda:
                found["cuda_peak_bytes"] = torch.cuda.max_memory_allocated(self.device)
            before = self.memory.get(name, {})
            self.memory[name] = {
                key: max(value, before.get(key, 0)) for key, value in found.items() if value is not None
            }  # fmt: skip

    def start_steps(self) -> None:
        """Starts the clock of the first step."""
        self._step_start = self._now()

    def step_done(self) -> float:
        """Ends one step, starts the next; returns its seconds."""
        now = self._now()
        seconds = now - (self._step_start if self._step_start is not None else now)
        self.steps.append(seconds)
        self._step_start = now
        return seconds

    def restart_step(self) -> None:
        """Starts the step that runs now anew: what was done since the last one ended is no step's work."""
        self._step_start = self._now()

    @property
    def total(self) -> float:
        """Seconds of all stages together."""
        return sum(self.stages.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data: seconds by stage, by step, their total, peak memory by stage and of the process's whole life."""
        return {
            "seconds": dict(self.stages),
            "step_seconds": list(self.steps),
            "total_seconds": self.total,
            "peak_memory": {name: dict(values) for name, values in self.memory.items()},
            "process_peak_rss_bytes": process_peak_memory(),
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

    def _on_cuda(self) -> bool:
        in_use = torch.cuda.is_available() and torch.cuda.is_initialized()
        return in_use and (self.device is None or self.device.type == "cuda")

    def _now(self) -> float:
        # GPU work is asynchronous: without waiting, one stage would be charged for another's kernels.
        if self._on_cuda():
            torch.cuda.synchronize(self.device)
        return time.perf_counter()
