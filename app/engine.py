"""A pipeline that stays loaded and makes one clip after the other, each with its own recipe."""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..core.config import ConfigError, require
from ..core.devices import pick_device
from ..pipelines.acceleration import accelerate, state_of
from ..pipelines.generation import (
    CleanLatentsCallback,
    GenerationRequest,
    GenerationResult,
    StepCallback,
    decode,
    generate,
    resolve_request,
)
from ..pipelines.offload import MODES, InstalledOffload, change_recipe, offload_of, place
from ..pipelines.recipe import Recipe, resolve
from .block_maps import BlockMapRecorder
from .model_folder import stand_in

RECIPE_FILE = "videospark_recipe.json"
TEACHER = "teacher"
"""In place of a recipe: the dense model that a student was made from."""
_WHOLE_BYTES = 2**20
_SAMPLES = 16


class Engine:
    """One loaded pipeline on one device. Not for two threads at once: whoever owns it takes turns.

    Args:
        model: a folder of the diffusers layout, or an id on the Hub.
        device: where it runs; None picks the best one.
        load: loads the pipeline, as `pipelines.loading.load` does; called by `load()` alone.
        offload: where its parts lie while it runs, see `pipelines.offload.place`.
        size: width, height and frames that offload "auto" plans for; None for the model's own.
        teacher: the dense model that a student was made from, which `TEACHER` asks for; None without.

    Attributes:
        load_seconds: what loading took, the recipe and its quantization included; None before.

    Raises:
        ConfigError: an unknown offloading.
    """

    def __init__(
        self,
        model: str,
        device: Any = None,
        load: Callable[..., Any] | None = None,
        offload: str = "none",
        size: tuple[int, int, int] | None = None,
        teacher: str | None = None,
    ) -> None:
        require(offload in MODES, "offload", offload, f"one of {', '.join(MODES)}")
        self.model, self.device, self.offload, self.size = model, device, offload, size
        self.pipe: Any = None
        self.load_seconds: float | None = None
        self._load = load
        self._own_recipe: Recipe | None = None
        self.teacher = teacher
        self._teacher_engine: Engine | None = None

    def load(self) -> None:
        """Reads the weights and applies the model's own recipe; does nothing when called again."""
        if self.pipe is not None:
            return
        if self._load is None:
            from ..pipelines.loading import load

            self._load = load
        start = time.perf_counter()
        settings: dict[str, Any] = {} if self.offload == "none" else {"offload": self.offload, "size": self.size}
        pipe = self._load(self.model, device=self.device, **settings)
        pipe.set_progress_bar_config(disable=True)
        state = state_of(pipe)
        self._own_recipe = state.recipe if state is not None else None
        self.pipe, self.load_seconds = pipe, time.perf_counter() - start

    def run(
        self,
        request: GenerationRequest,
        recipe: str | Recipe | None = None,
        *,
        on_step: StepCallback | None = None,
        on_clean_latents: CleanLatentsCallback | None = None,
        recorder: BlockMapRecorder | None = None,
    ) -> GenerationResult:
        """Makes one clip; the errors are those of `generate` and `accelerate`.

        Args:
            request: what to make.
            recipe: how; None is the model's own, where it has one, and `TEACHER` another model, which is only there as
                long as it is needed, or stays on a CPU.
            on_step: see `generate`.
            on_clean_latents: see `generate`.
            recorder: listens to the sparse layers.
        """
        self.load()
        if recipe == TEACHER:
            return self._ask_teacher(request, on_step=on_step, on_clean_latents=on_clean_latents)
        self._apply(recipe)
        with warnings.catch_warnings(), nullcontext() if recorder is None else recorder.record(self.pipe):
            warnings.simplefilter("ignore")  # all of them are in the result: notes and unknown words
            return generate(self.pipe, request, on_step=on_step, on_clean_latents=on_clean_latents)

    def resolve(self, request: GenerationRequest, recipe: str | Recipe | None = None) -> GenerationRequest:
        """The request with every setting filled in and checked, as this recipe would run it; loads the model."""
        self.load()
        if recipe == TEACHER:
            planned, _ = planned_pipeline(self._teacher())
            return resolve_for(planned, request, Recipe("dense"))
        chosen = resolve(recipe) if recipe is not None else (self._own_recipe or Recipe("dense"))
        return resolve_for(self.pipe, request, chosen)

    def preview(self, latents: torch.Tensor) -> np.ndarray:
        """A picture, uint8 [H, W, 3], of clean latents [1, C, F, H', W']: their middle frame, decoded alone."""
        middle = latents.shape[2] // 2
        return decode(self.pipe, latents[:, :, middle : middle + 1])[0]

    def free_memory(self) -> None:
        """Gives back what a failed run left: call it outside of the `except` that still holds its frames."""
        gc.collect()
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def _teacher(self) -> str:
        require(self.teacher is not None, "recipe", TEACHER, "another one: no teacher is known of this model")
        assert self.teacher is not None
        return self.teacher

    def _ask_teacher(self, request: GenerationRequest, **callbacks: Any) -> GenerationResult:
        if self._teacher_engine is None:
            self._teacher_engine = Engine(self._teacher(), self.device, self._load, self.offload, self.size)
        engine = self._teacher_engine
        try:
            return engine.run(request, "dense", **callbacks)
        finally:
            if pick_device(None if self.device is None else str(self.device)).type != "cpu":
                self._teacher_engine = None
                del engine
                self.free_memory()

    def _apply(self, recipe: str | Recipe | None) -> None:
        wanted = resolve(recipe) if recipe is not None else self._own_recipe
        state, placed = state_of(self.pipe), offload_of(self.pipe)
        if (state.recipe if state is not None else None) == wanted:
            return
        try:
            change_recipe(self.pipe, wanted)
        except BaseException:
            self._put_back(placed)
            raise

    def _put_back(self, placed: InstalledOffload | None) -> None:
        """A refused recipe leaves the model as it was loaded."""
        if placed is None or offload_of(self.pipe) is not None:
            change_recipe(self.pipe, self._own_recipe)
            return
        if self._own_recipe is not None:
            accelerate(self.pipe, self._own_recipe, device=placed.device)
        place(self.pipe, placed.asked, placed.device, size=placed.size)


