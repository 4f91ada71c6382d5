"""The space-time grid of tokens and the orders in which its tokens can be laid out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True)
class TokenGrid:
    """Tokens of a video after patching: frames x height x width, counted in tokens."""

    frames: int
    height: int
    width: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens in one video."""
        return self.frames * self.height * self.width

    @classmethod
    def from_latents(cls, shape: tuple[int, ...], patch_size: tuple[int, int, int]) -> TokenGrid:
        """The grid of latents of shape [batch, channels, frames, height, width].

        Raises:
            ValueError: the shape does not have five dimensions.
        """
        if len(shape) != 5:
            raise ValueError(f"latents: got shape {tuple(shape)}; must be [batch, channels, frames, height, width]")
        frames, height, width = (size // patch for size, patch in zip(shape[2:], patch_size, strict=True))
        return cls(frames, height, width)

    def order(self, token_order: Literal["raster", "tile"], tile: tuple[int, int, int]) -> torch.Tensor | None:
        """Which raster token stands at each place: int64 [tokens] on the CPU, or None for raster order itself.

        Tile order walks boxes of `tile` tokens along frames, rows, columns, and the tokens of each box in the same way.
        Boxes at the far edges are cut off, so that no token is padded and the order is a true permutation.
        """
        if token_order == "raster":
            return None
        axes = (torch.arange(self.frames), torch.arange(self.height), torch.arange(self.width))
        frame, row, column = torch.meshgrid(*axes, indexing="ij")
        counts = [-(-size // side) for size, side in zip((self.frames, self.height, self.width), tile, strict=True)]
        box = (frame // tile[0] * counts[1] + row // tile[1]) * counts[2] + column // tile[2]
        # A stable sort keeps the raster order inside each box.
        return torch.argsort(box.flatten(), stable=True)


def inverse_order(order: torch.Tensor) -> torch.Tensor:
    """The order that undoes `order` (int64 [tokens])."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse
