"""Low-rank maps from what sparse attention misses: moments of queries, keys and missed weights, and their factors."""

from __future__ import annotations

import math

import torch

from .routing import BlockMap


def map_moments(
    query: torch.Tensor,
    key: torch.Tensor,
    rotated: tuple[torch.Tensor, torch.Tensor],
    tables: tuple[torch.Tensor, torch.Tensor],
    block_map: BlockMap,
    *,
    rows: int,
    by_head: bool,
    missed_only: bool,
) -> list[torch.Tensor]:
    """S_q, S_k and X of one sample.

    Args:
        query: before the rotary embedding [batch, tokens, heads, head_dim].
        key: likewise.
        rotated: both after it.
        tables: cos and sin of the pairs of features [tokens, pairs].
        block_map: what the sparse softmax keeps.
        rows: queries of each head that are looked at, evenly spaced.
        by_head: one result per head instead of one for all.
        missed_only: leave the kept pairs out of P - P_s, for a branch that leaves them out itself.

    Returns:
        S_q and S_k float32 [maps, head_dim, head_dim], X complex64 [maps, pairs, head_dim, head_dim], and how many
        queries are in them [maps]; maps is the number of heads or 1. See the top of `calibration.py`.
    """
    batch, length, heads, dim = query.shape
    cos, sin = (table.float() for table in tables)
    maps = heads if by_head else 1
    second = [torch.zeros(maps, dim, dim, device=query.device) for _ in range(2)]
    cross = torch.zeros(maps, cos.shape[1], dim, dim, dtype=torch.complex64, device=query.device)
    count = torch.zeros(maps, device=query.device)
    picks = torch.linspace(0, length - 1, min(rows, length), device=query.device).round().long()
    for sequence in range(batch * heads):
        item, head = divmod(sequence, heads)
        place = head if by_head else 0
        q, k = query[item, :, head].float(), key[item, :, head].float()
        weights = missed_weights(rotated, block_map, picks, item, head, missed_only)
        second[0][place] += q.T @ q
        second[1][place] += k.T @ k
        count[place] += length
        for pair in range(cos.shape[1]):
            turn_q = torch.complex(cos[picks, pair], sin[picks, pair])[:, None] * q[picks]
            turn_k = torch.complex(cos[:, pair], -sin[:, pair])[:, None] * k
            summed = torch.complex(weights @ turn_k.real, weights @ turn_k.imag)
            cross[place, pair] += turn_q.T @ summed
    return [*second, cross, count]


def missed_weights(
    rotated: tuple[torch.Tensor, torch.Tensor],
    block_map: BlockMap,
    picks: torch.Tensor,
    item: int,
    head: int,
    missed_only: bool,
) -> torch.Tensor:
    """P - P_s of the queries `picks` of one head: float32 [picks, tokens]."""
    query, key = (tensor[item, :, head].float() for tensor in rotated)
    scores = query[picks] @ key.T / math.sqrt(query.shape[1])
    blocks = block_map.indices[item, head, picks // block_map.block_size_q]
    kept = torch.zeros(len(picks), block_map.num_key_blocks + 1, dtype=torch.bool, device=scores.device)
    kept = kept.scatter_(1, blocks, True)[:, :-1].repeat_interleave(block_map.block_size_k, dim=1)[:, : scores.shape[1]]
    dense = scores.softmax(dim=-1)
    if missed_only:
        return dense.masked_fill(kept, 0.0)
    return dense - scores.masked_fill(~kept, -math.inf).softmax(dim=-1)


def occurrences(cos: torch.Tensor, sin: torch.Tensor, same: float) -> list[int]:
    """For each pair of features, how many before it turn alike on this grid.

    Args:
        cos: [tokens, pairs].
        sin: likewise.
        same: squared magnitude of the mean of e^(i (a - b)) from which on a and b count as one.
    """
    turn = torch.complex(cos.float(), sin.float())
    alike = (turn.conj().T @ turn / turn.shape[0]).abs().square() > same
    counts: list[int] = []
    leaders: list[int] = []
    followers: dict[int, int] = {}
    for pair in range(turn.shape[1]):
        leader = next((one for one in leaders if bool(alike[one, pair])), None)
        if leader is None:
            leaders.append(pair)
            leader = pair
        counts.append(followers.get(leader, 0))
        followers[leader] = counts[-1] + 1
    return counts


def factorised_maps(
    second_q: torch.Tensor,
    second_k: torch.Tensor,
    cross: torch.Tensor,
    count: torch.Tensor,
    ranks: list[int],
    *,
    ridge: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """W_q and W_k from the moments; the features of what was seen have a root mean square of 1.

    Args:
        second_q: S_q [maps, head_dim, head_dim].
        second_k: S_k, likewise.
        cross: X [maps, pairs, head_dim, head_dim].
        count: queries in S_q, and keys in S_k [maps].
        ranks: which singular pair each pair of features takes, from 0; see `occurrences`.
        ridge: added to the diagonals, as a share of their mean.

    Returns:
        [2 pairs, head_dim] each, or [heads, 2 pairs, head_dim] for several maps: channel 2i and 2i + 1 are the real and
        the imaginary part of u_i and v_i.
    """
    found = []
    second_q, second_k = (second / count[:, None, None] for second in (second_q, second_k))
    for s_q, s_k, x in zip(second_q.double(), second_k.double(), cross.to(torch.complex128), strict=True):
        root_q, root_k = _inverse_root(s_q, ridge), _inverse_root(s_k, ridge)
        left, strength, right = torch.linalg.svd(root_q.to(x.dtype) @ x @ root_k.to(x.dtype))
        picks = torch.tensor([min(rank, len(s_q) - 1) for rank in ranks], device=x.device)
        pairs = torch.arange(len(ranks), device=x.device)
        weight = strength[pairs, picks].sqrt().unsqueeze(-1)
        # X' = U S V^H, and u^T X' conj(v) is largest for u = conj(U_0), v = conj(V_0).
        u = weight * left[pairs, :, picks].conj() @ root_q.to(x.dtype)
        v = weight * right[pairs, picks, :] @ root_k.to(x.dtype)
        found.append([_unit_size(torch.stack((f.real, f.imag), 1).flatten(0, 1), s) for f, s in ((u, s_q), (v, s_k))])
    maps_q, maps_k = (torch.stack(part) for part in zip(*found, strict=True))
    return (maps_q[0], maps_k[0]) if len(maps_q) == 1 else (maps_q, maps_k)


def _inverse_root(second: torch.Tensor, ridge: float) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(second)
    values = values.clamp(min=0) + ridge * values.clamp(min=0).mean() + 1e-30
    return vectors / values.sqrt() @ vectors.T


def _unit_size(weight: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Scaled so that the mean square of W x is 1 for x with the second moments `second`."""
    square = (weight @ second * weight).sum() / weight.shape[0]
    return weight / square.clamp(min=1e-30).sqrt()
