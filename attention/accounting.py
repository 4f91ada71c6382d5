"""How much of the work of dense attention is saved: three shares, each closer to the truth than the one before.

- **Nominal** sparsity is 1 - keep_ratio.
- **Actual** sparsity is the share of token pairs left out; it knows the floor of the share, forced blocks and the short
  last block.
- **FLOP-weighted** sparsity also counts what choosing the blocks and running the branch costs. It is negative where
  that is more than what was saved, as on short videos.

A multiplication with its addition counts as two operations. Softmax, norms and other work that grows with the tokens
but not with their pairs is counted in neither case.
"""

from __future__ import annotations

from .config import AttentionConfig
from .context import LayerRecord


def dense_flops(query_tokens: int, key_tokens: int, head_dim: int) -> float:
    """Operations of the two products of dense attention, of one head: 4 L_q L_k d."""
    return 4.0 * query_tokens * key_tokens * head_dim


def router_flops(record: LayerRecord, head_dim: int) -> float:
    """Operations of pooling and of scoring block means, of one head: (L_q + L_k) d + 2 N_q N_k d."""
    pooling = (record.query_tokens + record.key_tokens) * head_dim
    return float(pooling + 2 * record.query_blocks * record.key_blocks * head_dim)


def branch_flops(config: AttentionConfig, record: LayerRecord, head_dim: int) -> float:
    """Operations of the linear branch, of one head; 0 without one.

    RoLA at rank r: 4 L r d for the two projections, 4 L r d for summary and output, 2 L d for the gate, together
    8 L r d + 2 L d where queries and keys are equally many. SLA: 4 L d^2 and 2 L d^2 for the projection of its output.
    Leaving the selected blocks out adds one r d summary per kept pair of blocks.
    """
    if config.branch == "none":
        return 0.0
    tokens = record.query_tokens + record.key_tokens
    if config.branch == "rola":
        rank, excludes = config.rola.rank, config.rola.exclude_selected
        own = 4 * tokens * rank * head_dim + 2 * record.query_tokens * head_dim
    else:
        rank, excludes = head_dim, config.sla.exclude_selected
        own = 2 * tokens * head_dim**2 + 2 * record.query_tokens * head_dim**2
    if excludes:
        kept_block_pairs = (1.0 - record.sparsity()) * record.query_blocks * record.key_blocks
        own += round(kept_block_pairs * rank * head_dim)
    return float(own)


def flop_sparsity(config: AttentionConfig, record: LayerRecord, head_dim: int) -> float:
    """Share of the operations of dense attention that this layer saved, router and branch included."""
    dense = dense_flops(record.query_tokens, record.key_tokens, head_dim)
    sparse = (1.0 - record.sparsity()) * dense
    return 1.0 - (sparse + router_flops(record, head_dim) + branch_flops(config, record, head_dim)) / dense
