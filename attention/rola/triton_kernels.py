"""Triton kernels of rotary low-rank attention, forward and backward; the formulas are those of `reference.py`.

With z = W x, f = R phi(z), C = (1/L) sum_j f(k_j) v_j^T, o = f(q) C, r = 1 / sqrt(mean o^2 + eps / L^2) or 1, n = r o,
a = sqrt(mean O_s^2 + 1e-5) or 1: O = O_s + g a n. Backward, with G the slope of O:

    dg = a sum(G n)             dO_s = G + g sum(G n) O_s / (d a)
    do = r g a (G - n sum(G n) / d)
    dC = sum_i f(q_i)^T do_i    df(q) = do C^T     df(k) = v dC^T / L     dv = f(k) dC / L
    dz = phi'(z) R^T df         dx = dz W          dW = sum dz^T x

Nothing of the forward pass but C is kept. Features are two halves, the even and the odd channels: their order does not
matter to a sum over them, and halves are turned without picking every second number. Sums over tokens are made by
several programs per head and added up in a fixed order, so results repeat. Sums are float32.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ...core.compile_case import CompileCase
from ..block_sparse.triton_kernels import _narrow, _operand
from ..block_sparse.triton_tiles import SHARED_MEMORY_LIMITS
from .triton_tiles import RolaKernel, RolaTiles, choose_rola_tiles


@triton.jit
def _load_rows(base_ptr, start, length, step, first, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Rows start .. start + ROWS, columns first .. first + COLS; zero past `length`."""
    rows, columns = tl.arange(0, ROWS), first + tl.arange(0, COLS)
    at = base_ptr + start.to(tl.int64) * step + rows[:, None] * step + columns[None, :]
    return tl.load(at, mask=(start + rows < length)[:, None], other=0.0)


@triton.jit
def _store_rows(
    base_ptr, tile, start, length, step, first, ROWS: tl.constexpr, COLS: tl.constexpr, UPCAST: tl.constexpr
):
    rows, columns = tl.arange(0, ROWS), first + tl.arange(0, COLS)
    at = base_ptr + start.to(tl.int64) * step + rows[:, None] * step + columns[None, :]
    tl.store(at, _narrow(tile, base_ptr.dtype.element_ty, UPCAST), mask=(start + rows < length)[:, None])


@triton.jit
def _half(base_ptr, half, first, HALF: tl.constexpr, DIM: tl.constexpr, COLS: tl.constexpr, UPCAST: tl.constexpr):
    """Half of the rows of a map or summary [2 HALF, DIM], columns first .. first + COLS."""
    rows, columns = half * HALF + tl.arange(0, HALF), first + tl.arange(0, COLS)
    return _operand(tl.load(base_ptr + rows[:, None] * DIM + columns[None, :]), UPCAST)


