"""Settings of low precision: which layers, which numbers, which engine. Reading one does not load torch."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from ..core.config import require

MODES = ("none", "fp8", "int8", "fp8_weight_only", "int8_weight_only")
ENGINES = ("auto", "scaled_mm", "int_mm", "torchao", "transformer_engine", "reference")
TRANSFORMER_ENGINE_RECIPES = ("current_scaling", "delayed_scaling", "block_scaling", "mxfp8", "nvfp4")

DEFAULT_INCLUDE = (
    "blocks.*.attn1.to_[qkv]",
    "blocks.*.attn1.to_out.0",
    "blocks.*.attn2.to_[qkv]",
    "blocks.*.attn2.to_out.0",
    "blocks.*.ffn.net.0.proj",
    "blocks.*.ffn.net.2",
)
"""The ten products of a Wan block that the published FP8 students run in low precision."""

DEFAULT_EXCLUDE = (
    "patch_embedding",
    "condition_embedder.*",
    "proj_out",
    "blocks.*.attn2.add_[kv]_proj",
    "blocks.*.processor.*",
)
"""What those students keep: embedders, output layer, image keys and values, and learned attention branches."""

_ENGINES_OF_MODE = {
    "none": ("auto",),
    "fp8": ("auto", "scaled_mm", "torchao", "transformer_engine", "reference"),
    "int8": ("auto", "int_mm", "torchao", "reference"),
    "fp8_weight_only": ("auto", "torchao", "reference"),
    "int8_weight_only": ("auto", "torchao", "reference"),
}


@dataclass(frozen=True)
class QuantizationConfig:
    """How the linear layers of one transformer are stored and multiplied.

    Attributes:
        mode: "fp8" (e4m3) and "int8" quantize weights once and activations for every forward pass; the "_weight_only"
            modes store weights in eight bits and multiply in the precision of the model; "none" changes nothing.
        engine: what multiplies; "auto" takes the first that a tiny product on this device proves right, and the report
            says which and why. An engine that was named and does not work is an error.
        granularity: "row" has one scale per output channel and one per token, "tensor" one each.
        include: patterns (as in file names, matched against module names) of the layers to quantize.
        exclude: patterns of layers that stay as they are, whatever `include` says.
        high_precision_steps: sampling steps that run with the original layers, counted from 0.
        originals: where the original layers wait to be put back: "keep" where they are, "offload" to the memory of the
            CPU, "drop" for never. `high_precision_steps` needs "keep".
        hot_channels: at most this many input channels per layer, the largest ones found by calibration, are multiplied
            in the precision of the model; 0 for none.
        fused: joins the elementwise parts of each block with the quantization that follows them. Results change by
            rounding only.
        transformer_engine_recipe: scaling recipe of the engine "transformer_engine".

    Raises:
        ConfigError: a value outside its range, or values that exclude each other.
    """

    mode: Literal["none", "fp8", "int8", "fp8_weight_only", "int8_weight_only"] = "none"
    engine: Literal["auto", "scaled_mm", "int_mm", "torchao", "transformer_engine", "reference"] = "auto"
    granularity: Literal["row", "tensor"] = "row"
    include: tuple[str, ...] = DEFAULT_INCLUDE
    exclude: tuple[str, ...] = DEFAULT_EXCLUDE
    high_precision_steps: tuple[int, ...] = ()
    originals: Literal["keep", "offload", "drop"] = "offload"
    hot_channels: int = 0
    fused: bool = False
    transformer_engine_recipe: Literal["current_scaling", "delayed_scaling", "block_scaling", "mxfp8", "nvfp4"] = (
        "current_scaling"
    )

    def __post_init__(self) -> None:
        require(self.mode in MODES, "mode", self.mode, f"one of {', '.join(MODES)}")
        able = _ENGINES_OF_MODE[self.mode]
        require(self.engine in able, "engine", self.engine, f"one of {', '.join(able)} for mode {self.mode!r}")
        require(self.granularity in ("row", "tensor"), "granularity", self.granularity, "'row' or 'tensor'")
        for field in ("include", "exclude"):
            patterns = getattr(self, field)
            good = isinstance(patterns, tuple) and all(isinstance(p, str) and p for p in patterns)
            require(good, field, patterns, "non-empty patterns of module names")
        require(self.mode == "none" or bool(self.include), "include", self.include, "at least one pattern")
        steps = self.high_precision_steps
        require(all(isinstance(s, int) and s >= 0 for s in steps), "high_precision_steps", steps, "0 or more each")
        known = ("keep", "offload", "drop")
        require(self.originals in known, "originals", self.originals, f"one of {', '.join(known)}")
        rule = "'keep' where high_precision_steps are given: those steps run with the original layers"
        require(not steps or self.originals == "keep", "originals", self.originals, rule)
        count = self.hot_channels
        require(
            isinstance(count, int) and not isinstance(count, bool) and count >= 0, "hot_channels", count, "0 or more"
        )
        foreign = self.engine in ("torchao", "transformer_engine")
        own = not self.weight_only and not foreign
        rule = f"0 for mode {self.mode!r} with engine {self.engine!r}, which quantizes no activations of ours"
        require(count == 0 or (own and self.mode != "none"), "hot_channels", count, rule)
        recipes = TRANSFORMER_ENGINE_RECIPES
        recipe = self.transformer_engine_recipe
        require(recipe in recipes, "transformer_engine_recipe", recipe, f"one of {', '.join(recipes)}")
        chosen = recipe == "current_scaling" or self.engine == "transformer_engine"
        require(chosen, "transformer_engine_recipe", recipe, "left out unless the engine is 'transformer_engine'")
        quantized_by_us = not (self.mode == "none" and (steps or self.granularity != "row"))
        require(quantized_by_us, "mode", self.mode, "other than 'none' where steps or a granularity are given")

    @property
    def active(self) -> bool:
        """Whether anything at all changes."""
        return self.mode != "none" or self.fused

    @property
    def weight_only(self) -> bool:
        """Whether activations stay as they are."""
        return self.mode.endswith("_weight_only")

    @property
    def number(self) -> Literal["fp8", "int8"]:
        """The eight-bit type of the weights; only for modes other than "none"."""
        return "int8" if self.mode.startswith("int8") else "fp8"

    def selects(self, name: str) -> bool:
        """Whether a layer of this module name is to be quantized."""
        included = any(fnmatchcase(name, pattern) for pattern in self.include)
        return included and not any(fnmatchcase(name, pattern) for pattern in self.exclude)
