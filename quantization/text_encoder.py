"""Weight-only INT8 for the umT5 text encoder, which in bfloat16 is larger than the small Wan itself."""

from __future__ import annotations

from typing import Any

from ..core.config import require
from .config import QuantizationConfig
from .convert import InstalledQuantization, quantize_

LAYERS = (
    "encoder.block.*.layer.*.SelfAttention.[qkvo]",
    "encoder.block.*.layer.*.DenseReluDense.w*",
)


def quantize_text_encoder_(text_encoder: Any, *, originals: str = "offload") -> InstalledQuantization:
    """Store the linear layers of a `UMT5EncoderModel` in INT8, in place; activations stay as they are.

    INT8 only: transformers casts the activations of the feed-forward to the dtype of its last weight unless that is
    int8, so FP8 weights would ruin them.

    Args:
        text_encoder: a `UMT5EncoderModel`, or one built alike.
        originals: as in `QuantizationConfig`.

    Returns:
        The installation; `.remove()` brings the very same layers back.

    Raises:
        ConfigError: another kind of model, or one that is quantized already.
    """
    kind = getattr(getattr(text_encoder, "config", None), "model_type", type(text_encoder).__name__)
    require(kind in ("umt5", "t5"), "text_encoder", kind, "a umT5 or T5 encoder")
    config = QuantizationConfig(
        mode="int8_weight_only",
        include=LAYERS,
        exclude=(),
        originals=originals,  # type: ignore[arg-type]
    )
    return quantize_(text_encoder, config)
