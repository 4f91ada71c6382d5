"""The tensors of one transformer, matched with the names and shapes that diffusers expects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ...core.config import ConfigError, require
from ...quantization.config import QuantizationConfig
from ...quantization.convert import kept_reason
from ...quantization.primitives import DTYPES, quantize_weight
from .architecture import expected_shapes
from .keys import (
    BRANCH_MARK,
    ROLA,
    SCALES,
    SLA,
    STATIC_SCALES,
    any_to_diffusers,
    is_marker,
    is_unused,
    strip_prefixes,
)
from .reader import TensorFiles
from .students import BRANCH_OF, GATE
from .writer import Planned

_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
_BLOCK = 128
"""Side of the blocks that TurboDiffusion quantizes weights in."""


@dataclass
class Mapped:
    """Where each tensor of a transformer comes from; values are names in the files.

    Attributes:
        files: what they are read from.
        weights: by diffusers name.
        scales: of eight-bit weights, by the diffusers name of the weight.
        branch: tensors of the linear branch, by diffusers name.
        gates: those of FastVideo's gate, which nothing here runs.
        unknown: names that have no place.
        notes: what the user should know.
    """

    files: TensorFiles
    weights: dict[str, str] = field(default_factory=dict)
    scales: dict[str, str] = field(default_factory=dict)
    branch: dict[str, str] = field(default_factory=dict)
    gates: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape in the file by diffusers name."""
        return {ours: self.files.entries[name].shape for ours, name in {**self.weights, **self.branch}.items()}


def match_names(files: TensorFiles) -> Mapped:
    """Sort the tensors of some files by what they are."""
    bare, notes = strip_prefixes(files.entries)
    found = Mapped(files, notes=notes)
    static = unused = 0
    for name, stored in bare.items():
        module, _, leaf = name.rpartition(".")
        if is_marker(name):
            continue
        if leaf in STATIC_SCALES:
            static += 1
        elif is_unused(name):
            unused += 1
        elif GATE in name:
            found.gates.append(stored)
        elif leaf in SCALES and (weight := any_to_diffusers(f"{module}.weight")) is not None:
            _put(found.scales, weight, stored)
        elif (ours := any_to_diffusers(f"{module}.weight" if leaf == "int8_weight" else name)) is None:
            found.unknown.append(stored)
        else:
            _put(found.branch if BRANCH_MARK in ours else found.weights, ours, stored)
    if static:
        found.notes.append(f"{static} static scales of activations are left out: here every token has its own")
    if unused:
        found.notes.append(f"{unused} norms of image queries are left out: no Wan model computes with them")
    return found


def check(mapped: Mapped, config: Mapping[str, Any], kind: str, *, drop_gate: bool) -> dict[str, tuple[int, ...]]:
    """Refuse whatever is missing, unknown or misshaped, each counted and named; returns the expected shapes."""
    expected = expected_shapes(config)
    if mapped.gates and not drop_gate:
        raise ConfigError(
            f"source: got {len(mapped.gates)} tensors of FastVideo's gate ({some(mapped.gates)}), which no attention "
            "here runs; must be converted with drop_gate (--drop-gate), to run dense without it"
        )
    faults = []
    shapes = mapped.shapes()
    if missing := sorted(set(expected) - set(mapped.weights)):
        faults.append(f"{len(missing)} missing ({some(missing)})")
    if unknown := sorted({*mapped.unknown, *(mapped.weights[n] for n in set(mapped.weights) - set(expected))}):
        faults.append(f"{len(unknown)} unknown ({some(unknown)})")
    wrong = [f"{name} {list(shapes[name])}, not {list(shape)}" for name, shape in expected.items()
             if name in shapes and not _fits(name, shapes[name], shape)]  # fmt: skip
    if wrong:
        faults.append(f"{len(wrong)} of the wrong shape ({some(wrong)})")
    faults += _branch_faults(mapped, config, kind) + _scale_faults(mapped)
    if faults:
        raise ConfigError(
            f"source: got {len(mapped.files.entries)} tensors, of them or besides them {'; '.join(faults)}"
        )
    return expected


