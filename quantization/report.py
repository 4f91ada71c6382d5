"""What became of a transformer that was quantized, as rows and sums."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

from .linear import QuantizedLinear, ReplacedLinear


@dataclass
class QuantizationReport:
    """What became of a transformer.

    Attributes:
        config: the settings as plain data.
        engine: what multiplies, how, and why it was chosen.
        layers: one row per selected layer: layer, inputs, outputs, status ("quantized" or "kept"), reason,
            hot_channels, bytes_before, bytes_after.
        bytes_before: of all parameters and buffers of the transformer before.
        bytes_after: of what the transformer holds now; originals that wait elsewhere are not in it.
        bytes_originals: of the original layers that wait to be put back.
        fused: which path the fused parts take, or "off".
        notes: what a user should know.
    """

    config: dict[str, Any]
    engine: str
    layers: list[dict[str, Any]]
    bytes_before: int
    bytes_after: int
    bytes_originals: int
    fused: str
    notes: list[str] = field(default_factory=list)

    @property
    def num_quantized(self) -> int:
        """Layers that are in eight bits now."""
        return sum(row["status"] == "quantized" for row in self.layers)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "config": self.config,
            "engine": self.engine,
            "num_quantized": self.num_quantized,
            "layers": [dict(row) for row in self.layers],
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "bytes_originals": self.bytes_originals,
            "fused": self.fused,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        share = self.bytes_after / self.bytes_before if self.bytes_before else 1.0
        lines = [f"{self.config['mode']}: {self.num_quantized} of {len(self.layers)} selected layers, {self.engine}"]
        lines.append(f"weights {self.bytes_before / 2**20:.1f} -> {self.bytes_after / 2**20:.1f} MiB ({share:.0%})")
        lines += [f"kept {row['layer']}: {row['reason']}" for row in self.layers if row["status"] == "kept"]
        return "\n".join([*lines, f"fused: {self.fused}", *self.notes])


def module_bytes(module: nn.Module) -> int:
    """Bytes of the parameters and buffers of a module."""
    tensors = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return sum(t.numel() * t.element_size() for t in tensors.values())


def quantized_row(name: str, layer: ReplacedLinear, original: nn.Linear | None) -> dict[str, Any]:
    """The row of a layer in eight bits; `original` is the one that waits, if any."""
    hot = layer.hot_index.numel() if isinstance(layer, QuantizedLinear) and layer.hot_index is not None else 0
    return {
        "layer": name,
        "inputs": layer.in_features,
        "outputs": layer.out_features,
        "status": "quantized",
        "reason": "",
        "hot_channels": hot,
        "bytes_before": None if original is None else module_bytes(original),
        "bytes_after": module_bytes(layer),
    }


def kept_row(name: str, layer: nn.Linear, reason: str) -> dict[str, Any]:
    """The row of a layer that was selected and stays as it is."""
    size = module_bytes(layer)
    return {
        "layer": name, "inputs": layer.in_features, "outputs": layer.out_features, "status": "kept", "reason": reason,
        "hot_channels": 0, "bytes_before": size, "bytes_after": size,
    }  # fmt: skip
