"""The parts of a Wan block between its products, each in one pass over the tokens.

| part | formula |
|---|---|
| `layer_norm_modulate` | y = LayerNorm(x) (1 + scale) + shift, or LayerNorm(x) weight + bias; y also in eight bits |
| `gelu_tanh` | y = x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3)); y also in eight bits |
| `rms_norm_rope` | y = rotate(RMSNorm over all heads of x, times its weight), split into heads |
| `residual_gate` | y = x + gate update |
| `quantize` | the quantization alone, for an input that several products share |

Every function has a `_reference` in float32 with no rounding inside, a torch path that works in chunks of tokens which
stay in the cache of a CPU, a C++ kernel for CPUs (`native`; the torch path takes the types that it lacks) and a Triton
kernel. What is quantized, with one scale per row, is the rounded y, so that a
product does not depend on whether the quantization before it was fused.

Shapes: B batch, L tokens, D channels, H heads, d channels per head.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Literal

import torch
import torch.nn.functional as F

from ..core.config import ConfigError
from . import native
from .primitives import DTYPES, SCALE_FLOOR, Number, QuantizedRows, quantize_rows

Path = Literal["torch", "native", "triton"]

_CPU_CHUNK_ELEMENTS = 2**19
_TRITON_WIDTH_LIMIT = 16384
"""Widest row that a kernel holds at once; the FFN of Wan 2.2 TI2V has 14,336."""


@cache
def available_path(device_type: str, width: int) -> tuple[Path, str]:
    """Which path runs on a device for rows of this width, and why."""
    if device_type == "cpu":
        reason = native.unavailable()
        return ("native", "C++ kernels on the cpu") if reason is None else ("torch", f"no C++ kernels: {reason}")
    if device_type != "cuda":
        return "torch", f"no kernels for {device_type}"
    if width > _TRITON_WIDTH_LIMIT:
        return "torch", f"rows of {width} are wider than the {_TRITON_WIDTH_LIMIT} that a kernel holds"
    try:
        from . import triton_kernels  # noqa: F401
    except ImportError as error:
        return "torch", f"Triton cannot be imported: {error}"
    return "triton", "a CUDA device with Triton"


@cache
def kernel_writes(number: Number, device: torch.device) -> bool:
    """Whether the kernels for a device can write this number: Triton has e4m3 from sm_89 on, and INT8 everywhere."""
    if number == "int8" or device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 9)


def layer_norm_modulate(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    *,
    affine: bool = False,
    number: Number | None = None,
    row_multiple: int = 1,
    path: Path = "torch",
) -> tuple[torch.Tensor, QuantizedRows | None]:
    """LayerNorm over channels, modulated; optionally also quantized by row.

    Args:
        x: [B, L, D].
        scale: float32 [B or 1, L or 1, D]; with `affine` the weight itself, else what is added to one.
        shift: like `scale`.
        eps: of the norm.
        affine: whether `scale` is a weight.
        number: eight-bit type of the quantized form, or None for none.
        row_multiple: as in `quantize_rows`.
        path: "torch", "native" or "triton".

    Returns:
        y [B, L, D] in the dtype of x, and its rows [B L, D] in eight bits or None.
    """
    if path == "triton":
        from .triton_kernels import layer_norm_modulate as kernel

        return kernel(x, scale, shift, eps, affine=affine, number=number, row_multiple=row_multiple)
    if path == "native" and native.fits(x, number):
        return native.layer_norm_modulate(x, scale, shift, eps, affine=affine, number=number, row_multiple=row_multiple)
    y = torch.empty_like(x)
    collector = _RowCollector(x.shape[0] * x.shape[1], x.shape[2], number, row_multiple, x.device)
    for batch, tokens in _chunks(x):
        part = F.layer_norm(x[batch, tokens].float(), (x.shape[-1],), eps=eps)
        factor, offset = _part(scale, batch, tokens), _part(shift, batch, tokens)
        part = part * (factor if affine else 1 + factor) + offset
        y[batch, tokens] = part
        collector.add(batch * x.shape[1] + tokens.start, y[batch, tokens])
    return y, collector.rows


def layer_norm_modulate_reference(
    x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float, *, affine: bool = False
) -> torch.Tensor:
    """The formula in float32; arguments of `layer_norm_modulate`."""
    x = x.float()
    centred = x - x.mean(-1, keepdim=True)
    normed = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + eps)
    return normed * (scale.float() if affine else 1 + scale.float()) + shift.float()


def gelu_tanh(
    x: torch.Tensor, *, number: Number | None = None, row_multiple: int = 1, path: Path = "torch"
) -> tuple[torch.Tensor, QuantizedRows | None]:
    """GELU in its tanh form of x [B, L, D]; returns as `layer_norm_modulate`."""
    if path == "triton":
        from .triton_kernels import gelu_tanh as kernel

        return kernel(x, number=number, row_multiple=row_multiple)
    if path == "native" and native.fits(x, number):
        return native.gelu_tanh(x, number=number, row_multiple=row_multiple)
    y = torch.empty_like(x)
    collector = _RowCollector(x.shape[0] * x.shape[1], x.shape[2], number, row_multiple, x.device)
    for batch, tokens in _chunks(x):
        y[batch, tokens] = F.gelu(x[batch, tokens], approximate="tanh")
        collector.add(batch * x.shape[1] + tokens.start, y[batch, tokens])
    return y, collector.rows


def gelu_tanh_reference(x: torch.Tensor) -> torch.Tensor:
    """The formula in float32; x of any shape."""
    x = x.float()
    inner = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x.pow(3))
    return x * torch.sigmoid(2 * inner)


def rms_norm_rope(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    heads: int,
    *,
    path: Path = "torch",
) -> torch.Tensor:
    """RMSNorm over all channels, split into heads, rotary position embedding.

    Args:
        x: [B, L, H d], a projection.
        weight: [H d] of the norm.
        eps: of the norm.
        cos: [1, L, 1, d] with every angle twice, as diffusers keeps them; pairs are channels (2i, 2i + 1).
        sin: like `cos`.
        heads: H.
        path: "torch", "native" or "triton".

    Returns:
        [B, L, H, d] in the dtype of x.
    """
    if path == "triton":
        from .triton_kernels import rms_norm_rope as kernel

        return kernel(x, weight, eps, cos, sin, heads)
    if path == "native" and native.fits(x):
        return native.rms_norm_rope(x, weight, eps, cos, sin, heads)
    y = torch.empty_like(x)
    for batch, tokens in _chunks(x):
        normed = F.rms_norm(x[batch, tokens], (x.shape[-1],), weight, eps)
        pairs = normed.unflatten(-1, (heads, -1, 2))
        even, odd = pairs[..., 0], pairs[..., 1]
        c, s = cos[0, tokens, :, 0::2], sin[0, tokens, :, 1::2]
        target = y[batch, tokens].unflatten(-1, (heads, -1, 2))
        target[..., 0] = even * c - odd * s
        target[..., 1] = even * s + odd * c
    return y.unflatten(-1, (heads, -1))


def rms_norm_rope_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor, heads: int
) -> torch.Tensor:
    """The formula in float32; arguments of `rms_norm_rope`."""
    x = x.float()
    normed = x / torch.sqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
    pairs = normed.unflatten(-1, (heads, -1, 2))
    even, odd = pairs.unbind(-1)
    c, s = cos[..., 0::2].float(), sin[..., 1::2].float()
    return torch.stack((even * c - odd * s, even * s + odd * c), dim=-1).flatten(-2)


def residual_gate(x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor, *, path: Path = "torch") -> torch.Tensor:
    """x + update * gate in float32, rounded once.

    Args:
        x: [B, L, D].
        update: [B, L, D].
        gate: float32 [B or 1, L or 1, D].
        path: "torch", "native" or "triton".
    """
    if path == "triton":
        from .triton_kernels import residual_gate as kernel

        return kernel(x, update, gate)
    if path == "native" and native.fits(x) and update.dtype == x.dtype:
        return native.residual_gate(x, update, gate)
    y = torch.empty_like(x)
    for batch, tokens in _chunks(x):
        y[batch, tokens] = x[batch, tokens].float() + update[batch, tokens].float() * _part(gate, batch, tokens)
    return y


def residual_gate_reference(x: torch.Tensor, update: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """The formula in float32; arguments of `residual_gate`."""
    return x.float() + update.float() * gate.float()


def quantize(x: torch.Tensor, number: Number, *, row_multiple: int = 1, path: Path = "torch") -> QuantizedRows:
    """Rows of x [..., D] in eight bits; `quantize_rows` in float32 is the reference."""
    flat = x.reshape(-1, x.shape[-1])
    if path == "triton":
        from .triton_kernels import quantize as kernel

        return kernel(flat, number, row_multiple=row_multiple)
    if path == "native":
        return native.quantize_rows(flat, number, row_multiple=row_multiple)
    return quantize_rows(flat, number, row_multiple=row_multiple)


def check_modulation(x: torch.Tensor, modulation: torch.Tensor, name: str) -> None:
    """Raise ConfigError unless `modulation` broadcasts over x [B, L, D] as these functions expect."""
    fits = modulation.ndim == 3 and all(m in (1, n) for m, n in zip(modulation.shape, x.shape, strict=True))
    if not fits or modulation.shape[2] != x.shape[2]:
        raise ConfigError(
            f"{name}: got shape {tuple(modulation.shape)}; must be [B or 1, L or 1, D] for x {tuple(x.shape)}"
        )


class _RowCollector:
    """Quantized rows of a tensor that is made chunk by chunk."""

    def __init__(self, count: int, width: int, number: Number | None, row_multiple: int, device: torch.device) -> None:
        self.rows: QuantizedRows | None = None
        self.number = number
        if number is None:
            return
        padded = count + -count % row_multiple
        values = torch.empty(padded, width, dtype=torch.int8, device=device)
        scale = torch.empty(padded, 1, dtype=torch.float32, device=device)
        values[count:], scale[count:] = 0, SCALE_FLOOR
        self.rows = QuantizedRows(values.view(DTYPES[number]), scale, count)

    def add(self, start: int, part: torch.Tensor) -> None:
        """Quantize `part` [rows, width] into the rows from `start` on."""
        if self.rows is None or self.number is None:
            return
        made = quantize_rows(part, self.number)
        stop = start + part.shape[0]
        # As bytes: copies between eight-bit floats are not implemented everywhere.
        self.rows.values.view(torch.int8)[start:stop] = made.values.view(torch.int8)
        self.rows.scale[start:stop] = made.scale


def _chunks(x: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """Batch index and run of tokens of each chunk of x [B, L, D]; one chunk per batch entry on an accelerator."""
    batch, length, width = x.shape
    step = max(_CPU_CHUNK_ELEMENTS // max(width, 1), 1) if x.device.type == "cpu" else max(length, 1)
    for index in range(batch):
        for start in range(0, length, step):
            yield index, slice(start, min(start + step, length))


def _part(modulation: torch.Tensor, batch: int, tokens: slice) -> torch.Tensor:
    """The entries of a modulation [B or 1, L or 1, D] for a chunk."""
    rows = modulation[batch if modulation.shape[0] > 1 else 0]
    return rows[tokens] if rows.shape[0] > 1 else rows
