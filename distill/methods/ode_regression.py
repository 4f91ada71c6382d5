r"""ODE regression: each step of the student is taught the stretch of the teacher's trajectory that it replaces.

The teacher's guided trajectory from noise was followed once, in many small steps, and its states x_0 ... x_N at the
student's knots k_0 > ... > k_N = 0 were stored with the data. A step of the student from knot n is one Euler step, and
right if its velocity is the mean one of the stretch:

    L = E | v_S(x_n, k_n) - (x_n - x_{n+1}) / (k_n - k_{n+1}) |^2,        n uniform over the steps.

In velocities all steps count alike; in states the first would count (k_0 - k_1)^2, some hundredths of the rest. The
teacher is not asked while it trains, so that an iteration costs a third or less of one of phased consistency, and the
target is the truth from the first iteration on. It only knows the trajectories that were stored.

Source: progressive distillation to given steps, arXiv 2202.00512, with stored trajectories as the ODE initialisation of
arXiv 2412.07772 has them.
"""

from __future__ import annotations

import torch

from ..config import DistillConfig
from ..flow import broadcast
from ..method import DRAWN_ROUND, Batch, Loss, Method, Roles
from .pcm import knots_of


class ODERegression(Method):
    """Regression of every step on stored trajectories."""

    reads_trajectories = True

    def __init__(self, config: DistillConfig, flow_shift: float, boundary: float | None = None) -> None:
        super().__init__(config, flow_shift, boundary)
        self.knots = knots_of(config.model.sigmas)

    @property
    def provides(self) -> tuple[str, ...]:
        return ("few-step",)

    def round_length(self, role: str) -> int:
        return DRAWN_ROUND

    def loss(self, role: str, roles: Roles, batch: Batch, step: int) -> Loss:
        assert batch.states is not None
        count = len(self.knots) - 1
        chosen = batch.draws.uniform("ode-step", 0, count).long().clamp(max=count - 1)
        rows = torch.arange(len(chosen), device=chosen.device)
        start, end = batch.states[rows, chosen], batch.states[rows, chosen + 1]
        knots = torch.tensor(self.knots, device=start.device)
        sigma, length = knots[chosen], knots[chosen] - knots[chosen + 1]
        target = batch.condition.still((start - end) / broadcast(length, start))
        squared = (roles.student(start, sigma, batch.condition) - target).square().flatten(1).mean(1)
        value = squared.mean()
        return Loss(value, {"ode_regression": value.detach()})
