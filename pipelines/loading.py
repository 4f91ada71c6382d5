"""Pipelines from and to folders of the diffusers layout, with the recipe and the defaults they were made for.

Optional files lie beside those of diffusers, so that the folder stays loadable by diffusers alone:
`videospark_recipe.json` (applied when loading), `videospark_defaults.json` (sizes, steps, guidance) and, in the folder
of each denoiser with a linear branch, `videospark_branch.safetensors`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from diffusers import DiffusionPipeline, WanImageToVideoPipeline, WanPipeline
from safetensors.torch import load_file as load_tensors
from safetensors.torch import save_file as save_tensors

from ..core.config import ConfigError, require, save_file
from ..quantization.loading import QUANTIZED_FILE, load_quantized_transformer
from .acceleration import EXPERTS, accelerate, attach_branches, attach_state, branches_of, state_of
from .offload import MODES, place
from .recipe import RECIPE_FILE, Recipe, resolve
from .video_io import write_atomically

DEFAULTS_FILE = "videospark_defaults.json"
BRANCH_FILE = "videospark_branch.safetensors"
_ANY_DEVICE = ("auto", "int_mm", "reference")
"""Engines that quantize on one device and multiply on another."""
DEFAULT_KEYS = (
    "height", "width", "num_frames", "fps", "num_inference_steps", "guidance_scale", "max_sequence_length",
    "provides",
)  # fmt: skip


def load(
    path_or_id: str | Path,
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    recipe: Recipe | str | Path | Mapping[str, Any] | None = None,
    image_to_video: bool = False,
    allow_untrained: bool = False,
    offload: str = "none",
    size: tuple[int, int, int] | None = None,
) -> Any:
    """Loads a Wan pipeline, attaches its defaults and applies its recipe.

    Args:
        path_or_id: a folder of the diffusers layout, or the id of one on the Hub.
        device: where to put it; None picks the best one.
        dtype: of text encoder and transformer, None picks by device; the VAE stays in float32.
        recipe: instead of the checkpoint's own; "dense" for none.
        image_to_video: give the image-to-video pipeline of the same weights.
        allow_untrained: see `accelerate`.
        offload: where its parts lie while it runs, see `offload.place`; with any but "none" the whole is never on the
            device at once.
        size: width, height and frames that "auto" plans for.

    Weights that are quantized are never on the device in 16 bits as a whole: they are quantized in RAM, and with
    originals "drop", or where they are stored in eight bits, read and quantized block by block.

    Raises:
        ConfigError: no such folder, not a Wan pipeline, broken files, an offloading that it cannot have, or a recipe
            with a linear branch whose tensors did not come with the weights (unless `allow_untrained`).
    """
    from ..core.devices import default_dtype, pick_device

    target = pick_device(str(device) if device is not None else None)
    dtype = dtype if dtype is not None else default_dtype(target)
    require(offload in MODES, "offload", offload, f"one of {', '.join(MODES)}")
    folder = Path(path_or_id)
    looks_local = isinstance(path_or_id, Path) or folder.is_absolute() or len(folder.parts) != 2 or folder.exists()
    if looks_local and not (folder / "model_index.json").is_file():
        raise ConfigError(f"model: got {str(path_or_id)!r}; must be a folder with a model_index.json, or a Hub id")
    applied = own_recipe(path_or_id) if recipe is None else resolve(recipe)
    pipe = _read_pipeline(path_or_id, dtype, applied, target if offload == "none" else torch.device("cpu"))
    # What is quantized is whole in 16 bits in RAM alone: the card may have no room for that.
    in_ram = offload != "none" or (applied is not None and applied.quantization.engine in _ANY_DEVICE
                                   and applied.quantization.mode != "none")  # fmt: skip
    if not in_ram:
        pipe.to(target)
    pipe.videospark_defaults = read_defaults(_side_file(path_or_id, DEFAULTS_FILE))
    if image_to_video:
        pipe = as_image_to_video(pipe)
    attach_branches(pipe, _read_branches(path_or_id, pipe))
    if applied is not None:
        _check_branches(pipe, applied, allow_untrained)
        accelerate(pipe, applied, allow_untrained=allow_untrained, device=target)
    if offload != "none":
        place(pipe, offload, target, size=size)
    elif in_ram:
        pipe.to(target)
    return pipe


def own_recipe(path_or_id: str | Path) -> Recipe | None:
    """The recipe that came with a model; None where there is none."""
    file = _side_file(path_or_id, RECIPE_FILE)
    return None if file is None else resolve(file)


def _read_pipeline(path_or_id: str | Path, dtype: torch.dtype, recipe: Recipe | None, device: torch.device) -> Any:
    """The pipeline in RAM; denoisers that are in eight bits for good are read by block, straight to the device."""
    place, parts = str(path_or_id), {}
    for name in _eight_bit_denoisers(path_or_id, recipe):
        assert recipe is not None
        place = place if Path(place).is_dir() else str(DiffusionPipeline.download(place))
        folder = Path(place) / name
        parts[name], _ = load_quantized_transformer(folder, recipe.quantization, device=device, dtype=dtype)
    # The base class would load denoisers that it is given once more: only their own class knows them as optional.
    kind = _pipeline_class(place) if parts else DiffusionPipeline
    pipe = kind.from_pretrained(place, dtype={"default": dtype, "vae": torch.float32}, **parts)
    require(
        isinstance(pipe, (WanPipeline, WanImageToVideoPipeline)),
        "model",
        type(pipe).__name__,
        "a WanPipeline or a WanImageToVideoPipeline",
    )
    return pipe


def _pipeline_class(folder: str) -> Any:
    name = json.loads((Path(folder) / "model_index.json").read_text(encoding="utf-8")).get("_class_name")
    known = {one.__name__: one for one in (WanPipeline, WanImageToVideoPipeline)}
    require(name in known, "model", name, f"a {' or a '.join(known)}")
    return known[name]


def _eight_bit_denoisers(path_or_id: str | Path, recipe: Recipe | None) -> list[str]:
    """Denoisers whose 16-bit weights are never wanted: stored in eight bits, or quantized with originals "drop"."""
    config = None if recipe is None else recipe.quantization
    names = [name for name in EXPERTS if _side_file(path_or_id, f"{name}/config.json") is not None]
    stored = [name for name in names if (Path(path_or_id) / name / QUANTIZED_FILE).is_file()]
    if config is None or config.mode == "none":
        rule = "given: the model is stored in eight bits, and runs by a recipe with the quantization that made it"
        require(not stored, "recipe", None if recipe is None else recipe.name, rule)
        return []
    drops = config.originals == "drop" and config.engine in _ANY_DEVICE and config.hot_channels == 0
    return names if drops else stored


def _check_branches(pipe: Any, recipe: Recipe, allow_untrained: bool) -> None:
    """A branch whose tensors did not come with the weights would be a random one."""
    lacking = recipe.attention.branch != "none" and branches_of(pipe) is None
    rule = (f"one without a branch, or for a model that comes with {BRANCH_FILE} (`videospark convert`, `videospark "
            "calibrate --save-model`); allow_untrained starts a new branch")  # fmt: skip
    require(not lacking or allow_untrained, "recipe.attention.branch", recipe.attention.branch, rule)


def save(pipe: Any, folder: str | Path) -> Path:
    """Writes the pipeline as stock diffusers would, plus its recipe and defaults.

    The scheduler written is the original one: the recipe builds its own again when loading.
    """
    folder = Path(folder)
    state = state_of(pipe)
    scheduler = pipe.scheduler
    if state is not None:
        pipe.scheduler = state.original_scheduler
    try:
        with ExitStack() as stack:
            for installed in state.installed.values() if state is not None else ():
                stack.enter_context(installed.without_branches())
            for quantized in state.quantized.values() if state is not None else ():
                stack.enter_context(quantized.suspended())
            if state is not None and state.memory is not None:
                stack.enter_context(state.memory.whole())
            pipe.save_pretrained(folder)
    finally:
        if state is not None:
            pipe.scheduler = scheduler
    for name in EXPERTS:
        tensors = {} if state is None or name not in state.installed else state.installed[name].branch_state()
        file = folder / name / BRANCH_FILE
        if tensors:
            whole = {key: tensor.cpu().contiguous() for key, tensor in tensors.items()}
            write_atomically(file, lambda partial, whole=whole: save_tensors(whole, partial))  # type: ignore[misc]
        else:
            file.unlink(missing_ok=True)  # left from an earlier save
    defaults = getattr(pipe, "videospark_defaults", None)
    if defaults:
        text = json.dumps(defaults, indent=2) + "\n"
        write_atomically(folder / DEFAULTS_FILE, lambda partial: partial.write_text(text, encoding="utf-8"))
    recipe_file = folder / RECIPE_FILE
    if state is not None:
        save_file(state.recipe, recipe_file)
    else:
        # A recipe left from an earlier save would silently change what is loaded.
        recipe_file.unlink(missing_ok=True)
    return folder


def read_defaults(path: Path | None) -> dict[str, Any]:
    """The model's own defaults; empty where there is no file. Unknown keys and wrong types are errors."""
    if path is None:
        return {}
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path.name}: got a file that is no JSON ({error}); must be a JSON object") from error
    require(isinstance(data, dict), path.name, data, "a JSON object")
    for key, value in data.items():
        require(key in DEFAULT_KEYS, path.name, key, f"one of {', '.join(DEFAULT_KEYS)}")
        if key != "provides":
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            require(number and value >= 0, f"{path.name}.{key}", value, "a number, 0 or more")
    return data


