"""The block map of a layer from its configuration; shared by all block-sparse backends so that they choose alike."""

from __future__ import annotations

import torch

from ..config import AttentionConfig
from ..context import ForwardContext
from ..routing import BlockMap, block_map, diagonal_blocks


def choose_blocks(query: torch.Tensor, key: torch.Tensor, context: ForwardContext, config: AttentionConfig) -> BlockMap:
    """Route `query` to `key` (both [batch, tokens, heads, head_dim]) and note the outcome in `context`."""
    forced = None
    if config.keep_diagonal:
        forced = diagonal_blocks(query.shape[1], config.block_size_q, config.block_size_k)
    if config.keep_first_frame:
        first = context.first_frame_blocks(config.block_size_k)[None, :]
        forced = first if forced is None else forced | first
    chosen = block_map(
        query,
        key,
        keep_ratio=config.keep_ratio_of(context.layer),
        block_size_q=config.block_size_q,
        block_size_k=config.block_size_k,
        forced=forced,
        top_p=config.top_p,
    )
    context.record(chosen)
    return chosen
