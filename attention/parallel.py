"""Ulysses context parallelism: every rank attends to the whole video with a share of the heads.

Outside of attention each rank holds a share of the tokens (`enable_parallelism` of diffusers splits them before the
first block and joins them after the last). Inside, an all-to-all swaps tokens for heads: routing and sparse attention
then see the whole sequence and need to know nothing of it. A linear branch stays with the own tokens where it can: one
small matrix per head, its sum over the keys, is added up over the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Ulysses:
    """The ranks that share one video.

    Attributes:
        group: their process group.
        degree: how many they are.
        rank: which of them this one is.
    """

    group: Any
    degree: int
    rank: int

    def heads_of(self, heads: int) -> slice:
        """The heads that this rank attends with, of all `heads`."""
        share = heads // self.degree
        return slice(self.rank * share, (self.rank + 1) * share)

    def to_heads(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, own tokens, heads, ...] of every rank to [batch, tokens, own heads, ...]."""
        out: torch.Tensor = _Swap.apply(tokens, self, True)  # type: ignore[no-untyped-call]
        return out

    def to_tokens(self, heads: torch.Tensor) -> torch.Tensor:
        """Undo `to_heads`."""
        out: torch.Tensor = _Swap.apply(heads, self, False)  # type: ignore[no-untyped-call]
        return out

    def gather(self, tokens: torch.Tensor) -> torch.Tensor:
        """[batch, own tokens, ...] of every rank, joined: [batch, tokens, ...]."""
        out: torch.Tensor = _Gather.apply(tokens, self)  # type: ignore[no-untyped-call]
        return out

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of what every rank has, on all of them; not differentiable, for use inside a Function."""
        total = part.contiguous().clone()
        dist.all_reduce(total, group=self.group)
        return total

    def own(self, tokens: torch.Tensor) -> torch.Tensor:
        """This rank's share of [batch, tokens, ...]."""
        return tokens.chunk(self.degree, dim=1)[self.rank]


def ulysses_problems(parallel_config: Any, heads: int) -> list[str]:
    """Why a layer of `heads` heads cannot run under this `ParallelConfig` of diffusers; empty if it can."""
    config = parallel_config.context_parallel_config
    if config is None:
        return []
    problems = []
    if config.ring_degree > 1:
        problems.append("ring attention leaves each rank a part of the keys, and blocks are chosen among all of them")
    if config.ulysses_anything or config.ring_anything:
        problems.append("shares of unequal size (ulysses_anything, ring_anything) are not supported")
    if heads % config.ulysses_degree:
        problems.append(f"{heads} heads cannot be shared evenly by ulysses_degree {config.ulysses_degree}")
    return problems


def ulysses_of(parallel_config: Any) -> Ulysses | None:
    """The ranks of a `ParallelConfig` of diffusers; None without context parallelism."""
    config = None if parallel_config is None else parallel_config.context_parallel_config
    if config is None:
        return None
    mesh = config._ulysses_mesh
    return Ulysses(mesh.get_group(), config.ulysses_degree, mesh.get_local_rank())


class _Swap(torch.autograd.Function):
    """All-to-all between shares of the tokens and shares of the heads; its gradient is the way back."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, ranks: Ulysses, to_heads: bool) -> torch.Tensor:
        ctx.ranks, ctx.to_heads = ranks, to_heads
        return _swap(tensor, ranks, to_heads)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _swap(grad, ctx.ranks, not ctx.to_heads), None, None


def _swap(tensor: torch.Tensor, ranks: Ulysses, to_heads: bool) -> torch.Tensor:
    split, joined = (2, 1) if to_heads else (1, 2)
    parts = tensor.unflatten(split, (ranks.degree, -1)).movedim(split, 0).contiguous()
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=ranks.group)
    return received.movedim(0, joined).flatten(joined, joined + 1)


class _Gather(torch.autograd.Function):
    """All-gather of shares of the tokens; its gradient sums what all ranks want of each share."""

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, ranks: Ulysses) -> torch.Tensor:
        ctx.ranks = ranks
        parts = [torch.empty_like(tokens, memory_format=torch.contiguous_format) for _ in range(ranks.degree)]
        dist.all_gather(parts, tokens.contiguous(), group=ranks.group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.ranks.own(ctx.ranks.sum(grad)), None
