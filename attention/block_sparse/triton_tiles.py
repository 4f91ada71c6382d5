"""Tile sizes and launch settings of the Triton kernels; a small table instead of tuning at the first launch.

A kernel works in tiles that divide the blocks of the map, so any block size that is a multiple of 16 can be run: 96
tokens are three tiles of 32. The sizes are those whose code fits the shared memory of every target and spills at
most a few registers there (`videospark.benchmarks.compile` shows both); chips with less shared memory get smaller tiles
or a shallower pipeline. They were chosen by that alone, not by timing. This module imports neither torch nor Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KIB = 1024
Kernel = Literal["forward", "grad_query", "grad_key_value"]

SHARED_MEMORY_LIMITS = {
    "sm_80": 163 * KIB,
    "sm_89": 99 * KIB,
    "sm_90": 227 * KIB,
    "sm_100": 227 * KIB,
    "sm_120": 99 * KIB,
    "gfx942": 64 * KIB,
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
    own, walk, rows_per_warp, num_stages = _settings(kernel, head_dim, item_bytes, shared_memory)
    own, walk = min(own, _largest_power_of_two(owned)), min(walk, _largest_power_of_two(walked))
    num_warps = max(1, min(8, own // rows_per_warp))
    tile_q, tile_k = (walk, own) if kernel == "grad_key_value" else (own, walk)
    return Tiles(tile_q, tile_k, num_warps, num_stages)


def _settings(kernel: Kernel, head_dim: int, item_bytes: int, shared_memory: int) -> tuple[int, int, int, int]:
    """Most rows owned, most rows walked at once, owned rows per warp, and stages.

    Two accumulators, wide heads and products without matrix units want more registers, so more warps share the rows.
    """
    roomy, usual = shared_memory >= 128 * KIB, shared_memory >= 96 * KIB
    if item_bytes == 4:
        return 16, 16, 2, 1
    if kernel == "forward":
        if head_dim <= 128:
            return (128, 64, 16, 3) if roomy or (usual and head_dim <= 64) else (128, 32, 16, 2)
        return 64, 32, 8, 3 if roomy else 2
    if kernel == "grad_key_value" and head_dim > 64 and not usual:
        # AMD: a wave of 64 threads has more registers the fewer waves there are.
        return (64, 32, 16, 2) if head_dim <= 128 else (32, 32, 8, 1)
    if head_dim > 128:
        return (32, 32, 4, 1) if kernel == "grad_key_value" else (32, 32, 8, 1)
    if head_dim <= 64:
        return 64, 64, 16, 2
    if kernel == "grad_key_value":
        return 128 if roomy else 64, 32, 8, 2
    return 64, 64 if roomy else 32, 16, 2


def _largest_power_of_two(size: int) -> int:
    """The largest power of two that divides `size`."""
    return size & -size
