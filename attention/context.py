"""What a backend needs to know about the forward pass it runs in."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from .grid import TokenGrid

if TYPE_CHECKING:
    from .routing import BlockMap


@dataclass(frozen=True)
class ForwardContext:
    """One forward pass of one transformer, seen from one layer.

    Attributes:
        grid: tokens of the video.
        order: raster token at each place, int64 [tokens], or None in raster order.
        inverse: the order that undoes it, or None.
        step: index of the sampling step, or None if nobody said.
        layer: index of the layer.
        dispatch_backend: which diffusers attention backend dense layers use, None for its default.
        tables: cosines and sines of all tokens [1, tokens, 1, head_dim] in this order, where a layer is handed only
            those of its own share of the tokens (context parallelism), else None.
        keep_maps: whether `record` holds on to the block maps themselves.
        records: what every sparse layer kept, filled by the backends as they run.
        maps: block maps of the layers, for a branch that needs them; whoever uses one takes it out.
        cache: what layers share during this forward pass, such as the tables of a branch.
    """

    grid: TokenGrid
    order: torch.Tensor | None = None
    inverse: torch.Tensor | None = None
    step: int | None = None
    layer: int = 0
    dispatch_backend: Any = None
    tables: tuple[torch.Tensor, torch.Tensor] | None = None
    keep_maps: bool = False
    records: dict[int, LayerRecord] = field(default_factory=dict)
    maps: dict[int, BlockMap] = field(default_factory=dict)
    cache: dict[Any, Any] = field(default_factory=dict)

    def first_frame_blocks(self, block_size: int) -> torch.Tensor:
        """Which blocks of `block_size` tokens hold a token of the first frame: bool [blocks] on the CPU."""
        tokens = torch.arange(self.grid.num_tokens) if self.order is None else self.order.cpu()
        places = torch.nonzero(tokens < self.grid.height * self.grid.width).flatten()
        blocks = torch.zeros(-(-self.grid.num_tokens // block_size), dtype=torch.bool)
        blocks[places // block_size] = True
        return blocks

    def record(self, block_map: BlockMap) -> None:
        """Note the blocks that this layer kept, for the report."""
        # Only numbers are held on to, and the count stays on its device: no layer waits for another.
        self.records[self.layer] = LayerRecord(
            kept=block_map.kept_pairs(),
            total=block_map.all_pairs(),
            query_tokens=block_map.query_length,
            key_tokens=block_map.key_length,
            query_blocks=block_map.indices.shape[2],
            key_blocks=block_map.num_key_blocks,
        )
        if self.keep_maps:
            self.maps[self.layer] = block_map


@dataclass(frozen=True)
class LayerRecord:
    """What one layer computed in one forward pass.

    Attributes:
        kept: pairs of query and key tokens that were computed, over batch and heads; int64 scalar.
        total: pairs that a dense layer computes.
        query_tokens: queries of one head.
        key_tokens: keys of one head.
        query_blocks: blocks of them.
        key_blocks: blocks of them.
    """

    kept: torch.Tensor
    total: int
    query_tokens: int
    key_tokens: int
    query_blocks: int
    key_blocks: int

    def sparsity(self) -> float:
        """Share of the pairs that was left out."""
        return 1.0 - float(self.kept) / self.total


class RotaryTables(tuple):  # type: ignore[type-arg]
    """The cosine and sine tables of one forward pass, together with its context.

    The model hands the tables to every block, also when a checkpointed block is computed again in the backward pass,
    by when another forward pass may have begun. So the context travels with them.
    """

    context: ForwardContext | None = None

    @classmethod
    def build(cls, tables: tuple[torch.Tensor, torch.Tensor], context: ForwardContext) -> RotaryTables:
        """Tables [1, tokens, 1, head_dim] in the order of `context`."""
        made = cls(tables)
        made.context = context
        return made
