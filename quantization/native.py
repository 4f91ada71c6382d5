"""The parts between products, and around eight-bit products, by C++ on a CPU; see `native_kernels.cpp`.

Each function stands in for the torch path of the same name (`fused`, `primitives`, `engines`) in bfloat16 and float32.
The file is compiled on the first use, in seconds, and kept; where that cannot be done the torch path runs, and reports
say why.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from ..core.native import NativeBuildError, load
from .primitives import SCALE_FLOOR, Granularity, Number, QuantizedRows
from .primitives import quantize_rows as quantize_rows_plainly

SOURCE = Path(__file__).with_name("native_kernels.cpp")
SUFFIXES = {torch.bfloat16: "bf16", torch.float32: "f32"}

CHUNK_ROWS = 1024
CHUNK_COLUMNS = 2048
"""Of the int32 product that is scaled while it is in the cache. More rows repay what the product does to the weight."""


@functools.cache
def unavailable() -> str | None:
    """Why the kernels cannot run in this process; None if they can."""
    try:
        load(SOURCE)
    except NativeBuildError as error:
        return str(error)
    return None


def fits(x: torch.Tensor, number: Number | None = None) -> bool:
    """Whether there are kernels for this tensor and this eight-bit type."""
    return x.device.type == "cpu" and x.dtype in SUFFIXES and number in (None, "int8") and x.numel() > 0


def quantize_rows(
    x: torch.Tensor, number: Number, granularity: Granularity = "row", *, row_multiple: int = 1
) -> QuantizedRows:
    """`primitives.quantize_rows`, and that itself where there is no kernel (one scale for all, or FP8)."""
    if granularity != "row" or not fits(x, number):
        return quantize_rows_plainly(x, number, granularity, row_multiple=row_multiple)
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows = _empty_rows(x.shape[0], x.shape[1], row_multiple)
    _call("quantize_rows", x.dtype, x, x.stride(0), *x.shape, rows.values, rows.scale)
    return rows


def int_mm(
    rows: QuantizedRows,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
    gelu: bool = False,
) -> torch.Tensor:
    """INT8 product; scales, bias and where wanted GELU in one pass over each chunk of it.

    Args:
        rows: as in `reference_product`, like the next four.
        weight: int8 [outputs, channels] on the CPU.
        weight_scale: [outputs, 1] or [1, 1].
        bias: [outputs] or None.
        dtype: of the result.
        out: where to write it, [num_rows, outputs] with channels side by side.
        gelu: whether GELU in its tanh form follows, of the result in `dtype`.

    Raises:
        NotImplementedError: there is no kernel for this dtype or device.
    """
    if weight.device.type != "cpu" or dtype not in SUFFIXES:
        raise NotImplementedError(f"C++ kernels write {' and '.join(SUFFIXES.values())} on a CPU")
    reason = unavailable()
    if reason is not None:
        raise NotImplementedError(reason)
    count, outputs = rows.num_rows, weight.shape[0]
    out = torch.empty(count, outputs, dtype=dtype) if out is None else out
    wide_bias = None if bias is None else bias.float()
    product = torch.empty(min(CHUNK_ROWS, count) * min(CHUNK_COLUMNS, outputs), dtype=torch.int32)
    row_step, column_step = int(rows.scale.shape[0] > 1), int(weight_scale.shape[0] > 1)
    for left in range(0, outputs, CHUNK_COLUMNS):
        columns = slice(left, min(left + CHUNK_COLUMNS, outputs))
        width = columns.stop - left
        scale = weight_scale[columns] if column_step else weight_scale
        own_bias = None if wide_bias is None else wide_bias[columns]
        for top in range(0, count, CHUNK_ROWS):
            height = min(CHUNK_ROWS, count - top)
            part = product[: height * width].view(height, width)
            torch._int_mm(rows.values[top : top + height], weight[columns].t(), out=part)
            target = out[top : top + height, columns]
            row_scale = rows.scale[top : top + height] if row_step else rows.scale
            _call(
                "scale_products", dtype, part, width, height, width, row_scale, row_step, scale, column_step, own_bias,
                target, target.stride(0), int(gelu),
            )  # fmt: skip
    return out


def layer_norm_modulate(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    *,
    affine: bool,
    number: Number | None,
    row_multiple: int,
) -> tuple[torch.Tensor, QuantizedRows | None]:
    """As `fused.layer_norm_modulate`, for what `fits`."""
    x = x.contiguous()
    batch, length, width = x.shape
    y = torch.empty_like(x)
    rows = None if number is None else _empty_rows(batch * length, width, row_multiple)
    for index in range(batch):
        factors = [_factor(each, index) for each in (scale, shift)]
        own = slice(index * length, (index + 1) * length)
        _call(
            "layer_norm_modulate", x.dtype, x[index], length, width, *factors[0], *factors[1],
            0.0 if affine else 1.0, float(eps), y[index],
            None if rows is None else rows.values[own], None if rows is None else rows.scale[own],
        )  # fmt: skip
    return y, rows


def gelu_tanh(
    x: torch.Tensor, *, number: Number | None, row_multiple: int
) -> tuple[torch.Tensor, QuantizedRows | None]:
    """As `fused.gelu_tanh`, for what `fits`."""
    x = x.contiguous()
    flat = x.view(-1, x.shape[-1])
    y = torch.empty_like(flat)
    rows = None if number is None else _empty_rows(flat.shape[0], flat.shape[1], row_multiple)
    _call(
        "gelu_rows", x.dtype, flat, *flat.shape, y,
        None if rows is None else rows.values, None if rows is None else rows.scale,
    )  # fmt: skip
    return y.view(x.shape), rows


def rms_norm_rope(
    x: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor, heads: int
) -> torch.Tensor:
    """As `fused.rms_norm_rope`, for what `fits`."""
    x = x.contiguous()
    y = torch.empty_like(x)
    batch, length, width = x.shape
    tables = [table[0, :, 0].float().contiguous() for table in (cos, sin)]
    for index in range(batch):
        _call(
            "rms_norm_rope", x.dtype, x[index], length, heads, width // heads, weight.float().contiguous(), float(eps),
            *tables, y[index],
        )  # fmt: skip
    return y.unflatten(-1, (heads, -1))


def residual_gate(x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """As `fused.residual_gate`, for what `fits` and an update of the dtype of x."""
    x, update = x.contiguous(), update.contiguous()
    y = torch.empty_like(x)
    for index in range(x.shape[0]):
        _call("residual_gate", x.dtype, x[index], update[index], *_factor(gate, index), *x.shape[1:], y[index])
    return y


def _empty_rows(count: int, width: int, row_multiple: int) -> QuantizedRows:
    padded = count + -count % row_multiple
    values = torch.empty(padded, width, dtype=torch.int8)
    scale = torch.empty(padded, 1, dtype=torch.float32)
    values[count:], scale[count:] = 0, SCALE_FLOOR
    return QuantizedRows(values, scale, count)


def _factor(modulation: torch.Tensor, index: int) -> tuple[torch.Tensor, int]:
    """The entries of a modulation [B or 1, L or 1, D] for one batch entry, and the step from token to token."""
    entry = modulation[index if modulation.shape[0] > 1 else 0].float().contiguous()
    return entry, entry.shape[1] if entry.shape[0] > 1 else 0


def _call(name: str, dtype: torch.dtype, *arguments: Any) -> int:
    """Call an entry point: tensors become pointers, whole numbers int64, but for the last ones, which are int."""
    function = getattr(load(SOURCE), f"{name}_{SUFFIXES[dtype]}")
    function.restype = ctypes.c_int64 if name == "quantize_rows" else None
    last = len(arguments) - 1 if name == "scale_products" else len(arguments)
    converted = [_convert(each, position >= last) for position, each in enumerate(arguments)]
    result = function(*converted, ctypes.c_int(torch.get_num_threads()))
    return int(result or 0)


def _convert(argument: Any, short: bool) -> Any:
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, torch.Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    if isinstance(argument, float):
        return ctypes.c_float(argument)
    return ctypes.c_int(argument) if short else ctypes.c_int64(argument)
