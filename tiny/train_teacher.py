"""Stages 2 to 4: latents, the denoiser with its text encoder, and the same at the larger grid.

Flow matching: x_s = (1 - s) x_0 + s noise, the target is noise - x_0 (algorithm: Lipman et al., arXiv 2210.02747).
Half of the samples keep their first latent frame clean at time 0 and are not scored there, as Wan 2.2 TI2V is trained;
in these the caption's motion is all that is left to learn, which is also what makes motion learnable early.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

from . import fast_forward
from .components import NUM_FRAMES, build_text_encoder, build_tokenizer, build_transformer
from .dataset import EXTENTS, caption, render, sample_scene
from .training_state import AveragedWeights, Optimizers, StageFolder

TEXT_SLOTS = 24
"""Token slots of a training caption; the longest has 20."""
PIPELINE_SLOTS = 512
"""WanPipeline pads prompt embeddings with zeros to this many slots and masks none of them."""
CAPTION_DROPOUT = 0.1
UNKNOWN_WORD_PROBABILITY = 0.03
POSITION_KNOWN_BELOW = 0.9
"""Noise level under which a shape's place can be told."""
BOX_MARGIN = 0.05


@dataclass(frozen=True)
class GridStage:
    """One training run at one clip size.

    Attributes:
        first_frame_share: samples that keep their first latent frame.
        shape_weight: of the loss around shapes; what tells a square from a circle is few of a clip's numbers.
    """

    name: str
    size: int
    num_clips: int
    num_steps: int
    batch_size: int
    muon_lr: float
    adamw_lr: float
    shift: float
    decay_share: float = 0.35
    first_frame_share: float = 0.5
    shape_weight: float = 1.0


def encode_dataset(vae: AutoencoderKLWan, path: Path, *, size: int, num_clips: int) -> torch.Tensor:
    """Normalised latents of the first `num_clips` training clips, bf16 `[N, C, F, h, w]`; kept in `path`."""
    if path.exists():
        with safe_open(path, "pt") as handle:
            if handle.metadata() == {"size": str(size), "num_clips": str(num_clips)}:
                return load_file(path)["latents"]
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    rows = []
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for first in range(0, num_clips, 4):
            seeds = range(first, min(first + 4, num_clips))
            clips = [render(sample_scene(s), num_frames=NUM_FRAMES, height=size, width=size) for s in seeds]
            video = torch.stack(clips).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
            latents, _ = fast_forward.encode_moments(vae, video)
            rows.append(((latents.float() - mean) / std).bfloat16())
    latents = torch.cat(rows).contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    save_file({"latents": latents}, temporary, metadata={"size": str(size), "num_clips": str(num_clips)})
    temporary.replace(path)
    return latents


def encode_captions(
    tokenizer: PreTrainedTokenizerFast, text_encoder: UMT5EncoderModel, captions: list[str], slots: np.ndarray
) -> tuple[torch.Tensor, torch.Tensor]:
    """Text states `[B, TEXT_SLOTS + 1, d]` and their score bias `[B, TEXT_SLOTS + 1]`.

    The last slot is the zero vector that stands for all of a prompt's padding: a bias of log(number of pads) makes the
    softmax see it that many times. `slots` is the padded length that each sample pretends to have.
    """
    batch = tokenizer(captions, padding="max_length", max_length=TEXT_SLOTS, truncation=True, return_tensors="pt")
    mask = batch.attention_mask
    states = text_encoder(batch.input_ids, mask).last_hidden_state.float() * mask[..., None]
    states = torch.cat([states, torch.zeros_like(states[:, :1])], dim=1)
    pads = torch.as_tensor(slots) - mask.sum(1)
    bias = torch.where(mask.bool(), 0.0, -1e4)
    return states, torch.cat([bias, pads.clamp(min=1).float().log()[:, None]], dim=1)


def _draw(
    rng: np.random.Generator, batch_size: int, frames: int, shift: float, first_frame_share: float
) -> tuple[np.ndarray, np.ndarray]:
    """Noise level of each latent frame `[B, F]` and which samples keep their first frame `[B]`."""
    u = np.where(
        rng.random(batch_size) < 0.8,
        1 / (1 + np.exp(-1.2 * rng.standard_normal(batch_size))),
        rng.random(batch_size),
    )
    sigma = np.repeat((shift * u / (1 + (shift - 1) * u))[:, None], frames, axis=1)
    keeps_first = rng.random(batch_size) < first_frame_share
    sigma[keeps_first, 0] = 0.0
    return sigma.astype(np.float32), keeps_first


def _shape_weights(index: np.ndarray, sigma: np.ndarray, grid: tuple[int, ...], weight: float) -> torch.Tensor:
    """Weights of the squared error `[B, F, h, w]`: `weight` in a wide box around each shape, else 1.

    At high noise, where the place itself is unknown, all are 1: there the weights would draw shapes to where they are
    not, as they depend on the clean clip.
    """
    frames, height, width = grid
    weights = torch.ones(len(index), frames, height, width)
    if weight == 1:
        return weights
    for clip, noise, seed in zip(weights, sigma[:, -1], index, strict=True):
        if noise > POSITION_KNOWN_BELOW:
            continue
        for shape in sample_scene(int(seed)).shapes:
            track = shape.positions(NUM_FRAMES)
            left, right, up, down = (extent * shape.radius + BOX_MARGIN for extent in EXTENTS[shape.shape])
            for frame in range(frames):
                seen = track[max(0, 4 * frame - 3) : 4 * frame + 1]
                (x0, y0), (x1, y1) = seen.min(0), seen.max(0)
                rows = slice(max(0, math.floor((y0 - up) * height)), math.ceil((y1 + down) * height))
                columns = slice(max(0, math.floor((x0 - left) * width)), math.ceil((x1 + right) * width))
                clip[frame, rows, columns] = weight
    return weights


