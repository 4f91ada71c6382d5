"""Turns clips and captions, prompts, or the tiny world into prepared data (see data.py).

What is done already is not done again: a shard appears whole or not at all, and an interrupted preparation goes on with
the clips that are in none. A clip that cannot be used is listed in `bad.jsonl` with the reason, tried again next time.
"""

from __future__ import annotations

import csv
import json
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from safetensors.torch import save_file

from ..core.config import ConfigError, require, to_dict
from ..core.config import save_file as save_settings
from ..pipelines.sizes import check_size
from ..pipelines.video_io import write_atomically
from .data import (
    NEGATIVE_FILE,
    SETTINGS_FILE,
    DatasetSettings,
    load_settings,
    read_shard_items,
    shard_path,
)

BAD_FILE = "bad.jsonl"
VIDEO_SUFFIXES = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".gif")


@dataclass(frozen=True)
class SourceItem:
    """One clip to be: an id that no other has, its caption, and its frames, uint8 [F, H, W, 3], once asked for.

    `frames` is None where the teacher makes the clip from the caption.
    """

    id: str
    caption: str
    frames: Callable[[], np.ndarray] | None = None


@dataclass(frozen=True)
class ClipSize:
    """What every clip is brought to; `fps` None takes the frames of a file as they are."""

    height: int
    width: int
    num_frames: int
    fps: float | None = None


@dataclass(frozen=True)
class PrepareReport:
    """Clips that are there now, how many of them were made in this call, and the bad ones with their reasons."""

    total: int
    made: int
    bad: tuple[tuple[str, str], ...]


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


def prompts_from_file(path: Path) -> list[SourceItem]:
    """Prompts for the teacher: the lines of a .txt file, or the column `prompt` of a CSV or JSONL file."""
    if path.suffix.lower() == ".txt":
        prompts = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    else:
        prompts = []
        for number, row in enumerate(_rows(path), 1):
            good = isinstance(row.get("prompt"), str) and bool(row["prompt"].strip())
            require(good, f"{path.name} row {number}.prompt", row.get("prompt"), "a text")
            prompts.append(row["prompt"].strip())
    require(len(prompts) > 0, "prompts", str(path), "a file with at least one prompt")
    return [SourceItem(f"{index:08d}", prompt) for index, prompt in enumerate(prompts)]


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


class Encoder:
    """Encodes prompts and clips with the parts of a Wan pipeline, and samples from it.

    Args:
        pipe: a stock pipeline.
        max_sequence_length: prompts are padded to so many tokens.
    """

    def __init__(self, pipe: Any, max_sequence_length: int) -> None:
        self._pipe, self._length = pipe, max_sequence_length
        config = pipe.vae.config
        self._mean, self._std = (
            torch.tensor(values).view(1, -1, 1, 1, 1) for values in (config.latents_mean, config.latents_std)
        )

    @torch.no_grad()
    def prompt(self, text: str) -> torch.Tensor:
        """[tokens, text_dim], float32, without the zeros at the end (at least one row)."""
        embeds, _ = self._pipe.encode_prompt(
            text, do_classifier_free_guidance=False, max_sequence_length=self._length, device=self._pipe.vae.device
        )
        rows = embeds[0].float().cpu()
        used = rows.abs().amax(1).nonzero()
        return rows[: int(used.max()) + 1 if len(used) else 1].contiguous()

    @torch.no_grad()
    def clip(self, frames: np.ndarray) -> torch.Tensor:
        """Normalised latents [C, F, h, w], float32."""
        vae = self._pipe.vae
        video = torch.from_numpy(np.ascontiguousarray(frames)).permute(3, 0, 1, 2)[None].float() / 127.5 - 1
        latents = vae.encode(video.to(vae.device, vae.dtype)).latent_dist.mode().float().cpu()
        return ((latents - self._mean) / self._std)[0]

    def sample(self, prompt: str, size: ClipSize, *, steps: int, guidance_scale: float, seed: int) -> torch.Tensor:
        """Normalised latents [C, F, h, w] that the teacher makes, float32."""
        latents = self._pipe(
            prompt,
            height=size.height,
            width=size.width,
            num_frames=size.num_frames,
            num_inference_steps=steps,
            guidance_scale=guidance_scale,
            max_sequence_length=self._length,
            generator=torch.Generator().manual_seed(seed),
            output_type="latent",
        ).frames
        return latents[0].float().cpu()


@dataclass(frozen=True)
class TeacherSampling:
    """How the teacher makes clips from prompts."""

    num_inference_steps: int = 50
    guidance_scale: float = 5.0
    seed: int = 0


