"""Stage 1: the video autoencoder, on windows that hold whole shapes; encoder and decoder each for itself.

The encoder learns the latents of `latents.py` by squared error, on many short clips: telling forms apart takes many
forms. The decoder learns to draw clips from such latents as a
denoiser makes them: with noise, and in a fifth of the clips with outlines that are not those of the form (colours are
seen early and blurred, and it is the form's own latents that are to be believed). L1 + squared error + L1 of the edges;
the edge term (differences of neighbouring pixels) keeps the corners of small shapes: without it crosses turn round.
Both see mostly pieces of one latent frame after a first frame, cut from whole clips: three times as many shapes for the
same work.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan
from torch import nn

from . import fast_forward
from .components import NUM_FRAMES, build_vae
from .dataset import SHAPES, MovingShape, Scene, render, sample_scene
from .latents import SPATIAL_STRIDE, TEMPORAL_STRIDE, form_video, latent_statistics, scene_latents
from .training_state import AveragedWeights, Optimizers, StageFolder

SIZES = (128, 160, 192)
ENCODER_SIZES = (192,)
"""Of clips; small and large are shares of a side, which a window alone does not tell."""
WINDOW = 128
SHORT_CLIP = 5
LOG_VARIANCE = -8.0
"""Of the encoder's second output: the latents are certain."""
MAX_NOISE = 0.2
"""Largest standard deviation of the noise that the decoder is trained with, in normalised latents."""
DECAY_SHARE = 0.6
MISDRAWN_SHARE = 0.2
"""Share of clips in which the decoder sees outlines of other forms; see docs/decisions.md."""
EDGE_WEIGHT = 2.0


@dataclass(frozen=True)
class Batch:
    """Windows of clips.

    Attributes:
        video: what is to be drawn, `[B, 3, F, side, side]` in [-1, 1].
        latents: what the encoder is to say, `[B, C, T, side / 8, side / 8]`, before normalisation.
        given: what the decoder sees, likewise, without noise: the same, or with other outlines.
    """

    video: torch.Tensor
    latents: torch.Tensor
    given: torch.Tensor


