"""Where the parts of a pipeline lie while it runs, chosen by hand or by the planner.

| mode | on the device |
|---|---|
| `none` | everything |
| `experts` | everything but one of two experts; they take turns in the same place, see `expert_swap.py` |
| `model` | one part at a time: text encoder, denoiser, the other denoiser, VAE (diffusers' model offload) |
| `group` | two blocks of the denoiser, single layers of the text encoder, the VAE (diffusers' group offload) |
| `auto` | the first of these that fits by `plan_memory.py` |

All of them compute the same numbers. A pipeline is accelerated first and offloaded then: quantization, branches, fused
blocks and LoRAs are parts of the modules by that time and move along with them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import nn

from ..core.config import ConfigError, require
from ..quantization.convert import module_bytes
from .compilation import GRAPH_MODES
from .expert_swap import ExpertSwap
from .plan import budget_gib
from .plan_cards import Card, find_card
from .plan_memory import GIB, Clip, Settings, stages
from .plan_models import VAES, ModelShape, runs_sparse
from .recipe import Recipe

Mode = Literal["auto", "none", "experts", "model", "group"]
MODES: tuple[str, ...] = ("auto", "none", "experts", "model", "group")
_STATE = "_videospark_offload"
TINY_SHARE = 0.02
"""Of the usable memory: models whose weights are less than this are not planned for; the smallest Wan needs more."""


@dataclass
class InstalledOffload:
    """What was done to a pipeline; made by `place`.

    Attributes:
        mode: that is at work, never "auto".
        device: where it runs.
        reason: why this mode.
        considered: by mode, the peak in GiB that was planned for it; empty where the mode was given.
        swap: of mode "experts".
        asked, size: what `place` was called with, to do it again after another recipe.
    """

    mode: str
    device: torch.device
    reason: str
    considered: dict[str, float] = field(default_factory=dict)
    swap: ExpertSwap | None = None
    asked: str = "auto"
    size: tuple[int, int, int] | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        made: dict[str, Any] = {
            "mode": self.mode, "device": str(self.device), "reason": self.reason,
            "planned_peak_gib": dict(self.considered),
        }  # fmt: skip
        if self.swap is not None:
            made["groups_early"], made["groups_late"] = self.swap.early, self.swap.late
        return made

    def __str__(self) -> str:
        return f"offload: {self.mode} on {self.device}; {self.reason}"


def offload_of(pipe: Any) -> InstalledOffload | None:
    """The offloading of a pipeline, None where `place` was not called."""
    return pipe.__dict__.get(_STATE)


def place(
    pipe: Any,
    mode: str = "auto",
    device: torch.device | str = "cuda",
    *,
    size: tuple[int, int, int] | None = None,
    recipe: Recipe | None = None,
    card: Card | None = None,
) -> InstalledOffload:
    """Put a pipeline where it will run.

    Args:
        pipe: a Wan pipeline of diffusers, accelerated already where it is to be.
        mode: one of `MODES`.
        device: where it runs.
        size: width, height and frames that "auto" plans for; by default what the pipeline makes by itself.
        recipe: that it was accelerated with; by default the one at work.
        card: that "auto" plans for; by default the device with the memory that is free on it now.

    Raises:
        ConfigError: an unknown mode, one that this pipeline cannot have, a second call, or nothing that fits; the
            message of the last has the peaks that were planned.
    """
    target = torch.device(device)
    require(mode in MODES, "offload", mode, f"one of {', '.join(MODES)}")
    if (present := offload_of(pipe)) is not None:
        raise ConfigError(f"offload: got a pipeline that is offloaded ({present.mode}); must be taken back first")
    asked, reason = mode, "as asked for"
    considered: dict[str, float] = {}
    if mode == "auto":
        mode, reason, considered = choose(pipe, target, size=size, recipe=recipe, card=card)
    swap = None
    if mode == "none":
        pipe.to(target)
    elif mode == "model":
        _check_uncompiled_graphs(pipe, mode)
        pipe.enable_model_cpu_offload(device=target)
    elif mode == "group":
        _check_uncompiled_graphs(pipe, mode)
        _group(pipe, target)
    else:
        experts = {name: getattr(pipe, name, None) for name in ("transformer", "transformer_2")}
        swap = ExpertSwap(pipe, target)
        for name, part in pipe.components.items():
            if isinstance(part, nn.Module) and name not in experts:
                part.to(target)
    installed = InstalledOffload(mode, target, reason, considered, swap, asked, size)
    object.__setattr__(pipe, _STATE, installed)
    return installed


def take_back(pipe: Any) -> None:
    """End the offloading: everything on the CPU, no hooks. Does nothing where there is none."""
    installed = offload_of(pipe)
    if installed is None:
        return
    if installed.swap is not None:
        installed.swap.remove()
    if installed.mode == "model":
        pipe.remove_all_hooks()
    if installed.mode == "group":
        for part in pipe.components.values():
            if isinstance(part, nn.Module):
                _ungroup(part)
    for part in pipe.components.values():
        if isinstance(part, nn.Module):
            _tidy(part)
    pipe.to("cpu")
    object.__delattr__(pipe, _STATE)


def change_recipe(pipe: Any, recipe: Recipe | None) -> None:
    """Another recipe for a pipeline, offloaded or not; None for none.

    An offloaded one is taken back first and placed anew: what a recipe adds has to move along, and "auto" may find
    another mode for it.

    Raises:
        ConfigError: a recipe that this pipeline cannot run, or for which nothing fits. The pipeline then runs none and
            is not offloaded.
    """
    from .acceleration import accelerate, restore

    installed = offload_of(pipe)
    moved = installed is not None and installed.asked != "none"
    if moved:
        take_back(pipe)
    restore(pipe)
    if recipe is not None:
        accelerate(pipe, recipe, device=installed.device if installed is not None else None)
    if installed is None or not moved:
        return
    try:
        place(pipe, installed.asked, installed.device, size=installed.size, recipe=recipe)
    except BaseException:
        restore(pipe)
        raise


def choose(
    pipe: Any,
    device: torch.device,
    *,
    size: tuple[int, int, int] | None = None,
    recipe: Recipe | None = None,
    card: Card | None = None,
) -> tuple[str, str, dict[str, float]]:
    """The first mode that fits: its name, why, and by mode the peak that was planned. See `place`."""
    if card is None and device.type != "cuda":
        return "none", f"{device.type} has no memory of its own to save", {}
    card = card or _card_of(device)
    budget, ram = budget_gib(card), _available_ram_gib()
    weights = sum(module_bytes(part) for part in pipe.components.values() if isinstance(part, nn.Module)) / GIB
    if weights < TINY_SHARE * budget:
        return "none", f"the weights are {weights:.2f} GiB, and {budget:.1f} GiB are usable", {}
    shape, recipe = shape_of(pipe), recipe or _recipe_of(pipe)
    clip = Clip(*(size or _default_size(pipe)))
    peaks: dict[str, float] = {}
    for mode in ("none", "experts", "model", "group"):
        if mode == "experts" and (shape.experts != 2 or recipe.compile != "none"):
            continue
        if mode in ("model", "group") and recipe.compile in GRAPH_MODES:
            continue  # CUDA graphs remember where weights were
        peak, parked = planned_peak(pipe, shape, clip, recipe, mode)
        peaks[mode] = round(peak, 2)
        if peak <= budget and (ram is None or mode == "none" or parked <= ram):
            words = f"{peak:.1f} GiB planned at {clip.width}x{clip.height}x{clip.frames}, {budget:.1f} GiB usable"
            return mode, words, peaks
    tried = ", ".join(f"{name} {peak:.1f} GiB" for name, peak in peaks.items())
    raise ConfigError(
        f"offload: got 'auto', and nothing fits {budget:.1f} GiB at {clip.width}x{clip.height}x{clip.frames} (planned: "
        f"{tried}); must be a smaller size, a recipe with eight bits, memory.vae_tiling, or another card; "
        "`videospark plan` lists what would fit"
    )


def planned_peak(pipe: Any, shape: ModelShape, clip: Clip, recipe: Recipe, mode: str) -> tuple[float, float]:
    """Peak on the device and in RAM in GiB, as the planner has it for this pipeline."""
    vae = getattr(pipe, "vae", None)
    settings = Settings(
        offload=mode if mode in ("model", "group") else "none",  # type: ignore[arg-type]
        text_encoder="freed" if recipe.memory.text_encoder == "free_after_encoding" else "resident",
        text_bits=8 if recipe.memory.text_encoder == "int8" else 16,
        vae_tiling=bool(vae is not None and vae.use_tiling),
        vae_dtype="bfloat16" if vae is not None and vae.dtype == torch.bfloat16 else "float32",
        swap_experts=mode == "experts",
    )
    tokens = shape.tokens(clip.height, clip.width, clip.frames)
    sparse = runs_sparse(recipe.attention, tokens, shape.head_dim)
    made = stages(shape, clip, recipe.quantization, recipe.attention, settings, sparse)
    # Weights are read into RAM, and not onto the card, so that loading has no peak there but the resident ones.
    return max(stage.gpu_peak for stage in made) / GIB, max(stage.ram for stage in made[1:]) / GIB


def shape_of(pipe: Any) -> ModelShape:
    """The shape of a pipeline that is loaded.

    Raises:
        ConfigError: its VAE is none that the planner knows.
    """
    config, vae = pipe.transformer.config, pipe.vae.config
    known = {(entry.spatial, entry.channels): name for name, entry in VAES.items()}
    key = (vae.scale_factor_spatial, vae.z_dim)
    require(key in known, "offload", f"a VAE of stride and channels {key}", f"one of {sorted(known)} for 'auto'")
    return ModelShape(
        type(pipe).__name__, config.num_layers, config.num_attention_heads, config.attention_head_dim, config.ffn_dim,
        config.in_channels, config.out_channels, experts=2 if pipe.transformer_2 is not None else 1, vae=known[key],
        image_dim=config.image_dim, image_to_video=config.in_channels > config.out_channels,
        per_token_time=bool(pipe.config.expand_timesteps), freq_dim=config.freq_dim, text_dim=config.text_dim,
        patch=tuple(config.patch_size),
    )  # fmt: skip


def _recipe_of(pipe: Any) -> Recipe:
    from .acceleration import state_of

    state = state_of(pipe)
    return state.recipe if state is not None else Recipe("dense")


def _default_size(pipe: Any) -> tuple[int, int, int]:
    from .generation import default_settings

    defaults = default_settings(pipe)
    return int(defaults["width"]), int(defaults["height"]), int(defaults["num_frames"])


def _card_of(device: torch.device) -> Card:
    free, _ = torch.cuda.mem_get_info(device)
    ours = torch.cuda.memory_allocated(device)
    return replace(find_card(None), memory_gib=(free + ours) / GIB)


def _available_ram_gib() -> float | None:
    """What this process holds of RAM already, weights included, and what it can still get; None where nobody knows."""
    try:
        import psutil  # comes with accelerate
    except ImportError:
        return None
    held = psutil.Process().memory_info()
    own = held.rss - getattr(held, "shared", 0)  # pages of mapped files can be dropped, and count as available
    return float(psutil.virtual_memory().available + own) / GIB


def _group(pipe: Any, device: torch.device) -> None:
    from diffusers.hooks import apply_group_offloading

    streamed = device.type == "cuda"
    for name, part in pipe.components.items():
        if not isinstance(part, nn.Module):
            continue
        if name == "vae":
            part.to(device)
            continue
        settings: dict[str, Any] = {"onload_device": device, "offload_device": torch.device("cpu")}
        if streamed:
            settings |= {"use_stream": True, "record_stream": True}
        blocks = name.startswith("transformer")
        # The blocks of the text encoder are not where diffusers looks for some, and its embedding is tied.
        settings |= {"offload_type": "block_level", "num_blocks_per_group": 1} if blocks else {
            "offload_type": "leaf_level"
        }  # fmt: skip
        apply_group_offloading(part, **settings)


def _ungroup(part: nn.Module) -> None:
    """Take diffusers' hooks of group offloading away, and only these."""
    from diffusers.hooks.group_offloading import (
        _GROUP_OFFLOADING,
        _LAYER_EXECUTION_TRACKER,
        _LAZY_PREFETCH_GROUP_OFFLOADING,
    )

    for module in part.modules():
        registry = getattr(module, "_diffusers_hook", None)
        if registry is None:
            continue
        hook = registry.get_hook(_GROUP_OFFLOADING)
        if hook is not None:
            hook.group.offload_()
        for name in (_LAZY_PREFETCH_GROUP_OFFLOADING, _LAYER_EXECUTION_TRACKER, _GROUP_OFFLOADING):
            if registry.get_hook(name) is not None:
                registry.remove_hook(name, recurse=False)
        if not registry.hooks:
            del module._diffusers_hook


def _tidy(part: nn.Module) -> None:
    """The class's own forward is what there was before: as an attribute it would look like a wrapped one."""
    for module in part.modules():
        own = module.__dict__.get("forward")
        if getattr(own, "__func__", None) is type(module).forward:
            del module.__dict__["forward"]


def _check_uncompiled_graphs(pipe: Any, mode: str) -> None:
    """CUDA graphs remember where weights are."""
    from .acceleration import state_of

    state = state_of(pipe)
    compiled = state.recipe.compile if state is not None else "none"
    rule = f"another with offload {mode!r}, under which weights move: CUDA graphs remember where they were"
    require(compiled not in GRAPH_MODES, "compile", compiled, rule)
