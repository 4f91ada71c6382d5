"""Adapter to torchao (extra `torchao`): our settings as its configuration, and one layer in its hands.

torchao keeps weights in tensor subclasses of its own, so such a model is not saved in eight bits by this package.
"""

from __future__ import annotations

import copy
import importlib
from typing import Any

import torch
from torch import nn

from ..core.config import ConfigError
from .config import QuantizationConfig
from .linear import ReplacedLinear

_CONFIGS = {
    "fp8": "Float8DynamicActivationFloat8WeightConfig",
    "int8": "Int8DynamicActivationInt8WeightConfig",
    "fp8_weight_only": "Float8WeightOnlyConfig",
    "int8_weight_only": "Int8WeightOnlyConfig",
}


def translate(config: QuantizationConfig) -> Any:
    """The torchao configuration of the same numbers.

    Raises:
        ConfigError: torchao is not installed or cannot be imported, or has no such granularity.
    """
    try:
        quantization = importlib.import_module("torchao.quantization")
    except ImportError as error:
        raise ConfigError(
            f"engine: got 'torchao', which cannot be imported ({error}); must be installed: "
            "pip install videospark[torchao]. Without it: engine 'auto'"
        ) from error
    name = _CONFIGS[config.mode]
    kind = getattr(quantization, name, None)
    if kind is None:
        raise ConfigError(f"engine: got 'torchao' in a version without {name}; must be 0.15 or later")
    if config.mode == "fp8":
        granularity = quantization.PerRow() if config.granularity == "row" else quantization.PerTensor()
        return kind(granularity=granularity)
    if config.granularity != "row":
        raise ConfigError(f"granularity: got 'tensor'; must be 'row' for mode {config.mode!r} with engine 'torchao'")
    return kind()


class TorchaoLinear(ReplacedLinear):
    """A linear layer that torchao has quantized; the original is not touched."""

    def __init__(self, linear: nn.Linear, config: QuantizationConfig) -> None:
        super().__init__(linear.in_features, linear.out_features)
        chosen = translate(config)
        quantize = importlib.import_module("torchao.quantization").quantize_
        # torchao replaces the weight on the module it is given: a shallow copy keeps the original's own.
        inner = copy.copy(linear)
        inner._parameters, inner._buffers = dict(linear._parameters), dict(linear._buffers)
        holder = nn.Sequential(inner)
        quantize(holder, chosen)
        self.inner = holder[0]
        self.eval()

    def low_precision(self, x: torch.Tensor) -> torch.Tensor:
        """The product as torchao computes it."""
        out: torch.Tensor = self.inner(x)
        return out
