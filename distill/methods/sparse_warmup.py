r"""Sparse warm-up: the student learns to be the teacher while most of its attention is taken away.

Let v_T be the dense teacher and v_S the student, whose self-attention keeps a share r of the key blocks. With clean
latents x_0, noise e and a noise level s,

    x_s = (1 - s) x_0 + s e,
    velocity matching (default):  L = E w(s) mean |v_S(x_s, s) - v_T(x_s, s)|^2,
    flow matching:                L = E w(s) mean |v_S(x_s, s) - (e - x_0)|^2.

Velocity matching has its minimum, zero, at the teacher itself; flow matching at E[e - x_0 | x_s], so it also moves the
student towards the data. No guidance on either side: some prompts are replaced by the negative one, so the student can
still be guided afterwards. The weight w is 1, or s^2 + (1 - s)^2: that is what a squared error of TrigFlow's velocity
becomes in these terms.

Noise levels. log(y / (1 - y)) ~ N(m, d^2), then s = k y / (1 + (k - 1) y) with the shift k; or y uniform in [0, 1).

Alignment. With a_l the output of self-attention layer l, add

    weight * mean_l ( mean |a_l^S - a_l^T|^2 / mean |a_l^T|^2 ).

Schedule. The keep ratio falls linearly from its start to its target r over the first share of the steps, then stays.

Stopping rule. After the ramp the losses are averaged over windows of W iterations; training stops once a window's mean
lies less than a given share below that of the window before. It is short on purpose: at high sparsity the loss at a
single noise level keeps falling long after it has stopped to matter for whole trajectories (the high-sparsity trap),
and what is left is the task of the few-step training.
"""

from __future__ import annotations

from typing import Any

import torch

from ..config import DistillConfig
from ..flow import add_noise, broadcast, shift_time
from ..method import DRAWN_ROUND, Batch, Loss, Method, Roles


class SparseWarmup(Method):
    """The loss and the schedule above; see `SparseWarmupConfig`."""

    def __init__(self, config: DistillConfig, flow_shift: float, boundary: float | None = None) -> None:
        super().__init__(config, flow_shift, boundary)
        self.settings = config.sparse_warmup
        self._ramp_steps = round(self.settings.ramp_share * config.training.num_steps)
        self._window_sum, self._window_count = 0.0, 0
        self._window_before: float | None = None

    @property
    def provides(self) -> tuple[str, ...]:
        return ("sparse",)

    def round_length(self, role: str) -> int:
        return DRAWN_ROUND

    def keep_ratio(self, step: int) -> float:
        start, target = self.settings.start_keep_ratio, self.config.attention.keep_ratio
        if step >= self._ramp_steps:
            return target
        return start + (target - start) * step / self._ramp_steps

    def draw_sigma(self, batch: Batch) -> torch.Tensor:
        """Noise levels, float32 [B]."""
        if self.settings.sigma_distribution == "uniform":
            time = batch.draws.uniform("sigma")
        else:
            normal = batch.draws.normal("sigma", ())
            time = torch.sigmoid(self.settings.logit_mean + self.settings.logit_std * normal)
        return shift_time(time, self.shift)

    def loss(self, role: str, roles: Roles, batch: Batch, step: int) -> Loss:
        noise, sigma, condition = batch.noise("noise"), self.draw_sigma(batch), batch.condition
        latents = add_noise(batch.latents, noise, sigma)
        aligned = self.settings.alignment_weight > 0
        target = condition.still(noise - batch.latents)
        if self.settings.target == "velocity" or aligned:
            with torch.no_grad():
                teacher = roles.teacher(latents, sigma, condition)
            target = teacher if self.settings.target == "velocity" else target
        error = (roles.student(latents, sigma, condition) - target).square()
        if self.settings.weighting == "trigflow":
            error = error * broadcast(sigma**2 + (1 - sigma) ** 2, error)
        value = error.mean()
        parts = {"velocity": value.detach()}
        if aligned:
            alignment = self._alignment(roles)
            value = value + self.settings.alignment_weight * alignment
            parts["alignment"] = alignment.detach()
        return Loss(value, parts)

    def _alignment(self, roles: Roles) -> torch.Tensor:
        student, teacher = roles.features["student"].outputs, roles.features["teacher"].outputs
        if not student or sorted(student) != sorted(teacher):
            raise RuntimeError(f"alignment: got layers {sorted(student)} and {sorted(teacher)}; must be the same ones")
        pairs = [(student[layer].float(), teacher[layer].float()) for layer in sorted(student)]
        terms = [(s - t).square().mean() / t.square().mean().clamp(min=1e-12) for s, t in pairs]
        return torch.stack(terms).mean()

    def observe(self, step: int, losses: dict[str, float]) -> bool:
        settings = self.settings
        if settings.stop_slope == 0 or step < self._ramp_steps:
            return False
        self._window_sum += losses["student"]
        self._window_count += 1
        if self._window_count < settings.stop_window:
            return False
        mean, before = self._window_sum / self._window_count, self._window_before
        self._window_sum, self._window_count, self._window_before = 0.0, 0, mean
        return before is not None and before - mean < settings.stop_slope * before

    def state_dict(self) -> dict[str, Any]:
        return {"sum": self._window_sum, "count": self._window_count, "before": self._window_before}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._window_sum, self._window_count = float(state["sum"]), int(state["count"])
        self._window_before = None if state["before"] is None else float(state["before"])
