r"""CrossDistill: the trajectory above a crossover, the distribution below it.

With the student's knots k_0 > ... > k_N = 0 and a crossover c = k_j:

    steps 1 ... j    (noise above c)  are trained by phased consistency, methods/pcm.py, on the phases above c;
    steps j+1 ... N  (noise below c)  by distribution matching, methods/dmd.py, from the student's own state at c.

    L = DMD(step n)  +  lambda PCM(phases above c),      n = j + 1 ... N in turn.

High noise decides what is in the clip, and matching trajectories there keeps the teacher's variety; low noise decides
how it looks, and matching distributions there keeps it sharp. The coupling is that the lower steps start from x_c as
the student makes it: the state at c is rolled out from noise by the student's steps 1 ... j, without gradient, so
steps 1 to j learn from PCM alone and the later ones from DMD alone.

j = 0 is DMD on all steps, j = N is PCM on all phases; then neither roll-out nor critic is there.

Joint (as released): both terms in every update of the student. Staged: PCM alone for some iterations, then DMD, with
PCM at a weight of its own (0 for none). Ablations: the reversed order has DMD on the steps 1 ... j and PCM on the
phases below c; the coupling "teacher" starts the lower steps from the guided teacher's state at c, the coupling "data"
from (1 - c) x_0 + c e, so that they never see what the upper steps make.

The critic is trained between updates of the student, on samples of the same steps. Source: arXiv 2609.14725.
"""

from __future__ import annotations

import torch

from ..config import DistillConfig
from ..flow import add_noise, levels, shift_time, solve, unshift_time
from ..method import DRAWN_ROUND, Batch, Loss, Method, Roles
from .dmd import DistributionMatching
from .pcm import PhasedConsistency, knots_of


class CrossDistill(Method):
    """Both losses on their side of the crossover; see `CrossDistillConfig`."""

    def __init__(self, config: DistillConfig, flow_shift: float, boundary: float | None = None) -> None:
        super().__init__(config, flow_shift, boundary)
        self.settings = config.crossdistill
        self.knots = knots_of(config.model.sigmas)
        count, crossover = len(self.knots) - 1, self.settings.crossover
        upper, lower = range(0, crossover), range(crossover, count)
        pcm_phases, dmd_phases = (upper, lower) if self.settings.order == "trajectory_first" else (lower, upper)
        guidance = self.guidance_scale
        self.consistency = None
        if len(pcm_phases) > 0:
            self.consistency = PhasedConsistency(self.knots, pcm_phases, flow_shift, guidance, config.pcm)
        self.matching = None
        if len(dmd_phases) > 0:
            self.matching = DistributionMatching(self.knots, flow_shift, guidance, config.dmd, boundary)
        # Step n (from 1) runs through phase n - 1.
        self.steps = [phase + 1 for phase in dmd_phases]
        self.joins_losses = self.consistency is not None and self.matching is not None
        self.trained_roles = ("student",) if self.matching is None else ("student", "critic")

    @property
    def provides(self) -> tuple[str, ...]:
        return ("few-step",)

    def updates(self, step: int) -> tuple[str, ...]:
        if self.matching is None or step < self.settings.staged_steps:
            return ("student",)
        cycle = self.config.dmd.critic_updates + 1
        return ("student",) if self._since_stage(step) % cycle == cycle - 1 else ("critic",)

    def round_length(self, role: str) -> int:
        drawn = role == "student" and self.consistency is not None
        return self.settings.staged_steps + max(DRAWN_ROUND if drawn else 1, len(self.steps))

    def _since_stage(self, step: int) -> int:
        return step - self.settings.staged_steps

    def pcm_weight(self, step: int) -> float:
        """Weight of the PCM loss in iteration `step`; 0 where it has none."""
        if self.consistency is None:
            return 0.0
        if self.matching is None:
            return 1.0
        if self.settings.mode == "joint":
            return self.settings.pcm_weight
        return 1.0 if step < self.settings.staged_steps else self.settings.staged_pcm_weight

    def dmd_step(self, role: str, step: int) -> int:
        """Which of the student's steps (from 1) iteration `step` trains by distribution matching: each in turn."""
        since = self._since_stage(step)
        rounds = since // (self.config.dmd.critic_updates + 1)
        return self.steps[(since - rounds if role == "critic" else rounds) % len(self.steps)]

    def loss(self, role: str, roles: Roles, batch: Batch, step: int) -> Loss:
        if role == "critic":
            assert self.matching is not None
            index = self.dmd_step(role, step)
            return self.matching.critic_loss(roles, batch, index, self._start(roles, batch, index))
        total: torch.Tensor | None = None
        parts: dict[str, torch.Tensor] = {}
        # The matching term goes first: all of its roll-out is done before the passes that keep activations.
        if self.matching is not None and step >= self.settings.staged_steps:
            index = self.dmd_step(role, step)
            matched = self.matching.student_loss(roles, batch, index, self._start(roles, batch, index))
            total = matched.value
            parts |= matched.parts
        if (weight := self.pcm_weight(step)) > 0:
            assert self.consistency is not None
            value = self.consistency(roles, batch)
            total = weight * value if total is None else total + weight * value
            parts["pcm"] = value.detach()
        assert total is not None
        return Loss(total, parts)

    def _start(self, roles: Roles, batch: Batch, index: int) -> torch.Tensor:
        """State at the start of step `index` (from 1), without gradient."""
        assert self.matching is not None
        coupling, crossover = self.settings.coupling, self.settings.crossover
        if coupling == "student" or crossover == 0:
            return self.matching.rollout(roles, batch, 0, index - 1)
        noise, level = batch.noise("dmd-start"), self.knots[crossover]
        if coupling == "data":
            state = add_noise(batch.latents, noise, levels(level, noise))
        else:
            high, low = (unshift_time(s, self.shift) for s in (self.knots[0], level))
            pieces = max(1, round((high - low) * self.config.pcm.solver_steps))
            times = [high + (low - high) * i / pieces for i in range(pieces + 1)]
            sigmas = [shift_time(time, self.shift) for time in times]
            state = solve(roles.teacher, noise, sigmas, batch.condition, self.guidance_scale)
        return self.matching.rollout(roles, batch, crossover, index - 1, state)
