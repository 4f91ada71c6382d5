"""Training-time forwards of the stock modules: the same parameters, the same numbers, fewer and larger operations.

`encode_moments` and `decode_latents` run `AutoencoderKLWan` (Wan 2.2 form) over the whole clip at once instead of in
chunks of four frames with a feature cache; both give what the stock methods give, since every convolution is causal.
`denoise` runs `WanTransformer3DModel` with batched products instead of the attention dispatch, and computes the time
embedding once per distinct time. tests/tiny compares each with the stock module.

Shapes: B batch, F latent frames, L tokens, D width, H heads, S text slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_wan import (
    WanMidBlock,
    WanResample,
    WanResidualBlock,
    patchify,
    unpatchify,
)

Activation = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _resample(module: WanResample, x: torch.Tensor) -> torch.Tensor:
    """Whole-clip form of `WanResample`: the first frame never meets the temporal convolution."""
    batch, channels = x.shape[:2]
    if module.mode == "upsample3d" and x.shape[2] > 1:
        first, rest = x[:, :, :1], module.time_conv(x[:, :, 1:])
        rest = rest.unflatten(1, (2, channels)).permute(0, 2, 3, 1, 4, 5).flatten(2, 3)
        x = torch.cat([first, rest], dim=2)
    frames = x.shape[2]
    x = module.resample(x.transpose(1, 2).flatten(0, 1))
    x = x.unflatten(0, (batch, frames)).transpose(1, 2)
    if module.mode == "downsample3d" and frames > 1:
        x = torch.cat([x[:, :, :1], module.time_conv(x)], dim=2)
    return x


def _normalize_and_activate(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    """SiLU of `WanRMS_norm`: x / |x|_channels * sqrt(channels) * gamma, in float32."""
    wide = x.float()
    norm = wide.square().sum(1, keepdim=True).sqrt().clamp_min(1e-12)
    return F.silu(wide / norm * (math.sqrt(x.shape[1]) * gamma)).to(x.dtype)


def _resnet(block: WanResidualBlock, x: torch.Tensor, activate: Activation) -> torch.Tensor:
    h = block.conv1(activate(x, block.norm1.gamma))
    return block.conv2(activate(h, block.norm2.gamma)) + block.conv_shortcut(x)


def _middle(block: WanMidBlock, x: torch.Tensor, activate: Activation) -> torch.Tensor:
    x = _resnet(block.resnets[0], x, activate)
    for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
        x = _resnet(resnet, attention(x), activate)
    return x


def encode_moments(
    vae: AutoencoderKLWan, video: torch.Tensor, activate: Activation = _normalize_and_activate
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and log-variance of the latents of `video` `[B, 3, frames, height, width]` in [-1, 1].

    `activate` may be a compiled `_normalize_and_activate`: the normalisation is a third of a training step.
    """
    x = patchify(video, vae.config.patch_size) if vae.config.patch_size else video
    x = vae.encoder.conv_in(x)
    for block in vae.encoder.down_blocks:
        shortcut = block.avg_shortcut(x)
        for resnet in block.resnets:
            x = _resnet(resnet, x, activate)
        if block.downsampler is not None:
            x = _resample(block.downsampler, x)
        x = x + shortcut
    x = _middle(vae.encoder.mid_block, x, activate)
    moments = vae.quant_conv(vae.encoder.conv_out(activate(x, vae.encoder.norm_out.gamma)))
    mean, log_variance = moments.chunk(2, dim=1)
    return mean, log_variance.clamp(-30, 20)


def decode_latents(
    vae: AutoencoderKLWan, latents: torch.Tensor, activate: Activation = _normalize_and_activate
) -> torch.Tensor:
    """Video `[B, 3, frames, height, width]`, not clamped, of (unnormalised) latents."""
    x = _middle(vae.decoder.mid_block, vae.decoder.conv_in(vae.post_quant_conv(latents)), activate)
    for block in vae.decoder.up_blocks:
        shortcut = None if block.avg_shortcut is None else block.avg_shortcut(x, first_chunk=True)
        for resnet in block.resnets:
            x = _resnet(resnet, x, activate)
        if block.upsampler is not None:
            x = _resample(block.upsampler, x)
        if shortcut is not None:
            x = x + shortcut
    x = vae.decoder.conv_out(activate(x, vae.decoder.norm_out.gamma))
    return unpatchify(x, vae.config.patch_size) if vae.config.patch_size else x


def rotary_table(transformer: WanTransformer3DModel, grid: tuple[int, int, int]) -> torch.Tensor:
    """Rotary angles of a token grid as `[2, L, head_dim / 2]` (cosine, sine), float32."""
    p_t, p_h, p_w = transformer.config.patch_size
    probe = torch.empty(1, 1, grid[0] * p_t, grid[1] * p_h, grid[2] * p_w)
    cosine, sine = transformer.rope(probe)
    return torch.stack([cosine[0, :, 0, 0::2], sine[0, :, 0, 1::2]]).float()


