"""Will it fit, and how long will a step take: before anything is loaded.

Memory is counted stage by stage (`plan_memory.py`) and held against the card. Times are a roofline: operations over a
share of the peak of the card plus bytes over a share of its bandwidth. The shares are assumptions, which the report
prints; loading, compiling and the text encoder are not in it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..core.config import ConfigError, require
from ..quantization.config import QuantizationConfig
from .plan_cards import (
    BANDWIDTH_SHARE,
    CONTEXT_GIB,
    EIGHT_BIT_SHARE,
    FRAGMENTATION,
    LINEAR_SHARE,
    VAE_SHARE,
    Card,
    find_card,
)
from .plan_memory import GIB, Clip, Settings, Stage, stages, transformer_bytes
from .plan_models import MODELS, VAES, ModelShape, find_shape, operations, runs_sparse
from .recipe import RECIPE_FILE, Recipe, resolve

EAGER_BYTES, FUSED_BYTES, BRANCH_BYTES, PER_TOKEN_BYTES = 253.0, 45.0, 14.0, 132.0
"""Bytes moved per token and channel of a block by all that is no product: as diffusers runs it, fused or compiled, and
what a linear branch and one time per token add."""
BRANCH_SHARE = 0.5


@dataclass(frozen=True)
class Times:
    """Seconds; parts of one step, all steps together, and decoding.

    Attributes:
        parts: linear, attention, branch, cross_attention, elementwise, transfer of one step.
        step: one step, with guidance both passes.
        steps: how many there are.
        denoise: all of them, and moving experts.
        decode: of the VAE.
    """

    parts: dict[str, float]
    step: float
    steps: int
    denoise: float
    decode: float


@dataclass(frozen=True)
class Option:
    """Settings, what they take at most, and whether that fits."""

    settings: Settings
    gpu_gib: float
    ram_gib: float
    fits: bool
    seconds: float | None


@dataclass(frozen=True)
class Plan:
    """What a clip will take.

    Attributes:
        model, card, clip, recipe, settings: what was asked.
        tokens: of the clip.
        stages: memory of each.
        budget_gib: of the card, less what other software and gaps take.
        ram_budget_gib: of the machine, None where it was not given.
        fits: whether every stage stays within.
        times: None where the peaks of the card are not known.
        options: other settings, the least change first; empty where these fit.
        assumptions: in words.
    """

    model: ModelShape
    card: Card
    clip: Clip
    recipe: Recipe
    settings: Settings
    tokens: int
    stages: list[Stage]
    budget_gib: float
    ram_budget_gib: float | None
    fits: bool
    times: Times | None
    options: list[Option] = field(default_factory=list)
    assumptions: list[str] = field(default_factory=list)

    @property
    def peak_gib(self) -> float:
        """Largest of all stages on the GPU."""
        return max(stage.gpu_peak for stage in self.stages) / GIB

    @property
    def ram_gib(self) -> float:
        """Largest of all stages in RAM."""
        return max(stage.ram for stage in self.stages) / GIB

    @property
    def recommended(self) -> Option | None:
        """The first of the options that fits."""
        return next((option for option in self.options if option.fits), None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        from dataclasses import asdict

        gib = {s.name: {k: v / GIB for k, v in asdict(s).items() if k != "name"} for s in self.stages}
        for stage in self.stages:
            gib[stage.name]["gpu_peak"] = stage.gpu_peak / GIB
        return {
            "model": self.model.name, "gpu": self.card.name, "size": asdict(self.clip), "recipe": self.recipe.name,
            "settings": asdict(self.settings), "tokens": self.tokens, "stages_gib": gib,
            "peak_gib": self.peak_gib, "ram_gib": self.ram_gib, "budget_gib": self.budget_gib,
            "ram_budget_gib": self.ram_budget_gib, "fits": self.fits,
            "seconds": None if self.times is None else asdict(self.times),
            "options": [asdict(option) for option in self.options], "assumptions": list(self.assumptions),
        }  # fmt: skip


def make_plan(
    model: str,
    size: tuple[int, int, int],
    recipe: Recipe | str | Path | Mapping[str, Any] | None = None,
    gpu: str | None = None,
    settings: Settings | None = None,
    *,
    compiled: bool = False,
    ram: float | None = None,
) -> Plan:
    """Plan one clip.

    Args:
        model: a name of `plan_models.MODELS`, or a diffusers folder.
        size: width, height, frames.
        recipe: what accelerates it; None for that of the folder, as loading does, or "dense".
        gpu: a name of `plan_cards.CARDS`, "16gb" for a memory alone, None for the one in this machine.
        settings: how memory is saved, beside what the recipe's memory section says.
        compiled: whether the blocks are compiled, which fuses what is no product; a recipe that compiles says so too.
        ram: GiB of the machine, which the plan is held against as well; None for not.

    Raises:
        ConfigError: an unknown model, card or recipe, or a size that the model cannot make.
    """
    shape, card = find_shape(model), find_card(gpu)
    plan_recipe = resolve(recipe if recipe is not None else _own_recipe(model))
    require(ram is None or ram > 0, "ram", ram, "more than 0 GiB")
    settings = (settings or Settings()).with_memory(plan_recipe.memory)
    compiled = compiled or plan_recipe.compile != "none"
    clip = _checked_clip(shape, size)
    if settings.swap_experts:
        require(shape.experts == 2, "swap_experts", True, f"false: {shape.name} has one expert")
    require(
        not (settings.swap_experts and settings.offload != "none"),
        "swap_experts",
        True,
        "false with offload: that swaps",
    )
    tokens = shape.tokens(clip.height, clip.width, clip.frames)
    made = _stages(shape, clip, plan_recipe, settings)
    budget = budget_gib(card)
    room = (budget, ram)
    fits = _fits(made, room)
    times = estimate_times(shape, card, clip, plan_recipe, settings, compiled=compiled)
    options = [] if fits else list(_options(shape, card, clip, plan_recipe, room, compiled))
    return Plan(
        shape, card, clip, plan_recipe, settings, tokens, made, budget, ram, fits, times, options,
        _assumptions(card, plan_recipe, settings, times, compiled),
    )  # fmt: skip


def _own_recipe(model: str) -> Path | str:
    file = Path(model) / RECIPE_FILE
    return file if model not in MODELS and file.is_file() else "dense"


def _fits(made: list[Stage], room: tuple[float, float | None]) -> bool:
    """Whether all stages stay within these GiB of card and RAM."""
    budget, ram = room
    on_card = max(stage.gpu_peak for stage in made) / GIB <= budget
    return on_card and (ram is None or max(stage.ram for stage in made) / GIB <= ram)


def budget_gib(card: Card) -> float:
    """What PyTorch may hand out on a card."""
    return (card.memory_gib - CONTEXT_GIB) / (1 + FRAGMENTATION)


def estimate_times(
    shape: ModelShape, card: Card, clip: Clip, recipe: Recipe, settings: Settings, *, compiled: bool
) -> Times | None:
    """Times by the roofline; None where the card's peaks are not known."""
    if not card.bf16:
        return None
    tokens = shape.tokens(clip.height, clip.width, clip.frames)
    quantization = _quantization(recipe, settings)
    counted = operations(shape, tokens, recipe.attention)
    sparse = runs_sparse(recipe.attention, tokens, shape.head_dim)
    bf16 = card.bf16 * 1e12
    moved = FUSED_BYTES if quantization.fused or compiled else EAGER_BYTES
    moved += BRANCH_BYTES if sparse and recipe.attention.branch != "none" else 0.0
    moved += PER_TOKEN_BYTES if shape.per_token_time else 0.0
    parts = {
        "linear": counted.linear / _linear_rate(card, quantization),
        "attention": counted.attention / (bf16 * card.attention_share),
        "branch": counted.branch / (bf16 * BRANCH_SHARE),
        "cross_attention": counted.cross / (bf16 * card.attention_share),
        "elementwise": shape.layers * tokens * shape.dim * moved / (card.bandwidth * 1e9 * BANDWIDTH_SHARE),
    }
    passes = _passes(shape, recipe)
    parts = {name: passes * value for name, value in parts.items()}
    computing = sum(parts.values())
    expert = transformer_bytes(shape, quantization, recipe.attention)
    parts["transfer"] = 0.0
    if settings.offload == "group":
        # Blocks come while others run: only what takes longer than computing is waited for.
        parts["transfer"] = max(0.0, passes * expert / (card.link * 1e9) - computing)
    step, steps = sum(parts.values()), recipe.sampler.steps or shape.steps
    once = shape.experts * expert / (card.link * 1e9) if settings.offload == "model" or settings.swap_experts else 0.0
    rate = bf16 * VAE_SHARE / (2 if settings.vae_dtype == "float32" else 1)
    overlap = (256 / 192) ** 2 if settings.vae_tiling else 1.0
    decode = VAES[shape.vae].decode_flops * clip.width * clip.height * clip.frames * overlap / rate
    return Times(parts, step, steps, steps * step + once, decode)


