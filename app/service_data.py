"""What goes in and out of the service: limits, states and snapshots of requests, refusals."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from ..core.config import ConfigError, require
from ..pipelines.generation import GenerationRequest
from ..pipelines.recipe import Recipe
from .console import describe_error
from .engine import is_out_of_memory


class QueueFull(RuntimeError):
    """The queue holds as many requests as it may."""


class NotReady(RuntimeError):
    """The model could not be loaded."""


class Status(str, enum.Enum):
    """What may become of a request."""

    queued = "queued"
    running = "running"
    done = "done"
    failed = "failed"
    cancelled = "cancelled"

    @property
    def settled(self) -> bool:
        """Whether it stays so."""
        return self in (Status.done, Status.failed, Status.cancelled)


@dataclass(frozen=True)
class ServiceLimits:
    """What one request, and all of them together, may ask for.

    Attributes:
        max_queue: requests that wait; a further one is refused.
        max_background: the same for those of job files, which run when nothing else waits.
        max_pixels: height times width times frames.
        max_steps: denoising steps.
        max_prompt_characters: of prompt and negative prompt each.
        max_image_pixels: of a first frame as it is given.
        preview_seconds: least time between two previews; each costs a decoded frame.
    """

    max_queue: int = 32
    max_background: int = 500
    max_pixels: int = 1280 * 720 * 121
    max_steps: int = 100
    max_prompt_characters: int = 4000
    max_image_pixels: int = 50_000_000
    preview_seconds: float = 0.3

    def __post_init__(self) -> None:
        for name in ("max_queue", "max_background", "max_pixels", "max_steps", "max_prompt_characters"):
            require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")

    def check(self, request: GenerationRequest) -> None:
        """Raises ConfigError where a resolved request is too large."""
        assert request.height and request.width and request.num_frames and request.num_inference_steps
        pixels = request.height * request.width * request.num_frames
        size = f"{request.width}x{request.height}x{request.num_frames}"
        require(pixels <= self.max_pixels, "size", size, f"at most {self.max_pixels} pixels over all frames here")
        steps = request.num_inference_steps
        require(steps <= self.max_steps, "num_inference_steps", steps, f"at most {self.max_steps} here")

    def check_texts(self, request: GenerationRequest) -> None:
        """Raises ConfigError where a text is too long."""
        for name in ("prompt", "negative_prompt"):
            length = len(getattr(request, name) or "")
            rule = f"at most {self.max_prompt_characters} characters"
            require(length <= self.max_prompt_characters, name, f"{length} characters", rule)


@dataclass(frozen=True)
class Snapshot:
    """What is known of a request at one moment.

    Attributes:
        id: of the request, and of its clip.
        status: see `Status`.
        version: grows with every change.
        position: requests that run before it; 0 once it runs.
        step: denoising steps done.
        steps: of how many.
        seconds_left: until the clip is there, by what was measured; None where nothing was.
        preview: picture of the present state, uint8 [H, W, 3]; None before the first and after the end.
        error: short cause of a failure.
        request: with every setting resolved.
        recipe: as it was asked for; None is the model's own.
        label: what the asker calls it, such as a job's id.
        group: id of the job file that it belongs to.
    """

    id: str
    status: Status
    version: int = 0
    position: int = 0
    step: int = 0
    steps: int = 0
    seconds_left: float | None = None
    preview: np.ndarray | None = None
    error: str | None = None
    request: GenerationRequest | None = None
    recipe: str | Recipe | None = None
    label: str = ""
    group: str | None = None


def short_cause(error: BaseException, request_id: str) -> str:
    """What the user reads: the rule that was broken where it is theirs to mend, else the id to look for in the log."""
    if is_out_of_memory(error):
        return f"out of memory: ask for a smaller size or fewer frames (request {request_id})"
    if isinstance(error, (ConfigError, FloatingPointError)):
        return f"{describe_error(error)} (request {request_id})"
    return f"something broke; the log says what under request {request_id}"


def recipe_name(recipe: str | Recipe | None) -> str | None:
    """The name of a recipe as it was asked for; None is the model's own."""
    return recipe.name if isinstance(recipe, Recipe) else recipe
