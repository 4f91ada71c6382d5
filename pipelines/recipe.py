"""A recipe: everything that makes a model fast, as plain data that travels with its checkpoint."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..attention.config import AttentionConfig
from ..core.config import ConfigError, from_dict, load_file, require
from ..quantization.config import QuantizationConfig
from .compilation import check_compile
from .memory import MemoryConfig
from .scheduling_few_step import check_sigmas

RECIPE_FILE = "videospark_recipe.json"
"""Beside the weights of a model: the recipe that it was made for."""


@dataclass(frozen=True)
class SamplerConfig:
    """How the model is sampled; None leaves a setting to the checkpoint.

    `sigmas` are the noise levels of a few-step student and fix the number of steps. `flow_shift` belongs to the
    scheduler that the checkpoint came with and cannot be combined with `sigmas`, which are shifted already.
    `boundary_ratio` says where the sigmas of a student with two experts change from one to the other; a pipeline with
    another boundary, or with one expert, is refused.
    """

    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    sigmas: tuple[float, ...] | None = None
    stochastic: bool = False
    flow_shift: float | None = None
    boundary_ratio: float | None = None

    def __post_init__(self) -> None:
        steps = self.num_inference_steps
        require(steps is None or steps >= 1, "num_inference_steps", steps, "at least 1")
        for name in ("guidance_scale", "guidance_scale_2"):
            value = getattr(self, name)
            require(value is None or value >= 0, name, value, "0 or more (1 means no guidance)")
        require(self.flow_shift is None or self.flow_shift > 0, "flow_shift", self.flow_shift, "more than 0")
        boundary = self.boundary_ratio
        require(boundary is None or 0 < boundary < 1, "boundary_ratio", boundary, "between 0 and 1")
        if self.sigmas is None:
            require(not self.stochastic, "stochastic", self.stochastic, "false where no sigmas are given")
            require(boundary is None, "boundary_ratio", boundary, "left out where no sigmas are given")
            return
        check_sigmas(self.sigmas)
        split = boundary is None or self.sigmas[-1] < boundary <= self.sigmas[0]
        require(split, "boundary_ratio", boundary, f"such that both experts get some of the sigmas {self.sigmas}")
        require(
            steps in (None, len(self.sigmas)),
            "num_inference_steps",
            steps,
            f"{len(self.sigmas)}, the number of sigmas, or left out",
        )
        require(self.flow_shift is None, "flow_shift", self.flow_shift, "left out: the sigmas are shifted already")

    @property
    def steps(self) -> int | None:
        """Number of steps: of the sigmas where there are any."""
        return self.num_inference_steps if self.sigmas is None else len(self.sigmas)


@dataclass(frozen=True)
class Recipe:
    """A named combination of attention, low precision, sampler, memory and compilation.

    `requires` names the training that the weights need (for example "few-step"); weights that do not declare it are
    refused unless the caller insists. `compile` is a mode of torch.compile for each block of the denoisers, or "none";
    what compiling costs is paid by the first clip, and reported.
    """

    name: str
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    compile: Literal["none", "default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune"] = "none"
    requires: str | None = None
    description: str = ""

    def __post_init__(self) -> None:
        require(bool(self.name.strip()), "name", self.name, "a non-empty text")
        check_compile(self.compile, self.quantization)


_SPARK_START = 1600 / 1601
_SPARK_SIGMAS: dict[int, tuple[float, ...]] = {
    2: (_SPARK_START, 0.933781),
    3: (_SPARK_START, 0.933781, 0.852895),
    4: (_SPARK_START, 0.933781, 0.852895, 0.608979),
    8: (_SPARK_START, 0.933781, 0.852895, 0.782708, 0.690833, 0.583052, 0.457197, 0.297157),
}

_LIGHTX2V_SIGMAS = (1.0, 0.9375, 2.5 / 3, 0.625)
"""1000, 750, 500 and 250 of 1000 at shift 5; of a pair the first two are the high-noise expert's."""

