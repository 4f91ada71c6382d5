"""Low precision for Wan transformers: eight-bit storage and products, fused elementwise parts, and training for them.

The names below are imported on first use, so that reading a configuration does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if not __name__.startswith("videospark."):
    raise ImportError("import this package as videospark.quantization: a second copy under its bare name hides bugs")

if TYPE_CHECKING:
    from .calibration import find_hot_channels
    from .config import QuantizationConfig
    from .convert import InstalledQuantization, quantize_
    from .loading import load_quantized_transformer, save_quantized_transformer
    from .qat import FakeQuantization, fake_quantize_
    from .report import QuantizationReport
    from .text_encoder import quantize_text_encoder_

_HOMES = {
    "FakeQuantization": "qat",
    "InstalledQuantization": "convert",
    "QuantizationConfig": "config",
    "QuantizationReport": "report",
    "fake_quantize_": "qat",
    "find_hot_channels": "calibration",
    "load_quantized_transformer": "loading",
    "quantize_": "convert",
    "quantize_text_encoder_": "text_encoder",
    "save_quantized_transformer": "loading",
}

__all__ = [
    "FakeQuantization",
    "InstalledQuantization",
    "QuantizationConfig",
    "QuantizationReport",
    "fake_quantize_",
    "find_hot_channels",
    "load_quantized_transformer",
    "quantize_",
    "quantize_text_encoder_",
    "save_quantized_transformer",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
