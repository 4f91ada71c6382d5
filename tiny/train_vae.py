"""Stage 1: the video autoencoder. L1 + squared error + L1 of the edges + a small KL term, on crops and whole clips.

The edge term (differences of neighbouring pixels) keeps the corners of small shapes: without it crosses turn round.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from diffusers import AutoencoderKLWan

from . import fast_forward
from .components import NUM_FRAMES, build_vae
from .dataset import MovingShape, render, sample_scene
from .training_state import AveragedWeights, Optimizers, StageFolder

SIDES = (64, 80, 96)
WHOLE = 64
CROP = 32
KL_WEIGHT = 2e-4


def crops(seed: int, batch_size: int, side: int, *, all_near: bool = False) -> torch.Tensor:
    """Random `side` x `side` windows of rendered clips, `[B, 3, frames, side, side]` in [-1, 1].

    Two windows come from each clip, and one of them (or with `all_near` both) is centred on a shape: most of a clip is
    background.
    """
    generator = torch.Generator().manual_seed(seed)
    windows = []
    for i in range((batch_size + 1) // 2):
        scene = sample_scene(seed * 4096 + i)
        size = SIDES[int(torch.randint(len(SIDES), (), generator=generator))]
        size = max(size, side)
        clip = render(scene, num_frames=NUM_FRAMES, height=size, width=size)
        first = _near(scene.shapes[0], size, side, generator)
        if all_near:
            second = _near(scene.shapes[-1], size, side, generator)
        else:
            second = torch.randint(0, size - side + 1, (2,), generator=generator).tolist()
        for left, top in (first, second):
            windows.append(clip[:, top : top + side, left : left + side])
    batch = torch.stack(windows[:batch_size]).permute(0, 4, 1, 2, 3)
    return batch.float() / 127.5 - 1


def _near(shape: MovingShape, size: int, side: int, generator: torch.Generator) -> list[int]:
    """Corner of a window around the middle of a shape's path."""
    middle = shape.positions(NUM_FRAMES)[NUM_FRAMES // 2]
    jitter = torch.randint(-side // 4, side // 4 + 1, (2,), generator=generator)
    return [min(max(int(middle[k] * size) - side // 2 + int(jitter[k]), 0), size - side) for k in (0, 1)]


def train_vae(root: Path, *, num_steps: int, batch_size: int = 8, compile_kernels: bool = True) -> AutoencoderKLWan:
    """Train (or resume) and return the averaged model with its latent statistics in the config."""
    folder = StageFolder(root, "vae")
    torch.manual_seed(0)
    vae = build_vae().train()
    kernels = [p for name, p in vae.named_parameters() if p.ndim >= 4 and "conv_in" not in name]
    kernels = [p for p in kernels if p.shape[0] >= 8]
    chosen = {id(p) for p in kernels}
    others = [p for p in vae.parameters() if id(p) not in chosen]
    optimizers = Optimizers(kernels, others, muon_lr=3e-3, adamw_lr=2e-3, num_steps=num_steps, decay_share=0.5)
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
        # Every eighth batch is one whole small clip: the middle block's attention must see more than a crop.
        return crops(index, 2, WHOLE) if index % 8 == 7 else crops(index, batch_size, CROP)

    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(batch, step)
        while step < num_steps:
            video, ahead = ahead.result(), pool.submit(batch, step + 1)
            with torch.autocast("cpu", torch.bfloat16):
                mean, log_variance = fast_forward.encode_moments(vae, video, activate)
                noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(step))
                latents = mean + noise * (0.5 * log_variance).exp()
                output = fast_forward.decode_latents(vae, latents, activate)
            error = output.float() - video
            mean, log_variance = mean.float(), log_variance.float()
            kl = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance).mean()
            mse = error.square().mean()
            edges = error.diff(dim=3).abs().mean() + error.diff(dim=4).abs().mean()
            (error.abs().mean() + mse + edges + KL_WEIGHT * kl).backward()
            norm = optimizers.step(step, clip=1.0)
            average.update(vae, step)
            step += 1
            if step % 20 == 0:
                psnr = float(10 * torch.log10(4 / mse.detach()))
                folder.log(
                    step, psnr_db=psnr, l1=float(error.detach().abs().mean()), kl=float(kl.detach()), grad_norm=norm
                )
            if step % 250 == 0 or step == num_steps:
                tensors = {f"model.{k}": v for k, v in vae.state_dict().items()}
                folder.save(step, tensors | {f"ema.{k}": v for k, v in average.values.items()}, optimizers.state_dict())

    average.copy_to(vae)
    vae.eval()
    channel_mean, channel_std = latent_statistics(vae)
    vae.register_to_config(latents_mean=channel_mean, latents_std=channel_std)
    return vae


def train_decoder(
    root: Path,
    vae: AutoencoderKLWan,
    *,
    num_steps: int,
    name: str = "decoder",
    all_near: bool = False,
    batch_size: int = 6,
    compile_kernels: bool = True,
) -> AutoencoderKLWan:
    """Train the decoder alone, at a gentler rate; the latents, and what was trained on them, stay as they are.

    Latents are rounded to bfloat16, as the denoiser's data are. With `all_near` every small window holds a shape.
    """
    folder = StageFolder(root, name)
    parts = torch.nn.ModuleDict({"decoder": vae.decoder, "post_quant_conv": vae.post_quant_conv}).train()
    kernels = [p for name, p in parts.named_parameters() if p.ndim >= 4 and p.shape[0] >= 8 and "conv_in" not in name]
    chosen = {id(p) for p in kernels}
    others = [p for p in parts.parameters() if id(p) not in chosen]
    optimizers = Optimizers(kernels, others, muon_lr=1e-3, adamw_lr=5e-4, num_steps=num_steps, decay_share=0.7)
    average = AveragedWeights(parts, 0.99)
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
        ahead = pool.submit(_decoder_batch, step, batch_size, all_near)
        while step < num_steps:
            video, ahead = ahead.result(), pool.submit(_decoder_batch, step + 1, batch_size, all_near)
            with torch.autocast("cpu", torch.bfloat16):
                with torch.no_grad():
                    latents = fast_forward.encode_moments(vae, video)[0].bfloat16()
                output = fast_forward.decode_latents(vae, latents, activate)
            error = output.float() - video
            mse = error.square().mean()
            edges = error.diff(dim=3).abs().mean() + error.diff(dim=4).abs().mean()
            (error.abs().mean() + mse + 2 * edges).backward()
            norm = optimizers.step(step, clip=1.0)
            average.update(parts, step)
            step += 1
            if step % 20 == 0:
                psnr = float(10 * torch.log10(4 / mse.detach()))
                folder.log(step, psnr_db=psnr, l1=float(error.detach().abs().mean()), grad_norm=norm)
            if step % 100 == 0 or step == num_steps:
                tensors = {f"model.{k}": v for k, v in parts.state_dict().items()}
                folder.save(step, tensors | {f"ema.{k}": v for k, v in average.values.items()}, optimizers.state_dict())
    average.copy_to(parts)
    return vae.eval()


def _decoder_batch(index: int, batch_size: int, all_near: bool) -> torch.Tensor:
    # As in the first stage, with new clips: seeds beyond those that it saw.
    index += 2_000_000 if all_near else 1_000_000
    return crops(index, 2, WHOLE) if index % 4 == 3 else crops(index, batch_size, CROP, all_near=all_near)


@torch.no_grad()
def latent_statistics(vae: AutoencoderKLWan, num_clips: int = 24) -> tuple[list[float], list[float]]:
    """Per-channel mean and standard deviation of the latents of training clips."""
    latents = []
    for seed in range(num_clips):
        clip = render(sample_scene(seed), num_frames=NUM_FRAMES, height=64, width=64)
        video = clip.permute(3, 0, 1, 2)[None].float() / 127.5 - 1
        latents.append(fast_forward.encode_moments(vae, video)[0])
    stacked = torch.cat(latents).transpose(0, 1).flatten(1)
    return stacked.mean(1).tolist(), stacked.std(1).tolist()
