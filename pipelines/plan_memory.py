"""What the stages of a clip take in memory, by formula; see `plan.py`.

The constants count the tensors that are alive at once, in bytes per token and channel. Those of stock diffusers were
found by running its block and its autoencoders without data and adding up what is alive (a test does so again); those
of fused blocks are counted by hand.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ..attention.config import AttentionConfig
from ..core.config import require
from ..quantization.config import MODES, QuantizationConfig
from .memory import MemoryConfig
from .plan_models import IMAGE_ENCODER_PARAMETERS, TEXT_ENCODER_EMBEDDING, TEXT_ENCODER_PARAMETERS, VAES, ModelShape

GIB = 2**30
INPUT, BLOCK_ATTENTION, BLOCK_FEED_FORWARD = 2.0, 20.0, 6.0
"""Stock block: its input, what is alive while queries are rotated, and what is beside the wide tensors of the FFN."""
FUSED_ATTENTION = 16.0
"""Fused block: x, its norm, q, k, v, rotated q and k, and the output, in bfloat16."""
BRANCH_UNFUSED, BRANCH_FUSED = 6.0, 4.0
"""With a linear branch: unrotated q and k that are kept, its output and the merged one."""
PER_TOKEN_TIME = 36.0
"""Six factors per token, projected in bfloat16 and added to the table in float32."""
TEXT_ACTIVATIONS = 0.15 * GIB
LIBRARY_WORKSPACE = 0.1 * GIB
TILE = 256
COPIES_WHILE_DECODING, COPIES_AT_THE_END = 1.8, 4.7
"""Clips that tiles make up, as they overlap by a quarter: beside the last tile, and while rows of them are joined."""
GROUP_BLOCKS = 2
"""Blocks on the GPU under group offloading with a stream: the one that runs and the one that comes."""
PROCESS = 2.0 * GIB
"""RAM of Python, PyTorch and diffusers themselves."""


@dataclass(frozen=True)
class Settings:
    """How a pipeline is run where memory is short.

    Attributes:
        offload: "none"; "model", one component on the GPU at a time; "group", two blocks of it at a time.
        text_encoder: "resident", or "freed" from GPU and RAM once the prompt is encoded.
        text_bits: 16, or 8 for weights in INT8.
        vae_tiling: decode in tiles of 256 pixels.
        vae_dtype: "float32" or "bfloat16".
        swap_experts: of two experts only the one that runs is on the GPU.
        quantization: mode instead of the recipe's (fused, originals dropped), None for its own.

    Raises:
        ConfigError: a value that is not one of those.
    """

    offload: Literal["none", "model", "group"] = "none"
    text_encoder: Literal["resident", "freed"] = "resident"
    text_bits: int = 16
    vae_tiling: bool = False
    vae_dtype: Literal["float32", "bfloat16"] = "float32"
    swap_experts: bool = False
    quantization: str | None = None

    def __post_init__(self) -> None:
        choices: dict[str, tuple[object, ...]] = {
            "offload": ("none", "model", "group"), "text_encoder": ("resident", "freed"), "text_bits": (8, 16),
            "vae_dtype": ("float32", "bfloat16"), "quantization": (None, *MODES),
        }  # fmt: skip
        for name, allowed in choices.items():
            value = getattr(self, name)
            rule = f"one of {', '.join(str(one) for one in allowed if one is not None)}"
            require(value in allowed, name, value, rule)

    def with_memory(self, memory: MemoryConfig) -> Settings:
        """These settings and what a recipe's memory section adds; what is set here about the text encoder stays."""
        given = (self.text_encoder, self.text_bits) != ("resident", 16)
        freed, eight = (not given and memory.text_encoder == mode for mode in ("free_after_encoding", "int8"))
        return replace(
            self,
            text_encoder="freed" if freed else self.text_encoder,
            text_bits=8 if eight else self.text_bits,
            vae_tiling=self.vae_tiling or memory.vae_tiling,
            vae_dtype="bfloat16" if memory.vae_dtype == "bfloat16" else self.vae_dtype,
        )

    def words(self) -> str:
        """What differs from running everything as it is."""
        parts = [
            (self.quantization or "").replace("_", " "),
            {"none": "", "model": "model offload", "group": "group offload"}[self.offload],
            "T5 freed after encoding" if self.text_encoder == "freed" else "",
            "T5 in INT8" if self.text_bits == 8 else "",
            "expert swap" if self.swap_experts else "",
            "VAE tiling" if self.vae_tiling else "",
            "VAE in bfloat16" if self.vae_dtype == "bfloat16" else "",
        ]
        return ", ".join(part for part in parts if part) or "everything on the GPU"


