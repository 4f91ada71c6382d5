"""Block-sparse attention by Triton kernels: the backends "triton" and "triton_int8", and the functions beneath them.

Triton is imported at the first call. With TRITON_INTERPRET=1 in the environment from the start of the process, the
kernels run on the CPU, slowly, for tests.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import os
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...core.config import require
from ..backends import BackendConstraints, register_backend
from ..config import AttentionConfig
from ..context import ForwardContext
from ..dense import DenseBackend
from ..routing import BlockMap
from .choice import choose_blocks
from .triton_tiles import SHARED_MEMORY_LIMITS, Kernel, Tiles, choose_tiles

HEAD_DIMS = (32, 64, 128, 256)
DTYPES = ("bfloat16", "float16", "float32")
LOG2_E = math.log2(math.e)


def triton_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_map: BlockMap
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over the pairs of `block_map`; differentiable once, through both results.

    Args:
        query: [batch, length_q, heads, head_dim], bfloat16, float16 or float32; head_dim one of `HEAD_DIMS`.
        key: [batch, length_k, heads, head_dim].
        value: [batch, length_k, heads, head_dim]; its dtype is the one computed in where they differ (autocast).
        block_map: kept blocks, of sizes that are multiples of 16.

    Returns:
        Output [batch, length_q, heads, head_dim] in the dtype of `value`, and the natural logarithm of the softmax's
        denominator, float32 [batch, heads, length_q]. Scores and sums are float32; float32 inputs are multiplied in
        full precision, without matrix units.

    Raises:
        ConfigError: a map of other tokens, or a head size or dtype that there is no kernel for.
    """
    _check(query, value, block_map)
    query, key = query.to(value.dtype), key.to(value.dtype)
    out, lse = _TritonAttention.apply(query, key, value, block_map)  # type: ignore[no-untyped-call]
    return out, lse


