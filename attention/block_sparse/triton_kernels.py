"""Triton kernels of block-sparse softmax attention: forward, and backward by the list of kept blocks and its inverse.

With S = Q K^T log2(e) / sqrt(d): P = 2^(S - LSE), O = P V, dS = P o (dO V^T - Delta), Delta = rowsum(dO o O) - dLSE,
dQ = dS K / sqrt(d), dK = dS^T Q / sqrt(d), dV = P^T dO (FlashAttention-2, arXiv 2307.08691, over kept blocks).

Tensors are [batch, tokens, heads, head_dim] with any steps but one of 1 between channels. Blocks are those of the map,
tiles are what is multiplied at once. Rows and columns past the last token are masked on loading, so nothing that lies
behind the tokens in memory is ever read. Sums are float32.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from ...core.compile_case import CompileCase
from .triton_tiles import SHARED_MEMORY_LIMITS, Kernel, choose_tiles


@triton.jit
def _operand(tile, UPCAST: tl.constexpr):
    """The interpreter multiplies bfloat16 wrongly: there operands are widened, which changes no value."""
    return tile.to(tl.float32) if UPCAST else tile


@triton.jit
def _narrow(tile, dtype: tl.constexpr, UPCAST: tl.constexpr):
    """Round float32 to `dtype`, to nearest even; the interpreter cuts bfloat16 off, so there bits are rounded first."""
    if UPCAST:
        bits = tile.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        tile = bits.to(tl.float32, bitcast=True)
    return tile.to(dtype)


@triton.jit
def _load_tile(base_ptr, start, length, token_step, ROWS: tl.constexpr, DIM: tl.constexpr):
    """Rows start .. start + ROWS of [tokens, DIM], zero past `length`."""
    rows, channels = tl.arange(0, ROWS), tl.arange(0, DIM)
    pointers = base_ptr + start.to(tl.int64) * token_step + rows[:, None] * token_step + channels[None, :]
    return tl.load(pointers, mask=(start + rows < length)[:, None], other=0.0)


@triton.jit
def _store_tile(base_ptr, tile, start, length, token_step, ROWS: tl.constexpr, DIM: tl.constexpr, UPCAST: tl.constexpr):
    rows, channels = tl.arange(0, ROWS), tl.arange(0, DIM)
    pointers = base_ptr + start.to(tl.int64) * token_step + rows[:, None] * token_step + channels[None, :]
    tl.store(pointers, _narrow(tile, base_ptr.dtype.element_ty, UPCAST), mask=(start + rows < length)[:, None])


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, index_ptr, count_ptr, q_scale_ptr, k_scale_ptr, shift_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, out_batch, out_token, out_head,
    heads, length_q, length_k, query_blocks, key_blocks, kept, scale_log2,
    DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    QUANTIZED: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """O and LSE (base 2, float32 [batch, heads, length_q]) of one query tile. Grid: (query tiles, batch heads).

    `index` [batch, heads, query_blocks, kept] lists key blocks, of which the first `count` of each row are used.
    With QUANTIZED q and k are int8 with one scale per block, and `shift` is what the LSE lacks (`quantize_kernel`).
    """
    sequence = tl.program_id(1).to(tl.int64)
    batch, head = sequence // heads, sequence % heads
    start_q = tl.program_id(0) * TILE_Q
    row = sequence * query_blocks + start_q // BLOCK_Q
    q = _load_tile(q_ptr + batch * q_batch + head * q_head, start_q, length_q, q_token, TILE_Q, DIM)
    q = _operand(q, UPCAST and not QUANTIZED)
    k_ptr += batch * k_batch + head * k_head
    v_ptr += batch * v_batch + head * v_head
    index_ptr += row * kept
    factor = scale_log2
    if QUANTIZED:
        factor *= tl.load(q_scale_ptr + row)
        k_scale_ptr += sequence * key_blocks
    columns = tl.arange(0, TILE_K)
    highest = tl.full([TILE_Q], -float("inf"), tl.float32)
    total = tl.zeros([TILE_Q], tl.float32)
    out = tl.zeros([TILE_Q, DIM], tl.float32)
    parts: tl.constexpr = BLOCK_K // TILE_K
    for step in range(tl.load(count_ptr + row) * parts):
        block = tl.load(index_ptr + step // parts)
        start_k = block * BLOCK_K + step % parts * TILE_K
        k = _load_tile(k_ptr, start_k, length_k, k_token, TILE_K, DIM)
        if QUANTIZED:
            scores = tl.dot(q, tl.trans(k)).to(tl.float32) * (factor * tl.load(k_scale_ptr + block))
        else:
            scores = tl.dot(q, tl.trans(_operand(k, UPCAST)), input_precision=PRECISION) * factor
        scores = tl.where((start_k + columns < length_k)[None, :], scores, -float("inf"))
        # The first tile of a block always has a token, so the maximum is finite from the first step on.
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_highest[:, None])
        rescale = tl.exp2(highest - new_highest)
        total = total * rescale + tl.sum(weights, 1)
        v = _load_tile(v_ptr, start_k, length_k, v_token, TILE_K, DIM)
        weights = _operand(_narrow(weights, v.dtype, UPCAST), UPCAST)
        out = tl.dot(weights, _operand(v, UPCAST), out * rescale[:, None], input_precision=PRECISION)
        highest = new_highest
    out = out / total[:, None]
    _store_tile(out_ptr + batch * out_batch + head * out_head, out, start_q, length_q, out_token, TILE_Q, DIM, UPCAST)
    rows = start_q + tl.arange(0, TILE_Q)
    lse = highest + tl.log2(total)
    if QUANTIZED:
        lse += tl.load(shift_ptr + sequence * length_q + rows, mask=rows < length_q, other=0.0)
    tl.store(lse_ptr + sequence * length_q + rows, lse, mask=rows < length_q)


@triton.jit
def grad_query_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, grad_out_ptr, lse_ptr, grad_lse_ptr, delta_ptr, grad_q_ptr, index_ptr, count_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, out_batch, out_token, out_head,
    heads, length_q, length_k, query_blocks, kept, scale,
    DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr, UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dQ and Delta (float32 [batch, heads, length_q]) of one query tile. Grid: (query tiles, batch heads).

    `out`, `grad_out` and `grad_q` share their steps.
    """
    sequence = tl.program_id(1).to(tl.int64)
    batch, head = sequence // heads, sequence % heads
    start_q = tl.program_id(0) * TILE_Q
    at_out = batch * out_batch + head * out_head
    q = _operand(_load_tile(q_ptr + batch * q_batch + head * q_head, start_q, length_q, q_token, TILE_Q, DIM), UPCAST)
    out = _load_tile(out_ptr + at_out, start_q, length_q, out_token, TILE_Q, DIM)
    grad_out = _load_tile(grad_out_ptr + at_out, start_q, length_q, out_token, TILE_Q, DIM)
    rows = start_q + tl.arange(0, TILE_Q)
    at_rows, inside = sequence * length_q + rows, rows < length_q
    delta = tl.sum(out.to(tl.float32) * grad_out.to(tl.float32), 1)
    if HAS_GRAD_LSE:
        # d LSE_natural / d S_natural = P: it joins Delta.
        delta -= tl.load(grad_lse_ptr + at_rows, mask=inside, other=0.0)
    tl.store(delta_ptr + at_rows, delta, mask=inside)
    # An infinite LSE makes the weights of rows past the last token 0.
    lse = tl.load(lse_ptr + at_rows, mask=inside, other=float("inf"))
    k_ptr += batch * k_batch + head * k_head
    v_ptr += batch * v_batch + head * v_head
    row = sequence * query_blocks + start_q // BLOCK_Q
    index_ptr += row * kept
    grad_out = _operand(grad_out, UPCAST)
    columns = tl.arange(0, TILE_K)
    grad_q = tl.zeros([TILE_Q, DIM], tl.float32)
    parts: tl.constexpr = BLOCK_K // TILE_K
    for step in range(tl.load(count_ptr + row) * parts):
        block = tl.load(index_ptr + step // parts)
        start_k = block * BLOCK_K + step % parts * TILE_K
        k = _load_tile(k_ptr, start_k, length_k, k_token, TILE_K, DIM)
        v = _load_tile(v_ptr, start_k, length_k, v_token, TILE_K, DIM)
        wide_k = _operand(k, UPCAST)
        scores = tl.dot(q, tl.trans(wide_k), input_precision=PRECISION) * (scale * 1.4426950408889634)
        scores = tl.where((start_k + columns < length_k)[None, :], scores, -float("inf"))
        weights = tl.exp2(scores - lse[:, None])
        slope = tl.dot(grad_out, tl.trans(_operand(v, UPCAST)), input_precision=PRECISION)
        slope = _operand(_narrow(weights * (slope - delta[:, None]), k.dtype, UPCAST), UPCAST)
        grad_q = tl.dot(slope, wide_k, grad_q, input_precision=PRECISION)
    _store_tile(grad_q_ptr + at_out, grad_q * scale, start_q, length_q, out_token, TILE_Q, DIM, UPCAST)


@triton.jit
def grad_key_value_kernel(
    q_ptr, k_ptr, v_ptr, grad_out_ptr, lse_ptr, delta_ptr, grad_k_ptr, grad_v_ptr, queries_ptr, first_ptr,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    out_batch, out_token, out_head, grad_batch, grad_token, grad_head,
    heads, length_q, length_k, key_blocks, pairs, scale,
    DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, TILE_Q: tl.constexpr, TILE_K: tl.constexpr,
    UPCAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV of one key tile, over the query blocks that keep its block. Grid: (key tiles, batch heads).

    `queries` [batch, heads, pairs] lists query blocks ordered by the key block they keep, `first` [batch, heads,
    key_blocks + 1] where the list of each key block begins. Nothing is added atomically: the result repeats.
    """
    sequence = tl.program_id(1).to(tl.int64)
    batch, head = sequence // heads, sequence % heads
    start_k = tl.program_id(0) * TILE_K
    k_tile = _load_tile(k_ptr + batch * k_batch + head * k_head, start_k, length_k, k_token, TILE_K, DIM)
    v_tile = _load_tile(v_ptr + batch * v_batch + head * v_head, start_k, length_k, v_token, TILE_K, DIM)
    k, v = _operand(k_tile, UPCAST), _operand(v_tile, UPCAST)
    q_ptr += batch * q_batch + head * q_head
    grad_out_ptr += batch * out_batch + head * out_head
    lse_ptr += sequence * length_q
    delta_ptr += sequence * length_q
    first_ptr += sequence * (key_blocks + 1) + start_k // BLOCK_K
    queries_ptr += sequence * pairs
    rows = tl.arange(0, TILE_Q)
    grad_k = tl.zeros([TILE_K, DIM], tl.float32)
    grad_v = tl.zeros([TILE_K, DIM], tl.float32)
    parts: tl.constexpr = BLOCK_Q // TILE_Q
    for step in range(tl.load(first_ptr) * parts, tl.load(first_ptr + 1) * parts):
        start_q = tl.load(queries_ptr + step // parts) * BLOCK_Q + step % parts * TILE_Q
        q = _load_tile(q_ptr, start_q, length_q, q_token, TILE_Q, DIM)
        grad_out = _load_tile(grad_out_ptr, start_q, length_q, out_token, TILE_Q, DIM)
        inside = start_q + rows < length_q
        # An infinite LSE makes the weights of rows past the last token 0.
        lse = tl.load(lse_ptr + start_q + rows, mask=inside, other=float("inf"))
        delta = tl.load(delta_ptr + start_q + rows, mask=inside, other=0.0)
        wide_q, wide_grad = _operand(q, UPCAST), _operand(grad_out, UPCAST)
        scores = tl.dot(k, tl.trans(wide_q), input_precision=PRECISION) * (scale * 1.4426950408889634)
        weights = tl.exp2(scores - lse[None, :])
        slope = tl.dot(v, tl.trans(wide_grad), input_precision=PRECISION)
        slope = _operand(_narrow(weights * (slope - delta[None, :]), q.dtype, UPCAST), UPCAST)
        weights = _operand(_narrow(weights, q.dtype, UPCAST), UPCAST)
        grad_v = tl.dot(weights, wide_grad, grad_v, input_precision=PRECISION)
        grad_k = tl.dot(slope, wide_q, grad_k, input_precision=PRECISION)
    at_grad = batch * grad_batch + head * grad_head
    _store_tile(grad_k_ptr + at_grad, grad_k * scale, start_k, length_k, grad_token, TILE_K, DIM, UPCAST)
    _store_tile(grad_v_ptr + at_grad, grad_v, start_k, length_k, grad_token, TILE_K, DIM, UPCAST)


@triton.jit
def quantize_kernel(
    x_ptr, mean_ptr, values_ptr, scale_ptr, shift_ptr,
    x_batch, x_token, x_head, values_batch, values_token, values_head, heads, length, blocks, scale_log2,
    DIM: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, IS_KEY: tl.constexpr,
):  # fmt: skip
    """int8 values and one scale of one block: round(127 x / max|x|). Grid: (blocks, batch heads).

    Keys lose their mean over the sequence first (`mean` float32 [batch, heads, DIM]), which changes no weight but the
    LSE; queries write what it lacks by that, `shift` = q mean scale_log2, float32 [batch, heads, length]. ROWS is
    the power of two that holds BLOCK.
    """
    sequence = tl.program_id(1).to(tl.int64)
    batch, head = sequence // heads, sequence % heads
    start = tl.program_id(0) * BLOCK
    rows, channels = tl.arange(0, ROWS), tl.arange(0, DIM)
    inside = (rows < BLOCK) & (start + rows < length)
    base = x_ptr + batch * x_batch + head * x_head + start.to(tl.int64) * x_token
    x = tl.load(base + rows[:, None] * x_token + channels[None, :], mask=inside[:, None], other=0.0).to(tl.float32)
    mean = tl.load(mean_ptr + sequence * DIM + channels)
    if IS_KEY:
        x = tl.where(inside[:, None], x - mean[None, :], 0.0)
    else:
        shift = tl.sum(x * mean[None, :], 1) * scale_log2
        tl.store(shift_ptr + sequence * length + start + rows, shift, mask=inside)
    # Maxima drop NaN, so a broken block is found apart (x - x is 0 for finite numbers only) and marked by its scale.
    broken = tl.max(tl.max(tl.where((x - x) != 0.0, 1, 0), 1), 0) > 0
    largest = tl.max(tl.max(tl.abs(x), 1), 0)
    scale = tl.maximum(largest, 1e-20) / 127.0
    tl.store(scale_ptr + sequence * blocks + tl.program_id(0), tl.where(broken, float("nan"), scale))
    # Adding 1.5 * 2^23 and taking it off rounds to the nearest even whole number.
    scaled = (tl.where(broken, 0.0, x / scale) + 12582912.0) - 12582912.0
    base = values_ptr + batch * values_batch + head * values_head + start.to(tl.int64) * values_token
    tl.store(base + rows[:, None] * values_token + channels[None, :], scaled.to(tl.int8), mask=inside[:, None])


_KERNELS: dict[Kernel, Any] = {
    "forward": forward_kernel,
    "grad_query": grad_query_kernel,
    "grad_key_value": grad_key_value_kernel,
}
_FLOAT32_POINTERS = ("lse_ptr", "grad_lse_ptr", "delta_ptr", "q_scale_ptr", "k_scale_ptr", "shift_ptr", "scale_ptr")
_INTEGER_POINTERS = ("index_ptr", "count_ptr", "queries_ptr", "first_ptr")


def compile_cases() -> list[CompileCase]:
    """What the kernels are compiled as without a GPU: head sizes and blocks of Wan, the smallest and the widest."""
    cases = []
    for dim in (64, 128):
        for sizes in ((64, 64), (128, 64), (128, 128), (64, 128)):
            cases += [_cases_of(kernel, dim, sizes, "bf16") for kernel in _KERNELS]
            cases.append(_cases_of("forward", dim, sizes, "bf16", quantized=True))
    for dim, sizes, dtype in ((64, (16, 16), "bf16"), (128, (96, 48), "fp16"), (256, (64, 64), "bf16")):
        cases += [_cases_of(kernel, dim, sizes, dtype) for kernel in _KERNELS]
    cases += [_cases_of(kernel, 128, (64, 64), "fp32") for kernel in _KERNELS]
    flat = [case for group in cases for case in group]
    return flat + [_quantize_case(dim, 128, is_key) for dim in (64, 128) for is_key in (False, True)]


def _cases_of(
    kernel: Kernel, dim: int, sizes: tuple[int, int], dtype: str, *, quantized: bool = False
) -> list[CompileCase]:
    """One case for each choice of tiles that the targets lead to."""
    by_tiles: dict[Any, list[str]] = {}
    for target, shared_memory in SHARED_MEMORY_LIMITS.items():
        item_bytes = 4 if dtype == "fp32" else 2
        tiles = choose_tiles(
            kernel, block_size_q=sizes[0], block_size_k=sizes[1], head_dim=dim, item_bytes=item_bytes,
            shared_memory=shared_memory,
        )  # fmt: skip
        by_tiles.setdefault(tiles, []).append(target)
    cases = []
    for tiles, targets in by_tiles.items():
        constants: dict[str, Any] = {"DIM": dim, "BLOCK_Q": sizes[0], "BLOCK_K": sizes[1], "UPCAST": False}
        constants |= {"TILE_Q": tiles.tile_q, "TILE_K": tiles.tile_k, "PRECISION": "ieee"}
        if kernel == "forward":
            constants["QUANTIZED"] = quantized
        elif kernel == "grad_query":
            constants["HAS_GRAD_LSE"] = False
        name = f"{kernel} int8" if quantized else kernel
        tile = f"tiles {tiles.tile_q}x{tiles.tile_k}"
        label = f"{name} {dtype} d{dim} blocks {sizes[0]}x{sizes[1]} {tile}"
        eight_bits = ("q_ptr", "k_ptr") if quantized else ()
        cases.append(
            _case(_KERNELS[kernel], dtype, constants, tiles.num_warps, tiles.num_stages, label, dtype != "fp32",
                  eight_bits, tuple(targets))
        )  # fmt: skip
    return cases


def _quantize_case(dim: int, block: int, is_key: bool) -> CompileCase:
    constants = {"DIM": dim, "BLOCK": block, "ROWS": block, "IS_KEY": is_key}
    label = f"quantize {'key' if is_key else 'query'} bf16 d{dim} block {block}"
    return _case(quantize_kernel, "bf16", constants, 8, 3, label, False, ("values_ptr",), tuple(SHARED_MEMORY_LIMITS))


def _case(
    kernel: Any, dtype: str, constants: dict[str, Any], num_warps: int, num_stages: int, label: str, matrix: bool,
    eight_bits: tuple[str, ...], targets: tuple[str, ...],
) -> CompileCase:  # fmt: skip
    signature = {}
    for name in kernel.arg_names:
        if name in constants:
            continue
        if name in eight_bits:
            signature[name] = "*i8"
        elif name in _FLOAT32_POINTERS or name == "mean_ptr":
            signature[name] = "*fp32"
        elif name.endswith("_ptr"):
            signature[name] = "*i32" if name in _INTEGER_POINTERS else f"*{dtype}"
        else:
            signature[name] = "fp32" if name.startswith("scale") else "i32"
    steps = tuple(name for name in signature if name.endswith(("_batch", "_token", "_head")))
    return CompileCase(
        kernel=kernel, signature=signature, constexprs=constants, num_warps=num_warps, num_stages=num_stages,
        label=label, needs_matrix_instruction=matrix, divisible_by_16=steps, targets=targets,
    )  # fmt: skip
