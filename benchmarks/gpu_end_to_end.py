"""A whole clip on random weights of a published shape: seconds by step, cold and warm, and peak memory beside the plan.

Weights are random because none need be here: seconds and bytes do not depend on them, pictures do, and none are kept.
The prompt is a random embedding; the text encoder is not part of this.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..attention.config import AttentionConfig
from ..core.config import ConfigError
from ..pipelines.acceleration import accelerate
from ..pipelines.plan_memory import GIB, Clip, Settings, stages
from ..pipelines.plan_models import MODELS, TEXT_TOKENS, ModelShape, runs_sparse
from ..pipelines.recipe import Recipe, SamplerConfig, preset
from ..pipelines.stages import StageTimer
from ..quantization.config import QuantizationConfig


@dataclasses.dataclass(frozen=True)
class EndToEnd:
    """What is run.

    Attributes:
        name: of the model.
        build: makes the pipeline, without text encoder, on a device.
        shape: for the plan.
        clip: size.
        recipes: the first one is what the others are compared with.
        text_tokens: of the random prompt.
        probe_steps: steps that are run of a recipe that leaves their number to the model.
    """

    name: str
    build: Callable[[str, torch.dtype], Any]
    shape: ModelShape
    clip: Clip
    recipes: tuple[Recipe, ...]
    text_tokens: int = TEXT_TOKENS
    probe_steps: int = 3


@dataclasses.dataclass(frozen=True)
class Row:
    """One recipe.

    Attributes:
        recipe: its name.
        steps: of a whole clip.
        run_steps: that were run.
        cold_step: seconds of the very first step, compilation and tuning included.
        warm_step: median of the later run.
        denoise: seconds of all steps, by `warm_step`; an extrapolation where fewer were run.
        decode: seconds.
        over_first: seconds of the first recipe's clip over this one's, denoising and decoding.
        denoise_only: the same of denoising alone.
        measured_gib, planned_gib: peak by stage; measured is empty where there is no GPU.
        engine: what ran.
        error: why it did not; the seconds are then NaN.
    """

    recipe: str
    steps: int
    run_steps: int
    cold_step: float
    warm_step: float
    denoise: float
    decode: float
    over_first: float
    denoise_only: float
    measured_gib: dict[str, float]
    planned_gib: dict[str, float]
    engine: str
    error: str = ""


def build_random(shape: ModelShape, device: str, dtype: torch.dtype) -> Any:
    """A pipeline of this shape with random weights, made on the device: transformer in `dtype`, VAE in float32."""
    from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel

    from ..tiny.components import build_scheduler
    from .block import cast_weights

    if shape.experts != 1 or shape.image_to_video or shape.vae != "wan2.1":
        raise ConfigError(f"model: got {shape.name!r}; must be a text-to-video one with one expert of Wan 2.1")
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # never whole in 32 bits
    try:
        with torch.device(device):
            transformer = WanTransformer3DModel(**shape.config()).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    kept = set(transformer._keep_in_fp32_modules or ())
    for name, parameter in transformer.named_parameters():
        if kept.intersection(name.split(".")):
            parameter.data = parameter.data.float()
    transformer = cast_weights(transformer, dtype)
    with torch.device(device):
        vae = AutoencoderKLWan().eval().requires_grad_(False)
    return WanPipeline(
        tokenizer=None, text_encoder=None, vae=vae, scheduler=build_scheduler(), transformer=transformer
    )  # fmt: skip


def recipes(blocks: tuple[int, int], mode: str) -> tuple[Recipe, ...]:
    """Dense with guidance, then what a student runs: three steps, sparse at 95 %, with RoLA, and in eight bits."""
    sampler = preset("spark-3step").sampler
    sparse = AttentionConfig(
        backend="auto", keep_ratio=0.05, token_order="raster", block_size_q=blocks[0], block_size_k=blocks[1],
        dense_below=0,
    )  # fmt: skip
    branch = dataclasses.replace(sparse, branch="rola")
    eight = QuantizationConfig(mode=mode, fused=True, originals="drop")  # type: ignore[arg-type]
    return (
        Recipe("dense, guidance", sampler=SamplerConfig(guidance_scale=5.0)),
        Recipe("dense, 3 steps", sampler=sampler),
        Recipe("sparse 95 %, 3 steps", sparse, sampler),
        Recipe("sparse 95 % + RoLA, 3 steps", branch, sampler),
        Recipe("sparse 95 % + RoLA, 3 steps, compiled", branch, sampler, compile="default"),
        Recipe("sparse 95 % + RoLA, 3 steps, CUDA graphs", branch, sampler, compile="reduce-overhead"),
        Recipe(f"sparse 95 % + RoLA, 3 steps, {mode} fused", branch, sampler, eight),
    )


def wan_1_3b(mode: str) -> EndToEnd:
    """The 1.3B model at 480p, which fits any card of 16 GB."""
    shape = MODELS["wan2.1-t2v-1.3b"]
    return EndToEnd(
        shape.name, lambda device, dtype: build_random(shape, device, dtype), shape, Clip(832, 480, 81),
        recipes((128, 64), mode),
    )  # fmt: skip


def bench_end_to_end(what: EndToEnd, device: str, dtype: torch.dtype) -> list[Row]:
    """Run every recipe: a cold clip, then a warm one, then decode. One that breaks is a row that says why."""
    rows: list[Row] = []
    for recipe in what.recipes:
        # Anew for every recipe: one that drops its originals cannot be undone.
        pipe = what.build(device, dtype)
        pipe.set_progress_bar_config(disable=True)
        first = next((row for row in rows if not row.error), None)
        try:
            rows.append(_run(what, pipe, recipe, device, dtype, first))
        except Exception as error:  # the other recipes are worth as much without this one
            rows.append(_broken(what, recipe, error))
        del pipe
        clean(device)
    return rows


def clean(device: str) -> None:
    """Give back what the pipeline before held."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def _broken(what: EndToEnd, recipe: Recipe, error: Exception) -> Row:
    nan = float("nan")
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
    steps = recipe.sampler.steps or what.shape.steps
    return Row(recipe.name, steps, 0, nan, nan, nan, nan, nan, nan, {}, planned_memory(what, recipe), "", text)


