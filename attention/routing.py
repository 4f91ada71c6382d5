"""Which key blocks each query block attends to.

Queries and keys are averaged over each block in float32; the dot products of the averages rank the key blocks. Two
rules say how many of the ranking are kept: "top_k" the same number for every query block, "top_p" as many as hold a
given share of the softmax over the blocks, capped. Routing is a choice, so no gradient passes through it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

CPU_POOL_ELEMENTS = 2**18
"""Numbers that are averaged at a time where PyTorch makes a wide copy of them first: those stay in the cache."""


@dataclass(frozen=True)
class BlockMap:
    """Kept key blocks.

    Attributes:
        indices: int64 [batch, heads, query_blocks, kept], each row ascending and without repeats. A row of a ragged
            map can keep fewer: its last entries are then `num_key_blocks`, which no block has.
        block_size_q: tokens in a query block.
        block_size_k: tokens in a key block.
        query_length: number of query tokens; the last block holds what is left.
        key_length: number of key tokens.
        ragged: whether rows may differ in how many blocks they keep; every row keeps at least one.
    """

    indices: torch.Tensor
    block_size_q: int
    block_size_k: int
    query_length: int
    key_length: int
    ragged: bool = False

    @property
    def num_key_blocks(self) -> int:
        """Number of key blocks there are."""
        return -(-self.key_length // self.block_size_k)

    @property
    def is_full(self) -> bool:
        """Whether every block is known to be kept; of a ragged map that is not known without looking at it."""
        return not self.ragged and self.indices.shape[-1] == self.num_key_blocks

    def counts(self) -> torch.Tensor:
        """Key blocks that each query block keeps: int64 [batch, heads, query_blocks]."""
        if not self.ragged:
            return torch.full(self.indices.shape[:-1], self.indices.shape[-1], device=self.indices.device)
        return (self.indices < self.num_key_blocks).sum(dim=-1)

    def token_mask(self) -> torch.Tensor:
        """Bool [batch, heads, query_length, key_length], true where a pair is computed. Large: for small inputs."""
        # One more than there are, for the entries that stand for none.
        kept = torch.zeros(
            (*self.indices.shape[:-1], self.num_key_blocks + 1), dtype=torch.bool, device=self.indices.device
        )
        kept = kept.scatter_(-1, self.indices, True)[..., :-1]
        wide = kept.repeat_interleave(self.block_size_q, dim=2).repeat_interleave(self.block_size_k, dim=3)
        return wide[:, :, : self.query_length, : self.key_length]

    def kept_pairs(self) -> torch.Tensor:
        """Pairs of query and key tokens that are computed, over batch and heads: int64 scalar on the map's device."""
        device = self.indices.device
        queries = block_lengths(self.query_length, self.block_size_q, device)
        # The last length, 0, is that of the entries that stand for no block.
        keys = F.pad(block_lengths(self.key_length, self.block_size_k, device), (0, 1))
        return (keys[self.indices].sum(dim=-1) * queries).sum()

    def all_pairs(self) -> int:
        """Pairs that dense attention computes."""
        batch, heads = self.indices.shape[:2]
        return batch * heads * self.query_length * self.key_length

    def actual_sparsity(self) -> float:
        """Share of the token pairs that is left out, counting the ragged last block at its true size."""
        return 1.0 - int(self.kept_pairs()) / self.all_pairs()


def num_kept_blocks(keep_ratio: float, num_blocks: int) -> int:
    """Key blocks that a query block keeps: the floor of the share, at least one, at most all."""
    # The guard keeps a share such as 0.29 of 100, which is stored as 28.999..., at 29.
    return max(1, min(num_blocks, math.floor(keep_ratio * num_blocks + 1e-9)))


def block_lengths(length: int, block_size: int, device: torch.device) -> torch.Tensor:
    """Tokens in each block: int64 [blocks]; only the last can be short."""
    starts = torch.arange(0, length, block_size, device=device)
    return (length - starts).clamp(max=block_size)


