"""Triton kernels of the parts in `fused.py`; one program per token, a whole row in registers.

The arithmetic is float32. The result is rounded to the dtype of the input first and quantized from there, with division
and rounding as IEEE has them, so that values and scales equal those of the torch path.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..core.compile_case import TARGETS, CompileCase
from .primitives import DTYPES, SCALE_FLOOR, Number, QuantizedRows

_NUMBERS = {None: 0, "fp8": 1, "int8": 2}
_FLOOR = tl.constexpr(SCALE_FLOOR)
_ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding and taking it off rounds to the nearest even whole number
_INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def _rounded(values, dtype: tl.constexpr):
    """float32 `values` cast to dtype, to the nearest and ties to even, as the chip's own cast does.

    Triton 3.9's interpreter cuts off where it casts to bfloat16, and loses the carry where it rounds FP8 up to a power
    of two, so it is handed numbers that need no rounding any more.
    """
    if _INTERPRETED and (dtype == tl.bfloat16 or dtype == tl.float8e4nv):
        dropped: tl.constexpr = 16 if dtype == tl.bfloat16 else 20
        bits = values.to(tl.int32, bitcast=True)
        bits = (bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)) & -(1 << dropped)
        exact = bits.to(tl.float32, bitcast=True)
        if dtype == tl.float8e4nv:
            # Below 2^-6 the steps are 2^-9; 24576 is 1.5 * 2^23 of them.
            exact = tl.where(tl.abs(values) < 0.015625, (values + 24576.0) - 24576.0, exact)
        return exact.to(dtype)
    else:
        return values.to(dtype)


@triton.jit
def _store_quantized(values, mask, row, cols, values_ptr, scale_ptr, width, NUMBER: tl.constexpr):
    limit: tl.constexpr = 448.0 if NUMBER == 1 else 127.0
    # Maxima drop NaN, so broken rows are found apart: v - v is 0 for finite numbers only.
    broken = tl.sum(tl.where(mask & ((values - values) != 0.0), 1, 0), axis=0) > 0
    amax = tl.max(tl.where(mask, tl.abs(values), 0.0), axis=0)
    scale = tl.maximum(tl.div_rn(amax, limit), _FLOOR)
    scaled = tl.div_rn(values, tl.where(broken, 1.0, scale) + tl.zeros_like(values))
    scaled = tl.minimum(tl.maximum(scaled, -limit), limit)
    if NUMBER == 2:
        scaled = (scaled + _ROUND) - _ROUND
    tl.store(values_ptr + row * width + cols, _rounded(scaled, values_ptr.dtype.element_ty), mask=mask)
    tl.store(scale_ptr + row, tl.where(broken, float("nan"), scale))


@triton.jit
def layer_norm_modulate_kernel(
    x_ptr, scale_ptr, shift_ptr, y_ptr, values_ptr, row_scale_ptr,
    length, width, scale_batch, scale_token, shift_batch, shift_token, eps,
    AFFINE: tl.constexpr, NUMBER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """y = LayerNorm(x) (1 + scale) + shift; with AFFINE y = LayerNorm(x) scale + shift. Grid: (B L,)."""
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // length, row % length
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    x = tl.load(x_ptr + row * width + cols, mask=mask, other=0.0).to(tl.float32)
    centred = tl.where(mask, x - tl.sum(x, axis=0) / width, 0.0)
    normed = centred / tl.sqrt(tl.sum(centred * centred, axis=0) / width + eps)
    scale = tl.load(scale_ptr + batch * scale_batch + token * scale_token + cols, mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + batch * shift_batch + token * shift_token + cols, mask=mask, other=0.0).to(tl.float32)
    if not AFFINE:
        scale += 1.0
    y = _rounded(normed * scale + shift, y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * width + cols, y, mask=mask)
    if NUMBER != 0:
        _store_quantized(y.to(tl.float32), mask, row, cols, values_ptr, row_scale_ptr, width, NUMBER)


@triton.jit
def gelu_tanh_kernel(x_ptr, y_ptr, values_ptr, row_scale_ptr, width, NUMBER: tl.constexpr, BLOCK: tl.constexpr):
    """y = x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)). Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    x = tl.load(x_ptr + row * width + cols, mask=mask, other=0.0).to(tl.float32)
    inner = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    y = _rounded(x * tl.sigmoid(inner), y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * width + cols, y, mask=mask)
    if NUMBER != 0:
        _store_quantized(y.to(tl.float32), mask, row, cols, values_ptr, row_scale_ptr, width, NUMBER)


