"""RoLA by Triton kernels: launches, and the way back. The formulas are in `triton_kernels.py`.

Triton is imported at the first call. With TRITON_INTERPRET=1 in the environment from the start of the process, the
kernels run on the CPU, slowly, for tests.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from ...core.config import require
from ..block_sparse.triton_backend import DTYPES, _shared_memory, interpreted
from .fused import LinearForm
from .reference import MATCH_EPS
from .triton_tiles import RolaKernel, RolaTiles, choose_rola_tiles

PROGRAMS = 1024
"""Programs that a sum over tokens is dealt out to, all heads together: enough to fill large chips, few enough that
their partial sums (one rank x head_dim matrix each) stay small."""

RANKS = (32, 64, 128)
HEAD_DIMS = (32, 64, 128, 256)


def rola_triton(
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
) -> torch.Tensor:
    """sparse + gate * size * N(O_l); differentiable once.

    Args:
        form: features, normaliser ("rms" or "mean") and size.
        sparse: [batch, tokens, heads, head_dim], head_dim one of `HEAD_DIMS`.
        query: like sparse.
        key: like sparse.
        value: like sparse; bfloat16, float16 or float32, and the dtype of the products.
        gate: [batch, tokens, heads].
        map_q: [rank, head_dim] or [heads, rank, head_dim], rank one of `RANKS`.
        map_k: likewise for the keys.
        cos: [tokens, rank / 2].
        sin: likewise.

    Returns:
        [batch, tokens, heads, head_dim] in the dtype of `sparse`. Sums are float32.

    Raises:
        ConfigError: a normaliser, rank, head size, dtype or device that there is no kernel for.
    """
    _check(form, query, value, map_q)
    query, key = query.to(value.dtype), key.to(value.dtype)
    out: torch.Tensor = _RolaTriton.apply(form, query, key, value, sparse, gate, map_q, map_k, cos, sin)  # type: ignore[no-untyped-call]
    return out


def _check(form: LinearForm, query: torch.Tensor, value: torch.Tensor, map_q: torch.Tensor) -> None:
    require(form.normalizer in ("rms", "mean"), "normalizer", form.normalizer, "'rms' or 'mean' with Triton kernels")
    rank, head_dim = map_q.shape[-2:]
    require(rank in RANKS, "rank", rank, f"one of {', '.join(map(str, RANKS))} with Triton kernels")
    require(head_dim in HEAD_DIMS, "head_dim", head_dim, f"one of {', '.join(map(str, HEAD_DIMS))}")
    dtype = str(value.dtype).removeprefix("torch.")
    require(dtype in DTYPES, "dtype", dtype, f"one of {', '.join(DTYPES)}")
    require(query.is_cuda or interpreted(), "device", str(query.device), "cuda, or cpu with TRITON_INTERPRET=1")


@dataclass(frozen=True)
class _Inputs:
    """What the kernels read: channels side by side, maps in halves and in the dtype of the products."""

    form: LinearForm
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    sparse: torch.Tensor
    gate: torch.Tensor
    map_q: torch.Tensor
    map_k: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def length(self) -> int:
        return self.query.shape[1]

    @property
    def heads(self) -> int:
        return self.query.shape[2]

    @property
    def sequences(self) -> int:
        return self.query.shape[0] * self.query.shape[2]

    @property
    def rank(self) -> int:
        return self.map_q.shape[-2]

    @property
    def eps(self) -> tuple[float, float]:
        """Under the two roots; the first is that of the sum of the keys before its division by their number."""
        return torch.finfo(self.query.dtype).eps / self.length**2, MATCH_EPS

    def tiles(self, kernel: RolaKernel) -> RolaTiles:
        return choose_rola_tiles(
            kernel,
            rank=self.rank,
            head_dim=self.query.shape[3],
            item_bytes=self.value.element_size(),
            shared_memory=_shared_memory(self.query.device),
        )

    def constants(self, kernel: RolaKernel) -> dict[str, Any]:
        """Compile-time arguments and launch settings."""
        tiles = self.tiles(kernel)
        made: dict[str, Any] = {
            "DIM": self.query.shape[3],
            "HALF": self.rank // 2,
            "COLS": tiles.columns,
            "TILE": tiles.tokens,
            "UPCAST": interpreted() and self.value.dtype == torch.bfloat16,
            "PRECISION": "ieee",
            "num_warps": tiles.num_warps,
            "num_stages": tiles.num_stages,
        }
        if kernel != "outer":
            made["PHI"] = self.form.feature_map
        if kernel in ("merge", "grad_query"):
            made["RMS"], made["MATCHED"] = self.form.normalizer == "rms", self.form.matched
        return made

    def splits(self, kernel: RolaKernel) -> tuple[int, int]:
        """Runs that the tokens are cut into for a sum over them, and tiles of tokens in each."""
        tiles = -(-self.length // self.tiles(kernel).tokens)
        each = -(-tiles // max(1, min(tiles, PROGRAMS // self.sequences)))
        return -(-tiles // each), each


class _RolaTriton(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, form: LinearForm, *tensors: torch.Tensor) -> torch.Tensor:
        inputs = _prepared(form, *tensors)
        with torch.cuda.device_of(inputs.query):
            summary = _sum_over_tokens(inputs, inputs.key, inputs.value, inputs.map_k).to(inputs.value.dtype)
            out = _merge(inputs, summary)
        ctx.save_for_backward(summary, *tensors)
        ctx.form = form
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        summary, *tensors = ctx.saved_tensors
        inputs = _prepared(ctx.form, *tensors)
        needs = ctx.needs_input_grad[1:]
        with torch.cuda.device_of(inputs.query):
            grad_q, grad_sparse, grad_gate, grad_o, slope = _grad_query(inputs, summary, grad_out.contiguous())
            grad_map_q = _grad_map(inputs, slope, inputs.query, tensors[5]) if needs[5] else None
            grad_k = grad_v = grad_map_k = None
            if needs[1] or needs[2] or needs[6]:
                grad_summary = _sum_over_tokens(inputs, inputs.query, grad_o, inputs.map_q).to(inputs.value.dtype)
                grad_k, grad_v, slope = _grad_key_value(inputs, grad_summary)
                grad_map_k = _grad_map(inputs, slope, inputs.key, tensors[6]) if needs[6] else None
        return (None, grad_q, grad_k, grad_v, grad_sparse, grad_gate.to(tensors[4].dtype), grad_map_q, grad_map_k,
                None, None)  # fmt: skip


def _prepared(form: LinearForm, *tensors: torch.Tensor) -> _Inputs:
    query, key, value, sparse, gate, map_q, map_k, cos, sin = tensors
    query, key, value, sparse = (each if each.stride(-1) == 1 else each.contiguous() for each in tensors[:4])
    map_q, map_k = (
        torch.cat((each[..., 0::2, :], each[..., 1::2, :]), dim=-2).to(value.dtype).contiguous()
        for each in (map_q, map_k)
    )
    cos, sin = (table.float().contiguous() for table in (cos, sin))
    return _Inputs(form, query, key, value, sparse, gate.float().contiguous(), map_q, map_k, cos, sin)


def _map_step(weight: torch.Tensor) -> int:
    """Numbers from one head's map to the next; 0 where all share one."""
    return weight.stride(0) if weight.ndim == 3 else 0


