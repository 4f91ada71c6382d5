"""What a training takes: memory of one GPU, RAM, and seconds of an iteration. Nothing is loaded.

Memory. With P parameters of a network, n of them trained, per network in bytes: weights 4 P (the teacher 2 P or 4 P, as
it is held), gradients 4 n, AdamW 8 n, the average 4 n; split over the processes, and in RAM instead, as the settings
say. To this come what is gathered of a split network (two blocks, the parts outside of them, a block's gradient twice)
or autocast's rounded copies of one that is not; the inputs of all blocks for every backward pass that is open; and what
one block saves for its backward pass. The last is counted per token and channel, and was found by running diffusers'
own block (a test does so again).

Time. The methods are run once through their cycle with networks that only count. A pass is timed by the planner's
roofline (`pipelines/plan.py`), a backward pass as two of it, recomputed blocks as one more. Not in it: what processes
wait for each other, moving weights between RAM and GPU, the optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from ..attention.config import AttentionConfig
from ..core.config import require
from ..pipelines.plan import budget_gib, estimate_times, parse_size
from ..pipelines.plan_cards import Card, find_card
from ..pipelines.plan_checkpoints import CHECKPOINTS
from ..pipelines.plan_memory import GIB, LIBRARY_WORKSPACE, PROCESS, Clip, Settings, branch_parameters
from ..pipelines.plan_models import MODELS, TEXT_ENCODER_PARAMETERS, ModelShape, find_shape
from ..pipelines.recipe import Recipe, SamplerConfig
from .config import DistillConfig
from .draws import Draws
from .flow import Condition
from .method import Batch, Method, Roles, build_method

SAVED, SAVED_FEED_FORWARD = 72.0, 4.0
"""Bytes that a block saves under autocast, per token and channel; the latter times the width of its feed-forward over
that of a token."""
BOUNDARIES = {"wan2.2-t2v-a14b": 0.875, "wan2.2-i2v-a14b": 0.9}


class _Counted:
    """A network that only counts: passes without a gradient, and passes that are gone back through."""

    def __init__(self) -> None:
        self.weight = torch.ones((), requires_grad=True)
        self.plain = self.trained = 0

    def __call__(self, latents: torch.Tensor, sigma: torch.Tensor, condition: Condition) -> torch.Tensor:
        if torch.is_grad_enabled():
            self.trained += 1
        else:
            self.plain += 1
        return self.weight * latents


@dataclass(frozen=True)
class Passes:
    """Passes over one micro-batch in an iteration, on average; a trained one has a backward pass as well.

    `open` is how many forward passes of one update wait for their backward pass at the same time, at most.
    """

    student: float
    student_trained: float
    teacher: float
    critic: float
    critic_trained: float
    open: int


def count_passes(config: DistillConfig, boundary: float | None = None) -> Passes:
    """Runs the method through its cycle."""
    shift = config.model.flow_shift if config.model.flow_shift is not None else 5.0
    method: Method = build_method(config, shift, boundary)
    latents = torch.zeros(1, 1, 1, 1, 1)
    states = torch.zeros(1, len(config.model.sigmas or ()) + 1, *latents.shape[1:])
    batch = Batch(latents, Condition(torch.zeros(1, 1, 1), torch.zeros(1, 1, 1)), Draws(0, range(1)), states)
    student, teacher, critic = _Counted(), _Counted(), _Counted()
    layer = SimpleNamespace(outputs={"layer": torch.ones(1)})
    roles = Roles(student, teacher, critic, student, {"student": layer, "teacher": layer})
    first = config.crossdistill.staged_steps
    cycle = (config.dmd.critic_updates + 1) * len(config.model.sigmas or (1.0,))
    most = 0
    for step in range(first, first + cycle):
        for role in method.updates(step):
            before = student.trained + critic.trained
            method.loss(role, roles, batch, step)
            most = max(most, student.trained + critic.trained - before)
    return Passes(
        student.plain / cycle,
        student.trained / cycle,
        teacher.plain / cycle,
        critic.plain / cycle,
        critic.trained / cycle,
        most,
    )


@dataclass(frozen=True)
class TrainingPlan:
    """What a run takes.

    Attributes:
        model: name of the teacher's shape.
        card: the GPU.
        processes: how many.
        clip: its size.
        tokens: of it.
        gpu_gib: peak of one GPU by part: weights, gradients, optimizer, average, gathered, activations.
        budget_gib: of the card.
        ram_gib: of all processes together: what stays there, and at most while networks are loaded.
        seconds: of an iteration; None where the peaks of the card are not known.
        hours: of all iterations.
        passes: of an iteration.
    """

    model: str
    card: str
    processes: int
    clip: Clip
    tokens: int
    gpu_gib: dict[str, float]
    budget_gib: float
    ram_gib: float
    seconds: float | None
    hours: float | None
    passes: Passes

    @property
    def peak_gib(self) -> float:
        """Of one GPU."""
        return sum(self.gpu_gib.values())

    @property
    def fits(self) -> bool:
        """Whether it stays within the card."""
        return self.peak_gib <= self.budget_gib


def plan_training(
    config: DistillConfig, *, gpu: str, processes: int = 1, size: tuple[int, int, int] | None = None
) -> TrainingPlan:
    """Plan a run.

    Args:
        config: the run; its teacher is a published model, or a diffusers folder.
        gpu: a name of `plan_cards.CARDS`, or a memory as in "16gb".
        processes: one per GPU.
        size: width, height and frames of the clips; None takes the published model's.

    Raises:
        ConfigError: an unknown teacher or card.
    """
    require(processes >= 1, "processes", processes, "at least 1")
    known = {entry.name: entry for entry in CHECKPOINTS}
    entry = known.get(config.model.teacher)
    shape = MODELS[entry.model] if entry is not None else find_shape(config.model.teacher)
    if size is None:
        require(entry is not None, "size", None, "given for a model that is not published")
        assert entry is not None
        size = parse_size(entry.size)
    card, clip = find_card(gpu), Clip(*size)
    tokens = shape.tokens(clip.height, clip.width, clip.frames)
    passes = count_passes(config, BOUNDARIES.get(shape.name) if shape.experts == 2 else None)
    seconds = _seconds(config, shape, card, clip, passes)
    return TrainingPlan(
        shape.name,
        card.name,
        processes,
        clip,
        tokens,
        {name: value / GIB for name, value in _gpu_bytes(config, shape, tokens, processes, passes).items()},
        budget_gib(card),
        _ram_bytes(config, shape, processes, passes) / GIB,
        seconds,
        None if seconds is None else seconds * config.training.num_steps / 3600,
        passes,
    )


def _trained_parameters(config: DistillConfig, shape: ModelShape, branch: int) -> int:
    """Of one expert that has `branch` parameters in its branch."""
    training = config.training
    if training.trainable == "full":
        return shape.parameters() + branch
    if training.trainable == "branch":
        return branch if branch else shape.parameters()
    dim, ffn = shape.dim, shape.ffn
    # Both attentions have the projections that the targets name.
    sides = {"to_q": (2, 2 * dim), "to_k": (2, 2 * dim), "to_v": (2, 2 * dim), "to_out.0": (2, 2 * dim)}
    sides |= {"ffn.net.0.proj": (1, dim + ffn), "ffn.net.2": (1, dim + ffn)}
    wide = sum(count * both for name, (count, both) in sides.items() if name in training.lora.targets)
    return shape.layers * training.lora.rank * wide + branch


def _states(config: DistillConfig, shape: ModelShape, passes: Passes) -> dict[str, float]:
    """Bytes of what stays for the whole run, over all processes."""
    branch = branch_parameters(shape, config.attention)
    roles = [branch] + ([0] if passes.critic_trained else [])
    trained = [_trained_parameters(config, shape, own) * shape.experts for own in roles]
    held = 2.0 if config.model.teacher_dtype == "bfloat16" else 4.0
    weights = held * shape.parameters() * shape.experts
    for own, count in zip(roles, trained, strict=True):
        whole = (shape.parameters() + own) * shape.experts
        weights += 4.0 * (whole + (count if config.training.trainable == "lora" else 0))
    return {
        "weights": weights,
        "gradients": 4.0 * max(trained),  # of one network at a time
        "optimizer": 8.0 * sum(trained),
        "average": 4.0 * trained[0] if config.training.ema_decay > 0 else 0.0,
    }


def _gpu_bytes(
    config: DistillConfig, shape: ModelShape, tokens: int, processes: int, passes: Passes
) -> dict[str, float]:
    training = config.training
    sharded = training.sharding == "fsdp2"
    share = (0.0 if training.offload else 1.0 / processes) if sharded else 1.0
    found = {name: share * value for name, value in _states(config, shape, passes).items()}
    block = shape.block_parameters()
    outside = shape.parameters() - shape.layers * block
    if sharded:
        found["gathered"] = 4.0 * (4 * block + outside) + 2.0 * block
    else:
        found["gathered"] = 2.0 * shape.parameters() if training.mixed_precision == "bf16" else 0.0
    size = 1.0 if training.mixed_precision == "bf16" else 2.0
    numbers = tokens * shape.dim * training.batch_size * size
    per_block = (SAVED + SAVED_FEED_FORWARD * shape.ffn / shape.dim) * numbers
    graphs = max(1, passes.open)
    if training.gradient_checkpointing:
        activations = graphs * shape.layers * 2.0 * numbers + per_block
    else:
        activations = graphs * shape.layers * per_block
    found["activations"] = activations + LIBRARY_WORKSPACE
    return found


def _ram_bytes(config: DistillConfig, shape: ModelShape, processes: int, passes: Passes) -> float:
    """What stays in RAM, and beside it at most while networks are loaded."""
    sharded = config.training.sharding == "fsdp2"
    stays = sum(_states(config, shape, passes).values()) if config.training.offload else 0.0
    whole = shape.parameters() * shape.experts
    held = 2.0 if config.model.teacher_dtype == "bfloat16" else 4.0
    pipeline = held * (whole + TEXT_ENCODER_PARAMETERS)
    loading = pipeline + 4.0 * (whole + TEXT_ENCODER_PARAMETERS)
    # Processes that share a network load it in turn.
    return stays + processes * PROCESS + loading * (1 if sharded else processes)


def _seconds(config: DistillConfig, shape: ModelShape, card: Card, clip: Clip, passes: Passes) -> float | None:
    sampler = SamplerConfig(guidance_scale=1.0)

    def forward(attention: AttentionConfig) -> float | None:
        recipe = Recipe("pass", attention=attention, sampler=sampler)
        times = estimate_times(shape, card, clip, recipe, Settings(), compiled=False)
        return None if times is None else times.step

    sparse, dense = forward(config.attention), forward(AttentionConfig())
    if sparse is None or dense is None:
        return None
    training = config.training
    back = 4 if training.gradient_checkpointing else 3
    one = sparse * (passes.student + back * passes.student_trained)
    one += dense * (passes.teacher + passes.critic + back * passes.critic_trained)
    return one * training.batch_size * training.gradient_accumulation


HARDWARE = {
    "wan2.1-1.3b-warmup-90-lora": (("rtx4090", 1), ("h100", 1)),
    "wan2.1-1.3b-warmup-90": (("rtx4090", 1), ("h100", 1)),
    "wan2.1-1.3b-crossdistill-3step-lora": (("rtx4090", 1), ("h100", 1)),
    "wan2.1-1.3b-crossdistill-3step": (("rtx4090", 1), ("h100", 1)),
    "wan2.1-14b-warmup-95": (("h100", 8), ("b200", 8)),
    "wan2.1-14b-crossdistill-3step": (("h100", 8), ("b200", 8)),
    "wan2.1-i2v-14b-warmup-95": (("h100", 8), ("b200", 8)),
    "wan2.1-i2v-14b-crossdistill-3step": (("h100", 8), ("b200", 8)),
    "wan2.2-a14b-warmup-95": (("h100", 16), ("b200", 8)),
    "wan2.2-a14b-crossdistill-4step": (("h100", 16), ("b200", 8)),
}
"""GPUs of the table in the documentation, by recipe."""
TABLE_SIZE = (832, 480, 81)


def recipe_table(names: Sequence[str] | None = None) -> str:
    """Markdown: the recipes that come along on some GPUs, at 832x480x81."""
    from .run import load_config

    lines = ["| recipe | GPUs | a GPU | fits | RAM | an iteration | all |", "|---|---|---|---|---|---|---|"]
    for name in names or HARDWARE:
        for gpu, processes in HARDWARE[name]:
            plan = plan_training(load_config(name), gpu=gpu, processes=processes, size=TABLE_SIZE)
            assert plan.seconds is not None and plan.hours is not None
            fits = "yes" if plan.fits else "no"
            cells = (f"`{name}`", f"{processes} x {gpu}", f"{plan.peak_gib:.0f} GiB", fits, f"{plan.ram_gib:.0f} GiB",
                     f"{plan.seconds:.0f} s", f"{math.ceil(plan.hours)} h")  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