@triton.jit
def quantize_kernel(x_ptr, values_ptr, row_scale_ptr, width, NUMBER: tl.constexpr, BLOCK: tl.constexpr):
    """values = cast(x / scale), scale = max(max|x| / limit, floor). Grid: (rows,)."""
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    mask = cols < width
    x = tl.load(x_ptr + row * width + cols, mask=mask, other=0.0).to(tl.float32)
    _store_quantized(x, mask, row, cols, values_ptr, row_scale_ptr, width, NUMBER)


@triton.jit
def rms_norm_rope_kernel(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, y_ptr,
    length, heads, pairs, eps,
    HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """y = rotate(x / sqrt(mean over all heads of x^2 + eps) weight) in pairs (2i, 2i + 1). Grid: (B L,)."""
    row = tl.program_id(0).to(tl.int64)
    token = row % length
    width = heads * pairs * 2
    head, pair = tl.arange(0, HEADS)[:, None], tl.arange(0, PAIRS)[None, :]
    mask = (head < heads) & (pair < pairs)
    offset = head * pairs * 2 + pair * 2
    even = tl.load(x_ptr + row * width + offset, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(x_ptr + row * width + offset + 1, mask=mask, other=0.0).to(tl.float32)
    squares = tl.sum(tl.sum(even * even + odd * odd, axis=1), axis=0)
    inverse = 1.0 / tl.sqrt(squares / width + eps)
    even = even * inverse * tl.load(weight_ptr + offset, mask=mask, other=0.0).to(tl.float32)
    odd = odd * inverse * tl.load(weight_ptr + offset + 1, mask=mask, other=0.0).to(tl.float32)
    # Rounded here as the separate norm does, so that fusing changes nothing else.
    even = _rounded(even, y_ptr.dtype.element_ty).to(tl.float32)
    odd = _rounded(odd, y_ptr.dtype.element_ty).to(tl.float32)
    angle = token * pairs * 2 + pair * 2
    cos = tl.load(cos_ptr + angle, mask=pair < pairs, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle + 1, mask=pair < pairs, other=0.0).to(tl.float32)
    first = _rounded(even * cos - odd * sin, y_ptr.dtype.element_ty)
    second = _rounded(even * sin + odd * cos, y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * width + offset, first, mask=mask)
    tl.store(y_ptr + row * width + offset + 1, second, mask=mask)


@triton.jit
def residual_gate_kernel(
    x_ptr, update_ptr, gate_ptr, y_ptr, length, width, gate_batch, gate_token, BLOCK: tl.constexpr
):
    """y = x + gate update. Grid: (B L, ceil(D / BLOCK))."""
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // length, row % length
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < width
    x = tl.load(x_ptr + row * width + cols, mask=mask, other=0.0).to(tl.float32)
    update = tl.load(update_ptr + row * width + cols, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + batch * gate_batch + token * gate_token + cols, mask=mask, other=0.0).to(tl.float32)
    tl.store(y_ptr + row * width + cols, _rounded(x + update * gate, y_ptr.dtype.element_ty), mask=mask)


def layer_norm_modulate(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    *,
    affine: bool = False,
    number: Number | None = None,
    row_multiple: int = 1,
) -> tuple[torch.Tensor, QuantizedRows | None]:
    """As `fused.layer_norm_modulate`."""
    x, scale, shift = x.contiguous(), scale.contiguous(), shift.contiguous()
    batch, length, width = x.shape
    y = torch.empty_like(x)
    rows, values, row_scale = _allocate(batch * length, width, number, row_multiple, x)
    block = triton.next_power_of_2(width)
    layer_norm_modulate_kernel[(batch * length,)](
        x, scale, shift, y, values, row_scale, length, width, *_strides(scale), *_strides(shift), eps,
        AFFINE=affine, NUMBER=_NUMBERS[number], BLOCK=block, num_warps=_warps(block),
    )  # fmt: skip
    return y, rows


def gelu_tanh(
    x: torch.Tensor, *, number: Number | None = None, row_multiple: int = 1
) -> tuple[torch.Tensor, QuantizedRows | None]:
    """As `fused.gelu_tanh`."""
    x = x.contiguous()
    count, width = x.numel() // x.shape[-1], x.shape[-1]
    y = torch.empty_like(x)
    rows, values, row_scale = _allocate(count, width, number, row_multiple, x)
    block = triton.next_power_of_2(width)
    gelu_tanh_kernel[(count,)](
        x, y, values, row_scale, width, NUMBER=_NUMBERS[number], BLOCK=block, num_warps=_warps(block)
    )
    return y, rows


def quantize(x: torch.Tensor, number: Number, *, row_multiple: int = 1) -> QuantizedRows:
    """As `fused.quantize` for x [rows, D]."""
    x = x.contiguous()
    count, width = x.shape
    rows, values, row_scale = _allocate(count, width, number, row_multiple, x)
    assert rows is not None
    block = triton.next_power_of_2(width)
    quantize_kernel[(count,)](
        x, values, row_scale, width, NUMBER=_NUMBERS[number], BLOCK=block, num_warps=_warps(block)
    )
    return rows


def rms_norm_rope(
    x: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor, heads: int
) -> torch.Tensor:
    """As `fused.rms_norm_rope`."""
    x, weight, cos, sin = x.contiguous(), weight.contiguous(), cos.contiguous(), sin.contiguous()
    batch, length, width = x.shape
    pairs = width // heads // 2
    y = torch.empty_like(x)
    blocks = triton.next_power_of_2(heads), triton.next_power_of_2(pairs)
    rms_norm_rope_kernel[(batch * length,)](
        x, weight, cos, sin, y, length, heads, pairs, eps,
        HEADS=blocks[0], PAIRS=blocks[1], num_warps=_warps(2 * blocks[0] * blocks[1]),
    )  # fmt: skip
    return y.unflatten(-1, (heads, -1))


def residual_gate(x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """As `fused.residual_gate`."""
    x, update, gate = x.contiguous(), update.contiguous(), gate.contiguous()
    batch, length, width = x.shape
    y = torch.empty_like(x)
    block = min(triton.next_power_of_2(width), 2048)
    residual_gate_kernel[(batch * length, triton.cdiv(width, block))](
        x, update, gate, y, length, width, *_strides(gate), BLOCK=block, num_warps=_warps(block)
    )
    return y


def _allocate(
    count: int, width: int, number: Number | None, row_multiple: int, x: torch.Tensor
) -> tuple[QuantizedRows | None, torch.Tensor, torch.Tensor]:
    """Where a kernel writes quantized rows; without a number, x stands in for pointers that are not used."""
    if number is None:
        return None, x, x
    padded = count + -count % row_multiple
    values = torch.empty(padded, width, dtype=torch.int8, device=x.device)
    scale = torch.empty(padded, 1, dtype=torch.float32, device=x.device)
    values[count:], scale[count:] = 0, SCALE_FLOOR
    values = values.view(DTYPES[number])
    return QuantizedRows(values, scale, count), values, scale


def _strides(modulation: torch.Tensor) -> tuple[int, int]:
    """Steps along batch and tokens of a modulation [B or 1, L or 1, D]; 0 where it is broadcast."""
    batch, length, _ = modulation.shape
    return (modulation.stride(0) if batch > 1 else 0, modulation.stride(1) if length > 1 else 0)


def _warps(elements: int) -> int:
    return 4 if elements <= 2048 else 8 if elements <= 8192 else 16


def compile_cases() -> list[CompileCase]:
    """What the kernels are compiled as without a GPU: the widths of Wan 1.3B and 14B, in bfloat16.

    e4m3 needs sm_89, and MI300 has another form of it; `fused.kernel_writes` keeps such devices from it.
    """
    cases: list[CompileCase] = []
    for model, width, ffn, heads in (("1.3B", 1536, 8960, 12), ("14B", 5120, 13824, 40)):
        for number in (None, "fp8", "int8"):
            cases += _cases_of(model, width, ffn, number)
        row = {"length": "i32", "heads": "i32", "pairs": "i32", "eps": "fp32"}
        pointers = {"x_ptr": "*bf16", "weight_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "y_ptr": "*bf16"}
        blocks = {"HEADS": triton.next_power_of_2(heads), "PAIRS": 64}
        cases.append(_case(rms_norm_rope_kernel, {**pointers, **row}, blocks, 8, f"rms_norm_rope {model}"))
        gate = {"x_ptr": "*bf16", "update_ptr": "*bf16", "gate_ptr": "*fp32", "y_ptr": "*bf16"}
        gate |= dict.fromkeys(("length", "width", "gate_batch", "gate_token"), "i32")
        cases.append(_case(residual_gate_kernel, gate, {"BLOCK": 2048}, 4, f"residual_gate {model}"))
    return cases


def _cases_of(model: str, width: int, ffn: int, number: Number | None) -> list[CompileCase]:
    eight = {None: "*bf16", "fp8": "*fp8e4nv", "int8": "*i8"}[number]
    written = {"values_ptr": eight, "row_scale_ptr": "*bf16" if number is None else "*fp32"}
    code, suffix = {"NUMBER": _NUMBERS[number]}, f"{model} {number or 'plain'}"
    norm = {"x_ptr": "*bf16", "scale_ptr": "*fp32", "shift_ptr": "*fp32", "y_ptr": "*bf16", **written}
    steps = ("length", "width", "scale_batch", "scale_token", "shift_batch", "shift_token")
    norm |= {**dict.fromkeys(steps, "i32"), "eps": "fp32"}
    block = triton.next_power_of_2(width)
    cases = [
        _case(
            layer_norm_modulate_kernel, norm, {"AFFINE": False, **code, "BLOCK": block}, _warps(block),
            f"layer_norm_modulate {suffix}",
        )
    ]  # fmt: skip
    block = triton.next_power_of_2(ffn)
    gelu = {"x_ptr": "*bf16", "y_ptr": "*bf16", **written, "width": "i32"}
    cases.append(_case(gelu_tanh_kernel, gelu, {**code, "BLOCK": block}, _warps(block), f"gelu_tanh {suffix}"))
    if number is not None:
        alone = {"x_ptr": "*bf16", **written, "width": "i32"}
        cases.append(_case(quantize_kernel, alone, {**code, "BLOCK": block}, _warps(block), f"quantize {suffix}"))
    return cases


def _case(
    kernel: object, signature: dict[str, str], constexprs: dict[str, object], num_warps: int, label: str
) -> CompileCase:
    without_fp8 = ("sm_80", "gfx942") if signature.get("values_ptr") == "*fp8e4nv" else ()
    return CompileCase(
        kernel=kernel, signature=signature, constexprs=constexprs, num_warps=num_warps, num_stages=1, label=label,
        needs_matrix_instruction=False, targets=tuple(target for target in TARGETS if target not in without_fp8),
    )  # fmt: skip
