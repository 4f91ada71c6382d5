"""Where the weights of a checkpoint lie: one transformer or a pair of experts, alone or in a folder of some layout."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from ...core.config import ConfigError, require
from .reader import PICKLED, SAFETENSORS, find_files

EXPERTS = ("transformer", "transformer_2")
_NOISE = re.compile(r"(?<![A-Za-z])(high|low)(?![A-Za-z])", re.IGNORECASE)


@dataclass(frozen=True)
class Source:
    """The files of one transformer and the folder that they lie in."""

    files: list[Path]
    folder: Path


def find_sources(source: Path, low: Path | None = None) -> dict[str, Source]:
    """The transformers of a checkpoint: "transformer", and of a pair "transformer_2" for low noise.

    Args:
        source: a file, or a folder: of one model, of a pair (two files, or Wan 2.2's two folders), or of a pipeline.
        low: the low-noise expert where it has a name of its own.

    Raises:
        ConfigError: half a pair, or nothing to convert.
        FileNotFoundError: no such file or folder.
    """
    if low is not None:
        require(not low.exists() or not source.exists() or not low.samefile(source), "low", str(low),
                f"another file than the high-noise expert {source.name}")  # fmt: skip
        return {"transformer": _one(source), "transformer_2": _one(low)}
    if not source.is_dir():
        return _pair_of_files(source)
    if (source / "transformer").is_dir():
        return {name: _one(source / name) for name in EXPERTS if (source / name).is_dir()}
    halves = {kind: source / f"{kind}_noise_model" for kind in ("high", "low")}
    present = {kind: folder for kind, folder in halves.items() if folder.is_dir()}
    if present:
        absent = [halves[kind].name for kind in halves if kind not in present]
        require(not absent, "source", str(source), f"a pair of experts; missing: {', '.join(absent)}")
        return {"transformer": _one(halves["high"]), "transformer_2": _one(halves["low"])}
    named = [p for p in sorted(source.iterdir()) if p.suffix in SAFETENSORS + PICKLED and _NOISE.search(p.stem)]
    highs = [path for path in named if _kind(path) == "high"]
    if named:
        rule = "a folder with one high-noise expert and the low-noise one that belongs to it"
        require(len(highs) == 1 and len(named) == 2, "source", [path.name for path in named], rule)
        return _pair_of_files(highs[0])
    return {"transformer": _one(source)}


def _pair_of_files(path: Path) -> dict[str, Source]:
    if not path.is_file() or not _NOISE.search(path.stem):
        return {"transformer": _one(path)}
    kind = _kind(path)
    if kind == "low":
        raise ConfigError(
            f"source: got {path.name}, a low-noise expert; must be the high-noise one, this one is found by it"
        )
    other = path.with_name(_NOISE.sub(lambda found: _like(found[0]), path.stem) + path.suffix)
    require(
        other.is_file(), "source", path.name, f"one of a pair; the low-noise expert {other.name} is missing beside it"
    )
    return {"transformer": _one(path), "transformer_2": _one(other)}


def _one(path: Path) -> Source:
    return Source(find_files(path), path if path.is_dir() else path.parent)


def _kind(path: Path) -> str:
    kinds = {found.lower() for found in _NOISE.findall(path.stem)}
    require(len(kinds) == 1, "source", path.name, "named after one expert, high or low")
    return kinds.pop()


def _like(word: str) -> str:
    return "LOW" if word.isupper() else "Low" if word[0].isupper() else "low"