def _linear_rate(card: Card, quantization: QuantizationConfig) -> float:
    peak, share = card.bf16, LINEAR_SHARE
    if quantization.mode in ("fp8", "int8"):
        eight = card.fp8 if quantization.mode == "fp8" else card.int8
        if eight:
            peak, share = eight, EIGHT_BIT_SHARE
    return peak * 1e12 * share


def _passes(shape: ModelShape, recipe: Recipe) -> int:
    scale = recipe.sampler.guidance_scale
    guided = shape.guidance if scale is None else scale > 1
    return 2 if guided else 1


def _quantization(recipe: Recipe, settings: Settings) -> QuantizationConfig:
    if settings.quantization is None:
        return recipe.quantization
    fused = settings.quantization != "none" and recipe.compile == "none"  # a compiled block cannot be fused
    return QuantizationConfig(mode=settings.quantization, fused=fused, originals="drop")  # type: ignore[arg-type]


def _stages(shape: ModelShape, clip: Clip, recipe: Recipe, settings: Settings) -> list[Stage]:
    tokens = shape.tokens(clip.height, clip.width, clip.frames)
    sparse = runs_sparse(recipe.attention, tokens, shape.head_dim)
    return stages(shape, clip, _quantization(recipe, settings), recipe.attention, settings, sparse)