def pool_blocks(tokens: torch.Tensor, block_size: int) -> torch.Tensor:
    """Mean of the real tokens of each block, in float32 (float64 stays).

    Args:
        tokens: [batch, length, heads, head_dim].
        block_size: tokens in a block.

    Returns:
        [batch, heads, blocks, head_dim].
    """
    length = tokens.shape[1]
    whole = length - length % block_size
    dtype = torch.promote_types(tokens.dtype, torch.float32)
    blocks = tokens[:, :whole].unflatten(1, (-1, block_size))
    if tokens.device.type == "cpu" and tokens.dtype != dtype and whole:
        run = max(1, CPU_POOL_ELEMENTS // tokens[:, :block_size].numel())
        means = torch.cat([part.mean(dim=2, dtype=dtype) for part in blocks.split(run, dim=1)], dim=1)
    else:
        means = blocks.mean(dim=2, dtype=dtype)
    if whole < length:
        means = torch.cat([means, tokens[:, whole:].mean(dim=1, keepdim=True, dtype=dtype)], dim=1)
    return means.transpose(1, 2)


def diagonal_blocks(length: int, block_size_q: int, block_size_k: int) -> torch.Tensor:
    """Key blocks that share a token with each query block: bool [query_blocks, key_blocks] on the CPU."""
    query_start = torch.arange(0, length, block_size_q)[:, None]
    key_start = torch.arange(0, length, block_size_k)[None, :]
    return (query_start < key_start + block_size_k) & (key_start < query_start + block_size_q)


@torch.no_grad()
def block_map(
    query: torch.Tensor,
    key: torch.Tensor,
    *,
    keep_ratio: float,
    block_size_q: int,
    block_size_k: int,
    forced: torch.Tensor | None = None,
    top_p: float | None = None,
) -> BlockMap:
    """Choose the key blocks of every query block by the dot product of their means.

    Args:
        query: [batch, length_q, heads, head_dim], after normalisation and rotary embedding.
        key: [batch, length_k, heads, head_dim], likewise.
        keep_ratio: share of the key blocks to keep.
        block_size_q: tokens in a query block.
        block_size_k: tokens in a key block.
        forced: bool, broadcastable to [query_blocks, key_blocks]: blocks that are kept whatever their score. They take
            places of the share; where they need more than it has, every row keeps as many as the fullest needs.
        top_p: None for the rule "top_k". Otherwise each row keeps the fewest of its best blocks that hold this share of
            the softmax of scores / sqrt(head_dim) over the blocks, at least one and at most as many as `keep_ratio`
            allows; forced blocks come first and count. The map is then ragged.

    Returns:
        The map. Equal scores are settled by the lower block index, so the choice repeats.
    """
    scores = pool_blocks(query, block_size_q) @ pool_blocks(key, block_size_k).transpose(-1, -2)
    kept = num_kept_blocks(keep_ratio, scores.shape[-1])
    shares = None if top_p is None else (scores / math.sqrt(query.shape[-1])).softmax(dim=-1)
    if forced is not None:
        wanted = forced.broadcast_to(scores.shape[-2:])
        kept = max(kept, int(wanted.sum(dim=-1).max()))
        scores = scores.masked_fill(wanted.to(scores.device), math.inf)
    indices = highest(scores, kept)
    if top_p is not None and shares is not None:
        indices = _until_share(indices, scores, shares, top_p)
    return BlockMap(indices, block_size_q, block_size_k, query.shape[1], key.shape[1], ragged=top_p is not None)


def _until_share(indices: torch.Tensor, scores: torch.Tensor, shares: torch.Tensor, top_p: float) -> torch.Tensor:
    """The best of `indices` [..., kept] up to the share `top_p`, ascending; the rest becomes the number of blocks.

    Nothing waits for the device: the width stays, whatever is kept.
    """
    found = scores.gather(-1, indices)
    ranking = found.nan_to_num(nan=-math.inf).sort(dim=-1, descending=True, stable=True).indices
    indices, found = indices.gather(-1, ranking), found.gather(-1, ranking)
    own = shares.gather(-1, indices)
    before = own.cumsum(dim=-1) - own
    # Kept where what is better does not suffice yet. NaN suffices for nothing: such a row keeps all that it may.
    keep = ~(before >= top_p) | (found == math.inf)
    keep[..., 0] = True
    return indices.masked_fill(~keep, scores.shape[-1]).sort(dim=-1).values


def highest(scores: torch.Tensor, kept: int) -> torch.Tensor:
    """Indices of the `kept` highest scores of each row `[..., n]`, ascending; of equal scores the lower indices."""
    scores = scores.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)
    if scores.device.type != "cpu":
        # Counting what was found, as below, would make the host wait for an accelerator.
        ranked = scores.sort(dim=-1, descending=True, stable=True).indices
        return ranked[..., :kept].sort(dim=-1).values
    least = scores.topk(kept, dim=-1).values[..., -1:]
    above, equal = scores > least, scores == least
    places_left = kept - above.sum(dim=-1, keepdim=True)
    taken = above | (equal & (equal.cumsum(dim=-1) <= places_left))
    return torch.nonzero(taken)[:, -1].unflatten(0, (*scores.shape[:-1], kept))
