"""Signal to quantization noise of every product, layer by layer, on the inputs that the layers really get.

The inputs are collected from a forward pass in the model's dtype: several steps of the tiny model, or a random block of
the width of Wan. Each layer is then computed in float32 and in eight bits on the same rows; errors do not add up from
layer to layer here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..core.config import require
from ..core.numerics import relative_error, sqnr_db
from ..quantization.config import QuantizationConfig
from ..quantization.convert import select_layers
from ..quantization.linear import QuantizedLinear
from .block import cast_weights
from .quantization import SHAPES

MODELS = ("tiny", "wan2.1-1.3b", "wan2.1-14b")
_SHAPE = {"wan2.1-1.3b": "wan2.1-1.3b-480p", "wan2.1-14b": "wan2.1-14b-720p"}
_GRID = (2, 10, 13)
"""Frames, rows, columns of tokens that go through a random block."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One layer in one mode: sizes, rows of input that were looked at, error against float32, the same in dB.

    `peak_to_rms` is the largest input channel's root mean square over that of all: what makes a layer hard for INT8.
    """

    model: str
    layer: str
    inputs: int
    outputs: int
    rows: int
    mode: str
    sqnr_db: float
    relative_error: float
    peak_to_rms: float


def bench_sqnr(
    models: Sequence[str] = MODELS, *, modes: Sequence[str] = ("int8", "fp8"), rows: int = 256, device: str = "cpu"
) -> Iterable[Row]:
    """Measure every product of each model in each mode; rows come as they are ready.

    Args:
        models: "tiny", the model of this package with its own weights, or a random block: "wan2.1-1.3b", "wan2.1-14b".
        modes: modes of `QuantizationConfig`.
        rows: at most so many tokens per forward pass of each layer.
        device: where.

    Raises:
        ConfigError: an unknown model or mode; before anything is measured.
    """
    unknown = [name for name in models if name not in MODELS]
    require(bool(models) and not unknown, "models", tuple(models), f"of {', '.join(MODELS)}")
    require(bool(modes) and "none" not in modes, "modes", tuple(modes), "modes that quantize")
    require(rows >= 1, "rows", rows, "at least 1")
    configs = {mode: QuantizationConfig(mode=mode) for mode in modes}  # type: ignore[arg-type]
    return _rows(models, configs, rows, device)


def layer_sqnr(
    model: str, transformer: nn.Module, run: Callable[[], Any], configs: dict[str, QuantizationConfig], rows: int
) -> Iterable[Row]:
    """The layers that the configurations select, on what they read while `run` calls the transformer."""
    layers: dict[str, nn.Linear] = {}
    for config in configs.values():
        layers |= select_layers(transformer, config)
    inputs = collect_inputs(layers, run, rows)
    for name, layer in layers.items():
        require(name in inputs, "run", name, "a call that reaches every selected layer")
        x = inputs[name]
        bias = None if layer.bias is None else layer.bias.float()
        exact = F.linear(x.float(), layer.weight.float(), bias)
        channels = x.float().square().mean(dim=0)
        peak = math.sqrt(float(channels.max() / channels.mean())) if float(channels.mean()) > 0 else 1.0
        for mode, config in configs.items():
            if not config.selects(name):
                continue
            found = QuantizedLinear.from_linear(layer, config, name=name)(x)
            yield Row(
                model, name, layer.in_features, layer.out_features, x.shape[0], mode,
                sqnr_db(found, exact), relative_error(found, exact), peak,
            )  # fmt: skip


def collect_inputs(layers: dict[str, nn.Linear], run: Callable[[], Any], rows: int) -> dict[str, torch.Tensor]:
    """Evenly spread rows [n, in_features] of every input that each layer gets during `run`."""
    found: dict[str, list[torch.Tensor]] = {}

    def keep(name: str, x: torch.Tensor) -> None:
        flat = x.detach().reshape(-1, x.shape[-1])
        step = -(-flat.shape[0] // rows)
        found.setdefault(name, []).append(flat[::step].clone())

    handles = [
        layer.register_forward_pre_hook(lambda _, args, name=name: keep(name, args[0]))  # type: ignore[misc]
        for name, layer in layers.items()
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return {name: torch.cat(parts) for name, parts in found.items()}


def markdown(rows: Sequence[Row]) -> str:
    """Per model and mode the range over all layers, then a table of the layers; dB in brackets."""
    lines = ["| model | mode | layers | worst | median | best |", "|---|---|---|---|---|---|"]
    for model, mode in dict.fromkeys((row.model, row.mode) for row in rows):
        chosen = sorted((row for row in rows if (row.model, row.mode) == (model, mode)), key=lambda row: row.sqnr_db)
        cells = [f"{row.sqnr_db:.1f} dB ({row.layer})" for row in (chosen[0], chosen[len(chosen) // 2], chosen[-1])]
        lines.append(f"| {model} | {mode} | {len(chosen)} | " + " | ".join(cells) + " |")
    modes = list(dict.fromkeys(row.mode for row in rows))
    lines += [
        "",
        "| model | layer | size | peak/rms | " + " | ".join(modes) + " |",
        "|---|" + "---|" * (3 + len(modes)),
    ]
    for model, layer in dict.fromkeys((row.model, row.layer) for row in rows):
        by_mode = {row.mode: row for row in rows if (row.model, row.layer) == (model, layer)}
        first = next(iter(by_mode.values()))
        cells = [
            f"{by_mode[mode].relative_error:.2%} ({by_mode[mode].sqnr_db:.1f})" if mode in by_mode else "-"
            for mode in modes
        ]
        size = f"{first.inputs} to {first.outputs}"
        lines.append(f"| {model} | {layer} | {size} | {first.peak_to_rms:.1f} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _rows(models: Sequence[str], configs: dict[str, QuantizationConfig], rows: int, device: str) -> Iterable[Row]:
    for model in models:
        transformer, run = _tiny(device) if model == "tiny" else _random_block(model, device)
        with torch.no_grad():
            yield from layer_sqnr(model, transformer, run, configs, rows)


def _tiny(device: str) -> tuple[nn.Module, Callable[[], Any]]:
    from ..pipelines.loading import load
    from ..tiny import checkpoint_path

    pipe = load(checkpoint_path(), device=device, recipe="dense")
    pipe.set_progress_bar_config(disable=True)
    prompt = "a large red circle moving right on a plain white background"

    def run() -> None:
        generator = torch.Generator("cpu").manual_seed(0)
        pipe(
            prompt, num_inference_steps=4, guidance_scale=1.0, generator=generator, output_type="latent",
            height=64, width=64, num_frames=17, max_sequence_length=32,
        )  # fmt: skip

    return pipe.transformer, run


def _random_block(model: str, device: str) -> tuple[nn.Module, Callable[[], Any]]:
    """A transformer of one layer in bfloat16, made layer by layer: at the width of 14B it has 0.7 GB."""
    from diffusers import WanTransformer3DModel

    sizes = SHAPES[_SHAPE[model]]
    with torch.device("meta"):
        transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=sizes.width // 128, attention_head_dim=128, in_channels=16,
            out_channels=16, text_dim=512, freq_dim=256, ffn_dim=sizes.ffn, num_layers=1, cross_attn_norm=True,
            qk_norm="rms_norm_across_heads", rope_max_seq_len=64,
        )  # fmt: skip
    rope = type(transformer.rope)(128, (1, 2, 2), 64)
    transformer = cast_weights(transformer, torch.bfloat16).to_empty(device=device).requires_grad_(False).eval()
    transformer.rope = rope.to(device)
    torch.manual_seed(0)
    for parameter in transformer.parameters():
        # Weights as they start in training; vectors are norms (1) or biases (0), and both only shift the inputs.
        if parameter.ndim > 1:
            parameter.normal_(std=parameter[0].numel() ** -0.5)
    for module in transformer.modules():
        if isinstance(module, (nn.LayerNorm, nn.RMSNorm)) and module.weight is not None:
            module.weight.fill_(1.0)
        if getattr(module, "bias", None) is not None:
            module.bias.zero_()  # type: ignore[union-attr, operator]
    frames, height, width = _GRID
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(1, 16, frames, 2 * height, 2 * width, generator=generator)
    text = torch.randn(1, SHAPES["tiny"].text_tokens, 512, generator=generator)

    def run() -> None:
        transformer(
            latents.to(device, torch.bfloat16), torch.tensor([700], device=device), text.to(device, torch.bfloat16)
        )

    return transformer, run
