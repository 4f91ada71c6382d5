"""Training for the precision a student will run in: numbers are moved to their eight-bit grid in the forward pass.

    forward: y = Q(x) Q(W)^T + b        backward: as if Q were the identity (straight-through)

Scales follow each row's largest value, so nothing is ever clipped and the identity is the right gradient everywhere.
The Linear modules, their parameters and names stay, so that optimizers and checkpoints notice nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..core.config import ConfigError, require
from .config import QuantizationConfig
from .convert import HotChannels, _checked_hot, kept_reason, select_layers, state_of
from .primitives import fake_quantize

_STATE = "_videospark_fake_quantization"


class _FakeLinear:
    """The forward of one Linear on the grid."""

    def __init__(self, linear: nn.Linear, config: QuantizationConfig, hot: torch.Tensor | None) -> None:
        self.linear, self.config, self.hot = linear, config, hot

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.linear.weight
        if not self.config.weight_only:
            x = self._on_grid(x)
        return F.linear(x, self._on_grid(weight), self.linear.bias)

    def _on_grid(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            if self.hot is None:
                moved = fake_quantize(x, self.config.number, self.config.granularity)
            else:
                hot = self.hot.to(x.device)
                moved = fake_quantize(x.index_fill(-1, hot, 0.0), self.config.number, self.config.granularity)
                moved.index_copy_(-1, hot, x.index_select(-1, hot))
            change = moved - x
        return x + change


class FakeQuantization:
    """Fake quantization at work in a model; made by `fake_quantize_`.

    Attributes:
        layers: names of the layers that run on the grid.
        kept: reason by name for layers that stay as they are, as in the quantized model.
    """

    def __init__(self, model: nn.Module, forwards: dict[str, _FakeLinear], kept: dict[str, str]) -> None:
        self.layers, self.kept = list(forwards), kept
        self._model = model
        self._forwards: list[Callable[..., Any]] = list(forwards.values())
        for fake in forwards.values():
            fake.linear.__dict__["forward"] = fake
        model.__dict__[_STATE] = self

    def remove(self) -> None:
        """Give the layers their own forward back. Again is harmless.

        Raises:
            ConfigError: something was wrapped around a layer meanwhile. Nothing is changed then.
        """
        for fake in self._forwards:
            assert isinstance(fake, _FakeLinear)
            if fake.linear.__dict__.get("forward") is not fake:
                raise ConfigError("layer: got one that something else has wrapped; must be unwrapped first")
        for fake in self._forwards:
            del fake.linear.__dict__["forward"]  # type: ignore[attr-defined]
        self._forwards = []
        self._model.__dict__.pop(_STATE, None)


def fake_quantize_(
    model: nn.Module, config: QuantizationConfig, *, hot_channels: HotChannels | None = None
) -> FakeQuantization:
    """Let the layers that `config` selects compute on their eight-bit grid, with straight-through gradients.

    Args:
        model: a transformer with plain Linear layers, in any floating dtype.
        config: as for `quantize_`; engine, steps, originals and fusion belong to inference and must be left out.
        hot_channels: as for `quantize_`.

    Raises:
        ConfigError: mode "none", settings that belong to inference, a model that is quantized (really or already
            fake), or layers that something else wraps.
    """
    require(config.mode != "none", "mode", config.mode, "one that quantizes")
    require(not config.fused, "fused", config.fused, "false for training: fused blocks have no gradient")
    steps = config.high_precision_steps
    require(not steps, "high_precision_steps", steps, "left out for training, where no sampling step is known")
    foreign = config.engine in ("torchao", "transformer_engine")
    require(not foreign, "engine", config.engine, "one of ours: others have their own training")
    if state_of(model) is not None or _STATE in model.__dict__:
        raise ConfigError("model: got one that is quantized already; must be restored first: call remove()")
    selected = select_layers(model, config)
    hot = _checked_hot(config, hot_channels, selected)
    forwards: dict[str, _FakeLinear] = {}
    kept: dict[str, str] = {}
    for name, linear in selected.items():
        reason = kept_reason(config, linear.in_features, linear.out_features)
        if reason is not None:
            kept[name] = reason
            continue
        require("forward" not in linear.__dict__, name, "a layer that something else wraps", "free of hooks")
        forwards[name] = _FakeLinear(linear, config, hot.get(name))
    return FakeQuantization(model, forwards, kept)
