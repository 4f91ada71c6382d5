"""The ten products of a Wan block in eight bits against bfloat16 and torchao, in turns, in one run on one machine.

Seconds include the quantization of the activations: a layer is called as a pipeline calls it, each on its own, so that
what fused blocks save on top (one quantization for queries, keys and values; none apart from norm and GELU) is not in
them. The share of the GEMM peak refers to products of the plain dtype, measured in the same run; eight-bit units can go
beyond it.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..core.config import ConfigError, require
from ..core.numerics import relative_error, sqnr_db
from ..quantization.config import QuantizationConfig
from ..quantization.convert import quantize_
from ..quantization.linear import QuantizedLinear
from .timing import gemm_peak, machine, measure

BASELINE = "plain"
_LAYER = "layer"


@dataclasses.dataclass(frozen=True)
class Product:
    """A linear layer of a block.

    Attributes:
        name: what it is in the block.
        count: how many of this size a block has.
        rows: tokens.
        inputs: channels in.
        outputs: channels out.
    """

    name: str
    count: int
    rows: int
    inputs: int
    outputs: int

    @property
    def operations(self) -> int:
        """Multiplications and additions of one of them."""
        return 2 * self.rows * self.inputs * self.outputs


@dataclasses.dataclass(frozen=True)
class BlockShape:
    """Sizes of a Wan block: channels, channels inside the feed-forward, tokens of video and of text."""

    width: int
    ffn: int
    tokens: int
    text_tokens: int = 512

    def products(self) -> tuple[Product, ...]:
        """The ten products, those of one size together."""
        return (
            Product("attention", 6, self.tokens, self.width, self.width),
            Product("text keys and values", 2, self.text_tokens, self.width, self.width),
            Product("ffn up", 1, self.tokens, self.width, self.ffn),
            Product("ffn down", 1, self.tokens, self.ffn, self.width),
        )


SHAPES = {
    "wan2.1-1.3b-480p": BlockShape(1536, 8960, 32760),
    "wan2.1-14b-720p": BlockShape(5120, 13824, 75600),
    "tiny": BlockShape(192, 512, 720, 32),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One contender at one product.

    Attributes:
        product: which.
        contender: "plain" (torch's linear in the same dtype), a mode of ours, or "torchao" with a mode.
        seconds: median of one call.
        share_of_peak: operations per second over the GEMM peak.
        relative_error: of the result against float32.
        sqnr_db: the same in dB.
    """

    product: Product
    contender: str
    seconds: float
    share_of_peak: float
    relative_error: float
    sqnr_db: float


