"""Block-sparse attention on any device: gather the kept key and value blocks, then multiply them in batches.

The work goes through query blocks in chunks, so that the gathered blocks and their scores stay within a fixed amount of
memory. The backward pass gathers again instead of keeping what the forward pass gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ..backends import BackendConstraints, register_backend
from ..config import AttentionConfig
from ..context import ForwardContext
from ..dense import DenseBackend
from ..routing import BlockMap
from .choice import choose_blocks

CPU_CHUNK_ELEMENTS = 4 * 2**20
ACCELERATOR_CHUNK_ELEMENTS = 128 * 2**20
"""Numbers that the temporary tensors of one chunk may hold: small on a CPU, so that they stay in its cache."""

PADDING_VALUE = 0.0
"""What fills the last block up. It never reaches the result; any finite value gives the same."""


def gather_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_map: BlockMap, chunk_elements: int | None = None
) -> torch.Tensor:
    """Softmax attention over the pairs of `block_map`; differentiable once.

    Args:
        query: [batch, length_q, heads, head_dim].
        key: [batch, length_k, heads, head_dim].
        value: [batch, length_k, heads, head_dim]; its dtype is the one computed in where they differ (autocast).
        block_map: kept blocks.
        chunk_elements: numbers that the temporaries of one chunk may hold; by default set by the device.

    Returns:
        [batch, length_q, heads, head_dim] in the dtype of `value`. Scores, softmax and sums are float32 (or float64).
    """
    if chunk_elements is None:
        chunk_elements = CPU_CHUNK_ELEMENTS if query.device.type == "cpu" else ACCELERATOR_CHUNK_ELEMENTS
    query, key = query.to(value.dtype), key.to(value.dtype)
    out: torch.Tensor = _GatherAttention.apply(query, key, value, block_map, chunk_elements)  # type: ignore[no-untyped-call]
    return out


@register_backend("gather")
class GatherBackend:
    """Gathers kept blocks; any device, dtype, head size and length."""

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
        chosen = choose_blocks(query, key, context, config)
        if chosen.is_full:
            # Nothing is left out, and dense kernels are faster at that.
            return DenseBackend()(query, key, value, context=context, config=config)
        return gather_attention(query, key, value, chosen)


class _GatherAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_map: BlockMap, chunk_elements: int
    ) -> torch.Tensor:
        with torch.autocast(query.device.type, enabled=False):
            q_blocks = _to_blocks(query, block_map.block_size_q)
            k_blocks, v_blocks = (_to_blocks(tensor, block_map.block_size_k) for tensor in (key, value))
            out_blocks = torch.empty_like(q_blocks)
            lse = torch.empty(q_blocks.shape[:2], dtype=_wide(query.dtype), device=query.device)
            scale = 1.0 / math.sqrt(query.shape[-1])
            for rows, picks, columns in _chunks(block_map, query.shape[-1], chunk_elements):
                keys, values = _pick(k_blocks, picks), _pick(v_blocks, picks)
                scores = _scores(q_blocks[rows], keys, columns, scale)
                lse[rows] = scores.logsumexp(dim=-1)
                weights = scores.sub_(lse[rows].unsqueeze(-1)).exp_()
                out_blocks[rows] = _product(_like_operand(weights, values), values).to(out_blocks.dtype)
            out = _from_blocks(out_blocks, query.shape)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.block_map, ctx.chunk_elements = block_map, chunk_elements
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        block_map: BlockMap = ctx.block_map
        wide = _wide(query.dtype)
        with torch.autocast(query.device.type, enabled=False):
            q_blocks, g_blocks = (_to_blocks(tensor, block_map.block_size_q) for tensor in (query, grad_out))
            k_blocks, v_blocks = (_to_blocks(tensor, block_map.block_size_k) for tensor in (key, value))
            if (ragged := query.shape[1] % block_map.block_size_q) != 0:
                # Rows past the last token are no part of the result: nothing may flow back from them.
                g_blocks.unflatten(0, (query.shape[0] * query.shape[2], -1))[:, -1, ragged:] = 0
            out_blocks = _to_blocks(out, block_map.block_size_q)
            delta = (out_blocks.to(wide) * g_blocks.to(wide)).sum(dim=-1, keepdim=True)
            grad_q = torch.empty_like(q_blocks)
            grad_k, grad_v = (torch.zeros(k_blocks.shape, dtype=wide, device=key.device) for _ in range(2))
            scale = 1.0 / math.sqrt(query.shape[-1])
            for rows, picks, columns in _chunks(block_map, query.shape[-1], ctx.chunk_elements):
                keys, values, queries, grads = (
                    _pick(k_blocks, picks),
                    _pick(v_blocks, picks),
                    q_blocks[rows],
                    g_blocks[rows],
                )
                weights = _scores(queries, keys, columns, scale).sub_(lse[rows].unsqueeze(-1)).exp_()
                slope = _product(grads, values.transpose(1, 2)).sub_(delta[rows]).mul_(weights).mul_(scale)
                weights, slope = _like_operand(weights, values), _like_operand(slope, values)
                grad_q[rows] = _product(slope, keys).to(grad_q.dtype)
                _add(grad_k, picks, _product(slope.transpose(1, 2), queries))
                _add(grad_v, picks, _product(weights.transpose(1, 2), grads))
            return (
                _from_blocks(grad_q, query.shape),
                _from_blocks(grad_k, key.shape).to(key.dtype),
                _from_blocks(grad_v, value.shape).to(value.dtype),
                None,
                None,
            )


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _to_blocks(tokens: torch.Tensor, block_size: int) -> torch.Tensor:
    """[batch, length, heads, dim] to [batch * heads * blocks, block_size, dim]; the last block is filled up."""
    padded = F.pad(tokens.transpose(1, 2), (0, 0, 0, -tokens.shape[1] % block_size), value=PADDING_VALUE)
    return padded.reshape(-1, block_size, tokens.shape[-1])


def _from_blocks(blocks: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Undo `_to_blocks`, to tokens of `shape` [batch, length, heads, dim]."""
    batch, length, heads, dim = shape
    return blocks.reshape(batch, heads, -1, dim)[:, :, :length].transpose(1, 2)