@dataclass(frozen=True)
class Stage:
    """Memory of one stage in bytes: on the GPU weights, activations and workspace, and what is in RAM meanwhile."""

    name: str
    weights: float
    activations: float
    workspace: float
    ram: float

    @property
    def gpu_peak(self) -> float:
        """All that PyTorch's allocator hands out on the GPU at once."""
        return self.weights + self.activations + self.workspace


@dataclass(frozen=True)
class Clip:
    """Size of a clip."""

    width: int
    height: int
    frames: int


def transformer_bytes(shape: ModelShape, quantization: QuantizationConfig, attention: AttentionConfig) -> float:
    """Weights of one transformer as it is run, its linear branch included."""
    total = 2.0 * shape.parameters()
    dim = shape.dim
    # diffusers keeps these in float32: time embedder, tables, the norm with weights.
    total += 2.0 * (shape.freq_dim * dim + dim**2 + 2 * dim + shape.layers * 8 * dim + 2 * dim)
    if quantization.mode != "none":
        total -= shape.quantizable_parameters()
        total += 4.0 * (shape.quantizable_rows() if quantization.granularity == "row" else 10 * shape.layers)
        total += 2.0 * shape.quantizable_parameters() if quantization.originals == "keep" else 0.0
    return total + 4.0 * branch_parameters(shape, attention)


def branch_parameters(shape: ModelShape, attention: AttentionConfig) -> int:
    """Numbers that a linear branch adds to one transformer."""
    if attention.branch == "none":
        return 0
    d = shape.head_dim
    if attention.branch == "sla":
        return shape.layers * (d * d + d)
    maps = 2 * attention.rola.rank * d * (shape.heads if attention.rola.per_head_maps else 1)
    scale = shape.heads if attention.rola.merge == "scaled" else 0
    return shape.layers * (maps + d + shape.heads + scale)


def block_activations(
    shape: ModelShape, tokens: int, quantization: QuantizationConfig, attention: AttentionConfig, sparse: bool
) -> float:
    """Bytes alive at the peak of one block, its input included."""
    wide = shape.ffn / shape.dim
    branch = sparse and attention.branch != "none"
    if quantization.fused:
        eight_bits = quantization.mode != "none" and not quantization.weight_only
        middle = FUSED_ATTENTION + (BRANCH_FUSED if branch else 0.0)
        feed_forward = 6.0 + 2 * wide + (wide if eight_bits else 2 * wide)
    else:
        middle = INPUT + BLOCK_ATTENTION + (BRANCH_UNFUSED if branch else 0.0)
        feed_forward = INPUT + BLOCK_FEED_FORWARD + 4 * wide
    per_token = PER_TOKEN_TIME if shape.per_token_time else 0.0
    return (max(middle, feed_forward) + per_token) * tokens * shape.dim


def denoise_activations(
    shape: ModelShape, clip: Clip, quantization: QuantizationConfig, attention: AttentionConfig, sparse: bool
) -> float:
    """Block, rotary tables in float32, and latents."""
    tokens = shape.tokens(clip.height, clip.width, clip.frames)
    rotary = 2 * 4.0 * tokens * shape.head_dim
    latents = 6 * 4.0 * tokens * shape.in_channels * 4
    return block_activations(shape, tokens, quantization, attention, sparse) + rotary + latents


