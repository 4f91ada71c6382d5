"""What a training method is to the loop: named roles, what is updated when, and the losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..core.config import ConfigError, require
from .config import DistillConfig
from .draws import Draws
from .flow import Condition, GuidanceScale, TwoScales, VelocityField

DRAWN_ROUND = 100
"""Updates after which an expert that was never asked counts as left out, where noise levels are drawn."""


@dataclass(frozen=True)
class Batch:
    """Some samples of the prepared data, on the device of the training.

    Attributes:
        latents: clean, normalised, float32 [B, C, F, h, w].
        condition: prompts, and first frames where the batch has image-to-video samples.
        draws: the random numbers of these samples.
        states: the teacher's states at the student's knots, [B, N + 1, C, F, h, w], the last of them `latents`; None
            where the data has none.
    """

    latents: torch.Tensor
    condition: Condition
    draws: Draws
    states: torch.Tensor | None = None

    def noise(self, name: str) -> torch.Tensor:
        """Standard normal numbers of the latents' shape."""
        return self.draws.normal(name, self.latents.shape[1:])


@dataclass
class Roles:
    """The networks as velocity fields.

    Attributes:
        student: what is trained.
        teacher: dense and fixed; never has a gradient.
        critic: dense; follows the distribution of the student's samples. None where a method has none.
        average: the student with its averaged weights, without gradient; None where there is no average.
        features: by "student" and "teacher", the self-attention outputs of the latest pass, for the alignment.
    """

    student: VelocityField
    teacher: VelocityField
    critic: VelocityField | None = None
    average: VelocityField | None = None
    features: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class Loss:
    """A scalar with a gradient, and detached parts of it for the log."""

    value: torch.Tensor
    parts: dict[str, torch.Tensor] = field(default_factory=dict)


def teacher_guidance(scale: float, scale_2: float | None, boundary: float | None) -> GuidanceScale:
    """One guidance scale, or one of each expert.

    Raises:
        ConfigError: a second scale without a second expert.
    """
    rule = "left out for a teacher with one expert"
    require(scale_2 is None or boundary is not None, "guidance_scale_2", scale_2, rule)
    if scale_2 is None or boundary is None:
        return scale
    return TwoScales(scale, scale_2, boundary)


class Method:
    """Base of the methods. Whatever one remembers between iterations must be in `state_dict`.

    `trained_roles` are the networks that learn; `reads_trajectories` asks for batches with states; `joins_losses` says
    that an update of the student may have two losses, each with a pass of its own.

    Args:
        config: the run.
        flow_shift: shift of the noise levels, resolved.
        boundary: noise level from which on the first of two experts is asked; None with one.
    """

    trained_roles: tuple[str, ...] = ("student",)
    reads_trajectories = False
    joins_losses = False

    def __init__(self, config: DistillConfig, flow_shift: float, boundary: float | None = None) -> None:
        self.config = config
        self.shift = flow_shift
        self.boundary = boundary
        model = config.model
        self.guidance_scale = teacher_guidance(model.guidance_scale, model.guidance_scale_2, boundary)

    def updates(self, step: int) -> tuple[str, ...]:
        """Roles that iteration `step` updates, in this order."""
        return ("student",)

    def round_length(self, role: str) -> int:
        """Updates of a role after which it has been asked at every noise level that it is trained at."""
        return 1

    def keep_ratio(self, step: int) -> float:
        """Keep ratio of the student's attention in iteration `step`."""
        return self.config.attention.keep_ratio

    def loss(self, role: str, roles: Roles, batch: Batch, step: int) -> Loss:
        """The loss of one role on one micro-batch of iteration `step`."""
        raise NotImplementedError

    def observe(self, step: int, losses: dict[str, float]) -> bool:
        """Told the mean losses of every iteration; true where training should stop after it."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """What must survive an interruption, as plain data."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave."""
        if state:
            raise ConfigError(f"checkpoint: got method state {sorted(state)}; must be empty for {type(self).__name__}")

    @property
    def provides(self) -> tuple[str, ...]:
        """What the trained weights can be used for, as recipes' `requires` names it."""
        return ()


def build_method(config: DistillConfig, flow_shift: float, boundary: float | None = None) -> Method:
    """The method that the settings name."""
    from .methods.crossdistill import CrossDistill
    from .methods.dmd import DMD
    from .methods.ode_regression import ODERegression
    from .methods.pcm import PCM
    from .methods.sparse_warmup import SparseWarmup

    known: dict[str, type[Method]] = {
        "sparse_warmup": SparseWarmup,
        "ode_regression": ODERegression,
        "pcm": PCM,
        "dmd": DMD,
        "crossdistill": CrossDistill,
    }
    return known[config.method](config, flow_shift, boundary)
