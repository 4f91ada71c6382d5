"""Where clips come from: folders and tables of videos, prompt lists, the tiny world."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from ..core.config import ConfigError, require

VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".gif")


@dataclass(frozen=True)
class SourceItem:
    """One clip to be: an id that no other has, its caption, and its frames, uint8 [F, H, W, 3], once asked for.

    `frames` is None where the teacher makes the clip from the caption, and where it needs one from the picture `image`,
    uint8 [H, W, 3]. Of a clip with frames the first one is the picture.
    """

    id: str
    caption: str
    frames: Callable[[], np.ndarray] | None = None
    image: Callable[[], np.ndarray] | None = None


@dataclass(frozen=True)
class ClipSize:
    """What every clip is brought to; `fps` None takes the frames of a file as they are."""

    height: int
    width: int
    num_frames: int
    fps: float | None = None


def clips_from_folder(folder: Path, size: ClipSize) -> list[SourceItem]:
    """Every video below `folder`; captions are in .txt files of the same names, or in a `captions.json` beside them."""
    require(folder.is_dir(), "clips", str(folder), "a folder, a .csv or a .jsonl file")
    items = []
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in VIDEO_SUFFIXES):
        identity = path.relative_to(folder).as_posix()
        items.append(SourceItem(identity, _caption_beside(path), _reader(path, size)))
    require(len(items) > 0, "clips", str(folder), f"a folder with videos ({', '.join(VIDEO_SUFFIXES)})")
    return items


def _caption_beside(path: Path) -> str:
    text = path.with_suffix(".txt")
    if text.is_file():
        return text.read_text(encoding="utf-8").strip()
    table = path.parent / "captions.json"
    captions = json.loads(table.read_text(encoding="utf-8")) if table.is_file() else {}
    return str(captions.get(path.name, ""))


def clips_from_table(table: Path, size: ClipSize) -> list[SourceItem]:
    """Clips of a CSV or JSONL file with the columns `path` (relative to the file) and `caption`."""
    items = []
    for number, row in enumerate(_rows(table), 1):
        for key in ("path", "caption"):
            require(isinstance(row.get(key), str), f"{table.name} row {number}.{key}", row.get(key), "a text")
        items.append(SourceItem(row["path"], row["caption"], _reader(table.parent / row["path"], size)))
    require(len(items) > 0, "clips", str(table), "a table with at least one row")
    return items


def prompts_from_file(path: Path, size: ClipSize) -> list[SourceItem]:
    """Prompts for the teacher: the lines of a .txt file, or the column `prompt` of a CSV or JSONL file.

    A column `image` names the first frame for a teacher that needs one, relative to the file.
    """
    prompts: list[tuple[str, Callable[[], np.ndarray] | None]] = []
    if path.suffix.lower() == ".txt":
        prompts = [(line.strip(), None) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        for number, row in enumerate(_rows(path), 1):
            good = isinstance(row.get("prompt"), str) and bool(row["prompt"].strip())
            require(good, f"{path.name} row {number}.prompt", row.get("prompt"), "a text")
            image = row.get("image")
            require(image is None or isinstance(image, str), f"{path.name} row {number}.image", image, "a path")
            prompts.append((row["prompt"].strip(), _picture_reader(path.parent / image, size) if image else None))
    require(len(prompts) > 0, "prompts", str(path), "a file with at least one prompt")
    return [SourceItem(f"{i:08d}", prompt, image=image) for i, (prompt, image) in enumerate(prompts)]


def _picture_reader(path: Path, size: ClipSize) -> Callable[[], np.ndarray]:
    def read() -> np.ndarray:
        with Image.open(path) as picture:
            return _fitted(np.asarray(picture.convert("RGB")), size)

    return read


def clips_from_tiny_world(count: int, size: ClipSize) -> list[SourceItem]:
    """The first `count` training clips of the tiny world, each with a caption of its own seed."""
    from ..tiny.dataset import caption, render, sample_scene

    def frames(seed: int) -> Callable[[], np.ndarray]:
        def draw() -> np.ndarray:
            clip = render(sample_scene(seed), num_frames=size.num_frames, height=size.height, width=size.width)
            return clip.numpy()

        return draw

    require(count >= 1, "count", count, "at least 1")
    return [SourceItem(f"{s:08d}", caption(sample_scene(s), s).text, frames(s)) for s in range(count)]


def _rows(table: Path) -> Iterator[dict[str, Any]]:
    require(table.suffix.lower() in (".csv", ".jsonl"), "file", str(table), "a .csv or .jsonl file")
    with table.open(encoding="utf-8", newline="") as stream:
        if table.suffix.lower() == ".csv":
            yield from csv.DictReader(stream)
            return
        for number, line in enumerate(stream, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise ConfigError(f"{table.name} line {number}: got no JSON ({error}); must be an object") from None
                require(isinstance(row, dict), f"{table.name} line {number}", row, "an object")
                yield row


def _reader(path: Path, size: ClipSize) -> Callable[[], np.ndarray]:
    return lambda: read_clip(path, size)


def read_clip(path: Path, size: ClipSize) -> np.ndarray:
    """Frames of a video file at the wanted rate, scaled and cut to the wanted size, uint8 [F, H, W, 3].

    Raises:
        ValueError: it holds too few frames. Others come from the decoder.
    """
    import imageio.v3 as imageio

    if not path.is_file():
        raise FileNotFoundError(f"no such file: {path.name}")
    step = 1.0
    if size.fps is not None:
        step = float(imageio.immeta(path)["fps"]) / size.fps
    wanted = [round(index * step) for index in range(size.num_frames)]
    frames: list[np.ndarray] = []
    for number, frame in enumerate(imageio.imiter(path)):
        while len(frames) < len(wanted) and wanted[len(frames)] == number:
            frames.append(_fitted(frame, size))
        if len(frames) == len(wanted):
            return np.stack(frames)
    raise ValueError(f"{len(frames)} frames; needs {size.num_frames}" + (f" at {size.fps:g} fps" if size.fps else ""))


def _fitted(frame: np.ndarray, size: ClipSize) -> np.ndarray:
    image = Image.fromarray(frame).convert("RGB")
    return np.asarray(ImageOps.fit(image, (size.width, size.height), Image.Resampling.LANCZOS))
