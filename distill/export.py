"""The finished student as a diffusers folder with its recipe and defaults."""

from __future__ import annotations

import shutil
import uuid
from pathlib import Path
from typing import Any

import torch

from ..attention.processors import InstalledAttention
from ..pipelines.acceleration import accelerate
from ..pipelines.loading import save
from ..pipelines.recipe import Recipe, SamplerConfig
from .config import DistillConfig
from .denoiser import Denoiser
from .method import Method
from .trainable import merge_adapters


def student_recipe(config: DistillConfig, method: Method, boundary_ratio: float | None) -> Recipe:
    """How the finished student is to be run."""
    sampler = SamplerConfig()
    if config.model.sigmas is not None:
        uses_dmd = "critic" in method.trained_roles
        sampler = SamplerConfig(
            sigmas=config.model.sigmas,
            guidance_scale=1.0,
            guidance_scale_2=None if boundary_ratio is None else 1.0,
            stochastic=uses_dmd and config.dmd.stochastic,
            boundary_ratio=boundary_ratio,
        )
    return Recipe(
        config.name,
        attention=config.attention,
        sampler=sampler,
        requires=method.provides[0],
        description=config.description,
    )


def export_student(
    config: DistillConfig,
    method: Method,
    pipe: Any,
    student: Denoiser,
    attention: dict[str, InstalledAttention],
    folder: Path,
    provides: tuple[str, ...] = (),
    *,
    device: torch.device | None = None,
) -> Path:
    """Writes the student as a diffusers folder with its recipe and defaults; complete or not at all.

    Adapters are merged; the student is stock afterwards, on the CPU, and cannot be trained on. `device` is where it was
    trained, and so a device that its attention backend runs on.
    """
    merge_adapters(student)
    branches = {name: installed.branch_state() for name, installed in attention.items()}
    for installed in attention.values():
        installed.remove()
    dtype = getattr(torch, config.model.export_dtype)
    for name, expert in student.experts.items():
        expert.requires_grad_(False).eval()
        setattr(pipe, name, expert.to("cpu", dtype))
    grid = () if config.quantization.mode == "none" else (config.quantization.mode,)
    gives = tuple(dict.fromkeys((*provides, *method.provides, *grid)))
    defaults = dict(pipe.videospark_defaults) | {"provides": list(gives)}
    if config.model.sigmas is not None:
        defaults |= {"num_inference_steps": len(config.model.sigmas), "guidance_scale": 1.0}
    pipe.videospark_defaults = defaults
    partial = folder.with_name(f".{uuid.uuid4().hex}.partial")
    try:
        recipe = student_recipe(config, method, pipe.config.boundary_ratio)
        accelerate(pipe, recipe, branch_state=branches if any(branches.values()) else None, device=device)
        save(pipe, partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder
