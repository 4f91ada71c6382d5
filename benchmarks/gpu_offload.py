"""Offloading for real: the same latents in every mode, peak memory beside the plan, and how much copying is hidden.

Two experts with random weights of a published shape, in eight bits with sparse attention and a branch: what students
of Wan 2.2 are. Every mode of `pipelines.offload` runs the same clip twice; the second one counts.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from ..core.numerics import relative_error
from ..pipelines.acceleration import accelerate
from ..pipelines.offload import place
from ..pipelines.plan_memory import GIB, Settings, stages
from ..pipelines.plan_models import runs_sparse
from ..pipelines.recipe import Recipe, preset
from .gpu_end_to_end import EndToEnd, clean, measured_memory, run_clip

MODES = ("none", "experts", "model", "group")
LIMIT = 0.01
"""Largest relative difference of latents from those of mode "none": weights that come too late make others."""


@dataclasses.dataclass(frozen=True)
class OffloadRow:
    """One mode.

    Attributes:
        mode: of `pipelines.offload`.
        steps: seconds of each; the change of experts is in them.
        decode: seconds.
        difference: relative, of the latents from those of "none".
        measured_gib, planned_gib: peak by stage; measured is empty where there is no GPU.
        early, late: of mode "experts", the groups that came beside computing, and those that were waited for.
        error: why it did not run.
    """

    mode: str
    steps: tuple[float, ...] = ()
    decode: float = float("nan")
    difference: float = float("nan")
    measured_gib: dict[str, float] = dataclasses.field(default_factory=dict)
    planned_gib: dict[str, float] = dataclasses.field(default_factory=dict)
    early: int = 0
    late: int = 0
    error: str = ""

    @property
    def ok(self) -> bool:
        """Whether it ran and made the same latents."""
        return not self.error and self.difference <= LIMIT


def bench_offloads(what: EndToEnd, device: str, dtype: torch.dtype, modes: Sequence[str] = MODES) -> list[OffloadRow]:
    """Run every mode, "none" first; one that breaks is a row that says why."""
    recipe = dataclasses.replace(what.recipes[-1], name="two experts", sampler=preset("spark22-4step").sampler)
    rows: list[OffloadRow] = []
    reference: torch.Tensor | None = None
    for mode in modes:
        try:
            row, latents = _run(what, recipe, mode, device, dtype, reference)
            reference = latents if reference is None else reference
        except Exception as error:  # the other modes are worth as much without this one
            row = OffloadRow(mode, error=f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")
        rows.append(row)
        clean(device)
    return rows


def _run(
    what: EndToEnd, recipe: Recipe, mode: str, device: str, dtype: torch.dtype, reference: torch.Tensor | None
) -> tuple[OffloadRow, torch.Tensor]:
    pipe = build_pair(what, dtype, recipe.sampler.boundary_ratio or 0.5)
    accelerate(pipe, recipe, allow_untrained=True, device=device)
    placed = place(pipe, mode, device)
    steps = recipe.sampler.steps
    assert steps is not None
    run_clip(what, pipe, recipe, steps, device, dtype)
    timer, latents = run_clip(what, pipe, recipe, steps, device, dtype)
    latents = latents.float().cpu()
    swap = placed.swap
    row = OffloadRow(
        mode, tuple(timer.steps), timer.stages["decode"],
        0.0 if reference is None else relative_error(latents, reference), measured_memory(timer),
        planned_memory(what, recipe, mode), 0 if swap is None else swap.early, 0 if swap is None else swap.late,
    )  # fmt: skip
    return row, latents


def build_pair(what: EndToEnd, dtype: torch.dtype, boundary: float) -> Any:
    """A pipeline of two experts of this shape in RAM, with different random weights."""
    from diffusers import WanPipeline

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)  # every mode gets the same weights
        first, second = what.build("cpu", dtype), what.build("cpu", dtype).transformer
        second.proj_out.weight.mul_(-0.5)  # some builds are seeded: the second would be the first
    pipe = WanPipeline(
        tokenizer=None, text_encoder=None, vae=first.vae, scheduler=first.scheduler, transformer=first.transformer,
        transformer_2=second, boundary_ratio=boundary, expand_timesteps=False,
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    return pipe


def planned_memory(what: EndToEnd, recipe: Recipe, mode: str) -> dict[str, float]:
    """Peak by stage as the planner has it, in GiB, without a text encoder."""
    shape, clip = dataclasses.replace(what.shape, experts=2), what.clip
    settings = Settings(
        offload=mode if mode in ("model", "group") else "none",  # type: ignore[arg-type]
        text_encoder="freed",
        swap_experts=mode == "experts",
    )
    sparse = runs_sparse(recipe.attention, shape.tokens(clip.height, clip.width, clip.frames), shape.head_dim)
    made = stages(shape, clip, recipe.quantization, recipe.attention, settings, sparse)
    return {stage.name: stage.gpu_peak / GIB for stage in made if stage.name in ("denoise", "decode")}


def markdown(rows: Sequence[OffloadRow], title: str) -> str:
    """Seconds and differences, then memory beside the plan."""
    lines = [
        f"### {title}", "",
        "| mode | median step s | longest step s | decode s | latents differ by | experts: early / late |",
        "|---" * 6 + "|",
    ]  # fmt: skip
    for row in rows:
        if row.error:
            lines.append(f"| {row.mode} | **broke**: {row.error.replace('|', '/')} | | | | |")
            continue
        wrong = "" if row.ok else " **WRONG**"
        swapped = f"{row.early} / {row.late}" if row.mode == "experts" else ""
        lines.append(
            f"| {row.mode} | {statistics.median(row.steps):.3f} | {max(row.steps):.3f} | {row.decode:.2f} "
            f"| {row.difference:.1e}{wrong} | {swapped} |"
        )
    lines += ["", "| mode | stage | measured GiB | planned | plan is off by |", "|---" * 5 + "|"]
    for row in rows:
        for name, planned in row.planned_gib.items():
            measured = row.measured_gib.get(name)
            cells = ("no GPU", "") if measured is None else (f"{measured:.2f}", f"{planned / measured - 1:+.0%}")
            lines.append(f"| {row.mode} | {name} | {cells[0]} | {planned:.2f} | {cells[1]} |")
    return "\n".join(lines) + "\n"
