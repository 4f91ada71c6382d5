"""Turns clips and captions, prompts, or the tiny world into prepared data (see data.py).

What is done already is not done again: a shard appears whole or not at all, and an interrupted preparation goes on with
the clips that are in none. A clip that cannot be used is listed in `bad.jsonl` with the reason, tried again next time.
"""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file

from ..core.config import require, to_dict
from ..core.config import save_file as save_settings
from ..pipelines.sizes import check_size
from ..pipelines.video_io import write_atomically
from .data import (
    NEGATIVE_FILE,
    SETTINGS_FILE,
    DatasetSettings,
    TeacherSampling,
    load_settings,
    read_shard_items,
    shard_path,
)
from .sources import ClipSize, SourceItem
from .trajectories import TeacherTrajectories, TrajectoryStart

BAD_FILE = "bad.jsonl"
_BAD = (OSError, ValueError, KeyError, FloatingPointError)
"""What a clip that cannot be used raises."""


@dataclass(frozen=True)
class PrepareReport:
    """Clips that are there now, how many of them were made in this call, and the bad ones with their reasons."""

    total: int
    made: int
    bad: tuple[tuple[str, str], ...]


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
    def clips(self, frames: list[np.ndarray]) -> torch.Tensor:
        """Normalised latents [N, C, F, h, w], float32, of N clips of one size."""
        vae = self._pipe.vae
        video = torch.from_numpy(np.stack(frames)).permute(0, 4, 1, 2, 3).float() / 127.5 - 1
        latents = vae.encode(video.to(vae.device, vae.dtype)).latent_dist.mode().float().cpu()
        return (latents - self._mean) / self._std

    @property
    def clips_at_once(self) -> int:
        """How many clips to encode together. A CPU has fast 3D convolutions for batches alone; a card gains nothing."""
        return 4 if self._pipe.vae.device.type == "cpu" else 1

    @property
    def image_channels(self) -> int:
        """Channels in which the model is given the first frame, beside the noisy latents.

        Raises:
            ConfigError: others than those of Wan's image-to-video models.
        """
        config = self._pipe.transformer.config
        extra = int(config.in_channels - config.out_channels)
        known = int(self._pipe.vae.config.z_dim + self._pipe.vae_scale_factor_temporal)
        require(
            extra in (0, known), "transformer.in_channels", config.in_channels, f"{config.out_channels} or {known} more"
        )
        return extra

    @property
    def image_dim(self) -> int | None:
        """Width of the embedding of the first frame that the model attends to; None without."""
        width = self._pipe.transformer.config.image_dim
        return None if width is None else int(width)

    @torch.no_grad()
    def image(self, picture: np.ndarray, num_frames: int) -> dict[str, torch.Tensor]:
        """A first frame, uint8 [H, W, 3], as the pipeline gives it to the model, float32.

        "image_latents" [channels, F, h, w]: which frames are given, and the latents of the clip that is grey after the
        first frame. "image_embeds" [tokens, image_dim] where the model attends to it.
        """
        pipe, (height, width) = self._pipe, picture.shape[:2]
        image = Image.fromarray(np.ascontiguousarray(picture))
        pixels = pipe.video_processor.preprocess(image, height=height, width=width).to(pipe.vae.device, torch.float32)
        channels, device = pipe.vae.config.z_dim, pipe.vae.device
        _, condition = pipe.prepare_latents(
            pixels, 1, channels, height, width, num_frames, torch.float32, device, torch.Generator().manual_seed(0)
        )
        parts = {"image_latents": condition[0].float().cpu()}
        if self.image_dim is not None:
            parts["image_embeds"] = pipe.encode_image(image, device)[0].float().cpu()
        return parts

    def sample(
        self,
        prompt: str,
        size: ClipSize,
        *,
        steps: int,
        guidance_scale: float,
        guidance_scale_2: float | None = None,
        seed: int,
        picture: np.ndarray | None = None,
    ) -> torch.Tensor:
        """Normalised latents [C, F, h, w] that the teacher makes, float32; from a picture where it needs one."""
        extra: dict[str, Any] = {} if picture is None else {"image": Image.fromarray(picture)}
        if guidance_scale_2 is not None:
            extra["guidance_scale_2"] = guidance_scale_2
        latents = self._pipe(
            prompt=prompt,
            height=size.height,
            width=size.width,
            num_frames=size.num_frames,
            num_inference_steps=steps,
            guidance_scale=guidance_scale,
            max_sequence_length=self._length,
            generator=torch.Generator().manual_seed(seed),
            output_type="latent",
            **extra,
        ).frames
        return latents[0].float().cpu()


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
    mixed_precision: bool = False,
    shard_size: int = 64,
    part: tuple[int, int] = (1, 1),
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
        sampling: how the teacher makes clips for items without frames; with `sigmas` it makes all of them, and frames
            are only looked at where a first one is given.
        mixed_precision: follow trajectories in bfloat16 under autocast.
        shard_size: clips in a shard.
        part: (k, n) takes the k-th (from 1) of every n items, so that n processes can fill one folder at once.
        progress: called with clips done and clips in all.

    Raises:
        ConfigError: the folder was made with other settings, ids repeat, or a size that the model cannot take.
    """
    check_size(pipe, height=size.height, width=size.width, num_frames=size.num_frames)
    require(shard_size >= 1, "shard_size", shard_size, "at least 1")
    items = list(items)
    repeated = [identity for identity, count in Counter(item.id for item in items).items() if count > 1]
    require(not repeated, "id", repeated[:3], "different for every clip")
    place, num_parts = part
    require(1 <= place <= num_parts, "part", part, "a number of n parts, from 1 to n")
    items = items[place - 1 :: num_parts]
    encoder = Encoder(pipe, max_sequence_length)
    lonely = [item.id for item in items if encoder.image_channels and item.frames is None and item.image is None]
    require(not lonely, "image", lonely[:3], "given for every prompt: this teacher starts from a picture")
    shape = _settle(folder, encoder, pipe, source, model, size, max_sequence_length, negative_prompt, sampling)
    trajectories = None
    if sampling is not None and sampling.sigmas is not None:
        negative = encoder.prompt(negative_prompt)
        follower = TeacherTrajectories(pipe, sampling, negative, max_sequence_length, mixed_precision=mixed_precision)
        trajectories = _Trajectories(encoder, follower, size, shape)
    done, number = _existing(folder, part)
    made, bad = 0, []
    waiting: list[tuple[SourceItem, dict[str, torch.Tensor]]] = []
    left = [item for item in items if item.id not in done]
    at_once = 1 if sampling is not None and trajectories is None else encoder.clips_at_once
    for start in range(0, len(left), at_once):
        group = left[start : start + at_once]
        encoded = _encode(encoder, group, size, sampling) if trajectories is None else trajectories.encode(group)
        for item, parts in zip(group, encoded, strict=True):
            if isinstance(parts, Exception):
                bad.append((item.id, f"{type(parts).__name__}: {parts}"))
            else:
                waiting.append((item, parts))
                made += 1
        while len(waiting) >= shard_size:
            _write_shard(folder, number, waiting[:shard_size])
            number += num_parts
            del waiting[:shard_size]
        if progress is not None:
            progress(len(items) - len(left) + start + len(group), len(items))
    _write_shard(folder, number, waiting)
    lines = "".join(json.dumps({"id": i, "reason": reason}) + "\n" for i, reason in bad)
    bad_file = folder / (BAD_FILE if num_parts == 1 else f"bad-{place}-of-{num_parts}.jsonl")
    if bad:
        write_atomically(bad_file, lambda partial: partial.write_text(lines, encoding="utf-8"))
    else:
        bad_file.unlink(missing_ok=True)
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
    sampling: TeacherSampling | None,
) -> tuple[int, int, int, int]:
    """Writes settings and negative prompt of a new folder, or checks those of an old one; the shape of latents."""
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
        image_channels=encoder.image_channels,
        image_dim=encoder.image_dim,
        sampling=sampling,
    )
    file = folder / SETTINGS_FILE
    if file.is_file():
        before = load_settings(DatasetSettings, file)
        asked, old = to_dict(settings), to_dict(before)
        for name in asked | old:
            rule = f"{old.get(name)!r}, as {str(folder)!r} was made with, or another folder chosen"
            require(asked.get(name) == old.get(name), name, asked.get(name), rule)
        return shape
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / NEGATIVE_FILE, lambda partial: save_file({"prompt_embeds": negative}, partial))
    save_settings(settings, file)
    return shape


def _existing(folder: Path, part: tuple[int, int]) -> tuple[set[str], int]:
    """Ids that are done, and the number of this part's next shard: parts never write the same one."""
    shards = sorted(folder.glob("shard-*.safetensors"))
    done = {item["id"] for path in shards for item in read_shard_items(path)}
    place, num_parts = part
    above = int(shards[-1].stem.split("-")[1]) + 1 if shards else 0
    return done, -(-above // num_parts) * num_parts + place - 1


def _encode(
    encoder: Encoder, group: list[SourceItem], size: ClipSize, sampling: TeacherSampling | None
) -> list[dict[str, torch.Tensor] | Exception]:
    """What is stored of each item, or why it cannot be used."""
    clips: dict[str, np.ndarray] = {}
    made: dict[str, dict[str, torch.Tensor] | Exception] = {}
    for item in group:
        if item.frames is not None:
            try:
                clips[item.id] = item.frames()
            except _BAD as error:
                made[item.id] = error
    latents = dict(zip(clips, encoder.clips(list(clips.values())), strict=True)) if clips else {}
    for item in group:
        if item.id not in made:
            try:
                made[item.id] = _parts(encoder, item, size, sampling, clips.get(item.id), latents.get(item.id))
            except _BAD as error:
                made[item.id] = error
    return [made[item.id] for item in group]


def _parts(
    encoder: Encoder,
    item: SourceItem,
    size: ClipSize,
    sampling: TeacherSampling | None,
    frames: np.ndarray | None,
    latents: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """The tensors of an item; without frames the teacher makes the clip."""
    picture = None if frames is None else frames[0]
    if latents is None:
        require(sampling is not None, "sampling", None, "given where the teacher makes the clips")
        assert sampling is not None
        if encoder.image_channels:
            assert item.image is not None
            picture = item.image()
        latents = encoder.sample(
            item.caption,
            size,
            steps=sampling.num_inference_steps,
            guidance_scale=sampling.guidance_scale,
            guidance_scale_2=sampling.guidance_scale_2,
            seed=sampling.seed * 10**8 + int(item.id),
            picture=picture,
        )
    parts = {"latents": latents, "prompt_embeds": encoder.prompt(item.caption)}
    if encoder.image_channels:
        assert picture is not None
        parts |= encoder.image(picture, size.num_frames)
    return _stored(parts)


def _stored(parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """As a shard holds them."""
    for name, tensor in parts.items():
        if not bool(torch.isfinite(tensor).all()):
            raise FloatingPointError(f"its {name} are not finite")
    return {name: tensor.bfloat16().contiguous() for name, tensor in parts.items()}


@dataclass(frozen=True)
class _Trajectories:
    """Makes what is stored of items whose clips the teacher's trajectories give."""

    encoder: Encoder
    follower: TeacherTrajectories
    size: ClipSize
    shape: tuple[int, int, int, int]

    def encode(self, group: list[SourceItem]) -> list[dict[str, torch.Tensor] | Exception]:
        """What is stored of each item, or why it cannot be used."""
        made: dict[str, dict[str, torch.Tensor] | Exception] = {}
        starts, pictures = [], {}
        for item in group:
            try:
                start, pictures[item.id] = self._start(item)
                starts.append(start)
            except _BAD as error:
                made[item.id] = error
        followed = self.follower.follow(starts, self.shape) if starts else []
        for start, parts in zip(starts, followed, strict=True):
            try:
                made[start.id] = _stored(parts | {"prompt_embeds": start.prompt_embeds} | pictures[start.id])
            except FloatingPointError as error:
                made[start.id] = error
        return [made[item.id] for item in group]

    def _start(self, item: SourceItem) -> tuple[TrajectoryStart, dict[str, torch.Tensor]]:
        """Where the trajectory starts, and what is stored of its picture."""
        first, parts = None, {}
        if self.encoder.image_channels:
            picture = item.frames()[0] if item.frames is not None else item.image()  # type: ignore[misc]
            parts = self.encoder.image(picture, self.size.num_frames)
        elif self.follower.keeps_first(item.id):
            if item.frames is not None:
                still = item.frames()[:1]
            else:
                require(item.image is not None, "image", None, f"given: the clip {item.id!r} starts from a picture")
                still = item.image()[None]  # type: ignore[misc]
            first = self.encoder.clips([still])[0]
        return TrajectoryStart(item.id, self.encoder.prompt(item.caption), first, **parts), parts


def _write_shard(folder: Path, number: int, waiting: list[tuple[SourceItem, dict[str, torch.Tensor]]]) -> None:
    """Writes what waits, if anything does, as shard `number`."""
    if not waiting:
        return
    tensors = {f"{item.id}/{name}": tensor for item, parts in waiting for name, tensor in parts.items()}
    header = json.dumps([{"id": item.id, "caption": item.caption} for item, _ in waiting])
    partial = folder / f".{uuid.uuid4().hex}.partial"
    try:
        save_file(tensors, partial, metadata={"items": header})
        os.replace(partial, shard_path(folder, number))
    finally:
        partial.unlink(missing_ok=True)
