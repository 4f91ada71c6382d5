"""Tile sizes and launch settings of the RoLA kernels: a small table that fits every chip, as the compile check shows.

This module imports neither torch nor Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RolaKernel = Literal["summary", "outer", "merge", "grad_query", "grad_key_value"]

SMALL_MEMORY = 128 * 1024
SMALLEST_MEMORY = 64 * 1024


@dataclass(frozen=True)
class RolaTiles:
    """How one kernel is launched.

    Attributes:
        tokens: tokens that are worked on at once.
        columns: channels of a head that are multiplied at once; divides the head.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
    """

    tokens: int
    columns: int
    num_warps: int
    num_stages: int


def choose_rola_tiles(
    kernel: RolaKernel, *, rank: int, head_dim: int, item_bytes: int, shared_memory: int
) -> RolaTiles:
    """The settings of one kernel.

    Args:
        kernel: which one.
        rank: features, a power of two of at least 32.
        head_dim: channels of a head, a power of two.
        item_bytes: bytes of one number of the inputs; 4 means that products run without matrix units.
        shared_memory: bytes that a program can have on this chip.
    """
    if item_bytes == 4:
        return RolaTiles(16, min(head_dim, 32), 8 if kernel.startswith("grad") else 4, 1)
    small = shared_memory < SMALL_MEMORY
    columns = min(head_dim, 64 if rank > 64 or small else 128)
    stages = 1 if small else 2
    if rank > 64 and shared_memory <= SMALLEST_MEMORY and kernel not in ("outer", "merge"):
        # With larger tiles the two halves of wide features do not fit the registers of MI300.
        return RolaTiles(16, min(head_dim, 32), 8, 1)
    if kernel in ("summary", "outer"):
        # Sums stay in registers while tiles of tokens go by.
        return RolaTiles(64 if rank <= 64 else 32, columns, 4 if rank <= 64 else 8, stages)
    tokens = 64 if kernel == "merge" and rank <= 64 else 32
    return RolaTiles(tokens, columns, 4 if rank <= 64 else 8, stages)
