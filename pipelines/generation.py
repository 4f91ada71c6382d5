"""One request in, one video out."""

from __future__ import annotations

import dataclasses
import inspect
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from ..core.config import require
from .acceleration import current_report, state_of
from .loading import as_image_to_video, as_text_to_video
from .lora import describe_loras
from .memory import InstalledMemory
from .recipe import Recipe, SamplerConfig
from .scheduling_few_step import FewStepScheduler
from .sizes import check_size
from .stages import StageTimer, resident_bytes
from .video_io import frames_to_uint8, read_image, to_rgb

FALLBACK_FPS = 16
_MAX_SEED = 2**63 - 1
StepCallback = Callable[[int, int, float], None]
CleanLatentsCallback = Callable[[int, torch.Tensor], None]


class GenerationCancelled(Exception):
    """Raise it from `on_step` or `on_clean_latents` to end a run: no further step is computed, and no video made."""


@dataclass(frozen=True)
class GenerationRequest:
    """What the user asks for; None leaves a setting to recipe, checkpoint and diffusers, in this order.

    Attributes:
        prompt: what the video shows; not empty.
        negative_prompt: what it should not; only used with guidance above 1.
        image: first frame, a file or a PIL image; cropped to the video's aspect ratio and resized.
        height: pixels.
        width: pixels.
        num_frames: frames.
        seed: 0 or more; None or -1 draws one, which the result reports.
        num_inference_steps: denoising steps.
        guidance_scale: 1 or less for none.
        fps: frames per second of the file.
    """

    prompt: str
    negative_prompt: str = ""
    image: str | Path | Image.Image | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    seed: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    fps: float | None = None


@dataclass(frozen=True)
class GenerationResult:
    """Frames (uint8 [F, H, W, 3]), the request with every setting resolved, stage times, the recipe's report, and the
    LoRAs that were at work as `describe_loras` gives them.
    """

    frames: np.ndarray
    request: GenerationRequest
    stages: dict[str, Any]
    report: dict[str, Any] | None
    unknown_words: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    loras: tuple[dict[str, Any], ...] = ()


def generate(
    pipe: Any,
    request: GenerationRequest,
    *,
    on_step: StepCallback | None = None,
    on_clean_latents: CleanLatentsCallback | None = None,
) -> GenerationResult:
    """Makes one video.

    Args:
        pipe: a Wan pipeline, accelerated or not.
        request: what to make.
        on_step: called after each step with its index, the number of steps and its seconds; an exception raised
            there ends the run.
        on_clean_latents: called before `on_step` with the step's index and the clean latents [1, C, F', H', W'] that
            the model predicts by now, for a preview. Its time counts for no step, but for the stage `denoise`.

    Raises:
        ConfigError: a setting that this pipeline or its recipe cannot run; raised before any work.
        FloatingPointError: NaN or infinite values, naming step and recipe.
    """
    # 1. Resolve and check everything before any work.
    pipe = as_text_to_video(pipe) if request.image is None else as_image_to_video(pipe)
    request = resolve_request(pipe, request)
    image = _prepare_image(request)
    unknown = warn_unknown_words(pipe.tokenizer, request.prompt)
    notes = request_notes(pipe, request)
    timer = StageTimer(pipe._execution_device)
    try:
        with torch.no_grad():
            # 2. Text to embeddings.
            with timer.stage("text"):
                embeddings = _encode_text(pipe, request)
            # 3. Noise to latents.
            with timer.stage("denoise"):
                latents = _denoise(pipe, request, image, embeddings, timer, on_step, on_clean_latents)
            # 4. Latents to pixels.
            resident = resident_bytes()
            with timer.stage("decode"):
                frames = decode(pipe, latents)
            _note_decode(pipe, resident, timer)
    finally:
        pipe.maybe_free_model_hooks()
    report = current_report(pipe)
    data, loras = report.to_dict() if report else None, tuple(describe_loras(pipe))
    return GenerationResult(frames, request, timer.to_dict(), data, unknown, notes, loras)


