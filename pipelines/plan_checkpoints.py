"""Published checkpoints as data: what each needs, how it gets here, and what the planner expects of it on some cards.

`videospark plan --checkpoints` prints the tables, which docs/models.md repeats; a test holds one to the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from .convert.students import Found, Wishes, student_of
from .plan import Plan, make_plan, parse_size
from .plan_models import MODELS
from .recipe import Recipe, preset

CARDS = ("rtx3060-12", "rtx4090", "rtx5090", "h100")
"""That the table has a column for."""
_HD, _SD, _TI = "1280x720x81", "832x480x81", "1280x704x121"


@dataclass(frozen=True)
class Checkpoint:
    """A published model.

    Attributes:
        name: of the file or folder as its publisher has it.
        publisher: who.
        kind: a format of `videospark convert`, or "diffusers" for a folder that loads as it is.
        model: key of `MODELS`.
        size: that it was made for.
        base: the diffusers folder that gives text encoder, VAE, tokenizer and scheduler; empty where it has its own.
    """

    name: str
    publisher: str
    kind: str
    model: str
    size: str
    base: str = ""

    def recipe(self) -> Recipe:
        """What it is run with: that of the conversion, or the model's own sampler."""
        if self.kind in ("diffusers", "wan"):
            return preset("dense")
        shape = MODELS[self.model]
        rank = {"blocks.0.attn1.linear_branch.proj_q.weight": (64, shape.head_dim)}
        found = Found(self.name, rank if self.kind == "spark" else {}, shape.experts, shape.in_channels)
        recipe = student_of(self.kind, found, Wishes()).recipe
        assert recipe is not None
        return recipe

    def bytes(self) -> float:
        """Of its transformers in 16 bits."""
        shape = MODELS[self.model]
        return 2.0 * shape.parameters() * shape.experts

    def command(self) -> str:
        """That makes a folder of it which `videospark generate --model` takes."""
        if self.kind == "diffusers":
            return f"`videospark generate --model {self.name}`"
        gated = self.kind == "fastvideo" and "FullAttn" not in self.name
        extra = " --drop-gate" if gated else ""
        base = f" --base {self.base.split('/')[1]}" if self.base else ""
        return f"`videospark convert {self.name} --to student{base}{extra}`"

    def plan(self, card: str) -> Plan:
        """On a card, blocks compiled or not as its recipe says."""
        return make_plan(self.model, parse_size(self.size), self.recipe(), card)


def _spark(name: str, model: str, size: str, base: str) -> Checkpoint:
    return Checkpoint(f"SparkWan{name}.pth", "alibabagroup", "spark", model, size, f"Wan-AI/{base}-Diffusers")


def _turbo(name: str, model: str, size: str, base: str) -> Checkpoint:
    return Checkpoint(
        f"TurboWan{name}.pth", "TurboDiffusion", "turbodiffusion", model, size, f"Wan-AI/{base}-Diffusers"
    )


def _native(name: str, model: str, size: str) -> Checkpoint:
    return Checkpoint(f"Wan-AI/{name}-Diffusers", "Wan-AI", "diffusers", model, size)


