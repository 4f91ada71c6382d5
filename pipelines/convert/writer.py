"""Safetensors files written tensor by tensor, and folders that appear whole or not at all."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ...core.config import require
from .reader import DTYPE_CODES

WEIGHTS = "diffusion_pytorch_model"
MAX_SHARD_BYTES = 5 * 2**30
_CHUNK_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Planned:
    """A tensor to write: its name, shape and dtype, and what makes it once it is its turn."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        count = self.dtype.itemsize
        for side in self.shape:
            count *= side
        return count


def write_safetensors(path: Path, tensors: list[Planned], metadata: dict[str, str] | None = None) -> None:
    """Write one file, holding one tensor in memory at a time; complete or not at all.

    The format: the length of the header (64 bit), the header as JSON with dtype, shape and place of each tensor, and
    the data without gaps.
    """
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    place = 0
    for tensor in tensors:
        offsets = [place, place + tensor.nbytes]
        header[tensor.name] = {
            "dtype": DTYPE_CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets,
        }  # fmt: skip
        place = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the data starts at a multiple of eight bytes
    partial = path.with_name(f".{uuid.uuid4().hex}.partial")
    try:
        with partial.open("wb") as file:
            file.write(len(text).to_bytes(8, "little"))
            file.write(text)
            for tensor in tensors:
                _write_data(file, tensor)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _write_data(file: object, planned: Planned) -> None:
    data = planned.make().contiguous()
    fits = tuple(data.shape) == planned.shape and data.dtype == planned.dtype
    require(fits, planned.name, (tuple(data.shape), data.dtype), f"{planned.shape} of {planned.dtype}")
    flat = data.reshape(-1).view(torch.uint8).numpy()
    for start in range(0, flat.size, _CHUNK_BYTES):
        file.write(flat[start : start + _CHUNK_BYTES].data)  # type: ignore[attr-defined]


def write_weights(folder: Path, tensors: list[Planned], max_shard_bytes: int = MAX_SHARD_BYTES) -> list[Path]:
    """Write the weights of a model as diffusers does: one file, or several and their index.

    Args:
        folder: exists.
        tensors: in the order of the file.
        max_shard_bytes: no file is larger unless a single tensor is.

    Returns:
        The safetensors files.
    """
    shards: list[list[Planned]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    if len(shards) == 1:
        path = folder / f"{WEIGHTS}.safetensors"
        write_safetensors(path, tensors)
        return [path]
    paths = [folder / f"{WEIGHTS}-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for path, shard in zip(paths, shards, strict=True):
        write_safetensors(path, shard)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors)},
        "weight_map": {t.name: path.name for path, shard in zip(paths, shards, strict=True) for t in shard},
    }
    (folder / f"{WEIGHTS}.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return paths


@contextlib.contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` to write into; it gets that name once the `with` block ends without an error.

    Raises:
        ConfigError: there is something of that name.
    """
    check_target(target)
    with made_parents(target):
        partial = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.partial")
        partial.mkdir()
        try:
            yield partial
            if target.is_dir():
                target.rmdir()  # empty, as was checked
            os.replace(partial, target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


@contextlib.contextmanager
def made_parents(target: Path) -> Iterator[None]:
    """The folders above `target`; those that were made for it go again where the `with` block ends with an error."""
    absent = list(itertools.takewhile(lambda folder: not folder.exists(), target.parents))
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder in absent:
            with contextlib.suppress(OSError):  # somebody else may have put something there
                folder.rmdir()
        raise


def check_target(target: Path) -> None:
    """Refuse a target that would be overwritten (an empty folder is none) or that cannot be made."""
    above = next(folder for folder in target.absolute().parents if folder.exists())
    usable = above.is_dir() and os.access(above, os.W_OK | os.X_OK)
    require(usable, "to", str(target), f"below a folder that can be written to; {str(above)!r} cannot")
    taken = target.exists() and not (target.is_dir() and not any(target.iterdir()))
    require(not taken, "to", str(target), "a name that is free, or an empty folder: nothing is overwritten")


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder, by hard links where the file system allows: text encoders are larger than most students."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_dir():
            place.mkdir(parents=True, exist_ok=True)
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path.resolve(), place)
        except OSError:
            shutil.copyfile(path, place)
