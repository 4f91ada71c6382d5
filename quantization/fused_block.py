"""A Wan block whose elementwise parts are fused with each other and with the quantization that follows them.

The forward of each block is replaced on the instance and taken off again; its modules, its attention processors among
them, are called as before. The results are those of the stock block up to rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..core.config import ConfigError, require
from .engines import CPU_CHUNK_ROWS
from .fused import (
    Path,
    available_path,
    gelu_tanh,
    kernel_writes,
    layer_norm_modulate,
    quantize,
    residual_gate,
    rms_norm_rope,
)
from .linear import QuantizedLinear

NORM_ROPE = "_videospark_norm_rope"
"""Attribute of a fused block's self-attention: a callable that processors may use in place of norm and rotation."""


class FusedBlock:
    """The forward of one `WanTransformerBlock`."""

    def __init__(self, block: Any) -> None:
        self.block = block
        self.widest = block.ffn.net[2].in_features

    def path_on(self, device: torch.device) -> Path:
        """Which path runs on a device; asked for when it runs, as the model may have been moved."""
        return available_path(device.type, self.widest)[0]

    def __call__(
        self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, temb: torch.Tensor, rotary_emb: Any
    ) -> torch.Tensor:
        """As `WanTransformerBlock.forward`: hidden_states [B, L, D], temb [B, 6, D] or [B, L, 6, D].

        Raises:
            NotImplementedError: a gradient is asked for.
        """
        if torch.is_grad_enabled() and hidden_states.requires_grad:
            raise NotImplementedError("fused blocks have no gradient; run under torch.no_grad(), or without fused")
        block, path = self.block, self.path_on(hidden_states.device)
        shift, scale, gate, ffn_shift, ffn_scale, ffn_gate = _modulation(block.scale_shift_table, temb)

        # 1. Self-attention; the quantized input goes to q, k and v by the way that they share.
        x, attention = hidden_states.contiguous(), block.attn1
        layers = (attention.to_q, attention.to_k, attention.to_v)
        number, multiple = _wanted(layers, x)
        y, rows = layer_norm_modulate(x, scale, shift, block.norm1.eps, number=number, row_multiple=multiple, path=path)
        if rows is not None:
            layers[0].check_input(rows)
            layers[0].shared.put(y, rows)
        x = residual_gate(x, attention(y, None, None, rotary_emb), gate, path=path)

        # 2. Cross-attention.
        norm = block.norm2
        if isinstance(norm, nn.Identity):
            y = x
        else:
            weight, bias = norm.weight.float()[None, None], norm.bias.float()[None, None]
            y, _ = layer_norm_modulate(x, weight, bias, norm.eps, affine=True, path=path)
        x = x + block.attn2(y, encoder_hidden_states, None, None)

        # 3. Feed-forward.
        return self._feed_forward(x, ffn_scale, ffn_shift, ffn_gate)

    def _feed_forward(
        self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, gate: torch.Tensor
    ) -> torch.Tensor:
        if x.device.type != "cpu":
            return self._feed_forward_part(x, scale, shift, gate)
        # All of it works on each token alone: chunk by chunk, the wide middle never leaves the cache.
        out = torch.empty_like(x)
        for index in range(x.shape[0]):
            for start in range(0, x.shape[1], CPU_CHUNK_ROWS):
                tokens = slice(start, start + CPU_CHUNK_ROWS)
                factors = (_cut(factor, index, tokens) for factor in (scale, shift, gate))
                out[index : index + 1, tokens] = self._feed_forward_part(x[index : index + 1, tokens], *factors)
        return out

    def _feed_forward_part(
        self, x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, gate: torch.Tensor
    ) -> torch.Tensor:
        block, path = self.block, self.path_on(x.device)
        up, dropout, down = block.ffn.net[0].proj, block.ffn.net[1], block.ffn.net[2]
        number, multiple = _wanted((up,), x)
        y, rows = layer_norm_modulate(x, scale, shift, block.norm3.eps, number=number, row_multiple=multiple, path=path)
        if rows is not None and up.engine_on(x.device, x.dtype).native:
            # The GELU is part of what scales the product.
            y = _product(up, y, rows, gelu=True)
            number, multiple = _wanted((down,), y)
            rows = None if number is None else quantize(y, number, row_multiple=multiple, path=path)
        else:
            wide = _product(up, y, rows)
            number, multiple = _wanted((down,), wide)
            y, rows = gelu_tanh(wide, number=number, row_multiple=multiple, path=path)
        return residual_gate(x, _product(down, dropout(y), rows), gate, path=path)

    def norm_rope(self, norm: nn.RMSNorm, x: torch.Tensor, rotary_emb: Any, heads: int) -> torch.Tensor:
        """Normalised and rotated queries or keys [B, L, H, d] of a projection x [B, L, H d]."""
        eps = norm.eps if norm.eps is not None else torch.finfo(x.dtype).eps
        cos, sin = rotary_emb
        return rms_norm_rope(x, norm.weight, eps, cos, sin, heads, path=self.path_on(x.device))