def plan(
    mapped: Mapped,
    expected: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype | None,
    quantization: QuantizationConfig | None = None,
) -> list[Planned]:
    """The backbone as it is to be written, in the order of the model.

    Args:
        mapped: checked.
        expected: names and shapes.
        dtype: to convert to; None keeps each tensor's own, and widens eight bits to bfloat16.
        quantization: whose layers are written in eight bits, a scale beside each weight; None for none.
    """
    planned = []
    for name, shape in expected.items():
        stored = mapped.files.entries[mapped.weights[name]].dtype
        target = dtype if dtype is not None else torch.bfloat16 if stored in _EIGHT_BITS else stored
        maker = _Maker(mapped, name, shape, target)
        if quantization is not None and _is_quantized(name, shape, quantization):
            planned += _EightBits(maker, quantization).planned()
        else:
            planned.append(Planned(name, shape, target, maker))
    return planned


def _is_quantized(name: str, shape: tuple[int, ...], config: QuantizationConfig) -> bool:
    layer, _, leaf = name.rpartition(".")
    if leaf != "weight" or len(shape) != 2 or not config.selects(layer):
        return False
    return kept_reason(config, shape[1], shape[0]) is None


class _EightBits:
    """A weight and its scale, computed once where the file asks for the weight; the scale comes right after it."""

    def __init__(self, maker: _Maker, config: QuantizationConfig) -> None:
        self._maker, self._config = maker, config
        self._scale: torch.Tensor | None = None

    def planned(self) -> list[Planned]:
        """Both, in this order."""
        name, shape = self._maker.name, self._maker.shape
        rows = shape[0] if self._config.granularity == "row" else 1
        number = DTYPES[self._config.number]
        return [
            Planned(name, shape, number, self._weight),
            Planned(f"{name}_scale", (rows, 1), torch.float32, self._taken_scale),
        ]

    def _weight(self) -> torch.Tensor:
        weight, self._scale = quantize_weight(self._maker(), self._config.number, self._config.granularity)
        return weight

    def _taken_scale(self) -> torch.Tensor:
        assert self._scale is not None
        scale, self._scale = self._scale, None
        return scale


def plan_branch(mapped: Mapped) -> list[Planned]:
    """The linear branch, in the dtype of the file."""
    made = []
    for name, stored in sorted(mapped.branch.items()):
        entry = mapped.files.entries[stored]
        made.append(Planned(name, entry.shape, entry.dtype, _Maker(mapped, name, entry.shape, entry.dtype)))
    return made


def num_widened(mapped: Mapped) -> int:
    """How many weights are in eight bits."""
    return len(mapped.scales)


@dataclass(frozen=True)
class _Maker:
    """Reads one tensor, gives it its shape, widens it from eight bits and refuses NaN."""

    mapped: Mapped
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __call__(self) -> torch.Tensor:
        stored = self.mapped.weights.get(self.name) or self.mapped.branch[self.name]
        tensor = self.mapped.files.read(stored)
        if tensor.dtype in _EIGHT_BITS:
            tensor = widen(tensor, self.mapped.files.read(self.mapped.scales[self.name]))
        tensor = tensor.reshape(self.shape).to(self.dtype)
        finite = bool(torch.isfinite(tensor).all())
        require(finite, stored, "NaN or infinite values", f"finite, also in {str(self.dtype).removeprefix('torch.')}")
        return tensor


