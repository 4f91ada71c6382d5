"""GPUs as data: memory, peaks and bandwidth, from the vendors' data sheets, and how much of a peak is assumed reached.

Peaks are dense (no structured sparsity), in TFLOP/s. GeForce cards halve their rate where 16-bit products are summed in
32 bits, which is how PyTorch does it; eight-bit floats are summed fast (`use_fast_accum`), as our engines do.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from ..core.config import ConfigError, require


@dataclass(frozen=True)
class Card:
    """One GPU.

    Attributes:
        name: as on the command line.
        memory_gib: what it has, as its driver reports.
        bf16: peak of bfloat16 products, summed in float32; 0 where unknown.
        fp8: peak of float8 products, 0 where it has none.
        int8: peak of int8 products.
        bandwidth: of its memory in GB/s.
        link: to the memory of the CPU in GB/s, as reached rather than promised.
        attention_share: of the bfloat16 peak that attention reaches, dense and sparse. Kernels written for Ampere, as
            PyTorch's own and Triton's are, reach little of it on the data centre cards since Hopper.
    """

    name: str
    memory_gib: float
    bf16: float
    fp8: float
    int8: float
    bandwidth: float
    link: float = 24.0
    attention_share: float = 0.75


CARDS = {
    card.name: card
    for card in (
        Card("rtx3060-12", 12.0, 25.4, 0, 101, 360),
        Card("rtx3080-10", 10.0, 59.5, 0, 238, 760),
        Card("rtx3090", 24.0, 71, 0, 284, 936),
        Card("rtx4060ti-16", 16.0, 44.1, 176, 353, 288, 12.0),
        Card("rtx4070ti-super", 16.0, 88.2, 353, 706, 672),
        Card("rtx4080", 16.0, 97.5, 390, 780, 717),
        Card("rtx4090d", 24.0, 147, 588, 1177, 1008),
        Card("rtx4090", 24.0, 165, 661, 661, 1008),
        Card("rtx5070ti", 16.0, 87.9, 352, 703, 896, 48.0),
        Card("rtx5080", 16.0, 112.6, 450, 900, 960, 48.0),
        Card("rtx5090", 31.8, 209.5, 838, 838, 1792, 48.0),
        Card("a100-40", 39.6, 312, 0, 624, 1555),
        Card("a100-80", 79.3, 312, 0, 624, 2039),
        Card("l40s", 44.9, 362, 733, 733, 864),
        Card("h100", 79.6, 989, 1979, 1979, 3350, 48.0, 0.38),
        Card("h200", 140.4, 989, 1979, 1979, 4800, 48.0, 0.38),
        Card("b200", 179.0, 2250, 4500, 4500, 8000, 48.0, 0.3),
    )
}

CONTEXT_GIB = 0.8
"""What the driver, the kernels of PyTorch and cuBLAS hold beside what PyTorch's allocator reports."""
FRAGMENTATION = 0.05
"""Of the peak that is taken to be lost between allocations, with expandable segments."""

LINEAR_SHARE = 0.75
EIGHT_BIT_SHARE = 0.5
BANDWIDTH_SHARE = 0.8
VAE_SHARE = 0.43
"""Shares of a peak that are assumed; see docs/real-weights.md for the published times they were held against."""

_NAMES = [
    ("5090", "rtx5090"), ("5080", "rtx5080"), ("5070 ti", "rtx5070ti"), ("4090 d", "rtx4090d"), ("4090", "rtx4090"),
    ("4080", "rtx4080"), ("4070 ti super", "rtx4070ti-super"), ("4060 ti", "rtx4060ti-16"), ("3090", "rtx3090"),
    ("3080", "rtx3080-10"), ("3060", "rtx3060-12"), ("l40s", "l40s"), ("h100", "h100"), ("h200", "h200"),
    ("b200", "b200"), ("a100.*80", "a100-80"), ("a100", "a100-40"),
]  # fmt: skip


def find_card(name: str | None) -> Card:
    """A card by name, the one in this machine for None, or "NUMBERgb" for a memory alone, without times.

    Raises:
        ConfigError: an unknown name, or no card here.
    """
    if name is None:
        return _card_here()
    if name in CARDS:
        return CARDS[name]
    memory = re.fullmatch(r"(\d+(?:\.\d+)?)gi?b", name.lower())
    rule = f"one of {', '.join(CARDS)}, or a memory as in 16gb"
    require(memory is not None, "gpu", name, rule)
    assert memory is not None
    require(float(memory[1]) > CONTEXT_GIB, "gpu", name, f"more than the {CONTEXT_GIB} GiB that CUDA takes for itself")
    return Card(name, float(memory[1]), 0, 0, 0, 0)


def _card_here() -> Card:
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"gpu: got nothing, and there is none here; must be one of {', '.join(CARDS)}, or 16gb")
    found = torch.cuda.get_device_properties(0)
    memory = found.total_memory / 2**30
    for pattern, name in _NAMES:
        # Laptop cards share names with faster ones: their memory is known, and their peaks are not.
        if re.search(pattern, found.name.lower()) and not re.search("laptop|max-q", found.name.lower()):
            return replace(CARDS[name], memory_gib=memory)
    return Card(found.name, memory, 0, 0, 0, 0)
