"""Eight-bit numbers and back: scales in float32, zeros stay zeros, nothing overflows, NaN and infinity stay visible.

    scale = max(amax / limit, floor)        values = cast(clamp(x / scale, -limit, limit))        x ~ values * scale

with limit 448 for FP8 (e4m3) and 127 for INT8, and amax over a row or a whole tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Number = Literal["fp8", "int8"]
Granularity = Literal["row", "tensor"]

DTYPES: dict[str, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
LIMITS: dict[str, float] = {"fp8": 448.0, "int8": 127.0}
_WEIGHT_CHUNK_ELEMENTS = 2**18
"""Numbers of a weight that are quantized at a time: big intermediate results would leave holes in the heap."""
SCALE_FLOOR = 1e-12
"""Smallest scale: rows of zeros divide by it and stay zero."""


@dataclass(frozen=True)
class QuantizedRows:
    """A matrix in eight bits.

    Attributes:
        values: [rows, channels] float8_e4m3fn or int8; rows beyond `num_rows` are zeros that some engines ask for.
        scale: float32 [rows, 1], or [1, 1] for one scale of the whole matrix.
        num_rows: rows that count.
    """

    values: torch.Tensor
    scale: torch.Tensor
    num_rows: int

    def dequantize(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """values * scale without the padding, computed in float32."""
        return (self.values.float() * self.scale)[: self.num_rows].to(dtype)

    def narrow(self, start: int, stop: int) -> QuantizedRows:
        """Rows start..stop as a view."""
        scale = self.scale if self.scale.shape[0] == 1 else self.scale[start:stop]
        return QuantizedRows(self.values[start:stop], scale, stop - start)


def scales(amax: torch.Tensor, number: Number) -> torch.Tensor:
    """float32 max(amax / limit, floor); NaN and infinity pass through, so that a broken row stays broken."""
    return (amax.float() / LIMITS[number]).clamp(min=SCALE_FLOOR)


def quantize_rows(
    x: torch.Tensor, number: Number, granularity: Granularity = "row", *, row_multiple: int = 1
) -> QuantizedRows:
    """Quantize a matrix with one scale per row, or one for all.

    Args:
        x: [rows, channels], floating point.
        number: "fp8" or "int8".
        granularity: "row" or "tensor".
        row_multiple: the number of rows is filled up with zeros to a multiple of this.

    Returns:
        Values and scales. A row with NaN or infinity gets a scale that is not finite, and so has its product.
    """
    rows, channels = x.shape
    x = x.float()
    amax = x.abs().amax(dim=-1, keepdim=True) if channels else x.new_zeros(rows, 1)
    if granularity == "tensor":
        amax = amax.amax(dim=0, keepdim=True) if rows else amax.new_zeros(1, 1)
    scale = scales(amax, number)
    values = to_grid(x / scale, number)
    padding = -rows % row_multiple
    if padding:
        # As bytes: eight-bit floats cannot be joined everywhere.
        bits = values.view(torch.int8)
        values = torch.cat([bits, bits.new_zeros(padding, channels)]).view(DTYPES[number])
        if granularity == "row":
            scale = torch.cat([scale, scale.new_full((padding, 1), SCALE_FLOOR)])
    return QuantizedRows(values, scale, rows)


def quantize_weight(
    weight: torch.Tensor, number: Number, granularity: Granularity = "row"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales of a weight [outputs, inputs], equal to those of `quantize_rows`.

    Works in runs of rows, so that a big layer needs only little float32 memory beside itself.
    """
    outputs, inputs = weight.shape
    values = torch.empty(outputs, inputs, dtype=DTYPES[number], device=weight.device)
    amax = torch.empty(outputs, 1, dtype=torch.float32, device=weight.device)
    step = max(_WEIGHT_CHUNK_ELEMENTS // max(inputs, 1), 1)
    parts = [slice(start, start + step) for start in range(0, outputs, step)]
    for part in parts:
        amax[part] = weight[part].abs().amax(dim=-1, keepdim=True).float()
    scale = scales(amax.amax(dim=0, keepdim=True) if granularity == "tensor" else amax, number)
    for part in parts:
        divided = weight[part].float() / (scale if granularity == "tensor" else scale[part])
        values.view(torch.int8)[part] = to_grid(divided, number).view(torch.int8)
    return values, scale


def to_grid(scaled: torch.Tensor, number: Number) -> torch.Tensor:
    """Clamp and cast float32 numbers, already divided by their scale; rounds to nearest, ties to even."""
    limit = LIMITS[number]
    if number == "fp8":
        return scaled.clamp(-limit, limit).to(DTYPES[number])
    # A cast of NaN to an integer is undefined; the scale of its row carries the NaN on.
    return scaled.nan_to_num(0.0, limit, -limit).round_().clamp_(-limit, limit).to(DTYPES[number])


def fake_quantize(x: torch.Tensor, number: Number, granularity: Granularity = "row") -> torch.Tensor:
    """The nearest point of the grid to each number of x [..., channels]; same shape and dtype."""
    flat = x.reshape(-1, x.shape[-1])
    return quantize_rows(flat, number, granularity).dequantize(x.dtype).reshape(x.shape)


def reference_product(
    rows: QuantizedRows, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """What every engine computes: (values @ weight.T) * scale * weight_scale.T + bias, in float32 and then rounded.

    Args:
        rows: activations.
        weight: [outputs, channels], the same eight-bit type.
        weight_scale: float32 [outputs, 1] or [1, 1].
        bias: [outputs] or None.
        dtype: of the result.

    Returns:
        [num_rows, outputs].
    """
    product = rows.values[: rows.num_rows].float() @ weight.float().t()
    scale = rows.scale if rows.scale.shape[0] == 1 else rows.scale[: rows.num_rows]
    product = product * scale * weight_scale.t()
    return (product if bias is None else product + bias.float()).to(dtype)