def windows(
    seed: int, batch_size: int, side: int, *, num_frames: int = NUM_FRAMES, sizes: tuple[int, ...] = SIZES
) -> Batch:
    """`side` x `side` windows of rendered clips around a shape, in steps of a cell, `num_frames` long.

    They hold whole shapes: a corner alone does not tell what it belongs to. Fewer than 17 frames are a piece of a clip
    that starts at a latent frame of it.
    """
    rng = np.random.default_rng([seed, 11])
    rows = []
    for i in range(batch_size):
        scene = sample_scene(seed * 4096 + i)
        size = max(int(rng.choice(sizes)), side)
        start = TEMPORAL_STRIDE * int(rng.integers((NUM_FRAMES - num_frames) // TEMPORAL_STRIDE + 1))
        piece = slice(start, start + num_frames)
        forms = form_video(scene, num_frames=NUM_FRAMES, height=size, width=size)[:, :, piece]
        forms[:, 4:, 0] = 0.0  # a first frame has no motion
        video = _pixels(scene, size, piece)
        given = latents = scene_latents(video, forms)
        if rng.random() < MISDRAWN_SHARE:
            given = scene_latents(_pixels(_misdrawn(scene, rng), size, piece), forms)
        left, top = _near(scene.shapes[int(rng.integers(len(scene.shapes)))], start + num_frames // 2, size, side, rng)
        x, y, n = left // SPATIAL_STRIDE, top // SPATIAL_STRIDE, side // SPATIAL_STRIDE
        cells = [t[0, :, :, y : y + n, x : x + n] for t in (latents, given)]
        rows.append((video[0, :, :, top : top + side, left : left + side], *cells))
    return Batch(*(torch.stack(column) for column in zip(*rows, strict=True)))


def _pixels(scene: Scene, size: int, piece: slice) -> torch.Tensor:
    video = render(scene, num_frames=NUM_FRAMES, height=size, width=size)[piece]
    return video.permute(3, 0, 1, 2)[None].float() / 127.5 - 1


def _misdrawn(scene: Scene, rng: np.random.Generator) -> Scene:
    """The scene with other outlines in the same places."""
    return replace(scene, shapes=tuple(replace(s, shape=str(rng.choice(SHAPES))) for s in scene.shapes))


def _near(shape: MovingShape, frame: int, size: int, side: int, rng: np.random.Generator) -> list[int]:
    """Corner of a window around where a shape is in a frame."""
    middle = shape.positions(NUM_FRAMES)[frame]
    jitter = rng.integers(-side // 4, side // 4 + 1, 2)
    corner = [min(max(int(middle[k] * size) - side // 2 + int(jitter[k]), 0), size - side) for k in (0, 1)]
    return [place - place % SPATIAL_STRIDE for place in corner]


def _clips(step: int) -> tuple[int, int]:
    """Number of clips in a batch and their length: every fourth holds whole clips, as long as they will be given."""
    return (2, NUM_FRAMES) if step % 4 == 3 else (6, SHORT_CLIP)


def train_vae(
    root: Path, *, encoder_steps: int, decoder_steps: int, side: int = WINDOW, compile_kernels: bool = True
) -> AutoencoderKLWan:
    """Train (or resume) both halves and return the averaged model with its latent statistics in the config."""
    torch.manual_seed(0)
    vae = build_vae()
    train_encoder(root, vae, num_steps=encoder_steps, side=side, compile_kernels=compile_kernels)
    train_decoder(root, vae, num_steps=decoder_steps, side=side, compile_kernels=compile_kernels)
    channel_mean, channel_scale = latent_statistics()
    vae.register_to_config(latents_mean=channel_mean, latents_std=channel_scale)
    return vae.eval()


def train_encoder(
    root: Path, vae: AutoencoderKLWan, *, num_steps: int, side: int = WINDOW, compile_kernels: bool = True
) -> None:
    """Train (or resume) the encoder: squared error of the normalised latents."""
    scale = torch.tensor(latent_statistics()[1]).view(1, -1, 1, 1, 1)

    def batch(step: int) -> Batch:
        batch_size, num_frames = _clips(step)
        return windows(step, batch_size, side, num_frames=num_frames, sizes=ENCODER_SIZES)

    def loss(data: Batch, step: int, activate: Callable) -> tuple[torch.Tensor, dict[str, float]]:
        with torch.autocast("cpu", torch.bfloat16):
            mean, log_variance = fast_forward.encode_moments(vae, data.video, activate)
        error = ((mean.float() - data.latents) / scale).square()
        certain = (log_variance.float() - LOG_VARIANCE).square().mean()
        colors, forms = error[:, :4].mean().detach(), error[:, 4:].mean().detach()
        return error.mean() + 1e-3 * certain, {"colors_mse": float(colors), "forms_mse": float(forms)}

    parts = nn.ModuleDict({"encoder": vae.encoder, "quant_conv": vae.quant_conv})
    _fit(StageFolder(root, "encoder"), parts, batch, loss, num_steps, (1.5e-3, 1.5e-3), compile_kernels)


def train_decoder(
    root: Path, vae: AutoencoderKLWan, *, num_steps: int, side: int = WINDOW, compile_kernels: bool = True
) -> None:
    """Train (or resume) the decoder on latents with noise, some of them with other outlines."""
    scale = torch.tensor(latent_statistics()[1]).view(1, -1, 1, 1, 1)

    def batch(step: int) -> Batch:
        batch_size, num_frames = _clips(step)
        return windows(step, batch_size, side, num_frames=num_frames)

    def loss(data: Batch, step: int, activate: Callable) -> tuple[torch.Tensor, dict[str, float]]:
        generator = torch.Generator().manual_seed(step)
        level = torch.rand((len(data.video), 1, 1, 1, 1), generator=generator) * MAX_NOISE * scale
        noisy = data.given + torch.randn(data.given.shape, generator=generator) * level
        with torch.autocast("cpu", torch.bfloat16):
            output = fast_forward.decode_latents(vae, noisy, activate)
        error = output.float() - data.video
        mse = error.square().mean()
        edges = error.diff(dim=3).abs().mean() + error.diff(dim=4).abs().mean()
        psnr = 10 * torch.log10(4 / mse.detach())
        return error.abs().mean() + mse + EDGE_WEIGHT * edges, {
            "psnr_db": float(psnr),
            "l1": float(error.detach().abs().mean()),
        }

    parts = nn.ModuleDict({"decoder": vae.decoder, "post_quant_conv": vae.post_quant_conv})
    _fit(StageFolder(root, "decoder"), parts, batch, loss, num_steps, (3e-3, 2e-3), compile_kernels)


def _fit(
    folder: StageFolder,
    parts: nn.Module,
    make_batch: Callable[[int], Batch],
    loss_of: Callable[[Batch, int, Callable], tuple[torch.Tensor, dict[str, float]]],
    num_steps: int,
    rates: tuple[float, float],
    compile_kernels: bool,
) -> None:
    """Train (or resume) `parts` in place, to their averaged weights; a batch is a function of the step alone."""
    parts.train()
    kernels = [p for name, p in parts.named_parameters() if p.ndim >= 4 and p.shape[0] >= 8 and "conv_in" not in name]
    chosen = {id(p) for p in kernels}
    others = [p for p in parts.parameters() if id(p) not in chosen]
    optimizers = Optimizers(
        kernels, others, muon_lr=rates[0], adamw_lr=rates[1], num_steps=num_steps, decay_share=DECAY_SHARE
    )
    average = AveragedWeights(parts, 0.995)
    step = 0
    if (found := folder.load()) is not None:
        step, tensors, optimizer_state = found
        parts.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")})
        average.values = {k[4:]: v for k, v in tensors.items() if k.startswith("ema.")}
        optimizers.load_state_dict(optimizer_state)
    activate = fast_forward._normalize_and_activate
    if compile_kernels:
        torch._dynamo.config.recompile_limit = 64
        activate = torch.compile(activate)

    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(make_batch, step)
        while step < num_steps:
            batch, ahead = ahead.result(), pool.submit(make_batch, step + 1)
            loss, values = loss_of(batch, step, activate)
            loss.backward()
            norm = optimizers.step(step, clip=1.0)
            average.update(parts, step)
            step += 1
            if step % 20 == 0 or step == num_steps:
                folder.log(step, **values, grad_norm=norm)
            if step % 100 == 0 or step == num_steps:
                tensors = {f"model.{k}": v for k, v in parts.state_dict().items()}
                folder.save(step, tensors | {f"ema.{k}": v for k, v in average.values.items()}, optimizers.state_dict())
    average.copy_to(parts)
    parts.eval()