def train_grid(
    root: Path,
    stage: GridStage,
    latents: torch.Tensor,
    start: tuple[WanTransformer3DModel, UMT5EncoderModel] | None = None,
    *,
    compile_blocks: bool = True,
) -> tuple[WanTransformer3DModel, UMT5EncoderModel]:
    """Train (or resume) the denoiser and text encoder together; returns the averaged weights."""
    folder = StageFolder(root, stage.name)
    torch.manual_seed(1)
    transformer, text_encoder = start or (build_transformer(), build_text_encoder())
    model = nn.ModuleDict({"transformer": transformer, "text_encoder": text_encoder}).train()
    tokenizer = build_tokenizer()
    hidden = (".blocks.", ".encoder.block.")
    matrices = [
        p
        for name, p in model.named_parameters()
        if p.ndim == 2 and any(part in name for part in hidden) and "relative_attention_bias" not in name
    ]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    optimizers = Optimizers(
        matrices,
        others,
        muon_lr=stage.muon_lr,
        adamw_lr=stage.adamw_lr,
        num_steps=stage.num_steps,
        decay_share=stage.decay_share,
    )
    average = AveragedWeights(model, 0.998)
    step = 0
    if (found := folder.load()) is not None:
        step, tensors, optimizer_state = found
        model.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")}, strict=False)
        average.values = {k[4:]: v for k, v in tensors.items() if k.startswith("ema.")}
        optimizers.load_state_dict(optimizer_state)

    side = latents.shape[-1] // transformer.config.patch_size[2]
    table = fast_forward.rotary_table(transformer, (latents.shape[2], side, side))
    denoise = torch.compile(fast_forward.denoise) if compile_blocks else fast_forward.denoise

    while step < stage.num_steps:
        loss, parts = _loss(stage, step, latents, tokenizer, text_encoder, transformer, denoise, table)
        loss.backward()
        norm = optimizers.step(step, clip=1.0)
        average.update(model, step)
        step += 1
        if step % 10 == 0:
            folder.log(step, loss=float(loss.detach()), grad_norm=norm, **parts)
        if step % 100 == 0 or step == stage.num_steps:
            tensors = {f"model.{k}": p.detach() for k, p in model.named_parameters()}
            folder.save(step, tensors | {f"ema.{k}": v for k, v in average.values.items()}, optimizers.state_dict())
    average.copy_to(model)
    return transformer.eval(), text_encoder.eval()


def _loss(stage, step, latents, tokenizer, text_encoder, transformer, denoise, table):
    """Flow-matching loss of one step; everything random in it is a function of the step alone."""
    rng = np.random.default_rng([stage.size, step])
    batch, frames = stage.batch_size, latents.shape[2]
    index = rng.integers(0, len(latents), batch)
    clean = latents[torch.as_tensor(index)].float()
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(step))
    sigma, keeps_first = _draw(rng, batch, frames, stage.shift, stage.first_frame_share)
    s = torch.as_tensor(sigma)
    noisy = torch.lerp(clean, noise, s[:, None, :, None, None])

    texts = []
    for i in index:
        # A new caption for the clip each time it is seen: what is dropped changes.
        words = caption(sample_scene(int(i)), int(rng.integers(1 << 30))).text.split()
        words = ["unknown" if rng.random() < UNKNOWN_WORD_PROBABILITY else w for w in words]
        texts.append("" if rng.random() < CAPTION_DROPOUT else " ".join(words))
    lengths = np.exp(rng.uniform(np.log(TEXT_SLOTS + 1), np.log(PIPELINE_SLOTS), batch)).astype(int)
    lengths = np.where(rng.random(batch) < 0.5, PIPELINE_SLOTS, lengths)

    with torch.autocast("cpu", torch.bfloat16):
        text, bias = encode_captions(tokenizer, text_encoder, texts, lengths)
        velocity = denoise(transformer, noisy, s * 1000, text, bias, table)
    scored = torch.ones(batch, frames)
    scored[torch.as_tensor(keeps_first), 0] = 0
    squared = (velocity.float() - (noise - clean)).square().mean(1)
    weight = scored[:, :, None, None] * _shape_weights(index, sigma, clean.shape[2:], stage.shape_weight)
    loss = (squared * weight).sum() / weight.sum()
    error = squared.detach().mean((2, 3))
    per_clip = (error * scored).sum(1) / scored.sum(1)
    kept = torch.as_tensor(keeps_first)
    halves = {"loss_text": per_clip[~kept], "loss_image": per_clip[kept]}
    return loss, {name: float(values.mean()) for name, values in halves.items() if len(values)}