def _sum_over_tokens(inputs: _Inputs, x: torch.Tensor, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """sum f(x)^T values / tokens: float32 [batch heads, rank, head_dim], in halves."""
    from .triton_kernels import summary_kernel

    splits, each = inputs.splits("summary")
    dim = x.shape[3]
    sums = torch.empty(splits, inputs.sequences, inputs.rank, dim, dtype=torch.float32, device=x.device)
    constants = inputs.constants("summary")
    summary_kernel[(splits, inputs.sequences, dim // constants["COLS"])](
        x, values, weight, inputs.cos, inputs.sin, sums, *x.stride()[:3], *values.stride()[:3], _map_step(weight),
        inputs.heads, inputs.length, each, **constants,
    )  # fmt: skip
    # The division keeps half precision in range, and cancels.
    return sums.sum(dim=0) / inputs.length


def _merge(inputs: _Inputs, summary: torch.Tensor) -> torch.Tensor:
    from .triton_kernels import merge_kernel

    out = torch.empty_like(inputs.sparse, memory_format=torch.contiguous_format)
    constants = inputs.constants("merge")
    merge_kernel[(-(-inputs.length // constants["TILE"]), inputs.sequences)](
        inputs.query, inputs.map_q, inputs.cos, inputs.sin, summary, inputs.sparse, inputs.gate, out,
        *inputs.query.stride()[:3], *inputs.sparse.stride()[:3], *out.stride()[:3], _map_step(inputs.map_q),
        inputs.heads, inputs.length, *inputs.eps, **constants,
    )  # fmt: skip
    return out


def _grad_query(inputs: _Inputs, summary: torch.Tensor, grad_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """dq, dO_s, dg, do and dz."""
    from .triton_kernels import grad_query_kernel

    grad_q, grad_o = (torch.empty(grad_out.shape, dtype=inputs.value.dtype, device=grad_out.device) for _ in range(2))
    grad_sparse = torch.empty_like(grad_out, dtype=inputs.sparse.dtype)
    grad_gate = torch.empty_like(inputs.gate)
    slope = _empty_slope(inputs)
    constants = inputs.constants("grad_query")
    grad_query_kernel[(-(-inputs.length // constants["TILE"]), inputs.sequences)](
        inputs.query, inputs.map_q, inputs.cos, inputs.sin, summary, inputs.sparse, inputs.gate, grad_out,
        grad_q, grad_sparse, grad_gate, grad_o, slope,
        *inputs.query.stride()[:3], *inputs.sparse.stride()[:3], *grad_out.stride()[:3], _map_step(inputs.map_q),
        inputs.heads, inputs.length, *inputs.eps, **constants,
    )  # fmt: skip
    return grad_q, grad_sparse, grad_gate, grad_o, slope


def _grad_key_value(inputs: _Inputs, grad_summary: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """dk, dv and dz."""
    from .triton_kernels import grad_key_value_kernel

    grad_k, grad_v = (torch.empty_like(inputs.value, memory_format=torch.contiguous_format) for _ in range(2))
    slope = _empty_slope(inputs)
    constants = inputs.constants("grad_key_value")
    grad_key_value_kernel[(-(-inputs.length // constants["TILE"]), inputs.sequences)](
        inputs.key, inputs.value, inputs.map_k, inputs.cos, inputs.sin, grad_summary, grad_k, grad_v, slope,
        *inputs.key.stride()[:3], *inputs.value.stride()[:3], *grad_k.stride()[:3], _map_step(inputs.map_k),
        inputs.heads, inputs.length, **constants,
    )  # fmt: skip
    return grad_k, grad_v, slope


def _empty_slope(inputs: _Inputs) -> torch.Tensor:
    shape = (inputs.sequences, inputs.length, inputs.rank)
    return torch.empty(shape, dtype=inputs.value.dtype, device=inputs.value.device)


def _grad_map(inputs: _Inputs, slope: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """sum dz^T x, like `weight`."""
    from .triton_kernels import outer_kernel

    splits, each = inputs.splits("outer")
    dim = x.shape[3]
    sums = torch.empty(splits, inputs.sequences, inputs.rank, dim, dtype=torch.float32, device=x.device)
    constants = inputs.constants("outer")
    outer_kernel[(splits, inputs.sequences, dim // constants["COLS"])](
        slope, x, sums, *x.stride()[:3], inputs.heads, inputs.length, each, **constants
    )
    by_head = sums.sum(dim=0).unflatten(0, (-1, inputs.heads)).sum(dim=0)
    total = by_head if weight.ndim == 3 else by_head.sum(dim=0)
    # Halves back to pairs.
    return torch.stack(total.chunk(2, dim=-2), dim=-2).flatten(-3, -2).to(weight.dtype)
