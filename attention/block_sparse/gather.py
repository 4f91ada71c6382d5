"""Block-sparse attention on any device: gather the kept key and value blocks, then multiply them in batches.

The work goes through query blocks in chunks, so that the gathered blocks and their scores stay within a fixed amount of
memory. The backward pass gathers again instead of keeping what the forward pass gathered.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
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
        [batch, length_q, heads, head_dim] in the dtype of `value`. Sums are float32 (or float64); scores and weights
        too, but for bfloat16 on a CPU that multiplies it natively, which rounds them as plain PyTorch does.
    """
    if chunk_elements is None:
        chunk_elements = CPU_CHUNK_ELEMENTS if query.device.type == "cpu" else ACCELERATOR_CHUNK_ELEMENTS
    query, key = query.to(value.dtype), key.to(value.dtype)
    out: torch.Tensor = GatherAttention.apply(query, key, value, block_map, chunk_elements)  # type: ignore[no-untyped-call]
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


class GatherAttention(torch.autograd.Function):
    """Forward: P = softmax(scale Q K^T) over the kept keys, O = P V. Backward: dS = P o (dP - rowsum(P o dP))."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_map: BlockMap, chunk_elements: int
    ) -> torch.Tensor:
        with torch.autocast(query.device.type, enabled=False):
            q_blocks = _to_blocks(query, block_map.block_size_q)
            k_blocks, v_blocks = (_to_blocks(tensor, block_map.block_size_k) for tensor in (key, value))
            out_blocks = torch.empty_like(q_blocks)
            scale = 1.0 / math.sqrt(query.shape[-1])
            workspace = _Workspace()
            for chunk in _chunks(block_map, query.shape[-1], chunk_elements):
                keys = workspace.pick("keys", k_blocks, chunk.picks)
                values = workspace.pick("values", v_blocks, chunk.picks)
                weights = _weights(q_blocks[chunk.rows], keys, chunk, scale, workspace)
                _product(_like_operand(weights, values), values, into=out_blocks[chunk.rows])
            out = _from_blocks(out_blocks, query.shape)
        ctx.save_for_backward(query, key, value)
        ctx.block_map, ctx.chunk_elements = block_map, chunk_elements
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        block_map: BlockMap = ctx.block_map
        wide = _wide(query.dtype)
        with torch.autocast(query.device.type, enabled=False):
            q_blocks, g_blocks = (
                _to_blocks(tensor, block_map.block_size_q) for tensor in (query, grad_out.to(query.dtype))
            )
            k_blocks, v_blocks = (_to_blocks(tensor, block_map.block_size_k) for tensor in (key, value))
            if (ragged := query.shape[1] % block_map.block_size_q) != 0:
                # Rows past the last token are no part of the result: nothing may flow back from them.
                g_blocks.unflatten(0, (query.shape[0] * query.shape[2], -1))[:, -1, ragged:] = 0
            grad_q = torch.empty_like(q_blocks)
            grad_k, grad_v = (torch.zeros(k_blocks.shape, dtype=wide, device=key.device) for _ in range(2))
            scale = 1.0 / math.sqrt(query.shape[-1])
            workspace = _Workspace()
            for chunk in _chunks(block_map, query.shape[-1], ctx.chunk_elements):
                rows, picks = chunk.rows, chunk.picks
                keys, values = workspace.pick("keys", k_blocks, picks), workspace.pick("values", v_blocks, picks)
                queries, grads = q_blocks[rows], g_blocks[rows]
                weights = _weights(queries, keys, chunk, scale, workspace)
                slope = _product(grads, values.transpose(1, 2), workspace=workspace, name="slope")
                slope = torch.ops.aten._softmax_backward_data(slope, weights, -1, weights.dtype)
                weights, slope = _like_operand(weights, values), _like_operand(slope, values)
                _product(slope, keys, scale, into=grad_q[rows])
                _add(grad_k, picks, _product(slope.transpose(1, 2), queries, scale))
                _add(grad_v, picks, _product(weights.transpose(1, 2), grads))
            return (
                _from_blocks(grad_q, query.shape),
                _from_blocks(grad_k, key.shape).to(key.dtype),
                _from_blocks(grad_v, value.shape).to(value.dtype),
                None,
                None,
            )


class _Workspace:
    """Temporaries that every chunk of one call uses again; a fresh one each time costs more than what it holds."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def get(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """A tensor of `shape` with unspecified contents, good until the next call with this name."""
        size = math.prod(shape)
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=like.dtype, device=like.device)
        return self._buffers[name][:size].view(shape)

    def pick(self, name: str, blocks: torch.Tensor, picks: torch.Tensor) -> torch.Tensor:
        """Blocks [n, block_size, dim] at picks [rows, kept], side by side: [rows, kept * block_size, dim]."""
        flat = blocks.flatten(1)
        picked = self.get(name, (picks.numel(), flat.shape[1]), blocks)
        torch.index_select(flat, 0, picks.flatten(), out=picked)
        return picked.view(picks.shape[0], -1, blocks.shape[-1])


def _native_half(tensor: torch.Tensor) -> bool:
    """Whether products of this dtype run on the matrix units as they are, sums in float32 included."""
    if tensor.device.type != "cpu":
        return tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor.dtype == torch.bfloat16 and _cpu_has_bfloat16()


@functools.cache
def _cpu_has_bfloat16() -> bool:
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _weights(
    queries: torch.Tensor, keys: torch.Tensor, chunk: _Chunk, scale: float, workspace: _Workspace
) -> torch.Tensor:
    """Softmax [rows, block_size_q, kept * block_size_k] of the scaled scores, zero past the last key.

    On CUDA and wherever half precision is not native the result is float32 (or float64). A CPU that multiplies bfloat16
    natively keeps scores and weights in it, as plain PyTorch does; the softmax itself is float32 inside.
    """
    scores = _product(queries, keys.transpose(1, 2), scale, workspace=workspace, name="scores")
    if chunk.unused is not None:
        scores.masked_fill_(chunk.unused.unsqueeze(1), -math.inf)
    elif chunk.short is not None:
        scores[..., -chunk.padding :].index_fill_(0, chunk.short, -math.inf)
    return torch.softmax(scores, -1, out=workspace.get("weights", tuple(scores.shape), scores))


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


@dataclass(frozen=True)
class _Chunk:
    """Query blocks that are worked on together.

    Attributes:
        rows: their places among the query blocks of all batches and heads.
        picks: int64 [rows, kept], their key blocks, counted over all batches and heads.
        short: int64, which of the rows hold the short last key block; it is always the last one they pick.
        padding: columns of that block that are past the last key.
        unused: bool [rows, kept * block_size_k], columns that are no key of that row; of a ragged map alone, where
            `short` is not used.
    """

    rows: slice
    picks: torch.Tensor
    short: torch.Tensor | None
    padding: int
    unused: torch.Tensor | None = None


def _chunks(block_map: BlockMap, head_dim: int, chunk_elements: int) -> Iterator[_Chunk]:
    """Walk the query blocks of all batches and heads."""
    indices = block_map.indices
    sequences = indices.shape[0] * indices.shape[1]
    own = indices.reshape(-1, indices.shape[-1])
    first = (
        torch.arange(sequences, device=indices.device).repeat_interleave(indices.shape[2]) * block_map.num_key_blocks
    )
    picks = own + first.unsqueeze(-1)
    columns_per_row = own.shape[1] * block_map.block_size_k
    # Gathered keys and values, and up to three tensors of the size of the scores.
    per_row = columns_per_row * (2 * head_dim + 3 * block_map.block_size_q)
    size = max(1, chunk_elements // per_row)
    padding = -block_map.key_length % block_map.block_size_k
    if block_map.ragged:
        yield from _ragged_chunks(block_map, own, first, size)
        return
    holds_last = own[:, -1] == block_map.num_key_blocks - 1
    for start in range(0, own.shape[0], size):
        rows = slice(start, min(start + size, own.shape[0]))
        short = torch.nonzero(holds_last[rows]).flatten() if padding else None
        yield _Chunk(rows, picks[rows], short, padding)


def _ragged_chunks(block_map: BlockMap, own: torch.Tensor, first: torch.Tensor, size: int) -> Iterator[_Chunk]:
    """Chunks of `size` query blocks, each as wide as its fullest row; waits for the device once."""
    counts = block_map.counts().flatten()
    widths = [int(width) for width in torch.stack([part.max() for part in counts.split(size)]).tolist()]
    places = torch.arange(block_map.block_size_k, device=own.device)
    for start, width in zip(range(0, own.shape[0], size), widths, strict=True):
        rows = slice(start, min(start + size, own.shape[0]))
        chosen = own[rows, :width]
        # What is left over in a row reads a block that the row attends to anyway, with a weight of zero, so that
        # nothing can come in that the row does not see.
        absent = chosen == block_map.num_key_blocks
        past = (chosen * block_map.block_size_k).unsqueeze(-1) + places >= block_map.key_length
        picks = torch.where(absent, chosen[:, :1], chosen) + first[rows].unsqueeze(-1)
        yield _Chunk(rows, picks, None, 0, past.flatten(1))


def _add(total: torch.Tensor, picks: torch.Tensor, part: torch.Tensor) -> None:
    """Add part [rows, kept * block_size, dim] to the blocks it was picked from."""
    total.index_add_(0, picks.flatten(), part.reshape(-1, *total.shape[1:]).to(total.dtype))


def _like_operand(weights: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Weights in the dtype of `other` where half-precision products are the fast ones."""
    return weights.to(other.dtype) if _native_half(other) else weights