def as_image_to_video(pipe: Any) -> Any:
    """The image-to-video pipeline of the same components; the pipeline itself where it is one already.

    Raises:
        ConfigError: the weights were not trained for it (only `expand_timesteps` models serve both).
    """
    return _sibling(pipe, WanImageToVideoPipeline, "an image")


def as_text_to_video(pipe: Any) -> Any:
    """The text-to-video pipeline of the same components; see `as_image_to_video`."""
    return _sibling(pipe, WanPipeline, "no image")


def _sibling(pipe: Any, target: type, wish: str) -> Any:
    if isinstance(pipe, target):
        return pipe
    if not pipe.config.expand_timesteps:
        raise ConfigError(
            f"image: got {wish} for a {type(pipe).__name__}; must fit the model: load a {target.__name__} instead"
        )
    accepted = inspect.signature(target).parameters
    parts = {name: part for name, part in pipe.components.items() if name in accepted}
    settings = {"boundary_ratio": pipe.config.boundary_ratio, "expand_timesteps": pipe.config.expand_timesteps}
    sibling = target(**parts, **settings)
    sibling.videospark_defaults = getattr(pipe, "videospark_defaults", {})
    if hasattr(pipe, "_progress_bar_config"):
        sibling.set_progress_bar_config(**pipe._progress_bar_config)
    # Shared modules carry the same hooks, so the sibling is accelerated exactly when the original is.
    attach_state(sibling, state_of(pipe))
    attach_branches(sibling, branches_of(pipe))
    # The hooks ask the original, weakly referenced, for the step: it has to live as long as its sibling.
    object.__setattr__(sibling, "_videospark_origin", pipe)
    return sibling


def _read_branches(path_or_id: str | Path, pipe: Any) -> dict[str, dict[str, torch.Tensor]] | None:
    """The tensors of the linear branches, by denoiser; None where the checkpoint has none at all."""
    names = [name for name in EXPERTS if getattr(pipe, name, None) is not None]
    files = {name: _side_file(path_or_id, f"{name}/{BRANCH_FILE}") for name in names}
    if not any(files.values()):
        return None
    missing = [name for name, file in files.items() if file is None]
    require(not missing, "model", missing, f"with {BRANCH_FILE} for each of {', '.join(names)}")
    return {name: load_tensors(file) for name, file in files.items() if file is not None}


def _side_file(path_or_id: str | Path, name: str) -> Path | None:
    folder = Path(path_or_id)
    if folder.is_dir():
        return folder / name if (folder / name).is_file() else None
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import EntryNotFoundError

    try:
        return Path(hf_hub_download(str(path_or_id), name))
    except EntryNotFoundError:
        return None