@torch.no_grad()
def triton_attention_int8(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_map: BlockMap
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `triton_attention`, with the scores from int8 queries and keys; no gradients.

    Each block has one scale, max|x| / 127. Keys are quantized without their mean over the sequence, which changes no
    weight of the softmax and shrinks their range (SageAttention, arXiv 2410.02367); the logarithm accounts for it.
    """
    _check(query, value, block_map)
    query, key = query.to(value.dtype), key.to(value.dtype)
    with torch.cuda.device_of(query):
        mean = key.mean(dim=1, dtype=torch.float32).contiguous()
        quantized = _quantize(query, mean, block_map.block_size_q, is_key=False)
        keys = _quantize(key, mean, block_map.block_size_k, is_key=True)
        out, lse = _forward(quantized.values, keys.values, value, block_map, quantized, keys)
    return out, lse / LOG2_E


@dataclass(frozen=True)
class QuantizedBlocks:
    """int8 values [batch, length, heads, head_dim] and float32 scales [batch, heads, blocks]; x = value * scale.

    `shift` is the part of the LSE (base 2, float32 [batch, heads, length]) that the mean of the keys makes up; of keys
    it is empty.
    """

    values: torch.Tensor
    scale: torch.Tensor
    shift: torch.Tensor


@dataclass(frozen=True)
class InvertedMap:
    """Which query blocks keep each key block.

    Attributes:
        queries: int32 [batch, heads, query_blocks * kept], query blocks ordered by the key block they keep, then by
            their own index; places that a ragged map leaves empty come last and are not reached.
        first: int32 [batch, heads, key_blocks + 1], where the list of each key block begins in `queries`.
    """

    queries: torch.Tensor
    first: torch.Tensor


def invert_map(block_map: BlockMap) -> InvertedMap:
    """The lists of query blocks per key block, made on the map's device without waiting for it."""
    kept = block_map.indices.shape[-1]
    keys, order = block_map.indices.flatten(2).to(torch.int32).sort(dim=-1, stable=True)
    bounds = torch.arange(block_map.num_key_blocks + 1, dtype=torch.int32, device=keys.device)
    bounds = bounds.expand(*keys.shape[:2], -1).contiguous()
    first = torch.searchsorted(keys, bounds, out_int32=True)
    return InvertedMap((order // kept).to(torch.int32), first)


class _TritonAttention(torch.autograd.Function):
    """The kernels' formulas are in `triton_kernels.py`."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_map: BlockMap
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = (_dense_channels(tensor) for tensor in (query, key, value))
        with torch.cuda.device_of(query):
            out, lse = _forward(query, key, value, block_map)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.block_map = block_map
        ctx.set_materialize_grads(False)
        return out, lse / LOG2_E

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_out: torch.Tensor | None, grad_lse: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, lse = ctx.saved_tensors
        grad_out = torch.zeros_like(out) if grad_out is None else grad_out.to(out.dtype).contiguous()
        grad_lse = None if grad_lse is None else grad_lse.to(torch.float32).contiguous()
        block_map: BlockMap = ctx.block_map
        with torch.cuda.device_of(query):
            grad_q, delta = _grad_query(query, key, value, out, lse, grad_out, grad_lse, block_map)
            if not any(ctx.needs_input_grad[1:3]):
                return grad_q, None, None, None
            grad_k, grad_v = _grad_key_value(query, key, value, lse, delta, grad_out, block_map)
        return grad_q, grad_k, grad_v, None


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    block_map: BlockMap,
    quantized: QuantizedBlocks | None = None,
    keys: QuantizedBlocks | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and base-2 LSE."""
    from .triton_kernels import forward_kernel

    value = _dense_channels(value)
    batch, length_q, heads, head_dim = query.shape
    out = torch.empty(batch, length_q, heads, head_dim, dtype=value.dtype, device=query.device)
    lse = torch.empty(batch, heads, length_q, dtype=torch.float32, device=query.device)
    indices = block_map.indices.to(torch.int32).contiguous()
    tiles = _tiles("forward", value, block_map)
    # Without quantization the last three are not read; lse stands in for them.
    scales = (lse, lse, lse) if quantized is None or keys is None else (quantized.scale, keys.scale, quantized.shift)
    forward_kernel[(-(-length_q // tiles.tile_q), batch * heads)](
        query, key, value, out, lse, indices, _counts(block_map), *scales,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
        heads, length_q, key.shape[1], indices.shape[2], block_map.num_key_blocks, indices.shape[3],
        LOG2_E / math.sqrt(head_dim),
        QUANTIZED=quantized is not None, **_constants(value, block_map, tiles),
    )  # fmt: skip
    return out, lse


def _grad_query(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    block_map: BlockMap,
) -> tuple[torch.Tensor, torch.Tensor]:
    """dQ and Delta."""
    from .triton_kernels import grad_query_kernel

    batch, length_q, heads, head_dim = query.shape
    grad_q, delta = torch.empty_like(out), torch.empty_like(lse)
    indices = block_map.indices.to(torch.int32).contiguous()
    tiles = _tiles("grad_query", value, block_map)
    grad_query_kernel[(-(-length_q // tiles.tile_q), batch * heads)](
        query, key, value, out, grad_out, lse, lse if grad_lse is None else grad_lse, delta, grad_q,
        indices, _counts(block_map),
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *out.stride()[:3],
        heads, length_q, key.shape[1], indices.shape[2], indices.shape[3], 1.0 / math.sqrt(head_dim),
        HAS_GRAD_LSE=grad_lse is not None, **_constants(value, block_map, tiles),
    )  # fmt: skip
    return grad_q, delta


def _grad_key_value(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lse: torch.Tensor,
    delta: torch.Tensor,
    grad_out: torch.Tensor,
    block_map: BlockMap,
) -> tuple[torch.Tensor, torch.Tensor]:
    from .triton_kernels import grad_key_value_kernel

    batch, length_k, heads, head_dim = key.shape
    grad_k, grad_v = (torch.empty_like(value, memory_format=torch.contiguous_format) for _ in range(2))
    inverted = invert_map(block_map)
    tiles = _tiles("grad_key_value", value, block_map)
    grad_key_value_kernel[(-(-length_k // tiles.tile_k), batch * heads)](
        query, key, value, grad_out, lse, delta, grad_k, grad_v, inverted.queries, inverted.first,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad_out.stride()[:3], *grad_k.stride()[:3],
        heads, query.shape[1], length_k, block_map.num_key_blocks, inverted.queries.shape[2], 1.0 / math.sqrt(head_dim),
        **_constants(value, block_map, tiles),
    )  # fmt: skip
    return grad_k, grad_v


def _quantize(tokens: torch.Tensor, mean: torch.Tensor, block_size: int, *, is_key: bool) -> QuantizedBlocks:
    """Quantize tokens [batch, length, heads, head_dim] by blocks; `mean` is that of the keys, float32."""
    from .triton_kernels import quantize_kernel

    tokens = _dense_channels(tokens)
    batch, length, heads, head_dim = tokens.shape
    blocks = -(-length // block_size)
    values = torch.empty(tokens.shape, dtype=torch.int8, device=tokens.device)
    scale = torch.empty(batch, heads, blocks, dtype=torch.float32, device=tokens.device)
    shift = torch.empty(batch, heads, 0 if is_key else length, dtype=torch.float32, device=tokens.device)
    rows = 1 << (block_size - 1).bit_length()
    quantize_kernel[(blocks, batch * heads)](
        tokens, mean, values, scale, scale if is_key else shift,
        *tokens.stride()[:3], *values.stride()[:3], heads, length, blocks, LOG2_E / math.sqrt(head_dim),
        DIM=head_dim, BLOCK=block_size, ROWS=rows, IS_KEY=is_key, num_warps=8 if rows * head_dim >= 8192 else 4,
    )  # fmt: skip
    return QuantizedBlocks(values, scale, shift)


def _check(query: torch.Tensor, value: torch.Tensor, block_map: BlockMap) -> None:
    """Refuse what the kernels would read past the end of memory for, or have no code for."""
    batch, length_q, heads, head_dim = query.shape
    wanted = (batch, heads, -(-length_q // block_map.block_size_q))
    fits = (block_map.query_length, block_map.key_length) == (length_q, value.shape[1])
    fits = fits and tuple(block_map.indices.shape[:3]) == wanted
    tokens = f"a map of [batch, heads, blocks] {list(wanted)} for {length_q} queries and {value.shape[1]} keys"
    require(fits, "block_map", list(block_map.indices.shape), tokens)
    require(head_dim in HEAD_DIMS, "head_dim", head_dim, f"one of {', '.join(map(str, HEAD_DIMS))}")
    dtype = str(value.dtype).removeprefix("torch.")
    require(dtype in DTYPES, "dtype", dtype, f"one of {', '.join(DTYPES)}")
    require(query.is_cuda or interpreted(), "device", str(query.device), "cuda, or cpu with TRITON_INTERPRET=1")


def _counts(block_map: BlockMap) -> torch.Tensor:
    """Key blocks of each row, int32 [batch, heads, query_blocks]."""
    return block_map.counts().to(torch.int32).contiguous()


def _constants(value: torch.Tensor, block_map: BlockMap, tiles: Tiles) -> dict[str, Any]:
    """Compile-time arguments and launch settings that the kernels share."""
    return {
        "DIM": value.shape[-1],
        "BLOCK_Q": block_map.block_size_q,
        "BLOCK_K": block_map.block_size_k,
        "TILE_Q": tiles.tile_q,
        "TILE_K": tiles.tile_k,
        "UPCAST": interpreted() and value.dtype == torch.bfloat16,
        "PRECISION": "ieee",
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }


def _tiles(kernel: Kernel, value: torch.Tensor, block_map: BlockMap) -> Tiles:
    return choose_tiles(
        kernel,
        block_size_q=block_map.block_size_q,
        block_size_k=block_map.block_size_k,
        head_dim=value.shape[-1],
        item_bytes=value.element_size(),
        shared_memory=_shared_memory(value.device),
    )


@functools.cache
def _shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program can have."""
    if device.type != "cuda":
        return SHARED_MEMORY_LIMITS["sm_90"]
    properties = torch.cuda.get_device_properties(device)
    limit = getattr(properties, "shared_memory_per_block_optin", None)
    return int(limit) if limit else min(SHARED_MEMORY_LIMITS.values())


def _dense_channels(tokens: torch.Tensor) -> torch.Tensor:
    """The kernels take any steps but those between channels."""
    return tokens if tokens.stride(-1) == 1 else tokens.contiguous()


def interpreted() -> bool:
    """Whether this process runs Triton kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _unavailable() -> tuple[str, ...]:
    """Why the kernels cannot run in this process, whatever the settings."""
    if importlib.util.find_spec("triton") is None:
        return ("the package triton is not installed",)
    if torch.version.cuda and torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0):
        return ("the GPU is older than compute capability 8.0",)
    return ()


def _constraints(gradient_devices: tuple[str, ...] | None) -> BackendConstraints:
    return BackendConstraints(
        devices=("cuda", "cpu") if interpreted() else ("cuda",),
        dtypes=DTYPES,
        head_dims=HEAD_DIMS,
        gradient_devices=gradient_devices,
        unavailable=_unavailable(),
    )


@register_backend("triton")
class TritonBackend:
    """Triton kernels, forward and backward, for NVIDIA GPUs from compute capability 8.0 and AMD's MI300."""

    def __init__(self) -> None:
        self.constraints = _constraints(gradient_devices=None)

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
        return triton_attention(query, key, value, chosen)[0]


@register_backend("triton_int8")
class TritonInt8Backend:
    """The forward kernel with int8 scores, for inference."""

    def __init__(self) -> None:
        self.constraints = _constraints(gradient_devices=())

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        context: ForwardContext,
        config: AttentionConfig,
    ) -> torch.Tensor:
        """Attend to the kept blocks; shapes [batch, tokens, heads, head_dim].

        Raises:
            NotImplementedError: a gradient is wanted.
        """
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value)):
            raise NotImplementedError("backend 'triton_int8' has no backward; train with 'triton' or 'gather'")
        chosen = choose_blocks(query, key, context, config)
        if chosen.is_full:
            return DenseBackend()(query, key, value, context=context, config=config)
        return triton_attention_int8(query, key, value, chosen)[0]