def _product(
    left: torch.Tensor,
    right: torch.Tensor,
    scale: float = 1.0,
    *,
    into: torch.Tensor | None = None,
    workspace: _Workspace | None = None,
    name: str = "",
) -> torch.Tensor:
    """Batched matrix product times `scale`, summed in float32 (float64 stays).

    The result is written `into` a given tensor, in its dtype; else it is float32 (float64 stays), or bfloat16 on a CPU
    that multiplies it natively, in a buffer of `workspace` where one is given.
    """
    if _native_half(left) and left.is_cuda and left.dtype == right.dtype:
        product = torch.bmm(left, right, out_dtype=torch.float32)
        product = product if scale == 1.0 else product.mul_(scale)
        return product if into is None else into.copy_(product)
    if not (_native_half(left) and left.dtype == right.dtype):
        wide = _wide(left.dtype)
        left, right = left.to(wide), right.to(wide)
    shape = (left.shape[0], left.shape[1], right.shape[2])
    if into is not None and into.dtype == left.dtype:
        return torch.baddbmm(into, left, right, beta=0, alpha=scale, out=into)
    buffer = left.new_empty(shape) if workspace is None else workspace.get(name, shape, left)
    product = torch.baddbmm(buffer, left, right, beta=0, alpha=scale, out=buffer)
    return product if into is None else into.copy_(product)
