"""Pictures of a training run: loss curves, reconstructions, samples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanPipeline
from PIL import Image

from . import fast_forward
from .components import NUM_FRAMES
from .dataset import held_out_captions, render, sample_scene


def loss_curve(log: Path, picture: Path, *, key: str) -> None:
    """Plot one logged value over the steps, raw and smoothed."""
    from matplotlib.figure import Figure

    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    points = {r["step"]: r[key] for r in records if key in r}  # a resumed run logs some steps again: keep the last
    steps, values = np.array(sorted(points)), np.array([points[s] for s in sorted(points)])
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(steps, values, alpha=0.3, label="logged")
    width = max(1, len(values) // 30)
    smooth = np.convolve(values, np.ones(width) / width, mode="valid")
    axes.plot(steps[width - 1 :], smooth, label=f"mean of {width}")
    axes.set(xlabel="step", ylabel=key, title=log.parent.name)
    if key.endswith(("loss", "mse")):
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=110)


def _save_rows(rows: list[torch.Tensor], picture: Path) -> None:
    """Rows of clips `[F, H, W, 3]` uint8, five frames of each side by side."""
    strips = [torch.cat(list(row[torch.linspace(0, len(row) - 1, 5).long()]), dim=1) for row in rows]
    Image.fromarray(torch.cat(strips).numpy()).save(picture)


@torch.no_grad()
def reconstruction_sheet(vae: AutoencoderKLWan, picture: Path, *, size: int, num_clips: int = 4) -> None:
    """Clips above their reconstructions."""
    rows = []
    for seed in range(num_clips):
        clip = render(sample_scene(seed, held_out=True), num_frames=NUM_FRAMES, height=size, width=size)
        video = clip.permute(3, 0, 1, 2)[None].float() / 127.5 - 1
        output = fast_forward.decode_latents(vae, fast_forward.encode_moments(vae, video)[0])
        back = ((output[0].clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0)
        rows += [clip, back]
    _save_rows(rows, picture)


def sample_sheet(
    pipe: WanPipeline,
    picture: Path,
    *,
    size: int,
    num_inference_steps: int = 16,
    num_clips: int = 6,
    num_frames: int = NUM_FRAMES,
) -> list[str]:
    """Samples of held-out captions, one row each; returns the captions."""
    prompts = [words.text for _, words in held_out_captions(num_clips)]
    frames = pipe(
        prompts,
        height=size,
        width=size,
        num_frames=num_frames,
        num_inference_steps=num_inference_steps,
        guidance_scale=3.0,
        max_sequence_length=32,
        generator=[torch.Generator().manual_seed(i) for i in range(num_clips)],
        output_type="np",
    ).frames
    _save_rows([torch.from_numpy((clip * 255).round().astype(np.uint8)) for clip in frames], picture)
    return prompts
