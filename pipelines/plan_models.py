"""The published Wan models as data: shapes, parameters and operations, counted by formula.

L tokens, D channels, F of the feed-forward, d of a head; a multiplication with its addition counts as two operations.

| part, per layer | operations |
|---|---|
| linear layers on tokens: q, k, v, o, cross q and o, feed-forward | 2 L (6 D^2 + 2 D F) |
| cross keys and values of 512 text (and 257 image) tokens | 4 (512 + 257) D^2 |
| self-attention, dense | 4 L^2 D |
| cross-attention | 4 L (512 + 257) D |
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..attention.auto import computed_crossover, expected_flop_sparsity
from ..attention.backends import AUTO
from ..attention.config import AttentionConfig
from ..core.config import ConfigError, require

TEXT_TOKENS, IMAGE_TOKENS = 512, 257
TEXT_ENCODER_PARAMETERS = 5_680_910_336
"""Of the umT5-XXL encoder, which all models share; held against transformers' class in a test."""
TEXT_ENCODER_EMBEDDING = 256_384 * 4096
IMAGE_ENCODER_PARAMETERS = 632_076_800
"""Of CLIP ViT-H/14, which reads the first frame for Wan 2.1 I2V; likewise."""


@dataclass(frozen=True)
class VAE:
    """A video autoencoder: what its decoder and encoder take, found by running them without data (see the tests).

    Attributes:
        parameters: of encoder and decoder.
        spatial: pixels per latent pixel, height and width alike.
        temporal: frames per latent frame.
        channels: of the latents.
        decode_elements: most elements alive while decoding, per pixel of a frame, whatever the number of frames.
        decode_elements_per_frame: what every frame of the clip adds to that: the pictures made so far.
        encode_elements: likewise while encoding a clip.
        encode_elements_per_frame: likewise.
        decode_flops: operations per pixel and frame.
    """

    parameters: int
    spatial: int
    temporal: int
    channels: int
    decode_elements: float
    decode_elements_per_frame: float
    encode_elements: float
    encode_elements_per_frame: float
    decode_flops: float


VAES = {
    "wan2.1": VAE(126_892_531, 8, 4, 16, 4863, 3.06, 3525, 3.13, 8.5e6),
    "wan2.2": VAE(704_688_668, 16, 4, 48, 5375, 3.05, 1796, 6.1, 18.6e6),
}


