"""What lies beside a clip: the contact sheet, and the JSON sidecar from which the clip can be made again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from PIL import Image

from ..core.config import ConfigError, require
from .generation import GenerationRequest, GenerationResult
from .stages import StageTimer
from .video_io import check_output, contact_sheet, save_video, write_atomically


def write_result(
    result: GenerationResult, output_path: str | Path, *, extra: Mapping[str, Any] | None = None
) -> dict[str, Path]:
    """Writes video, contact sheet and sidecar beside each other; returns their paths by these names.

    The sidecar is written last: where it exists, the video is complete. Its stages include `save`.

    Args:
        result: what to write.
        output_path: of the video, ending in .mp4.
        extra: further entries of the sidecar, such as the model's name; they may not replace its own.
    """
    path = check_output(output_path)
    timer = StageTimer()
    assert result.request.fps is not None
    with timer.stage("save"):
        save_video(result.frames, path, result.request.fps)
        sheet = contact_sheet(result.frames, path.with_suffix(".png"))
    saved = timer.to_dict()
    data = _sidecar(result, path, _with_saving(result.stages, saved))
    taken = sorted(set(data) & set(extra or {}))
    require(not taken, "extra", taken, "other entries than the sidecar's own")
    text = json.dumps({**data, **(extra or {})}, indent=2, ensure_ascii=False) + "\n"
    sidecar = write_atomically(path.with_suffix(".json"), lambda part: part.write_text(text, encoding="utf-8"))
    return {"video": path, "sheet": sheet, "sidecar": sidecar}


def _with_saving(stages: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **stages,
        "seconds": {**stages["seconds"], **saved["seconds"]},
        "total_seconds": stages["total_seconds"] + saved["total_seconds"],
        "peak_memory": {**stages["peak_memory"], **saved["peak_memory"]},
        "process_peak_rss_bytes": saved["process_peak_rss_bytes"],
    }


def request_from_sidecar(path: str | Path) -> GenerationRequest:
    """The request that made a video, from the JSON beside it.

    A first frame that lies beside the sidecar is found there, so that a folder can be moved.

    Raises:
        ConfigError: not such a file, or its first frame was not a file.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        fields = data["request"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"sidecar: got {str(path)!r}; must be the JSON written beside a video ({error})") from error
    if fields.pop("image_in_memory", False):
        raise ConfigError(f"sidecar: got {str(path)!r}, whose first frame was no file; must be given the image again")
    known = {f.name for f in dataclasses.fields(GenerationRequest)}
    extra = sorted(set(fields) - known)
    require(not extra and "prompt" in fields, "sidecar.request", extra, f"made of {', '.join(sorted(known))}")
    beside = Path(path).parent / str(fields.get("image", ""))
    if fields.get("image") is not None and not Path(fields["image"]).is_absolute() and beside.is_file():
        fields["image"] = str(beside)
    return GenerationRequest(**fields)


def _sidecar(result: GenerationResult, path: Path, stages: dict[str, Any]) -> dict[str, Any]:
    request = dataclasses.asdict(dataclasses.replace(result.request, image=None))
    if isinstance(result.request.image, Image.Image):
        request["image_in_memory"] = True
    elif result.request.image is not None:
        image_path = Path(result.request.image)
        beside = image_path.parent.resolve() == path.parent.resolve()
        request["image"] = image_path.name if beside else str(image_path)
    frames, height, width = result.frames.shape[:3]
    return {
        "prompt": result.request.prompt,
        "seed": result.request.seed,
        "request": request,
        "recipe": result.report["recipe"] if result.report else None,
        "size": {"num_frames": frames, "height": height, "width": width},
        "fps": result.request.fps,
        "unknown_words": list(result.unknown_words),
        "notes": list(result.notes),
        "versions": versions(),
        "report": result.report,
        "loras": [dict(lora) for lora in result.loras],
        "stages": stages,
    }


def versions() -> dict[str, str]:
    """Installed versions of what decides the result."""
    found = {}
    for name in ("videospark", "torch", "diffusers", "transformers"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
