"""Self-attention of one layer: our backends against SDPA and flex_attention, in one run on one machine.

Seconds include the routing: a backend is called as a pipeline calls it. Operations are those of the kept pairs, 4
head_dim each and 10 more with the backward pass, which recomputes the scores, so the share of the GEMM peak says how
well the work that is left is done. A linear branch is counted as time alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ..attention.auto import Crossover, measure_crossover
from ..attention.backends import get_backend
from ..attention.branches import BranchInputs, build_branch
from ..attention.config import AttentionConfig
from ..attention.context import ForwardContext
from ..attention.grid import TokenGrid
from ..core.config import ConfigError, require
from ..core.numerics import relative_error
from .timing import gemm_peak, measure, peak_extra_bytes

LONG_SECONDS = 10.0
"""What takes longer than this runs once."""

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
        branch: linear branch that ran after it, or "none".
        tokens: of the video.
        heads: of the layer.
        head_dim: channels of a head.
        dtype: of queries, keys and values.
        keep_ratio: share of the key blocks that was asked for.
        pass_name: "forward" or "forward and backward"; "pass" in JSON.
        sparsity: share of the token pairs that was left out.
        seconds: median of the runs.
        over_sdpa: SDPA's seconds over these.
        over_flex: flex_attention's seconds at this keep ratio over these; None where that was not measured.
        operations_per_second: of the kept pairs.
        gemm_peak_share: of the GEMM peak measured in this run.
        peak_extra_bytes: memory at the peak of a call beyond its inputs, the output included; None where unknown.
        inputs_bytes: of queries, keys and values together.
        error: relative error of the output against the same blocks in float32; None where it was not computed.
    """

    backend: str
    branch: str
    tokens: int
    heads: int
    head_dim: int
    dtype: str
    keep_ratio: float
    pass_name: str
    sparsity: float
    seconds: float
    over_sdpa: float
    over_flex: float | None
    operations_per_second: float
    gemm_peak_share: float
    peak_extra_bytes: int | None
    inputs_bytes: int
    error: float | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = dataclasses.asdict(self)
        data["pass"] = data.pop("pass_name")
        return data


def bench_attention(
    shape: Shape,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    backends: Sequence[str] = ("gather", "flex"),
    keep_ratios: Sequence[float] = (0.03, 0.05, 0.1),
    block_sizes: tuple[int, int] = (128, 64),
    backward: bool = False,
    branches: Sequence[str] = ("none",),
    repeats: int = 3,
    check: bool = False,
) -> Iterator[Row]:
    """Measure SDPA first, then flex_attention if it takes part, then the others; rows come as they are ready.

    Args:
        shape: of the layer.
        device: where.
        dtype: of queries, keys and values.
        backends: names; one that cannot run here is a ConfigError, before anything is measured.
        keep_ratios: shares of the key blocks to keep.
        block_sizes: tokens of a query and of a key block.
        backward: measure forward and backward together.
        branches: "none" for sparse attention alone, "rola" for the branch after it.
        repeats: runs of each; the median counts. SDPA runs once where that takes more than `LONG_SECONDS`.
        check: also compute each output's error against float32, head by head.
    """
    unknown = [name for name in branches if name not in ("none", "rola")]
    require(bool(branches) and not unknown, "branches", tuple(branches), "of none, rola")
    names = sorted(backends, key=lambda name: name != "flex")
    configs = [
        AttentionConfig(
            name, keep_ratio=keep, block_size_q=block_sizes[0], block_size_k=block_sizes[1], branch=branch  # type: ignore[arg-type]
        )
        for name in names
        for keep in keep_ratios
        for branch in branches
    ]  # fmt: skip
    for config in configs:
        _check(config, device, dtype, shape.head_dim, backward)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (_tokens(shape, generator).to(device, dtype).requires_grad_(backward) for _ in range(3))
    peak = gemm_peak(device, dtype)
    pairs = shape.heads * shape.tokens**2
    operations = (FORWARD_OPERATIONS + (BACKWARD_OPERATIONS if backward else 0)) * shape.head_dim * pairs
    fixed: dict[str, Any] = {
        "tokens": shape.tokens, "heads": shape.heads, "head_dim": shape.head_dim,
        "dtype": str(dtype).removeprefix("torch."), "pass_name": "forward and backward" if backward else "forward",
        "inputs_bytes": 3 * q.numel() * q.element_size(),
    }  # fmt: skip

    def sdpa() -> torch.Tensor:
        query, key, value = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)

    run = _with_backward(sdpa, (q, k, v), backward)
    base = measure(run, device, repeats=1, warm_up=0).median
    if base < LONG_SECONDS:
        base = measure(run, device, repeats=min(repeats, 3), warm_up=0).median
    extra = peak_extra_bytes(run, device) if base < LONG_SECONDS else None
    yield Row(
        backend="sdpa", branch="none", keep_ratio=1.0, sparsity=0.0, seconds=base, over_sdpa=1.0, over_flex=None,
        operations_per_second=operations / base, gemm_peak_share=operations / base / peak, peak_extra_bytes=extra,
        error=None, **fixed,
    )  # fmt: skip
    flex: dict[float, float] = {}
    for config in configs:
        context = ForwardContext(grid=TokenGrid(shape.frames, shape.height, shape.width))
        call = _caller(config, context, shape, (q, k, v))
        run = _with_backward(call, (q, k, v), backward)
        seconds = measure(run, device, repeats=repeats).median
        if config.backend == "flex" and config.branch == "none":
            flex[config.keep_ratio] = seconds
        over_flex = flex[config.keep_ratio] / seconds if config.keep_ratio in flex else None
        sparsity = context.records[0].sparsity() if context.records else 0.0
        done = (1 - sparsity) * operations / seconds
        error = _error(call, (q, k, v), config, context) if check and config.branch == "none" else None
        yield Row(
            backend=config.backend, branch=config.branch, keep_ratio=config.keep_ratio, sparsity=sparsity,
            seconds=seconds, over_sdpa=base / seconds, over_flex=over_flex, operations_per_second=done,
            gemm_peak_share=done / peak, peak_extra_bytes=peak_extra_bytes(run, device), error=error, **fixed,
        )  # fmt: skip