def prepare(
    pipe: Any,
    items: Iterable[SourceItem],
    folder: Path,
    *,
    source: str,
    model: str,
    size: ClipSize,
    max_sequence_length: int,
    negative_prompt: str = "",
    sampling: TeacherSampling | None = None,
    shard_size: int = 64,
    progress: Callable[[int, int], None] | None = None,
) -> PrepareReport:
    """Encodes everything that is not there yet.

    Args:
        pipe: a stock Wan pipeline, the teacher.
        items: what to encode; ids must differ.
        folder: of the prepared data, made where missing.
        source: kind of the source, for the settings.
        model: name of the teacher, likewise.
        size: of the clips.
        max_sequence_length: prompts are padded to so many tokens.
        negative_prompt: of the unconditional half of the guidance.
        sampling: how the teacher makes clips for items without frames.
        shard_size: clips in a shard.
        progress: called with clips done and clips in all.

    Raises:
        ConfigError: the folder was made with other settings, ids repeat, or a size that the model cannot take.
    """
    check_size(pipe, height=size.height, width=size.width, num_frames=size.num_frames)
    require(shard_size >= 1, "shard_size", shard_size, "at least 1")
    items = list(items)
    repeated = [identity for identity, count in Counter(item.id for item in items).items() if count > 1]
    require(not repeated, "id", repeated[:3], "different for every clip")
    encoder = Encoder(pipe, max_sequence_length)
    _settle(folder, encoder, pipe, source, model, size, max_sequence_length, negative_prompt)
    done, number = _existing(folder)
    made, bad = 0, []
    waiting: list[tuple[SourceItem, dict[str, torch.Tensor]]] = []
    for place, item in enumerate(items):
        if item.id not in done:
            try:
                waiting.append((item, _encode(encoder, item, size, sampling)))
                made += 1
            except (OSError, ValueError, KeyError, FloatingPointError) as error:
                bad.append((item.id, f"{type(error).__name__}: {error}"))
        if len(waiting) == shard_size:
            number = _write_shard(folder, number, waiting)
        if progress is not None:
            progress(place + 1, len(items))
    _write_shard(folder, number, waiting)
    lines = "".join(json.dumps({"id": i, "reason": reason}) + "\n" for i, reason in bad)
    if bad:
        write_atomically(folder / BAD_FILE, lambda partial: partial.write_text(lines, encoding="utf-8"))
    else:
        (folder / BAD_FILE).unlink(missing_ok=True)
    return PrepareReport(len(done) + made, made, tuple(bad))


def _settle(
    folder: Path,
    encoder: Encoder,
    pipe: Any,
    source: str,
    model: str,
    size: ClipSize,
    max_sequence_length: int,
    negative_prompt: str,
) -> None:
    """Writes settings and negative prompt of a new folder, or checks those of an old one."""
    strides = pipe.vae_scale_factor_temporal, pipe.vae_scale_factor_spatial
    shape = (
        pipe.vae.config.z_dim,
        (size.num_frames - 1) // strides[0] + 1,
        size.height // strides[1],
        size.width // strides[1],
    )
    negative = encoder.prompt(negative_prompt)
    settings = DatasetSettings(
        source=source,
        model=model,
        height=size.height,
        width=size.width,
        num_frames=size.num_frames,
        latent_shape=shape,
        text_dim=negative.shape[1],
        max_sequence_length=max_sequence_length,
        negative_prompt=negative_prompt,
    )
    file = folder / SETTINGS_FILE
    if file.is_file():
        before = load_settings(DatasetSettings, file)
        for name, value in to_dict(settings).items():
            old = to_dict(before)[name]
            require(value == old, name, value, f"{old!r}, as {str(folder)!r} was made with, or another folder chosen")
        return
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / NEGATIVE_FILE, lambda partial: save_file({"prompt_embeds": negative}, partial))
    save_settings(settings, file)


def _existing(folder: Path) -> tuple[set[str], int]:
    """Ids that are done, and the number of the next shard."""
    shards = sorted(folder.glob("shard-*.safetensors"))
    done = {item["id"] for path in shards for item in read_shard_items(path)}
    return done, int(shards[-1].stem.split("-")[1]) + 1 if shards else 0


def _encode(
    encoder: Encoder, item: SourceItem, size: ClipSize, sampling: TeacherSampling | None
) -> dict[str, torch.Tensor]:
    if item.frames is not None:
        latents = encoder.clip(item.frames())
    else:
        require(sampling is not None, "sampling", None, "given where the teacher makes the clips")
        assert sampling is not None
        seed = sampling.seed * 10**8 + int(item.id)
        latents = encoder.sample(
            item.caption,
            size,
            steps=sampling.num_inference_steps,
            guidance_scale=sampling.guidance_scale,
            seed=seed,
        )
    if not bool(torch.isfinite(latents).all()):
        raise FloatingPointError("its latents are not finite")
    return {"latents": latents.bfloat16().contiguous(), "prompt_embeds": encoder.prompt(item.caption).bfloat16()}


def _write_shard(folder: Path, number: int, waiting: list[tuple[SourceItem, dict[str, torch.Tensor]]]) -> int:
    """Writes what waits as shard `number`, empties it, and returns the next number."""
    if not waiting:
        return number
    tensors = {f"{item.id}/{name}": tensor for item, parts in waiting for name, tensor in parts.items()}
    header = json.dumps([{"id": item.id, "caption": item.caption} for item, _ in waiting])
    partial = folder / f".{uuid.uuid4().hex}.partial"
    try:
        save_file(tensors, partial, metadata={"items": header})
        os.replace(partial, shard_path(folder, number))
    finally:
        partial.unlink(missing_ok=True)
    waiting.clear()
    return number + 1
