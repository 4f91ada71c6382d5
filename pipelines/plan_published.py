"""What others published of memory and time, beside what the planner says: `videospark plan --published`.

None of these figures was measured by us. A test holds the planner to 15 % of the memories and 35 % of the times, and
the table in docs/real-weights.md to what `published_table` makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..attention.config import AttentionConfig
from ..quantization.config import QuantizationConfig
from .plan import make_plan, parse_size
from .plan_memory import GIB, Settings
from .recipe import Recipe, SamplerConfig

MEMORY_LIMIT, TIME_LIMIT = 0.15, 0.35
"""Largest deviations that the tests allow, as shares of what was published."""


@dataclass(frozen=True)
class Published:
    """One published figure.

    Attributes:
        what: in words.
        source: who published it.
        value: in GiB or seconds.
        unit: "GiB" or "s".
        model, size, recipe, settings, card: what was run.
        part: a stage, for memory; "pass", "step" or "decode" for time.
        weights_only: memory of the weights of that stage, without activations.
        compiled: whether blocks were compiled or fused.
    """

    what: str
    source: str
    value: float
    unit: Literal["GiB", "s"]
    model: str
    size: str
    recipe: Recipe | str
    settings: Settings
    card: str
    part: str
    weights_only: bool = False
    compiled: bool = False

    def planned(self) -> float:
        """What the planner says of the same, in the same unit."""
        plan = make_plan(self.model, parse_size(self.size), self.recipe, self.card, self.settings,
                         compiled=self.compiled)  # fmt: skip
        if self.unit == "GiB":
            stage = next(stage for stage in plan.stages if stage.name == self.part)
            return (stage.weights if self.weights_only else stage.gpu_peak) / GIB
        assert plan.times is not None
        seconds = {"pass": plan.times.step / 2, "step": plan.times.step, "decode": plan.times.decode}
        return seconds[self.part]

    def deviation(self) -> float:
        """Share by which the plan is above what was published, negative where below."""
        return self.planned() / self.value - 1


def spark(keep: float, steps: int) -> Recipe:
    """A SparkDiffusion student in FP8 as its authors run it."""
    attention = AttentionConfig(backend="gather", keep_ratio=keep, token_order="raster", branch="rola")
    sampler = SamplerConfig(num_inference_steps=steps, guidance_scale=1.0)
    return Recipe("spark", attention, sampler, QuantizationConfig(mode="fp8", fused=True))


def turbo() -> Recipe:
    """A TurboDiffusion student in INT8 as its authors run it."""
    attention = AttentionConfig(
        backend="gather", keep_ratio=0.1, token_order="raster", branch="sla", block_size_q=128, block_size_k=64
    )
    sampler = SamplerConfig(num_inference_steps=4, guidance_scale=1.0)
    return Recipe("turbo", attention, sampler, QuantizationConfig(mode="int8", fused=True))


_FREED = Settings(text_encoder="freed", vae_dtype="bfloat16")
_MODEL = Settings(offload="model")
_SPARK, _WAN, _TURBO = "ComfyUI-SparkDiffusion", "Wan", "TurboDiffusion"
_LIGHT = "LightX2V"


def _memory(
    what: str, source: str, value: float, model: str, size: str, recipe: Recipe | str, settings: Settings, part: str,
    weights_only: bool = False,
) -> Published:  # fmt: skip
    return Published(what, source, value, "GiB", model, size, recipe, settings, "80gb", part, weights_only)


def _time(
    what: str, source: str, value: float, model: str, size: str, recipe: Recipe | str, card: str, part: str,
    compiled: bool = False,
) -> Published:  # fmt: skip
    return Published(what, source, value, "s", model, size, recipe, _FREED, card, part, compiled=compiled)


def published() -> list[Published]:
    """All figures, memory first."""
    hd, sd, five, three, four = "1280x720x81", "832x480x81", spark(0.05, 3), spark(0.03, 4), spark(0.1, 4)
    t14, t1, i14, i22 = "wan2.1-t2v-14b", "wan2.1-t2v-1.3b", "wan2.1-i2v-14b", "wan2.2-i2v-a14b"
    return [
        _memory("14B student in FP8, 720p: at rest", _SPARK, 13.8, t14, hd, five, _FREED, "denoise", True),
        _memory("the same, denoising", _SPARK, 21.3, t14, hd, five, _FREED, "denoise"),
        _memory("the same, decoding", _SPARK, 23.4, t14, hd, five, _FREED, "decode"),
        _memory("I2V 14B student in FP8, 720p", _SPARK, 27.9, i14, "1248x720x81", three, _FREED, "decode"),
        _memory("1.3B dense, 480p, offloaded (8.19 GB)", _WAN, 7.63, t1, sd, "dense", _MODEL, "decode"),
        _memory("umT5 alone (11 GB)", _WAN, 10.24, t1, sd, "dense", _MODEL, "text", True),
        _time("14B dense, 720p, RTX 5090, a pass", _TURBO, 47.7, t14, hd, "dense", "rtx5090", "pass"),
        _time("1.3B dense, 480p, RTX 5090, a pass", _TURBO, 1.84, t1, sd, "dense", "rtx5090", "pass"),
        _time("2.2 I2V A14B dense, 720p, RTX 5090, a pass", _TURBO, 56.9, i22, hd, "dense", "rtx5090", "pass"),
        _time("1.3B dense, 480p, RTX 4090, a step", _WAN, 4.8, t1, sd, "dense", "rtx4090", "step"),
        _time("I2V 14B dense in diffusers, 480p, H100, a step", _LIGHT, 9.77, i14, sd, "dense", "h100", "step"),
        _time("the same, RTX 4090D", _LIGHT, 30.5, i14, sd, "dense", "rtx4090d", "step"),
        _time("14B student at 95 %, 720p, RTX 5090, a step", _SPARK, 6.7, t14, hd, five, "rtx5090", "step", True),
        _time("14B student at 97 %, 720p, RTX 5090, a step", _SPARK, 6.1, t14, hd, three, "rtx5090", "step", True),
        _time("1.3B student at 90 %, 480p, RTX 5090, a step", _SPARK, 0.445, t1, sd, four, "rtx5090", "step", True),
        _time("1.3B student, 480p, RTX 5090, a step", _TURBO, 0.475, t1, sd, turbo(), "rtx5090", "step", True),
        _time("decoding 720p, RTX 5090", _SPARK, 7.0, t14, hd, five, "rtx5090", "decode", True),
        _time("decoding 480p, RTX 5090", _SPARK, 3.0, t1, sd, four, "rtx5090", "decode", True),
    ]  # fmt: skip


def published_table() -> str:
    """Markdown: what, published, planned, deviation."""
    lines = ["| what | published by | published | planned | deviation |", "|---|---|---|---|---|"]
    for row in published():
        digits = 2 if row.value < 2 else 1
        planned = row.planned()
        lines.append(
            f"| {row.what} | {row.source} | {row.value:.{digits}f} {row.unit} | {planned:.{digits}f} {row.unit} "
            f"| {planned / row.value - 1:+.0%} |"
        )
    return "\n".join(lines) + "\n"