def _caller(config: AttentionConfig, context: ForwardContext, shape: Shape, inputs: Sequence[torch.Tensor]) -> Any:
    """The layer's attention as a call: the backend, and the branch where there is one."""
    backend, (q, k, v) = get_backend(config.backend), inputs
    if config.branch == "none":
        return lambda: backend(q, k, v, context=context, config=config)
    branch = build_branch(config, shape.heads, shape.head_dim, torch.Generator().manual_seed(1))
    assert branch is not None
    branch = branch.to(q.device).requires_grad_(False)
    angles = torch.linspace(0, 100, shape.tokens)[:, None] * torch.logspace(0, -4, shape.head_dim // 2)
    angles = angles.repeat_interleave(2, dim=1)[None, :, None]
    tables = angles.cos().to(q.device), angles.sin().to(q.device)

    def call() -> torch.Tensor:
        out = backend(q, k, v, context=context, config=config)
        gate = branch.gate(q.flatten(2))
        heads = slice(0, shape.heads)
        made: torch.Tensor = branch(BranchInputs(out, q, k, v, q, k, gate, tables, heads, context, overwrite=True))
        return made

    return call


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
        "| backend | keep | sparsity | seconds | over SDPA | over flex | GFLOP/s | share of GEMM peak | extra memory "
        "over inputs | error |",
        "|" + "---|" * 10,
    ]
    for row in rows:
        name = row.backend if row.branch == "none" else f"{row.backend} + {row.branch}"
        flex = "" if row.over_flex is None else f"{row.over_flex:.2f}x"
        extra = "" if row.peak_extra_bytes is None else f"{row.peak_extra_bytes / row.inputs_bytes:.2f}"
        error = "" if row.error is None else f"{row.error:.2e}"
        lines.append(
            f"| {name} | {row.keep_ratio:.2f} | {row.sparsity:.3f} | {row.seconds:.4f} | {row.over_sdpa:.1f}x | {flex} "
            f"| {row.operations_per_second / 1e9:.0f} | {row.gemm_peak_share:.2f} | {extra} | {error} |"
        )
    return "\n".join(lines) + "\n"


def crossover(
    shape: Shape, keep_ratio: float, block_sizes: tuple[int, int], *, device: str, dtype: torch.dtype
) -> Crossover:
    """From how many tokens on what "auto" stands for is faster than dense attention, with the heads of `shape`."""
    config = AttentionConfig(
        "auto", keep_ratio=keep_ratio, block_size_q=block_sizes[0], block_size_k=block_sizes[1], dense_below=0
    )
    return measure_crossover(
        config, heads=shape.heads, head_dim=shape.head_dim, dtype=dtype, device=torch.device(device), repeats=2
    )


def crossover_text(found: Crossover, keep_ratio: float) -> str:
    """The same in words, with the times behind it."""
    where = "at none of these lengths" if found.tokens is None else f"from {found.tokens:,} tokens on"
    times = ", ".join(f"{tokens:,}: {dense * 1e3:.1f} / {sparse * 1e3:.1f}" for tokens, dense, sparse in found.rows)
    return (
        f"Sparse attention ({found.backend}, keep {keep_ratio:g}) is faster than dense {where}; "
        f"milliseconds dense / sparse: {times}. A calibration writes such a length into its recipe (dense_below)."
    )
