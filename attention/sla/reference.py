"""The linear branch of sparse-linear attention step by step; it holds all pairs, so it is for small inputs."""

from __future__ import annotations

import torch

from ..config import SLAConfig
from ..rola.reference import DENOMINATOR_EPS, feature_map


def reference_sla(
    sparse: torch.Tensor,
    rotated_query: torch.Tensor,
    rotated_key: torch.Tensor,
    value: torch.Tensor,
    proj_weight: torch.Tensor,
    proj_bias: torch.Tensor,
    config: SLAConfig,
    selected: torch.Tensor | None = None,
) -> torch.Tensor:
    """O = O_s + proj(O_l), O_l = phi(q) sum_j phi(k_j) v_j^T / (1e-5 + phi(q) sum_j phi(k_j)), float32 or float64.

    Args:
        sparse: O_s [batch, tokens, heads, head_dim].
        rotated_query: after the rotary embedding, like `sparse`.
        rotated_key: likewise.
        value: like `sparse`.
        proj_weight: [head_dim, head_dim], shared by all heads.
        proj_bias: [head_dim].
        config: the form.
        selected: bool [batch, heads, tokens, tokens], for `exclude_selected`.

    Returns:
        Like `sparse`.
    """
    wide = torch.promote_types(sparse.dtype, torch.float32)
    q, k, v = (tensor.to(wide).transpose(1, 2) for tensor in (rotated_query, rotated_key, value))
    kernel = feature_map(q, config.feature_map) @ feature_map(k, config.feature_map).transpose(-1, -2)
    if config.exclude_selected:
        assert selected is not None, "exclude_selected needs the selected pairs"
        kernel = kernel.masked_fill(selected, 0.0)
    linear = kernel @ v / (kernel.sum(dim=-1, keepdim=True) + DENOMINATOR_EPS)
    projected = linear.transpose(1, 2) @ proj_weight.to(wide).transpose(0, 1) + proj_bias.to(wide)
    return (sparse.to(wide) + projected).to(sparse.dtype)
