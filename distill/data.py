"""Prepared data: latents and prompt embeddings in sharded safetensors, and the order in which a run visits them.

A folder holds `dataset.json` (what it was made with), `negative.safetensors` (the negative prompt), and shards
`shard-00000.safetensors` with tensors "ID/latents" and "ID/prompt_embeds" and the ids and captions in their header. For
models that are given the first frame in channels of their own there is "ID/image_latents" as well, and for those that
attend to it "ID/image_embeds". Trajectories of the teacher add "ID/states" [N, C, F, h, w], its states at the knots
before the last, and "ID/keeps_first" [1], whether the clip was given its first latent frame. Tensors are read one at a
time when they are wanted; what is in memory does not grow with the data.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from ..core.config import ConfigError, require, to_dict
from ..core.config import load_file as load_settings
from ..pipelines.scheduling_few_step import check_sigmas
from .config import DataConfig
from .config_methods import finite
from .draws import Draws
from .flow import Condition
from .method import Batch

SETTINGS_FILE = "dataset.json"
NEGATIVE_FILE = "negative.safetensors"
OPEN_SHARDS = 8


@dataclass(frozen=True)
class TeacherSampling:
    """How the teacher makes clips from prompts.

    Attributes:
        num_inference_steps: of its sampler; with `sigmas` of the solver, as many between any two of them.
        guidance_scale: of classifier-free guidance; 1 means none.
        guidance_scale_2: of the second of two experts; None takes the same.
        seed: of the noise.
        sigmas: noise levels where a student's steps start, descending; the states there are stored. None stores the
            clip alone.
        image_share: share of the trajectories that are given their first latent frame, in models with one time per
            token.
    """

    num_inference_steps: int = 50
    guidance_scale: float = 5.0
    guidance_scale_2: float | None = None
    seed: int = 0
    sigmas: tuple[float, ...] | None = None
    image_share: float = 0.0

    def __post_init__(self) -> None:
        require(self.num_inference_steps >= 1, "num_inference_steps", self.num_inference_steps, "at least 1")
        for name in ("guidance_scale", "guidance_scale_2"):
            scale = getattr(self, name)
            require(scale is None or finite(scale, 0), name, scale, "0 or more (1 means none)")
        require(finite(self.image_share, 0, 1), "image_share", self.image_share, "from 0 to 1")
        if self.sigmas is None:
            require(self.image_share == 0, "image_share", self.image_share, "0 unless trajectories are stored")
            return
        check_sigmas(self.sigmas)
        whole = self.num_inference_steps % len(self.sigmas) == 0
        rule = f"a multiple of {len(self.sigmas)}, the steps of the student"
        require(whole, "num_inference_steps", self.num_inference_steps, rule)


@dataclass(frozen=True)
class DatasetSettings:
    """What a folder of prepared data was made with; another one is not mixed in.

    Attributes:
        source: kind of the source.
        model: name of the model that encoded.
        height: of the clips in pixels.
        width: likewise.
        num_frames: of the clips.
        latent_shape: channels, frames, height, width.
        text_dim: width of the prompt embeddings.
        max_sequence_length: to which prompts were padded before they were encoded.
        negative_prompt: of the negative embedding.
        image_channels: of the first frame beside the latents, for models with such channels; 0 without.
        image_dim: width of the embedding of the first frame; None without.
        sampling: how the teacher made the clips; None where they were encoded.
    """

    source: str
    model: str
    height: int
    width: int
    num_frames: int
    latent_shape: tuple[int, int, int, int]
    text_dim: int
    max_sequence_length: int
    negative_prompt: str = ""
    image_channels: int = 0
    image_dim: int | None = None
    sampling: TeacherSampling | None = None


def shard_path(folder: Path, number: int) -> Path:
    """Where shard `number` lies."""
    return folder / f"shard-{number:05d}.safetensors"


def read_shard_items(path: Path) -> list[dict[str, str]]:
    """Ids and captions of a shard, from its header.

    Raises:
        ConfigError: not a shard, or a damaged one.
    """
    try:
        with safe_open(path, "pt") as handle:
            items: list[dict[str, str]] = json.loads(handle.metadata()["items"])
            return items
    except (SafetensorError, KeyError, TypeError, ValueError, OSError) as error:
        raise ConfigError(f"{path}: got a damaged shard ({error}); must be deleted and prepared again") from error


class PreparedData:
    """A folder of prepared data.

    Raises:
        ConfigError: no such folder, nothing in it, or a damaged shard.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        known = (self.folder / SETTINGS_FILE).is_file()
        require(known, "data.path", str(folder), "a folder that `videospark distill prepare` made")
        self.settings = load_settings(DatasetSettings, self.folder / SETTINGS_FILE)
        self.items: list[tuple[Path, str, str]] = []
        for path in sorted(self.folder.glob("shard-*.safetensors")):
            self.items += [(path, item["id"], item["caption"]) for item in read_shard_items(path)]
        # Sorted by id, so that the order of a run does not depend on how often the preparation was interrupted.
        self.items.sort(key=lambda item: item[1])
        require(len(self.items) > 0, "data.path", str(folder), "a folder with at least one prepared clip")
        self.negative_embeds = load_file(self.folder / NEGATIVE_FILE)["prompt_embeds"].float()
        self._open: OrderedDict[Path, Any] = OrderedDict()

    def __len__(self) -> int:
        return len(self.items)

    def digest(self) -> str:
        """Of the clips' ids and of what they were made with: the same for the same order of a run."""
        text = json.dumps([to_dict(self.settings), [identity for _, identity, _ in self.items]], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def read(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents [C, F, h, w] and prompt embeddings [tokens, text_dim] of one clip, float32."""
        return self._tensor(index, "latents"), self._tensor(index, "prompt_embeds")

    def read_trajectories(self, indices: Iterable[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """States [B, N + 1, C, F, h, w] of some clips at the knots, float32, and bool [B], which were given their first
        latent frame."""
        chosen = list(indices)
        rows = [torch.cat([self._tensor(i, "states"), self._tensor(i, "latents")[None]]) for i in chosen]
        return torch.stack(rows), torch.cat([self._tensor(i, "keeps_first") for i in chosen]) > 0

    def read_images(self, indices: Iterable[int]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """First frames of some clips for their model, float32: [B, channels, F, h, w] and [B, tokens, image_dim].

        None for what the model does not take.
        """
        chosen, found = list(indices), []
        settings = self.settings
        for name, wanted in (("image_latents", settings.image_channels > 0), ("image_embeds", settings.image_dim)):
            found.append(torch.stack([self._tensor(index, name) for index in chosen]) if wanted else None)
        return found[0], found[1]

    def _tensor(self, index: int, name: str) -> torch.Tensor:
        path, identity, _ = self.items[index]
        if path not in self._open:
            self._open[path] = safe_open(path, "pt").__enter__()
            if len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)[1].__exit__(None, None, None)
        self._open.move_to_end(path)
        handle = self._open[path]
        tensor: torch.Tensor = handle.get_tensor(f"{identity}/{name}").float()
        return tensor


class SampleOrder:
    """Which clip stands at each position of the run: every epoch is a permutation of its own."""

    def __init__(self, num_clips: int, seed: int) -> None:
        self._num_clips, self._seed = num_clips, seed
        self._epochs: OrderedDict[int, np.ndarray] = OrderedDict()

    def __getitem__(self, position: int) -> int:
        epoch, place = divmod(position, self._num_clips)
        if epoch not in self._epochs:
            self._epochs[epoch] = np.random.default_rng([self._seed, epoch]).permutation(self._num_clips)
            if len(self._epochs) > 2:  # a batch may reach from one epoch into the next
                self._epochs.popitem(last=False)
        return int(self._epochs[epoch][place])


class BatchReader:
    """Makes the batches of one process; reads one ahead.

    A sample is known by its position in the run, from 0. Iteration i of m micro-batches on n processes of batch size b
    takes the positions i m n b ... (i + 1) m n b - 1, so splitting a batch otherwise visits the same samples with the
    same random numbers.
    """

    def __init__(
        self,
        data: PreparedData,
        config: DataConfig,
        *,
        seed: int,
        batch_size: int,
        micro_batches: int,
        max_sequence_length: int,
        drop_prompts: bool,
        trajectories: bool = False,
        rank: int = 0,
        world_size: int = 1,
        device: torch.device | str = "cpu",
    ) -> None:
        self._data, self._config, self._seed, self._device = data, config, seed, device
        self._size, self._micro, self._rank, self._world = batch_size, micro_batches, rank, world_size
        self._length, self._drop, self._trajectories = max_sequence_length, drop_prompts, trajectories
        self._order = SampleOrder(len(data), seed)
        self._negative = padded_embeds([data.negative_embeds], max_sequence_length)
        self._pool = ThreadPoolExecutor(1)
        self.data_digest = data.digest()
        self._ahead: tuple[tuple[int, int], Future[Any]] | None = None

    @property
    def samples_per_step(self) -> int:
        """Samples that one iteration takes, over all processes."""
        return self._size * self._micro * self._world

    def positions(self, step: int, micro: int) -> range:
        """Positions of this process' samples in a micro-batch of an iteration."""
        first = ((step * self._micro + micro) * self._world + self._rank) * self._size
        return range(first, first + self._size)

    def batch(self, step: int, micro: int) -> Batch:
        """The batch of a micro-batch (from 0) of an iteration."""
        if self._ahead is not None and self._ahead[0] == (step, micro):
            read = self._ahead[1].result()
        else:
            read = self._pool.submit(self._read, step, micro).result()
        following = (step, micro + 1) if micro + 1 < self._micro else (step + 1, 0)
        self._ahead = (following, self._pool.submit(self._read, *following))
        draws = Draws(self._seed, self.positions(step, micro), self._device)
        latents, embeds, negative = (tensor.to(self._device) for tensor in (*read[:2], self._negative))
        image_latents, image_embeds, states, keeps = (t if t is None else t.to(self._device) for t in read[2:])
        if self._drop and self._config.prompt_dropout > 0:
            dropped = draws.uniform("prompt-dropout") < self._config.prompt_dropout
            embeds = torch.where(dropped[:, None, None], negative, embeds)
        if self._config.image_share > 0:
            keeps = draws.uniform("image") < self._config.image_share
        first = None if keeps is None else latents[:, :, :1]
        return Batch(latents, Condition(embeds, negative, first, keeps, image_latents, image_embeds), draws, states)

    def _read(self, step: int, micro: int) -> tuple[Any, ...]:
        """Latents and prompts; the first frame in its two forms for models that take it apart; states, and which clips
        were given a first frame, for a method on trajectories. None for what is not there."""
        places = [self._order[position] for position in self.positions(step, micro)]
        rows = [self._data.read(place) for place in places]
        embeds = padded_embeds([row[1] for row in rows], self._length)
        states = keeps = None
        if self._trajectories:
            states, keeps = self._data.read_trajectories(places)
            sampling = self._data.settings.sampling
            keeps = keeps if sampling is not None and sampling.image_share > 0 else None
        return torch.stack([row[0] for row in rows]), embeds, *self._data.read_images(places), states, keeps

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        self._pool.shutdown(cancel_futures=True)


def padded_embeds(embeds: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """[B, length, text_dim] with zeros at the end, as the Wan pipelines pad prompts."""
    longest = max(e.shape[0] for e in embeds)
    require(longest <= length, "max_sequence_length", length, f"at least {longest}, the longest prepared prompt")
    return torch.stack([torch.nn.functional.pad(e, (0, 0, 0, length - e.shape[0])) for e in embeds])
