r"""Phased consistency: within each step of the student, every point of a trajectory leads to the same end.

Knots 1 >= k_0 > k_1 > ... > k_N = 0 are the noise levels at which the student's steps start, and the end. Phase n goes
from k_n down to k_{n+1}. For s in phase n with edge b = k_{n+1}, the student's map is one Euler step to the edge,

    f(x, s) = x + (b - s) v_S(x, s),        so f(x, b) = x.

The teacher goes a short way along its guided flow, from s to s' >= b:

    v = u + g (c - u)  (c, u: the teacher with the prompt and with the negative prompt),      x' = x_s + (s' - s) v,

with s and s' a given number of solver steps apart in unshifted time u(s) = s / (k - (k - 1) s) for a shift k, and s'
never below the edge. The student must agree with itself on both points:

    L = E d( f(x_s, s),  sg f(x', s') ),     x_s = (1 - s) x_0 + s e,   d squared or sqrt(|.|^2 + c^2) - c.

Where s' = b the target is x' itself: this is where the truth enters, and consistency carries it up to the start of the
phase. In the limit of short steps f is the teacher's own guided trajectory from s to b, so the student needs no
guidance.

s is uniform in unshifted time over the phases that are trained, or is the top of one of them. The target uses the
online weights without gradient, or their average. Source: Phased Consistency Models, arXiv 2405.18407, in the form for
flow matching.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...core.config import require
from ..config import DistillConfig
from ..config_methods import PCMConfig
from ..flow import GuidanceScale, add_noise, euler_step, guided_velocity, shift_time, unshift_time
from ..method import DRAWN_ROUND, Batch, Loss, Method, Roles


@dataclass(frozen=True)
class PhasedConsistency:
    """The loss over some phases.

    Attributes:
        knots: k_0 ... k_N, the last one 0.
        phases: indices of the phases that are trained, adjacent ones.
        shift: of the unshifted time.
        guidance_scale: of the teacher.
        settings: solver, target and distance.
    """

    knots: tuple[float, ...]
    phases: range
    shift: float
    guidance_scale: GuidanceScale
    settings: PCMConfig

    def __post_init__(self) -> None:
        inside = len(self.phases) > 0 and self.phases[0] >= 0 and self.phases[-1] < len(self.knots) - 1
        require(inside, "phases", self.phases, f"within the {len(self.knots) - 1} phases")

    def draw_levels(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Noise levels s, s' and the edge below them, float32 [B] each."""
        top, bottom = (unshift_time(self.knots[i], self.shift) for i in (self.phases[0], self.phases[-1] + 1))
        times = [unshift_time(self.knots[i], self.shift) for i in (*self.phases, self.phases[-1] + 1)]
        device = batch.latents.device
        if self.settings.start == "top":
            choice = batch.draws.uniform("pcm-phase", 0, len(self.phases)).long().clamp(max=len(self.phases) - 1)
            time = torch.tensor(times, device=device)[choice]
        else:
            # 1 - uniform lies in (0, 1]: the top of the first phase can be drawn, the last edge cannot.
            time = bottom + (top - bottom) * (1 - batch.draws.uniform("pcm-time"))
            inner = torch.tensor(times[1:-1], device=device)
            choice = (time[:, None] <= inner[None, :]).sum(1)
        edge_time = torch.tensor(times[1:], device=device)[choice]
        next_time = torch.maximum(time - 1 / self.settings.solver_steps, edge_time)
        edge = torch.tensor([self.knots[i + 1] for i in self.phases], device=device)[choice]
        following = torch.maximum(shift_time(next_time, self.shift), edge)
        return shift_time(time, self.shift), following, edge

    def __call__(self, roles: Roles, batch: Batch) -> torch.Tensor:
        """The loss of one batch, a scalar."""
        sigma, following, edge = self.draw_levels(batch)
        condition = batch.condition
        latents = add_noise(batch.latents, batch.noise("pcm-noise"), sigma)
        latents = condition.hold(latents)
        with torch.no_grad():
            velocity = guided_velocity(roles.teacher, latents, sigma, condition, self.guidance_scale)
            ahead = euler_step(latents, velocity, sigma, following)
            field = roles.student
            if self.settings.target == "ema":
                assert roles.average is not None
                field = roles.average
            target = euler_step(ahead, field(ahead, following, condition), following, edge)
        prediction = euler_step(latents, roles.student(latents, sigma, condition), sigma, edge)
        squared = (prediction - target).square()
        if self.settings.loss == "squared":
            return squared.mean()
        c = self.settings.huber_c
        return ((squared + c * c).sqrt() - c).mean()


def knots_of(sigmas: Sequence[float] | None) -> tuple[float, ...]:
    """The knots of a student: where its steps start, and 0."""
    assert sigmas is not None
    return (*sigmas, 0.0)


class PCM(Method):
    """Phased consistency on all phases."""

    def __init__(self, config: DistillConfig, flow_shift: float, boundary: float | None = None) -> None:
        super().__init__(config, flow_shift, boundary)
        knots = knots_of(config.model.sigmas)
        self.consistency = PhasedConsistency(knots, range(len(knots) - 1), flow_shift, self.guidance_scale, config.pcm)

    @property
    def provides(self) -> tuple[str, ...]:
        return ("few-step",)

    def round_length(self, role: str) -> int:
        return DRAWN_ROUND

    def loss(self, role: str, roles: Roles, batch: Batch, step: int) -> Loss:
        value = self.consistency(roles, batch)
        return Loss(value, {"pcm": value.detach()})
