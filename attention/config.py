"""Settings of the self-attention: which backend, how many blocks are kept, in which token order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..core.config import require
from .backends import available_backends

MIN_BLOCK_SIZE = 16
MAX_BLOCK_SIZE = 128


@dataclass(frozen=True)
class AttentionConfig:
    """How the self-attention layers of one transformer are computed.

    Attributes:
        backend: name of a registered backend; "dense" leaves the results of the model as they are, bit for bit.
        keep_ratio: share of the key blocks that every query block attends to, in (0, 1]; at least one is kept.
        block_size_q: tokens in a query block, a multiple of 16 from 16 to 128.
        block_size_k: tokens in a key block, a multiple of 16 from 16 to 128.
        token_order: "raster" keeps the order of the model (frame, row, column); "tile" puts the tokens of a small
            space-time box next to each other, so that a block covers neighbours. Ignored by dense backends.
        tile: frames, rows and columns of the box.
        keep_diagonal: every query block always attends to the key blocks that hold its own tokens.
        keep_first_frame: every query block always attends to the key blocks that hold a token of the first latent
            frame. In tile order such a block also holds later frames; the number kept grows where it must.
        dense_layers: indices of the layers that stay dense.
        dense_steps: indices of the sampling steps in which every layer stays dense.

    Raises:
        ConfigError: a value outside its range.
    """

    backend: str = "dense"
    keep_ratio: float = 1.0
    block_size_q: int = 64
    block_size_k: int = 64
    token_order: Literal["raster", "tile"] = "tile"
    tile: tuple[int, int, int] = (4, 4, 4)
    keep_diagonal: bool = False
    keep_first_frame: bool = False
    dense_layers: tuple[int, ...] = ()
    dense_steps: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        names = available_backends()
        require(self.backend in names, "backend", self.backend, f"one of {', '.join(names)}")
        require(0.0 < self.keep_ratio <= 1.0, "keep_ratio", self.keep_ratio, "above 0 and at most 1")
        for field in ("block_size_q", "block_size_k"):
            size = getattr(self, field)
            fits = isinstance(size, int) and MIN_BLOCK_SIZE <= size <= MAX_BLOCK_SIZE and size % 16 == 0
            require(fits, field, size, f"a multiple of 16 from {MIN_BLOCK_SIZE} to {MAX_BLOCK_SIZE}")
        require(self.token_order in ("raster", "tile"), "token_order", self.token_order, "'raster' or 'tile'")
        tile_fits = len(self.tile) == 3 and all(side >= 1 for side in self.tile)
        require(tile_fits, "tile", self.tile, "three whole numbers of at least 1: frames, rows, columns")
        for field in ("dense_layers", "dense_steps"):
            indices = getattr(self, field)
            require(all(index >= 0 for index in indices), field, indices, "indices of 0 or more")

    @property
    def sparsity(self) -> float:
        """Nominal share of the key blocks that is left out."""
        return 1.0 - self.keep_ratio