def loaded_engine(
    model: str, *, device: Any = None, offload: str = "none", size: tuple[int, int, int] | None = None
) -> Engine:
    """An engine whose model is loaded; for workers of other processes too."""
    engine = Engine(model, device, None, offload, size)
    engine.load()
    return engine


def resolve_for(pipe: Any, request: GenerationRequest, recipe: Recipe) -> GenerationRequest:
    """`resolve_request` that also refuses what only shows when it runs: training that is lacking, pictures.

    Args:
        pipe: a pipeline or a stand-in for one.
        request: what to fill in.
        recipe: as if this one were applied.
    """
    provided = (getattr(pipe, "videospark_defaults", None) or {}).get("provides", [])
    if recipe.requires is not None and recipe.requires not in provided:
        raise ConfigError(
            f"recipe: got {recipe.name!r}, which needs weights trained for {recipe.requires!r}; must be one that this "
            f"model can run: it declares {', '.join(provided) or 'no such training'}"
        )
    kind = getattr(pipe, "pipeline_class", type(pipe)).__name__
    both = bool(getattr(pipe.config, "expand_timesteps", False))
    if not both and (request.image is not None) != (kind == "WanImageToVideoPipeline"):
        wish = "none, and a model that begins with one" if request.image is None else "one for a model without"
        raise ConfigError(f"image: got {wish}; must fit the model, which is a {kind}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # given again with the result, as its notes
        return resolve_request(pipe, request, recipe)


def planned_pipeline(model: str) -> tuple[Any, Recipe]:
    """What is known of a model without its weights: a stand-in for its pipeline, and its own recipe.

    Of a model on the Hub the configurations are fetched, and nothing else.

    Raises:
        ConfigError: the folder is no pipeline.
    """
    import diffusers

    from ..pipelines.loading import read_defaults

    folder = _folder_of(model)
    planned = stand_in(str(folder))
    if planned is None:
        raise ConfigError(f"model: got {model!r}; must have a transformer and a vae with their config.json")
    name = getattr(planned.config, "_class_name", "WanPipeline")
    planned.pipeline_class = getattr(diffusers, name, diffusers.WanPipeline)
    defaults = folder / "videospark_defaults.json"
    planned.videospark_defaults = read_defaults(defaults if defaults.is_file() else None)
    own = folder / RECIPE_FILE
    return planned, resolve(own) if own.is_file() else Recipe("dense")


def _folder_of(model: str) -> Path:
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    patterns = ["model_index.json", "*/config.json", "videospark_*.json"]
    return Path(snapshot_download(model, allow_patterns=patterns))


def usable_recipes(pipe: Any) -> list[Recipe]:
    """The presets that this pipeline, or a stand-in for it, may run: those whose training the weights declare."""
    from ..pipelines.recipe import preset, preset_names

    provided = (getattr(pipe, "videospark_defaults", None) or {}).get("provides", [])
    recipes = [preset(name) for name in preset_names()]
    two_experts = getattr(pipe.config, "boundary_ratio", None)
    return [
        recipe
        for recipe in recipes
        if recipe.requires in (None, *provided) and recipe.sampler.boundary_ratio in (None, two_experts)
    ]


def model_fingerprint(model: str) -> str:
    """A short text that changes when the files of a model folder do; id and commit of a model on the Hub.

    Large files are looked at in 16 places besides their length: retrained weights differ in all of them, and a folder
    of many GB is read in a moment.
    """
    folder = Path(model)
    if not folder.is_dir():
        return f"{model}@{_folder_of(model).name}"
    digest = hashlib.sha256()
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(folder).as_posix()}\0{size}\0".encode())
        with file.open("rb") as stream:
            if size <= _WHOLE_BYTES:
                digest.update(stream.read())
                continue
            for place in range(_SAMPLES):
                stream.seek((size - _WHOLE_BYTES // _SAMPLES) * place // (_SAMPLES - 1))
                digest.update(stream.read(_WHOLE_BYTES // _SAMPLES))
    return digest.hexdigest()[:16]


def request_settings(request: GenerationRequest) -> dict[str, Any]:
    """The request as plain data that names its picture by content, so that a moved file is the same picture."""
    settings = dataclasses.asdict(dataclasses.replace(request, image=None))
    if isinstance(request.image, (str, Path)):
        settings["image"] = hashlib.sha256(Path(request.image).read_bytes()).hexdigest()
    return settings


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out, on a GPU or on the CPU."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("not enough memory" in text or "out of memory" in text)
