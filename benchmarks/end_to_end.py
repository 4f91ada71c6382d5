"""A whole clip against stock diffusers: how many times as fast, and which factor comes from what.

    ratio_total = ratio_steps x ratio_guidance x ratio_forward

The dense clip takes 50 steps with guidance, two forward passes each; the accelerated one 3 steps without. One block and
the rest of a forward pass are timed for both in turns, in one run (`bench_block`), with random weights at the real
number of tokens; a forward pass is the layers times the block, and the rest. `full` really runs the 3 steps of all
layers beside that. The text encoder and the VAE are no part of this: both clips need them alike.
"""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch

from ..attention.processors import install
from ..core.config import require
from ..quantization.config import QuantizationConfig
from ..quantization.convert import quantize_
from .block import (
    GRIDS,
    PARTS,
    STOCK,
    BlockBenchmark,
    Row,
    attention_settings,
    bench_block,
    one_block,
    random_inputs,
    shrunk,
)

LAYERS = {"wan2.1-1.3b-480p": 30, "wan2.1-14b-720p": 40, "tiny": 6}
DENSE_STEPS, DENSE_PASSES = 50, 2
SIGMAS = (1.0, 0.9375, 0.75)
"""Noise levels of the accelerated clip; seconds depend on their number alone."""


@dataclasses.dataclass(frozen=True)
class EndToEnd:
    """What `bench_end_to_end` measured.

    Attributes:
        shape: name of the shape.
        tokens: of the video.
        layers: of the transformer.
        keep_ratio: of the sparse attention.
        branch: linear branch of the accelerated clip.
        ratio_total: dense over accelerated seconds of a whole denoising.
        ratio_steps: from fewer steps.
        ratio_guidance: from one forward pass per step instead of two.
        ratio_forward: from a faster forward pass.
        ratio_attention: of `ratio_forward` what sparse attention with its branch brings, alone.
        ratio_linear: what eight-bit products then bring.
        ratio_fusion: what fused parts then bring; the three multiply to the ratio of a block.
        seconds_dense_forward: stock diffusers.
        seconds_accelerated_forward: accelerated.
        seconds_dense_clip: all forward passes of the dense clip, by multiplication.
        seconds_accelerated_clip: those of the accelerated clip.
        full: seconds that the real denoising took, over those by multiplication; None where it was not run.
        block: the rows behind all this, part by part.
    """

    shape: str
    tokens: int
    layers: int
    keep_ratio: float
    branch: str
    ratio_total: float
    ratio_steps: float
    ratio_guidance: float
    ratio_forward: float
    ratio_attention: float
    ratio_linear: float
    ratio_fusion: float
    seconds_dense_forward: float
    seconds_accelerated_forward: float
    seconds_dense_clip: float
    seconds_accelerated_clip: float
    full: dict[str, float] | None
    block: BlockBenchmark

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with seconds and share of the GEMM peak of each part of a block under "parts"."""
        data = dataclasses.asdict(self)
        rows = {STOCK: self.block.rows[0], "accelerated": self.block.rows[-1]}
        data["parts"] = {
            part: {
                name: {"seconds": row.parts[part], "gemm_peak_share": row.part_shares.get(part)}
                for name, row in rows.items()
            }
            for part in PARTS
        }
        data["parts"]["outside of the blocks"] = {
            name: {"seconds": row.rest_seconds, "gemm_peak_share": None} for name, row in rows.items()
        }
        return data

    def markdown(self) -> str:
        """The ratio with its factors, then the blocks behind it."""
        lines = [
            f"## A clip of {self.shape}: {self.ratio_total:.1f} times as fast",
            "",
            f"{self.tokens} tokens, {self.layers} layers, keep {self.keep_ratio:g}, branch {self.branch}; "
            f"{self.block.dtype}, random weights. Text encoder and VAE are not part of it.",
            "",
            "| factor | ratio |",
            "|---|---|",
            f"| steps: {DENSE_STEPS} to {len(SIGMAS)} | {self.ratio_steps:.2f} |",
            f"| guidance: {DENSE_PASSES} passes a step to 1 | {self.ratio_guidance:.2f} |",
            f"| forward pass | {self.ratio_forward:.2f} |",
            f"| in a block: attention | {self.ratio_attention:.2f} |",
            f"| in a block: eight-bit products | {self.ratio_linear:.2f} |",
            f"| in a block: fusion | {self.ratio_fusion:.2f} |",
            f"| **clip** | **{self.ratio_total:.1f}** |",
            "",
            f"Forward pass: {self.seconds_dense_forward:.2f} s dense, {self.seconds_accelerated_forward:.3f} s "
            f"accelerated. Clip: {self.seconds_dense_clip:.0f} s dense, {self.seconds_accelerated_clip:.2f} s "
            "accelerated (forward passes multiplied).",
        ]
        if self.full is not None:
            lines += [
                "",
                f"Really run, all layers and steps: {self.full['seconds']:.2f} s, "
                f"{self.full['over_extrapolation']:.3f} times the extrapolation; with it the clip is "
                f"{self.full['ratio_total']:.1f} times as fast.",
            ]
        return "\n".join(lines) + "\n\n" + self.block.markdown()


def bench_end_to_end(
    shape: str = "wan2.1-1.3b-480p",
    *,
    full: bool = False,
    branch: str = "rola",
    keep_ratio: float = 0.03,
    block_sizes: tuple[int, int] = (128, 64),
    tokens: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    repeats: int = 1,
    say: Callable[[str], None] = lambda text: None,
) -> EndToEnd:
    """Measure both forward passes in turns, and multiply.

    Args:
        shape: a name of `LAYERS`.
        full: also run the accelerated denoising of all layers.
        branch: "rola" or "none".
        keep_ratio: share of the key blocks.
        block_sizes: tokens of a query and of a key block.
        tokens: about so many tokens instead of the shape's own.
        device: where.
        dtype: of the model.
        repeats: rounds after one to warm up; the median counts.
        say: is told what begins.

    Raises:
        ConfigError: an unknown shape or branch, or settings that do not run on the device.
    """
    require(shape in LAYERS, "shape", shape, f"one of {', '.join(LAYERS)}")
    require(branch in ("rola", "none"), "branch", branch, "'rola' or 'none'")
    tail = "" if branch == "none" else f"+{branch}"
    ladder = [f"sparse{tail}", f"int8+sparse{tail}", f"int8+fused+sparse{tail}"]
    say(f"one block of {shape}: {STOCK}, {', '.join(ladder)}")
    block = bench_block(
        shape, contenders=ladder, tokens=tokens, keep_ratio=keep_ratio, block_sizes=block_sizes, device=device,
        dtype=dtype, repeats=repeats,
    )  # fmt: skip
    layers = LAYERS[shape]
    dense, accelerated = (_forward(row, layers) for row in (block.rows[0], block.rows[-1]))
    clip = len(SIGMAS) * accelerated
    really = None
    if full:
        say(f"{len(SIGMAS)} steps of all {layers} layers")
        seconds = _denoise(shape, layers, branch, keep_ratio, block_sizes, tokens, device, dtype)
        really = {
            "seconds": seconds,
            "over_extrapolation": seconds / clip,
            "ratio_total": DENSE_STEPS * DENSE_PASSES * dense / seconds,
        }
    steps, guidance, forward = DENSE_STEPS / len(SIGMAS), float(DENSE_PASSES), dense / accelerated
    by_name = {row.contender: row.seconds for row in block.rows}
    rungs = [by_name[name] for name in (STOCK, *ladder)]
    return EndToEnd(
        shape, block.tokens, layers, keep_ratio, branch, steps * guidance * forward, steps, guidance, forward,
        rungs[0] / rungs[1], rungs[1] / rungs[2], rungs[2] / rungs[3], dense, accelerated,
        DENSE_STEPS * DENSE_PASSES * dense, clip, really, block,
    )  # fmt: skip


def _forward(row: Row, layers: int) -> float:
    return layers * row.seconds + row.rest_seconds


@torch.no_grad()
def _denoise(
    shape: str,
    layers: int,
    branch: str,
    keep_ratio: float,
    block_sizes: tuple[int, int],
    tokens: int | None,
    device: str,
    dtype: torch.dtype,
) -> float:
    """Seconds of the accelerated denoising loop; every layer has weights of its own, equal to those of the first."""
    from ..pipelines.scheduling_few_step import FewStepScheduler

    transformer = one_block(shape, device, dtype)
    transformer.blocks.extend(copy.deepcopy(transformer.blocks[0]) for _ in range(layers - 1))
    transformer.register_to_config(num_layers=layers)
    attention = install(transformer, attention_settings(keep_ratio, block_sizes, branch))
    quantize_(transformer, QuantizationConfig(mode="int8", fused=True, originals="drop"))
    grid = GRIDS[shape] if tokens is None else shrunk(GRIDS[shape], tokens)
    inputs = random_inputs(shape, grid, device, dtype)
    latents = inputs.pop("hidden_states")
    scheduler = FewStepScheduler(sigmas=SIGMAS)
    scheduler.set_timesteps(len(SIGMAS), device=device)
    _wait(device)
    start = time.perf_counter()
    for step, moment in enumerate(scheduler.timesteps):
        attention.set_step(step)
        inputs["timestep"] = moment.expand(latents.shape[0])
        velocity = transformer(latents, **inputs, return_dict=False)[0]
        latents = scheduler.step(velocity, moment, latents, return_dict=False)[0]
    _wait(device)
    seconds = time.perf_counter() - start
    if not torch.isfinite(latents).all():
        raise FloatingPointError("the accelerated denoising gave NaN or infinity")
    return seconds


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
