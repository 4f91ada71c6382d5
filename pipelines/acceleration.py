"""Applies a recipe to a stock Wan pipeline, and takes it off again."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..attention.processors import InstalledAttention, install
from ..core.config import ConfigError, require, to_dict
from ..quantization import convert
from ..quantization.convert import HotChannels, InstalledQuantization
from . import compilation, memory
from .compilation import InstalledCompilation, install_compilation
from .memory import InstalledMemory, install_memory
from .recipe import Recipe, resolve
from .scheduling_few_step import FewStepScheduler

EXPERTS = ("transformer", "transformer_2")
_STATE, _BRANCHES = "_videospark_acceleration", "_videospark_branches"


@dataclass
class AccelerationReport:
    """What a recipe changed.

    Attributes:
        recipe: the recipe as plain data.
        scheduler: class names of the scheduler before and now.
        modules: the denoisers that were changed.
        layers: one row per self-attention layer; `actual_sparsity` is filled by the first forward pass.
        notes: what the user should know, also given as warnings.
        quantization: by denoiser, the quantization report as plain data; empty where nothing is quantized or fused.
        memory: what was saved beside the denoisers, in bytes; None where the recipe has nothing of the kind.
        compilation: by denoiser, what was compiled and what that cost; empty where nothing is.
    """

    recipe: dict[str, Any]
    scheduler: tuple[str, str]
    modules: list[str]
    layers: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    quantization: dict[str, dict[str, Any]] = field(default_factory=dict)
    memory: dict[str, Any] | None = None
    compilation: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "recipe": self.recipe,
            "scheduler": {"before": self.scheduler[0], "now": self.scheduler[1]},
            "modules": list(self.modules),
            "layers": [dict(row) for row in self.layers],
            "notes": list(self.notes),
            "quantization": {name: dict(report) for name, report in self.quantization.items()},
            "memory": None if self.memory is None else dict(self.memory),
            "compilation": {name: dict(report) for name, report in self.compilation.items()},
        }

    def __str__(self) -> str:
        columns = ("module", "layer", "backend", "keep_ratio", "nominal_sparsity", "actual_sparsity")
        cells = [columns] + [tuple(_cell(row.get(name)) for name in columns) for row in self.layers]
        widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in cells]
        head = f"recipe {self.recipe['name']}; scheduler {self.scheduler[0]} -> {self.scheduler[1]}"
        precision = [_precision_line(name, report) for name, report in self.quantization.items()]
        saved = [] if self.memory is None else [memory.text_line(self.memory), *self.memory["notes"]]
        compiled = [compilation.text_line(name, report) for name, report in self.compilation.items()]
        return "\n".join([head, *lines, *precision, *saved, *compiled, *self.notes])


def _precision_line(name: str, report: Mapping[str, Any]) -> str:
    before, after = report["bytes_before"] / 2**20, report["bytes_after"] / 2**20
    kept = len(report["layers"]) - report["num_quantized"]
    layers = f"{report['num_quantized']} layers" + (f", {kept} kept" if kept else "")
    text = f"{name}: {report['config'].get('mode', 'none')}, {layers}, {before:.1f} -> {after:.1f} MiB"
    return f"{text}, engine {report['engine']}; fused: {report['fused']}"


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
    quantized: dict[str, InstalledQuantization] = field(default_factory=dict)
    compiled: dict[str, InstalledCompilation] = field(default_factory=dict)
    memory: InstalledMemory | None = None
    borrowed: tuple[str, ...] = ()
    """Denoisers that were loaded in eight bits: `restore` leaves them so, as there is nothing to go back to."""


def state_of(pipe: Any) -> AccelerationState | None:
    """The acceleration of this pipeline, or None."""
    return pipe.__dict__.get(_STATE)


def attach_state(pipe: Any, state: AccelerationState | None) -> None:
    """Puts the state on a pipeline; diffusers' own attribute handling is bypassed, as this is no component."""
    object.__setattr__(pipe, _STATE, state)


def attach_branches(pipe: Any, branches: Mapping[str, dict[str, torch.Tensor]] | None) -> None:
    """Keep the linear branches that came with the weights, so that every later recipe runs them and no random ones."""
    object.__setattr__(pipe, _BRANCHES, branches)


def branches_of(pipe: Any) -> Mapping[str, dict[str, torch.Tensor]] | None:
    """The tensors that `attach_branches` kept, by denoiser; None where none came with the weights."""
    return pipe.__dict__.get(_BRANCHES)


