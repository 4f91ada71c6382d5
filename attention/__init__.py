"""Self-attention for Wan transformers: exact, or over the blocks of tokens that matter most.

The names below are imported on first use, so that reading a configuration does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if not __name__.startswith("videospark."):
    raise ImportError("import this package as videospark.attention: a second copy under its bare name hides bugs")

if TYPE_CHECKING:
    from .backends import available_backends, get_backend, register_backend
    from .config import AttentionConfig
    from .grid import TokenGrid
    from .processors import InstalledAttention, install

_HOMES = {
    "AttentionConfig": "config",
    "InstalledAttention": "processors",
    "TokenGrid": "grid",
    "available_backends": "backends",
    "get_backend": "backends",
    "install": "processors",
    "register_backend": "backends",
}

__all__ = [
    "AttentionConfig",
    "InstalledAttention",
    "TokenGrid",
    "available_backends",
    "get_backend",
    "install",
    "register_backend",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
