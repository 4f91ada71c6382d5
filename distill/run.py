"""A whole run from its settings: networks, data, method, training, and the student as a folder that loads by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch.utils.checkpoint import checkpoint

from ..attention.processors import InstalledAttention, install
from ..core.config import load_file, require, save_file
from ..pipelines.acceleration import restore, state_of
from ..pipelines.loading import load, own_recipe
from ..quantization.qat import FakeQuantization, fake_quantize_
from .config import DistillConfig
from .data import BatchReader, PreparedData
from .denoiser import Denoiser, LayerRecorder, denoiser_of, experts_of, scheduler_shift
from .draws import derived_seed
from .export import export_student
from .method import Method, build_method
from .samples import SampleSheets
from .sharding import Sharding, build_accelerator, in_turn
from .trainable import choose_trainable, copy_values
from .trainer import TrainedRole, Trainer, TrainingResult

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
    data = PreparedData(config.data.path)
    accelerator = build_accelerator(config, device)
    sharding = Sharding.build(config, accelerator)
    try:
        if sharding is None:
            parts = _build(config, data, accelerator, None)
        else:
            (parts,) = [_build(config, data, accelerator, sharding) for _ in in_turn(accelerator)]
        return _train(config, data, accelerator, sharding, parts, resume)
    finally:
        if sharding is not None:
            sharding.close()


@dataclass
class _Parts:
    """What a run is made of.

    Attributes:
        pipe: the teacher's pipeline.
        method: losses and schedule.
        teacher: dense and fixed.
        trained: by role.
        attention: of the student, by expert.
        on_grid: fake quantization of the student, by expert.
        features: recorders for the method.
        provides: what the student could do before.
    """

    pipe: Any
    method: Method
    teacher: Denoiser
    trained: dict[str, TrainedRole]
    attention: dict[str, InstalledAttention]
    on_grid: list[FakeQuantization]
    features: dict[str, LayerRecorder]
    provides: tuple[str, ...]


def _build(config: DistillConfig, data: PreparedData, accelerator: Accelerator, sharding: Sharding | None) -> _Parts:
    """Loads the networks, one after the other, and splits each at once where it is to be split."""
    pipe = stock_pipeline(config.model.teacher, getattr(torch, config.model.teacher_dtype))
    _check_data(config, data, pipe)
    method = build_method(config, _flow_shift(config, pipe), pipe.config.boundary_ratio)
    _check_processes(config, method, pipe, accelerator.num_processes)
    student, start = _student(config, pipe)
    if sharding is None:
        student.to(accelerator.device)
    attention = install_attention(config, student, start.branches, accelerator.device, _autocast_dtype(config))
    on_grid = fake_quantize(config, student)
    trained = {"student": _role(config, "student", student, sharding)}
    if "critic" in method.trained_roles:
        critic = _copied(config, pipe)
        if sharding is None:
            critic.to(accelerator.device)
        trained["critic"] = _role(config, "critic", critic, sharding)
    teacher = denoiser_of(pipe).requires_grad_(False)
    if sharding is not None:
        sharding.shard(teacher)
        if not accelerator.is_main_process:
            pipe.register_modules(text_encoder=None)  # the main process saves it with the student
    features = {}
    if config.sparse_warmup.alignment_weight > 0:
        features = {"student": LayerRecorder(student, config.attention), "teacher": LayerRecorder(teacher)}
    return _Parts(pipe, method, teacher, trained, attention, on_grid, features, start.provides)


def _train(
    config: DistillConfig,
    data: PreparedData,
    accelerator: Accelerator,
    sharding: Sharding | None,
    parts: _Parts,
    resume: bool,
) -> RunResult:
    folder, pipe, main = Path(config.folder), parts.pipe, accelerator.is_main_process
    length = _sequence_length(config, pipe)
    batches = BatchReader(
        data,
        config.data,
        seed=config.seed,
        batch_size=config.training.batch_size,
        micro_batches=config.training.gradient_accumulation,
        max_sequence_length=length,
        drop_prompts=config.method == "sparse_warmup",
        trajectories=parts.method.reads_trajectories,
        rank=accelerator.process_index,
        world_size=accelerator.num_processes,
        device=accelerator.device,
    )
    sheets = None
    if config.samples.every > 0 and (main or sharding is not None):
        if main:
            pipe.vae.to(accelerator.device)
        sheets = SampleSheets(
            config,
            data,
            pipe,
            shift=parts.method.shift,
            max_sequence_length=length,
            device=accelerator.device,
            uses_dmd="critic" in parts.method.trained_roles,
            writes=main,
        )
    trainer = Trainer(
        config,
        parts.method,
        accelerator,
        teacher=parts.teacher,
        trained=parts.trained,
        attention=parts.attention,
        batches=batches,
        folder=folder,
        features=parts.features,
        sheets=sheets,
        sharding=sharding,
    )
    if main:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(config, folder / CONFIG_FILE)
    result = trainer.run(resume=resume)
    values = trainer.trained_values()
    written = None
    if main:
        if sharding is None:
            copy_values(trainer.trained["student"].parameters, values)
            for fake in parts.on_grid:
                fake.remove()
            student, attention = trainer.trained["student"].network, parts.attention
        else:
            student, attention = _rebuilt_student(config, values, accelerator.device)
        written = export_student(
            config,
            parts.method,
            pipe,
            student,
            attention,
            folder / STUDENT_FOLDER,
            parts.provides,
            device=accelerator.device,
        )
    accelerator.wait_for_everyone()
    return RunResult(result, written)


def _rebuilt_student(
    config: DistillConfig, values: Mapping[str, torch.Tensor], device: torch.device
) -> tuple[Denoiser, dict[str, InstalledAttention]]:
    """The student as it was before training, on the CPU and in one piece, with the trained values in it."""
    student, start = _student(config, stock_pipeline(config.model.teacher, torch.float32))
    attention = install_attention(config, student, start.branches, device, _autocast_dtype(config))
    copy_values(choose_trainable(student, config.training, config.attention), values)
    return student, attention


def _copied(config: DistillConfig, pipe: Any) -> Denoiser:
    """The teacher once more, in float32 and with weights of its own."""
    if next(pipe.transformer.parameters()).dtype == torch.float32:
        experts = {name: copy.deepcopy(getattr(pipe, name)).float() for name in experts_of(pipe)}
    else:  # what was rounded cannot be brought back
        source = stock_pipeline(config.model.teacher, torch.float32)
        experts = {name: getattr(source, name).float() for name in experts_of(source)}
    return _enable_checkpointing(config, denoiser_of(pipe, experts))


@dataclass(frozen=True)
class StudentStart:
    """What a student brings from its earlier training: uses of its weights, and tensors of its branches by expert."""

    provides: tuple[str, ...] = ()
    branches: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)


def _student(config: DistillConfig, pipe: Any) -> tuple[Denoiser, StudentStart]:
    """The student before training."""
    if config.model.student is None:
        return _copied(config, pipe), StudentStart()
    recipe = own_recipe(config.model.student)
    if recipe is not None and recipe.attention.backend != "dense":
        # Weights and branch alone are wanted, in a dtype that the backend of the recipe may not run in.
        attention = replace(recipe.attention, backend="reference")
        recipe = replace(recipe, attention=attention)
    source = load(config.model.student, device="cpu", dtype=torch.float32, recipe=recipe)
    branches = {}
    if (state := state_of(source)) is not None:
        kept = {name: installed.branch_state() for name, installed in state.installed.items()}
        branches = {n: {k: v.clone() for k, v in tensors.items()} for n, tensors in kept.items() if tensors}
        restore(source)
        before = state.recipe.attention.branch
        same = before in ("none", config.attention.branch)
        require(same, "attention.branch", config.attention.branch, f"{before!r}, which the student was trained with")
    same = experts_of(source) == experts_of(pipe)
    require(same, "model.student", config.model.student, f"a model with the teacher's experts {experts_of(pipe)}")
    for name in experts_of(pipe):
        ours, theirs = dict(getattr(source, name).config), dict(getattr(pipe, name).config)
        unlike = sorted(k for k in theirs if not k.startswith("_") and ours.get(k) != theirs[k])
        require(not unlike, f"model.student {name}", unlike, "of the teacher's configuration")
    provides = tuple(source.videospark_defaults.get("provides", ()))
    experts = {name: getattr(source, name).float() for name in experts_of(source)}
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
    config: DistillConfig,
    student: Denoiser,
    branches: dict[str, dict[str, torch.Tensor]] | None = None,
    device: torch.device | None = None,
    compute_dtype: torch.dtype | None = None,
) -> dict[str, InstalledAttention]:
    """Puts the sparse attention of the settings into every expert; nothing where it is dense.

    `branches` are tensors of linear branches by expert; those that are not given start fresh. `device` is where the
    student will run, if not where it is now, `compute_dtype` what it computes in, if not in that of its weights.
    """
    if config.attention.backend == "dense":
        return {}
    given = branches or {}
    return {
        name: install(
            expert, config.attention, branch_state=given.get(name), device=device, compute_dtype=compute_dtype
        )
        for name, expert in student.experts.items()
    }


def _autocast_dtype(config: DistillConfig) -> torch.dtype | None:
    return torch.bfloat16 if config.training.mixed_precision == "bf16" else None


def fake_quantize(config: DistillConfig, student: Denoiser) -> list[FakeQuantization]:
    """Puts every expert on the eight-bit grid of the settings; nothing where they have none.

    Adapters come afterwards: the layers below them stay on the grid, they themselves do not.
    """
    if config.quantization.mode == "none":
        return []
    return [fake_quantize_(expert, config.quantization) for expert in student.experts.values()]


def _role(config: DistillConfig, name: str, network: Denoiser, sharding: Sharding | None) -> TrainedRole:
    training = config.training
    is_student = name == "student"
    rate = training.learning_rate if is_student else training.critic_learning_rate
    with torch.random.fork_rng(devices=[]):
        # Fresh adapters follow from the seed of the run, and so are the same in every process.
        torch.manual_seed(derived_seed(config.seed, "adapters", name))
        parameters = choose_trainable(network, training, config.attention if is_student else None)
    if sharding is not None:
        sharding.shard(network)
        split = dict(network.named_parameters())
        parameters = {name: split[name] for name in parameters}
    return TrainedRole(network, parameters, rate)


def _flow_shift(config: DistillConfig, pipe: Any) -> float:
    if config.model.flow_shift is not None:
        return config.model.flow_shift
    return scheduler_shift(pipe)


def _sequence_length(config: DistillConfig, pipe: Any) -> int:
    if config.model.max_sequence_length is not None:
        return config.model.max_sequence_length
    return int(pipe.videospark_defaults.get("max_sequence_length", DEFAULT_SEQUENCE_LENGTH))


def _check_processes(config: DistillConfig, method: Method, pipe: Any, processes: int) -> None:
    """DDP takes one pass for one backward pass where it touches some of the parameters alone."""
    fits = processes == 1 or config.training.sharding != "none" or len(experts_of(pipe)) == 1 or not method.joins_losses
    rule = "'fsdp2' where several processes train two experts with two losses in one update"
    require(fits, "training.sharding", config.training.sharding, rule)


def _check_data(config: DistillConfig, data: PreparedData, pipe: Any) -> None:
    settings = pipe.transformer.config
    channels, text_dim = data.settings.latent_shape[0], data.settings.text_dim
    rule = f"{settings.out_channels}, the channels of the teacher: prepare the data with it"
    require(channels == settings.out_channels, "data latent channels", channels, rule)
    rule = f"{settings.text_dim}, the teacher's: prepare the data with it"
    require(text_dim == settings.text_dim, "data text_dim", text_dim, rule)
    extra = settings.in_channels - settings.out_channels
    rule = "the teacher's: prepare the data with it"
    length = _sequence_length(config, pipe)
    # diffusers takes all but the last 512 tokens of such a model's context for the picture's.
    fits = settings.image_dim is None or length == DEFAULT_SEQUENCE_LENGTH
    require(
        fits, "model.max_sequence_length", length, f"{DEFAULT_SEQUENCE_LENGTH} for a model that attends to a picture"
    )
    found = data.settings.image_channels
    require(found == extra, "data image_channels", found, f"{extra}, {rule}")
    width = data.settings.image_dim
    require(width == settings.image_dim, "data image_dim", width, f"{settings.image_dim}, {rule}")
    if config.method == "ode_regression":
        _check_trajectories(config, data)
    share = config.data.image_share
    fits = share == 0 or bool(pipe.config.expand_timesteps)
    require(fits, "data.image_share", share, "0 for a teacher without one time per token (expand_timesteps)")


def _check_trajectories(config: DistillConfig, data: PreparedData) -> None:
    """They must be those of this teacher at these knots."""
    sampling = data.settings.sampling
    sigmas = None if sampling is None else sampling.sigmas
    rule = "a folder of trajectories: `videospark distill prepare --trajectories`"
    require(sigmas is not None, "data.path", config.data.path, rule)
    assert sampling is not None and sigmas is not None
    require(config.model.sigmas == sigmas, "model.sigmas", config.model.sigmas, f"{sigmas}, those of the trajectories")
    for name in ("guidance_scale", "guidance_scale_2"):
        ours, theirs = getattr(config.model, name), getattr(sampling, name)
        require(ours == theirs, f"model.{name}", ours, f"{theirs}, that of the trajectories")
    teacher = config.model.teacher
    require(
        teacher == data.settings.model, "model.teacher", teacher, f"{data.settings.model!r}, that of the trajectories"
    )


def with_overrides(config: DistillConfig, *, output: str | None = None, data: str | None = None) -> DistillConfig:
    """The settings with another folder for the run or for its data."""
    if output is not None:
        config = replace(config, output=output)
    if data is not None:
        config = replace(config, data=replace(config.data, path=data))
    return config
