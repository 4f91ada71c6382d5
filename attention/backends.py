"""The registry of attention backends and the check of what each one can run on.

This module does not import torch: configurations name backends, and reading one must stay cheap. The built-in backends
are imported when they are first asked for.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from ..core.config import ConfigError

if TYPE_CHECKING:
    import torch

    from .config import AttentionConfig
    from .context import ForwardContext


@dataclass(frozen=True)
class BackendConstraints:
    """What a backend can run; None means anything.

    Attributes:
        devices: device types, such as "cuda".
        dtypes: names of dtypes, such as "bfloat16".
        head_dims: sizes of an attention head.
        block_sizes_q: sizes of a query block.
        block_sizes_k: sizes of a key block.
        sparse: whether the backend leaves blocks out; one that does not ignores order, blocks and keep ratio.
        gradient_devices: device types on which it has a backward; elsewhere its call raises where one is wanted.
        unavailable: reasons why it cannot run in this process at all, such as a package that is missing.
    """

    devices: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    block_sizes_q: tuple[int, ...] | None = None
    block_sizes_k: tuple[int, ...] | None = None
    sparse: bool = True
    gradient_devices: tuple[str, ...] | None = None
    unavailable: tuple[str, ...] = ()

    def problems(self, config: AttentionConfig, device: str, dtype: str, head_dim: int) -> list[str]:
        """Every reason why this backend cannot run, in words; empty if it can."""
        checks: list[tuple[str, object, tuple[object, ...] | None]] = [
            ("device", device, self.devices),
            ("dtype", dtype, self.dtypes),
            ("head size", head_dim, self.head_dims),
            ("block_size_q", config.block_size_q, self.block_sizes_q),
            ("block_size_k", config.block_size_k, self.block_sizes_k),
        ]
        return [*self.unavailable] + [
            f"{name} is {value}, it needs {' or '.join(str(item) for item in allowed)}"
            for name, value, allowed in checks
            if allowed is not None and value not in allowed
        ]


class AttentionBackend(Protocol):
    """Computes self-attention of post-RoPE queries and keys."""

    constraints: BackendConstraints

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        context: ForwardContext,
        config: AttentionConfig,
    ) -> torch.Tensor:
        """Map query, key, value of shape [batch, tokens, heads, head_dim] to an output of the same shape."""
        ...


BackendClass = TypeVar("BackendClass", bound=type)

AUTO = "auto"
"""Stands for dense attention or a sparse backend, by device and number of tokens; see `auto.py`."""

_BUILT_IN = {
    "dense": "dense",
    "flex": "block_sparse.flex",
    "gather": "block_sparse.gather",
    "native": "block_sparse.native",
    "reference": "block_sparse.reference",
    "triton": "block_sparse.triton_backend",
    "triton_int8": "block_sparse.triton_backend",
}
_REGISTERED: dict[str, type] = {}


def register_backend(name: str) -> Callable[[BackendClass], BackendClass]:
    """Class decorator: make a backend known under `name`.

    Raises:
        ConfigError: the name is taken by another class.
    """

    def keep(cls: BackendClass) -> BackendClass:
        taken = _REGISTERED.get(name)
        reserved = name == AUTO or (name in _BUILT_IN and not cls.__module__.endswith(_BUILT_IN[name]))
        if reserved or (taken is not None and taken is not cls):
            raise ConfigError(f"backend: got {name!r}; must be a name that no other backend has")
        _REGISTERED[name] = cls
        return cls

    return keep


def available_backends() -> list[str]:
    """Names of all known backends, sorted."""
    return sorted({*_BUILT_IN, *_REGISTERED})


def get_backend(name: str) -> AttentionBackend:
    """A new instance of the backend `name`.

    Raises:
        ConfigError: the name is not known; the message lists those that are.
    """
    if name not in _REGISTERED and name in _BUILT_IN:
        importlib.import_module(f".{_BUILT_IN[name]}", __package__)
    if name not in _REGISTERED:
        near = difflib.get_close_matches(name, available_backends(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"backend: got {name!r}; must be one of {', '.join(available_backends())}{hint}")
    backend: AttentionBackend = _REGISTERED[name]()
    return backend


def checked_backend(config: AttentionConfig, *, device: str, dtype: str, head_dim: int) -> AttentionBackend:
    """The backend of `config`, once it is known to run on this device, dtype and head size.

    For "auto" it is the sparse one that would be used here; how many tokens it takes is up to who runs it.

    Raises:
        ConfigError: it does not; the message gives each reason and the backends that would.
    """
    if config.backend == AUTO:
        from .auto import choose_backend

        return get_backend(choose_backend(config, device=device, dtype=dtype, head_dim=head_dim).name)
    backend = get_backend(config.backend)
    reasons = backend.constraints.problems(config, device, dtype, head_dim)
    if reasons:
        others = [name for name in available_backends() if name != config.backend]
        able = [name for name in others if not get_backend(name).constraints.problems(config, device, dtype, head_dim)]
        raise ConfigError(
            f"backend: got {config.backend!r}; it cannot run here: {'; '.join(reasons)}. "
            f"Backends that can: {', '.join(able) or 'none'}"
        )
    return backend
