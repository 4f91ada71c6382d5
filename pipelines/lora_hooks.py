"""What puts LoRAs to work inside a transformer, and takes them off again after every forward pass; see `lora.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ..core.config import ConfigError
from .lora_files import Change

_STATE = "_videospark_lora"


def state_of(transformer: nn.Module) -> InstalledLoRAs | None:
    """The LoRAs of a transformer, or None."""
    return transformer.__dict__.get(_STATE)


class InstalledLoRAs:
    """The LoRAs of one transformer.

    Attributes:
        adapters: name -> weight and changes by module name.
        origins: name -> what else a report says of it; see `lora.LoRAOrigin`.
    """

    def __init__(self, transformer: nn.Module) -> None:
        self.adapters: dict[str, tuple[float, dict[str, Change]]] = {}
        self.origins: dict[str, Any] = {}
        self._transformer = transformer
        self._handles: list[Any] = []
        self._swapped: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._changed: dict[str, tuple[nn.Parameter, int, nn.Parameter]] = {}
        self._factors: dict[tuple[str, torch.device, torch.dtype], list[tuple[torch.Tensor, ...]]] = {}
        self._hooks = [
            transformer.register_forward_pre_hook(self._begin, with_kwargs=True),
            transformer.register_forward_hook(self._end, always_call=True),
        ]
        transformer.__dict__[_STATE] = self

    def add(self, name: str, weight: float, changes: dict[str, Change], origin: Any = None) -> None:
        """Take a LoRA in; `changes` are by module name of this transformer and fit it."""
        self.adapters[name] = (weight, changes)
        self.origins[name] = origin
        self._forget()

    def drop(self, name: str) -> None:
        """Leave a LoRA out; with the last one the hooks of the transformer go."""
        self.adapters.pop(name, None)
        self.origins.pop(name, None)
        self._forget()
        if not self.adapters:
            for hook in self._hooks:
                hook.remove()
            self._transformer.__dict__.pop(_STATE, None)

    def set_weight(self, name: str, weight: float) -> None:
        """Another weight for a LoRA."""
        self.adapters[name] = (weight, self.adapters[name][1])
        self._forget()

    def _forget(self) -> None:
        self._changed.clear()
        self._factors.clear()
        compiled = any(getattr(m, "_compiled_call_impl", None) is not None for m in self._transformer.modules())
        if compiled:
            # Compiled code does not look whether hooks have come or gone.
            torch.compiler.reset()

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        states = args[0] if args else kwargs["hidden_states"]
        check_unfused(self._transformer)
        try:
            for name in dict.fromkeys(name for _, changes in self.adapters.values() for name in changes):
                self._put_on(name, states.device)
        except BaseException:
            self._take_off()
            raise

    def _end(self, *_: Any) -> None:
        self._take_off()

    def _take_off(self) -> None:
        for handle in self._handles:
            handle.remove()
        for owner, leaf, original in self._swapped:
            owner._parameters[leaf] = original
        self._handles, self._swapped = [], []

    def _put_on(self, name: str, device: torch.device) -> None:
        layer = find(self._transformer, name)
        if multiplies(layer):
            assert isinstance(layer, nn.Module)
            self._handles.append(layer.register_forward_hook(self._added(name)))
            return
        parent, _, leaf = name.rpartition(".")
        whole = isinstance(layer, nn.Module)
        owner: Any = layer if whole else self._transformer.get_submodule(parent)
        for target, part in (("weight" if whole else leaf, "weight"), ("bias", "bias")):
            parts = [(weight, change) for weight, change in self._changes(name)]
            if any(_part(change, part) for _, change in parts):
                self._swap(owner, target, f"{name}:{part}", part, parts, device)

    def _swap(
        self, owner: nn.Module, leaf: str, key: str, part: str, parts: list[tuple[float, Change]], device: torch.device
    ) -> None:
        """A changed parameter in the place of the original, made once per original."""
        original = owner._parameters[leaf]
        assert original is not None
        if original.is_meta:
            rule = "in memory: load a LoRA that changes norms or embeddings without sequential offloading"
            raise ConfigError(f"lora: got {key.partition(':')[0]} on the meta device; must be {rule}")
        held = self._changed.get(key)
        if held is None or held[0] is not original or held[1] != original._version or held[2].device != device:
            if device.type == "cuda":
                # Offloading may still be copying the original, on a stream that this one does not wait for.
                torch.cuda.synchronize(device)
            total = original.detach().to(device, torch.float32)
            for weight, change in parts:
                if (difference := _difference(change, part, tuple(original.shape))) is not None:
                    total = total + weight * difference.to(device)
            made = nn.Parameter(total.to(original.dtype), requires_grad=False)
            held = self._changed[key] = (original, original._version, made)
        owner._parameters[leaf] = held[2]
        self._swapped.append((owner, leaf, original))

    def _added(self, name: str) -> Callable[..., torch.Tensor]:
        """The hook of a layer: adds the low-rank products, whole differences and biases to its output."""

        def add(layer: nn.Module, args: tuple[torch.Tensor, ...], out: torch.Tensor) -> torch.Tensor:
            x = args[0]
            for down, up, bias in self._factors_of(name, x.device, x.dtype):
                if down.numel():
                    out = _plus(out, F.linear(x, down), up) if up.numel() else out + F.linear(x, down)
                if bias.numel():
                    out = out + bias
            return out

        return add

    def _factors_of(self, name: str, device: torch.device, dtype: torch.dtype) -> list[tuple[torch.Tensor, ...]]:
        """Down, up (weight and alpha / rank multiplied in) and bias of each LoRA; empty where there is none.

        A whole difference stands as a `down` without an `up`.
        """
        key = (name, device, dtype)
        if key not in self._factors:
            empty = torch.empty(0, device=device, dtype=dtype)
            made: list[tuple[torch.Tensor, ...]] = []
            for weight, change in self._changes(name):
                bias = empty if change.bias is None else (weight * change.bias.float()).to(device, dtype)
                pairs = []
                if change.down is not None and change.up is not None:
                    up = (weight * change.factor * change.up.float()).to(device, dtype)
                    pairs.append((change.down.to(device, dtype), up))
                if change.weight is not None:
                    pairs.append(((weight * change.weight.float()).to(device, dtype), empty))
                made += [(down, up, empty) for down, up in pairs] + [(empty, empty, bias)]
            self._factors[key] = made
        return self._factors[key]

    def _changes(self, name: str) -> Iterable[tuple[float, Change]]:
        for weight, changes in self.adapters.values():
            if name in changes:
                yield weight, changes[name]


def check_unfused(transformer: nn.Module) -> None:
    """Refuse fused projections, which would pass a LoRA of the single ones by."""
    for name, module in transformer.named_modules():
        if getattr(module, "fused_projections", False):
            raise ConfigError(f"{name}: got fused projections; must be separate: call unfuse_qkv_projections() first")


def _part(change: Change, part: str) -> bool:
    return change.bias is not None if part == "bias" else change.weight is not None or change.down is not None


def _difference(change: Change, part: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    """The change of a parameter in float32, of its shape; None where there is none."""
    if part == "bias":
        return None if change.bias is None else change.bias.float().reshape(shape)
    total = None if change.weight is None else change.weight.float().reshape(shape)
    if change.down is not None and change.up is not None:
        product = change.factor * (change.up.flatten(1).float() @ change.down.flatten(1).float())
        total = product.reshape(shape) if total is None else total + product.reshape(shape)
    return total


def find(transformer: nn.Module, name: str) -> nn.Module | nn.Parameter:
    parent, _, leaf = name.rpartition(".")
    owner = transformer.get_submodule(parent)
    found = owner._parameters.get(leaf)
    return found if found is not None else transformer.get_submodule(name)


def multiplies(layer: Any) -> bool:
    """Whether a layer is a product of its input: a Linear, what stands in for one, or one that PEFT wraps."""
    return hasattr(layer, "in_features") and hasattr(layer, "out_features")


def _plus(out: torch.Tensor, hidden: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """out + hidden up^T; in place where nobody asks for a gradient, as these are the largest tensors of a pass."""
    if torch.is_grad_enabled() or not out.is_contiguous():
        return out + F.linear(hidden, up)
    out.view(-1, out.shape[-1]).addmm_(hidden.reshape(-1, hidden.shape[-1]).to(out.dtype), up.t().to(out.dtype))
    return out
