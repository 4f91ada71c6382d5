"""Block-sparse attention by torch's flex_attention, compiled: a peer to compare with, and a way without Triton kernels.

The kept blocks are handed over as they are, as a `BlockMask`. The first call of each kind of input compiles; a second
length compiles once more, for any length.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..backends import BackendConstraints, register_backend
from ..config import AttentionConfig
from ..context import ForwardContext
from ..dense import DenseBackend
from ..routing import BlockMap
from .choice import choose_blocks

HEAD_DIMS = (16, 32, 64, 128, 256)
BLOCK_SIZES = (16, 32, 64, 128)


def flex_block_mask(block_map: BlockMap, *, with_transpose: bool) -> BlockMask:
    """The mask of flex_attention that keeps exactly the blocks of `block_map`.

    Args:
        block_map: kept blocks.
        with_transpose: also list the query blocks of every key block, which the backward pass walks over.
    """
    indices = block_map.indices
    kept, key_blocks = indices.shape[-1], block_map.num_key_blocks
    counts = block_map.counts().to(torch.int32)
    # As wide as there are key blocks; what lies past the count is never read as a block.
    wide = torch.zeros((*indices.shape[:-1], key_blocks), dtype=torch.int32, device=indices.device)
    wide[..., :kept] = indices.clamp(max=key_blocks - 1)
    return BlockMask.from_kv_blocks(
        counts,
        wide,
        BLOCK_SIZE=(block_map.block_size_q, block_map.block_size_k),
        seq_lengths=(block_map.query_length, block_map.key_length),
        compute_q_blocks=with_transpose,
    )


def flex_block_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_map: BlockMap
) -> torch.Tensor:
    """Softmax attention over the pairs of `block_map`; differentiable on CUDA.

    Args:
        query: [batch, length_q, heads, head_dim].
        key: [batch, length_k, heads, head_dim].
        value: like key; its dtype is the one computed in where they differ (autocast).
        block_map: kept blocks.

    Returns:
        [batch, length_q, heads, head_dim] in the dtype of `value`.

    Raises:
        NotImplementedError: a gradient is wanted where flex_attention has none.
    """
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    if wanted:
        _refuse_gradients_without_kernel(value, block_map)
    mask = flex_block_mask(block_map, with_transpose=wanted)
    query, key, value = (tensor.to(value.dtype).transpose(1, 2) for tensor in (query, key, value))
    options = _kernel_options(block_map) if query.is_cuda else None
    out: torch.Tensor = _compiled()(query, key, value, block_mask=mask, kernel_options=options)
    if not query.is_cuda:
        # The CPU kernel takes a row whose scores are all NaN for one without keys, and gives zeros.
        broken = ~torch.isfinite(query).all(dim=-1) | ~torch.isfinite(key).all(dim=-1).all(dim=-1, keepdim=True)
        out = out.masked_fill(broken.unsqueeze(-1), math.nan)
    return out.transpose(1, 2)


def _refuse_gradients_without_kernel(value: torch.Tensor, block_map: BlockMap) -> None:
    if value.device.type != "cuda":
        raise NotImplementedError(
            f"flex_attention has no backward on {value.device.type}; train with backend 'gather' there"
        )
    sizes = (block_map.block_size_q, block_map.block_size_k)
    # Its half-precision backward is tiled by up to 128, by GPU, and passes over tiles that do not divide the blocks.
    if value.dtype != torch.float32 and sizes != (128, 128):
        raise NotImplementedError(
            f"flex_attention's backward needs block_size_q and block_size_k of 128, got {sizes}; "
            "train with backend 'triton' or 'gather'"
        )


@functools.cache
def _compiled() -> Callable[..., Any]:
    # One whole graph, so that a fall back to the unfused form, which holds all scores, is an error and not just slow.
    return torch.compile(flex_attention, fullgraph=True)


def _kernel_options(block_map: BlockMap) -> dict[str, Any]:
    """Tiles of the forward that divide the blocks; those that torch would choose need larger blocks on several GPUs."""
    return {
        "fwd_BLOCK_M": min(128, block_map.block_size_q),
        "fwd_BLOCK_N": min(64, block_map.block_size_k),
        # Short sequences would go to a kernel for decoding, which asks for other blocks.
        "FORCE_USE_FLEX_ATTENTION": True,
    }


@register_backend("flex")
class FlexBackend:
    """Compiled flex_attention on CUDA and on CPUs (forward alone); block sizes that are powers of two."""

    constraints = BackendConstraints(
        devices=("cuda", "cpu"),
        dtypes=("bfloat16", "float16", "float32"),
        head_dims=HEAD_DIMS,
        block_sizes_q=BLOCK_SIZES,
        block_sizes_k=BLOCK_SIZES,
        gradient_devices=("cuda",),
    )

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
        return flex_block_attention(query, key, value, chosen)
