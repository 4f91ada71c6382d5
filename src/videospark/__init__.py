"""videospark: fast video generation with Wan-style diffusion transformers.

    pipe = diffusers.WanPipeline.from_pretrained(...)
    report = videospark.accelerate(pipe, "sparse-50")
    videospark.restore(pipe)

The public names are loaded on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

from ._version import __version__

_HOME = {
    "accelerate": "pipelines.acceleration",
    "restore": "pipelines.acceleration",
    "current_report": "pipelines.acceleration",
    "AccelerationReport": "pipelines.acceleration",
    "Recipe": "pipelines.recipe",
    "load": "pipelines.loading",
    "save": "pipelines.loading",
    "generate": "pipelines.generation",
    "GenerationRequest": "pipelines.generation",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'videospark' has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
