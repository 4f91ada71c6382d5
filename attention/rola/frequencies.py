"""Which columns of the rotary angle table turn the low-rank features, and the cosines and sines that they give.

The table of a Wan model has one column per pair of channels of a head: first those of time, then of height, then of
width, each axis falling from its fastest frequency 1 to its slowest (44 : 42 : 42 of 128 channels, so 22 : 21 : 21
columns).
"""

from __future__ import annotations

import torch

from ...core.config import require
from ..grid import TokenGrid

THETA = 10000.0
"""Base of the frequencies of every Wan model; column i of an axis with n columns turns by THETA ** (-i / n) a step."""

UNROTATED = -1
"""Stands for a pair of features that no column turns."""


def axis_columns(head_dim: int) -> tuple[int, int, int]:
    """Columns of time, height and width in the angle table of a head of `head_dim` channels."""
    spatial = 2 * (head_dim // 6)
    return (head_dim - 2 * spatial) // 2, spatial // 2, spatial // 2


def select_columns(choice: str, rank: int, head_dim: int) -> tuple[int, ...]:
    """The column for each of the rank / 2 pairs of features, -1 where the table has none left.

    Args:
        choice: "prefix" takes the first columns of the table. The others give every axis nearly the same number (time
            and width get one more where it does not divide): "balanced" its fastest, "low" its slowest, "strided"
            evenly spaced ones that include both ends. An axis that has too few passes its rest on.
        rank: number of features.
        head_dim: channels of a head.

    Raises:
        ConfigError: an unknown choice.
    """
    require(choice in ("prefix", "balanced", "low", "strided"), "frequencies", choice, "a known choice of frequencies")
    pairs, sizes = rank // 2, axis_columns(head_dim)
    total = sum(sizes)
    unrotated = (UNROTATED,) * max(0, pairs - total)
    if choice == "prefix":
        return (*range(min(pairs, total)), *unrotated)
    chosen: list[int] = []
    start = 0
    for size, count in zip(sizes, _shares(min(pairs, total), sizes), strict=True):
        if choice == "balanced":
            picks = list(range(count))
        elif choice == "low":
            picks = list(range(size - count, size))
        else:
            picks = [0] if count == 1 else [round(i * (size - 1) / (count - 1)) for i in range(count)]
        chosen += [start + pick for pick in picks]
        start += size
    return (*chosen, *unrotated)


def _shares(pairs: int, sizes: tuple[int, int, int]) -> list[int]:
    """Deal `pairs` out to the axes one by one: time, width, height, and round again, passing over full ones."""
    shares = [0, 0, 0]
    while sum(shares) < pairs:
        for axis in (0, 2, 1):
            if shares[axis] < sizes[axis] and sum(shares) < pairs:
                shares[axis] += 1
    return shares


def tables_from_model(
    cos: torch.Tensor, sin: torch.Tensor, columns: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The chosen columns of the tables that the model itself rotates with.

    Args:
        cos: [1, tokens, 1, head_dim], every angle twice.
        sin: likewise.
        columns: see `select_columns`.

    Returns:
        cos and sin, [tokens, len(columns)]; 1 and 0 where a pair is not rotated.
    """
    return _pick(cos[0, :, 0, 0::2], columns, 1.0), _pick(sin[0, :, 0, 1::2], columns, 0.0)


def tables_from_rounded_angles(
    grid: TokenGrid, order: torch.Tensor | None, head_dim: int, columns: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of the angles rounded to bfloat16, which is how the released checkpoints were trained.

    At an angle of 32 such a rounding is off by up to 1/16 of a radian, so this is for those checkpoints alone.

    Returns:
        cos and sin, float32 [tokens, len(columns)], in `order`.
    """
    angles = token_angles(grid, head_dim)
    if order is not None:
        angles = angles[order.cpu()]
    rounded = _pick(angles, columns, 0.0).to(torch.bfloat16).float()
    return rounded.cos().to(device), rounded.sin().to(device)


def token_angles(grid: TokenGrid, head_dim: int) -> torch.Tensor:
    """The whole angle table, float64 [tokens, head_dim / 2], in raster order."""
    axes = (torch.arange(grid.frames), torch.arange(grid.height), torch.arange(grid.width))
    places = torch.meshgrid(*axes, indexing="ij")
    parts = []
    for place, count in zip(places, axis_columns(head_dim), strict=True):
        frequencies = THETA ** (-torch.arange(count, dtype=torch.float64) / max(1, count))
        parts.append(place.flatten()[:, None] * frequencies)
    return torch.cat(parts, dim=1)


def _pick(table: torch.Tensor, columns: tuple[int, ...], unrotated: float) -> torch.Tensor:
    """Columns of table [tokens, n]; the value `unrotated` for -1."""
    index = torch.tensor([max(0, column) for column in columns], device=table.device)
    still = torch.tensor([column == UNROTATED for column in columns], device=table.device)
    return table.index_select(1, index).masked_fill(still, unrotated).contiguous()
