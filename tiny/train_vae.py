"""Stage 1: the video autoencoder, on crops and whole clips.

The encoder learns the averages of `latents.py` by squared error. The decoder learns to draw clips from these averages
with noise on them, as those that a denoiser makes are never exact: L1 + squared error + L1 of the edges. The edge term
(differences of neighbouring pixels) keeps the corners of small shapes: without it crosses turn round.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan

from . import fast_forward
from .components import NUM_FRAMES, build_vae
from .dataset import MovingShape, render, sample_scene
from .latents import SPATIAL_STRIDE, latent_statistics, space_time_averages
from .training_state import AveragedWeights, Optimizers, StageFolder

SIDES = (128, 160, 192)
WHOLE = 128
CROP = 64
ENCODER_WEIGHT = 4.0
LOG_VARIANCE = -8.0
"""Of the encoder's second output: the averages are certain."""
MAX_NOISE = 0.15
"""Largest standard deviation of the noise that the decoder is trained with, in normalised latents."""


def crops(seed: int, batch_size: int, side: int) -> torch.Tensor:
    """Random `side` x `side` windows of rendered clips, `[B, 3, frames, side, side]` in [-1, 1], in steps of a cell.

    Two windows come from each clip, and one of them is centred on a shape: most of a clip is background.
    """
    generator = torch.Generator().manual_seed(seed)
    windows = []
    for i in range((batch_size + 1) // 2):
        scene = sample_scene(seed * 4096 + i)
        size = SIDES[int(torch.randint(len(SIDES), (), generator=generator))]
        size = max(size, side)
        clip = render(scene, num_frames=NUM_FRAMES, height=size, width=size)
        first = _near(scene.shapes[0], size, side, generator)
        cells = torch.randint(0, (size - side) // SPATIAL_STRIDE + 1, (2,), generator=generator)
        second = (cells * SPATIAL_STRIDE).tolist()
        for left, top in (first, second):
            windows.append(clip[:, top : top + side, left : left + side])
    batch = torch.stack(windows[:batch_size]).permute(0, 4, 1, 2, 3)
    return batch.float() / 127.5 - 1


def _near(shape: MovingShape, size: int, side: int, generator: torch.Generator) -> list[int]:
    """Corner of a window around the middle of a shape's path."""
    middle = shape.positions(NUM_FRAMES)[NUM_FRAMES // 2]
    jitter = torch.randint(-side // 4, side // 4 + 1, (2,), generator=generator)
    corner = [min(max(int(middle[k] * size) - side // 2 + int(jitter[k]), 0), size - side) for k in (0, 1)]
    return [place - place % SPATIAL_STRIDE for place in corner]


def train_vae(root: Path, *, num_steps: int, batch_size: int = 8, compile_kernels: bool = True) -> AutoencoderKLWan:
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

    def batch(index: int) -> torch.Tensor:
        # Every fourth batch is two whole small clips: the middle block's attention must see more than a crop.
        return crops(index, 2, WHOLE) if index % 4 == 3 else crops(index, batch_size, CROP)

    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(batch, step)
        while step < num_steps:
            video, ahead = ahead.result(), pool.submit(batch, step + 1)
            loss, parts = _loss(vae, video, step, torch.tensor(channel_scale), activate)
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


def _loss(vae, video, step, scale, activate):
    """Encoder against the averages, decoder against the clip; the two share no gradient."""
    latents = space_time_averages(video)
    generator = torch.Generator().manual_seed(step)
    level = torch.rand((len(video), 1, 1, 1, 1), generator=generator) * MAX_NOISE * scale.view(1, -1, 1, 1, 1)
    noisy = latents + torch.randn(latents.shape, generator=generator) * level
    with torch.autocast("cpu", torch.bfloat16):
        mean, log_variance = fast_forward.encode_moments(vae, video, activate)
        output = fast_forward.decode_latents(vae, noisy, activate)
    error = output.float() - video
    mse = error.square().mean()
    edges = error.diff(dim=3).abs().mean() + error.diff(dim=4).abs().mean()
    miss = ((mean.float() - latents) / scale.view(1, -1, 1, 1, 1)).square().mean()
    certain = (log_variance.float() - LOG_VARIANCE).square().mean()
    loss = error.abs().mean() + mse + edges + ENCODER_WEIGHT * miss + 1e-3 * certain
    parts = {
        "psnr_db": float(10 * torch.log10(4 / mse.detach())),
        "l1": float(error.detach().abs().mean()),
        "encoder_mse": float(miss.detach()),
    }
    return loss, parts