@dataclass(frozen=True)
class ModelShape:
    """One model.

    Attributes:
        name: as on the command line.
        layers, heads, head_dim, ffn, in_channels, out_channels: of the transformer.
        experts: transformers, 2 where one takes over from the other.
        vae: key of `VAES`.
        image_dim: of the image tokens in cross-attention, None without.
        image_to_video: whether a first frame is encoded.
        per_token_time: whether every token has a time of its own.
        steps: sampling steps of the original.
        guidance: whether the original takes two forward passes a step.
        freq_dim, text_dim: widths of the time and text features.
        patch: frames, rows and columns of latents in a token.
    """

    name: str
    layers: int
    heads: int
    head_dim: int
    ffn: int
    in_channels: int = 16
    out_channels: int = 16
    experts: int = 1
    vae: str = "wan2.1"
    image_dim: int | None = None
    image_to_video: bool = False
    per_token_time: bool = False
    steps: int = 50
    guidance: bool = True
    freq_dim: int = 256
    text_dim: int = 4096
    patch: tuple[int, int, int] = (1, 2, 2)

    @property
    def dim(self) -> int:
        """Channels of a token."""
        return self.heads * self.head_dim

    @property
    def context_tokens(self) -> int:
        """Tokens that cross-attention looks at."""
        return TEXT_TOKENS + (IMAGE_TOKENS if self.image_dim is not None else 0)

    def tokens(self, height: int, width: int, frames: int) -> int:
        """Tokens of a clip of this size."""
        vae = VAES[self.vae]
        grid = ((frames - 1) // vae.temporal + 1, height // vae.spatial, width // vae.spatial)
        return math.prod(side // step for side, step in zip(grid, self.patch, strict=True))

    def quantizable_parameters(self) -> int:
        """Weights of the ten products of every block, without biases."""
        return self.layers * (8 * self.dim**2 + 2 * self.dim * self.ffn)

    def quantizable_rows(self) -> int:
        """Output channels of those, each with a scale and a bias."""
        return self.layers * (9 * self.dim + self.ffn)

    def block_parameters(self) -> int:
        """Of one block."""
        dim, ffn = self.dim, self.ffn
        attention = 2 * (4 * (dim**2 + dim) + 2 * dim)
        image = 0 if self.image_dim is None else 2 * (dim**2 + dim) + dim
        return attention + image + 2 * dim + (2 * dim * ffn + ffn + dim) + 6 * dim

    def parameters(self) -> int:
        """Of one transformer."""
        dim, patch = self.dim, math.prod(self.patch)
        total = self.in_channels * patch * dim + dim
        total += (self.freq_dim * dim + dim) + (dim**2 + dim) + (6 * dim**2 + 6 * dim)
        total += (self.text_dim * dim + dim) + (dim**2 + dim)
        if self.image_dim is not None:
            image = self.image_dim
            total += 2 * image + (image**2 + image) + (image * dim + dim) + 2 * dim
        total += dim * patch * self.out_channels + patch * self.out_channels + 2 * dim
        return total + self.layers * self.block_parameters()

    def config(self) -> dict[str, Any]:
        """Arguments of diffusers' `WanTransformer3DModel`."""
        return {
            "patch_size": self.patch, "num_attention_heads": self.heads, "attention_head_dim": self.head_dim,
            "in_channels": self.in_channels, "out_channels": self.out_channels, "text_dim": self.text_dim,
            "freq_dim": self.freq_dim, "ffn_dim": self.ffn, "num_layers": self.layers, "image_dim": self.image_dim,
            "added_kv_proj_dim": None if self.image_dim is None else self.dim,
        }  # fmt: skip


MODELS = {
    shape.name: shape
    for shape in (
        ModelShape("wan2.1-t2v-1.3b", 30, 12, 128, 8960),
        ModelShape("wan2.1-t2v-14b", 40, 40, 128, 13824),
        ModelShape("wan2.1-i2v-14b", 40, 40, 128, 13824, 36, image_dim=1280, image_to_video=True, steps=40),
        ModelShape("wan2.2-t2v-a14b", 40, 40, 128, 13824, experts=2, steps=40),
        ModelShape("wan2.2-i2v-a14b", 40, 40, 128, 13824, 36, experts=2, image_to_video=True, steps=40),
        ModelShape("wan2.2-ti2v-5b", 30, 24, 128, 14336, 48, 48, vae="wan2.2", per_token_time=True),
    )
}


@dataclass(frozen=True)
class Operations:
    """Of one forward pass of one transformer."""

    linear: float
    attention: float
    branch: float
    cross: float

    @property
    def total(self) -> float:
        """All together."""
        return self.linear + self.attention + self.branch + self.cross


def operations(shape: ModelShape, tokens: int, attention: AttentionConfig | None = None) -> Operations:
    """Operations of one forward pass over `tokens` tokens.

    Args:
        shape: the model.
        tokens: their number.
        attention: None for dense. `branch` then holds router and linear branch, `attention` the kept pairs alone.
    """
    dim, context, layers = shape.dim, shape.context_tokens, shape.layers
    linear = layers * (2.0 * tokens * (6 * dim**2 + 2 * dim * shape.ffn) + 4 * context * dim**2)
    cross = layers * 4.0 * tokens * context * dim
    dense = 4.0 * tokens**2 * dim
    if attention is None or not runs_sparse(attention, tokens, shape.head_dim):
        return Operations(linear, layers * dense, 0.0, cross)
    sparse_layers = layers - len(attention.dense_layers)
    plain = replace(attention, keep_ratios=())
    overhead = 1.0 - expected_flop_sparsity(plain, tokens, shape.head_dim) - kept_share(plain, tokens)
    kept = sparse_layers * kept_share(attention, tokens) + len(attention.dense_layers)
    return Operations(linear, kept * dense, sparse_layers * overhead * dense, cross)


def runs_sparse(attention: AttentionConfig, tokens: int, head_dim: int) -> bool:
    """Whether attention leaves anything out at this number of tokens."""
    if attention.backend == "dense":
        return False
    below = attention.dense_below
    if below is None and attention.backend == AUTO:
        below = computed_crossover(attention, head_dim)
    return tokens >= (below or 0)


def kept_share(attention: AttentionConfig, tokens: int) -> float:
    """Share of the token pairs that is attended to: whole blocks, at least one, the mean over layers."""
    from ..attention.routing import num_kept_blocks

    blocks = -(-tokens // attention.block_size_k)
    ratios = attention.keep_ratios or (attention.keep_ratio,)
    pairs = [min(tokens, num_kept_blocks(ratio, blocks) * attention.block_size_k) / tokens for ratio in ratios]
    return sum(pairs) / len(pairs)


def find_shape(model: str) -> ModelShape:
    """A published model by name, or that of a diffusers folder.

    Raises:
        ConfigError: neither.
    """
    if model in MODELS:
        return MODELS[model]
    folder = Path(model)
    if (folder / "transformer" / "config.json").is_file():
        return _shape_of_folder(folder)
    raise ConfigError(f"model: got {model!r}; must be one of {', '.join(MODELS)}, or a diffusers folder")


def _shape_of_folder(folder: Path) -> ModelShape:
    def read(part: str) -> Mapping[str, Any]:
        file = folder / part
        data: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return data

    transformer, index, vae = read("transformer/config.json"), read("model_index.json"), read("vae/config.json")
    defaults = read("videospark_defaults.json")
    strides = (vae.get("scale_factor_spatial", 8), vae.get("z_dim", 16))
    known = {(entry.spatial, entry.channels): name for name, entry in VAES.items()}
    require(strides in known, "model.vae", strides, f"of stride and channels {sorted(known)}, those that are known")
    in_channels, out_channels = transformer.get("in_channels", 16), transformer.get("out_channels", 16)
    return ModelShape(
        folder.name,
        transformer.get("num_layers", 40),
        transformer.get("num_attention_heads", 40),
        transformer.get("attention_head_dim", 128),
        transformer.get("ffn_dim", 13824),
        in_channels,
        out_channels,
        experts=2 if index.get("transformer_2", [None])[0] is not None else 1,
        vae=known[strides],
        image_dim=transformer.get("image_dim"),
        image_to_video=in_channels > out_channels,
        per_token_time=bool(index.get("expand_timesteps")),
        steps=int(defaults.get("num_inference_steps", 50)),
        guidance=float(defaults.get("guidance_scale", 5.0)) > 1,
        freq_dim=transformer.get("freq_dim", 256),
        text_dim=transformer.get("text_dim", 4096),
        patch=tuple(transformer.get("patch_size", (1, 2, 2))),
    )
