"""Random numbers that are a function of the seed, the sample and a name, and of nothing that came before.

A resumed run, and one split over more processes, draws the same numbers for the same samples: there is no
state to lose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch


def derived_seed(*parts: object) -> int:
    """63 bits from the given parts."""
    digest = hashlib.sha256("/".join(str(part) for part in parts).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Draws:
    """Draws for the samples of one batch.

    Args:
        seed: of the run.
        positions: place of each sample in the order of the whole run; never twice the same.
        device: where the numbers are put; they are drawn on the CPU, so that every device gets the same ones.
    """

    def __init__(self, seed: int, positions: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.positions = tuple(positions)
        self._seed = seed
        self._device = device

    def _generators(self, name: str) -> list[torch.Generator]:
        return [torch.Generator().manual_seed(derived_seed(self._seed, p, name)) for p in self.positions]

    def normal(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """Standard normal numbers, float32 [B, *shape]."""
        rows = [torch.randn(tuple(shape), generator=generator) for generator in self._generators(name)]
        return torch.stack(rows).to(self._device)

    def uniform(self, name: str, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        """Uniform numbers in [low, high), float32 [B]."""
        rows = [torch.rand((), generator=generator) for generator in self._generators(name)]
        return (low + (high - low) * torch.stack(rows)).to(self._device)
