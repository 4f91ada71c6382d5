"""A whole run from its settings: networks, data, method, training, and the student as a folder that loads by itself."""

from __future__ import annotations

import copy
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..attention.processors import InstalledAttention, install
from ..core.config import ConfigError, load_file, require, save_file
from ..pipelines.acceleration import accelerate, restore, state_of
from ..pipelines.loading import load, save
from ..pipelines.recipe import Recipe, SamplerConfig
from ..quantization.qat import FakeQuantization, fake_quantize_
from .config import DistillConfig
from .data import BatchReader, PreparedData
from .denoiser import EXPERTS, Denoiser, LayerRecorder
from .method import Method, build_method
from .samples import SampleSheets
from .trainable import choose_trainable, copy_values, merge_adapters
from .trainer import TrainedRole, Trainer, TrainingResult, build_accelerator

CONFIG_FILE = "config.toml"
STUDENT_FOLDER = "student"
DEFAULT_SEQUENCE_LENGTH = 512


@dataclass(frozen=True)
class RunResult:
    """Where a run ended.

    Attributes:
        training: iterations and reason.
        student: folder of the student; None on a process that does not write.
    """

    training: TrainingResult
    student: Path | None


def example_configs() -> dict[str, Path]:
    """The settings that come with the package, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "configs").glob("*.toml"))}


def load_config(name_or_path: str | Path) -> DistillConfig:
    """Settings from a file, or the ones of that name that come with the package.

    Raises:
        ConfigError: neither, or settings that are wrong.
    """
    known = example_configs()
    path = Path(name_or_path)
    if path.suffix.lower() in (".toml", ".json"):
        require(path.is_file(), "config", str(name_or_path), "an existing file")
        return load_file(DistillConfig, path)
    require(str(name_or_path) in known, "config", str(name_or_path), f"a .toml file, or one of {', '.join(known)}")
    return load_file(DistillConfig, known[str(name_or_path)])


def stock_pipeline(name: str, dtype: torch.dtype) -> Any:
    """A pipeline of stock parts on the CPU: a folder, a Hub id, or "tiny" for the embedded model."""
    if name == "tiny":
        from ..tiny import checkpoint_path

        name = str(checkpoint_path())
    pipe = load(name, device="cpu", dtype=dtype, recipe="dense")
    restore(pipe)
    return pipe


def run(config: DistillConfig, *, resume: bool = False, device: str | None = None) -> RunResult:
    """Trains and writes the student.

    Args:
        config: the run.
        resume: go on from the newest good checkpoint of its folder.
        device: "cpu" to stay on the CPU; None takes what accelerate finds.

    Raises:
        ConfigError: settings that do not fit the model, the data or the folder.
        FloatingPointError: a loss or a gradient is not finite.
    """
    folder = Path(config.folder)
    data = PreparedData(config.data.path)
    pipe = stock_pipeline(config.model.teacher, getattr(torch, config.model.teacher_dtype))
    _check_data(config, data, pipe)
    method = build_method(config, _flow_shift(config, pipe), pipe.config.boundary_ratio)
    accelerator = build_accelerator(config, device)
    student, start = _student(config, pipe)
    student.to(accelerator.device)
    attention = install_attention(config, student, start.branches)
    on_grid = fake_quantize(config, student)
    trained = {"student": student}
    if "critic" in method.trained_roles:
        trained["critic"] = _copied(config, pipe).to(accelerator.device)
    teacher = denoiser_of(pipe, {name: getattr(pipe, name) for name in _experts(pipe)})
    features = {}
    if config.sparse_warmup.alignment_weight > 0:
        features = {"student": LayerRecorder(student, config.attention), "teacher": LayerRecorder(teacher)}
    batches = BatchReader(
        data,
        config.data,
        seed=config.seed,
        batch_size=config.training.batch_size,
        micro_batches=config.training.gradient_accumulation,
        max_sequence_length=_sequence_length(config, pipe),
        drop_prompts=config.method == "sparse_warmup",
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        device=accelerator.device,
    )
    sheets = None
    if config.samples.every > 0 and accelerator.is_main_process:
        pipe.vae.to(accelerator.device)
        sheets = SampleSheets(
            config,
            data,
            pipe,
            shift=method.shift,
            max_sequence_length=_sequence_length(config, pipe),
            device=accelerator.device,
            uses_dmd="critic" in method.trained_roles,
        )
    trainer = Trainer(
        config,
        method,
        accelerator,
        teacher=teacher,
        trained={name: _role(config, name, network) for name, network in trained.items()},
        attention=attention,
        batches=batches,
        folder=folder,
        features=features,
        sheets=sheets,
    )
    if accelerator.is_main_process:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(config, folder / CONFIG_FILE)
    result = trainer.run(resume=resume)
    written = None
    if accelerator.is_main_process:
        copy_values(trainer.trained["student"].parameters, trainer.trained_values())
        for fake in on_grid:
            fake.remove()
        written = export_student(config, method, pipe, student, attention, folder / STUDENT_FOLDER, start.provides)
    accelerator.wait_for_everyone()
    return RunResult(result, written)


def _experts(pipe: Any) -> list[str]:
    return [name for name in EXPERTS if getattr(pipe, name, None) is not None]


def denoiser_of(pipe: Any, experts: dict[str, Any]) -> Denoiser:
    """The experts of a pipeline as one velocity field, at its boundary and with its times."""
    return Denoiser(
        experts,
        boundary_ratio=pipe.config.boundary_ratio,
        expand_timesteps=pipe.config.expand_timesteps,
        num_train_timesteps=pipe.scheduler.config.num_train_timesteps,
    )


def _copied(config: DistillConfig, pipe: Any) -> Denoiser:
    """The teacher once more, in float32 and with weights of its own."""
    source = pipe
    if config.model.teacher_dtype != "float32":  # what was rounded cannot be brought back
        source = stock_pipeline(config.model.teacher, torch.float32)
    experts = {name: copy.deepcopy(getattr(source, name)).float() for name in _experts(source)}
    return _enable_checkpointing(config, denoiser_of(source, experts))


@dataclass(frozen=True)
class StudentStart:
    """What a student brings from its earlier training: uses of its weights, and tensors of its branches by expert."""

    provides: tuple[str, ...] = ()
    branches: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)


def _student(config: DistillConfig, pipe: Any) -> tuple[Denoiser, StudentStart]:
    """The student before training."""
    if config.model.student is None:
        return _copied(config, pipe), StudentStart()
    source = load(config.model.student, device="cpu", dtype=torch.float32)
    branches = {}
    if (state := state_of(source)) is not None:
        kept = {name: installed.branch_state() for name, installed in state.installed.items()}
        branches = {n: {k: v.clone() for k, v in tensors.items()} for n, tensors in kept.items() if tensors}
        restore(source)
        before = state.recipe.attention.branch
        same = before in ("none", config.attention.branch)
        require(same, "attention.branch", config.attention.branch, f"{before!r}, which the student was trained with")
    same = _experts(source) == _experts(pipe)
    require(same, "model.student", config.model.student, f"a model with the teacher's experts {_experts(pipe)}")
    for name in _experts(pipe):
        ours, theirs = dict(getattr(source, name).config), dict(getattr(pipe, name).config)
        unlike = sorted(k for k in theirs if not k.startswith("_") and ours.get(k) != theirs[k])
        require(not unlike, f"model.student {name}", unlike, "of the teacher's configuration")
    provides = tuple(source.videospark_defaults.get("provides", ()))
    experts = {name: getattr(source, name).float() for name in _experts(source)}
    return _enable_checkpointing(config, denoiser_of(source, experts)), StudentStart(provides, branches)


def _enable_checkpointing(config: DistillConfig, denoiser: Denoiser) -> Denoiser:
    def again(block: Callable[..., Any], *arguments: Any) -> Any:
        # The reentrant kind loses the gradient where a block's inputs need none.
        return checkpoint(block, *arguments, use_reentrant=False)

    if config.training.gradient_checkpointing:
        for expert in denoiser.experts.values():
            expert.enable_gradient_checkpointing(again)  # type: ignore[operator]
    return denoiser.train()


def install_attention(
    config: DistillConfig, student: Denoiser, branches: dict[str, dict[str, torch.Tensor]] | None = None
) -> dict[str, InstalledAttention]:
    """Puts the sparse attention of the settings into every expert; nothing where it is dense.

    `branches` are tensors of linear branches by expert; those that are not given start fresh.
    """
    if config.attention.backend == "dense":
        return {}
    given = branches or {}
    return {
        name: install(expert, config.attention, branch_state=given.get(name))
        for name, expert in student.experts.items()
    }


def fake_quantize(config: DistillConfig, student: Denoiser) -> list[FakeQuantization]:
    """Puts every expert on the eight-bit grid of the settings; nothing where they have none.

    Adapters come afterwards: the layers below them stay on the grid, they themselves do not.
    """
    if config.quantization.mode == "none":
        return []
    return [fake_quantize_(expert, config.quantization) for expert in student.experts.values()]


def _role(config: DistillConfig, name: str, network: Denoiser) -> TrainedRole:
    training = config.training
    is_student = name == "student"
    rate = training.learning_rate if is_student else training.critic_learning_rate
    return TrainedRole(network, choose_trainable(network, training, config.attention if is_student else None), rate)


def _flow_shift(config: DistillConfig, pipe: Any) -> float:
    if config.model.flow_shift is not None:
        return config.model.flow_shift
    return scheduler_shift(pipe)


def scheduler_shift(pipe: Any) -> float:
    """Shift of the noise levels that a pipeline's scheduler has.

    Raises:
        ConfigError: it has none.
    """
    for name in ("flow_shift", "shift"):
        if pipe.scheduler.config.get(name) is not None:
            return float(pipe.scheduler.config[name])
    kind = type(pipe.scheduler).__name__
    raise ConfigError(f"model.flow_shift: got None; must be given, as the teacher's {kind} has no shift")


def _sequence_length(config: DistillConfig, pipe: Any) -> int:
    if config.model.max_sequence_length is not None:
        return config.model.max_sequence_length
    return int(pipe.videospark_defaults.get("max_sequence_length", DEFAULT_SEQUENCE_LENGTH))


def _check_data(config: DistillConfig, data: PreparedData, pipe: Any) -> None:
    settings = pipe.transformer.config
    channels, text_dim = data.settings.latent_shape[0], data.settings.text_dim
    rule = f"{settings.out_channels}, the channels of the teacher: prepare the data with it"
    require(channels == settings.out_channels, "data latent channels", channels, rule)
    rule = f"{settings.text_dim}, the teacher's: prepare the data with it"
    require(text_dim == settings.text_dim, "data text_dim", text_dim, rule)
    share = config.data.image_share
    fits = share == 0 or bool(pipe.config.expand_timesteps)
    require(fits, "data.image_share", share, "0 for a teacher without one time per token (expand_timesteps)")


def student_recipe(config: DistillConfig, method: Method, boundary_ratio: float | None) -> Recipe:
    """How the finished student is to be run."""
    sampler = SamplerConfig()
    if config.model.sigmas is not None:
        uses_dmd = "critic" in method.trained_roles
        sampler = SamplerConfig(
            sigmas=config.model.sigmas,
            guidance_scale=1.0,
            guidance_scale_2=None if boundary_ratio is None else 1.0,
            stochastic=uses_dmd and config.dmd.stochastic,
            boundary_ratio=boundary_ratio,
        )
    return Recipe(
        config.name,
        attention=config.attention,
        sampler=sampler,
        requires=method.provides[0],
        description=config.description,
    )


def export_student(
    config: DistillConfig,
    method: Method,
    pipe: Any,
    student: Denoiser,
    attention: dict[str, InstalledAttention],
    folder: Path,
    provides: tuple[str, ...] = (),
) -> Path:
    """Writes the student as a diffusers folder with its recipe and defaults; complete or not at all.

    Adapters are merged; the student is stock afterwards and cannot be trained on.
    """
    merge_adapters(student)
    branches = {name: installed.branch_state() for name, installed in attention.items()}
    for installed in attention.values():
        installed.remove()
    dtype = getattr(torch, config.model.export_dtype)
    for name, expert in student.experts.items():
        expert.requires_grad_(False).eval()
        setattr(pipe, name, expert.to("cpu", dtype))
    grid = () if config.quantization.mode == "none" else (config.quantization.mode,)
    gives = tuple(dict.fromkeys((*provides, *method.provides, *grid)))
    defaults = dict(pipe.videospark_defaults) | {"provides": list(gives)}
    if config.model.sigmas is not None:
        defaults |= {"num_inference_steps": len(config.model.sigmas), "guidance_scale": 1.0}
    pipe.videospark_defaults = defaults
    partial = folder.with_name(f".{uuid.uuid4().hex}.partial")
    try:
        recipe = student_recipe(config, method, pipe.config.boundary_ratio)
        accelerate(pipe, recipe, branch_state=branches if any(branches.values()) else None)
        save(pipe, partial)
        if folder.exists():
            shutil.rmtree(folder)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def with_overrides(config: DistillConfig, *, output: str | None = None, data: str | None = None) -> DistillConfig:
    """The settings with another folder for the run or for its data."""
    if output is not None:
        config = replace(config, output=output)
    if data is not None:
        config = replace(config, data=replace(config.data, path=data))
    return config
