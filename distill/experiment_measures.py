"""What the experiments measure: whole clips, losses by noise level, and where on the noise axis an error comes from."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from ..evaluation.distribution import SampleStates, relative_distances, sliced_wasserstein
from ..evaluation.run import EvaluationResult, compare, evaluate
from ..pipelines.loading import load
from ..pipelines.video_io import write_atomically
from ..tiny.dataset import held_out_captions
from .config import DistillConfig
from .data import padded_embeds
from .denoiser import Denoiser, as_field, denoiser_of, scheduler_shift
from .experiments import Scale
from .flow import (
    Condition,
    VelocityField,
    euler_step,
    guided_velocity,
    levels,
    shift_time,
    solve,
    unshift_time,
)
from .prepare import Encoder
from .run import DEFAULT_SEQUENCE_LENGTH, _student, install_attention, stock_pipeline
from .run_state import read_state
from .samples import decode_latents, sample_latents, uniform_sigmas
from .trainable import choose_trainable, copy_values

NUM_BINS = 10
NUM_INTERVALS = 3
BATCH = 8
FIRST_NOISE_SEED = 500_000
_LEVEL_TOLERANCE = 1e-9


class Judge:
    """Measures students against one teacher, always over the same captions and the same noise.

    Teacher and students are sampled by Euler's rule; the teacher's grid is uniform in unshifted time and has the
    students' knots in it, so that states at the crossover are the teacher's own.

    Args:
        model: the teacher.
        scale: how many clips.
        folder: where the teacher's latents are kept.
        sigmas: knots of the few-step students.
        device: "cpu", or None for the best one.
    """

    def __init__(
        self, model: str, scale: Scale, folder: Path, sigmas: Sequence[float], *, device: str | None = None
    ) -> None:
        from ..core.devices import pick_device

        self.scale, self.device, self._folder = scale, pick_device(device), folder
        self.pipe = stock_pipeline(model, torch.float32)
        self.pipe.to(self.device)
        self.shift = scheduler_shift(self.pipe)
        self.knots = (*sigmas, 0.0)
        teacher = denoiser_of(self.pipe)
        self.teacher = as_field(teacher.requires_grad_(False).eval())
        defaults = self.pipe.videospark_defaults
        self.guidance = float(defaults["guidance_scale"])
        self._length = int(defaults.get("max_sequence_length", DEFAULT_SEQUENCE_LENGTH))
        self._encoder = Encoder(self.pipe, self._length)
        self._embeds: dict[str, torch.Tensor] = {}
        stride = self.pipe.vae_scale_factor_spatial
        frames = (defaults["num_frames"] - 1) // self.pipe.vae_scale_factor_temporal + 1
        height, width = defaults["height"] // stride, defaults["width"] // stride
        self.shape = (self.pipe.vae.config.z_dim, frames, height, width)
        grid = set(uniform_sigmas(scale.solver_steps, self.shift)) | set(self.knots)
        self.grid = tuple(sorted(grid, reverse=True))
        self._teacher_result: EvaluationResult | None = None
        self._states: list[tuple[float, torch.Tensor]] | None = None

    def condition(self, prompts: Sequence[str]) -> Condition:
        """The prompts as the models want them."""
        for prompt in (*prompts, ""):
            if prompt not in self._embeds:
                self._embeds[prompt] = padded_embeds([self._encoder.prompt(prompt)], self._length).to(self.device)
        return Condition(torch.cat([self._embeds[p] for p in prompts]), self._embeds[""])

    def noise(self, seeds: Sequence[int]) -> torch.Tensor:
        """Of a clip's seed, [B, C, F, h, w]."""
        rows = [torch.randn(self.shape, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
        return torch.stack(rows).to(self.device)

    def field_of(self, student: Path) -> VelocityField:
        """The velocity of a saved student with its recipe."""
        pipe = load(student, device=self.device, dtype=torch.float32)
        network = denoiser_of(pipe)
        return as_field(network.requires_grad_(False).eval())

    def evaluate(
        self, field: VelocityField, sigmas: Sequence[float], guidance_scale: float = 1.0
    ) -> tuple[EvaluationResult, float]:
        """Accuracy, diversity and samples of a model, and the median of its denoising seconds per clip."""
        states, seconds = SampleStates(self.knots[1]), []

        def make(prompts: list[str], seeds: list[int]) -> list[np.ndarray]:
            def visit(level: float, state: torch.Tensor) -> None:
                if abs(level - self.knots[1]) < _LEVEL_TOLERANCE:
                    states.on_the_way.append(state.cpu())

            condition, noise = self.condition(prompts), self.noise(seeds)
            begin = time.perf_counter()
            latents = sample_latents(
                field, noise, tuple(sigmas), condition, guidance_scale=guidance_scale, visit=visit
            ).cpu()
            seconds.append((time.perf_counter() - begin) / len(prompts))
            states.final.append(latents)
            return decode_latents(self.pipe.vae, self.pipe.video_processor, latents)

        result = self._evaluate(make, states)
        return result, float(np.median(seconds))

    def _evaluate(self, make: Callable[[list[str], list[int]], list[np.ndarray]], states: SampleStates) -> Any:
        return evaluate(
            make,
            num_captions=self.scale.captions,
            diversity_captions=min(self.scale.diversity_captions, self.scale.captions),
            diversity_seeds=self.scale.diversity_seeds,
            batch_size=BATCH,
            states=states,
        )

    def teacher_result(self) -> EvaluationResult:
        """Of the guided teacher; its latents are made once and kept in the folder."""
        if self._teacher_result is not None:
            return self._teacher_result
        file = self._folder / "teacher.safetensors"
        if not file.is_file():
            made = SampleStates(self.knots[1])

            def sample(prompts: list[str], seeds: list[int]) -> list[np.ndarray]:
                def visit(level: float, state: torch.Tensor) -> None:
                    if abs(level - self.knots[1]) < _LEVEL_TOLERANCE:
                        made.on_the_way.append(state.cpu())

                condition, noise = self.condition(prompts), self.noise(seeds)
                latents = sample_latents(
                    self.teacher, noise, self.grid, condition, guidance_scale=self.guidance, visit=visit
                ).cpu()
                made.final.append(latents)
                return decode_latents(self.pipe.vae, self.pipe.video_processor, latents)

            self._teacher_result = self._evaluate(sample, made)
            tensors = {"final": torch.cat(made.final), "on_the_way": torch.cat(made.on_the_way)}
            write_atomically(file, lambda partial: save_file(tensors, partial))
            return self._teacher_result
        kept = load_file(file)
        states, place = SampleStates(self.knots[1], [kept["final"]], [kept["on_the_way"]]), [0]

        def reuse(prompts: list[str], seeds: list[int]) -> list[np.ndarray]:
            start = place[0]
            place[0] += len(prompts)
            return decode_latents(self.pipe.vae, self.pipe.video_processor, kept["final"][start : place[0]])

        self._teacher_result = self._evaluate(reuse, states)
        return self._teacher_result

    def judge_student(self, student: Path) -> dict[str, Any]:
        """Everything about a few-step student as plain data."""
        result, seconds = self.evaluate(self.field_of(student), self.knots)
        return {**result.to_dict(), **compare(result, self.teacher_result()), "denoise_seconds_per_clip": seconds}

    def _local_inputs(self) -> tuple[torch.Tensor, Condition]:
        captions = [c.text for _, c in held_out_captions(self.scale.local_clips)]
        seeds = range(FIRST_NOISE_SEED, FIRST_NOISE_SEED + len(captions))
        return self.noise(seeds), self.condition(captions)

    def teacher_states(self) -> list[tuple[float, torch.Tensor]]:
        """Noise level and state of the guided teacher's trajectories at the middle of each bin, noisiest first."""
        if self._states is None:
            noise, condition = self._local_inputs()
            middles = [shift_time((i + 0.5) / NUM_BINS, self.shift) for i in reversed(range(NUM_BINS))]
            grid = tuple(sorted(set(self.grid) | set(middles), reverse=True))
            found: list[tuple[float, torch.Tensor]] = []

            def visit(level: float, state: torch.Tensor) -> None:
                if level in middles:
                    found.append((level, state))

            sample_latents(self.teacher, noise, grid, condition, guidance_scale=self.guidance, visit=visit)
            self._states = found
        return self._states

    @torch.no_grad()
    def local_losses(self, field: VelocityField) -> list[float]:
        """Mean squared distance of the unguided velocities on the teacher's states, by bin, noisiest first."""
        _, condition = self._local_inputs()
        losses = []
        for level, state in self.teacher_states():
            sigma = levels(level, state)
            ours, theirs = (f(state, sigma, condition) for f in (field, self.teacher))
            losses.append(float((ours - theirs).square().mean()))
        return losses

    @torch.no_grad()
    def many_step_end(self, field: VelocityField, taken: Sequence[bool]) -> torch.Tensor:
        """End of trajectories on which `field` is asked in the intervals `taken` and the teacher in the others.

        Intervals are equal in unshifted time, noisiest first; both are guided.
        """
        noise, condition = self._local_inputs()

        def mixed(latents: torch.Tensor, sigma: torch.Tensor, given: Condition) -> torch.Tensor:
            time_left = unshift_time(float(sigma[0]), self.shift)
            # A step belongs to the interval that it runs through, not to the one that ends where it starts.
            place = min(int((1 - time_left) * len(taken) + 1e-4), len(taken) - 1)
            return (field if taken[place] else self.teacher)(latents, sigma, given)

        grid = uniform_sigmas(self.scale.solver_steps, self.shift)
        return solve(mixed, noise, grid, condition, self.guidance)

    @torch.no_grad()
    def few_step_end(self, field: VelocityField, taken: Sequence[bool]) -> torch.Tensor:
        """The same for a few-step student, whose intervals are its steps; the teacher takes many steps in its own."""
        latents, condition = self._local_inputs()
        for (start, end), ours in zip(pairwise(self.knots), taken, strict=True):
            if ours:
                sigma = levels(start, latents)
                velocity = guided_velocity(field, latents, sigma, condition, 1.0)
                latents = euler_step(latents, velocity, sigma, levels(end, latents))
            else:
                between = (start, *(s for s in self.grid if end < s < start), end)
                latents = solve(self.teacher, latents, between, condition, self.guidance)
        return latents

    def origins(
        self, end: Callable[[VelocityField, Sequence[bool]], torch.Tensor], field: VelocityField, count: int
    ) -> dict[str, Any]:
        """Terminal error, and how it splits over intervals.

        Returns:
            `terminal`: same-seed distance of the student's ends to the teacher's, relative to the teacher's norm;
            `sliced_wasserstein` of both; `swap`: the distance with the student in one interval alone; `restore`: by how
            much it falls with the teacher in that interval alone.
        """
        reference = _rows(end(field, [False] * count))
        ours = _rows(end(field, [True] * count))
        terminal = float(relative_distances(ours, reference).mean())
        swap, restore = [], []
        for place in range(count):
            alone = [i == place for i in range(count)]
            swap.append(float(relative_distances(_rows(end(field, alone)), reference).mean()))
            others = [not taken for taken in alone]
            restore.append(terminal - float(relative_distances(_rows(end(field, others)), reference).mean()))
        return {
            "terminal": terminal,
            "sliced_wasserstein": sliced_wasserstein(ours, reference),
            "swap": swap,
            "restore": restore,
        }

    def trap_point(self, field: VelocityField) -> dict[str, Any]:
        """Local losses and terminal error of a many-step student."""
        ours, reference = (_rows(self.many_step_end(field, [t] * NUM_INTERVALS)) for t in (True, False))
        return {
            "local": self.local_losses(field),
            "terminal": float(relative_distances(ours, reference).mean()),
            "sliced_wasserstein": sliced_wasserstein(ours, reference),
        }


def _rows(latents: torch.Tensor) -> np.ndarray:
    rows: np.ndarray = latents.double().cpu().flatten(1).numpy()
    return rows


def student_at(config: DistillConfig, checkpoint: Path, device: torch.device | str) -> VelocityField:
    """The student as it was at a checkpoint, averaged where the run averages."""
    pipe = stock_pipeline(config.model.teacher, torch.float32)
    network, start = _student(config, pipe)
    network.to(device)
    install_attention(config, network, start.branches)
    parameters = choose_trainable(network, config.training, config.attention)
    tensors, _ = read_state(checkpoint)
    copy_values(parameters, tensors["average"] if "average" in tensors else tensors["student"])
    return _frozen(network)


def _frozen(network: Denoiser) -> VelocityField:
    return as_field(network.requires_grad_(False).eval())
