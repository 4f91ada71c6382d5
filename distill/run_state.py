"""Everything that an interrupted run needs to go on as if nothing had happened, in the files of a checkpoint."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from ..core.config import ConfigError

STATE_FILE = "state.json"
RANDOM_FILE = "random.safetensors"


def random_state() -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """State of the global generators of this process: tensors, and plain data."""
    tensors = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        tensors |= {f"cuda-{i}": state for i, state in enumerate(torch.cuda.get_rng_state_all())}
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    tensors["numpy"] = torch.from_numpy(np.asarray(keys).astype(np.int64))
    version, internal, gauss_next = random.getstate()
    plain = {
        "numpy": [str(kind), int(position), int(has_gauss), float(gauss)],
        "python": [version, list(internal), gauss_next],
    }
    return tensors, plain


def restore_random_state(tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any]) -> None:
    """Undoes `random_state`."""
    torch.set_rng_state(tensors["torch"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"cuda-{index}" in tensors:
                torch.cuda.set_rng_state(tensors[f"cuda-{index}"], index)
    kind, position, has_gauss, gauss = plain["numpy"]
    np.random.set_state((kind, tensors["numpy"].numpy().astype(np.uint32), position, has_gauss, gauss))
    version, internal, gauss_next = plain["python"]
    random.setstate((version, tuple(internal), gauss_next))


class TensorFile(Mapping[str, torch.Tensor]):
    """The tensors of a safetensors file, each read when it is asked for."""

    def __init__(self, path: Path) -> None:
        self._file: Any = safe_open(path, "pt").__enter__()
        self._names = tuple(self._file.keys())

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def write_state(
    folder: Path, groups: Iterable[tuple[str, Mapping[str, torch.Tensor]]], state: Mapping[str, Any]
) -> None:
    """Writes one safetensors file per group, one after the other, and the plain data."""
    names = []
    for name, group in groups:
        values = {key: value.detach().cpu().contiguous() for key, value in group.items()}
        save_file(values, folder / f"{name}.safetensors")
        names.append(name)
    text = json.dumps({**state, "files": sorted(names)}, indent=1) + "\n"
    (folder / STATE_FILE).write_text(text, encoding="utf-8")


def read_state(folder: Path) -> tuple[dict[str, TensorFile], dict[str, Any]]:
    """What `write_state` wrote; tensors are read once they are asked for.

    Raises:
        ConfigError: a file is missing; the message names it.
    """
    state = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    tensors = {}
    for name in state["files"]:
        path = folder / f"{name}.safetensors"
        if not path.is_file():
            raise ConfigError(f"checkpoint: got {folder.name} without {path.name}; must be complete")
        tensors[name] = TensorFile(path)
    return tensors, state
