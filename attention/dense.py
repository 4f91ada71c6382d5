"""Exact attention, by the same call that the stock Wan processor makes."""

from __future__ import annotations

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

from .backends import BackendConstraints, register_backend
from .config import AttentionConfig
from .context import ForwardContext


@register_backend("dense")
class DenseBackend:
    """Attention over all tokens through the attention dispatch of diffusers."""

    constraints = BackendConstraints(sparse=False)

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        context: ForwardContext,
        config: AttentionConfig,
    ) -> torch.Tensor:
        """Attend over all tokens; shapes [batch, tokens, heads, head_dim]."""
        return dispatch_attention_fn(query, key, value, backend=context.dispatch_backend)
