"""RoLA by C++ kernels, for bfloat16 on CPUs with AVX-512 BF16; the formulas are in `native_kernels.cpp`.

Each token is projected, rotated and multiplied while it is in the cache; the sum over the keys is all that is kept.
They have no gradients: where they are wanted `fused.py` computes the branch.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch

from ...core.native import NativeBuildError, load
from ..block_sparse.native import unavailable as no_attention_kernel
from ..parallel import Ulysses
from .fused import LinearForm
from .reference import MATCH_EPS

SOURCE = Path(__file__).with_name("native_kernels.cpp")
FEATURES = {"silu": 0, "relu": 1, "identity": 2}
NORMALIZERS = ("rms", "mean")
STEP = 32
"""Rank and head size must be multiples of this."""


@functools.cache
def unavailable() -> str | None:
    """Why the kernel cannot run in this process; None if it can."""
    if not getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)():
        return "; ".join(no_attention_kernel())
    try:
        load(SOURCE)
    except NativeBuildError as error:
        return str(error)
    return None


def rola_native(
    form: LinearForm,
    sparse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    gate: torch.Tensor,
    map_q: torch.Tensor,
    map_k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    ranks: Ulysses | None = None,
    *,
    model_tables: tuple[torch.Tensor, torch.Tensor] | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """sparse + gate * size * N(O_l), without gradients.

    Args:
        form: features of `FEATURES`, normaliser of `NORMALIZERS`, and size.
        sparse: bfloat16 [batch, tokens, heads, head_dim], head_dim a multiple of `STEP`.
        query: like sparse.
        key: like sparse.
        value: like sparse.
        gate: [batch, tokens, heads].
        map_q: [rank, head_dim] or [heads, rank, head_dim], rank a multiple of `STEP`.
        map_k: likewise for the keys.
        cos: [tokens, rank / 2].
        sin: likewise.
        ranks: who holds the other tokens where these are a share of them.
        model_tables: cos and sin [tokens, head_dim / 2] that query and key were rotated with, so that they are turned
            back as they are read; None for those before the rotation.
        out: like sparse, and possibly sparse itself, for the result; None for a new one.

    Returns:
        bfloat16 [batch, tokens, heads, head_dim].

    Raises:
        NativeBuildError: there is no kernel here; see `unavailable`.
        MemoryError: it could not get its working memory.
    """
    sparse, query, key, value = (
        tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (sparse, query, key, value)
    )
    batch, length, heads, head_dim = query.shape
    rank = map_q.shape[-2]
    total = length * (1 if ranks is None else ranks.degree)
    # Even rows first: features are two halves, as `fused.py` has them.
    map_q, map_k = (
        torch.cat((each[..., 0::2, :], each[..., 1::2, :]), dim=-2).to(torch.bfloat16).contiguous()
        for each in (map_q, map_k)
    )
    cos, sin, gate = (tensor.float().contiguous() for tensor in (cos, sin, gate))
    angles: list[torch.Tensor | None] = [None, None]
    if model_tables is not None:
        angles = [table.float().contiguous() for table in model_tables]
    numbers = (ctypes.c_int64 * 7)(
        batch, heads, length, head_dim, rank, int(map_q.ndim == 3), FEATURES[form.feature_map]
    )
    summary = torch.empty(batch, heads, rank, head_dim)
    if out is None:
        out = torch.empty(query.shape, dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16 and out.stride(-1) == 1
    threads, library = ctypes.c_int(torch.get_num_threads()), load(SOURCE)
    failed = library.rola_sum(
        *_pointers(key, value), _strides(key, value),
        *_pointers(map_k, cos, sin, *angles, summary), numbers,
        ctypes.c_int64(total), threads,
    )  # fmt: skip
    if not failed:
        summary = summary if ranks is None else ranks.sum(summary)
        # The root mean square of the published form is taken before the division by the number of tokens.
        epsilon = torch.finfo(torch.bfloat16).eps / total**2
        failed = library.rola_merge(
            *_pointers(query, sparse, out), _strides(query, sparse, out),
            *_pointers(gate, map_q, cos, sin, *angles, summary), numbers,
            ctypes.c_int64(form.normalizer == "rms"), ctypes.c_float(epsilon),
            ctypes.c_int64(form.matched), ctypes.c_float(MATCH_EPS), threads,
        )  # fmt: skip
    if failed:
        raise MemoryError("the linear branch could not get its working memory")
    return out


def rola_gate(
    hidden_states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, size: torch.Tensor | None = None
) -> torch.Tensor:
    """sigmoid(w x_h + b), times `size`: float32 [batch, tokens, heads], without gradients.

    Args:
        hidden_states: bfloat16 [batch, tokens, heads x head_dim], head_dim a multiple of 16.
        weight: w [head_dim].
        bias: b [heads].
        size: [heads], or None for 1.

    Raises:
        NativeBuildError: there is no kernel here; see `unavailable`.
    """
    batch, tokens, width = hidden_states.shape
    hidden_states = hidden_states.contiguous()
    heads, dim = bias.numel(), weight.numel()
    assert width == heads * dim and dim % 16 == 0
    size = torch.ones(heads) if size is None else size
    weight, bias, size = (tensor.detach().float().flatten().contiguous() for tensor in (weight, bias, size))
    gate = torch.empty(batch, tokens, heads)
    load(SOURCE).rola_gate(
        *_pointers(hidden_states), *map(ctypes.c_int64, (width, batch * tokens, heads, dim)),
        *_pointers(weight, bias, size, gate), ctypes.c_int(torch.get_num_threads()),
    )  # fmt: skip
    return gate


def _pointers(*tensors: torch.Tensor | None) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(None if tensor is None else tensor.data_ptr()) for tensor in tensors]


def _strides(*tensors: torch.Tensor) -> ctypes.Array[ctypes.c_int64]:
    strides = [stride for tensor in tensors for stride in tensor.stride()[:3]]
    return (ctypes.c_int64 * len(strides))(*strides)
