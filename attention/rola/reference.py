"""Rotary low-rank attention step by step, as it is written down: what every faster form is tested against.

It holds the whole matrix of pairs, so it is for small inputs. Shapes: B batch, L tokens, H heads, d channels of a head,
r rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..config import RoLAConfig

MATCH_EPS = 1e-5
"""Under the root of the magnitude a of the sparse output."""

DENOMINATOR_EPS = 1e-5
"""Added to the sum of features that divides the output."""


@dataclass(frozen=True)
class RoLATensors:
    """The tensors of one layer, under the names of the released checkpoints.

    Attributes:
        proj_q: W_q [r, d], or [H, r, d] with maps per head.
        proj_k: W_k, likewise.
        gate_proj: w_g [1, d].
        gate_bias: b [1, H, 1, 1].
        output_scale: a [1, H, 1, 1], with merge "scaled" alone.
    """

    proj_q: torch.Tensor
    proj_k: torch.Tensor
    gate_proj: torch.Tensor
    gate_bias: torch.Tensor
    output_scale: torch.Tensor | None = None


def reference_rola(
    sparse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden_states: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    tensors: RoLATensors,
    config: RoLAConfig,
    selected: torch.Tensor | None = None,
) -> torch.Tensor:
    """O = O_s + g a N(O_l), in float32 (float64 stays).

    Args:
        sparse: O_s [B, L, H, d], what the sparse softmax gives.
        query: [B, L, H, d], after normalisation and before the rotary embedding.
        key: likewise.
        value: [B, L, H, d].
        hidden_states: input of the attention layer [B, L, H d]; the gate sees the channels of its own head.
        cos: [L, r / 2], see `frequencies`.
        sin: likewise.
        tensors: the maps and the gate.
        config: the form.
        selected: bool [B, H, L, L], the pairs that the sparse softmax attends to; for `exclude_selected`.

    Returns:
        [B, L, H, d] in the dtype of `sparse`.
    """
    wide = torch.promote_types(sparse.dtype, torch.float32)
    o_s, q, k, v = (tensor.to(wide).transpose(1, 2) for tensor in (sparse, query, key, value))
    x = hidden_states.to(wide).unflatten(2, (q.shape[1], -1)).transpose(1, 2)
    # 1. Low-rank features, without position.
    phi_q = feature_map(_project(q, tensors.proj_q.to(wide)), config.feature_map)
    phi_k = feature_map(_project(k, tensors.proj_k.to(wide)), config.feature_map)
    # 2. Position, outside of the feature map: <R_m a, R_n b> = a^T R_(n - m) b depends on n - m alone.
    q_r, k_r = rotate_pairs(phi_q, cos.to(wide), sin.to(wide)), rotate_pairs(phi_k, cos.to(wide), sin.to(wide))
    # 3. Sum over the keys.
    kernel, plain = q_r @ k_r.transpose(-1, -2), phi_q @ phi_k.transpose(-1, -2)
    if config.exclude_selected:
        assert selected is not None, "exclude_selected needs the selected pairs"
        kernel, plain = kernel.masked_fill(selected, 0.0), plain.masked_fill(selected, 0.0)
    o_l = kernel @ v
    # 4. Size.
    if config.normalizer == "rms":
        o_l = F.rms_norm(o_l, (o_l.shape[-1],), eps=torch.finfo(sparse.dtype).eps)
    elif config.normalizer == "denominator":
        o_l = o_l / (plain.sum(dim=-1, keepdim=True) + DENOMINATOR_EPS)
    else:
        o_l = o_l / key.shape[1]
    # 5. Gate and merge.
    logit = x @ tensors.gate_proj.to(wide).transpose(0, 1) + tensors.gate_bias.to(wide)
    if config.merge == "rms_matched":
        size = torch.sqrt(o_s.square().mean(dim=-1, keepdim=True) + MATCH_EPS)
    else:
        assert tensors.output_scale is not None, "merge 'scaled' needs output_scale"
        size = tensors.output_scale.to(wide)
    return (o_s + logit.sigmoid() * size * o_l).transpose(1, 2).to(sparse.dtype)


def feature_map(inputs: torch.Tensor, name: str) -> torch.Tensor:
    """phi over the last dimension."""
    if name == "silu":
        return F.silu(inputs)
    if name == "relu":
        return F.relu(inputs)
    if name == "elu":
        return F.elu(inputs) + 1.0
    if name == "softmax":
        return inputs.softmax(dim=-1)
    assert name == "identity", name
    return inputs


def rotate_pairs(features: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn channels 2i and 2i + 1 of features [..., L, r] by the angle of column i of cos and sin [L, r / 2]."""
    even, odd = features[..., 0::2], features[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def _project(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """inputs [B, H, L, d] by weight [r, d] or [H, r, d]."""
    return inputs @ weight.transpose(-1, -2)