@triton.jit
def _project(
    x_ptr, map_ptr, start, length, x_token, TILE: tl.constexpr, HALF: tl.constexpr, DIM: tl.constexpr,
    COLS: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """z of a tile of tokens, even and odd channels, float32 [TILE, HALF] each."""
    even = tl.zeros([TILE, HALF], tl.float32)
    odd = tl.zeros([TILE, HALF], tl.float32)
    for part in tl.static_range(DIM // COLS):
        x = _operand(_load_rows(x_ptr, start, length, x_token, part * COLS, TILE, COLS), UPCAST)
        upper = _half(map_ptr, 0, part * COLS, HALF, DIM, COLS, UPCAST)
        lower = _half(map_ptr, 1, part * COLS, HALF, DIM, COLS, UPCAST)
        even = tl.dot(x, tl.trans(upper), even, input_precision=PRECISION)
        odd = tl.dot(x, tl.trans(lower), odd, input_precision=PRECISION)
    return even, odd


@triton.jit
def _phi(even, odd, PHI: tl.constexpr):
    if PHI == "silu":
        return even * tl.sigmoid(even), odd * tl.sigmoid(odd)
    elif PHI == "relu":
        return tl.where(even < 0, 0.0, even), tl.where(odd < 0, 0.0, odd)
    elif PHI == "elu":
        # The exponential is taken of negative numbers alone, so that the other branch cannot overflow.
        low_even, low_odd = tl.where(even < 0, even, 0.0), tl.where(odd < 0, odd, 0.0)
        return tl.where(even < 0, tl.exp(low_even), even + 1.0), tl.where(odd < 0, tl.exp(low_odd), odd + 1.0)
    elif PHI == "softmax":
        highest = tl.maximum(tl.max(even, 1), tl.max(odd, 1))[:, None]
        even, odd = tl.exp(even - highest), tl.exp(odd - highest)
        total = (tl.sum(even, 1) + tl.sum(odd, 1))[:, None]
        return even / total, odd / total
    else:
        return even, odd


@triton.jit
def _phi_slope(even, odd, phi_even, phi_odd, grad_even, grad_odd, PHI: tl.constexpr):
    """dz from z, phi(z) and the slope of phi(z)."""
    if PHI == "silu":
        s_even, s_odd = tl.sigmoid(even), tl.sigmoid(odd)
        grad_even *= s_even * (1.0 + even * (1.0 - s_even))
        grad_odd *= s_odd * (1.0 + odd * (1.0 - s_odd))
    elif PHI == "relu":
        grad_even, grad_odd = tl.where(even > 0, grad_even, 0.0), tl.where(odd > 0, grad_odd, 0.0)
    elif PHI == "elu":
        grad_even *= tl.where(even < 0, phi_even, 1.0)
        grad_odd *= tl.where(odd < 0, phi_odd, 1.0)
    elif PHI == "softmax":
        mean = (tl.sum(grad_even * phi_even, 1) + tl.sum(grad_odd * phi_odd, 1))[:, None]
        grad_even, grad_odd = phi_even * (grad_even - mean), phi_odd * (grad_odd - mean)
    return grad_even, grad_odd


@triton.jit
def _angles(cos_ptr, sin_ptr, start, length, TILE: tl.constexpr, HALF: tl.constexpr):
    cos = _load_rows(cos_ptr, start, length, HALF, 0, TILE, HALF).to(tl.float32)
    return cos, _load_rows(sin_ptr, start, length, HALF, 0, TILE, HALF).to(tl.float32)


@triton.jit
def summary_kernel(
    x_ptr, value_ptr, map_ptr, cos_ptr, sin_ptr, sums_ptr,
    x_batch, x_token, x_head, value_batch, value_token, value_head, map_head,
    heads, length, tiles_each,
    DIM: tl.constexpr, HALF: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr, PHI: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sum f(x)^T value over a run of tokens: float32 [splits, batch heads, 2 HALF, DIM].

    Grid: (splits, batch heads, DIM / COLS). With keys and values this is C, with queries and do it is dC.
    """
    sequence = tl.program_id(1).to(tl.int64)
    batch, head = sequence // heads, sequence % heads
    first = tl.program_id(2) * COLS
    x_ptr += batch * x_batch + head * x_head
    value_ptr += batch * value_batch + head * value_head
    map_ptr += head * map_head
    upper = tl.zeros([HALF, COLS], tl.float32)
    lower = tl.zeros([HALF, COLS], tl.float32)
    begin = tl.program_id(0) * tiles_each
    for tile in range(begin, tl.minimum(begin + tiles_each, tl.cdiv(length, TILE))):
        start = tile * TILE
        even, odd = _project(x_ptr, map_ptr, start, length, x_token, TILE, HALF, DIM, COLS, UPCAST, PRECISION)
        even, odd = _phi(even, odd, PHI)
        cos, sin = _angles(cos_ptr, sin_ptr, start, length, TILE, HALF)
        # Values past the last token are zero, so what stands in for their features does not matter.
        values = _load_rows(value_ptr, start, length, value_token, first, TILE, COLS)
        turned_even = _operand(_narrow(even * cos - odd * sin, values.dtype, UPCAST), UPCAST)
        turned_odd = _operand(_narrow(even * sin + odd * cos, values.dtype, UPCAST), UPCAST)
        values = _operand(values, UPCAST)
        upper = tl.dot(tl.trans(turned_even), values, upper, input_precision=PRECISION)
        lower = tl.dot(tl.trans(turned_odd), values, lower, input_precision=PRECISION)
    sums_ptr += (tl.program_id(0) * tl.num_programs(1) + sequence) * (2 * HALF * DIM)
    rows, columns = tl.arange(0, HALF), first + tl.arange(0, COLS)
    at = sums_ptr + rows[:, None] * DIM + columns[None, :]
    tl.store(at, upper)
    tl.store(at + HALF * DIM, lower)


@triton.jit
def outer_kernel(
    slope_ptr, x_ptr, sums_ptr, x_batch, x_token, x_head, heads, length, tiles_each,
    DIM: tl.constexpr, HALF: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sum dz^T x over a run of tokens: float32 [splits, batch heads, 2 HALF, DIM]; dz is [batch heads, L, 2 HALF]."""
    sequence = tl.program_id(1).to(tl.int64)
    first = tl.program_id(2) * COLS
    x_ptr += sequence // heads * x_batch + sequence % heads * x_head
    slope_ptr += sequence * length * (2 * HALF)
    total = tl.zeros([2 * HALF, COLS], tl.float32)
    begin = tl.program_id(0) * tiles_each
    for tile in range(begin, tl.minimum(begin + tiles_each, tl.cdiv(length, TILE))):
        start = tile * TILE
        slope = _operand(_load_rows(slope_ptr, start, length, 2 * HALF, 0, TILE, 2 * HALF), UPCAST)
        x = _operand(_load_rows(x_ptr, start, length, x_token, first, TILE, COLS), UPCAST)
        total = tl.dot(tl.trans(slope), x, total, input_precision=PRECISION)
    sums_ptr += (tl.program_id(0) * tl.num_programs(1) + sequence) * (2 * HALF * DIM)
    rows, columns = tl.arange(0, 2 * HALF), first + tl.arange(0, COLS)
    tl.store(sums_ptr + rows[:, None] * DIM + columns[None, :], total)


@triton.jit
def _linear(
    even, odd, summary_ptr, first, HALF: tl.constexpr, DIM: tl.constexpr, COLS: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Columns first .. first + COLS of f(q) C, from turned features that are operands already."""
    out = tl.dot(even, _half(summary_ptr, 0, first, HALF, DIM, COLS, UPCAST), input_precision=PRECISION)
    return tl.dot(odd, _half(summary_ptr, 1, first, HALF, DIM, COLS, UPCAST), out, input_precision=PRECISION)


@triton.jit
def merge_kernel(
    q_ptr, map_ptr, cos_ptr, sin_ptr, summary_ptr, sparse_ptr, gate_ptr, out_ptr,
    q_batch, q_token, q_head, sparse_batch, sparse_token, sparse_head, out_batch, out_token, out_head, map_head,
    heads, length, scaled_eps, match_eps,
    DIM: tl.constexpr, HALF: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr, PHI: tl.constexpr,
    RMS: tl.constexpr, MATCHED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O of one tile of queries, in two walks over the channels: sizes first, then the result. Grid: (tiles, B H)."""
    sequence = tl.program_id(1).to(tl.int64)
    batch, head = sequence // heads, sequence % heads
    start = tl.program_id(0) * TILE
    rows = start + tl.arange(0, TILE)
    summary_ptr += sequence * (2 * HALF * DIM)
    sparse_ptr += batch * sparse_batch + head * sparse_head
    out_ptr += batch * out_batch + head * out_head
    q_ptr += batch * q_batch + head * q_head
    even, odd = _project(
        q_ptr, map_ptr + head * map_head, start, length, q_token, TILE, HALF, DIM, COLS, UPCAST, PRECISION
    )
    even, odd = _phi(even, odd, PHI)
    cos, sin = _angles(cos_ptr, sin_ptr, start, length, TILE, HALF)
    dtype = q_ptr.dtype.element_ty
    turned_even = _operand(_narrow(even * cos - odd * sin, dtype, UPCAST), UPCAST)
    turned_odd = _operand(_narrow(even * sin + odd * cos, dtype, UPCAST), UPCAST)
    factor = tl.load(gate_ptr + (batch * length + rows) * heads + head, mask=rows < length, other=0.0)
    if RMS or MATCHED:
        square = tl.zeros([TILE], tl.float32)
        size = tl.zeros([TILE], tl.float32)
        for part in tl.static_range(DIM // COLS):
            if RMS:
                o = _linear(turned_even, turned_odd, summary_ptr, part * COLS, HALF, DIM, COLS, UPCAST, PRECISION)
                square += tl.sum(o * o, 1)
            if MATCHED:
                sparse = _load_rows(sparse_ptr, start, length, sparse_token, part * COLS, TILE, COLS).to(tl.float32)
                size += tl.sum(sparse * sparse, 1)
        if RMS:
            factor *= tl.rsqrt(square / DIM + scaled_eps)
        if MATCHED:
            factor *= tl.sqrt(size / DIM + match_eps)
    for part in tl.static_range(DIM // COLS):
        o = _linear(turned_even, turned_odd, summary_ptr, part * COLS, HALF, DIM, COLS, UPCAST, PRECISION)
        sparse = _load_rows(sparse_ptr, start, length, sparse_token, part * COLS, TILE, COLS).to(tl.float32)
        _store_rows(out_ptr, sparse + factor[:, None] * o, start, length, out_token, part * COLS, TILE, COLS, UPCAST)


@triton.jit
def _store_slopes(
    x_ptr, map_ptr, slope_ptr, even, odd, start, length, x_token, TILE: tl.constexpr, HALF: tl.constexpr,
    DIM: tl.constexpr, COLS: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dz (rounded, as the product after it takes it) and dx = dz W of one tile."""
    dtype = slope_ptr.dtype.element_ty
    _store_rows(slope_ptr, even, start, length, 2 * HALF, 0, TILE, HALF, UPCAST)
    _store_rows(slope_ptr, odd, start, length, 2 * HALF, HALF, TILE, HALF, UPCAST)
    even, odd = _operand(_narrow(even, dtype, UPCAST), UPCAST), _operand(_narrow(odd, dtype, UPCAST), UPCAST)
    for part in tl.static_range(DIM // COLS):
        grad = _linear(even, odd, map_ptr, part * COLS, HALF, DIM, COLS, UPCAST, PRECISION)
        _store_rows(x_ptr, grad, start, length, x_token, part * COLS, TILE, COLS, UPCAST)


@triton.jit
def grad_query_kernel(
    q_ptr, map_ptr, cos_ptr, sin_ptr, summary_ptr, sparse_ptr, gate_ptr, grad_out_ptr,
    grad_q_ptr, grad_sparse_ptr, grad_gate_ptr, grad_o_ptr, slope_ptr,
    q_batch, q_token, q_head, sparse_batch, sparse_token, sparse_head, out_batch, out_token, out_head, map_head,
    heads, length, scaled_eps, match_eps,
    DIM: tl.constexpr, HALF: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr, PHI: tl.constexpr,
    RMS: tl.constexpr, MATCHED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dO_s, dg, do, dz and dq of one tile of queries. Grid: (tiles, batch heads).

    `grad_out` and all that is written but dg and dz share their steps.
    """
    sequence = tl.program_id(1).to(tl.int64)
    batch, head = sequence // heads, sequence % heads
    start = tl.program_id(0) * TILE
    rows = start + tl.arange(0, TILE)
    summary_ptr += sequence * (2 * HALF * DIM)
    sparse_ptr += batch * sparse_batch + head * sparse_head
    map_ptr += head * map_head
    at_out = batch * out_batch + head * out_head
    grad_out_ptr += at_out
    q_ptr += batch * q_batch + head * q_head
    even, odd = _project(q_ptr, map_ptr, start, length, q_token, TILE, HALF, DIM, COLS, UPCAST, PRECISION)
    phi_even, phi_odd = _phi(even, odd, PHI)
    cos, sin = _angles(cos_ptr, sin_ptr, start, length, TILE, HALF)
    dtype = q_ptr.dtype.element_ty
    turned_even = _operand(_narrow(phi_even * cos - phi_odd * sin, dtype, UPCAST), UPCAST)
    turned_odd = _operand(_narrow(phi_even * sin + phi_odd * cos, dtype, UPCAST), UPCAST)
    at_gate = (batch * length + rows) * heads + head
    gate = tl.load(gate_ptr + at_gate, mask=rows < length, other=0.0)
    # First walk: sum(G o), and the sizes of o and O_s. Both walks stay loops: unrolled, what they load side by side
    # does not fit the registers at wide heads and in float32.
    dot = tl.zeros([TILE], tl.float32)
    square = tl.zeros([TILE], tl.float32)
    size = tl.zeros([TILE], tl.float32)
    for part in tl.range(0, DIM // COLS, num_stages=1):
        o = _linear(turned_even, turned_odd, summary_ptr, part * COLS, HALF, DIM, COLS, UPCAST, PRECISION)
        slope = _load_rows(grad_out_ptr, start, length, out_token, part * COLS, TILE, COLS).to(tl.float32)
        dot += tl.sum(slope * o, 1)
        square += tl.sum(o * o, 1)
        if MATCHED:
            sparse = _load_rows(sparse_ptr, start, length, sparse_token, part * COLS, TILE, COLS).to(tl.float32)
            size += tl.sum(sparse * sparse, 1)
    inverse = tl.rsqrt(square / DIM + scaled_eps) if RMS else tl.full([TILE], 1.0, tl.float32)
    size = tl.sqrt(size / DIM + match_eps) if MATCHED else tl.full([TILE], 1.0, tl.float32)
    dot *= inverse
    tl.store(grad_gate_ptr + at_gate, size * dot, mask=rows < length)
    # Second walk: what flows on.
    grad_even = tl.zeros([TILE, HALF], tl.float32)
    grad_odd = tl.zeros([TILE, HALF], tl.float32)
    for part in tl.range(0, DIM // COLS, num_stages=1):
        slope = _load_rows(grad_out_ptr, start, length, out_token, part * COLS, TILE, COLS).to(tl.float32)
        grad_sparse = slope
        if MATCHED:
            sparse = _load_rows(sparse_ptr, start, length, sparse_token, part * COLS, TILE, COLS).to(tl.float32)
            grad_sparse += (gate * dot / (DIM * size))[:, None] * sparse
        _store_rows(grad_sparse_ptr + at_out, grad_sparse, start, length, out_token, part * COLS, TILE, COLS, UPCAST)
        if RMS:
            o = _linear(turned_even, turned_odd, summary_ptr, part * COLS, HALF, DIM, COLS, UPCAST, PRECISION)
            slope -= (dot * inverse / DIM)[:, None] * o
        grad_o = _narrow(slope * (gate * size * inverse)[:, None], dtype, UPCAST)
        _store_rows(
            grad_o_ptr + at_out, grad_o.to(tl.float32), start, length, out_token, part * COLS, TILE, COLS, UPCAST
        )
        grad_o = _operand(grad_o, UPCAST)
        upper = tl.trans(_half(summary_ptr, 0, part * COLS, HALF, DIM, COLS, UPCAST))
        lower = tl.trans(_half(summary_ptr, 1, part * COLS, HALF, DIM, COLS, UPCAST))
        grad_even = tl.dot(grad_o, upper, grad_even, input_precision=PRECISION)
        grad_odd = tl.dot(grad_o, lower, grad_odd, input_precision=PRECISION)
    # Read again rather than kept through the walks.
    cos, sin = _angles(cos_ptr, sin_ptr, start, length, TILE, HALF)
    grad_even, grad_odd = grad_even * cos + grad_odd * sin, grad_odd * cos - grad_even * sin
    grad_even, grad_odd = _phi_slope(even, odd, phi_even, phi_odd, grad_even, grad_odd, PHI)
    _store_slopes(
        grad_q_ptr + at_out, map_ptr, slope_ptr + sequence * length * (2 * HALF), grad_even, grad_odd, start, length,
        out_token, TILE, HALF, DIM, COLS, UPCAST, PRECISION,
    )  # fmt: skip


@triton.jit
def grad_key_value_kernel(
    k_ptr, v_ptr, map_ptr, cos_ptr, sin_ptr, grad_summary_ptr, grad_k_ptr, grad_v_ptr, slope_ptr,
    k_batch, k_token, k_head, v_batch, v_token, v_head, out_batch, out_token, out_head, map_head, heads, length,
    DIM: tl.constexpr, HALF: tl.constexpr, COLS: tl.constexpr, TILE: tl.constexpr, PHI: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dz, dk and dv of one tile of keys, from dC / L. Grid: (tiles, batch heads)."""
    sequence = tl.program_id(1).to(tl.int64)
    batch, head = sequence // heads, sequence % heads
    start = tl.program_id(0) * TILE
    grad_summary_ptr += sequence * (2 * HALF * DIM)
    map_ptr += head * map_head
    v_ptr += batch * v_batch + head * v_head
    at_out = batch * out_batch + head * out_head
    k_ptr += batch * k_batch + head * k_head
    even, odd = _project(k_ptr, map_ptr, start, length, k_token, TILE, HALF, DIM, COLS, UPCAST, PRECISION)
    phi_even, phi_odd = _phi(even, odd, PHI)
    cos, sin = _angles(cos_ptr, sin_ptr, start, length, TILE, HALF)
    dtype = k_ptr.dtype.element_ty
    turned_even = _operand(_narrow(phi_even * cos - phi_odd * sin, dtype, UPCAST), UPCAST)
    turned_odd = _operand(_narrow(phi_even * sin + phi_odd * cos, dtype, UPCAST), UPCAST)
    grad_even = tl.zeros([TILE, HALF], tl.float32)
    grad_odd = tl.zeros([TILE, HALF], tl.float32)
    for part in tl.static_range(DIM // COLS):
        grad_v = _linear(turned_even, turned_odd, grad_summary_ptr, part * COLS, HALF, DIM, COLS, UPCAST, PRECISION)
        _store_rows(grad_v_ptr + at_out, grad_v, start, length, out_token, part * COLS, TILE, COLS, UPCAST)
        values = _operand(_load_rows(v_ptr, start, length, v_token, part * COLS, TILE, COLS), UPCAST)
        upper = tl.trans(_half(grad_summary_ptr, 0, part * COLS, HALF, DIM, COLS, UPCAST))
        lower = tl.trans(_half(grad_summary_ptr, 1, part * COLS, HALF, DIM, COLS, UPCAST))
        grad_even = tl.dot(values, upper, grad_even, input_precision=PRECISION)
        grad_odd = tl.dot(values, lower, grad_odd, input_precision=PRECISION)
    grad_even, grad_odd = grad_even * cos + grad_odd * sin, grad_odd * cos - grad_even * sin
    grad_even, grad_odd = _phi_slope(even, odd, phi_even, phi_odd, grad_even, grad_odd, PHI)
    _store_slopes(
        grad_k_ptr + at_out, map_ptr, slope_ptr + sequence * length * (2 * HALF), grad_even, grad_odd, start, length,
        out_token, TILE, HALF, DIM, COLS, UPCAST, PRECISION,
    )  # fmt: skip


KERNELS: dict[RolaKernel, Any] = {
    "summary": summary_kernel,
    "outer": outer_kernel,
    "merge": merge_kernel,
    "grad_query": grad_query_kernel,
    "grad_key_value": grad_key_value_kernel,
}
_FLOAT32 = ("gate_ptr", "grad_gate_ptr", "sums_ptr", "cos_ptr", "sin_ptr", "scaled_eps", "match_eps")


SPILLING = ("summary", 128, "gfx942")
"""On MI300 every warp holds the whole maps in registers, and those of this rank do not fit: it runs, but spills."""


def compile_cases() -> list[CompileCase]:
    """What the kernels are compiled as without a GPU: ranks and head sizes of Wan, the smallest and the widest."""
    cases = []
    for rank, dim, dtype, phi in (
        (64, 128, "bf16", "silu"), (64, 128, "bf16", "softmax"), (64, 64, "bf16", "silu"), (32, 32, "fp16", "relu"),
        (128, 128, "bf16", "silu"), (128, 256, "bf16", "elu"), (64, 128, "fp32", "silu"),
    ):  # fmt: skip
        for kernel in KERNELS:
            by_tiles: dict[RolaTiles, list[str]] = {}
            for target, shared_memory in SHARED_MEMORY_LIMITS.items():
                if (kernel, rank, target) == SPILLING:
                    continue
                tiles = choose_rola_tiles(
                    kernel, rank=rank, head_dim=dim, item_bytes=4 if dtype == "fp32" else 2, shared_memory=shared_memory
                )
                by_tiles.setdefault(tiles, []).append(target)
            cases += [_case(kernel, rank, dim, dtype, phi, *found) for found in by_tiles.items()]
    return cases


def _case(
    kernel: RolaKernel, rank: int, dim: int, dtype: str, phi: str, tiles: RolaTiles, targets: list[str]
) -> CompileCase:
    function = KERNELS[kernel]
    known = {
        "DIM": dim, "HALF": rank // 2, "COLS": tiles.columns, "TILE": tiles.tokens, "PHI": phi, "RMS": True,
        "MATCHED": True, "UPCAST": False, "PRECISION": "ieee",
    }  # fmt: skip
    constants = {name: value for name, value in known.items() if name in function.arg_names}
    signature = {}
    for name in function.arg_names:
        if name in constants:
            continue
        if name in _FLOAT32:
            signature[name] = "*fp32" if name.endswith("_ptr") else "fp32"
        else:
            signature[name] = f"*{dtype}" if name.endswith("_ptr") else "i32"
    steps = tuple(name for name in signature if name.endswith(("_batch", "_token", "_head")))
    return CompileCase(
        kernel=function, signature=signature, constexprs=constants, num_warps=tiles.num_warps,
        num_stages=tiles.num_stages, label=f"rola {kernel} {phi} {dtype} r{rank} d{dim} tile {tiles.tokens}",
        needs_matrix_instruction=dtype != "fp32", divisible_by_16=steps, targets=tuple(targets),
    )  # fmt: skip
