"""Block-sparse attention by a C++ kernel, for CPUs that multiply bfloat16 with AVX-512.

Kept blocks are read where they lie instead of being gathered, and scores never leave the cache of a core; see
`native_kernels.cpp`, and `native_backward.cpp` for the gradients. The kernels are compiled on the first use, in
seconds, and kept; where that cannot be done, or the processor lacks the instructions, the backend says so and `gather`
stands in.
"""

from __future__ import annotations

import ctypes
import functools
import math
from pathlib import Path
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...core.native import NativeBuildError, load
from ..backends import BackendConstraints, register_backend
from ..config import AttentionConfig
from ..context import ForwardContext
from ..routing import BlockMap
from .choice import choose_blocks

SOURCE = Path(__file__).with_name("native_kernels.cpp")
BACKWARD_SOURCE = Path(__file__).with_name("native_backward.cpp")
HEAD_DIMS = tuple(range(16, 257, 16))


@functools.cache
def unavailable() -> tuple[str, ...]:
    """Why the kernel cannot run in this process; empty if it can."""
    if not getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)():
        return ("this processor has no AVX-512 BF16",)
    try:
        load(SOURCE)
    except NativeBuildError as error:
        return (str(error),)
    return ()


def native_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_map: BlockMap) -> torch.Tensor:
    """Softmax attention over the pairs of `block_map`; differentiable once.

    Args:
        query: bfloat16 [batch, length_q, heads, head_dim] on the CPU, head_dim one of `HEAD_DIMS`.
        key: [batch, length_k, heads, head_dim]; other dtypes are cast to that of `value`.
        value: likewise.
        block_map: kept blocks, in sizes that are multiples of 16.

    Returns:
        bfloat16 [batch, length_q, heads, head_dim]. Sums are float32, weights and their slopes bfloat16.

    Raises:
        TypeError: another dtype of the values; the kernel would read their bits as bfloat16.
        NativeBuildError: there is no kernel here; see `unavailable`.
        MemoryError: it could not get its working memory, that of two heads' keys (backward: four) and a few hundred KiB
            per thread.
    """
    if value.dtype != torch.bfloat16:
        raise TypeError(f"value: got {value.dtype}; must be torch.bfloat16, all that the native kernel computes in")
    query, key = query.to(value.dtype), key.to(value.dtype)
    out: torch.Tensor = _NativeAttention.apply(query, key, value, block_map)  # type: ignore[no-untyped-call]
    return out


class _Constraints(BackendConstraints):
    def problems(self, config: AttentionConfig, device: str, dtype: str, head_dim: int) -> list[str]:
        # Asked last, as it may compile.
        return super().problems(config, device, dtype, head_dim) or list(unavailable())


@register_backend("native")
class NativeBackend:
    """The C++ kernel; bfloat16 on CPUs."""

    constraints = _Constraints(devices=("cpu",), dtypes=("bfloat16",), head_dims=HEAD_DIMS)

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
        return native_attention(query, key, value, choose_blocks(query, key, context, config))


class _NativeAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_map: BlockMap
    ) -> torch.Tensor:
        query, key, value = (_side_by_side(tensor.detach()) for tensor in (query, key, value))
        logs = None
        if any(ctx.needs_input_grad):
            logs = torch.empty(query.shape[0], query.shape[2], query.shape[1])
        out = torch.empty(query.shape, dtype=query.dtype)
        _call(SOURCE, "block_sparse_attention", (query, key, value, out), logs, block_map)
        ctx.save_for_backward(query, key, value, out, logs)
        ctx.block_map = block_map
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, logs = ctx.saved_tensors
        grad_out = _side_by_side(grad_out.to(query.dtype))
        grads = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in (query, key, value)]
        tensors = (query, key, value, out, grad_out, *grads)
        _call(BACKWARD_SOURCE, "block_sparse_backward", tensors, logs, ctx.block_map)
        return (*grads, None)


def _side_by_side(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with the channels of a token next to each other."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _call(
    source: Path, name: str, tensors: tuple[torch.Tensor, ...], logs: torch.Tensor | None, block_map: BlockMap
) -> None:
    """Run one of the kernels on query, key and further tensors [batch, tokens, heads, head_dim]."""
    batch, length_q, heads, head_dim = tensors[0].shape
    length_k = tensors[1].shape[1]
    if tensors[0].numel() == 0:
        return
    indices = block_map.indices.contiguous()
    sizes = (batch, heads, length_q, length_k, head_dim, block_map.block_size_q, block_map.block_size_k)
    strides = [stride for tensor in tensors for stride in tensor.stride()[:3]]
    failed = getattr(load(source), name)(
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors),
        (ctypes.c_int64 * len(strides))(*strides),
        ctypes.c_void_p(indices.data_ptr()),
        ctypes.c_void_p(None if logs is None else logs.data_ptr()),
        (ctypes.c_int64 * 8)(*sizes, indices.shape[-1]),
        ctypes.c_float(1.0 / math.sqrt(head_dim)),
        ctypes.c_int(torch.get_num_threads()),
    )
    if failed:
        raise MemoryError("block-sparse attention could not get its working memory")
