"""Settings of a training run: one TOML file, every key checked."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Literal, get_args

from ..attention.config import AttentionConfig
from ..core.config import require, to_dict
from ..pipelines.scheduling_few_step import check_sigmas
from ..quantization.config import QuantizationConfig
from .config_methods import CrossDistillConfig, DMDConfig, PCMConfig, SparseWarmupConfig, finite

MethodName = Literal["sparse_warmup", "ode_regression", "pcm", "dmd", "crossdistill"]
FEW_STEP_METHODS = ("ode_regression", "pcm", "dmd", "crossdistill")
LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "ffn.net.0.proj", "ffn.net.2")


@dataclass(frozen=True)
class ModelConfig:
    """The networks.

    Attributes:
        teacher: folder of the diffusers layout, Hub id, or "tiny" for the embedded model; stays dense and fixed.
        student: folder of a student to go on from; None starts from the teacher's weights.
        teacher_dtype: in which the teacher is held.
        sigmas: noise levels at which the student's steps start, descending (the final 0 is added by itself); they are
            shifted already. For the few-step methods alone.
        flow_shift: shift of the noise levels that training draws; None takes that of the teacher's scheduler.
        guidance_scale: of the teacher (1 means none); the student needs none.
        guidance_scale_2: of the second of two experts, below the boundary; None takes the same.
        max_sequence_length: prompts are padded to so many tokens; None takes that of the teacher's defaults, or 512.
        export_dtype: in which the finished student is saved.
    """

    teacher: str = "tiny"
    student: str | None = None
    teacher_dtype: Literal["float32", "bfloat16"] = "float32"
    sigmas: tuple[float, ...] | None = None
    flow_shift: float | None = None
    guidance_scale: float = 5.0
    guidance_scale_2: float | None = None
    max_sequence_length: int | None = None
    export_dtype: Literal["float32", "bfloat16"] = "bfloat16"

    def __post_init__(self) -> None:
        require(bool(self.teacher.strip()), "teacher", self.teacher, "a folder, a Hub id or 'tiny'")
        if self.sigmas is not None:
            check_sigmas(self.sigmas)
        shift = self.flow_shift
        require(shift is None or (math.isfinite(shift) and shift > 0), "flow_shift", shift, "more than 0")
        for name in ("guidance_scale", "guidance_scale_2"):
            scale = getattr(self, name)
            require(scale is None or finite(scale, 0), name, scale, "0 or more (1 means none)")
        length = self.max_sequence_length
        require(length is None or length >= 1, "max_sequence_length", length, "at least 1")


@dataclass(frozen=True)
class DataConfig:
    """What is trained on.

    Attributes:
        path: folder that `videospark distill prepare` made.
        image_share: share of the samples that are given their first latent frame (image-to-video); only for models
            with one time per token (`expand_timesteps`).
        prompt_dropout: share of the samples trained with the negative prompt (sparse warm-up alone; the few-step
            students need no guidance).
    """

    path: str
    image_share: float = 0.0
    prompt_dropout: float = 0.1

    def __post_init__(self) -> None:
        require(bool(self.path.strip()), "path", self.path, "a folder of prepared data")
        for name in ("image_share", "prompt_dropout"):
            require(finite(getattr(self, name), 0, 1), name, getattr(self, name), "from 0 to 1")


@dataclass(frozen=True)
class LoRAConfig:
    """Low-rank adapters (peft) on the linear layers whose names end in `targets`; merged when the run ends."""

    rank: int = 32
    alpha: float = 32.0
    targets: tuple[str, ...] = LORA_TARGETS

    def __post_init__(self) -> None:
        require(self.rank >= 1, "rank", self.rank, "at least 1")
        require(math.isfinite(self.alpha) and self.alpha > 0, "alpha", self.alpha, "more than 0")
        require(len(self.targets) > 0 and all(self.targets), "targets", self.targets, "one or more names")


@dataclass(frozen=True)
class TrainingConfig:
    """The loop.

    Attributes:
        num_steps: iterations; each updates one role or more.
        batch_size: clips per process and micro-batch.
        gradient_accumulation: micro-batches per update.
        optimizer: "adamw", or "muon" for the matrices of the blocks with AdamW for everything else.
        learning_rate: of AdamW, for the student.
        critic_learning_rate: of AdamW, for the critic.
        muon_learning_rate: of Muon, for student and critic.
        betas: of AdamW.
        weight_decay: of both optimizers.
        warmup_steps: updates over which the learning rate rises linearly.
        schedule: "constant", or "cosine" down to 2 % at `num_steps`.
        max_grad_norm: gradients are clipped to this norm; 0 for no clipping.
        mixed_precision: "bf16" computes under autocast with float32 weights.
        gradient_checkpointing: recompute blocks in the backward pass (non-reentrant).
        sharding: "fsdp2" splits student, teacher and critic over the processes, block by block; "none" gives each
            process all of them. The numbers are the same up to the order of sums, so a run may go on either way.
        offload: with "fsdp2", on one process or more: weights, gradients and optimizers lie in RAM, the optimizer
            steps there, and blocks come to the GPU while they are needed.
        trainable: which of the student's tensors learn; the critic learns all of its own, or adapters where "lora".
        lora: settings of the adapters; with another `trainable` they must stay at their defaults.
        ema_decay: of the averaged student, which is what is saved at the end; 0 for none.
        log_every: iterations between two records.
        checkpoint_every: iterations between two checkpoints.
        keep_checkpoints: how many complete ones stay.
    """

    num_steps: int = 1000
    batch_size: int = 1
    gradient_accumulation: int = 1
    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 1e-5
    critic_learning_rate: float = 1e-5
    muon_learning_rate: float = 5e-4
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.01
    warmup_steps: int = 0
    schedule: Literal["constant", "cosine"] = "constant"
    max_grad_norm: float = 1.0
    mixed_precision: Literal["no", "bf16"] = "no"
    gradient_checkpointing: bool = False
    sharding: Literal["none", "fsdp2"] = "none"
    offload: bool = False
    trainable: Literal["full", "lora", "branch"] = "full"
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    ema_decay: float = 0.0
    log_every: int = 10
    checkpoint_every: int = 200
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        least = ("num_steps", "batch_size", "gradient_accumulation", "log_every", "checkpoint_every")
        for name in (*least, "keep_checkpoints"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("learning_rate", "critic_learning_rate", "muon_learning_rate"):
            value = getattr(self, name)
            require(math.isfinite(value) and value > 0, name, value, "more than 0")
        require(all(0 <= b < 1 for b in self.betas), "betas", self.betas, "two numbers of at least 0 and below 1")
        for name in ("weight_decay", "warmup_steps", "max_grad_norm"):
            require(finite(getattr(self, name), 0), name, getattr(self, name), "0 or more")
        require(0 <= self.ema_decay < 1, "ema_decay", self.ema_decay, "at least 0 (none) and below 1")
        sharded = self.sharding == "fsdp2"
        require(sharded or not self.offload, "offload", self.offload, "false unless sharding is 'fsdp2'")
        # Muon turns a whole matrix at once, of which a process holds some rows.
        fits = self.optimizer == "adamw" or not sharded
        require(fits, "optimizer", self.optimizer, "'adamw' where sharding is 'fsdp2'")
        unused = self.trainable != "lora" and self.lora != LoRAConfig()
        require(not unused, "lora", self.lora, "left at its defaults unless trainable is 'lora'")


@dataclass(frozen=True)
class SamplesConfig:
    """Pictures of what the student makes while it trains, in the folder `samples` of the run; they change no number.

    Attributes:
        every: iterations between two pictures; 0 for none.
        count: clips in a picture, with the captions of the first prepared clips, one row each.
        frames: columns, evenly spaced over the clip.
        seed: of the noise, the same for every picture.
        steps: of the warm-up's student, which has the teacher's sampler; few-step students have their own.
    """

    every: int = 0
    count: int = 4
    frames: int = 4
    seed: int = 0
    steps: int = 20

    def __post_init__(self) -> None:
        for name in ("every", "seed"):
            require(getattr(self, name) >= 0, name, getattr(self, name), "0 or more")
        for name in ("count", "frames", "steps"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")


@dataclass(frozen=True)
class DistillConfig:
    """A whole run; tables of methods that it does not use must be left out.

    `quantization` lets the student compute on its eight-bit grid while it trains (quantization/qat.py); it is saved in
    full precision, ready to be quantized so. Teacher and critic are never quantized.
    """

    name: str
    method: MethodName
    data: DataConfig
    description: str = ""
    output: str | None = None
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    quantization: QuantizationConfig = field(default_factory=QuantizationConfig)
    samples: SamplesConfig = field(default_factory=SamplesConfig)
    sparse_warmup: SparseWarmupConfig = field(default_factory=SparseWarmupConfig)
    pcm: PCMConfig = field(default_factory=PCMConfig)
    dmd: DMDConfig = field(default_factory=DMDConfig)
    crossdistill: CrossDistillConfig = field(default_factory=CrossDistillConfig)

    def __post_init__(self) -> None:
        require(bool(self.name.strip()) and "/" not in self.name, "name", self.name, "a text without a slash")
        require(self.seed >= 0, "seed", self.seed, "0 or more")
        used = {"crossdistill": ("pcm", "dmd", "crossdistill")}.get(self.method, (self.method,))
        for name in get_args(MethodName):
            if name == "ode_regression":  # has no settings of its own
                continue
            settings = getattr(self, name)
            default = name in used or settings == type(settings)()
            require(default, name, settings, f"left out for method {self.method!r}")
        few = self.method in FEW_STEP_METHODS
        rule = f"given for method {self.method!r}" if few else "left out: the warm-up keeps the teacher's sampler"
        require((self.model.sigmas is not None) == few, "model.sigmas", self.model.sigmas, rule)
        fused = self.quantization.fused
        require(not fused, "quantization.fused", fused, "false for training: fused blocks have no gradient")
        self._check_attention()
        if self.method == "crossdistill":
            self._check_crossover()
        stored = self.method != "ode_regression" or self.data.image_share == 0
        rule = "0 for method 'ode_regression': the trajectories have it"
        require(stored, "data.image_share", self.data.image_share, rule)
        average = self.training.ema_decay > 0 or self.pcm.target == "online"
        require(average, "pcm.target", self.pcm.target, "'online' unless training.ema_decay is more than 0")

    def _check_attention(self) -> None:
        steps = self.attention.dense_steps
        require(not steps, "attention.dense_steps", steps, "empty: training visits noise levels, not sampling steps")
        dense = self.attention.backend == "dense"
        if self.method == "sparse_warmup":
            require(not dense, "attention.backend", "dense", "a sparse one: the warm-up trains for it")
            low, start = self.attention.keep_ratio, self.sparse_warmup.start_keep_ratio
            require(start >= low, "sparse_warmup.start_keep_ratio", start, f"at least attention.keep_ratio, {low}")
            aligned = self.sparse_warmup.alignment_weight > 0 and self.training.gradient_checkpointing
            rule = "0 with gradient checkpointing, which runs the layers twice"
            weight = self.sparse_warmup.alignment_weight
            require(not aligned, "sparse_warmup.alignment_weight", weight, rule)
        branch = self.training.trainable != "branch" or self.attention.branch != "none"
        require(branch, "training.trainable", self.training.trainable, "another one: attention.branch is 'none'")

    def _check_crossover(self) -> None:
        assert self.model.sigmas is not None
        count, cross = len(self.model.sigmas), self.crossdistill
        require(cross.crossover <= count, "crossdistill.crossover", cross.crossover, f"at most {count}, the steps")
        inner = 0 < cross.crossover < count
        require(inner or cross.mode == "joint", "crossdistill.mode", cross.mode, "'joint' where one loss stands alone")
        total = self.training.num_steps
        fits = cross.staged_steps < total
        require(fits, "crossdistill.staged_steps", cross.staged_steps, f"below training.num_steps, {total}")
        plain = cross.coupling == "student" or not self.dmd.stochastic
        require(plain, "crossdistill.coupling", cross.coupling, "'student' where dmd.stochastic is true")

    @property
    def folder(self) -> str:
        """Folder of the run."""
        return self.output or f"outputs/distill/{self.name}"

    def fingerprint(self) -> str:
        """Digest of everything that decides the numbers; a run is only resumed with the same one.

        How long the run is, where it lies, how often it logs or draws and how it is split may change, unless a
        schedule counts on the length. The clips of an iteration are checked apart, over all processes.
        """
        loose = dataclasses.replace(
            self.training,
            num_steps=self.training.num_steps if self._length_matters else 1,
            batch_size=1,
            gradient_accumulation=1,
            log_every=1,
            checkpoint_every=1,
            keep_checkpoints=1,
            sharding="none",
            offload=False,
        )
        data = to_dict(self) | {"training": to_dict(loose)}
        for name in ("name", "description", "output", "samples"):
            data.pop(name, None)
        return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()

    @property
    def _length_matters(self) -> bool:
        ramp = self.method == "sparse_warmup" and self.sparse_warmup.start_keep_ratio > self.attention.keep_ratio
        return self.training.schedule == "cosine" or ramp
