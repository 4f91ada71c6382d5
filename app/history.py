"""Clips in a folder, found again after a restart: each with sidecar, contact sheet, thumbnail and first frame.

The files of a clip are `ID.mp4`, `ID.json`, `ID.png`, `ID.thumb.jpg`, where it began with a picture `ID.input.png`, and
where its block maps were recorded `ID.maps.npz`. They are made under `.work/ID` and moved when they are whole, the
sidecar last: where it is, all are.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from ..core.config import require
from ..pipelines.generation import GenerationResult
from ..pipelines.sidecar import write_result
from ..pipelines.video_io import to_rgb, write_atomically
from .block_maps import BlockMaps

THUMBNAIL_PIXELS = 320
"""Longer side of a thumbnail."""

_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{16}")
_SUFFIXES = (".mp4", ".png", ".thumb.jpg", ".input.png", ".maps.npz", ".json")


def new_id() -> str:
    """Time to the second, so that names sort by it, and 64 random bits, so that nobody guesses another's."""
    return f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{secrets.token_hex(8)}"


@dataclass(frozen=True)
class Clip:
    """A finished clip: its files, and the plain data of its sidecar."""

    id: str
    folder: Path
    sidecar: Mapping[str, Any]

    @property
    def video(self) -> Path:
        """The mp4."""
        return self.folder / f"{self.id}.mp4"

    @property
    def sheet(self) -> Path:
        """The contact sheet."""
        return self.folder / f"{self.id}.png"

    @property
    def thumbnail(self) -> Path:
        """A small picture of the middle frame."""
        return self.folder / f"{self.id}.thumb.jpg"

    @property
    def maps_path(self) -> Path:
        """The block maps, where they were recorded."""
        return self.folder / f"{self.id}.maps.npz"

    @property
    def sidecar_path(self) -> Path:
        """The JSON that makes it again."""
        return self.folder / f"{self.id}.json"

    @property
    def origin(self) -> Mapping[str, Any]:
        """What the service knows of it: owner, group, recipe as it was asked for, times."""
        return self.sidecar.get("service", {})


class History:
    """The clips of one folder; any number of threads may use it.

    Args:
        folder: made when it is absent.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self.folder / ".work", ignore_errors=True)  # of processes that died

    def ids(self) -> list[str]:
        """Of all clips, the newest first."""
        names = (entry.name for entry in os.scandir(self.folder) if entry.name.endswith(".json"))
        return sorted((name[:-5] for name in names if _ID.fullmatch(name[:-5])), reverse=True)

    def read(self, clip_id: str) -> Clip | None:
        """The clip of that id; None where there is none, whatever the text is."""
        if not isinstance(clip_id, str) or not _ID.fullmatch(clip_id):
            return None
        path = self.folder / f"{clip_id}.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        clip = Clip(clip_id, self.folder, data)
        return clip if isinstance(data, dict) and clip.video.is_file() else None

    def page(self, offset: int, count: int, owner: str | None = None) -> list[Clip]:
        """Clips `offset` to `offset + count`, the newest first; only those of `owner` where one is given."""
        found: list[Clip] = []
        skipped = 0
        for clip_id in self.ids():
            clip = self.read(clip_id)
            if clip is None or (owner is not None and clip.origin.get("owner") != owner):
                continue
            if skipped < offset:
                skipped += 1
                continue
            found.append(clip)
            if len(found) == count:
                break
        return found

    def keep_input(self, clip_id: str, image: Image.Image) -> Path:
        """Stores the first frame that a clip will begin with; returns where it is until the clip is stored."""
        path = self._work(clip_id) / f"{clip_id}.input.png"
        to_rgb(image).save(path)
        return path

    def store(
        self, clip_id: str, result: GenerationResult, extra: Mapping[str, Any], maps: BlockMaps | None = None
    ) -> Clip:
        """Writes a clip whole or not at all.

        Args:
            clip_id: from `new_id`.
            result: what was made.
            extra: further entries of the sidecar.
            maps: what its sparse layers kept, where that was recorded.
        """
        require(bool(_ID.fullmatch(clip_id)), "clip_id", clip_id, "an id from new_id")
        work = self._work(clip_id)
        if maps is not None:
            maps.save(work / f"{clip_id}.maps.npz")
        _thumbnail(result.frames, work / f"{clip_id}.thumb.jpg")
        write_result(result, work / f"{clip_id}.mp4", extra=extra)
        for suffix in _SUFFIXES:
            if (work / f"{clip_id}{suffix}").exists():
                os.replace(work / f"{clip_id}{suffix}", self.folder / f"{clip_id}{suffix}")
        self.discard(clip_id)
        clip = self.read(clip_id)
        assert clip is not None
        return clip

    def discard(self, clip_id: str) -> None:
        """Removes what an unfinished clip left."""
        shutil.rmtree(self.folder / ".work" / clip_id, ignore_errors=True)

    def delete(self, clip_id: str) -> bool:
        """Removes a clip's files, the sidecar first; False where there is none."""
        if self.read(clip_id) is None:
            return False
        for suffix in reversed(_SUFFIXES):
            (self.folder / f"{clip_id}{suffix}").unlink(missing_ok=True)
        return True

    def _work(self, clip_id: str) -> Path:
        work = self.folder / ".work" / clip_id
        work.mkdir(parents=True, exist_ok=True)
        return work


def _thumbnail(frames: np.ndarray, path: Path) -> Path:
    picture = Image.fromarray(frames[len(frames) // 2])
    picture.thumbnail((THUMBNAIL_PIXELS, THUMBNAIL_PIXELS), Image.Resampling.LANCZOS)
    return write_atomically(path, lambda partial: picture.save(partial, quality=88))
