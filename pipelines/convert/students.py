"""What is known of the published students: how each kind is recognised, and the recipe that it was trained for.

| kind | attention | sampling |
|---|---|---|
| `spark` | RoLA beside the kept blocks, raster order, angles in bfloat16 | 2 to 8 Euler steps, Wan 2.2: 2 + 2 |
| `turbodiffusion` | SLA beside the kept blocks of 128 x 64 | 4 steps with fresh noise; a pair: Euler, boundary 0.9 |
| `lightx2v` | dense | 4 Euler steps at shift 5, Wan 2.2: 2 + 2 |
| `fastvideo` | dense here (its gate has no counterpart) | 3 steps with fresh noise |
| `wan` | as it is | its own |
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...attention.config import AttentionConfig, RoLAConfig
from ...core.config import ConfigError, from_dict, require
from ..recipe import Recipe, SamplerConfig, preset
from .keys import BRANCH_MARK

FORMATS = ("auto", "spark", "wan", "turbodiffusion", "lightx2v", "fastvideo")
BRANCH_OF = {"spark": "rola", "turbodiffusion": "sla"}
GATE = "to_gate_compress"

_TRIG_KNOTS = (0.933781, 0.852895, 0.608979)
_SIZES = {"480": {"height": 480, "width": 832}, "720": {"height": 720, "width": 1280}}
_LENGTH = {"num_frames": 81, "fps": 16, "max_sequence_length": 512}


@dataclass(frozen=True)
class Student:
    """What a converted checkpoint carries beside its weights.

    Attributes:
        recipe: None for a model that is no student.
        defaults: what `videospark_defaults.json` says.
        boundary_ratio: of a pair of experts, None where the base says it.
        notes: what the user should know.
    """

    recipe: Recipe | None = None
    defaults: dict[str, Any] = field(default_factory=dict)
    boundary_ratio: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Wishes:
    """What the user says of a student, where its name does not: sparsity, steps, attention backend."""

    sparsity: float | None = None
    steps: int | None = None
    backend: str = "auto"


@dataclass(frozen=True)
class Found:
    """What is known of a checkpoint before it is converted."""

    name: str
    shapes: Mapping[str, tuple[int, ...]]
    experts: int
    in_channels: int


RECIPE_KEY, DEFAULTS_KEY = "videospark_recipe", "videospark_defaults"
"""In the header of a file that was written by `reverse.py`: what the folder said beside the weights."""


def carried_student(metadata: Mapping[str, str], wishes: Wishes) -> Student | None:
    """The recipe and defaults in a file's header; None without them, or where the user says otherwise.

    Raises:
        ConfigError: they are there and broken.
    """
    if RECIPE_KEY not in metadata or wishes.sparsity is not None or wishes.steps is not None:
        return None
    try:
        data, defaults = json.loads(metadata[RECIPE_KEY]), json.loads(metadata.get(DEFAULTS_KEY, "{}"))
    except ValueError as error:
        raise ConfigError(f"source.{RECIPE_KEY}: got a header that is no JSON ({error}); must be a recipe") from error
    recipe = from_dict(Recipe, data, f"source.{RECIPE_KEY}")
    if wishes.backend != "auto" and recipe.attention.branch != "none":
        recipe = replace(recipe, attention=replace(recipe.attention, backend=wishes.backend, dense_below=None))
    note = f"recipe {recipe.name!r} and its defaults are those in the header of the file"
    return Student(recipe, defaults, recipe.sampler.boundary_ratio, (note,))


def detect_format(name: str, names: Iterable[str]) -> str:
    """The kind of a checkpoint, by its tensors first and by the name of its file then.

    Args:
        name: of the file or folder.
        names: of its tensors, of diffusers where they have one.
    """
    text, joined = name.lower(), "\n".join(names)
    if GATE in joined or "fastwan" in text or "fastvideo" in text:
        return "fastvideo"
    if f"{BRANCH_MARK}gate_bias" in joined or "sparkwan" in text:
        return "spark"
    if f"{BRANCH_MARK}proj.weight" in joined or "turbowan" in text:
        return "turbodiffusion"
    if "lightx2v" in text or ("distill" in text and re.search(r"4.?step", text)):
        return "lightx2v"
    return "wan"


def student_of(kind: str, found: Found, wishes: Wishes) -> Student:
    """Recipe and defaults of a checkpoint.

    Raises:
        ConfigError: its sparsity or number of steps is neither in the name nor given, or no such student is known.
    """
    if kind == "wan":
        return Student()
    made = {"spark": _spark, "turbodiffusion": _turbodiffusion, "lightx2v": _lightx2v, "fastvideo": _fastvideo}[kind]
    student = made(found, wishes)
    size = re.search(r"(480|720)p", found.name.lower())
    assert student.recipe is not None
    defaults = {
        **(_SIZES[size[1]] if size else {}), **_LENGTH, "num_inference_steps": student.recipe.sampler.steps,
        "guidance_scale": 1.0, "provides": ["few-step"],
    }  # fmt: skip
    return Student(student.recipe, defaults, student.boundary_ratio, student.notes)


def _spark(found: Found, wishes: Wishes) -> Student:
    keep = _keep_ratio(found.name, wishes)
    named = re.search(r"(\d+)-?steps?", found.name.lower())
    steps = wishes.steps if wishes.steps is not None else int(named[1]) if named else 4
    rank = next(s[-2] for n, s in found.shapes.items() if n.endswith("linear_branch.proj_q.weight"))
    attention = AttentionConfig(
        backend=wishes.backend, keep_ratio=keep, token_order="raster", branch="rola", **_never_dense(wishes),
        # The angles were rounded in training, so the weights fit the rounded ones.
        rola=RoLAConfig(rank=rank, angle_dtype="bfloat16"),
    )  # fmt: skip
    if found.experts == 2:
        rule = "a text-to-video pair: no schedule of an image-to-video pair is published"
        require(found.in_channels != 36, "source", "an image-to-video pair", rule)
        require(steps == 4, "steps", steps, "4 for a pair of experts, two for each")
        sampler = preset("spark22-4step").sampler
    else:
        require(steps in (2, 3, 4, 8), "steps", steps, "2, 3, 4 or 8, the published schedules")
        sampler = preset(f"spark-{steps}step").sampler
    text = f"SparkDiffusion student: trained to keep {keep:.0%} of the blocks; up to 10 % fit its weights as well."
    recipe = Recipe(
        f"spark-{round(100 * (1 - keep))}-{steps}step", attention, sampler, requires="few-step", description=text
    )
    return Student(recipe, boundary_ratio=sampler.boundary_ratio)


def _turbodiffusion(found: Found, wishes: Wishes) -> Student:
    keep = 0.1 if wishes.sparsity is None else round(1 - wishes.sparsity, 6)
    steps = 4 if wishes.steps is None else wishes.steps
    require(1 <= steps <= 4, "steps", steps, "1 to 4")
    pair = found.experts == 2
    start = 200 / 201 if pair else 80 / 81
    boundary = 0.9 if pair and steps > 2 else None
    rule = "3 or 4 for a pair of experts, so that both get some"
    require(not pair or boundary is not None, "steps", steps, rule)
    attention = AttentionConfig(
        backend=wishes.backend, keep_ratio=keep, token_order="raster", branch="sla", block_size_q=128, block_size_k=64,
        **_never_dense(wishes),
    )  # fmt: skip
    sampler = SamplerConfig(
        sigmas=(start, *_TRIG_KNOTS[: steps - 1]), stochastic=not pair, guidance_scale=1.0,
        guidance_scale_2=1.0 if pair else None, boundary_ratio=boundary,
    )  # fmt: skip
    text = "TurboDiffusion student: sparse-linear attention, few steps without guidance."
    recipe = Recipe(
        f"turbo-{round(100 * (1 - keep))}-{steps}step", attention, sampler, requires="few-step", description=text
    )
    return Student(recipe, boundary_ratio=boundary)


def _lightx2v(found: Found, wishes: Wishes) -> Student:
    require(wishes.steps in (None, 4), "steps", wishes.steps, "4, the published schedule")
    require(not wishes.sparsity, "sparsity", wishes.sparsity, "left out: this kind is dense")
    pair = found.experts == 2
    boundary = (0.9 if found.in_channels == 36 else 0.875) if pair else None
    sampler = replace(preset("lightx2v-4step").sampler, guidance_scale_2=1.0 if pair else None, boundary_ratio=boundary)
    text = "LightX2V student: dense, four Euler steps without guidance."
    return Student(Recipe("lightx2v-4step", sampler=sampler, requires="few-step", description=text), {}, boundary)


def _fastvideo(found: Found, wishes: Wishes) -> Student:
    require(wishes.steps in (None, 3), "steps", wishes.steps, "3, the published schedule")
    require(not wishes.sparsity, "sparsity", wishes.sparsity, "left out: this kind runs dense here")
    if found.experts == 2:
        raise ConfigError("source: got two experts; must be one: no schedule of a FastVideo pair is published")
    sampler = SamplerConfig(sigmas=(1.0, 0.757, 0.522), stochastic=True, guidance_scale=1.0)
    text = "FastVideo student: three steps with fresh noise, without guidance."
    return Student(Recipe("fastvideo-3step", sampler=sampler, requires="few-step", description=text))


def _never_dense(wishes: Wishes) -> dict[str, Any]:
    """Weights that were trained with a branch need it at every length, where "auto" would run short videos without."""
    return {"dense_below": 0} if wishes.backend == "auto" else {}


def _keep_ratio(name: str, wishes: Wishes) -> float:
    named = re.search(r"(0\.\d+)-?sparsity", name.lower())
    sparsity = wishes.sparsity if wishes.sparsity is not None else float(named[1]) if named else None
    rule = "given: the name of the file does not say at which sparsity it was trained, as in 0.95Sparsity"
    require(sparsity is not None, "sparsity", None, rule)
    assert sparsity is not None
    require(0 < sparsity < 1, "sparsity", sparsity, "between 0 and 1")
    if named is not None:
        rule = f"{named[1]}, at which the name of the file says it was trained; rename the file if that is wrong"
        require(abs(sparsity - float(named[1])) < 1e-6, "sparsity", sparsity, rule)
    return round(1 - sparsity, 6)
