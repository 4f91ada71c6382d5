"""One loop for all methods, on accelerate.

An iteration updates the roles that the method names, one after the other: draw micro-batches, add up the gradients,
clip, step, average. Whatever is random in it follows from the seed and the position of the sample, so a run that goes
on from a checkpoint repeats what it would have done, bit for bit on a CPU.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import nn

from ..attention.processors import InstalledAttention
from ..core.config import ConfigError
from .checkpoints import newest_checkpoint, prune_checkpoints, remove_leftovers, write_checkpoint
from .config import DistillConfig, TrainingConfig
from .data import BatchReader
from .denoiser import Denoiser, as_averaged_field, as_field
from .flow import VelocityField
from .method import Loss, Method, Roles
from .records import Progress, RunRecords
from .run_state import random_state, read_state, restore_random_state, write_state
from .samples import SampleSheets
from .sharding import Sharding, exchanged, gathered
from .trainable import (
    WeightAverage,
    build_optimizers,
    copy_values,
    describe,
    learning_rate_factor,
    load_optimizer_tensors,
    optimizer_tensors,
    without_gradient,
)

CHECKPOINTS = "checkpoints"


@dataclass
class TrainedRole:
    """A network that learns.

    Attributes:
        network: the bare network; already split where it is to be.
        parameters: those that learn, by name.
        learning_rate: of AdamW.
        module: the network as accelerate wraps it.
        optimizers: by kind.
        base_rates: learning rate of each before its schedule.
        updates: how many were done.
        unseen: tensors that have had no gradient yet since the start.
    """

    network: Denoiser
    parameters: dict[str, nn.Parameter]
    learning_rate: float
    module: nn.Module = field(init=False)
    optimizers: dict[str, Any] = field(init=False)
    base_rates: dict[str, float] = field(init=False)
    updates: int = 0
    unseen: set[str] = field(init=False)

    def prepare(self, accelerator: Accelerator, training: TrainingConfig, *, sharded: bool) -> None:
        """Makes the optimizers and hands everything to accelerate; a split network needs its precision alone."""
        self.optimizers = build_optimizers(self.parameters, training, self.learning_rate)
        self.base_rates = {name: o.param_groups[0]["lr"] for name, o in self.optimizers.items()}
        if sharded:
            self.module = accelerator.prepare_model(self.network, device_placement=False, evaluation_mode=True)
            prepared = [accelerator.prepare(optimizer) for optimizer in self.optimizers.values()]
        else:
            self.module, *prepared = accelerator.prepare(self.network, *self.optimizers.values())
        self.optimizers = dict(zip(self.optimizers, prepared, strict=True))
        self.unseen = set(self.parameters)


@dataclass
class TrainingResult:
    """How a run ended.

    Attributes:
        step: iterations done.
        reason: "num_steps", or "stop rule".
    """

    step: int
    reason: str


class Trainer:
    """Trains the roles of a method.

    Args:
        config: the run.
        method: losses and schedule.
        accelerator: of this process.
        teacher: dense and fixed; already split where it is to be.
        trained: by role.
        attention: of the student, by expert, where a sparse one is installed.
        batches: of this process.
        folder: of the run.
        features: recorders for the method, by "student" and "teacher".
        sheets: pictures while it trains; None for none. With `sharding` every process draws, as networks run together.
        sharding: where the networks are split over the processes.
    """

    def __init__(
        self,
        config: DistillConfig,
        method: Method,
        accelerator: Accelerator,
        *,
        teacher: Denoiser,
        trained: Mapping[str, TrainedRole],
        attention: Mapping[str, InstalledAttention],
        batches: BatchReader,
        folder: Path,
        features: Mapping[str, Any] | None = None,
        sheets: SampleSheets | None = None,
        sharding: Sharding | None = None,
    ) -> None:
        if tuple(trained) != method.trained_roles:
            raise ValueError(f"trained: got {tuple(trained)}; must be {method.trained_roles}")
        self.config, self.method, self.accelerator = config, method, accelerator
        self.teacher, self.trained, self.attention = teacher, dict(trained), dict(attention)
        self.batches, self.folder, self.sheets, self.sharding = batches, folder, sheets, sharding
        self.step = 0
        self.finished: str | None = None
        self._started: dict[str, int] = {}
        for role in self.trained.values():
            role.prepare(accelerator, config.training, sharded=sharding is not None)
        if sharding is None:
            teacher.to(accelerator.device)
        teacher.requires_grad_(False).eval()
        student = self.trained["student"]
        decay = config.training.ema_decay
        self.average = WeightAverage(student.parameters, decay) if decay > 0 else None
        self.roles = Roles(
            student=as_field(student.module),
            teacher=self._in_precision(as_field(teacher)),
            critic=as_field(self.trained["critic"].module) if "critic" in self.trained else None,
            average=self._averaged_field(),
            features=features or {},
        )

    def _averaged_field(self) -> VelocityField | None:
        if self.average is None:
            return None
        student, values = self.trained["student"], self.average.values
        if self.sharding is None:
            return as_averaged_field(student.network, values)
        plain = as_field(student.module)

        def field(*arguments: Any) -> torch.Tensor:
            with torch.no_grad(), exchanged(student.parameters, values):
                return plain(*arguments)

        return field

    def _in_precision(self, plain: Any) -> Any:
        def run(*arguments: Any) -> torch.Tensor:
            with self.accelerator.autocast():
                out: torch.Tensor = plain(*arguments)
            return out.float()

        return run

    def _sampling_field(self) -> Any:
        """What would be saved now: the averaged student, or the student, bare of what makes processes wait."""
        if self.roles.average is not None:
            return self._in_precision(self.roles.average)
        return self._in_precision(as_field(self.trained["student"].network))

    def run(self, *, resume: bool = False) -> TrainingResult:
        """Trains to the end.

        Args:
            resume: go on from the newest good checkpoint, or start where there is none. Without it a folder that holds
                checkpoints is refused.

        Raises:
            ConfigError: the folder belongs to another run, or holds checkpoints and `resume` is false.
            FloatingPointError: a loss or a gradient is not finite; names step and role.
            RuntimeError: a trained tensor gets no gradient.
        """
        self._begin(resume)
        training, main = self.config.training, self.accelerator.is_main_process
        records = RunRecords(self.folder, self.step) if main else None
        progress = Progress(training.num_steps, self.step, enabled=main)
        try:
            while self.step < training.num_steps and self.finished is None:
                values = self._iterate()
                self.step += 1
                last = self.step == training.num_steps or self.finished is not None
                if records is not None and (self.step % training.log_every == 0 or last or self.step == 1):
                    records.write(self.step, values)
                progress.advance(", ".join(f"{k} {v:.4g}" for k, v in values.items() if k.startswith("loss/")))
                if self.step % training.checkpoint_every == 0 or last:
                    self.save()
                    if records is not None:
                        records.draw()
                if self.sheets is not None and self.sheets.due(self.step, last):
                    self.sheets.draw(self._sampling_field(), self.step)
        finally:
            progress.close()
            self.batches.close()
            if records is not None:
                records.close()
        return TrainingResult(self.step, self.finished or "num_steps")

    def _begin(self, resume: bool) -> None:
        root = self.folder / CHECKPOINTS
        if self.accelerator.is_main_process:
            remove_leftovers(root)
        self.accelerator.wait_for_everyone()
        newest = newest_checkpoint(root)
        if newest is None:
            return
        if not resume:
            raise ConfigError(f"output: got {str(self.folder)!r}, which holds {newest.name}; must be resumed, or empty")
        self.load(newest)

    def _iterate(self) -> dict[str, float]:
        """One iteration; returns what is logged of it."""
        keep_ratio = self.method.keep_ratio(self.step)
        for installed in self.attention.values():
            installed.set_keep_ratio(keep_ratio)
        values: dict[str, float] = {}
        losses = {}
        for name in self.method.updates(self.step):
            losses[name], parts = self._update(name)
            values |= {f"loss/{name}": losses[name]} | parts
        if self.attention:
            values["keep_ratio"] = keep_ratio
        if self.method.observe(self.step, losses):
            self.finished = "stop rule"
        return values

    def _update(self, name: str) -> tuple[float, dict[str, float]]:
        role, training = self.trained[name], self.config.training
        micro_batches = training.gradient_accumulation
        totals: dict[str, torch.Tensor] = {}
        with self._learning(name):
            for micro in range(micro_batches):
                batch = self.batches.batch(self.step, micro)
                last = micro == micro_batches - 1
                with contextlib.nullcontext() if last else self.accelerator.no_sync(role.module):
                    loss: Loss = self.method.loss(name, self.roles, batch, self.step)
                    self.accelerator.backward(loss.value / micro_batches)
                for key, value in {"loss": loss.value.detach(), **loss.parts}.items():
                    totals[key] = totals.get(key, torch.zeros_like(value)) + value / micro_batches
        means = {k: float(self.accelerator.reduce(v.float(), "mean")) for k, v in totals.items()}  # type: ignore[arg-type]
        self._check_gradients(name, role)
        size = self._clip(list(role.parameters.values()), training.max_grad_norm or math.inf)
        norm = math.nan if size is None else float(size)
        if not (math.isfinite(means["loss"]) and math.isfinite(norm)):
            text = f"loss {means['loss']}, gradient norm {norm}"
            raise FloatingPointError(f"step {self.step}, {name}: {text}; must be finite")
        factor = learning_rate_factor(training, self.step, role.updates)
        for kind, optimizer in role.optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = role.base_rates[kind] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        if name == "student" and self.average is not None:
            self.average.update(role.parameters, role.updates)
        role.updates += 1
        mean_loss = means.pop("loss")
        parts = {f"{name}/{key}": part for key, part in means.items()}
        return mean_loss, parts | {f"{name}/gradient_norm": norm, f"{name}/learning_rate_factor": factor}

    def _clip(self, parameters: list[nn.Parameter], max_norm: float) -> torch.Tensor | None:
        if self.sharding is not None:
            return self.sharding.clip_gradients(parameters, max_norm)
        norm: torch.Tensor | None = self.accelerator.clip_grad_norm_(parameters, max_norm)
        return norm

    @contextlib.contextmanager
    def _learning(self, name: str) -> Iterator[None]:
        """Only the role that is updated gets gradients."""
        others = [p for key, role in self.trained.items() if key != name for p in role.parameters.values()]
        for parameter in others:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in others:
                parameter.requires_grad_(True)

    def _check_gradients(self, name: str, role: TrainedRole) -> None:
        """Every trained tensor must get a gradient in the first update, or with two experts in the first round."""
        if not role.unseen:
            return
        role.unseen = without_gradient(role.parameters, role.unseen)
        rounds = self.method.round_length(name) if len(role.network.experts) > 1 else 1
        seen = role.updates - self._started.get(name, 0) + 1
        if role.unseen and seen >= rounds:
            names = sorted(role.unseen)
            text = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise RuntimeError(f"{name}: {len(names)} of {len(role.parameters)} tensors got no gradient: {text}")

    def save(self) -> Path | None:
        """Writes a checkpoint of now and prunes older ones; the folder, on the main process."""
        mine_tensors, mine_plain = random_state()
        randoms = gather_object([(mine_tensors, mine_plain)])
        written = None
        groups = self._groups()
        if self.accelerator.is_main_process:
            states = ((f"random-{rank}", tensors) for rank, (tensors, _) in enumerate(randoms))
            state = {
                "step": self.step,
                "fingerprint": self.config.fingerprint(),
                "samples_per_step": self.batches.samples_per_step,
                "data": self.batches.data_digest,
                "updates": {name: role.updates for name, role in self.trained.items()},
                "method": self.method.state_dict(),
                "finished": self.finished,
                "random": [plain for _, plain in randoms],
                "trained": {name: describe(role.parameters) for name, role in self.trained.items()},
            }
            root = self.folder / CHECKPOINTS
            every = itertools.chain(groups, states)
            written = write_checkpoint(root, self.step, lambda folder: write_state(folder, every, state))
            prune_checkpoints(root, self.config.training.keep_checkpoints)
        if self.sharding is not None:
            # The other processes give their rows, and so does the main one where there was nothing to write.
            for _ in groups:
                pass
        self.accelerator.wait_for_everyone()
        return written

    def _groups(self) -> Iterator[tuple[str, Mapping[str, torch.Tensor]]]:
        """The tensors of a checkpoint, file by file, whole on the main process."""
        for name, role in self.trained.items():
            yield name, self._whole(role.parameters)
            yield f"{name}-optimizer", self._whole(optimizer_tensors(_bare(role.optimizers), role.parameters))
        if self.average is not None:
            yield "average", self._whole(self.average.values)

    def _whole(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return tensors if self.sharding is None else gathered(tensors, self.accelerator.is_main_process)

    def load(self, folder: Path) -> None:
        """Takes up the run where the checkpoint in `folder` left it.

        Raises:
            ConfigError: it belongs to a run with other settings, or a piece is missing.
        """
        tensors, state = read_state(folder)
        if state["fingerprint"] != self.config.fingerprint():
            raise ConfigError(f"config: got other settings than those of {folder.name}; must be the same to resume it")
        samples, before = self.batches.samples_per_step, state["samples_per_step"]
        if samples != before:
            raise ConfigError(f"batch over all processes: got {samples}; must be {before} as in {folder.name}")
        if state["data"] != self.batches.data_digest:
            rule = f"the data that {folder.name} was trained on"
            raise ConfigError(f"data.path: got {self.config.data.path!r} with other clips or settings; must be {rule}")
        for name, role in self.trained.items():
            copy_values(role.parameters, _part(tensors, name, folder))
            optimizers = _bare(role.optimizers)
            load_optimizer_tensors(optimizers, role.parameters, _part(tensors, f"{name}-optimizer", folder))
            role.updates = state["updates"][name]
        if self.average is not None:
            copy_values(self.average.values, _part(tensors, "average", folder))
        self.method.load_state_dict(state["method"])
        self._started = dict(state["updates"])
        self.step, self.finished = state["step"], state["finished"]
        rank = self.accelerator.process_index
        if rank < len(state["random"]):
            restore_random_state(_part(tensors, f"random-{rank}", folder), state["random"][rank])
        else:
            warnings.warn(f"process {rank} was not in the run before: its global generators start anew", stacklevel=2)

    def trained_values(self) -> Mapping[str, torch.Tensor]:
        """What the student is saved with: the averaged values where there are any. Whole on the main process; all
        processes must ask for it together."""
        if self.average is not None:
            return self._whole(self.average.values)
        return self._whole({name: p.detach() for name, p in self.trained["student"].parameters.items()})


def _bare(optimizers: Mapping[str, Any]) -> dict[str, torch.optim.Optimizer]:
    """The optimizers without accelerate's wrapper."""
    return {name: getattr(o, "optimizer", o) for name, o in optimizers.items()}


def _part(tensors: Mapping[str, Mapping[str, torch.Tensor]], name: str, folder: Path) -> Mapping[str, torch.Tensor]:
    if name not in tensors:
        raise ConfigError(f"checkpoint: got {folder.name} without {name}.safetensors; must be complete")
    return tensors[name]
