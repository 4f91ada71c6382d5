"""Which blocks of keys a clip's sparse attention kept: recorded while it is made, kept beside it, drawn as pictures."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..attention.processors import SelfAttentionProcessor
from ..attention.routing import BlockMap
from ..core.config import require
from ..pipelines.video_io import write_atomically

MAX_SIDE = 64
"""Larger maps are averaged down to this: a layer of Wan 480p has 256 x 256 blocks."""
MAX_STEPS = 8
_RAMP = np.array([(19, 18, 43), (59, 58, 145), (62, 125, 190), (83, 196, 173), (250, 240, 160)], np.float32)
"""Colours from none kept to all kept; lightness rises all the way, so that it reads without hue."""


@dataclasses.dataclass(frozen=True)
class BlockMaps:
    """What was kept.

    Attributes:
        steps: sampling steps that were recorded, ascending.
        shares: uint8 [steps, layers, heads, query places, key places], 255 where all blocks of a place were kept. A
            place is a block, or several where there are more than `MAX_SIDE` of them.
        sparse: bool [steps, layers]: False where the layer was dense, and its shares are 255.
    """

    steps: tuple[int, ...]
    shares: np.ndarray
    sparse: np.ndarray

    def save(self, path: Path) -> Path:
        """Writes an .npz, whole or not at all."""
        return write_atomically(path, self._write)

    def _write(self, partial: Path) -> None:
        with partial.open("wb") as file:
            np.savez_compressed(file, steps=np.array(self.steps), shares=self.shares, sparse=self.sparse)

    @classmethod
    def load(cls, path: Path) -> BlockMaps:
        """Reads what `save` wrote."""
        with np.load(path, allow_pickle=False) as data:
            return cls(tuple(int(step) for step in data["steps"]), data["shares"], data["sparse"])

    def share(self, step: int, layer: int, head: int | None = None) -> np.ndarray:
        """Kept shares, float32 [query places, key places] in 0..1, of one head or averaged over all.

        Args:
            step: index into `steps`.
            layer: of the transformer.
            head: None is the mean.
        """
        places, layers, heads = self.shares.shape[:3]
        for name, value, count in (("step", step, places), ("layer", layer, layers), ("head", head or 0, heads)):
            require(0 <= value < count, name, value, f"0 to {count - 1}")
        of_layer = self.shares[step, layer].astype(np.float32) / 255
        return of_layer.mean(axis=0) if head is None else of_layer[head]

    def picture(self, step: int, layer: int, head: int | None = None, pixels: int = 512) -> np.ndarray:
        """The same as uint8 [H, W, 3], each place a square; bright is kept. Queries go down, keys go right."""
        share = self.share(step, layer, head)
        position = share * (len(_RAMP) - 1)
        low = np.minimum(position.astype(np.int64), len(_RAMP) - 2)
        part = (position - low)[..., None]
        colours = _RAMP[low] * (1 - part) + _RAMP[low + 1] * part
        scale = max(1, pixels // max(share.shape))
        return colours.round().astype(np.uint8).repeat(scale, axis=0).repeat(scale, axis=1)

    def overview(self, step: int) -> np.ndarray:
        """Kept share of each layer and head at one step: float32 [layers, heads]."""
        return self.shares[step].astype(np.float32).mean(axis=(2, 3)) / 255


class BlockMapRecorder:
    """Listens to the sparse layers of a pipeline while it makes one clip.

    Results stay the same bit for bit; each recorded layer waits for its map to reach the CPU, which costs time.

    Args:
        num_steps: of the clip; at most `MAX_STEPS` of them, evenly spread and with both ends, are recorded.
    """

    def __init__(self, num_steps: int) -> None:
        count = min(num_steps, MAX_STEPS)
        self.steps = tuple(dict.fromkeys(round(i * (num_steps - 1) / max(1, count - 1)) for i in range(count)))
        self._kept: dict[tuple[int, int], np.ndarray] = {}
        self._layers = 0

    @contextmanager
    def record(self, pipe: Any) -> Iterator[None]:
        """Listens to both experts of a pipeline, where it has two, until the block ends."""
        changed: list[tuple[SelfAttentionProcessor, Any]] = []
        try:
            for name in ("transformer", "transformer_2"):
                module = getattr(pipe, name, None)
                for block in module.blocks if module is not None else ():
                    processor = block.attn1.processor
                    if isinstance(processor, SelfAttentionProcessor):
                        self._layers = max(self._layers, processor.layer + 1)
                        changed.append((processor, processor.backend))
                        processor.backend = _Listening(processor.backend, self)  # type: ignore[assignment]
            yield
        finally:
            for processor, backend in changed:
                processor.backend = backend

    def note(self, step: int | None, layer: int, kept: BlockMap) -> None:
        """Holds on to a layer's map of one step; of the two passes of guidance to the first, that of the prompt."""
        if step is None:
            step = 0
        if step in self.steps and (step, layer) not in self._kept:
            self._kept[step, layer] = _shares(kept)

    def result(self) -> BlockMaps | None:
        """What was recorded; None where every layer was dense."""
        if not self._kept:
            return None
        heads, queries, keys = next(iter(self._kept.values())).shape
        shares = np.full((len(self.steps), self._layers, heads, queries, keys), 255, np.uint8)
        sparse = np.zeros((len(self.steps), self._layers), bool)
        for (step, layer), kept in self._kept.items():
            shares[self.steps.index(step), layer] = kept
            sparse[self.steps.index(step), layer] = True
        return BlockMaps(self.steps, shares, sparse)


class _Listening:
    """A backend that tells what it kept, and is the same in everything else."""

    def __init__(self, backend: Any, recorder: BlockMapRecorder) -> None:
        self._backend, self._recorder = backend, recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, context: Any, config: Any
    ) -> torch.Tensor:
        keeping = dataclasses.replace(context, keep_maps=True)  # `maps` stays the same object
        out: torch.Tensor = self._backend(query, key, value, context=keeping, config=config)
        kept = context.maps.get(context.layer) if context.keep_maps else context.maps.pop(context.layer, None)
        if kept is not None:
            self._recorder.note(context.step, context.layer, kept)
        return out


def _shares(kept: BlockMap) -> np.ndarray:
    """uint8 [heads, query places, key places] of the first clip of a batch."""
    indices = kept.indices[0].cpu()
    dense = torch.zeros((*indices.shape[:-1], kept.num_key_blocks + 1))
    dense = dense.scatter_(-1, indices, 1.0)[..., :-1]  # the last place stands for no block
    size = (min(dense.shape[1], MAX_SIDE), min(dense.shape[2], MAX_SIDE))
    return (F.adaptive_avg_pool2d(dense, size) * 255).round().to(torch.uint8).numpy()
