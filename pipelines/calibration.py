"""Calibrate sparse attention on a pipeline's own sampling: measure, choose a budget, set the branch, write it down."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors

from ..attention.auto import ALWAYS_DENSE, LENGTHS, Crossover, measure_crossover
from ..attention.backends import AUTO
from ..attention.calibration import CalibratedBranch, calibrate_branch
from ..attention.calibration_grid import DENSE, Budget, GridRow, measure_grid, propose_budget, with_budget
from ..attention.config import AttentionConfig
from ..core.config import require, save_file
from .acceleration import EXPERTS, build_scheduler, state_of
from .generation import GenerationRequest, resolve_request
from .loading import BRANCH_FILE
from .recipe import Recipe
from .scheduling_few_step import FewStepScheduler
from .video_io import write_atomically

RECIPE_FILE = "recipe.toml"
TABLE_FILE = "calibration.md"
PLOT_FILE = "calibration.png"
KEEP_RATIOS = (0.05, 0.1, 0.2, 0.3, 0.5, 0.7)


@dataclass(frozen=True)
class RecordedForward:
    """One call of a denoiser while a clip was sampled: its step, and its arguments on the CPU."""

    step: int
    arguments: Mapping[str, Any]

    def replay(self, module: Any) -> Callable[[], object]:
        """A function that makes the call again."""
        device = next(module.parameters()).device

        def run() -> object:
            moved = {name: x.to(device) if torch.is_tensor(x) else x for name, x in self.arguments.items()}
            return module(**moved)

        return run


@dataclass(frozen=True)
class Calibration:
    """Everything that was measured and set.

    Attributes:
        recipe: with the proposed keep ratios; `accelerate` takes it.
        budget: where the keep ratios come from.
        grid: by denoiser, the measured rows.
        branches: by denoiser, the calibrated branch; empty where the recipe has none.
        crossover: times by number of tokens, with backend "auto" alone; the recipe then holds what was found.
    """

    recipe: Recipe
    budget: Budget
    grid: dict[str, list[GridRow]]
    branches: dict[str, CalibratedBranch]
    crossover: Crossover | None = None

    @property
    def branch_state(self) -> dict[str, dict[str, torch.Tensor]] | None:
        """What `accelerate(..., branch_state=...)` takes; None without a branch."""
        return {name: branch.state for name, branch in self.branches.items()} or None


def calibrate(
    pipe: Any,
    recipe: Recipe,
    prompts: Sequence[str],
    *,
    keep_ratios: Sequence[float] = KEEP_RATIOS,
    error_bound: float = 0.1,
    measured_steps: int = 3,
    seed: int = 0,
    request: GenerationRequest | None = None,
    crossover_lengths: Sequence[int] = LENGTHS,
    on_stage: Callable[[str], None] = lambda text: None,
) -> Calibration:
    """Measure a stock pipeline and propose settings for its sparse attention.

    Each prompt is sampled once with dense attention, in the precision the pipeline is in; low precision of the recipe
    is not applied. The bound is on the sparse softmax alone: a branch comes on top.

    Args:
        pipe: a stock Wan pipeline.
        recipe: of a sparse backend; its block sizes, token order, branch, sampler and dense layers are kept.
        prompts: what to sample.
        keep_ratios: the grid.
        error_bound: largest relative error of the attention output of a layer, at every measured step.
        measured_steps: how many steps of a clip are looked at, evenly spaced; those in `dense_steps` are passed over.
        seed: of the noise of the first prompt; the others count up.
        request: sizes, steps and guidance; what it leaves out is resolved as for any clip.
        crossover_lengths: numbers of tokens at which dense and sparse attention are timed, with backend "auto" alone.
        on_stage: told what begins.

    Raises:
        ConfigError: an accelerated pipeline, a recipe without a sparse backend, no prompts, or settings out of range.
    """
    require(state_of(pipe) is None, "pipeline", "an accelerated one", "restored first: call restore(pipe)")
    require(len(prompts) > 0, "prompts", 0, "at least one")
    require(measured_steps >= 1, "measured_steps", measured_steps, "at least 1")
    require(error_bound > 0, "error_bound", error_bound, "above 0")
    config = recipe.attention
    require(config.backend != "dense", "backend", config.backend, "a sparse one, to be calibrated")
    on_stage(f"sampling {len(prompts)} clips with dense attention")
    recorded = record_forwards(pipe, recipe, prompts, measured_steps, seed, request)
    grid: dict[str, list[GridRow]] = {}
    for name, calls in recorded.items():
        on_stage(f"measuring {len(keep_ratios)} keep ratios of {name} on {len(calls)} forward passes")
        module = getattr(pipe, name)
        grid[name] = measure_grid(module, config, [(call.step, call.replay(module)) for call in calls], keep_ratios)
    rows = [row for own in grid.values() for row in own]
    budget = propose_budget(rows, error_bound, dense_layers=config.dense_layers)
    proposed = with_budget(config, budget)
    crossover = None
    if config.backend == AUTO:
        on_stage("measuring from how many tokens on sparse attention is faster")
        crossover = _crossover(getattr(pipe, next(iter(recorded))), proposed, crossover_lengths)
        below = ALWAYS_DENSE if crossover.tokens is None else crossover.tokens
        proposed = dataclasses.replace(proposed, dense_below=below)
    branches = {}
    for name, calls in recorded.items() if config.branch != "none" else ():
        on_stage(f"setting branch {config.branch!r} of {name}")
        module = getattr(pipe, name)
        branches[name] = calibrate_branch(module, proposed, [call.replay(module) for call in calls])
    described = f"{recipe.name} with keep ratios by layer, each layer's attention off by at most {error_bound:g}."
    tuned = dataclasses.replace(recipe, name=f"{recipe.name}-calibrated", attention=proposed, description=described)
    return Calibration(tuned, budget, grid, branches, crossover)


def _crossover(module: Any, config: AttentionConfig, lengths: Sequence[int]) -> Crossover:
    weight, heads = module.blocks[0].attn1.norm_q.weight, module.blocks[0].attn1.heads
    head_dim = int(module.config.attention_head_dim)
    return measure_crossover(
        config, heads=heads, head_dim=head_dim, dtype=weight.dtype, device=weight.device, lengths=lengths
    )


@torch.no_grad()
def record_forwards(
    pipe: Any, recipe: Recipe, prompts: Sequence[str], measured_steps: int, seed: int, request: GenerationRequest | None
) -> dict[str, list[RecordedForward]]:
    """Sample the prompts with dense attention and keep the first call of each denoiser at some steps, by denoiser."""
    wish = request or GenerationRequest(prompts[0])
    resolved = [
        resolve_request(pipe, dataclasses.replace(wish, prompt=prompt, seed=seed + index), recipe)
        for index, prompt in enumerate(prompts)
    ]
    steps = resolved[0].num_inference_steps
    assert steps is not None
    open_steps = [step for step in range(steps) if step not in recipe.attention.dense_steps]
    require(bool(open_steps), "dense_steps", recipe.attention.dense_steps, f"fewer than all {steps} steps")
    count = min(measured_steps, len(open_steps))
    wanted = {open_steps[round(i * (len(open_steps) - 1) / max(1, count - 1))] for i in range(count)}
    experts = {name: module for name in EXPERTS if (module := getattr(pipe, name, None)) is not None}
    recorded: dict[str, list[RecordedForward]] = {name: [] for name in experts}
    seen: set[int] = set()

    def hook(name: str) -> Callable[..., None]:
        def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            step = getattr(pipe.scheduler, "step_index", None) or 0
            if step in wanted and step not in seen:
                seen.add(step)
                given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
                copies = {n: x.detach().cpu().clone() if torch.is_tensor(x) else x for n, x in given.items()}
                recorded[name].append(RecordedForward(step, copies))

        return keep

    original = pipe.scheduler
    handles = [module.register_forward_pre_hook(hook(name), with_kwargs=True) for name, module in experts.items()]
    pipe.scheduler = build_scheduler(original, recipe)
    length = (getattr(pipe, "videospark_defaults", None) or {}).get("max_sequence_length", 512)
    try:
        for one in resolved:
            seen.clear()
            assert one.seed is not None
            generator = torch.Generator("cpu").manual_seed(one.seed)
            few_step = isinstance(pipe.scheduler, FewStepScheduler)
            if few_step:
                pipe.scheduler.set_generator(generator)
            pipe(
                prompt=one.prompt, negative_prompt=one.negative_prompt, height=one.height, width=one.width,
                num_frames=one.num_frames, num_inference_steps=steps, guidance_scale=one.guidance_scale,
                generator=generator, output_type="latent", max_sequence_length=length,
            )  # fmt: skip
    finally:
        pipe.scheduler = original
        for handle in handles:
            handle.remove()
    return {name: calls for name, calls in recorded.items() if calls}


def write_calibration(result: Calibration, folder: str | Path) -> dict[str, Path]:
    """Write recipe, table, plot and the tensors of the branches; returns their paths by what they are.

    Raises:
        ImportError: matplotlib is missing.
    """
    from .calibration_report import markdown, plot

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = {"recipe": folder / RECIPE_FILE, "table": folder / TABLE_FILE, "plot": folder / PLOT_FILE}
    for name, branch in result.branches.items():
        whole = {key: tensor.contiguous() for key, tensor in branch.state.items()}
        paths[f"branch of {name}"] = file = folder / name / BRANCH_FILE
        file.parent.mkdir(exist_ok=True)
        write_atomically(file, lambda part, whole=whole: save_tensors(whole, part))  # type: ignore[misc]
    plot(result, paths["plot"])
    write_atomically(paths["table"], lambda part: part.write_text(markdown(result), encoding="utf-8"))
    save_file(result.recipe, paths["recipe"])
    return paths


def read_branch_state(folder: str | Path) -> dict[str, dict[str, torch.Tensor]] | None:
    """The tensors that `write_calibration` left in `folder`, as `accelerate` takes them; None where there are none."""
    files = {name: Path(folder) / name / BRANCH_FILE for name in EXPERTS}
    return {name: load_tensors(file) for name, file in files.items() if file.is_file()} or None


__all__ = [
    "DENSE", "KEEP_RATIOS", "Calibration", "RecordedForward", "calibrate", "read_branch_state", "record_forwards",
    "write_calibration",
]  # fmt: skip