def _chunks(
    block_map: BlockMap, head_dim: int, chunk_elements: int
) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor | None]]:
    """Walk the query blocks of all batches and heads.

    Yields:
        rows: query blocks of the chunk.
        picks: int64 [rows, kept], their key blocks, counted over all batches and heads.
        columns: bool [rows, kept * block_size_k], true at columns past the last key; None if there are none.
    """
    indices = block_map.indices
    sequences = indices.shape[0] * indices.shape[1]
    own = indices.reshape(-1, indices.shape[-1])
    first = (
        torch.arange(sequences, device=indices.device).repeat_interleave(indices.shape[2]) * block_map.num_key_blocks
    )
    columns_per_row = own.shape[1] * block_map.block_size_k
    # Gathered keys and values, and up to three tensors of the size of the scores.
    per_row = columns_per_row * (2 * head_dim + 3 * block_map.block_size_q)
    size = max(1, chunk_elements // per_row)
    ragged = block_map.key_length % block_map.block_size_k != 0
    places = torch.arange(block_map.block_size_k, device=indices.device)
    for start in range(0, own.shape[0], size):
        rows = slice(start, min(start + size, own.shape[0]))
        tokens = own[rows].unsqueeze(-1) * block_map.block_size_k + places
        past = (tokens >= block_map.key_length).flatten(1) if ragged else None
        yield rows, own[rows] + first[rows].unsqueeze(-1), past


def _pick(blocks: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
    """Blocks [n, block_size, dim] at picks [rows, kept], side by side: [rows, kept * block_size, dim]."""
    picked = blocks.index_select(0, picks.flatten())
    return picked.reshape(picks.shape[0], -1, blocks.shape[-1])


def _add(total: torch.Tensor, picks: torch.Tensor, part: torch.Tensor) -> None:
    """Add part [rows, kept * block_size, dim] to the blocks it was picked from."""
    total.index_add_(0, picks.flatten(), part.reshape(-1, *total.shape[1:]))


def _scores(queries: torch.Tensor, keys: torch.Tensor, past: torch.Tensor | None, scale: float) -> torch.Tensor:
    """Scaled scores [rows, block_size_q, kept * block_size_k] in float32 (or float64), -inf past the last key."""
    scores = _product(queries, keys.transpose(1, 2)).mul_(scale)
    return scores if past is None else scores.masked_fill_(past.unsqueeze(1), -math.inf)


def _like_operand(weights: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Weights in the dtype of `other` where half-precision products are the fast ones, that is, on CUDA."""
    return weights.to(other.dtype) if other.is_cuda else weights


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Batched matrix product that sums in, and returns, float32 (float64 stays)."""
    wide = _wide(left.dtype)
    if left.is_cuda and left.dtype != wide and left.dtype == right.dtype:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.to(wide), right.to(wide))