CHECKPOINTS = (
    _native("Wan2.1-T2V-1.3B", "wan2.1-t2v-1.3b", _SD),
    _native("Wan2.1-T2V-14B", "wan2.1-t2v-14b", _HD),
    _native("Wan2.1-I2V-14B-480P", "wan2.1-i2v-14b", _SD),
    _native("Wan2.1-I2V-14B-720P", "wan2.1-i2v-14b", _HD),
    _native("Wan2.2-T2V-A14B", "wan2.2-t2v-a14b", _HD),
    _native("Wan2.2-I2V-A14B", "wan2.2-i2v-a14b", _HD),
    _native("Wan2.2-TI2V-5B", "wan2.2-ti2v-5b", _TI),
    _spark("2.1-T2V-1.3B-480P-0.90Sparsity", "wan2.1-t2v-1.3b", _SD, "Wan2.1-T2V-1.3B"),
    _spark("2.1-T2V-14B-480P-0.90Sparsity", "wan2.1-t2v-14b", _SD, "Wan2.1-T2V-14B"),
    _spark("2.1-T2V-14B-720P-0.95Sparsity-3Step", "wan2.1-t2v-14b", _HD, "Wan2.1-T2V-14B"),
    _spark("2.1-T2V-14B-720P-0.97Sparsity", "wan2.1-t2v-14b", _HD, "Wan2.1-T2V-14B"),
    _spark("2.1-I2V-14B-720P-0.97Sparsity", "wan2.1-i2v-14b", _HD, "Wan2.1-I2V-14B-720P"),
    _spark("2.2-T2V-14B-480P-0.95Sparsity-High", "wan2.2-t2v-a14b", _SD, "Wan2.2-T2V-A14B"),
    _turbo("2.1-T2V-1.3B-480P", "wan2.1-t2v-1.3b", _SD, "Wan2.1-T2V-1.3B"),
    _turbo("2.1-T2V-14B-480P", "wan2.1-t2v-14b", _SD, "Wan2.1-T2V-14B"),
    _turbo("2.1-T2V-14B-720P", "wan2.1-t2v-14b", _HD, "Wan2.1-T2V-14B"),
    _turbo("2.2-I2V-A14B-high-720P", "wan2.2-i2v-a14b", _HD, "Wan2.2-I2V-A14B"),
    Checkpoint("wan2.1_t2v_14b_lightx2v_4step.safetensors", "LightX2V", "lightx2v", "wan2.1-t2v-14b", _SD,
               "Wan-AI/Wan2.1-T2V-14B-Diffusers"),
    Checkpoint("wan2.2_t2v_A14b_high_noise_lightx2v_4step.safetensors", "LightX2V", "lightx2v", "wan2.2-t2v-a14b",
               _SD, "Wan-AI/Wan2.2-T2V-A14B-Diffusers"),
    Checkpoint("wan2.1_i2v_480p_lightx2v_4step.safetensors", "LightX2V", "lightx2v", "wan2.1-i2v-14b", _SD,
               "Wan-AI/Wan2.1-I2V-14B-480P-Diffusers"),
    Checkpoint("wan2.2_i2v_A14b_high_noise_lightx2v_4step.safetensors", "LightX2V", "lightx2v", "wan2.2-i2v-a14b",
               _SD, "Wan-AI/Wan2.2-I2V-A14B-Diffusers"),
    Checkpoint("FastWan2.2-TI2V-5B-FullAttn-Diffusers", "FastVideo", "fastvideo", "wan2.2-ti2v-5b", _TI),
    Checkpoint("FastWan2.1-T2V-1.3B-Diffusers", "FastVideo", "fastvideo", "wan2.1-t2v-1.3b", _SD),
    Checkpoint("FastWan2.1-T2V-14B-Diffusers", "FastVideo", "fastvideo", "wan2.1-t2v-14b", _HD),
)  # fmt: skip


def find_checkpoint(name: str) -> Checkpoint | None:
    """The published checkpoint of this name, with the ending of its file or without; None where none is known."""
    return next((entry for entry in CHECKPOINTS if name in (entry.name, _short(entry.name))), None)


def _short(name: str) -> str:
    return name.removesuffix(".pth").removesuffix(".safetensors").removeprefix("Wan-AI/")


RUN_BY_US: dict[str, str] = {}
"""By name of a checkpoint, where its real weights were run by us: card, date and report. None so far."""


def checkpoint_table() -> str:
    """Markdown: every checkpoint, what it needs, its command, and whether it was ever run by us."""
    lines = ["| checkpoint | 16-bit weights | needs beside | made ready by | run by us with real weights |",
             "|---|---|---|---|---|"]  # fmt: skip
    for entry in CHECKPOINTS:
        weights = f"{entry.bytes() / 1e9:.1f} GB" + (" (pair)" if MODELS[entry.model].experts == 2 else "")
        needs = f"`{entry.base}`" if entry.base else "nothing"
        ran = RUN_BY_US.get(entry.name, "no")
        lines.append(f"| {entry.name} ({entry.publisher}) | {weights} | {needs} | {entry.command()} | {ran} |")
    return "\n".join(lines) + "\n"


def expectation_table() -> str:
    """Markdown: by checkpoint and card what is found to fit first, its peaks on card and in RAM, and a warm clip."""
    lines = ["| checkpoint | size | recipe | " + " | ".join(CARDS) + " |", "|---|---|---" + "|---" * len(CARDS) + "|"]
    for entry in CHECKPOINTS:
        recipe = entry.recipe()
        steps = recipe.sampler.steps or MODELS[entry.model].steps
        cells = [_expected(entry.plan(card)) for card in CARDS]
        lines.append(
            f"| {_short(entry.name)} | {entry.size} | {recipe.name}, {steps} steps | " + " | ".join(cells) + " |"
        )
    return "\n".join(lines) + "\n"


def _expected(plan: Plan) -> str:
    if plan.fits:
        words, peak, ram, times = plan.settings.words(), plan.peak_gib, plan.ram_gib, plan.times
        seconds = None if times is None else times.denoise + times.decode
    elif (option := plan.recommended) is not None:
        words, peak, ram, seconds = option.settings.words(), option.gpu_gib, option.ram_gib, option.seconds
    else:
        return "does not fit"
    return f"{words}: {peak:.1f} GiB, RAM {ram:.0f} GiB" + ("" if seconds is None else f", {_clock(seconds)}")


def _clock(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 120 else f"{seconds:.0f} s"