_SPARK22_BOUNDARY = 0.875
_SPARK22_SIGMAS = (_SPARK_START, 0.933781, _SPARK22_BOUNDARY - 2**-24, 0.608979)
"""The knots of the Wan 2.2 student: two steps down to the boundary by the high-noise expert, two by the other.

The pipeline gives a step to the high-noise expert where its time is at the boundary or above it, so the step that
starts there is moved down by the smallest float32 that makes it the low-noise expert's.
"""


def _sparse(name: str, keep_ratio: float, description: str, **attention: Any) -> Recipe:
    config = AttentionConfig(backend="gather", keep_ratio=keep_ratio, **attention)
    return Recipe(name, attention=config, description=description)


def _presets() -> dict[str, Recipe]:
    recipes = [
        Recipe("dense", description="The model as it is, with its own sampler: the reference to compare with."),
        _sparse("sparse-50", 0.5, "Half of the key blocks per query block; needs no training."),
        _sparse("sparse-90", 0.1, "A tenth of the key blocks; for weights trained at this sparsity."),
        _sparse("tiny-sparse-50", 0.5, "Half of the blocks, small ones for the tiny model.",
                block_size_q=16, block_size_k=16, tile=(1, 4, 4)),
    ]  # fmt: skip
    recipes += [
        Recipe(
            f"spark-{steps}step",
            sampler=SamplerConfig(sigmas=sigmas, guidance_scale=1.0),
            requires="few-step",
            description=f"{steps} deterministic steps without guidance, for a distilled student.",
        )
        for steps, sigmas in _SPARK_SIGMAS.items()
    ]
    recipes.append(
        Recipe(
            "spark22-4step",
            sampler=SamplerConfig(
                sigmas=_SPARK22_SIGMAS, guidance_scale=1.0, guidance_scale_2=1.0, boundary_ratio=_SPARK22_BOUNDARY
            ),
            requires="few-step",
            description="Wan 2.2: two steps with each expert, without guidance, for a distilled student.",
        )
    )
    recipes.append(
        Recipe(
            "lightx2v-4step",
            sampler=SamplerConfig(sigmas=_LIGHTX2V_SIGMAS, guidance_scale=1.0, guidance_scale_2=1.0),
            requires="few-step",
            description="Four Euler steps at shift 5 without guidance, for LightX2V's step-distilled models and LoRAs.",
        )
    )
    for mode in ("fp8", "int8"):
        precision = QuantizationConfig(mode=mode, fused=True)  # type: ignore[arg-type]
        recipes.append(
            Recipe(
                mode,
                quantization=precision,
                description=f"The ten products of every block in {mode.upper()}, the rest fused; needs no training.",
            )
        )
        recipes.append(
            Recipe(
                f"spark-3step-{mode}",
                sampler=SamplerConfig(sigmas=_SPARK_SIGMAS[3], guidance_scale=1.0),
                quantization=precision,
                requires="few-step",
                description=f"spark-3step with the products in {mode.upper()}.",
            )
        )
    return {recipe.name: recipe for recipe in recipes}


def preset_names() -> list[str]:
    """Names that `preset` knows."""
    return list(_presets())


def preset(name: str) -> Recipe:
    """The built-in recipe of that name; ConfigError names the known ones and the nearest."""
    known = _presets()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"recipe: got {name!r}; must be one of {', '.join(known)}, or a .json or .toml file{hint}")


def resolve(recipe: Recipe | str | Path | Mapping[str, Any]) -> Recipe:
    """A Recipe from any form of one: itself, a preset's name, a .json/.toml file, or plain data."""
    if isinstance(recipe, Recipe):
        return recipe
    if isinstance(recipe, Mapping):
        return from_dict(Recipe, recipe, "recipe")
    if Path(recipe).suffix in (".json", ".toml"):
        return load_file(Recipe, Path(recipe))
    require(isinstance(recipe, str), "recipe", recipe, "a preset's name or a .json or .toml file")
    return preset(str(recipe))


def with_sampler(recipe: Recipe, **changes: Any) -> Recipe:
    """A copy of the recipe with some sampler settings replaced."""
    return dataclasses.replace(recipe, sampler=dataclasses.replace(recipe.sampler, **changes))
