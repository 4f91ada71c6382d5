"""The three experiments: what they train, in which order, and what is kept of them.

    trap       local loss and terminal error along a long sparse warm-up, where on the noise axis the error comes from,
               and the same after CrossDistill
    branch     sparse attention alone, with SLA, with RoLA as released and with balanced frequencies
    frontier   PCM, DMD, TDM and CrossDistill with every crossover, reversed and decoupled: quality and diversity

An experiment is a list of arms; each is trained and measured once per seed. Its folder holds `data`,
`runs/STAGE-seed-K` (runs of their own, see run.py), `results/ARM-seed-K.json`, and at the end `report.md` with its
pictures. Whatever is there already is kept, so an interrupted experiment goes on inside the run it was in. Arms that
begin with the same stage share it.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..core.config import ConfigError, from_dict, require, to_dict
from ..pipelines.video_io import write_atomically
from .checkpoints import list_checkpoints
from .config import DistillConfig
from .prepare import prepare
from .run import CONFIG_FILE, DEFAULT_SEQUENCE_LENGTH, STUDENT_FOLDER, load_config, run, stock_pipeline
from .sources import ClipSize, clips_from_tiny_world
from .trainer import CHECKPOINTS

EXPERIMENTS = ("trap", "branch", "frontier")
SIGMAS = (0.999375, 0.9255, 0.629)
"""Knots of the tiny students, see docs/decisions.md."""
KEEP_RATIOS = (1.0, 0.5, 0.2, 0.1, 0.05)
Report = Callable[[str], None]


@dataclass(frozen=True)
class Scale:
    """How large an experiment is.

    Attributes:
        clips: prepared for training.
        batch_size: of the trainings.
        warmup_steps: iterations of the sparse warm-up before the few-step training.
        trap_steps: iterations of the trap's long warm-up.
        trap_points: how often it is measured, evenly spaced.
        distill_steps: iterations of the few-step training.
        critic_updates: updates of a critic before each one of its student.
        captions: held-out captions for the quality.
        diversity_captions: of them for the diversity.
        diversity_seeds: clips of each.
        solver_steps: of the teacher's sampler, a multiple of three.
        local_clips: clips over which the trap's losses and distances are means.
    """

    clips: int = 4096
    batch_size: int = 4
    warmup_steps: int = 800
    trap_steps: int = 2000
    trap_points: int = 8
    distill_steps: int = 1500
    critic_updates: int = 4
    captions: int = 64
    diversity_captions: int = 8
    diversity_seeds: int = 8
    solver_steps: int = 30
    local_clips: int = 32

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            require(getattr(self, field.name) >= 1, field.name, getattr(self, field.name), "at least 1")
        require(self.trap_points <= self.trap_steps, "trap_points", self.trap_points, "at most trap_steps")
        require(self.solver_steps % 3 == 0, "solver_steps", self.solver_steps, "a multiple of three")

    def with_budget(self, factor: float) -> Scale:
        """With so many times the iterations."""
        require(0 < factor < float("inf"), "budget", factor, "more than 0")
        names = ("warmup_steps", "trap_steps", "distill_steps")
        steps = {name: max(1, round(getattr(self, name) * factor)) for name in names}
        points = min(self.trap_points, steps["trap_steps"])
        return dataclasses.replace(self, trap_points=points, **steps)


QUICK = Scale(4, 1, 2, 2, 2, 2, 1, 2, 1, 2, 3, 2)
"""A rehearsal on random weights: every part runs, no number means anything."""
QUICK_DEFAULTS = {
    "height": 128, "width": 128, "num_frames": 5, "fps": 8, "num_inference_steps": 3, "guidance_scale": 3.0,
    "max_sequence_length": 32,
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What the folder of an experiment was made with; another one is not mixed in."""

    experiment: str
    model: str
    quick: bool
    scale: Scale


