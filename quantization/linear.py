"""Linear layers in eight bits: what stands in for a `torch.nn.Linear` while a model is quantized."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..core.config import ConfigError
from .config import QuantizationConfig
from .engines import CPU_CHUNK_ROWS, Engine, choose_engine
from .primitives import DTYPES, QuantizedRows, quantize_weight


class StepControl:
    """Tells the layers of one transformer whether the coming forward pass uses the original layers."""

    def __init__(self, high_precision_steps: Iterable[int] = ()) -> None:
        self.high_precision_steps = frozenset(high_precision_steps)
        self.step: int | None = None

    @property
    def high_precision(self) -> bool:
        """Whether this is one of the steps that run with the original layers."""
        if not self.high_precision_steps:
            return False
        if self.step is None:
            raise RuntimeError(
                "high_precision_steps is set, but not which step this is; call set_step(index) before each step"
            )
        return self.step in self.high_precision_steps


class SharedRows:
    """The quantized form of one input that several layers read: queries, keys and values of a block.

    It belongs to the tensor it was made of: another tensor, or the same one after a change in place, is quantized anew,
    and it is freed together with that tensor. Tensors of inference mode do not count their changes, so that nothing is
    shared there.
    """

    def __init__(self) -> None:
        self._source: weakref.ref[torch.Tensor] | None = None
        self._version: int | None = None
        self._rows: QuantizedRows | None = None

    def put(self, source: torch.Tensor, rows: QuantizedRows) -> None:
        """Note that `rows` is the quantized form of `source`."""
        if source.is_inference():
            return
        self._source = weakref.ref(source, self._forget)
        self._version = source._version
        self._rows = rows

    def get(self, source: torch.Tensor, make: Callable[[], QuantizedRows]) -> QuantizedRows:
        """The rows of `source`, made by `make` unless they are there."""
        # The compiler finds the repetition itself, and cannot follow a weak reference.
        if torch.compiler.is_compiling() or source.is_inference():
            return make()
        held = self._source() if self._source is not None else None
        if held is source and self._version == source._version and self._rows is not None:
            return self._rows
        rows = make()
        self.put(source, rows)
        return rows

    def _forget(self, reference: weakref.ref[torch.Tensor]) -> None:
        if self._source is reference:
            self._source = self._rows = None


class ReplacedLinear(nn.Module):
    """Stands in for a Linear; runs the original in the steps that ask for it."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.control = StepControl()
        self.layer_name = ""
        self._original: tuple[nn.Linear, ...] = ()

    def hold_original(self, original: nn.Linear) -> None:
        """Keep a layer to run in high-precision steps; in a tuple, so that it is no submodule and is not saved."""
        self._original = (original,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features] in the dtype of x.

        Raises:
            NotImplementedError: a gradient is asked for; eight-bit products have none (see `fake_quantize_`).
        """
        if self.control.high_precision:
            (original,) = self._original
            if original.weight.device != x.device:
                original.to(x.device)
            out: torch.Tensor = original(x)
            return out
        if x.requires_grad and torch.is_grad_enabled():
            raise NotImplementedError(
                f"{self.layer_name or 'layer'}: a quantized layer has no gradient; train with fake_quantize_ instead"
            )
        return self.low_precision(x)

    def low_precision(self, x: torch.Tensor) -> torch.Tensor:
        """The product in low precision; x and result as in `forward`."""
        raise NotImplementedError


class QuantizedLinear(ReplacedLinear):
    """A linear layer with eight-bit weights, and eight-bit activations unless it is weight-only.

    State: `weight` [out, in] float8_e4m3fn or int8, `weight_scale` float32 [out, 1] or [1, 1], `bias` [out] or none,
    and with hot channels `hot_index` int64 [hot] and `hot_weight` [out, hot]; all plain buffers.

    Args:
        in_features: width of the input.
        out_features: width of the output.
        config: mode, engine and granularity.
        bias: whether there is one.
        hot: number of hot channels.
        dtype: of bias and hot weights.
        device: "meta" for a layer that is filled later.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    bias: torch.Tensor | None
    hot_index: torch.Tensor | None
    hot_weight: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        config: QuantizationConfig,
        *,
        bias: bool,
        hot: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        self.number, self.granularity = config.number, config.granularity
        self.engine, self.weight_only = config.engine, config.weight_only
        self.shared: SharedRows | None = None
        self.model_dtype = dtype
        scale_rows = out_features if self.granularity == "row" else 1
        weight = torch.empty(out_features, in_features, dtype=DTYPES[self.number], device=device)
        self.register_buffer("weight", weight)
        self.register_buffer("weight_scale", torch.empty(scale_rows, 1, dtype=torch.float32, device=device))
        self.register_buffer("bias", torch.empty(out_features, dtype=dtype, device=device) if bias else None)
        self.register_buffer("hot_index", torch.empty(hot, dtype=torch.int64, device=device) if hot else None)
        hot_weight = torch.empty(out_features, hot, dtype=dtype, device=device) if hot else None
        self.register_buffer("hot_weight", hot_weight)
        self.eval()

    @classmethod
    @torch.no_grad()
    def from_linear(
        cls, linear: nn.Linear, config: QuantizationConfig, *, hot_index: torch.Tensor | None = None, name: str = ""
    ) -> QuantizedLinear:
        """Quantize the weights of `linear`, which is not changed.

        Raises:
            ConfigError: a weight is NaN or infinite.
        """
        weight = linear.weight.detach()
        hot = 0 if hot_index is None else hot_index.numel()
        made = cls(
            linear.in_features, linear.out_features, config,
            bias=linear.bias is not None, hot=hot, dtype=weight.dtype, device="meta",
        )  # fmt: skip
        made.layer_name = name
        if hot_index is not None and hot:
            made.hot_index = hot_index.to(weight.device)
            made.hot_weight = weight.index_select(1, made.hot_index).contiguous()
            weight = weight.index_fill(1, made.hot_index, 0.0)
        made.weight, made.weight_scale = quantize_weight(weight, made.number, made.granularity)
        # The scale follows the largest number of a row, so that nothing broken escapes it.
        finite = torch.isfinite(made.weight_scale).all()
        if not (finite and (made.hot_weight is None or torch.isfinite(made.hot_weight).all())):
            raise ConfigError(f"{name or 'layer'}.weight: got NaN or infinite values; must be finite to be quantized")
        if linear.bias is not None:
            made.bias = linear.bias.detach().clone()
        return made

    def low_precision(self, x: torch.Tensor) -> torch.Tensor:
        """The quantized product; x [..., in_features]."""
        if self.weight_only:
            bias = None if self.bias is None else self.bias.to(x.dtype)
            return F.linear(x, self.dequantized_weight(x.dtype), bias)
        flat = x.reshape(-1, self.in_features)
        if flat.shape[0] == 0:
            return x.new_zeros(*x.shape[:-1], self.out_features)
        engine = self.engine_on(x.device, x.dtype)
        if self.shared is not None:
            out = self.multiply(self.shared.get(x, lambda: self.quantize_input(flat, engine)), engine, x.dtype)
        elif x.device.type == "cpu" and self.granularity == "row" and flat.shape[0] > CPU_CHUNK_ROWS:
            # Chunk by chunk, so that what is quantized is still in the cache when it is multiplied.
            out = torch.empty(flat.shape[0], self.out_features, dtype=x.dtype)
            for part, target in zip(flat.split(CPU_CHUNK_ROWS), out.split(CPU_CHUNK_ROWS), strict=True):
                rows = self.quantize_input(part, engine)
                engine.multiply_into(target, rows, self.weight, self.weight_scale, self.bias)
        else:
            out = self.multiply(self.quantize_input(flat, engine), engine, x.dtype)
        out = self.add_hot(flat, out)
        return out.reshape(*x.shape[:-1], self.out_features)

    def engine_on(self, device: torch.device, dtype: torch.dtype) -> Engine:
        """The engine that this layer multiplies with on a device; found once per device and dtype.

        It is asked for when the layer runs: a model that is quantized on the CPU may be moved to a GPU afterwards.
        """
        return choose_engine(self.engine, self.number, self.granularity, device, dtype)

    def quantize_input(self, flat: torch.Tensor, engine: Engine) -> QuantizedRows:
        """Activations [rows, in_features] in eight bits, without the hot channels.

        Raises:
            FloatingPointError: on a CPU, where looking is free, NaN or infinity in the input. On other devices they
                stay in their rows of the result.
        """
        cold = flat if self.hot_index is None else flat.index_fill(1, self.hot_index, 0.0)
        rows = engine.quantize(cold, self.number, self.granularity, row_multiple=engine.row_multiple)
        self.check_input(rows)
        return rows

    def check_input(self, rows: QuantizedRows) -> None:
        """See `quantize_input`."""
        if rows.scale.device.type != "cpu" or torch.compiler.is_compiling():
            return
        if not torch.isfinite(rows.scale).all():
            bad = int((~torch.isfinite(rows.scale)).sum())
            raise FloatingPointError(f"{self.layer_name or 'layer'}: NaN or infinity in {bad} rows of the input")

    def multiply(self, rows: QuantizedRows, engine: Engine, dtype: torch.dtype, **options: bool) -> torch.Tensor:
        """Quantized activations -> [rows, out_features], without the hot channels; options are those of the engine."""
        return engine.multiply(rows, self.weight, self.weight_scale, self.bias, dtype, **options)

    def add_hot(self, flat: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Add what the hot channels contribute, multiplied in the dtype of the model."""
        if self.hot_index is None or self.hot_weight is None:
            return out
        return torch.addmm(out, flat.index_select(1, self.hot_index), self.hot_weight.to(flat.dtype).t())

    def dequantized_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """weight * weight_scale [out, in], with the hot channels in place."""
        weight = (self.weight.float() * self.weight_scale).to(dtype)
        if self.hot_index is not None and self.hot_weight is not None:
            weight = weight.index_copy(1, self.hot_index, self.hot_weight.to(dtype))
        return weight

    def extra_repr(self) -> str:
        """Shapes and numbers, for printing the model."""
        kind = f"{self.number} weights" if self.weight_only else self.number
        hot = 0 if self.hot_index is None else self.hot_index.numel()
        text = f"in_features={self.in_features}, out_features={self.out_features}, {kind}, one scale per "
        return text + self.granularity + (f", {hot} hot channels" if hot else "")

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> QuantizedLinear:
        # `.to(torch.bfloat16)` casts whatever is floating point; values and scales must move but never be cast.
        self.weight, self.weight_scale = self.weight.view(torch.uint8), self.weight_scale.view(torch.int32)
        try:
            super()._apply(fn, recurse)
        finally:
            self.weight = self.weight.view(DTYPES[self.number])
            self.weight_scale = self.weight_scale.view(torch.float32)
        return self