def _options(
    shape: ModelShape, card: Card, clip: Clip, recipe: Recipe, room: tuple[float, float | None], compiled: bool
) -> Iterator[Option]:
    """Settings that take less and less, the least costly first."""
    modes: list[str | None] = [None]
    if recipe.quantization.mode == "none":
        modes.append("fp8" if card.fp8 or not card.bf16 else "int8")
    freed, narrow, tiled = {"text_encoder": "freed"}, {"vae_dtype": "bfloat16"}, {"vae_tiling": True}
    model, group = {"offload": "model"}, {"offload": "group"}
    swap = {"swap_experts": shape.experts == 2}
    ladder = [
        narrow, tiled, freed, freed | narrow, freed | tiled, freed | narrow | swap, freed | narrow | tiled | swap,
        model, model | narrow, model | tiled, model | narrow | tiled, model | narrow | tiled | {"text_bits": 8},
        group | narrow, group | tiled, group | narrow | tiled,
    ]  # fmt: skip
    seen = set()
    for changes in ladder:
        for mode in modes:
            settings = Settings(**changes, quantization=mode).with_memory(recipe.memory)  # type: ignore[arg-type]
            if settings in seen:
                continue
            seen.add(settings)
            made = _stages(shape, clip, recipe, settings)
            peak, ram = (max(values) / GIB for values in ([s.gpu_peak for s in made], [s.ram for s in made]))
            times = estimate_times(shape, card, clip, recipe, settings, compiled=compiled)
            seconds = None if times is None else times.denoise + times.decode
            yield Option(settings, peak, ram, _fits(made, room), seconds)


def _checked_clip(shape: ModelShape, size: tuple[int, int, int]) -> Clip:
    clip = Clip(*size)
    vae = VAES[shape.vae]
    for name, value, step in (("width", clip.width, vae.spatial * 2), ("height", clip.height, vae.spatial * 2)):
        require(value > 0 and value % step == 0, name, value, f"a positive multiple of {step}")
    good = clip.frames > 0 and (clip.frames - 1) % vae.temporal == 0
    require(good, "frames", clip.frames, f"1 plus a multiple of {vae.temporal}")
    return clip


def _assumptions(card: Card, recipe: Recipe, settings: Settings, times: Times | None, compiled: bool) -> list[str]:
    quantization = _quantization(recipe, settings)
    made = [
        f"{CONTEXT_GIB} GiB of the card for driver and kernels, {FRAGMENTATION:.0%} lost between allocations, with "
        "expandable segments",
        "attention that keeps no scores (flash, or our block-sparse kernels)",
    ]
    if quantization.mode != "none":
        how = {
            "drop": "the transformer is read and quantized block by block, so that it is never whole in 16 bits",
            "offload": "the transformer is quantized in RAM, where its original layers wait to be put back",
            "keep": "the original layers stay on the card beside the eight-bit ones",
        }
        made.append(how[quantization.originals])
    if times is None:
        made.append(f"no times: the peaks of {card.name} are not known here")
        return made
    fused = quantization.fused or compiled
    made += [
        f"{card.name}: {card.bf16:g} TFLOP/s in bfloat16, of which linear layers reach {LINEAR_SHARE:.0%}, attention "
        f"{card.attention_share:.0%} and the VAE {VAE_SHARE:.0%} (half the peak in float32)",
        f"{BANDWIDTH_SHARE:.0%} of {card.bandwidth:g} GB/s for what is no product, "
        f"{FUSED_BYTES if fused else EAGER_BYTES:g} bytes per token and channel of a block "
        f"({'fused' if fused else 'as diffusers runs it'})",
        "warm: loading, compiling and the text encoder are not in the times",
    ]
    if quantization.mode in ("fp8", "int8"):
        peak = card.fp8 if quantization.mode == "fp8" else card.int8
        name = quantization.mode.upper()
        made.append(
            f"{EIGHT_BIT_SHARE:.0%} of {peak:g} TFLOP/s in {name}" if peak
            else f"this card has no {name}: its products run in bfloat16"
        )  # fmt: skip
    if settings.offload != "none" or settings.swap_experts:
        made.append(f"{card.link:g} GB/s between RAM and card")
    if recipe.attention.backend in ("gather", "reference", "flex"):
        made.append(f"backend {recipe.attention.backend!r} is timed as the Triton kernels are; it is slower")
    return made


def parse_size(text: str) -> tuple[int, int, int]:
    """WIDTHxHEIGHTxFRAMES of a command line."""
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(part.strip().isdigit() for part in parts):
        raise ConfigError(f"size: got {text!r}; must be WIDTHxHEIGHTxFRAMES, as in 1280x720x81")
    width, height, frames = (int(part) for part in parts)
    return width, height, frames