@dataclasses.dataclass(frozen=True)
class QuantizationBenchmark:
    """What `bench_quantization` measured.

    Attributes:
        shape: name of the shape.
        machine: what it was measured on.
        dtype: of the model.
        gemm_peak: operations per second of plain products.
        engines: what multiplied, by contender of ours.
        rows: every contender at every product.
        notes: contenders that were left out, and why.
    """

    shape: str
    machine: dict[str, Any]
    dtype: str
    gemm_peak: float
    engines: dict[str, str]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]

    def seconds(self, contender: str) -> float:
        """Of the ten products of a block together."""
        return sum(row.product.count * row.seconds for row in self.rows if row.contender == contender)

    def ratios(self) -> dict[str, float]:
        """How many times as fast as plain each contender is over the ten products."""
        names = dict.fromkeys(row.contender for row in self.rows)
        return {name: self.seconds(BASELINE) / self.seconds(name) for name in names if name != BASELINE}

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        names = dict.fromkeys(row.contender for row in self.rows)
        return {
            "shape": self.shape,
            "machine": self.machine,
            "dtype": self.dtype,
            "gemm_peak": self.gemm_peak,
            "engines": dict(self.engines),
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "seconds_per_block": {name: self.seconds(name) for name in names},
            "ratios": self.ratios(),
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        lines = [f"{self.shape}, {self.dtype}, GEMM peak {self.gemm_peak / 1e9:.0f} GFLOP/s"]
        for row in self.rows:
            product = row.product
            size = f"{product.count} x [{product.rows} x {product.inputs}] -> {product.outputs}"
            lines.append(
                f"{product.name:22} {size:30} {row.contender:18} {row.seconds * 1e3:10.2f} ms "
                f"{row.share_of_peak:6.0%} of peak  error {row.relative_error:.2%} ({row.sqnr_db:.1f} dB)"
            )
        lines += [f"ten products, {name}: {ratio:.2f} times as fast as plain" for name, ratio in self.ratios().items()]
        lines += [f"{name}: {engine}" for name, engine in self.engines.items()]
        return "\n".join([*lines, *self.notes])


def bench_quantization(
    shape: str | BlockShape = "wan2.1-1.3b-480p",
    *,
    modes: Sequence[str] = ("int8", "fp8"),
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    tokens: int | None = None,
    repeats: int = 3,
    compare_torchao: bool = True,
) -> QuantizationBenchmark:
    """Measure the ten products of a block with random weights and inputs.

    Args:
        shape: a name of `SHAPES`, or sizes.
        modes: modes of `QuantizationConfig` to measure.
        device: where.
        dtype: of the model.
        tokens: video tokens instead of those of the shape, for a quick look.
        repeats: rounds; in each one every contender has its turn.
        compare_torchao: whether torchao's dynamic INT8 is measured as well, where it is installed.

    Raises:
        ConfigError: an unknown shape or mode, or an engine that does not work on the device.
    """
    require(isinstance(shape, BlockShape) or shape in SHAPES, "shape", shape, f"one of {', '.join(SHAPES)}")
    require(repeats >= 1, "repeats", repeats, "at least 1")
    require(tokens is None or tokens >= 1, "tokens", tokens, "at least 1")
    require(bool(modes) and "none" not in modes, "modes", tuple(modes), "modes that quantize")
    sizes = shape if isinstance(shape, BlockShape) else SHAPES[shape]
    sizes = sizes if tokens is None else dataclasses.replace(sizes, tokens=tokens)
    configs = {mode: _config(mode) for mode in modes}
    notes: list[str] = []
    if compare_torchao and importlib.util.find_spec("torchao") is None:
        notes.append("torchao is not installed: not compared")
    elif compare_torchao:
        configs["torchao int8"] = _config("int8", engine="torchao")
    peak = gemm_peak(device, dtype)
    engines: dict[str, str] = {}
    rows: list[Row] = []
    for product in sizes.products():
        rows += _measure(product, configs, engines, device, dtype, repeats, peak)
    name = shape if isinstance(shape, str) else "custom"
    text = str(dtype).removeprefix("torch.")
    return QuantizationBenchmark(name, machine(device), text, peak, engines, tuple(rows), tuple(notes))


def _config(mode: str, **settings: Any) -> QuantizationConfig:
    return QuantizationConfig(mode=mode, include=(_LAYER,), exclude=(), originals="drop", **settings)  # type: ignore[arg-type]


@torch.no_grad()
def _measure(
    product: Product,
    configs: dict[str, QuantizationConfig],
    engines: dict[str, str],
    device: str,
    dtype: torch.dtype,
    repeats: int,
    peak: float,
) -> Iterator[Row]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(product.outputs, product.inputs, generator=generator) * product.inputs**-0.5
    bias = torch.randn(product.outputs, generator=generator)
    x = torch.randn(product.rows, product.inputs, generator=generator).to(device, dtype)[None]
    calls: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {BASELINE: _linear(weight, bias, device, dtype)}
    for name, config in configs.items():
        holder = nn.ModuleDict({_LAYER: _linear(weight, bias, device, dtype)})
        quantize_(holder, config)
        layer = holder[_LAYER]
        calls[name] = layer
        if isinstance(layer, QuantizedLinear) and not layer.weight_only:
            engines[name] = str(layer.engine_on(x.device, dtype))
    # A part of the rows shows the error as well as all of them.
    part = x[:, :256]
    exact = torch.nn.functional.linear(part.float(), weight.to(device, dtype).float(), bias.to(device, dtype).float())
    errors = {name: (relative_error(call(part), exact), sqnr_db(call(part), exact)) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(repeats):
        for name, call in calls.items():
            timing = measure(lambda call=call: call(x), device, repeats=1, warm_up=1 if turn == 0 else 0)  # type: ignore[misc]
            seconds[name].append(timing.median)
    for name in calls:
        median = statistics.median(seconds[name])
        if not median > 0:
            raise ConfigError(f"shape: got {product}; must be large enough to be timed")
        yield Row(product, name, median, product.operations / median / peak, *errors[name])


def _linear(weight: torch.Tensor, bias: torch.Tensor, device: str, dtype: torch.dtype) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    layer.weight, layer.bias = (nn.Parameter(t.to(device, dtype), requires_grad=False) for t in (weight, bias))
    return layer
