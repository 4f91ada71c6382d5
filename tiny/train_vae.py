"""Stage 1: the video autoencoder, on windows that hold whole shapes.

The encoder learns the latents of `latents.py` by squared error. The decoder learns to draw clips from such latents as a
denoiser makes them: with noise, and in half of the batches with outlines that are not those of the form (colours are
seen early and blurred, and it is the form's own latents that are to be believed). L1 + squared error + L1 of the edges;
the edge term (differences of neighbouring pixels) keeps the corners of small shapes: without it crosses turn round.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan

from . import fast_forward
from .components import NUM_FRAMES, build_vae
from .dataset import SHAPES, MovingShape, Scene, render, sample_scene
from .latents import SPATIAL_STRIDE, form_video, latent_statistics, scene_latents
from .training_state import AveragedWeights, Optimizers, StageFolder

SIDES = (128, 160, 192)
WINDOW = 128
ENCODER_WEIGHT = 4.0
LOG_VARIANCE = -8.0
"""Of the encoder's second output: the averages are certain."""
MAX_NOISE = 0.2
"""Largest standard deviation of the noise that the decoder is trained with, in normalised latents."""
MISDRAWN_SHARE = 0.5
"""Share of clips in which the decoder sees outlines of other forms."""


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


def windows(seed: int, batch_size: int, side: int) -> Batch:
    """`side` x `side` windows of rendered clips around a shape, in steps of a cell.

    They hold whole shapes: a corner alone does not tell what it belongs to.
    """
    rng = np.random.default_rng([seed, 11])
    rows = []
    for i in range(batch_size):
        scene = sample_scene(seed * 4096 + i)
        size = max(int(rng.choice(SIDES)), side)
        frame = {"num_frames": NUM_FRAMES, "height": size, "width": size}
        forms = form_video(scene, **frame)
        video = _pixels(scene, **frame)
        given = latents = scene_latents(video, forms)
        if rng.random() < MISDRAWN_SHARE:
            given = scene_latents(_pixels(_misdrawn(scene, rng), **frame), forms)
        left, top = _near(scene.shapes[int(rng.integers(len(scene.shapes)))], size, side, rng)
        x, y, n = left // SPATIAL_STRIDE, top // SPATIAL_STRIDE, side // SPATIAL_STRIDE
        cells = [t[0, :, :, y : y + n, x : x + n] for t in (latents, given)]
        rows.append((video[0, :, :, top : top + side, left : left + side], *cells))
    return Batch(*(torch.stack(column) for column in zip(*rows, strict=True)))


def _pixels(scene: Scene, **frame: int) -> torch.Tensor:
    return render(scene, **frame).permute(3, 0, 1, 2)[None].float() / 127.5 - 1


def _misdrawn(scene: Scene, rng: np.random.Generator) -> Scene:
    """The scene with other outlines, up to an eighth too large or too small, in the same places."""
    shapes = [
        replace(s, shape=str(rng.choice(SHAPES)), radius=s.radius * float(rng.uniform(0.875, 1.125)))
        for s in scene.shapes
    ]
    return replace(scene, shapes=tuple(shapes))


def _near(shape: MovingShape, size: int, side: int, rng: np.random.Generator) -> list[int]:
    """Corner of a window around the middle of a shape's path."""
    middle = shape.positions(NUM_FRAMES)[NUM_FRAMES // 2]
    jitter = rng.integers(-side // 4, side // 4 + 1, 2)
    corner = [min(max(int(middle[k] * size) - side // 2 + int(jitter[k]), 0), size - side) for k in (0, 1)]
    return [place - place % SPATIAL_STRIDE for place in corner]


def train_vae(root: Path, *, num_steps: int, batch_size: int = 2, side: int = WINDOW, compile_kernels: bool = True) -> AutoencoderKLWan:
    """Train (or resume) and return the averaged model with its latent statistics in the config."""
    folder = StageFolder(root, "vae")
    torch.manual_seed(0)
    channel_mean, channel_scale = latent_statistics()
    vae = build_vae().train()
    kernels = [p for name, p in vae.named_parameters() if p.ndim >= 4 and "conv_in" not in name]
    kernels = [p for p in kernels if p.shape[0] >= 8]
    chosen = {id(p) for p in kernels}
    others = [p for p in vae.parameters() if id(p) not in chosen]
    optimizers = Optimizers(kernels, others, muon_lr=3e-3, adamw_lr=2e-3, num_steps=num_steps, decay_share=0.6)
    average = AveragedWeights(vae, 0.995)
    step = 0
    if (found := folder.load()) is not None:
        step, tensors, optimizer_state = found
        vae.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")})
        average.values = {k[4:]: v for k, v in tensors.items() if k.startswith("ema.")}
        optimizers.load_state_dict(optimizer_state)

    activate = fast_forward._normalize_and_activate
    if compile_kernels:
        torch._dynamo.config.recompile_limit = 64
        activate = torch.compile(activate)

    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(windows, step, batch_size, side)
        while step < num_steps:
            batch, ahead = ahead.result(), pool.submit(windows, step + 1, batch_size, side)
            loss, parts = _loss(vae, batch, step, torch.tensor(channel_scale), activate)
            loss.backward()
            norm = optimizers.step(step, clip=1.0)
            average.update(vae, step)
            step += 1
            if step % 20 == 0:
                folder.log(step, **parts, grad_norm=norm)
            if step % 100 == 0 or step == num_steps:
                tensors = {f"model.{k}": v for k, v in vae.state_dict().items()}
                folder.save(step, tensors | {f"ema.{k}": v for k, v in average.values.items()}, optimizers.state_dict())

    average.copy_to(vae)
    vae.eval()
    vae.register_to_config(latents_mean=channel_mean, latents_std=channel_scale)
    return vae


def _loss(vae, batch, step, scale, activate):
    """Encoder against the latents, decoder against the clip; the two share no gradient."""
    video, scale = batch.video, scale.view(1, -1, 1, 1, 1)
    generator = torch.Generator().manual_seed(step)
    level = torch.rand((len(video), 1, 1, 1, 1), generator=generator) * MAX_NOISE * scale
    noisy = batch.given + torch.randn(batch.given.shape, generator=generator) * level
    with torch.autocast("cpu", torch.bfloat16):
        mean, log_variance = fast_forward.encode_moments(vae, video, activate)
        output = fast_forward.decode_latents(vae, noisy, activate)
    error = output.float() - video
    mse = error.square().mean()
    edges = error.diff(dim=3).abs().mean() + error.diff(dim=4).abs().mean()
    miss = ((mean.float() - batch.latents) / scale).square().mean()
    certain = (log_variance.float() - LOG_VARIANCE).square().mean()
    loss = error.abs().mean() + mse + edges + ENCODER_WEIGHT * miss + 1e-3 * certain
    parts = {
        "psnr_db": float(10 * torch.log10(4 / mse.detach())),
        "l1": float(error.detach().abs().mean()),
        "encoder_mse": float(miss.detach()),
    }
    return loss, parts