def resolve_request(pipe: Any, request: GenerationRequest, recipe: Recipe | None = None) -> GenerationRequest:
    """The request with every setting filled in and checked.

    Args:
        pipe: a Wan pipeline, or anything with its configurations, such as `app.model_folder.stand_in` makes.
        request: what to fill in.
        recipe: as if this one were applied; None is what is applied now.

    Raises:
        ConfigError: names the field, its value and the rule.
    """
    sampler = recipe.sampler if recipe is not None else _sampler(pipe)
    name = recipe.name if recipe is not None else _recipe_name(pipe)
    defaults = default_settings(pipe)
    require(isinstance(request.prompt, str) and bool(request.prompt.strip()), "prompt", request.prompt, "not empty")

    def pick(name: str, *sources: Any) -> Any:
        given = (getattr(request, name), *sources, defaults.get(name))
        return next((value for value in given if value is not None), None)

    steps = pick("num_inference_steps", sampler.steps)
    guidance = pick("guidance_scale", sampler.guidance_scale)
    whole = isinstance(steps, int) and not isinstance(steps, bool)
    require(whole and steps >= 1, "num_inference_steps", steps, "a whole number, at least 1")
    if sampler.sigmas is not None:
        rule = f"{sampler.steps}, the steps of recipe {name!r}, or left out"
        require(steps == sampler.steps, "num_inference_steps", steps, rule)
    require(np.isfinite(guidance) and guidance >= 0, "guidance_scale", guidance, "0 or more")
    for note in _guidance_notes(guidance, sampler, name):
        warnings.warn(note, stacklevel=3)
    fps = pick("fps")
    require(np.isfinite(fps) and fps > 0, "fps", fps, "more than 0")
    size = {name: pick(name) for name in ("height", "width", "num_frames")}
    check_size(pipe, **size)
    return dataclasses.replace(
        request, seed=resolve_seed(request.seed), num_inference_steps=steps, guidance_scale=guidance, fps=fps, **size
    )


def request_notes(pipe: Any, request: GenerationRequest) -> tuple[str, ...]:
    """What the user should know about a resolved request; the same texts as the warnings of `resolve_request`."""
    return _guidance_notes(request.guidance_scale, _sampler(pipe), _recipe_name(pipe))


def _guidance_notes(guidance: float | None, sampler: SamplerConfig, recipe_name: str) -> tuple[str, ...]:
    if sampler.guidance_scale is None or guidance == sampler.guidance_scale:
        return ()
    return (
        f"guidance_scale: {guidance} was asked for, but recipe {recipe_name!r} was made for "
        f"{sampler.guidance_scale}: expect worse videos",
    )


def resolve_seed(seed: int | None) -> int:
    """The seed itself (0 is one), or a random one for None and -1."""
    if seed is None or seed == -1:
        return secrets.randbelow(2**32)
    whole = isinstance(seed, int) and not isinstance(seed, bool)
    require(whole and 0 <= seed <= _MAX_SEED, "seed", seed, f"a whole number in 0..{_MAX_SEED}, or -1 for a random one")
    return seed


def warn_unknown_words(tokenizer: Any, prompt: str) -> tuple[str, ...]:
    """Words of the prompt that the tokenizer does not know; one warning that lists them."""
    unknown_id = getattr(tokenizer, "unk_token_id", None)
    if unknown_id is None or not getattr(tokenizer, "is_fast", False):
        return ()
    encoded = tokenizer(prompt, return_offsets_mapping=True, add_special_tokens=False)
    spans = zip(encoded["input_ids"], encoded["offset_mapping"], strict=True)
    words = tuple(dict.fromkeys(prompt[start:end] for token, (start, end) in spans if token == unknown_id))
    if words:
        warnings.warn(f"prompt: the model does not know these words and ignores them: {', '.join(words)}", stacklevel=3)
    return words


@torch.no_grad()
def decode(pipe: Any, latents: torch.Tensor) -> np.ndarray:
    """Latents [1, C, F', H', W'] to frames uint8 [F, H, W, 3]; FloatingPointError on NaN or infinite pixels."""
    vae = pipe.vae
    shape = (1, vae.config.z_dim, 1, 1, 1)
    latents = latents.to(device=pipe._execution_device, dtype=vae.dtype)
    scale = torch.tensor(vae.config.latents_std).to(latents).view(shape)
    centre = torch.tensor(vae.config.latents_mean).to(latents).view(shape)
    pixels = vae.decode(latents * scale + centre, return_dict=False)[0]
    array = pixels[0].permute(1, 2, 3, 0).float().cpu().numpy()
    return frames_to_uint8(array / 2 + 0.5)


def _sampler(pipe: Any) -> SamplerConfig:
    state = state_of(pipe)
    if state is not None:
        return state.recipe.sampler
    if isinstance(pipe.scheduler, FewStepScheduler):
        return SamplerConfig(sigmas=tuple(pipe.scheduler.config.sigmas))
    return SamplerConfig()


def _recipe_name(pipe: Any) -> str:
    state = state_of(pipe)
    return state.recipe.name if state is not None else "none"


def default_settings(pipe: Any) -> dict[str, Any]:
    """Defaults of diffusers, overlaid by the checkpoint's own."""
    # A stand-in, which has a model's configurations and no weights, names the class that it stands for.
    signature = inspect.signature(getattr(pipe, "pipeline_class", type(pipe)).__call__).parameters
    names = ("height", "width", "num_frames", "num_inference_steps", "guidance_scale", "max_sequence_length")
    own: Mapping[str, Any] = getattr(pipe, "videospark_defaults", None) or {}
    return {"fps": FALLBACK_FPS, **{name: signature[name].default for name in names}, **own}