def router_workspace(shape: ModelShape, tokens: int, attention: AttentionConfig, sparse: bool) -> float:
    """Scores in float32 of all pairs of blocks of all heads, and the choice made of them."""
    if not sparse:
        return 0.0
    pairs = -(-tokens // attention.block_size_q) * -(-tokens // attention.block_size_k)
    return 2 * 4.0 * shape.heads * pairs


def decode_activations(shape: ModelShape, clip: Clip, settings: Settings) -> float:
    """Bytes alive at the peak of decoding."""
    vae, size = VAES[shape.vae], 4 if settings.vae_dtype == "float32" else 2
    pixels = clip.height * clip.width
    if not settings.vae_tiling or max(clip.height, clip.width) <= TILE:
        return size * pixels * (vae.decode_elements + vae.decode_elements_per_frame * clip.frames)
    tile = TILE * TILE * (vae.decode_elements + vae.decode_elements_per_frame * clip.frames)
    pictures = 3.0 * pixels * clip.frames
    return size * max(tile + COPIES_WHILE_DECODING * pictures, COPIES_AT_THE_END * pictures)


def encode_activations(shape: ModelShape, clip: Clip, settings: Settings) -> float:
    """Bytes alive at the peak of encoding the first frame, which fills a clip with grey."""
    vae, size = VAES[shape.vae], 4 if settings.vae_dtype == "float32" else 2
    pixels = clip.height * clip.width
    tiled = settings.vae_tiling and max(clip.height, clip.width) > TILE
    at_once = TILE * TILE if tiled else pixels
    elements = vae.encode_elements + vae.encode_elements_per_frame * clip.frames
    return size * (elements * at_once + 3.0 * pixels * clip.frames)


def stages(
    shape: ModelShape,
    clip: Clip,
    quantization: QuantizationConfig,
    attention: AttentionConfig,
    settings: Settings,
    sparse: bool,
) -> list[Stage]:
    """Memory stage by stage: load, text, image (image-to-video alone), denoise, decode.

    `settings.quantization` is not looked at: `quantization` is what runs.
    """
    text = TEXT_ENCODER_PARAMETERS * 2.0
    if settings.text_bits == 8:
        text = TEXT_ENCODER_EMBEDDING * 2.0 + (TEXT_ENCODER_PARAMETERS - TEXT_ENCODER_EMBEDDING)
    vae = VAES[shape.vae].parameters * (4.0 if settings.vae_dtype == "float32" else 2.0)
    image = IMAGE_ENCODER_PARAMETERS * 2.0 if shape.image_dim is not None else 0.0
    expert = transformer_bytes(shape, quantization, attention)
    every = {"text": text, "image": image, "vae": vae, "experts": expert * shape.experts}
    freed = settings.text_encoder == "freed"
    eight_bits = quantization.mode != "none"
    waiting = 2.0 * shape.quantizable_parameters() * shape.experts if eight_bits else 0.0
    waiting = waiting if quantization.originals == "offload" else 0.0

    def resident(stage: str) -> float:
        """Weights on the GPU while a stage runs."""
        if settings.offload == "none":
            experts = expert if settings.swap_experts else every["experts"]
            gone = freed and stage != "text"
            return (0.0 if gone else text) + image + vae + experts
        grouped = settings.offload == "group"
        beside = vae if grouped else 0.0  # which stays on the card
        if stage == "text":
            blocks = 24 // 4  # the text encoder in groups of four blocks, and its embedding
            per_block = (text - TEXT_ENCODER_EMBEDDING * 2.0) / 24
            return beside + TEXT_ENCODER_EMBEDDING * 2.0 + 2 * per_block * (24 // blocks) if grouped else text
        if stage == "denoise":
            return beside + group_weights(shape, expert) if grouped else expert
        return vae + (image if stage == "image" else 0.0)

    def parked(stage: str) -> float:
        """Weights in RAM while a stage runs."""
        if settings.offload != "none":
            return PROCESS + waiting + sum(every.values()) - (text if freed and stage != "text" else 0.0)
        swapped = expert * (shape.experts - 1) if settings.swap_experts else 0.0
        return PROCESS + waiting + swapped

    tokens = shape.tokens(clip.height, clip.width, clip.frames)
    reading = PROCESS + waiting + sum(every.values())
    if settings.offload == "none" and not settings.swap_experts and eight_bits and quantization.originals == "drop":
        reading -= every["experts"]  # block by block, straight to the card
    made = [Stage("load", resident("text") if settings.offload == "none" else 0.0, 0.0, 0.0, reading)]
    made.append(Stage("text", resident("text"), TEXT_ACTIVATIONS, LIBRARY_WORKSPACE, parked("text")))
    if shape.image_to_video:
        work = encode_activations(shape, clip, settings)
        made.append(Stage("image", resident("image"), work, LIBRARY_WORKSPACE, parked("image")))
    workspace = LIBRARY_WORKSPACE + router_workspace(shape, tokens, attention, sparse)
    work = denoise_activations(shape, clip, quantization, attention, sparse)
    made.append(Stage("denoise", resident("denoise"), work, workspace, parked("denoise")))
    work = decode_activations(shape, clip, settings)
    made.append(Stage("decode", resident("decode"), work, LIBRARY_WORKSPACE, parked("decode")))
    return made


def group_weights(shape: ModelShape, expert: float) -> float:
    """Weights on the GPU under group offloading: two blocks, and the largest part outside of them."""
    share = shape.block_parameters() / shape.parameters()
    outside = max(0.0, 1.0 - share * shape.layers)
    return expert * (GROUP_BLOCKS * share + outside)
