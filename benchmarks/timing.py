"""Seconds of a call, and what the machine could do at best: the yardsticks that all benchmarks share."""

from __future__ import annotations

import ctypes
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.config import require

GEMM_SIZES = {"cpu": (1024, 2048), "cuda": (4096, 8192)}
"""Sides of the square products that the peak is taken from; the best one counts."""


@dataclass(frozen=True)
class Timing:
    """Seconds of repeated calls: their median, quickest and slowest, and how many they were."""

    median: float
    low: float
    high: float
    repeats: int

    def to_dict(self) -> dict[str, float]:
        """Plain data."""
        return asdict(self)


def measure(call: Callable[[], Any], device: str, *, repeats: int = 5, warm_up: int = 1) -> Timing:
    """Time `call`, each run on its own and waited for.

    Raises:
        ConfigError: no repeats.
    """
    require(repeats >= 1, "repeats", repeats, "at least 1")
    for _ in range(warm_up):
        call()
    seconds = []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return Timing(statistics.median(seconds), min(seconds), max(seconds), repeats)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def peak_extra_bytes(call: Callable[[], Any], device: str) -> int | None:
    """Bytes that one call holds at its peak beyond what there was before, its result included; None where unknown.

    On CUDA those of PyTorch's allocator. On Linux the growth of the process's resident peak, which the kernel counts
    page by page; memory that was freed before is given back first, so that it is not used again unseen.
    """
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        ctypes.CDLL(None).malloc_trim(0)
        # 5 sets the peak back to what is resident now.
        Path("/proc/self/clear_refs").write_text("5")
        before = _status_bytes("VmRSS")
        call()
        return max(_status_bytes("VmHWM") - before, 0)
    except (OSError, AttributeError, TypeError, StopIteration):
        return None


def _status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])


def gemm_peak(device: str, dtype: torch.dtype, *, repeats: int = 5) -> float:
    """Operations per second of the best of a few square matrix products on this machine, now."""
    best = 0.0
    for side in GEMM_SIZES["cuda" if device.startswith("cuda") else "cpu"]:
        a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
        out = torch.empty_like(a)
        timing = measure(lambda a=a, b=b, out=out: torch.mm(a, b, out=out), device, repeats=repeats, warm_up=2)  # type: ignore[misc]
        best = max(best, 2 * side**3 / timing.low)
    return best


def machine(device: str) -> dict[str, Any]:
    """What a figure was measured on."""
    found: dict[str, Any] = {
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
        "processor": platform.processor() or platform.machine(),
    }
    if device.startswith("cuda"):
        properties = torch.cuda.get_device_properties(device)
        found |= {"gpu": properties.name, "memory_gib": round(properties.total_memory / 2**30, 1)}
        found["capability"] = f"sm_{properties.major}{properties.minor}"
    return found
