"""Backend "auto": dense attention for short videos, the best sparse backend of the device for longer ones, and why.

The token count from which sparse attention pays is computed from the operations it saves, unless the configuration
gives one (`dense_below`), as `measure_crossover` finds it on the device at hand. Nothing is timed when a backend is
installed.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.config import ConfigError, require
from .backends import AUTO, get_backend

if TYPE_CHECKING:
    import torch

    from .config import AttentionConfig

PREFERENCE = {"cuda": ("triton", "gather"), "cpu": ("native", "gather")}
"""Sparse backends by device type, the best first; elsewhere `gather`, which runs everywhere. On a CPU with AMX `gather`
comes first: its products run on those units, which the C++ kernel does not use. flex is never taken by
itself: its first call compiles, and in half precision it trains with one block size only."""

LEAST_TOKENS = 1024
LEAST_SAVED = 0.2
"""Below this share of saved operations, or so few tokens, choosing and collecting blocks is taken to cost more than it
saves. Both are estimates; `measure_crossover` measures."""

ALWAYS_DENSE = sys.maxsize
LENGTHS = (256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class AutoChoice:
    """What "auto" stands for.

    Attributes:
        name: the sparse backend.
        dense_below: with fewer tokens every layer is dense.
        reason: both, in words.
    """

    name: str
    dense_below: int
    reason: str


def choose_backend(config: AttentionConfig, *, device: str, dtype: str, head_dim: int) -> AutoChoice:
    """The sparse backend for a device, and from how many tokens on it is used.

    Args:
        config: with backend "auto".
        device: type of the device.
        dtype: name of the dtype.
        head_dim: channels of a head.

    Raises:
        ConfigError: none of the backends can run.
    """
    passed = []
    preference: tuple[str, ...] = PREFERENCE.get(device, ("gather",))
    if device == "cpu" and _has_amx():
        preference = tuple(sorted(preference, key=lambda name: name == "native"))
    for name in preference:
        problems = get_backend(name).constraints.problems(config, device, dtype, head_dim)
        if problems:
            passed.append(f"{name} cannot run: {'; '.join(problems)}")
            continue
        why = "; ".join([f"the device is {device}", *passed])
        if config.dense_below is not None:
            return AutoChoice(name, config.dense_below, f"{why}; dense below {config.dense_below:,} tokens (given)")
        below = computed_crossover(config, head_dim)
        if below == ALWAYS_DENSE:
            text = f"always dense: less than {LEAST_SAVED:.0%} of the operations are saved at any length"
        else:
            text = f"dense below {below:,} tokens (computed from the operations saved, not measured)"
        return AutoChoice(name, below, f"{why}; {text}")
    raise ConfigError(f"backend: got {AUTO!r}; must be able to run one here: {'; '.join(passed)}")


def _has_amx() -> bool:
    import torch

    return bool(getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)())


def computed_crossover(config: AttentionConfig, head_dim: int, longest: int = 2**18) -> int:
    """Tokens from which on `LEAST_SAVED` of the operations of dense attention are saved, router and branch included.

    At least `LEAST_TOKENS`; `ALWAYS_DENSE` where no length up to `longest` gets there.
    """
    step = max(config.block_size_q, config.block_size_k)
    for tokens in range(-(-LEAST_TOKENS // step) * step, longest, step):
        if expected_flop_sparsity(config, tokens, head_dim) >= LEAST_SAVED:
            return tokens
    return ALWAYS_DENSE


def expected_flop_sparsity(config: AttentionConfig, tokens: int, head_dim: int) -> float:
    """Share of the operations saved at a number of tokens, with the keep ratio of the configuration in all rows."""
    import torch

    from .accounting import flop_sparsity
    from .context import LayerRecord
    from .routing import num_kept_blocks

    query_blocks, key_blocks = -(-tokens // config.block_size_q), -(-tokens // config.block_size_k)
    kept = min(tokens, num_kept_blocks(config.keep_ratio, key_blocks) * config.block_size_k) * tokens
    record = LayerRecord(torch.tensor(kept), tokens * tokens, tokens, tokens, query_blocks, key_blocks)
    return flop_sparsity(config, record, head_dim)


@dataclass(frozen=True)
class Crossover:
    """Times of one attention call, dense and sparse.

    Attributes:
        backend: name of the sparse backend.
        tokens: from which of the measured lengths on sparse was faster, at this and all longer ones; None if never.
        rows: length, seconds of dense attention, seconds of the sparse backend.
    """

    backend: str
    tokens: int | None
    rows: tuple[tuple[int, float, float], ...]


def measure_crossover(
    config: AttentionConfig,
    *,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    lengths: Sequence[int] = LENGTHS,
    repeats: int = 3,
) -> Crossover:
    """Time dense attention and the sparse backend of `config` on random tokens, forward alone.

    Args:
        config: the settings; with backend "auto" the one that it stands for on `device` is measured.
        heads: attention heads.
        head_dim: their channels.
        dtype: of the tokens.
        device: where to run.
        lengths: numbers of tokens, ascending.
        repeats: calls of which the shortest counts, after one that does not.

    Raises:
        ConfigError: no lengths, or a backend that cannot run.
    """
    import torch

    from .backends import checked_backend
    from .context import ForwardContext
    from .dense import DenseBackend
    from .grid import TokenGrid

    ascending = bool(lengths) and list(lengths) == sorted(set(lengths)) and min(lengths) >= 1
    require(ascending, "lengths", tuple(lengths), "one or more numbers of tokens, ascending")
    kind, short = device.type, str(dtype).removeprefix("torch.")
    if config.backend == AUTO:
        name = choose_backend(config, device=kind, dtype=short, head_dim=head_dim).name
        config = dataclasses.replace(config, backend=name)
    sparse = checked_backend(config, device=kind, dtype=short, head_dim=head_dim)
    config = dataclasses.replace(config, keep_ratios=())
    generator = torch.Generator().manual_seed(0)
    rows = []
    for length in lengths:
        shape = (1, length, heads, head_dim)
        tensors = [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(3)]
        context = ForwardContext(TokenGrid(length, 1, 1))
        times = [
            _shortest(functools.partial(run, *tensors, context=context, config=config), device, repeats)
            for run in (DenseBackend(), sparse)
        ]
        rows.append((length, times[0], times[1]))
    faster = None
    for length, dense_seconds, sparse_seconds in reversed(rows):
        if sparse_seconds >= dense_seconds:
            break
        faster = length
    return Crossover(config.backend, faster, tuple(rows))


def _shortest(run: Callable[[], Any], device: torch.device, repeats: int) -> float:
    import torch

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    best = float("inf")
    with torch.no_grad():
        run()
        for _ in range(repeats):
            wait()
            start = time.perf_counter()
            run()
            wait()
            best = min(best, time.perf_counter() - start)
    return best
