"""Tile sizes and launch settings of the Triton kernels; a small table instead of tuning at the first launch.

A kernel works in tiles that divide the blocks of the map, so any block size that is a multiple of 16 can be run: 96
tokens are three tiles of 32. The sizes are those whose code fits the shared memory of every target and spills no
register there (`videospark.benchmarks.compile` shows both); chips with less shared memory get smaller tiles or a
shallower pipeline. This module imports neither torch nor Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kernel = Literal["forward", "grad_query", "grad_key_value"]

SHARED_MEMORY_LIMITS = {
    "sm_80": 163 * 1024,
    "sm_89": 99 * 1024,
    "sm_90": 227 * 1024,
    "sm_100": 227 * 1024,
    "sm_120": 99 * 1024,
    "gfx942": 64 * 1024,
}
"""Bytes of shared memory that one program can have (CUDA C++ programming guide, table of compute capabilities; LDS)."""


@dataclass(frozen=True)
class Tiles:
    """How one kernel is launched.

    Attributes:
        tile_q: query tokens that are multiplied at once; divides the query block.
        tile_k: key tokens that are multiplied at once; divides the key block.
        num_warps: warps of a program.
        num_stages: depth of the software pipeline.
    """

    tile_q: int
    tile_k: int
    num_warps: int
    num_stages: int


def choose_tiles(
    kernel: Kernel, *, block_size_q: int, block_size_k: int, head_dim: int, item_bytes: int, shared_memory: int
) -> Tiles:
    """The settings of one kernel.

    Args:
        kernel: which one.
        block_size_q: tokens in a query block.
        block_size_k: tokens in a key block.
        head_dim: channels of a head, a power of two.
        item_bytes: bytes of one number of the inputs; 4 means that products run without matrix units.
        shared_memory: bytes that a program can have on this chip.
    """
    # Each program owns rows of one side, whose sums stay in registers, and walks over tiles of the other.
    owned, walked = (block_size_k, block_size_q) if kernel == "grad_key_value" else (block_size_q, block_size_k)
    small_memory = shared_memory < 128 * 1024
    if item_bytes == 4:
        own, walk, stages = (32 if head_dim <= 64 else 16), (32 if head_dim <= 64 else 16), 1
    elif kernel == "forward":
        own = 128 if head_dim <= 128 else 64
        walk = 64 if head_dim <= 128 and not small_memory else 32
        stages = 2 if small_memory else 3
    else:
        own = 64
        walk = 64 if head_dim <= 64 or not small_memory else 32
        stages = 2 if head_dim <= 128 else 1
    own, walk = min(own, _largest_power_of_two(owned)), min(walk, _largest_power_of_two(walked))
    num_warps = _warps(kernel, own, head_dim, item_bytes)
    tile_q, tile_k = (walk, own) if kernel == "grad_key_value" else (own, walk)
    return Tiles(tile_q, tile_k, num_warps, stages)


def _warps(kernel: Kernel, own: int, head_dim: int, item_bytes: int) -> int:
    """One warp per 16 owned rows keeps the sums in registers; two accumulators or wide heads take twice as many."""
    warps = max(1, own // 16)
    if head_dim > 128 or item_bytes == 4:
        warps *= 2
    if kernel == "grad_key_value" and head_dim > 64:
        warps *= 2
    return min(warps, 8)


def _largest_power_of_two(size: int) -> int:
    """The largest power of two that divides `size`."""
    return size & -size
