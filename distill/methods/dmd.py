r"""Distribution matching: the student's samples are moved to where the teacher finds them more likely.

The student samples by its own few steps from knots k_0 > ... > k_N = 0 (backward simulation: it trains on its own
states). A training sample G comes from step n; only that step has a gradient:

    form "dmd":  G = x + (0 - k_{n-1}) v_S(x, k_{n-1}), the clean prediction of the step;           end level s_1 = 0,
    form "tdm":  G = x + (k_n - k_{n-1}) v_S(x, k_{n-1}), the state at the knot where it ends;      end level s_1 = k_n.

G is noised further, to a level s > s_1, along the forward process:

    x_s = a G + t z,     a = (1 - s) / (1 - s_1),     t = sqrt(s^2 - a^2 s_1^2),     z normal,

so that x_s has the law of a sample at level s if G has that of one at s_1. With the guided teacher v_T = u + g (c - u)
and the critic v_F, the velocity of the student's own distribution, both mapped to s_1 by x_s + (s_1 - s) v,

    gradient = (s_1 - s) (v_F - v_T) / mean |G - (x_s + (s_1 - s) v_T)|,     L = 1/2 mean |G - sg(G - gradient)|^2.

The score of a flow is -(x + (1 - s) v) / s, so (s_1 - s)(v_F - v_T) points along grad log p_F - grad log p_T: a step
against it lowers KL(p_F | p_T). At s_1 = 0 this is DMD (arXiv 2311.18828, 2405.14867), else its trajectory form TDM
(arXiv 2503.06674).

s is uniform in unshifted time between max(u(s_1), min_time) and max_time. With two experts, which part at the noise
level b, a sample of a step that starts at b or above is scored at levels from b on, one of a step below it at levels
under b: teacher, critic and student of a step are then the same expert. Drawing it where it counts matters: clamping
draws from the whole axis to s_1, as the released code does, gives most of them a vanishing gradient at a high s_1.

Critic. It regresses on samples of the student. From clean samples G (s_1 = 0): mean |v_F(x_s) - (z - G)|^2. From
states at a knot the conditional score of x_s is -z / t, hence the velocity and its regression, weighted to keep the
variance bounded near s_1,

    v* = (s z / t - x_s) / (1 - s),        mean (t / s)^2 |v_F(x_s) - v*|^2,

which at s_1 = 0 is the former. "rollout" instead trains a TDM critic on clean samples of whole rollouts, as released:
an approximation, since their noised law is not that of the states at the knots until the student is right.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...core.config import require
from ..config import DistillConfig
from ..config_methods import DMDConfig
from ..flow import GuidanceScale, broadcast, euler_step, guided_velocity, levels, shift_time, unshift_time
from ..method import Batch, Loss, Method, Roles
from .pcm import knots_of

SMALLEST_NORM = 1e-5
"""Lower bound of the normaliser, per sample."""


@dataclass(frozen=True)
class DistributionMatching:
    """The losses of student and critic.

    Attributes:
        knots: k_0 ... k_N, the last one 0.
        shift: of the unshifted time.
        guidance_scale: of the teacher.
        settings: form, critic and range of times.
        boundary: noise level from which on the first of two experts is asked; None with one.
    """

    knots: tuple[float, ...]
    shift: float
    guidance_scale: GuidanceScale
    settings: DMDConfig
    boundary: float | None = None

    def __post_init__(self) -> None:
        if self.settings.form == "tdm" and len(self.knots) > 2:
            highest = unshift_time(self.knots[1], self.shift)
            rule = f"more than {highest:.4f}, the unshifted time of the knot {self.knots[1]}"
            require(self.settings.max_time > highest, "dmd.max_time", self.settings.max_time, rule)
        for step in range(1, self.num_steps + 1):
            low, high = self.time_range(step, self.end_level(step))
            rule = f"such that step {step} has noise levels of its expert to be scored at, but {low:.4f} >= {high:.4f}"
            times = (self.settings.min_time, self.settings.max_time)
            require(low < high, "dmd.min_time and max_time", times, rule)

    @property
    def num_steps(self) -> int:
        """Steps of the student."""
        return len(self.knots) - 1

    def rollout(
        self, roles: Roles, batch: Batch, first: int, last: int, start: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The student's state after steps first + 1 ... last, without gradient.

        Args:
            first: index of the knot to start from.
            last: index of the knot to stop at.
            start: state at knot `first`; None draws noise, for knot 0.
        """
        latents = batch.noise("dmd-start") if start is None else start
        with torch.no_grad():
            for index in range(first, last):
                latents = self._advance(roles, batch, latents, index, self.knots[index + 1])
        return latents

    def _advance(self, roles: Roles, batch: Batch, latents: torch.Tensor, index: int, target: float) -> torch.Tensor:
        """One step of the student from knot `index` to the level `target`."""
        start, end = levels(self.knots[index], latents), levels(target, latents)
        velocity = roles.student(latents, start, batch.condition)
        if self.settings.stochastic and target > 0:
            clean = euler_step(latents, velocity, start, levels(0.0, latents))
            return (1 - target) * clean + target * batch.noise(f"dmd-renoise-{index}")
        return euler_step(latents, velocity, start, end)

    def end_level(self, step: int) -> float:
        """s_1 of the samples that step `step` (from 1) gives."""
        return self.knots[step] if self.settings.form == "tdm" else 0.0

    def sample(self, roles: Roles, batch: Batch, step: int, latents: torch.Tensor) -> torch.Tensor:
        """G of step `step` (from 1), from the state at its start."""
        return batch.condition.hold(self._advance(roles, batch, latents, step - 1, self.end_level(step)))

    def time_range(self, step: int, end: float) -> tuple[float, float]:
        """Lowest and highest unshifted time at which samples of step `step` (from 1) at the level `end` are scored."""
        low, high = max(unshift_time(end, self.shift), self.settings.min_time), self.settings.max_time
        if self.boundary is not None and self.settings.noise_range == "expert":
            split = unshift_time(self.boundary, self.shift)
            if self.knots[step - 1] >= self.boundary:
                low = max(low, split)
            else:
                high = min(high, split)
        return low, high

    def noise_further(
        self, batch: Batch, sample: torch.Tensor, end: float, name: str, step: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """x_s, s [B], z and t [B] of samples of step `step` (from 1) at the level `end`."""
        low, high = self.time_range(step, end)
        # 1 - uniform lies in (0, 1]: s never equals the level that it starts from.
        time = low + (high - low) * (1 - batch.draws.uniform(f"{name}-time"))
        sigma = shift_time(time, self.shift)
        if self.boundary is not None and self.settings.noise_range == "expert":
            # The boundary itself belongs to the first expert, and rounding must not carry a level across it.
            edge = torch.tensor(self.boundary, dtype=sigma.dtype, device=sigma.device)
            if self.knots[step - 1] >= self.boundary:
                sigma = sigma.clamp(min=self._at_least(edge))
            else:
                sigma = sigma.clamp(max=self._below(edge))
        noise = batch.noise(f"{name}-noise")
        scale = (1 - sigma) / (1 - end)
        spread = (sigma**2 - (scale * end) ** 2).clamp(min=0).sqrt()
        latents = broadcast(scale, sample) * sample + broadcast(spread, sample) * noise
        return batch.condition.hold(latents), sigma, noise, spread

    def _below(self, edge: torch.Tensor) -> float:
        """Largest number of the tensor's type below the boundary."""
        assert self.boundary is not None
        value = edge if float(edge) < self.boundary else torch.nextafter(edge, torch.zeros_like(edge))
        return float(value)

    def _at_least(self, edge: torch.Tensor) -> float:
        """Smallest number of the tensor's type that is not below the boundary."""
        assert self.boundary is not None
        value = edge if float(edge) >= self.boundary else torch.nextafter(edge, torch.ones_like(edge))
        return float(value)

    def student_loss(self, roles: Roles, batch: Batch, step: int, latents: torch.Tensor) -> Loss:
        """The loss of step `step` (from 1) of the student, which starts at `latents`."""
        assert roles.critic is not None
        end = self.end_level(step)
        sample = self.sample(roles, batch, step, latents)
        with torch.no_grad():
            noisy, sigma, _, _ = self.noise_further(batch, sample.detach(), end, "dmd", step)
            real = guided_velocity(roles.teacher, noisy, sigma, batch.condition, self.guidance_scale)
            fake = roles.critic(noisy, sigma, batch.condition)
            target_level = levels(end, noisy)
            distance = (sample - euler_step(noisy, real, sigma, target_level)).abs()
            norm = distance.flatten(1).mean(1).clamp(min=SMALLEST_NORM)
            gradient = broadcast((end - sigma) / norm, noisy) * (fake - real)
            goal = sample - gradient
        value = 0.5 * (sample - goal).square().mean()
        size = gradient.abs().mean()
        return Loss(value, {"dmd": value.detach(), "dmd_gradient": size})

    def critic_loss(self, roles: Roles, batch: Batch, step: int, latents: torch.Tensor | None = None) -> Loss:
        """The loss of the critic on samples of step `step` (from 1).

        Args:
            latents: the student's state at the start of that step; None rolls it out from noise.
        """
        assert roles.critic is not None
        with torch.no_grad():
            if self.settings.form == "tdm" and self.settings.critic_target == "rollout":
                first, start = (0, None) if latents is None else (step - 1, latents)
                sample, end = self.rollout(roles, batch, first, self.num_steps, start), 0.0
                sample = batch.condition.hold(sample)
            else:
                start = self.rollout(roles, batch, 0, step - 1) if latents is None else latents
                sample, end = self.sample(roles, batch, step, start), self.end_level(step)
            noisy, sigma, noise, spread = self.noise_further(batch, sample, end, "critic", step)
            ratio = broadcast(spread / sigma, noisy)
            # (t / s) v*, without the division by t that is near zero next to s_1.
            target = (noise - ratio * noisy) / broadcast(1 - sigma, noisy)
            target = batch.condition.still(target)
        value = (ratio * roles.critic(noisy, sigma, batch.condition) - target).square().mean()
        return Loss(value, {"critic": value.detach()})


class DMD(Method):
    """Distribution matching on all steps; critic updates first, then one of the student, in turn."""

    trained_roles = ("student", "critic")

    def __init__(self, config: DistillConfig, flow_shift: float, boundary: float | None = None) -> None:
        super().__init__(config, flow_shift, boundary)
        knots = knots_of(config.model.sigmas)
        self.matching = DistributionMatching(knots, flow_shift, self.guidance_scale, config.dmd, boundary)

    @property
    def provides(self) -> tuple[str, ...]:
        return ("few-step",)

    def round_length(self, role: str) -> int:
        return self.matching.num_steps

    def updates(self, step: int) -> tuple[str, ...]:
        cycle = self.config.dmd.critic_updates + 1
        return ("student",) if step % cycle == cycle - 1 else ("critic",)

    def loss(self, role: str, roles: Roles, batch: Batch, step: int) -> Loss:
        # Each of the student's steps in turn, counted separately for either role.
        rounds = step // (self.config.dmd.critic_updates + 1)
        target = 1 + (step - rounds if role == "critic" else rounds) % self.matching.num_steps
        if role == "critic":
            return self.matching.critic_loss(roles, batch, target)
        start = self.matching.rollout(roles, batch, 0, target - 1)
        return self.matching.student_loss(roles, batch, target, start)
