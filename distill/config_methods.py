"""Settings of the methods; every one has its mathematics in `methods/`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..core.config import require


def finite(value: float, low: float, high: float = math.inf) -> bool:
    """Whether a number is finite and from `low` to `high`."""
    return math.isfinite(value) and low <= value <= high


@dataclass(frozen=True)
class SparseWarmupConfig:
    """See methods/sparse_warmup.py.

    Attributes:
        target: "velocity" of the dense teacher, or "flow" (e - x_0).
        weighting: "trigflow" weights a noise level by s^2 + (1 - s)^2, as the released training does.
        sigma_distribution: "logit_normal" draws log(s / (1 - s)) from a normal distribution, then shifts; "uniform"
            draws the unshifted time from 0 to 1.
        logit_mean: of that normal distribution.
        logit_std: likewise.
        alignment_weight: of the squared distance of each self-attention's output to the teacher's; 0 for none.
        start_keep_ratio: where the keep ratio starts; it falls linearly to that of `attention`.
        ramp_share: share of the steps that the fall takes.
        stop_slope: stop when the mean loss of a window fell by less than this share against the window before; 0 never.
        stop_window: steps of a window; the first begins after the ramp.
    """

    target: Literal["velocity", "flow"] = "velocity"
    weighting: Literal["none", "trigflow"] = "none"
    sigma_distribution: Literal["logit_normal", "uniform"] = "logit_normal"
    logit_mean: float = -0.8
    logit_std: float = 1.6
    alignment_weight: float = 0.0
    start_keep_ratio: float = 0.5
    ramp_share: float = 0.3
    stop_slope: float = 0.0
    stop_window: int = 500

    def __post_init__(self) -> None:
        require(math.isfinite(self.logit_mean), "logit_mean", self.logit_mean, "a finite number")
        require(finite(self.logit_std, 1e-6), "logit_std", self.logit_std, "more than 0")
        require(finite(self.alignment_weight, 0), "alignment_weight", self.alignment_weight, "0 or more")
        require(0 < self.start_keep_ratio <= 1, "start_keep_ratio", self.start_keep_ratio, "above 0 and at most 1")
        for name in ("ramp_share", "stop_slope"):
            require(finite(getattr(self, name), 0, 1), name, getattr(self, name), "from 0 to 1")
        require(self.stop_window >= 1, "stop_window", self.stop_window, "at least 1")


@dataclass(frozen=True)
class PCMConfig:
    """See methods/pcm.py.

    Attributes:
        solver_steps: the teacher's step is one of so many, equal in unshifted time.
        target: which student gives the target, the "online" one without gradient or its average "ema".
        loss: "squared", or "pseudo_huber" sqrt(d^2 + c^2) - c.
        huber_c: its c.
        start: "random" within the phases, or "top" of a phase alone.
    """

    solver_steps: int = 48
    target: Literal["online", "ema"] = "online"
    loss: Literal["squared", "pseudo_huber"] = "squared"
    huber_c: float = 1e-3
    start: Literal["random", "top"] = "random"

    def __post_init__(self) -> None:
        require(self.solver_steps >= 1, "solver_steps", self.solver_steps, "at least 1")
        require(math.isfinite(self.huber_c) and self.huber_c > 0, "huber_c", self.huber_c, "more than 0")


@dataclass(frozen=True)
class DMDConfig:
    """See methods/dmd.py.

    Attributes:
        form: "dmd" scores the clean prediction of a step, "tdm" the state at the knot where the step ends.
        critic_target: what a "tdm" critic learns from: the student's states at the "knot", or its clean "rollout".
        critic_updates: updates of the critic before each one of the student.
        min_time: lowest unshifted time at which samples are scored.
        max_time: highest likewise.
        stochastic: the student's steps re-noise the clean prediction instead of following the velocity ("dmd" alone).
        noise_range: with two experts, "expert" scores a sample at the noise levels of the expert whose step made it,
            "whole" at all levels above the sample's. With one expert both are the same.
    """

    form: Literal["dmd", "tdm"] = "tdm"
    critic_target: Literal["knot", "rollout"] = "knot"
    critic_updates: int = 4
    min_time: float = 0.02
    max_time: float = 0.98
    stochastic: bool = False
    noise_range: Literal["expert", "whole"] = "expert"

    def __post_init__(self) -> None:
        require(self.critic_updates >= 1, "critic_updates", self.critic_updates, "at least 1")
        good = 0 < self.min_time < self.max_time < 1
        require(good, "min_time", (self.min_time, self.max_time), "above 0 and below max_time, which is below 1")
        free = not (self.stochastic and self.form == "tdm")
        require(free, "stochastic", self.stochastic, "false for form 'tdm', whose states lie on one path")


@dataclass(frozen=True)
class CrossDistillConfig:
    """See methods/crossdistill.py.

    Attributes:
        crossover: index of the knot at which the losses change; 0 is DMD alone, the number of steps is PCM alone.
        order: "trajectory_first" trains the noisier side by PCM, "reversed" the cleaner one.
        mode: "joint" has both losses in every update of the student, "staged" PCM first and then DMD.
        pcm_weight: of the PCM loss beside DMD's 1.
        staged_steps: iterations of PCM alone in the staged mode.
        staged_pcm_weight: of the PCM loss after them.
        coupling: what the steps below the crossover start from: the "student"'s own state there, the "teacher"'s, or
            noised "data" (the last two are ablations).
    """

    crossover: int = 1
    order: Literal["trajectory_first", "reversed"] = "trajectory_first"
    mode: Literal["joint", "staged"] = "joint"
    pcm_weight: float = 10.0
    staged_steps: int = 0
    staged_pcm_weight: float = 0.0
    coupling: Literal["student", "teacher", "data"] = "student"

    def __post_init__(self) -> None:
        require(self.crossover >= 0, "crossover", self.crossover, "0 or more")
        require(finite(self.pcm_weight, 1e-12), "pcm_weight", self.pcm_weight, "more than 0")
        require(finite(self.staged_pcm_weight, 0), "staged_pcm_weight", self.staged_pcm_weight, "0 or more")
        staged = self.mode == "staged"
        fits = self.staged_steps >= 1 if staged else self.staged_steps == 0
        require(fits, "staged_steps", self.staged_steps, "at least 1 in the staged mode, else 0")
        require(staged or self.staged_pcm_weight == 0, "staged_pcm_weight", self.staged_pcm_weight, "0 unless staged")
        plain = self.coupling == "student" or self.order == "trajectory_first"
        require(plain, "coupling", self.coupling, "'student' in the reversed order, which starts from noise")