class Workspace:
    """The folder of one experiment.

    Args:
        folder: made where missing.
        settings: of the experiment.
        device: "cpu", or None for what accelerate finds.
        say: called with a line of progress.

    Raises:
        ConfigError: the folder belongs to an experiment with other settings.
    """

    def __init__(self, folder: Path, settings: Settings, *, device: str | None, say: Report) -> None:
        self.folder, self.settings, self.scale, self.say = folder, settings, settings.scale, say
        self._device = device
        file = folder / "experiment.json"
        if file.is_file():
            before = from_dict(Settings, json.loads(file.read_text(encoding="utf-8")))
            for field in dataclasses.fields(Settings):
                new, old = getattr(settings, field.name), getattr(before, field.name)
                require(new == old, field.name, new, f"{old!r}, as {str(folder)!r} was made with, or another folder")
        else:
            folder.mkdir(parents=True, exist_ok=True)
            _write_json(file, to_dict(settings))
        self.guidance: float | None = None
        self._used: list[DistillConfig] = []
        self.model = settings.model
        if settings.quick and settings.model == "tiny":
            self.model = str(_random_model(folder / "model"))

    def prepare(self) -> None:
        """Encodes the clips that are not there yet, and learns how the teacher is guided."""
        pipe = stock_pipeline(self.model, torch.float32)
        defaults = pipe.videospark_defaults
        for name in ("height", "width", "num_frames", "guidance_scale"):
            require(name in defaults, f"model default {name}", None, "given by a model of the tiny world")
        self.guidance = float(defaults["guidance_scale"])
        size = ClipSize(defaults["height"], defaults["width"], defaults["num_frames"], defaults.get("fps"))
        self.say(f"data: {self.scale.clips} clips")
        prepare(
            pipe,
            clips_from_tiny_world(self.scale.clips, size),
            self.folder / "data",
            source="tiny-world",
            model=self.model,
            size=size,
            max_sequence_length=int(defaults.get("max_sequence_length", DEFAULT_SEQUENCE_LENGTH)),
        )

    def run_folder(self, stage: str, seed: int) -> Path:
        """Of one training."""
        return self.folder / "runs" / f"{stage}-seed-{seed}"

    def config(self, stage: str, seed: int, method: str, **tables: Any) -> DistillConfig:
        """Settings of one training, from what they add to those that all have."""
        assert self.guidance is not None  # `prepare` comes first
        steps = self.scale.distill_steps if method != "sparse_warmup" else self.scale.warmup_steps
        data: dict[str, Any] = {
            "name": stage,
            "method": method,
            "seed": seed,
            "output": str(self.run_folder(stage, seed)),
            "data": {"path": str(self.folder / "data")},
            "model": {"teacher": self.model, "guidance_scale": self.guidance, "export_dtype": "float32"},
            "training": {
                "num_steps": steps,
                "batch_size": self.scale.batch_size,
                "learning_rate": 3e-4 if method == "sparse_warmup" else 5e-5,
                "critic_learning_rate": 1e-4,
                "betas": [0.9, 0.999] if method in ("sparse_warmup", "pcm") else [0.0, 0.999],
                "warmup_steps": 20,
                "mixed_precision": "no" if self.settings.quick else "bf16",
                "ema_decay": 0.99,
                "checkpoint_every": max(1, min(100, steps)),
            },
        }
        if method != "sparse_warmup":
            data["model"]["sigmas"] = list(SIGMAS)
        for key, value in tables.items():
            data[key] = data.get(key, {}) | value
        return from_dict(DistillConfig, data)

    def train(self, config: DistillConfig, *, keep_checkpoints: bool = False) -> Path:
        """The student of these settings, trained now where it is not there yet; its checkpoints go when it is.

        Raises:
            ConfigError: its folder holds a run with other settings.
        """
        folder = Path(config.folder)
        student = folder / STUDENT_FOLDER
        if (folder / CONFIG_FILE).is_file():
            same = load_config(folder / CONFIG_FILE).fingerprint() == config.fingerprint()
            require(same, "output", str(folder), "of the same settings, or deleted")
        if not (student / "model_index.json").is_file():
            self.say(f"training: {folder.name}, {config.training.num_steps} iterations")
            run(config, resume=True, device=self._device)
        if not keep_checkpoints:
            self.drop_checkpoints(config)
        return student

    def drop_later(self, config: DistillConfig) -> None:
        """Deletes the checkpoints of a finished run once the result in the making is written."""
        self._used.append(config)

    def drop_checkpoints(self, config: DistillConfig) -> None:
        """Deletes the checkpoints of a finished run."""
        shutil.rmtree(Path(config.folder) / CHECKPOINTS, ignore_errors=True)

    def checkpoints(self, config: DistillConfig) -> list[Path]:
        """Those of a run, oldest first."""
        return list_checkpoints(Path(config.folder) / CHECKPOINTS)

    def result(self, arm: str, seed: int, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result of one arm and seed: read, or made and written."""
        file = self.folder / "results" / f"{arm}-seed-{seed}.json"
        if not file.is_file():
            self.say(f"arm {arm}, seed {seed}")
            file.parent.mkdir(parents=True, exist_ok=True)
            self._used = []
            _write_json(file, make())
            for config in self._used:
                self.drop_checkpoints(config)
        found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return found


def _write_json(file: Path, data: Any) -> None:
    text = json.dumps(data, indent=1, allow_nan=False) + "\n"
    write_atomically(file, lambda partial: partial.write_text(text, encoding="utf-8"))


def _random_model(folder: Path) -> Path:
    """A two-layer tiny Wan with random weights."""
    if (folder / "videospark_defaults.json").is_file():
        return folder
    from diffusers import WanTransformer3DModel

    from ..tiny.components import build_pipeline

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        pipe = build_pipeline()
        small = dict(pipe.transformer.config) | {"num_layers": 2, "ffn_dim": 64, "num_attention_heads": 1}
        transformer = WanTransformer3DModel.from_config(small)
        torch.nn.init.normal_(transformer.proj_out.weight, std=0.05)
    pipe.register_modules(transformer=transformer)
    pipe.save_pretrained(folder)
    _write_json(folder / "videospark_defaults.json", QUICK_DEFAULTS)
    return folder


def attention_of(keep_ratio: float, branch: str = "none", frequencies: str = "prefix") -> dict[str, Any]:
    """The table `attention` of a student, with the small blocks of the tiny model.

    RoLA has half as many features as a head has channels, so that "prefix" leaves columns out as it does at Wan's size.
    """
    table: dict[str, Any] = {
        "backend": "gather", "keep_ratio": keep_ratio, "block_size_q": 16, "block_size_k": 16, "tile": [1, 4, 4],
    }  # fmt: skip
    if branch != "none":
        table["branch"] = branch
    if branch == "rola":
        table["rola"] = {"rank": 32, "frequencies": frequencies}
    return table


def warmup_config(work: Workspace, stage: str, seed: int, attention: dict[str, Any]) -> DistillConfig:
    """A sparse warm-up with a ramp from half of the blocks."""
    start = max(0.5, attention["keep_ratio"])
    return work.config(stage, seed, "sparse_warmup", attention=attention, sparse_warmup={"start_keep_ratio": start})


def run_experiment(
    name: str,
    folder: str | Path,
    *,
    model: str = "tiny",
    seeds: int = 3,
    quick: bool = False,
    budget: float = 1.0,
    device: str | None = None,
    say: Report = print,
) -> Path:
    """Trains, measures and reports; goes on where it was interrupted.

    Args:
        name: one of `EXPERIMENTS`.
        folder: of the experiment.
        model: the teacher, a model of the tiny world.
        seeds: every arm is trained with so many.
        quick: a rehearsal: a few iterations, on random weights where the model is "tiny".
        budget: so many times the iterations.
        device: "cpu", or None for what accelerate finds.
        say: called with lines of progress.

    Returns:
        The report, `report.md`.

    Raises:
        ConfigError: wrong values, or a folder that belongs to other ones.
    """
    require(name in EXPERIMENTS, "name", name, f"one of {', '.join(EXPERIMENTS)}")
    require(seeds >= 1, "seeds", seeds, "at least 1")
    if quick and budget != 1.0:
        raise ConfigError(f"budget: got {budget}; must be left out of a quick rehearsal")
    from . import experiment_arms, experiment_reports
    from .experiment_measures import Judge

    scale = QUICK if quick else Scale().with_budget(budget)
    work = Workspace(Path(folder), Settings(name, model, quick, scale), device=device, say=say)
    work.prepare()
    judge = Judge(work.model, scale, work.folder, SIGMAS, device=device)
    results: dict[str, list[dict[str, Any]]] = {}
    for seed in range(seeds):
        for arm, measure in experiment_arms.arms_of(name, work, judge).items():
            results.setdefault(arm, []).append(
                work.result(arm, seed, lambda measure=measure, seed=seed: measure(seed))  # type: ignore[misc]
            )
    return experiment_reports.write_report(work.folder, work.settings, results)
