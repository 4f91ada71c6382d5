"""Applies a recipe to a stock Wan pipeline, and takes it off again."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..attention.processors import InstalledAttention, install
from ..core.config import ConfigError, to_dict
from .recipe import Recipe, resolve
from .scheduling_few_step import FewStepScheduler

EXPERTS = ("transformer", "transformer_2")
_STATE = "_videospark_acceleration"


@dataclass
class AccelerationReport:
    """What a recipe changed.

    Attributes:
        recipe: the recipe as plain data.
        scheduler: class names of the scheduler before and now.
        modules: the denoisers that were changed.
        layers: one row per self-attention layer; `actual_sparsity` is filled by the first forward pass.
        notes: what the user should know, also given as warnings.
    """

    recipe: dict[str, Any]
    scheduler: tuple[str, str]
    modules: list[str]
    layers: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "recipe": self.recipe,
            "scheduler": {"before": self.scheduler[0], "now": self.scheduler[1]},
            "modules": list(self.modules),
            "layers": [dict(row) for row in self.layers],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        columns = ("module", "layer", "backend", "keep_ratio", "nominal_sparsity", "actual_sparsity")
        cells = [columns] + [tuple(_cell(row.get(name)) for name in columns) for row in self.layers]
        widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in cells]
        head = f"recipe {self.recipe['name']}; scheduler {self.scheduler[0]} -> {self.scheduler[1]}"
        return "\n".join([head, *lines, *self.notes])


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


@dataclass
class AccelerationState:
    """What is needed to undo one `accelerate`; lives on the pipeline it belongs to."""

    recipe: Recipe
    original_scheduler: Any
    installed: dict[str, InstalledAttention]
    hooks: list[Any]
    notes: list[str]


def state_of(pipe: Any) -> AccelerationState | None:
    """The acceleration of this pipeline, or None."""
    return pipe.__dict__.get(_STATE)


def attach_state(pipe: Any, state: AccelerationState | None) -> None:
    """Puts the state on a pipeline; diffusers' own attribute handling is bypassed, as this is no component."""
    object.__setattr__(pipe, _STATE, state)


def accelerate(pipe: Any, recipe: Recipe | str | Path | Mapping[str, Any]) -> AccelerationReport:
    """Changes self-attention of every denoiser, and the scheduler where the recipe asks for it.

    Cross-attention, text encoder and VAE stay as they are. `restore` brings the very same objects back.

    Raises:
        ConfigError: the pipeline is accelerated already, has no denoiser, or cannot run this recipe. The pipeline
            is then unchanged.
    """
    recipe = resolve(recipe)
    if (present := state_of(pipe)) is not None:
        raise ConfigError(
            f"pipeline: got one that is accelerated with recipe {present.recipe.name!r}; "
            "must be restored first: call restore(pipe)"
        )
    experts = {name: module for name in EXPERTS if (module := getattr(pipe, name, None)) is not None}
    if not experts:
        raise ConfigError(f"pipeline: got {type(pipe).__name__} without a transformer; must be a Wan pipeline")
    state = AccelerationState(recipe, pipe.scheduler, {}, [], _notes(pipe, recipe))
    scheduler = build_scheduler(pipe.scheduler, recipe)
    try:
        for name, module in experts.items():
            state.installed[name] = install(module, recipe.attention)
            state.hooks.append(_follow_steps(pipe, module, state.installed[name]))
        if scheduler is not pipe.scheduler:
            pipe.scheduler = scheduler
    except BaseException:
        _undo(pipe, state)
        raise
    attach_state(pipe, state)
    for note in state.notes:
        warnings.warn(note, stacklevel=2)
    report = current_report(pipe)
    assert report is not None
    return report


def restore(pipe: Any) -> None:
    """Undoes `accelerate`: same processors, same scheduler object, no hooks. Does nothing on a stock pipeline."""
    state = state_of(pipe)
    if state is None:
        return
    _undo(pipe, state)
    object.__delattr__(pipe, _STATE)


def current_report(pipe: Any) -> AccelerationReport | None:
    """What is active now, with the sparsity measured in the last forward pass; None on a stock pipeline."""
    state = state_of(pipe)
    if state is None:
        return None
    rows = [{"module": name, **row} for name, installed in state.installed.items() for row in installed.report()]
    names = (type(state.original_scheduler).__name__, type(pipe.scheduler).__name__)
    return AccelerationReport(to_dict(state.recipe), names, list(state.installed), rows, list(state.notes))


def build_scheduler(scheduler: Any, recipe: Recipe) -> Any:
    """The scheduler of the recipe: few-step, the given one with another shift, or the given one itself."""
    sampler = recipe.sampler
    if sampler.sigmas is not None:
        return FewStepScheduler(
            sigmas=tuple(sampler.sigmas),
            stochastic=sampler.stochastic,
            num_train_timesteps=scheduler.config.num_train_timesteps,
        )
    if sampler.flow_shift is None:
        return scheduler
    for name in ("flow_shift", "shift"):
        if name in scheduler.config:
            return type(scheduler).from_config(scheduler.config, **{name: sampler.flow_shift})
    raise ConfigError(
        f"flow_shift: got {sampler.flow_shift!r}; must be left out, as {type(scheduler).__name__} has no shift"
    )


def _notes(pipe: Any, recipe: Recipe) -> list[str]:
    provided = (getattr(pipe, "videospark_defaults", None) or {}).get("provides", [])
    if recipe.requires is None or recipe.requires in provided:
        return []
    return [
        f"recipe {recipe.name!r} needs weights trained for {recipe.requires!r}, and this checkpoint does not say "
        "that it is: expect worse videos unless you know that it is"
    ]


def _follow_steps(pipe: Any, module: Any, installed: InstalledAttention) -> Any:
    """Tells the attention which step runs; the scheduler counts them, so no pipeline code has to change."""
    reference = weakref.ref(pipe)

    def before_forward(*_: Any) -> None:
        owner = reference()
        if owner is not None:
            installed.set_step(getattr(owner.scheduler, "step_index", None) or 0)

    # First in line, so that the attention's own hook already sees the step.
    return module.register_forward_pre_hook(before_forward, prepend=True)


def _undo(pipe: Any, state: AccelerationState) -> None:
    for hook in state.hooks:
        hook.remove()
    for installed in state.installed.values():
        installed.remove()
    if pipe.scheduler is not state.original_scheduler:
        pipe.scheduler = state.original_scheduler
