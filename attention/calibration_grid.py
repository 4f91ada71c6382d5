"""Error, time and memory of the sparse softmax over a grid of keep ratios, and the budget within an error bound."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..core.config import require
from .backends import AttentionBackend, checked_backend
from .calibration import LayerSample, dense_output, observed, run_sparse
from .config import AttentionConfig
from .dense import DenseBackend

DENSE = 1.0


@dataclass(frozen=True)
class GridRow:
    """One layer at one sampling step with one keep ratio; keep ratio 1 is dense attention itself.

    Attributes:
        layer: index of the layer.
        step: index of the sampling step.
        keep_ratio: nominal share of the key blocks.
        sparsity: share of the token pairs that was left out.
        error: |O - O_dense| / |O_dense| of the attention output, over all samples of this step.
        seconds: of one call, the shortest of those measured.
        peak_bytes: most memory that one call held at once beyond its inputs; on a CPU without what single operations
            use inside.
        tokens: tokens of a sample.
    """

    layer: int
    step: int
    keep_ratio: float
    sparsity: float
    error: float
    seconds: float
    peak_bytes: int
    tokens: int


@dataclass
class _Sums:
    missed: float = 0.0
    whole: float = 0.0
    sparsity: float = 0.0
    samples: int = 0
    seconds: float = math.inf
    peak_bytes: int = 0
    tokens: int = 0


def measure_grid(
    transformer: nn.Module,
    config: AttentionConfig,
    forwards: Sequence[tuple[int, Callable[[], object]]],
    keep_ratios: Sequence[float],
) -> list[GridRow]:
    """Run each layer's sparse softmax with each keep ratio on what the dense model feeds it.

    Args:
        transformer: the dense model, with stock processors.
        config: of a sparse backend; its keep ratios are not used.
        forwards: index of a sampling step, and what runs one forward pass of it.
        keep_ratios: the grid, in (0, 1).

    Returns:
        Rows by layer, step and keep ratio, dense attention among them.

    Raises:
        ConfigError: a keep ratio outside of its range, or a transformer or backend that cannot run.
    """
    fits = bool(keep_ratios) and all(0 < ratio < 1 for ratio in keep_ratios)
    require(fits, "keep_ratios", tuple(keep_ratios), "one or more numbers above 0 and below 1")
    weight = transformer.blocks[0].attn1.norm_q.weight  # type: ignore[union-attr, index]
    head_dim = int(transformer.config.attention_head_dim)  # type: ignore[union-attr, arg-type]
    dtype = str(weight.dtype).removeprefix("torch.")
    backend = checked_backend(config, device=weight.device.type, dtype=dtype, head_dim=head_dim)
    sums: dict[tuple[int, int, float], _Sums] = {}
    step = 0

    def on_layer(index: int, sample: LayerSample) -> None:
        dense = dense_output(sample)
        for ratio in (DENSE, *sorted(set(keep_ratios))):
            own = sums.setdefault((index, step, ratio), _Sums())
            one = dataclasses.replace(config, keep_ratio=ratio, keep_ratios=(), branch="none", rola=_ROLA, sla=_SLA)
            run: AttentionBackend = DenseBackend() if ratio == DENSE else backend
            out, block_map = run_sparse(run, sample, one)
            own.missed += float((dense - out.float()).square().sum(dtype=torch.float64))
            own.whole += float(dense.square().sum(dtype=torch.float64))
            own.sparsity += 0.0 if block_map is None else block_map.actual_sparsity()
            own.samples += 1
            own.tokens = sample.query.shape[1]
            again = functools.partial(run_sparse, run, sample, one)
            own.seconds = min(own.seconds, _seconds(again, weight.device))
            if own.samples == 1:
                own.peak_bytes = _peak_bytes(again, weight.device)

    with torch.no_grad(), observed(transformer, config, on_layer):
        for index, forward in forwards:
            step = index
            forward()
    return [
        GridRow(layer, at, ratio, own.sparsity / own.samples, math.sqrt(own.missed / max(own.whole, 1e-30)),
                own.seconds, own.peak_bytes, own.tokens)
        for (layer, at, ratio), own in sorted(sums.items())
    ]  # fmt: skip


_ROLA = AttentionConfig().rola
_SLA = AttentionConfig().sla


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def _peak_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Most bytes that were held at once during a call: by the allocator's count on CUDA, else see `_HeldTensors`."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with _HeldTensors() as held:
        run()
    return held.peak


class _HeldTensors(TorchDispatchMode):
    """Counts the bytes of tensors that operations make, as long as they live; not what one operation uses inside."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **kwargs)
        self._made = {key: entry for key, entry in self._made.items() if not entry[0].expired()}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, sum(size for _, size in self._made.values()))
        return out


@dataclass(frozen=True)
class Budget:
    """Which layers get which keep ratio.

    Attributes:
        keep_ratios: one for each layer; 1 for those that stay dense.
        dense_layers: layers that no keep ratio of the grid brings under the bound, or that were to stay dense.
        bound: the largest relative error of the attention output that was allowed.
        seconds_dense: of the attention of all layers together in one forward pass, dense, as measured.
        seconds: likewise with this budget.
    """

    keep_ratios: tuple[float, ...]
    dense_layers: tuple[int, ...]
    bound: float
    seconds_dense: float
    seconds: float


def propose_budget(rows: Sequence[GridRow], bound: float, *, dense_layers: Sequence[int] = ()) -> Budget:
    """The smallest keep ratio of each layer whose error stays within `bound` at every measured step.

    Args:
        rows: what `measure_grid` gave; of several denoisers that share one recipe, all of their rows.
        bound: largest relative error of the attention output of a layer.
        dense_layers: layers that stay dense whatever was measured.

    Raises:
        ConfigError: no rows, or a bound that is not above 0.
    """
    require(bound > 0, "error_bound", bound, "above 0")
    require(len(rows) > 0, "rows", 0, "at least one measured row")
    layers = range(max(row.layer for row in rows) + 1)
    ratios = sorted({row.keep_ratio for row in rows})
    worst: dict[tuple[int, float], float] = {}
    slowest: dict[tuple[int, float], float] = {}
    for row in rows:
        key = (row.layer, row.keep_ratio)
        worst[key] = max(worst.get(key, 0.0), row.error)
        slowest[key] = max(slowest.get(key, 0.0), row.seconds)
    chosen = []
    for layer in layers:
        fitting = [ratio for ratio in ratios if ratio < DENSE and worst[layer, ratio] <= bound]
        chosen.append(DENSE if layer in dense_layers or not fitting else fitting[0])
    return Budget(
        keep_ratios=tuple(chosen),
        dense_layers=tuple(layer for layer in layers if chosen[layer] == DENSE),
        bound=bound,
        seconds_dense=sum(slowest[layer, DENSE] for layer in layers),
        seconds=sum(slowest[layer, chosen[layer]] for layer in layers),
    )


def with_budget(config: AttentionConfig, budget: Budget) -> AttentionConfig:
    """The settings with keep ratios and dense layers of a budget; `keep_ratio` becomes the mean over sparse layers."""
    sparse = [ratio for ratio in budget.keep_ratios if ratio < DENSE]
    mean = sum(sparse) / len(sparse) if sparse else DENSE
    return dataclasses.replace(
        config, keep_ratio=mean, keep_ratios=budget.keep_ratios, dense_layers=budget.dense_layers
    )
