"""The nodes themselves: ComfyUI's contract on the outside, `app.service.GenerationService` on the inside.

A node is a class with `INPUT_TYPES`, `RETURN_TYPES`, `FUNCTION` and `CATEGORY`. ComfyUI keeps the objects between runs,
so that a loaded model stays with its node until other settings are asked for. Values of 0 (or -1) leave a setting to
the model and its recipe.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CATEGORY = "videospark"
OWN = "the model's own"
MODEL, RECIPE = "VIDEOSPARK_MODEL", "VIDEOSPARK_RECIPE"
PRESETS = (
    "dense", "sparse-50", "sparse-90", "tiny-sparse-50", "spark-2step", "spark-3step", "spark-4step", "spark-8step",
    "spark22-4step", "lightx2v-4step", "fp8", "spark-3step-fp8", "int8", "spark-3step-int8",
)  # fmt: skip
"""Names of the built-in recipes, written down so that ComfyUI starts without importing them; a test compares."""
OFFLOADS = ("auto", "none", "experts", "model", "group")
SEED_LIMIT = 2**63 - 1
POLL_SECONDS = 0.2


@dataclass
class LoadedStudent:
    """What runs between nodes: a service that has loaded its model, and the frames of its latest clip."""

    service: Any
    engine: Any


class LoadStudent:
    """A converted student, or any Wan pipeline in diffusers layout, loaded and ready."""

    CATEGORY = CATEGORY
    RETURN_TYPES = (MODEL,)
    RETURN_NAMES = ("model",)
    FUNCTION = "load"
    DESCRIPTION = "Loads a folder that `videospark convert` made, or any Wan pipeline in diffusers layout."

    def __init__(self) -> None:
        self._loaded: LoadedStudent | None = None

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Folder or hub id, device and offloading; an empty folder is the embedded tiny model."""
        return {
            "required": {"model": ("STRING", {"default": "", "tooltip": "Folder or hub id; empty: the tiny model."})},
            "optional": {
                "device": ("STRING", {"default": "", "tooltip": "cuda, cuda:1, cpu; empty: the best one."}),
                "offload": (list(OFFLOADS), {"default": "auto", "tooltip": "auto: what the planner finds to fit."}),
                "unload_comfyui_models": ("BOOLEAN", {"default": True}),
            },
        }

    def load(
        self, model: str, device: str = "", offload: str = "auto", unload_comfyui_models: bool = True
    ) -> tuple[LoadedStudent]:
        """Load it; the one loaded before by this node goes first, as both rarely fit."""
        from ...core.devices import pick_device
        from ..model_folder import locate_model
        from ..service import GenerationService
        from .frames import FrameKeepingEngine

        located, where = locate_model(model.strip() or None), pick_device(device.strip() or None)
        if self._loaded is not None:
            self._loaded.service.close()
            self._loaded = None
        if unload_comfyui_models:
            _call_comfy("comfy.model_management", "unload_all_models")
        engine = FrameKeepingEngine(located, where, offload=offload)
        name = Path(located).name if Path(located).is_dir() else located
        service = GenerationService([engine], clip_folder(), model_name=name).start()
        service.wait_until_ready()
        self._loaded = LoadedStudent(service, engine)
        # A node that is deleted from its workflow must not keep a card full: ComfyUI only drops the object.
        weakref.finalize(self._loaded, service.close).atexit = False
        return (self._loaded,)