def _run(what: EndToEnd, pipe: Any, recipe: Recipe, device: str, dtype: torch.dtype, first: Row | None) -> Row:
    report = accelerate(pipe, recipe, allow_untrained=True)
    fixed = recipe.sampler.steps
    run_steps, steps = fixed or what.probe_steps, fixed or what.shape.steps
    cold, _ = run_clip(what, pipe, recipe, run_steps, device, dtype)
    warm, _ = run_clip(what, pipe, recipe, run_steps, device, dtype)
    step = statistics.median(warm.steps)
    denoise, decode = step * steps, warm.stages["decode"]
    whole = first.denoise + first.decode if first is not None else denoise + decode
    alone = first.denoise if first is not None else denoise
    return Row(
        recipe.name, steps, run_steps, cold.steps[0], step, denoise, decode, whole / (denoise + decode),
        alone / denoise, measured_memory(warm), planned_memory(what, recipe), _engine(report),
    )  # fmt: skip


def run_clip(
    what: EndToEnd, pipe: Any, recipe: Recipe, steps: int, device: str, dtype: torch.dtype
) -> tuple[StageTimer, torch.Tensor]:
    """One clip of a random prompt: its timer and its latents. NaN or infinity in them is a FloatingPointError."""
    from ..pipelines.generation import decode

    generator = torch.Generator().manual_seed(0)
    width = pipe.transformer.config.text_dim
    embeds = [torch.randn(1, what.text_tokens, width, generator=generator).to(device, dtype) for _ in range(2)]
    timer = StageTimer(torch.device(device))

    def after(_: Any, __: int, ___: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        timer.step_done()
        if not torch.isfinite(tensors["latents"]).all():
            raise FloatingPointError(f"latents: NaN or infinite with recipe {recipe.name!r}")
        timer.restart_step()
        return {}

    clip = what.clip
    with torch.no_grad():
        with timer.stage("denoise"):
            timer.start_steps()
            latents = pipe(
                prompt_embeds=embeds[0], negative_prompt_embeds=embeds[1], height=clip.height, width=clip.width,
                num_frames=clip.frames, num_inference_steps=steps, generator=generator, output_type="latent",
                guidance_scale=recipe.sampler.guidance_scale or 1.0, return_dict=False, callback_on_step_end=after,
            )[0]  # fmt: skip
        with timer.stage("decode"):
            decode(pipe, latents)
    return timer, latents


def measured_memory(timer: StageTimer) -> dict[str, float]:
    """Peak by stage on the GPU in GiB; empty where there is none."""
    return {
        name: values["cuda_peak_bytes"] / GIB for name, values in timer.memory.items() if "cuda_peak_bytes" in values
    }


def planned_memory(what: EndToEnd, recipe: Recipe) -> dict[str, float]:
    """Peak by stage as the planner has it, in GiB, with the text encoder gone."""
    tokens = what.shape.tokens(what.clip.height, what.clip.width, what.clip.frames)
    sparse = runs_sparse(recipe.attention, tokens, what.shape.head_dim)
    made = stages(
        what.shape, what.clip, recipe.quantization, recipe.attention, Settings(text_encoder="freed"), sparse
    )  # fmt: skip
    return {stage.name: stage.gpu_peak / GIB for stage in made if stage.name in ("denoise", "decode")}


def _engine(report: Any) -> str:
    parts = sorted({f"attention {row['backend']}" for row in report.layers})
    parts += sorted({f"branch {row['branch_kernel']}" for row in report.layers if row.get("branch_kernel")})
    parts += sorted({f"products {part['engine']}, fused: {part['fused']}" for part in report.quantization.values()})
    return "; ".join(parts)


def markdown(rows: Sequence[Row], title: str) -> str:
    """Seconds, then memory beside the plan."""
    lines = [
        f"### {title}", "",
        "| recipe | steps | cold step s | warm step s | denoise s | decode s | clip over first | denoise over first |",
        "|---" * 8 + "|",
    ]  # fmt: skip
    for row in rows:
        if row.error:
            lines.append(f"| {row.recipe} | **broke**: {row.error.replace('|', '/')} | | | | | | |")
            continue
        guess = "" if row.steps == row.run_steps else f" (from {row.run_steps} steps)"
        lines.append(
            f"| {row.recipe} | {row.steps} | {row.cold_step:.3f} | {row.warm_step:.3f} | {row.denoise:.2f}{guess} "
            f"| {row.decode:.2f} | {row.over_first:.1f}x | {row.denoise_only:.1f}x |"
        )
    lines += ["", "| peak GiB | stage | measured | planned | plan is off by |", "|---" * 5 + "|"]
    for row in (row for row in rows if not row.error):
        for name, planned in row.planned_gib.items():
            measured = row.measured_gib.get(name)
            cells = ("no GPU", "") if measured is None else (f"{measured:.2f}", f"{planned / measured - 1:+.0%}")
            lines.append(f"| {row.recipe} | {name} | {cells[0]} | {planned:.2f} | {cells[1]} |")
    lines += [""] + [f"{row.recipe}: {row.engine}  " for row in rows if row.engine]
    return "\n".join(lines) + "\n"
