"""A diffusers scheduler for few-step students: the exact noise levels they were trained at, and nothing else.

A student only knows the noise levels of its training. They are therefore the whole configuration: they are never
derived from a step count, and no flow shift is applied to them (published lists are already shifted).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils import BaseOutput
from diffusers.utils.torch_utils import randn_tensor

from ..core.config import require


def check_sigmas(sigmas: tuple[float, ...] | list[float], field: str = "sigmas") -> None:
    """Raises ConfigError unless `sigmas` is non-empty, strictly descending and within (0, 1]."""
    descending = all(high > low for high, low in pairwise(sigmas))
    require(
        len(sigmas) > 0 and all(0 < s <= 1 for s in sigmas) and descending,
        field,
        tuple(sigmas),
        "one or more strictly descending numbers in (0, 1]; the final 0 is added by itself",
    )


@dataclass
class FewStepSchedulerOutput(BaseOutput):
    """What `step` returns: the next sample and the clean sample predicted on the way, both of the input's shape."""

    prev_sample: torch.Tensor
    pred_original_sample: torch.Tensor


class FewStepScheduler(SchedulerMixin, ConfigMixin):
    """Integrates a flow model over a fixed list of noise levels.

    With x_s = (1-s) x0 + s eps and the model predicting v = eps - x0, the clean sample is x0 = x_s - s v.
    Deterministic (Euler): x_s' = x_s + (s'-s) v. Stochastic: x_s' = (1-s') x0 + s' eps with fresh noise.

    Args:
        sigmas: noise levels, strictly descending, in (0, 1]; the final 0 is appended.
        stochastic: fresh noise at every level instead of an Euler step.
        num_train_timesteps: the time the network is given is this many times sigma.
    """

    _compatibles: ClassVar[list[str]] = []
    order = 1

    @register_to_config
    def __init__(
        self,
        sigmas: tuple[float, ...] = (1.0, 0.9375, 0.8333, 0.625),
        stochastic: bool = False,
        num_train_timesteps: int = 1000,
    ) -> None:
        check_sigmas(sigmas)
        self._step_index: int | None = None
        self._begin_index: int | None = None
        self._generator: torch.Generator | None = None
        self.set_timesteps(len(sigmas))

    @property
    def init_noise_sigma(self) -> float:
        """Scale of the initial noise; pipelines multiply by it."""
        return 1.0

    @property
    def step_index(self) -> int | None:
        """Index of the step to come; None before the first."""
        return self._step_index

    @property
    def begin_index(self) -> int | None:
        """Index of the first step, when the pipeline has set one."""
        return self._begin_index

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Starts from this index instead of from the one that the first time is found at."""
        self._begin_index = begin_index

    def set_generator(self, generator: torch.Generator | None) -> None:
        """Source of the fresh noise when `step` is called without a generator, as the Wan pipelines do."""
        self._generator = generator

    def set_timesteps(self, num_inference_steps: int | None = None, device: torch.device | str | None = None) -> None:
        """Prepares a run.

        Raises:
            ConfigError: `num_inference_steps` is not the number of levels of the configuration.
        """
        levels = [float(s) for s in self.config.sigmas]
        require(
            num_inference_steps in (None, len(levels)),
            "num_inference_steps",
            num_inference_steps,
            f"{len(levels)}, the number of noise levels that this few-step model was trained at",
        )
        self.num_inference_steps = len(levels)
        self.sigmas = torch.tensor([*levels, 0.0], dtype=torch.float32)
        times = [s * self.config.num_train_timesteps for s in levels]
        self.timesteps = torch.tensor(times, dtype=torch.float32, device=device)
        self._step_index = None
        self._begin_index = None

    def index_for_timestep(self, timestep: torch.Tensor | float) -> int:
        """Index of the level nearest to a time in [0, num_train_timesteps]."""
        return int((self.timesteps.cpu() - float(timestep)).abs().argmin())

    def scale_model_input(self, sample: torch.Tensor, timestep: torch.Tensor | float | None = None) -> torch.Tensor:
        """Flow models take the sample as it is."""
        return sample

    def step(
        self,
        model_output: torch.Tensor,
        timestep: torch.Tensor | float,
        sample: torch.Tensor,
        generator: torch.Generator | None = None,
        return_dict: bool = True,
    ) -> FewStepSchedulerOutput | tuple[torch.Tensor]:
        """One step, computed in float32 and returned in the sample's dtype.

        Args:
            model_output: predicted velocity, of the sample's shape.
            timestep: the time given to the network; only used to find the first index.
            sample: x_s, any shape.
            generator: noise of the stochastic rule; else the one of `set_generator`, else torch's global one.
            return_dict: False for a plain one-tuple.
        """
        if self._step_index is None:
            self._step_index = self._begin_index if self._begin_index is not None else self.index_for_timestep(timestep)
        sigma, next_sigma = self.sigmas[self._step_index].item(), self.sigmas[self._step_index + 1].item()
        state, velocity = sample.float(), model_output.float()
        clean = state - sigma * velocity
        if self.config.stochastic and next_sigma > 0:
            source = generator if generator is not None else self._generator
            noise = randn_tensor(sample.shape, generator=source, device=sample.device, dtype=torch.float32)
            following = (1 - next_sigma) * clean + next_sigma * noise
        else:
            following = state + (next_sigma - sigma) * velocity
        self._step_index += 1
        following = following.to(sample.dtype)
        if not return_dict:
            return (following,)
        return FewStepSchedulerOutput(prev_sample=following, pred_original_sample=clean.to(sample.dtype))

    def add_noise(self, original_samples: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """(1-s) x0 + s eps with s = timesteps / num_train_timesteps, one time per batch entry ([B])."""
        sigma = (timesteps.float() / self.config.num_train_timesteps).to(original_samples.device)
        sigma = sigma.reshape(-1, *[1] * (original_samples.ndim - 1))
        mixed = (1 - sigma) * original_samples.float() + sigma * noise.float()
        return mixed.to(original_samples.dtype)

    def __len__(self) -> int:
        return int(self.config.num_train_timesteps)