class ChooseRecipe:
    """A built-in recipe or a recipe file, with another keep ratio where one is given."""

    CATEGORY = CATEGORY
    RETURN_TYPES = (RECIPE,)
    RETURN_NAMES = ("recipe",)
    FUNCTION = "choose"
    DESCRIPTION = "How a clip is computed; a model that came with a recipe of its own needs none."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Preset, file, keep ratio."""
        ratio = {"default": 0.0, "min": 0.0, "max": 1.0, "step": 0.01, "tooltip": "0: as the recipe says."}
        return {
            "required": {"preset": (list(PRESETS), {"default": "dense"})},
            "optional": {
                "file": ("STRING", {"default": "", "tooltip": "A .json or .toml recipe, instead of the preset."}),
                "keep_ratio": ("FLOAT", ratio),
            },
        }

    def choose(self, preset: str, file: str = "", keep_ratio: float = 0.0) -> tuple[Any]:
        """The recipe."""
        import dataclasses

        from ...core.config import require
        from ...pipelines.recipe import resolve

        recipe = resolve(file.strip() or preset)
        if keep_ratio > 0:
            sparse = recipe.attention.backend != "dense"
            require(sparse, "keep_ratio", keep_ratio, f"0 with recipe {recipe.name!r}, which is dense")
            attention = dataclasses.replace(recipe.attention, keep_ratio=keep_ratio, keep_ratios=())
            recipe = dataclasses.replace(recipe, attention=attention)
        return (recipe,)


_SIZE = {
    "width": ("INT", {"default": 0, "min": 0, "max": 8192, "step": 8, "tooltip": "0: the model's own."}),
    "height": ("INT", {"default": 0, "min": 0, "max": 8192, "step": 8}),
    "frames": ("INT", {"default": 0, "min": 0, "max": 1025}),
    "steps": ("INT", {"default": 0, "min": 0, "max": 1000}),
    "guidance": ("FLOAT", {"default": -1.0, "min": -1.0, "max": 100.0, "step": 0.1, "tooltip": "-1: its own."}),
    "negative_prompt": ("STRING", {"default": "", "multiline": True}),
    "recipe": (RECIPE, {}),
}
_SEED = ("INT", {"default": 0, "min": 0, "max": SEED_LIMIT, "control_after_generate": True})


class TextToVideo:
    """A clip from a prompt: its frames, the mp4, and the sidecar that makes it again."""

    CATEGORY = CATEGORY
    RETURN_TYPES: tuple[str, ...] = ("IMAGE", "FLOAT", "STRING", "STRING")
    RETURN_NAMES: tuple[str, ...] = ("frames", "fps", "video_file", "sidecar")
    FUNCTION = "generate"
    DESCRIPTION = "Frames go on to any node for images; the mp4 and its sidecar lie in ComfyUI's output folder."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """Model, prompt, seed, and the settings that may be left to the model."""
        prompt = ("STRING", {"default": "", "multiline": True})
        return {"required": {"model": (MODEL, {}), "prompt": prompt, "seed": _SEED}, "optional": dict(_SIZE)}

    def generate(
        self,
        model: LoadedStudent,
        prompt: str,
        seed: int,
        width: int = 0,
        height: int = 0,
        frames: int = 0,
        steps: int = 0,
        guidance: float = -1.0,
        negative_prompt: str = "",
        recipe: Any = None,
        image: Any = None,
    ) -> tuple[Any, float, str, str]:
        """Run one request through the service.

        Raises:
            ValueError: a setting that this model or recipe cannot run.
            RuntimeError: what broke while it ran, as the service words it.
        """
        from ...pipelines.generation import GenerationRequest
        from .frames import first_picture, to_images

        request = GenerationRequest(
            prompt, negative_prompt, first_picture(image), height or None, width or None, frames or None, seed,
            steps or None, None if guidance < 0 else guidance,
        )  # fmt: skip
        clip = run_to_the_end(model.service, request, recipe)
        fps = float(clip.sidecar["fps"])
        return to_images(model.engine.take_frames()), fps, str(clip.video), str(clip.sidecar_path)


class ImageToVideo(TextToVideo):
    """A clip that begins with a picture; of a batch the first one is taken."""

    DESCRIPTION = "As Text to Video, beginning with a picture."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        """As `TextToVideo`, and a picture."""
        inputs = TextToVideo.INPUT_TYPES()
        inputs["required"]["image"] = ("IMAGE", {})
        return inputs


def run_to_the_end(service: Any, request: Any, recipe: Any) -> Any:
    """The finished clip; ComfyUI's progress bar follows, and its cancel button cancels within a step.

    Raises:
        RuntimeError: it failed.
    """
    request_id = service.submit(request, recipe)
    bar, last = None, None
    try:
        for snapshot in service.watch(request_id, poll=POLL_SECONDS):
            _call_comfy("comfy.model_management", "throw_exception_if_processing_interrupted")
            if snapshot.steps and bar is None:
                bar = _call_comfy("comfy.utils", "ProgressBar", snapshot.steps) or _NoBar()
            if bar is not None:
                bar.update_absolute(snapshot.step, snapshot.steps)
            last = snapshot
    except BaseException:
        service.cancel(request_id)
        raise
    clip = service.clip(request_id)
    if clip is None:
        cause = "is gone" if last is None else last.error or f"was {last.status.value}"
        raise RuntimeError(f"the clip of request {request_id}: {cause}")
    return clip


class _NoBar:
    """Outside of ComfyUI."""

    def update_absolute(self, value: int, total: int) -> None:
        """Nothing to draw on."""


def clip_folder() -> Path:
    """Where clips go: a folder of ComfyUI's output, or of this one's."""
    found = _call_comfy("folder_paths", "get_output_directory")
    return Path(found or "output") / "videospark"


def _call_comfy(module: str, function: str, *arguments: Any) -> Any:
    """Calls a function of the ComfyUI that this process is; None where it is none."""
    import sys

    loaded = sys.modules.get(module)
    call: Callable[..., Any] | None = None if loaded is None else getattr(loaded, function, None)
    return None if call is None else call(*arguments)


NODE_CLASS_MAPPINGS = {
    "VideosparkLoadStudent": LoadStudent,
    "VideosparkRecipe": ChooseRecipe,
    "VideosparkTextToVideo": TextToVideo,
    "VideosparkImageToVideo": ImageToVideo,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "VideosparkLoadStudent": "Load Student (videospark)",
    "VideosparkRecipe": "Recipe (videospark)",
    "VideosparkTextToVideo": "Text to Video (videospark)",
    "VideosparkImageToVideo": "Image to Video (videospark)",
}
