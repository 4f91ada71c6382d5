"""Weights of a module that also lie in files: let go while they are not needed, and read again bit for bit."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from ..core.config import ConfigError, require

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class WeightFiles:
    """The parameters of a module beside the safetensors files that it was loaded from.

    The parameters stay the very same objects; only what they hold comes and goes.

    Args:
        module: a model of transformers, whole.
        folder: of its weights.
        field: name for messages.

    Raises:
        ConfigError: no such files, a parameter that is not in them, or one that differs from them.
    """

    def __init__(self, module: nn.Module, folder: Path, field: str) -> None:
        self.field, self.folder = field, folder
        self._files = _index(folder, field)
        self._parameters = self._by_name(module)
        self._freed: set[str] = set()
        for name, parameter in self._parameters.items():
            require(not parameter.is_meta, f"{field}.{name}", "a tensor without data", "loaded, and not offloaded")
        for name, parameter, stored in self._read(self._parameters):
            same = stored.shape == parameter.shape and torch.equal(parameter.detach().cpu(), stored)
            rule = f"as in {folder}: it was changed since it was loaded, and could not be read again"
            require(same, f"{field}.{name}", "other numbers than in its file", rule)

    @property
    def freed(self) -> bool:
        """Whether some parameters hold nothing now."""
        return bool(self._freed)

    def free(self, names: Iterable[str] | None = None) -> None:
        """Let go of the parameters of these names, by default of all; they keep device and dtype."""
        # Data made in inference mode could not be put into a parameter of the outside.
        with torch.inference_mode(False):
            for name in self._parameters if names is None else names:
                if name in self._parameters and name not in self._freed:
                    parameter = self._parameters[name]
                    parameter.data = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
                    self._freed.add(name)

    def load(self) -> None:
        """Read what was let go, on the device where each parameter is now.

        Raises:
            ConfigError: the files are gone or others now.
        """
        if not self._freed:
            return
        wanted = {name: parameter for name, parameter in self._parameters.items() if name in self._freed}
        with torch.inference_mode(False):
            for name, parameter, stored in self._read(wanted):
                parameter.data = stored.to(parameter.device)
                self._freed.discard(name)

    def _by_name(self, module: nn.Module) -> dict[str, nn.Parameter]:
        """Each parameter once, under a name that its files know."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        missing: dict[int, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if name in self._files:
                found.setdefault(id(parameter), (name, parameter))
                missing.pop(id(parameter), None)
            elif id(parameter) not in found:
                missing.setdefault(id(parameter), name)
        require(
            not missing, f"{self.field}.weights", sorted(missing.values())[:3], f"all in the files of {self.folder}"
        )
        return dict(found.values())

    def _read(self, wanted: dict[str, nn.Parameter]) -> Iterable[tuple[str, nn.Parameter, torch.Tensor]]:
        by_file: dict[Path, list[str]] = {}
        for name in wanted:
            by_file.setdefault(self._files[name], []).append(name)
        for path, names in by_file.items():
            try:
                with safe_open(path, "pt") as file:
                    for name in names:
                        parameter = wanted[name]
                        # A copy of its own: the file must not stay mapped, nor be changed under a running model.
                        yield name, parameter, file.get_tensor(name).to(parameter.dtype, copy=True)
            except (OSError, SafetensorError) as error:
                got = f"{path.name} of {self.folder} ({error})"
                rule = "where it was loaded from: put it back and try again"
                raise ConfigError(f"{self.field}.weights: got {got}; must be {rule}") from error


def folder_of(module: Any, field: str) -> Path:
    """The folder that a model of transformers was loaded from.

    Raises:
        ConfigError: it was built in memory.
    """
    name = str(getattr(module, "name_or_path", "") or "")
    rule = "loaded from a folder, so that it can be read again: save the pipeline and load it first"
    require(bool(name) and Path(name).is_dir(), field, name or "a model built in memory", rule)
    return Path(name)


def _index(folder: Path, field: str) -> dict[str, Path]:
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        return {name: folder / file for name, file in json.loads(index.read_text("utf-8"))["weight_map"].items()}
    require(single.is_file(), f"{field}.weights", str(folder), f"a folder with {SINGLE} or {INDEX}")
    with safe_open(single, "pt") as file:
        return dict.fromkeys(file.keys(), single)
