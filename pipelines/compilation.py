"""torch.compile for each block of a denoiser (regional compilation), with its price measured.

All blocks share what is compiled for one. Self-attention and eight-bit products are left out of the graphs: they are
kernels, or chunked products, of this package, differ from layer to layer, and would make every block compile anew.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from ..core.config import require
from ..quantization.config import QuantizationConfig
from ..quantization.linear import ReplacedLinear

GRAPH_MODES = ("reduce-overhead", "max-autotune")
"""Modes that also record CUDA graphs: for fixed sizes and weights that stay where they are. On other devices they are
"default" and "max-autotune-no-cudagraphs".
"""
COMPILE_MODES = ("none", "default", "max-autotune-no-cudagraphs", *GRAPH_MODES)


def check_compile(mode: str, quantization: QuantizationConfig) -> None:
    """Raise ConfigError unless this mode exists and goes with the precision."""
    require(mode in COMPILE_MODES, "compile", mode, f"one of {', '.join(COMPILE_MODES)}")
    rule = "'none' with quantization.fused, which joins the same parts by kernels of its own"
    require(mode == "none" or not quantization.fused, "compile", mode, rule)


class InstalledCompilation:
    """Compiled blocks of one denoiser; made by `install_compilation`.

    A forward pass that compiled something is told by the number of graphs, which the compiler counts.
    """

    def __init__(self, transformer: Any, mode: str) -> None:
        self.mode = mode
        self._blocks = list(transformer.blocks)
        self._left_out: list[Any] = []
        self._seconds: list[float] = []
        self._graphs: list[int] = []
        self._start: tuple[float, int] | None = None
        self._cached_before = _cached_graphs()
        for index, block in enumerate(self._blocks):
            free = block._compiled_call_impl is None and "forward" not in block.attn1.__dict__
            rule = "neither compiled nor wrapped: accelerate first, then enable offloading"
            require(free, f"blocks.{index}", "one that is compiled or wrapped", rule)
        for block in self._blocks:
            self._leave_out(block)
            block.compile(mode=mode)
        self._handles = [
            transformer.register_forward_pre_hook(self._before, prepend=True),
            transformer.register_forward_hook(self._after),
        ]

    def report(self) -> dict[str, Any]:
        """mode, blocks, graphs compiled, cached_graphs (of those, found on disk), first_forward_seconds,
        forward_seconds (median of those that compiled nothing) and first_clip_extra_seconds, what compiling cost so
        far; None where it was not measured yet.
        """
        compiling = [seconds for seconds, graphs in zip(self._seconds, self._graphs, strict=True) if graphs]
        settled = [seconds for seconds, graphs in zip(self._seconds, self._graphs, strict=True) if not graphs]
        usual = statistics.median(settled) if settled else None
        return {
            "mode": self.mode,
            "blocks": len(self._blocks),
            "graphs": sum(self._graphs),
            "cached_graphs": _cached_graphs() - self._cached_before,
            "first_forward_seconds": self._seconds[0] if self._seconds else None,
            "forward_seconds": usual,
            "first_clip_extra_seconds": None if usual is None else sum(seconds - usual for seconds in compiling),
        }

    def remove(self) -> None:
        """The blocks as they were. Again is harmless."""
        for handle in self._handles:
            handle.remove()
        for block in self._blocks:
            block._compiled_call_impl = None
        for module in self._left_out:
            module.__dict__.pop("forward", None)
        self._handles, self._blocks, self._left_out = [], [], []

    def _leave_out(self, block: Any) -> None:
        for module in (block.attn1, *(part for part in block.modules() if isinstance(part, ReplacedLinear))):
            module.__dict__["forward"] = torch.compiler.disable(module.forward)
            self._left_out.append(module)

    def _before(self, module: Any, *_: Any) -> None:
        if self.mode in GRAPH_MODES:
            # A new pass: what graphs of the one before left in their memory may be overwritten.
            torch.compiler.cudagraph_mark_step_begin()
        self._start = (_now(module), _graphs())

    def _after(self, module: Any, *_: Any) -> None:
        if self._start is not None:
            self._seconds.append(_now(module) - self._start[0])
            self._graphs.append(_graphs() - self._start[1])
            self._start = None


def install_compilation(transformer: Any, mode: str) -> InstalledCompilation:
    """Compile each block of a denoiser at its next forward pass.

    Raises:
        ConfigError: a block is compiled or wrapped already. Nothing is changed then.
    """
    return InstalledCompilation(transformer, mode)


def text_line(name: str, report: dict[str, Any]) -> str:
    """The report in one line."""
    extra, first, usual = (
        report[name] for name in ("first_clip_extra_seconds", "first_forward_seconds", "forward_seconds")
    )
    cost = "not measured yet"
    if extra is not None:
        cost = f"first pass {first:.2f} s (cold), later ones {usual:.2f} s (warm), compiling {extra:.1f} s in all"
    cached = f", {report['cached_graphs']} of them from the cache" if report["cached_graphs"] else ""
    return f"{name}: {report['blocks']} blocks compiled ({report['mode']}), {report['graphs']} graphs{cached}; {cost}"


def _now(module: Any) -> float:
    device = next(module.parameters()).device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _cached_graphs() -> int:
    """Graphs whose code an earlier process left in the cache on disk."""
    from torch._dynamo.utils import counters

    return int(counters["inductor"]["fxgraph_cache_hit"])


def _graphs() -> int:
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])
