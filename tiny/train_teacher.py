"""Stages 2 to 5: latents, the denoiser with its text encoder on stills, on small clips, and at two larger grids.

Flow matching: x_s = (1 - s) x_0 + s noise, the target is noise - x_0 (algorithm: Lipman et al., arXiv 2210.02747).
Two samples in five keep their first latent frame clean at time 0 and are not scored there, as Wan 2.2 TI2V is trained;
in these the caption's motion is all that is left to learn, which is also what makes motion learnable early.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from diffusers import WanTransformer3DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedTokenizerFast, UMT5EncoderModel

from . import fast_forward
from .components import NUM_FRAMES, build_text_encoder, build_tokenizer, build_transformer
from .dataset import caption, moment, render, sample_scene
from .latents import form_video, normalise, scene_latents
from .training_state import AveragedWeights, Optimizers, StageFolder

TEXT_SLOTS = 24
"""Token slots of a training caption; the longest has 20."""
PIPELINE_SLOTS = 512
"""WanPipeline pads prompt embeddings with zeros to this many slots and masks none of them."""
CAPTION_DROPOUT = 0.1
UNKNOWN_WORD_PROBABILITY = 0.03


@dataclass(frozen=True)
class GridStage:
    """One training run at one clip size.

    Attributes:
        size: height and width of the clips, pixels.
        num_clips: training clips; seeds from 0.
        shift: moves the noise levels that are trained upwards: s -> shift s / (1 + (shift - 1) s).
        decay_share: the last part of the steps, in which the rates fall.
        first_frame_share: samples that keep their first latent frame.
        num_frames: 17, or 1 for stills, whose captions say nothing of motion.
        average_decay: of the exponential average of the weights.
        two_shapes_share: samples with two shapes; None leaves them as they come, a tenth.
        small_until: up to this part of the steps, every second one is on the smaller clips that `train_grid` is given.
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
    first_frame_share: float = 0.4
    num_frames: int = NUM_FRAMES
    average_decay: float = 0.998
    two_shapes_share: float | None = None
    small_until: float = 0.0


def encode_dataset(path: Path, *, size: int, num_clips: int, num_frames: int = NUM_FRAMES) -> torch.Tensor:
    """Normalised latents of the first `num_clips` training clips, bf16 `[N, C, F, h, w]`; kept in `path`.

    They are what the encoder is taught, without its small error. With `num_frames` 1 each is a moment of a clip.
    """
    if path.exists():
        with safe_open(path, "pt") as handle:
            if handle.metadata() == {"size": str(size), "num_clips": str(num_clips)}:
                return load_file(path)["latents"]
    rows = []
    for seed in range(num_clips):
        scene = sample_scene(seed)
        if num_frames == 1:
            scene = moment(scene, float(np.random.default_rng([seed, 3]).random()))
        shape = {"num_frames": num_frames, "height": size, "width": size}
        video = render(scene, **shape).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
        rows.append(normalise(scene_latents(video, form_video(scene, **shape))).bfloat16())
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


QUIET_QUERY = 3.0
"""Size of the queries' constant part against the rest, at the start."""
QUIET_KEY = 0.25
"""Size of the keys' constant part against what tells tokens apart, at the start."""