class InstalledFusion:
    """Fused blocks at work in a transformer; made by `install_fused_blocks`."""

    def __init__(self, blocks: list[FusedBlock]) -> None:
        self._blocks = blocks
        for fused in blocks:
            fused.block.__dict__["forward"] = fused
            fused.block.attn1.__dict__[NORM_ROPE] = fused.norm_rope

    @property
    def path(self) -> str:
        """Which of "torch", "native" and "triton" runs on the device where the blocks are now, with the reason."""
        device = self._blocks[0].block.scale_shift_table.device
        path, reason = available_path(device.type, self._blocks[0].widest)
        return f"{path} ({reason})"

    def remove(self) -> None:
        """Give the blocks their own forward back.

        Raises:
            ConfigError: something was wrapped around a fused block meanwhile. Nothing is changed then.
        """
        for index, fused in enumerate(self._blocks):
            if fused.block.__dict__.get("forward") is not fused:
                rule = "as this installation left it: disable offloading or other hooks first"
                raise ConfigError(f"blocks.{index}.forward: got one that something else has wrapped; must be {rule}")
        for fused in self._blocks:
            del fused.block.__dict__["forward"]
            fused.block.attn1.__dict__.pop(NORM_ROPE, None)
        self._blocks = []


def check_fused_blocks(transformer: nn.Module) -> None:
    """Raise ConfigError unless the blocks of this transformer can be fused."""
    from diffusers.models.transformers.transformer_wan import WanTransformer3DModel

    kind = type(transformer).__name__
    require(
        isinstance(transformer, WanTransformer3DModel), "fused", kind, "off, or on a diffusers WanTransformer3DModel"
    )
    for index, block in enumerate(transformer.blocks):  # type: ignore[arg-type]
        rule = "its own: enable offloading or other hooks after accelerating"
        require("forward" not in block.__dict__, f"blocks.{index}.forward", "one that is wrapped", rule)


def install_fused_blocks(transformer: Any) -> InstalledFusion:
    """Give every block of a `WanTransformer3DModel` its fused forward.

    Raises:
        ConfigError: another kind of model, or blocks that are wrapped already.
    """
    check_fused_blocks(transformer)
    return InstalledFusion([FusedBlock(block) for block in transformer.blocks])


def _modulation(table: torch.Tensor, temb: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Six float32 factors [B, 1, D], or [B, L, D] where there is one time per token."""
    if temb.ndim == 4:
        return tuple(part.squeeze(2) for part in (table.unsqueeze(0) + temb.float()).chunk(6, dim=2))
    return (table + temb.float()).chunk(6, dim=1)


def _wanted(layers: tuple[Any, ...], x: torch.Tensor) -> tuple[Any, int]:
    """The eight-bit type in which all these layers want x, and its row multiple; (None, 1) if they want it plain."""
    first = layers[0]
    if len(layers) == 1 and first._forward_hooks:
        return None, 1  # something changes its output, so it has to be called as a module
    for layer in layers:
        if not isinstance(layer, QuantizedLinear) or layer.weight_only or layer.control.high_precision:
            return None, 1
        if layer.granularity != "row" or layer.hot_index is not None or layer.number != first.number:
            return None, 1
    if len(layers) > 1 and (first.shared is None or any(layer.shared is not first.shared for layer in layers)):
        return None, 1
    if not kernel_writes(first.number, x.device):
        return None, 1
    return first.number, first.engine_on(x.device, x.dtype).row_multiple


def _product(layer: Any, y: torch.Tensor, rows: Any, **options: bool) -> torch.Tensor:
    if rows is None:
        out: torch.Tensor = layer(y)
        return out
    layer.check_input(rows)
    product: torch.Tensor = layer.multiply(rows, layer.engine_on(y.device, y.dtype), y.dtype, **options)
    return product.reshape(*y.shape[:-1], layer.out_features)


def _cut(factor: torch.Tensor, batch: int, tokens: slice) -> torch.Tensor:
    """The entries [1, tokens or 1, D] of a modulation for one chunk."""
    entry = factor[batch : batch + 1] if factor.shape[0] > 1 else factor
    return entry[:, tokens] if entry.shape[1] > 1 else entry
