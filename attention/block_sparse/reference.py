"""Block-sparse attention as masked dense attention: slow, plain, and what the other formulations are tested against."""

from __future__ import annotations

import math

import torch

from ..backends import BackendConstraints, register_backend
from ..config import AttentionConfig
from ..context import ForwardContext
from ..routing import BlockMap
from .choice import choose_blocks


def reference_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_map: BlockMap
) -> torch.Tensor:
    """Softmax attention over the pairs of `block_map`, in float32 (float64 stays).

    Args:
        query: [batch, length, heads, head_dim].
        key: like query.
        value: like query.
        block_map: kept blocks.

    Returns:
        [batch, length, heads, head_dim] in the dtype of `query`.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        q, k, v = (tensor.to(wide).transpose(1, 2) for tensor in (query, key, value))
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        scores = scores.masked_fill(~block_map.token_mask(), -math.inf)
        out = scores.softmax(dim=-1) @ v
    return out.transpose(1, 2).to(query.dtype)


@register_backend("reference")
class ReferenceBackend:
    """Masked dense attention; it holds all scores, so it is for checks on small inputs."""

    constraints = BackendConstraints()

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        context: ForwardContext,
        config: AttentionConfig,
    ) -> torch.Tensor:
        """Attend to the kept blocks; shapes [batch, tokens, heads, head_dim]."""
        return reference_attention(query, key, value, choose_blocks(query, key, context, config))