@torch.no_grad()
def quiet_padding(
    transformer: WanTransformer3DModel, text_encoder: UMT5EncoderModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Set the biases of cross-attention so that padding starts with little weight.

    Some 500 equal keys of padding take all of the softmax from a dozen words: their share of gradients is then 500
    times too small, and after 3,000 steps 0.9 to 1.0 of the weight still lay on padding. Here its key points along a
    fixed direction, words' keys across it, and queries against it: about as much weight as one word.
    """
    texts = [caption(sample_scene(seed), seed, drop_probability=0.0).text for seed in range(32)]
    batch = tokenizer(texts, padding="max_length", max_length=TEXT_SLOTS, return_tensors="pt")
    states = text_encoder(batch.input_ids, batch.attention_mask).last_hidden_state[batch.attention_mask.bool()]
    embed = transformer.condition_embedder.text_embedder
    words, padding = embed(states.float()), embed(torch.zeros_like(states[:1]))
    generator = torch.Generator().manual_seed(0)
    for block in transformer.blocks:
        attention = block.attn2
        direction = torch.randint(0, 2, attention.to_k.bias.shape, generator=generator) * 2.0 - 1
        spread = ((words - padding) @ attention.to_k.weight.T).square().mean().sqrt()
        attention.to_k.bias.copy_(QUIET_KEY * spread * direction - (padding @ attention.to_k.weight.T)[0])
        # Queries come from layer norms: of unit variance, times the norm's own weight.
        query = (attention.to_q.weight * block.norm2.weight).square().sum(1).mean().sqrt()
        attention.to_q.bias.copy_(-QUIET_QUERY * query * direction)


NEIGHBOURS = (((0, -1, 0), (0, 1, 0)), ((0, 0, -1), (0, 0, 1)), ((-1, 0, 0), (1, 0, 0)))
"""Where two heads of each layer look at the start, in latent frames, rows and columns; every third layer alike."""
LOCAL_CONTENT = 0.3
LOCAL_SHARPNESS = 1.8


@torch.no_grad()
def local_heads(transformer: WanTransformer3DModel) -> None:
    """Let two of the three heads of each layer start by looking at one neighbour, as convolutions do.

    Rotary angles change by one radian and less from token to token, and tell neighbours apart only where a head puts
    all its weight on the fastest ones. In a grid of 8 x 8 no head found that in 4,000 steps, and shapes stayed smears
    that differed from frame to frame. Here biases put it there, and everything stays trainable. (The idea is that of
    ConViT, arXiv 2103.10697.)
    """
    rope = transformer.rope
    pairs = (rope.t_dim // 2, rope.h_dim // 2, rope.w_dim // 2)
    first = (0, pairs[0], pairs[0] + pairs[1])
    head_dim = transformer.config.attention_head_dim
    amplitude = math.sqrt(head_dim / 6)  # six pairs hold all of a head: two of each axis
    for index, block in enumerate(transformer.blocks):
        attention = block.attn1
        for head, offset in enumerate(NEIGHBOURS[index % len(NEIGHBOURS)]):
            rows = slice(head * head_dim, (head + 1) * head_dim)
            query, key = torch.zeros(head_dim // 2, 2), torch.zeros(head_dim // 2, 2)
            for axis, steps in enumerate(offset):
                for fast in range(2):
                    angle = steps * 10000.0 ** (-fast / pairs[axis])
                    key[first[axis] + fast, 0] = amplitude
                    query[first[axis] + fast] = amplitude * torch.tensor([math.cos(angle), math.sin(angle)])
            for layer, bias in ((attention.to_q, query), (attention.to_k, key)):
                layer.weight[rows] *= LOCAL_CONTENT
                layer.bias[rows] = bias.flatten()
            attention.norm_q.weight[rows] = LOCAL_SHARPNESS
            attention.norm_k.weight[rows] = LOCAL_SHARPNESS


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


def train_grid(
    root: Path,
    stage: GridStage,
    latents: torch.Tensor,
    start: tuple[WanTransformer3DModel, UMT5EncoderModel] | None = None,
    *,
    small: tuple[GridStage, torch.Tensor] | None = None,
    compile_blocks: bool = True,
) -> tuple[WanTransformer3DModel, UMT5EncoderModel]:
    """Train (or resume) the denoiser and text encoder together; returns the averaged weights.

    `small` gives the smaller clips, with size, batch and shift of their stage.
    """
    folder = StageFolder(root, stage.name)
    torch.manual_seed(1)
    transformer, text_encoder = start or (build_transformer(), build_text_encoder())
    tokenizer = build_tokenizer()
    if start is None:
        local_heads(transformer)
        quiet_padding(transformer, text_encoder, tokenizer)
    model = nn.ModuleDict({"transformer": transformer, "text_encoder": text_encoder}).train()
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
    average = AveragedWeights(model, stage.average_decay)
    step = 0
    if (found := folder.load()) is not None:
        step, tensors, optimizer_state = found
        # Not strict: of tied embeddings only one name was saved.
        model.load_state_dict({k[6:]: v for k, v in tensors.items() if k.startswith("model.")}, strict=False)
        average.values = {k[4:]: v for k, v in tensors.items() if k.startswith("ema.")}
        optimizers.load_state_dict(optimizer_state)

    runs = [_Clips(stage, latents, transformer)]
    if small is not None:
        runs.append(_Clips(replace(small[0], two_shapes_share=stage.two_shapes_share), small[1], transformer))
    denoise = torch.compile(fast_forward.denoise, dynamic=False) if compile_blocks else fast_forward.denoise

    while step < stage.num_steps:
        # The steps that are logged, every tenth, are all on the stage's own clips.
        on_small = small is not None and step < stage.small_until * stage.num_steps and step % 2 == 0
        loss, parts = _loss(runs[on_small], step, tokenizer, model, denoise)
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


class _Clips:
    """The latents of one clip size, and how they are drawn."""

    def __init__(self, stage: GridStage, latents: torch.Tensor, transformer: WanTransformer3DModel) -> None:
        self.stage, self.latents = stage, latents
        side = latents.shape[-1] // transformer.config.patch_size[2]
        self.table = fast_forward.rotary_table(transformer, (latents.shape[2], side, side))
        if stage.two_shapes_share is not None:
            shapes = np.array([len(sample_scene(seed).shapes) for seed in range(len(latents))])
            self._by_shapes = np.flatnonzero(shapes == 1), np.flatnonzero(shapes == 2)

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Which clips make the next batch, `[B]`."""
        size, share = self.stage.batch_size, self.stage.two_shapes_share
        if share is None:
            return rng.integers(0, len(self.latents), size)
        single, double = (rng.choice(rows, size) for rows in self._by_shapes)
        return np.where(rng.random(size) < share, double, single)


def _loss(clips, step, tokenizer, model, denoise):
    """Flow-matching loss of one step; everything random in it is a function of the step alone."""
    stage, latents = clips.stage, clips.latents
    rng = np.random.default_rng([stage.size, stage.num_frames, step])
    batch, frames = stage.batch_size, latents.shape[2]
    index = clips.draw(rng)
    clean = latents[torch.as_tensor(index)].float()
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(step))
    sigma, keeps_first = _draw(rng, batch, frames, stage.shift, stage.first_frame_share)
    s = torch.as_tensor(sigma)
    noisy = torch.lerp(clean, noise, s[:, None, :, None, None])

    texts = []
    for i in index:
        # A new caption for the clip each time it is seen: what is dropped changes. A still says nothing of motion.
        scene, said = sample_scene(int(i)), int(rng.integers(1 << 30))
        words = caption(scene, said, unsaid=("motion",) if frames == 1 else ()).text.split()
        words = ["unknown" if rng.random() < UNKNOWN_WORD_PROBABILITY else w for w in words]
        texts.append("" if rng.random() < CAPTION_DROPOUT else " ".join(words))
    lengths = np.exp(rng.uniform(np.log(TEXT_SLOTS + 1), np.log(PIPELINE_SLOTS), batch)).astype(int)
    lengths = np.where(rng.random(batch) < 0.5, PIPELINE_SLOTS, lengths)

    with torch.autocast("cpu", torch.bfloat16):
        text, bias = encode_captions(tokenizer, model["text_encoder"], texts, lengths)
        velocity = denoise(model["transformer"], noisy, s * 1000, text, bias, clips.table)
    scored = torch.ones(batch, frames)
    scored[torch.as_tensor(keeps_first), 0] = 0
    squared = (velocity.float() - (noise - clean)).square().mean(1)
    error = squared.mean((2, 3))
    loss = (error * scored).sum() / scored.sum()
    per_clip = (error.detach() * scored).sum(1) / scored.sum(1)
    kept = torch.as_tensor(keeps_first)
    halves = {"loss_text": per_clip[~kept], "loss_image": per_clip[kept]}
    parts = {name: float(values.mean()) for name, values in halves.items() if len(values)}
    return loss, parts