def widen(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """weight * scale in float32.

    Args:
        weight: [out, in] in eight bits.
        scale: one number, one per row, or one per block of 128 x 128.
    """
    scale = scale.float()
    if scale.numel() == 1:
        return weight.float() * scale.reshape(())
    if per_row(tuple(scale.shape), weight.shape[0]):
        return weight.float() * scale.reshape(-1, *[1] * (weight.ndim - 1))
    rows = scale.repeat_interleave(_BLOCK, 0)[: weight.shape[0]]
    return weight.float() * rows.repeat_interleave(_BLOCK, 1)[:, : weight.shape[1]]


def per_row(shape: tuple[int, ...], rows: int) -> bool:
    """Whether scales of this shape are one for each row, and not for blocks of which there happen to be as many."""
    return bool(shape) and shape[0] == rows and all(side == 1 for side in shape[1:])


def some(names: list[str], limit: int = 4) -> str:
    """The first few of a list, and how many more there are."""
    rest = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {rest} more" if rest > 0 else "")


def _put(table: dict[str, str], ours: str, stored: str) -> None:
    require(ours not in table, ours, [table.get(ours), stored], "in the source once")
    table[ours] = stored


def _fits(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    flat = (wanted[0], torch.Size(wanted[1:]).numel()) if wanted else ()
    return found == wanted or (name == "patch_embedding.weight" and found == flat)


def _branch_faults(mapped: Mapped, config: Mapping[str, Any], kind: str) -> list[str]:
    branch = BRANCH_OF.get(kind)
    if branch is None:
        if mapped.branch:
            return [f"{len(mapped.branch)} of a linear branch, which format {kind!r} has none of"]
        return []
    leaves = {"rola": set(ROLA.values()), "sla": set(SLA.values())}[branch]
    wanted = {f"blocks.{i}.{leaf}" for i in range(config["num_layers"]) for leaf in leaves}
    faults = []
    if missing := sorted(wanted - set(mapped.branch)):
        faults.append(
            f"{len(missing)} missing of the linear branch, without which this is no student ({some(missing)})"
        )
    if unknown := sorted(mapped.branch[name] for name in set(mapped.branch) - wanted):
        faults.append(f"{len(unknown)} of another linear branch ({some(unknown)})")
    shapes = {name: mapped.files.entries[stored].shape for name, stored in mapped.branch.items()}
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    rules = {
        "proj_q.weight": lambda s: len(s) == 2 and s[1] == head_dim,
        "proj_k.weight": lambda s: len(s) == 2 and s[1] == head_dim,
        "gate_proj.weight": lambda s: s == (1, head_dim),
        "gate_bias": lambda s: s == (1, heads, 1, 1),
        "proj.weight": lambda s: s == (head_dim, head_dim),
        "proj.bias": lambda s: s == (head_dim,),
    }
    wrong = [f"{name} {list(shape)}" for name, shape in sorted(shapes.items())
             if not rules[name.split(BRANCH_MARK)[1]](shape)]  # fmt: skip
    if wrong:
        faults.append(f"{len(wrong)} of the linear branch of the wrong shape ({some(wrong)})")
    ranks = sorted({shape[0] for name, shape in shapes.items() if ".proj_q." in name or ".proj_k." in name})
    if len(ranks) > 1:
        faults.append(f"a linear branch of several ranks ({ranks})")
    return faults


def _scale_faults(mapped: Mapped) -> list[str]:
    faults = []
    entries = mapped.files.entries
    eight = {name for name, stored in mapped.weights.items() if entries[stored].dtype in _EIGHT_BITS}
    if bare := sorted(eight - set(mapped.scales)):
        faults.append(f"{len(bare)} in eight bits without a scale, without which they mean nothing ({some(bare)})")
    if idle := sorted(mapped.scales[name] for name in set(mapped.scales) - eight):
        faults.append(f"{len(idle)} scales beside weights that are not in eight bits ({some(idle)})")
    wrong = []
    for name in sorted(eight & set(mapped.scales)):
        scale, weight = entries[mapped.scales[name]], entries[mapped.weights[name]]
        blocks = tuple(-(-side // _BLOCK) for side in weight.shape)
        one = torch.Size(scale.shape).numel() == 1
        if not one and not per_row(scale.shape, weight.shape[0]) and scale.shape != blocks:
            wrong.append(f"{scale.name} {list(scale.shape)}")
    if wrong:
        faults.append(f"{len(wrong)} scales that are neither one, one per row nor one per block ({some(wrong)})")
    return faults