def accelerate(
    pipe: Any,
    recipe: Recipe | str | Path | Mapping[str, Any],
    *,
    allow_untrained: bool = False,
    hot_channels: Mapping[str, HotChannels] | None = None,
    branch_state: Mapping[str, dict[str, Any]] | None = None,
    device: torch.device | str | None = None,
) -> AccelerationReport:
    """Changes self-attention and precision of every denoiser, and the scheduler where the recipe asks for it.

    Text encoder and VAE stay as they are, unless the recipe has a memory section. `restore` brings the very same
    objects back.

    Args:
        pipe: a Wan pipeline of diffusers.
        recipe: what to change.
        allow_untrained: apply a recipe that needs trained weights to a checkpoint that does not declare them; this
            warns, and the report notes it.
        hot_channels: by denoiser, what `find_hot_channels` found; for recipes with `quantization.hot_channels`.
        branch_state: by denoiser, the tensors of a linear branch, as `InstalledAttention.branch_state` gives them; left
            out, those that were loaded with the weights, and new ones where there are none (`branch_weights` in the
            report says which).
        device: where it will run, if not where the weights are now: a pipeline that is to be offloaded is accelerated
            in the memory of the CPU.

    Raises:
        ConfigError: the pipeline is accelerated already, has no denoiser, lacks the training that the recipe requires,
            or cannot run this recipe. The pipeline is then unchanged.
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
    _check_boundary(pipe, recipe)
    if branch_state is None and recipe.attention.branch != "none":
        branch_state = branches_of(pipe)
    unknown = sorted(set(hot_channels or {}) - set(experts))
    require(not unknown, "hot_channels", unknown, f"by denoiser: {', '.join(experts)}")
    foreign = sorted(set(branch_state or {}) ^ set(experts)) if branch_state is not None else []
    require(not foreign, "branch_state", foreign, f"for each denoiser, and no other: {', '.join(experts)}")
    state = AccelerationState(recipe, pipe.scheduler, {}, [], _training_notes(pipe, recipe, allow_untrained))
    scheduler = build_scheduler(pipe.scheduler, recipe)
    try:
        for name, module in experts.items():
            branch = (branch_state or {}).get(name)
            state.installed[name] = install(module, recipe.attention, branch_state=branch, device=device)
            _quantize(name, module, state, (hot_channels or {}).get(name))
            state.hooks.append(_follow_steps(pipe, module, state))
        state.memory = install_memory(pipe, recipe.memory)
        if recipe.compile != "none":
            for name, module in experts.items():
                state.compiled[name] = install_compilation(module, recipe.compile)
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
    precision = {name: installed.report().to_dict() for name, installed in state.quantized.items()}
    saved = None if state.memory is None else state.memory.report()
    compiled = {name: installed.report() for name, installed in state.compiled.items()}
    return AccelerationReport(
        to_dict(state.recipe), names, list(state.installed), rows, list(state.notes), precision, saved, compiled
    )


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


def _quantize(name: str, module: Any, state: AccelerationState, hot: HotChannels | None) -> None:
    """Quantize and fuse one denoiser, or take over one that was loaded in eight bits."""
    config = state.recipe.quantization
    present = convert.state_of(module)
    if present is None:
        if config.active:
            state.quantized[name] = convert.quantize_(module, config, hot_channels=hot)
        return
    if present.config != config:
        raise ConfigError(
            f"{name}: got one that is quantized already ({present.config.mode}, {present.config.engine}), and not as "
            f"recipe {state.recipe.name!r} says ({config.mode}, {config.engine}); must be the same, or restored"
        )
    require(hot is None, "hot_channels", "a table", f"left out: {name} is quantized already")
    state.quantized[name] = present
    state.borrowed += (name,)


def _check_boundary(pipe: Any, recipe: Recipe) -> None:
    wanted = recipe.sampler.boundary_ratio
    if wanted is None:
        return
    present = pipe.config.get("boundary_ratio")
    rule = f"a pipeline of two experts that change at {wanted}, for which recipe {recipe.name!r} was made"
    require(present == wanted, "pipeline.boundary_ratio", present, rule)


def _training_notes(pipe: Any, recipe: Recipe, allow_untrained: bool) -> list[str]:
    provided = (getattr(pipe, "videospark_defaults", None) or {}).get("provides", [])
    if recipe.requires is None or recipe.requires in provided:
        return []
    lack = f"weights trained for {recipe.requires!r}, and this checkpoint declares {', '.join(provided) or 'nothing'}"
    if not allow_untrained:
        raise ConfigError(
            f"recipe: got {recipe.name!r}, which needs {lack}; must be applied to a checkpoint that provides "
            f"{recipe.requires!r}, or with allow_untrained=True where you know better"
        )
    return [f"recipe {recipe.name!r} needs {lack}: applied all the same as allow_untrained says; expect worse videos"]


def _follow_steps(pipe: Any, module: Any, state: AccelerationState) -> Any:
    """Tells attention and quantization which step runs; the scheduler counts, so no pipeline code has to change."""
    reference = weakref.ref(pipe)
    (name,) = (name for name in EXPERTS if getattr(pipe, name, None) is module)
    followers = [part[name] for part in (state.installed, state.quantized) if name in part]

    def before_forward(*_: Any) -> None:
        owner = reference()
        if state.memory is not None:
            state.memory.release()  # the prompts are encoded by now
        if owner is not None:
            step = getattr(owner.scheduler, "step_index", None) or 0
            for follower in followers:
                follower.set_step(step)

    # First in line, so that the attention's own hook already sees the step.
    return module.register_forward_pre_hook(before_forward, prepend=True)


def _undo(pipe: Any, state: AccelerationState) -> None:
    for compiled in state.compiled.values():
        compiled.remove()
    for name, quantized in state.quantized.items():
        if name not in state.borrowed:
            quantized.remove()
    for hook in state.hooks:
        hook.remove()
    for installed in state.installed.values():
        installed.remove()
    if pipe.scheduler is not state.original_scheduler:
        pipe.scheduler = state.original_scheduler
    if state.memory is not None:
        state.memory.remove()  # last, as it may miss files
