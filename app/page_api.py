"""The page's endpoints for programs: named, typed, and checked exactly as the page is. No gradio in here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..core.config import ConfigError, to_dict
from ..pipelines.generation import GenerationRequest
from .history import Clip
from .service import GenerationService
from .service_data import QueueFull, Snapshot, Status, recipe_name

API_SIDE = 100
"""Most clips that one call of `history` lists."""


class ServiceApi:
    """What the endpoints do; each returns plain data.

    Args:
        service: runs the requests.
        upload_folder: where pictures lie that the caller has sent; no other is read.
    """

    def __init__(self, service: GenerationService, upload_folder: Callable[[], Path]) -> None:
        self.service, self._upload_folder = service, upload_folder

    def submit(
        self,
        owner: str | None,
        *,
        prompt: str,
        negative_prompt: str = "",
        image: dict[str, Any] | None = None,
        seed: int = -1,
        width: int | None = None,
        height: int | None = None,
        frames: int | None = None,
        steps: int | None = None,
        guidance: float | None = None,
        recipe: str | None = None,
    ) -> dict[str, Any]:
        """Queues a clip; returns its id and place.

        Raises:
            ConfigError: a wrong request.
            QueueFull: nothing more may wait.
        """
        for name, value in (("prompt", prompt), ("negative_prompt", negative_prompt), ("recipe", recipe)):
            if not isinstance(value, str) and not (name == "recipe" and value is None):
                raise ConfigError(f"{name}: got {value!r}; must be a text")
        if recipe is not None and Path(recipe).suffix:
            raise ConfigError(f"recipe: got {recipe!r}; must be a preset's name")
        request = GenerationRequest(
            prompt, negative_prompt=negative_prompt, image=self._picture(image), seed=_whole("seed", seed),
            width=_whole("width", width), height=_whole("height", height), num_frames=_whole("frames", frames),
            num_inference_steps=_whole("steps", steps), guidance_scale=_number("guidance", guidance),
        )  # fmt: skip
        request_id = self.service.submit(request, recipe or None, owner=owner)
        snapshot = self.service.snapshot(request_id, owner)
        return {"id": request_id, "position": snapshot.position if snapshot else 0}

    def status(self, owner: str | None, request_id: str) -> dict[str, Any]:
        """Where a request stands; with its files where it is done."""
        snapshot = self.service.snapshot(request_id, owner)
        if snapshot is None:
            raise ConfigError(f"id: got {request_id!r}; must be one of your requests")
        return self.describe(snapshot, owner)

    def wait(self, owner: str | None, request_id: str) -> dict[str, Any]:
        """Where a request stands once it is settled."""
        *_, last = self.service.watch(request_id, owner)
        return self.describe(last, owner)

    def describe(self, snapshot: Snapshot, owner: str | None) -> dict[str, Any]:
        """A snapshot as plain data."""
        data: dict[str, Any] = {
            "id": snapshot.id, "status": snapshot.status.value, "position": snapshot.position, "step": snapshot.step,
            "steps": snapshot.steps, "seconds_left": snapshot.seconds_left, "error": snapshot.error,
        }  # fmt: skip
        clip = self.service.clip(snapshot.id, owner) if snapshot.status is Status.done else None
        if clip is not None:
            data |= self.clip_data(clip)
        elif snapshot.request is not None:
            data |= {"seed": snapshot.request.seed, "recipe": recipe_name(snapshot.recipe)}
        return data

    def clip_data(self, clip: Clip) -> dict[str, Any]:
        """A finished clip as plain data, with files as gradio's clients know them."""
        return {
            "prompt": clip.sidecar["prompt"], "seed": clip.sidecar["seed"], "size": clip.sidecar["size"],
            "recipe": clip.origin.get("recipe"), "stages": clip.sidecar["stages"],
            "video": _file(clip.video), "sidecar": _file(clip.sidecar_path),
        }  # fmt: skip

    def history(self, owner: str | None, offset: int, count: int) -> list[dict[str, Any]]:
        """Finished clips, the newest first."""
        first, number = _whole("offset", offset), _whole("count", count)
        if not (first is not None and first >= 0 and number is not None and 1 <= number <= API_SIDE):
            raise ConfigError(f"count: got {count!r} from {offset!r}; must be 1 to {API_SIDE}, from 0 or more")
        clips = self.service.history.page(first, number, owner)
        return [{"id": clip.id, **self.clip_data(clip)} for clip in clips]

    def recipes(self, recipes: Any, own: Any) -> list[dict[str, Any]]:
        """The recipes that the model can run; the first, without a name, is its own."""
        return [{"name": None, "recipe": to_dict(own)}] + [{"name": r.name, "recipe": to_dict(r)} for r in recipes]

    def _picture(self, image: Any) -> str | None:
        if image is None:
            return None
        try:
            path = Path(image["path"]).resolve(strict=True)
        except (TypeError, KeyError, OSError, ValueError, RuntimeError):
            raise ConfigError("image: got no uploaded file; must be one that was sent with the request") from None
        if not path.is_relative_to(Path(self._upload_folder()).resolve()):
            raise ConfigError("image: got a path of this machine; must be a file that was sent with the request")
        return str(path)


def public_error(error: BaseException) -> str | None:
    """The text of an error that its user can mend; None where the log has to tell."""
    if isinstance(error, (ConfigError, QueueFull)) or type(error).__name__ == "NotReady":
        return str(error)
    return None


def _file(path: Path) -> dict[str, Any]:
    return {"path": str(path), "orig_name": path.name, "meta": {"_type": "gradio.FileData"}}


def _whole(name: str, value: Any) -> int | None:
    """A whole number or None; JSON and sliders may spell 5 as 5.0."""
    if value is None or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    if isinstance(value, float) and value.is_integer():
        return int(value)
    raise ConfigError(f"{name}: got {value!r}; must be a whole number")


def _number(name: str, value: Any) -> float | None:
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    raise ConfigError(f"{name}: got {value!r}; must be a number")
