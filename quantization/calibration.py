"""Find hot channels: the few input channels of a layer that stay far larger than the rest, whatever the token.

One scale per token is set by its largest channel; a channel thirty times the others costs them five bits, which FP8
has in its exponent and INT8 does not. Such channels sit in the same places for every prompt and step, so that a short
run finds them, and multiplying them apart in the precision of the model costs next to nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..core.config import require
from .config import QuantizationConfig
from .convert import select_layers


class _Peaks:
    """Largest magnitude of every input channel of one layer over all its calls."""

    def __init__(self) -> None:
        self.amax: torch.Tensor | None = None

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        peak = inputs[0].detach().abs().flatten(0, -2).amax(0).float()
        self.amax = peak if self.amax is None else torch.maximum(self.amax, peak)


def channel_peaks(
    transformer: nn.Module, config: QuantizationConfig, run: Callable[[], object]
) -> dict[str, torch.Tensor]:
    """Largest input magnitude by channel, float32 [inputs], of every layer that `config` selects, while `run` runs.

    Raises:
        ConfigError: `run` never reached one of the layers.
    """
    layers = select_layers(transformer, config)
    peaks = {name: _Peaks() for name in layers}
    handles = [layer.register_forward_pre_hook(peaks[name]) for name, layer in layers.items()]
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    for name, found in peaks.items():
        require(found.amax is not None, f"run ({name})", "no forward pass of this layer", "a run of the whole model")
    return {name: found.amax for name, found in peaks.items() if found.amax is not None}


def find_hot_channels(
    transformer: nn.Module, config: QuantizationConfig, run: Callable[[], object], *, ratio: float = 6.0
) -> dict[str, list[int]]:
    """Input channels whose peak is more than `ratio` times the median peak of their layer.

    Args:
        transformer: not quantized yet.
        config: `hot_channels` limits the number per layer; the largest ones are taken.
        run: runs the model on typical inputs, for example a few sampling steps of a few prompts.
        ratio: above 1; 6 leaves a Gaussian layer without any.

    Returns:
        Ascending channel indices by layer, for `quantize_`; layers without hot channels are left out. Layers that read
        the same tensor get the same channels.

    Raises:
        ConfigError: no hot channels are configured, or `run` does not reach a layer.
    """
    require(config.hot_channels > 0, "hot_channels", config.hot_channels, "above 0 to look for any")
    require(ratio > 1, "ratio", ratio, "above 1")
    hot: dict[str, list[int]] = {}
    for name, amax in channel_peaks(transformer, config, run).items():
        order = torch.argsort(amax, descending=True, stable=True)[: config.hot_channels]
        threshold = ratio * float(amax.median())
        chosen = sorted(int(i) for i in order if float(amax[i]) > threshold)
        if chosen:
            hot[name] = chosen
    return hot
