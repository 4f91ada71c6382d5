"""What multiplies eight-bit matrices, and the choice among them by a tiny product that is checked.

| engine | product | epilogue |
|---|---|---|
| `scaled_mm`, scales inside | FP8 on tensor cores, both scales applied by the library | none |
| `scaled_mm`, scales after | FP8 with scale one, for devices without row scales | scales and bias in float32 |
| `int_mm`, native | INT8 into int32 on a CPU | scales and bias in float32, in one pass of C++ over each chunk |
| `int_mm` | INT8 into int32 | scales and bias in float32, in chunks that stay in the cache on a CPU |
| `reference` | float32 emulation, on any device | in float32 |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from ..core.config import ConfigError
from ..core.numerics import relative_error
from . import native
from .primitives import Granularity, Number, QuantizedRows, quantize_rows, reference_product

Multiply = Callable[..., torch.Tensor]
Quantize = Callable[..., QuantizedRows]

CPU_CHUNK_ROWS = 1024
_CPU_CHUNK_ELEMENTS = 2**21
"""Numbers in the accumulator of one chunk: it is read four times by the epilogue, out of the cache."""

ALIGNMENT = 16
"""Inputs and outputs of a layer must be multiples of this: matrix units ask for it (INT8 on CUDA for 8)."""

_PROBE_TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-3}


@dataclass(frozen=True)
class Engine:
    """A way to multiply.

    Attributes:
        name: as in the configuration.
        variant: how, in words.
        reason: why it was chosen.
        multiply: as `reference_product`.
        row_multiple: activations are filled up with rows of zeros to a multiple of this.
        alignment: inputs and outputs of a layer must be multiples of this.
        quantize: what brings activations to eight bits, as `quantize_rows`.
        native: whether that is the C++ path, whose `multiply` takes the keywords of `native.int_mm`.
    """

    name: str
    variant: str
    reason: str
    multiply: Multiply
    row_multiple: int
    alignment: int
    quantize: Quantize = quantize_rows
    native: bool = False

    def multiply_into(
        self,
        out: torch.Tensor,
        rows: QuantizedRows,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> None:
        """Write the product into `out` [num_rows, outputs]."""
        if self.native:
            self.multiply(rows, weight, weight_scale, bias, out.dtype, out=out)
        else:
            out.copy_(self.multiply(rows, weight, weight_scale, bias, out.dtype))

    def __str__(self) -> str:
        return f"{self.name} ({self.variant}): {self.reason}"


@dataclass(frozen=True)
class _Candidate:
    name: str
    variant: str
    multiply: Multiply
    numbers: tuple[str, ...]
    row_multiple_cuda: int = 1
    alignment: int = ALIGNMENT
    native: bool = False


def _plain_scaled_mm(
    rows: QuantizedRows,
    weight: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    # The fast accumulation of Hopper keeps some 14 bits: right for a result of 8, not for float32.
    fast = rows.values.device.type == "cuda" and dtype == torch.bfloat16
    public = getattr(F, "scaled_mm", None)
    if public is None:
        return torch._scaled_mm(
            rows.values, weight.t(), scale_a, scale_b, bias=bias, out_dtype=dtype, use_fast_accum=fast
        )
    kinds = F.ScalingType
    recipe = kinds.RowWise if scale_a.ndim == 2 else kinds.TensorWise
    out: torch.Tensor = public(
        rows.values, weight.t(), scale_a, recipe, scale_b, recipe, bias=bias, output_dtype=dtype, use_fast_accum=fast
    )
    return out


def scaled_mm_inside(
    rows: QuantizedRows, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """FP8 product with the scales given to the library; arguments of `reference_product`."""
    if rows.scale.numel() == 1 and weight_scale.numel() == 1 and rows.values.shape[0] != 1:
        scale_a, scale_b = rows.scale.reshape(()), weight_scale.reshape(())
    else:
        scale_a = rows.scale.expand(rows.values.shape[0], 1).contiguous()
        scale_b = weight_scale.expand(weight.shape[0], 1).t().contiguous()
    # Libraries take a bias only in the type of a 16-bit result.
    inner = bias.to(dtype) if bias is not None and dtype != torch.float32 else None
    out = _plain_scaled_mm(rows, weight, scale_a, scale_b, inner, dtype)[: rows.num_rows]
    return out if bias is None or inner is not None else out + bias.to(dtype)


def scaled_mm_after(
    rows: QuantizedRows, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """FP8 product with scale one, then rows and columns scaled in float32; arguments of `reference_product`."""
    one = torch.ones((), device=weight.device)
    product = _plain_scaled_mm(rows, weight, one, one, None, torch.float32)[: rows.num_rows]
    product = product.mul_(rows.scale[: rows.num_rows] if rows.scale.shape[0] > 1 else rows.scale)
    product = product.mul_(weight_scale.t())
    return (product if bias is None else product.add_(bias.float())).to(dtype)


def int_mm(
    rows: QuantizedRows, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor:
    """INT8 product, then rows and columns scaled in float32; arguments of `reference_product`."""
    count, outputs = rows.num_rows, weight.shape[0]
    on_cpu = weight.device.type == "cpu"
    out = torch.empty(count, outputs, dtype=dtype, device=weight.device)
    row_step = CPU_CHUNK_ROWS if on_cpu else rows.values.shape[0]
    column_step = max(_CPU_CHUNK_ELEMENTS // row_step // ALIGNMENT * ALIGNMENT, ALIGNMENT) if on_cpu else outputs
    float_bias = None if bias is None else bias.float()
    for top in range(0, count, row_step):
        part = rows.narrow(top, min(top + row_step, rows.values.shape[0]))
        valid = min(top + row_step, count) - top
        for left in range(0, outputs, column_step):
            columns = slice(left, left + column_step)
            product = torch._int_mm(part.values, weight[columns].t())[:valid].float()
            product.mul_(part.scale if part.scale.shape[0] == 1 else part.scale[:valid])
            column_scale = (weight_scale if weight_scale.shape[0] == 1 else weight_scale[columns]).t()
            if float_bias is None:
                product.mul_(column_scale)
            else:
                torch.addcmul(float_bias[columns], product, column_scale, out=product)
            out[top : top + valid, columns] = product
    return out


_CANDIDATES = (
    # Row-wise FP8 read past the end for row counts that 256 does not divide (pytorch#133334).
    _Candidate("scaled_mm", "scales inside", scaled_mm_inside, ("fp8",), row_multiple_cuda=256),
    _Candidate("scaled_mm", "scales after", scaled_mm_after, ("fp8",), row_multiple_cuda=16),
    _Candidate("int_mm", "int32, then scales, native", native.int_mm, ("int8",), native=True),
    _Candidate("int_mm", "int32, then scales", int_mm, ("int8",), row_multiple_cuda=32),
    _Candidate("reference", "float32 emulation", reference_product, ("fp8", "int8"), alignment=1),
)


@cache
def choose_engine(
    engine: str, number: Number, granularity: Granularity, device: torch.device, dtype: torch.dtype
) -> Engine:
    """The first engine that multiplies right on this device; each is tried once with a tiny product.

    Args:
        engine: "auto", or the name of the one to use.
        number: "fp8" or "int8".
        granularity: of the scales.
        device: where the product runs.
        dtype: of its result.

    Raises:
        ConfigError: the named engine does not work here; the message has its error and those that do work.
    """
    failures: list[str] = []
    for candidate in _CANDIDATES:
        if number not in candidate.numbers or engine not in ("auto", candidate.name):
            continue
        problem = _probe(candidate, number, granularity, device, dtype)
        if problem is None:
            reason = f"a tiny {number} product on {device.type} gave the right {_name(dtype)}"
            if failures:
                reason += f"; before it {'; '.join(failures)}"
            multiple = candidate.row_multiple_cuda if device.type == "cuda" else 1
            return Engine(
                candidate.name, candidate.variant, reason, candidate.multiply, multiple, candidate.alignment,
                native.quantize_rows if candidate.native else quantize_rows, candidate.native,
            )  # fmt: skip
        failures.append(f"{candidate.name} ({candidate.variant}) {problem}")
    able = [
        candidate.name
        for candidate in _CANDIDATES
        if number in candidate.numbers and _probe(candidate, number, granularity, device, dtype) is None
    ]
    raise ConfigError(
        f"engine: got {engine!r}; it does not work on {device} with {_name(dtype)}: {'; '.join(failures)}. "
        f"Engines that do: {', '.join(dict.fromkeys(able)) or 'none'}"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _probe(
    candidate: _Candidate, number: Number, granularity: Granularity, device: torch.device, dtype: torch.dtype
) -> str | None:
    """What is wrong with an engine, in words; None if its product is right."""
    generator = torch.Generator().manual_seed(0)
    activations = torch.randn(20, 32, generator=generator).to(device)
    matrix = torch.randn(48, 32, generator=generator).to(device)
    bias = torch.randn(48, generator=generator).to(device, dtype)
    try:
        multiple = candidate.row_multiple_cuda if device.type == "cuda" else 1
        quantize = native.quantize_rows if candidate.native else quantize_rows
        rows = quantize(activations, number, granularity, row_multiple=multiple)
        weight = quantize_rows(matrix, number, granularity)
        actual = candidate.multiply(rows, weight.values, weight.scale, bias, dtype)
        expected = reference_product(rows, weight.values, weight.scale, bias, torch.float32)
    except (RuntimeError, NotImplementedError, ValueError, TypeError) as error:
        lines = str(error).strip().splitlines()
        return f"failed: {type(error).__name__} {lines[0][:200] if lines else ''}".strip()
    error_size = relative_error(actual, expected)
    if not error_size <= _PROBE_TOLERANCE.get(dtype, 1e-2):
        return f"gave a wrong product (relative error {error_size:.2g})"
    return None
