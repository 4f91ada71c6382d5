"""RoLA by a C++ kernel, for bfloat16 on CPUs with AVX-512 BF16; the formulas are in `native_kernels.cpp`.

Each token is projected, rotated and multiplied while it is in the cache; the sum over the keys is all that is kept. It
has no gradients: where they are wanted `fused.py` computes the branch.
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
    numbers = (ctypes.c_int64 * 7)(
        batch, heads, length, head_dim, rank, int(map_q.ndim == 3), FEATURES[form.feature_map]
    )
    summary = torch.empty(batch, heads, rank, head_dim)
    out = torch.empty(query.shape, dtype=torch.bfloat16)
    threads, library = ctypes.c_int(torch.get_num_threads()), load(SOURCE)
    failed = library.rola_sum(
        *_pointers(key, value), _strides(key, value), *_pointers(map_k, cos, sin, summary), numbers,
        ctypes.c_int64(total), threads,
    )  # fmt: skip
    if not failed:
        summary = summary if ranks is None else ranks.sum(summary)
        # The root mean square of the published form is taken before the division by the number of tokens.
        epsilon = torch.finfo(torch.bfloat16).eps / total**2
        failed = library.rola_merge(
            *_pointers(query, sparse, out), _strides(query, sparse, out),
            *_pointers(gate, map_q, cos, sin, summary), numbers,
            ctypes.c_int64(form.normalizer == "rms"), ctypes.c_float(epsilon),
            ctypes.c_int64(form.matched), ctypes.c_float(MATCH_EPS), threads,
        )  # fmt: skip
    if failed:
        raise MemoryError("the linear branch could not get its working memory")
    return out


def _pointers(*tensors: torch.Tensor) -> list[ctypes.c_void_p]:
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


def _strides(*tensors: torch.Tensor) -> ctypes.Array[ctypes.c_int64]:
    strides = [stride for tensor in tensors for stride in tensor.stride()[:3]]
    return (ctypes.c_int64 * len(strides))(*strides)