def _rotate(x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rotate the interleaved pairs of `x` `[B, L, H, d]`."""
    cosine, sine = table[0][:, None], table[1][:, None]
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=-1).flatten(-2)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Softmax attention over `[B, L, H, d]` by batched products; `bias` `[B, S]` is added to the scores."""
    batch, length, heads, head_dim = query.shape
    q, k, v = (t.transpose(1, 2).reshape(batch * heads, -1, head_dim) for t in (query, key, value))
    scores = torch.bmm(q * (1 / math.sqrt(head_dim)), k.transpose(1, 2))
    if bias is not None:
        scores = scores + bias.repeat_interleave(heads, 0)[:, None, :].to(scores.dtype)
    out = torch.bmm(scores.softmax(-1).to(v.dtype), v)
    return out.unflatten(0, (batch, heads)).transpose(1, 2).flatten(2)


def _block(
    block: torch.nn.Module,
    x: torch.Tensor,
    text: torch.Tensor,
    text_bias: torch.Tensor | None,
    modulation: torch.Tensor,
    table: torch.Tensor,
) -> torch.Tensor:
    """One transformer block; `modulation` is `[B, F, 6, D]`, one row per latent frame."""
    frames = modulation.shape[1]
    shift1, scale1, gate1, shift2, scale2, gate2 = (block.scale_shift_table[:, None] + modulation).unbind(2)

    def modulate(h: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        h = F.layer_norm(h, h.shape[-1:], eps=block.norm1.eps).unflatten(1, (frames, -1))
        return (h * (1 + scale[:, :, None]) + shift[:, :, None]).flatten(1, 2)

    def gated(h: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return (h.unflatten(1, (frames, -1)).float() * gate[:, :, None]).flatten(1, 2)

    attention, heads = block.attn1, block.attn1.heads
    h = modulate(x, shift1, scale1)
    weight = torch.cat([attention.to_q.weight, attention.to_k.weight, attention.to_v.weight])
    bias = torch.cat([attention.to_q.bias, attention.to_k.bias, attention.to_v.bias])
    query, key, value = F.linear(h, weight, bias).chunk(3, -1)
    query = _rotate(attention.norm_q(query.float()).unflatten(-1, (heads, -1)), table).to(value.dtype)
    key = _rotate(attention.norm_k(key.float()).unflatten(-1, (heads, -1)), table).to(value.dtype)
    x = x + gated(attention.to_out[0](_attend(query, key, value.unflatten(-1, (heads, -1)), None)), gate1)

    attention = block.attn2
    h = F.layer_norm(x, x.shape[-1:], block.norm2.weight, block.norm2.bias, block.norm2.eps)
    query = attention.to_q(h)
    key, value = F.linear(
        text,
        torch.cat([attention.to_k.weight, attention.to_v.weight]),
        torch.cat([attention.to_k.bias, attention.to_v.bias]),
    ).chunk(2, -1)
    query = attention.norm_q(query.float()).to(value.dtype)
    key = attention.norm_k(key.float()).to(value.dtype)
    query, key, value = (t.unflatten(-1, (heads, -1)) for t in (query, key, value))
    x = x + attention.to_out[0](_attend(query, key, value, text_bias)).float()

    return x + gated(block.ffn(modulate(x, shift2, scale2)), gate2)


def denoise(
    transformer: WanTransformer3DModel,
    latents: torch.Tensor,
    frame_times: torch.Tensor,
    text: torch.Tensor,
    text_bias: torch.Tensor | None,
    table: torch.Tensor,
) -> torch.Tensor:
    """Velocity of `latents` `[B, C, F, h, w]`.

    Args:
        frame_times: network time in [0, 1000] of each latent frame, `[B, F]`.
        text: text encoder output `[B, S, text_dim]`.
        text_bias: added to the cross-attention scores, `[B, S]`; the log of how often a slot occurs, -inf for none.
        table: `rotary_table` of the token grid.
    """
    p_t, p_h, p_w = transformer.config.patch_size
    batch, channels, frames, height, width = latents.shape
    x = latents.unflatten(4, (width // p_w, p_w)).unflatten(3, (height // p_h, p_h)).unflatten(2, (frames // p_t, p_t))
    x = x.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(4).flatten(1, 3)  # [B, L, C p_t p_h p_w]
    x = F.linear(x, transformer.patch_embedding.weight.flatten(1), transformer.patch_embedding.bias).float()

    embedder = transformer.condition_embedder
    time = embedder.time_embedder(embedder.timesteps_proj(frame_times.flatten()))
    time = time.unflatten(0, (batch, -1))
    modulation = embedder.time_proj(F.silu(time)).unflatten(-1, (6, -1)).float()
    text = embedder.text_embedder(text)

    for block in transformer.blocks:
        x = _block(block, x, text, text_bias, modulation, table)

    shift, scale = (transformer.scale_shift_table[:, None] + time.float()[:, :, None]).unbind(2)
    x = F.layer_norm(x, x.shape[-1:], eps=transformer.norm_out.eps).unflatten(1, (frames // p_t, -1))
    x = (x * (1 + scale[:, :, None]) + shift[:, :, None]).flatten(1, 2)
    x = transformer.proj_out(x)
    x = x.reshape(batch, frames // p_t, height // p_h, width // p_w, p_t, p_h, p_w, -1)
    return x.permute(0, 7, 1, 4, 2, 5, 3, 6).reshape(batch, -1, frames, height, width)