def _prepare_image(request: GenerationRequest) -> Image.Image | None:
    if request.image is None:
        return None
    assert request.width is not None and request.height is not None  # resolved before
    image = to_rgb(request.image) if isinstance(request.image, Image.Image) else read_image(request.image)
    return ImageOps.fit(image, (request.width, request.height), Image.Resampling.LANCZOS)


def _encode_text(pipe: Any, request: GenerationRequest) -> dict[str, Any]:
    assert request.guidance_scale is not None  # resolved before
    length = default_settings(pipe)["max_sequence_length"]
    state = state_of(pipe)
    if state is not None and state.memory is not None:
        return _encode_saving(pipe, request, state.memory, length)
    positive, negative = pipe.encode_prompt(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        do_classifier_free_guidance=request.guidance_scale > 1,
        max_sequence_length=length,
        device=pipe._execution_device,
    )
    return {"prompt_embeds": positive, "negative_prompt_embeds": negative, "max_sequence_length": length}


def _encode_saving(pipe: Any, request: GenerationRequest, memory: InstalledMemory, length: int) -> dict[str, Any]:
    """As `_encode_text`, from the cache where it can, and with the text encoder let go afterwards."""
    positive = memory.encode(pipe, request.prompt, length)
    guided = request.guidance_scale is not None and request.guidance_scale > 1
    negative = memory.encode(pipe, request.negative_prompt or "", length) if guided else None
    memory.release()
    return {"prompt_embeds": positive, "negative_prompt_embeds": negative, "max_sequence_length": length}


def _note_decode(pipe: Any, resident: int | None, timer: StageTimer) -> None:
    state = state_of(pipe)
    if state is not None and state.memory is not None:
        state.memory.note_decode(resident, timer.memory["decode"])


def _denoise(
    pipe: Any,
    request: GenerationRequest,
    image: Image.Image | None,
    embeddings: dict[str, Any],
    timer: StageTimer,
    on_step: StepCallback | None,
    on_clean_latents: CleanLatentsCallback | None = None,
) -> torch.Tensor:
    """Runs the stock denoising loop; returns latents [1, C, F', H', W']."""
    steps = request.num_inference_steps
    assert steps is not None and request.seed is not None  # resolved before
    sampler = _sampler(pipe)

    def after_step(_: Any, index: int, __: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        seconds = timer.step_done()
        if not torch.isfinite(tensors["latents"]).all():
            raise FloatingPointError(
                f"latents: NaN or infinite after step {index + 1} of {steps} with recipe {_recipe_name(pipe)!r}; "
                "no video is made"
            )
        if on_clean_latents is not None and clean:
            on_clean_latents(index, clean[0])
            timer.restart_step()
        if on_step is not None:
            on_step(index, steps, seconds)
        return {}

    clean: list[torch.Tensor] = []

    # On the CPU, so that a seed means the same noise on every device.
    generator = torch.Generator("cpu").manual_seed(request.seed)
    extra: dict[str, Any] = {} if image is None else {"image": image}
    if pipe.config.boundary_ratio is not None and sampler.guidance_scale_2 is not None:
        extra["guidance_scale_2"] = sampler.guidance_scale_2
    few_step = isinstance(pipe.scheduler, FewStepScheduler)
    if few_step:
        pipe.scheduler.set_generator(generator)
    timer.start_steps()
    try:
        with _watch_clean_latents(pipe.scheduler, clean, on_clean_latents is not None):
            output = pipe(
                height=request.height, width=request.width, num_frames=request.num_frames, num_inference_steps=steps,
                guidance_scale=request.guidance_scale, generator=generator, output_type="latent", return_dict=False,
                callback_on_step_end=after_step, **embeddings, **extra,
            )  # fmt: skip
    finally:
        if few_step:
            pipe.scheduler.set_generator(None)
    return output[0]


@contextmanager
def _watch_clean_latents(scheduler: Any, found: list[torch.Tensor], wanted: bool) -> Iterator[None]:
    """Leaves in `found` what each step of a flow scheduler predicts as clean: x0 = x_s - s v.

    The pipelines hand neither the velocity v nor x_s to their callback, so the scheduler's `step` is listened to for
    the length of the run. Which tensors it gets and returns stays as it is.
    """
    if not wanted:
        yield
        return
    step = scheduler.step

    def listening(model_output: torch.Tensor, timestep: Any, sample: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        index = scheduler.step_index
        if index is None:
            index = scheduler.begin_index or 0
        sigma = float(scheduler.sigmas[index])
        found[:] = [sample.float() - sigma * model_output.float()]
        return step(model_output, timestep, sample, *args, **kwargs)

    scheduler.step = listening
    try:
        yield
    finally:
        del scheduler.step
