"""Self-attention of one layer: our backends against SDPA and flex_attention, in one run on one machine.

Seconds include the routing: a backend is called as a pipeline calls it. Operations are those of the kept pairs, 4
head_dim each and 10 more with the backward pass, which recomputes the scores, so the share of the GEMM peak says how
well the work that is left is done.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..attention.backends import get_backend
from ..attention.config import AttentionConfig
from ..attention.context import ForwardContext
from ..attention.grid import TokenGrid
from ..core.config import ConfigError, require
from ..core.numerics import relative_error
from .timing import gemm_peak, measure

FORWARD_OPERATIONS, BACKWARD_OPERATIONS = 4, 10
"""Per pair of tokens and channel: two products forward, five backward."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """One layer's attention: batch 1, `frames * height * width` tokens."""

    frames: int
    height: int
    width: int
    heads: int
    head_dim: int

    @property
    def tokens(self) -> int:
        """Tokens of the video."""
        return self.frames * self.height * self.width


SHAPES = {
    "wan-480p": Shape(21, 30, 52, 12, 128),
    "wan-720p": Shape(21, 45, 80, 40, 128),
    "wan-480p-2-heads": Shape(21, 30, 52, 2, 128),
    "tiny-96": Shape(5, 12, 12, 3, 64),
    "short": Shape(8, 16, 32, 4, 128),
}
"""Named shapes; the CPU's default is two heads of 480p, as heads are independent of each other."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        backend: a backend of this package, or "sdpa".
        keep_ratio: share of the key blocks that was asked for.
        sparsity: share of the token pairs that was left out.
        seconds: median of the runs.
        over_sdpa: SDPA's seconds over these.
        operations_per_second: of the kept pairs.
        peak_share: of the GEMM peak measured in this run.
        error: relative error of the output against the same blocks in float32; None where it was not computed.
    """

    backend: str
    keep_ratio: float
    sparsity: float
    seconds: float
    over_sdpa: float
    operations_per_second: float
    peak_share: float
    error: float | None


def bench_attention(
    shape: Shape,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    backends: Sequence[str] = ("gather", "flex"),
    keep_ratios: Sequence[float] = (0.03, 0.05, 0.1),
    block_sizes: tuple[int, int] = (128, 64),
    backward: bool = False,
    repeats: int = 3,
    check: bool = False,
) -> Iterator[Row]:
    """Measure SDPA first, then every backend at every keep ratio; rows come as they are ready.

    Args:
        shape: of the layer.
        device: where.
        dtype: of queries, keys and values.
        backends: names; one that cannot run here is a ConfigError, before anything is measured.
        keep_ratios: shares of the key blocks to keep.
        block_sizes: tokens of a query and of a key block.
        backward: measure forward and backward together.
        repeats: runs of each; the median counts.
        check: also compute each output's error against float32, head by head.
    """
    configs = [
        AttentionConfig(name, keep_ratio=keep, block_size_q=block_sizes[0], block_size_k=block_sizes[1])
        for name in backends
        for keep in keep_ratios
    ]
    for config in configs:
        _check(config, device, dtype, shape.head_dim, backward)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (_tokens(shape, generator).to(device, dtype).requires_grad_(backward) for _ in range(3))
    peak = gemm_peak(device, dtype)
    pairs = shape.heads * shape.tokens**2
    operations = (FORWARD_OPERATIONS + (BACKWARD_OPERATIONS if backward else 0)) * shape.head_dim * pairs

    def sdpa() -> torch.Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)

    base = measure(_with_backward(sdpa, (q, k, v), backward), device, repeats=min(repeats, 3)).median
    yield Row("sdpa", 1.0, 0.0, base, 1.0, operations / base, operations / base / peak, None)
    for config in configs:
        backend = get_backend(config.backend)
        context = ForwardContext(grid=TokenGrid(shape.frames, shape.height, shape.width))

        def call(backend: Any = backend, context: ForwardContext = context, config: AttentionConfig = config) -> Any:
            return backend(q, k, v, context=context, config=config)

        seconds = measure(_with_backward(call, (q, k, v), backward), device, repeats=repeats).median
        sparsity = context.records[0].sparsity() if context.records else 0.0
        done = (1 - sparsity) * operations / seconds
        error = _error(call, (q, k, v), config, context) if check else None
        yield Row(config.backend, config.keep_ratio, sparsity, seconds, base / seconds, done, done / peak, error)


def _tokens(shape: Shape, generator: torch.Generator) -> torch.Tensor:
    """[1, tokens, heads, head_dim]; neighbours are alike, as they are in a video, so that blocks differ."""
    slow = torch.randn(1, -(-shape.tokens // 64), shape.heads, shape.head_dim, generator=generator)
    fast = torch.randn(1, shape.tokens, shape.heads, shape.head_dim, generator=generator)
    return slow.repeat_interleave(64, dim=1)[:, : shape.tokens] + fast


def _check(config: AttentionConfig, device: str, dtype: torch.dtype, head_dim: int, backward: bool) -> None:
    constraints = get_backend(config.backend).constraints
    kind = device.partition(":")[0]
    problems = constraints.problems(config, kind, str(dtype).removeprefix("torch."), head_dim)
    if backward and not getattr(constraints, "gradients", True):
        problems.append("it has no gradients")
    if problems:
        raise ConfigError(f"backends: got {config.backend!r}; it cannot run here: {'; '.join(problems)}")


def _with_backward(call: Any, inputs: Sequence[torch.Tensor], backward: bool) -> Any:
    def forward_alone() -> None:
        with torch.no_grad():
            call()

    def both() -> None:
        out = call()
        torch.autograd.grad(out, inputs, torch.ones_like(out))

    return both if backward else forward_alone


@torch.no_grad()
def _error(call: Any, inputs: Sequence[torch.Tensor], config: AttentionConfig, context: ForwardContext) -> float:
    from ..attention.block_sparse.choice import choose_blocks
    from ..attention.block_sparse.gather import gather_attention

    require(inputs[0].shape[0] == 1, "batch", inputs[0].shape[0], "1")
    blocks = choose_blocks(inputs[0], inputs[1], context, config)
    query, key, value = (tensor.float() for tensor in inputs)
    exact = gather_attention(query, key, value, blocks)
    return relative_error(call(), exact)


def markdown(rows: Sequence[Row], title: str) -> str:
    """The rows as a table for people."""
    lines = [
        f"### {title}",
        "",
        "| backend | keep | sparsity | seconds | over SDPA | GFLOP/s | share of GEMM peak | error |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        error = "" if row.error is None else f"{row.error:.2e}"
        lines.append(
            f"| {row.backend} | {row.keep_ratio:.2f} | {row.sparsity:.3f} | {row.seconds:.4f} | {row.over_sdpa:.1f}x "
            f"| {row.operations_per_second / 1e9:.0f} | {row.peak_share:.2f} | {error} |"
        )
    return "\n".join(lines) + "\n"
