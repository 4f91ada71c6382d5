"""LoRAs on a Wan pipeline: loaded before or after `accelerate`, on quantized layers too, and taken off without a trace.

**One order.** The layer runs first, in the precision it has; the low-rank product runs beside it in the precision of
its input, and is added: y = Q(W) x + w alpha/r B A x. A LoRA is never merged into weights and never quantized, so it
makes no difference whether it was loaded before the model was quantized or after.

**No trace.** Outside a forward pass the transformer is untouched. Each pass begins by putting hooks on the layers that
have that name now, and changed parameters in the place of others (norms, modulation, patch embedding), and ends by
taking all of it back. Unloading therefore gives back the very same weights, and quantizing, restoring, saving and
offloading see a stock model.

Compiled blocks are compiled with the hooks in place; loading, unloading and another weight recompile them.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.config import ConfigError, require
from .convert.mapping import some
from .lora_files import Change, LoRAFile, read_lora, resolve_names
from .lora_hooks import InstalledLoRAs, check_unfused, find, multiplies, state_of

EXPERTS = {"high": "transformer", "low": "transformer_2"}
_READ_BYTES = 2**24
_SUFFIX = re.compile(r"(:[-+]?(?:[\d.eE+-]+|inf|nan))?(@(?:high|low|both))?")


@dataclass(frozen=True)
class LoRAOrigin:
    """Where a loaded LoRA came from: its file, the SHA-256 of that, and the expert that was asked for."""

    path: str
    sha256: str
    expert: str


@dataclass(frozen=True)
class LoRAReport:
    """What was loaded.

    Attributes:
        name: to unload it by.
        weight: it is added with.
        modules: by denoiser, how many modules it changes.
        unmatched: modules of the file that this model does not have, and keys of no known convention.
        notes: what the user should know.
    """

    name: str
    weight: float
    modules: dict[str, int]
    unmatched: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "name": self.name, "weight": self.weight, "modules": dict(self.modules),
            "unmatched": list(self.unmatched), "notes": list(self.notes),
        }  # fmt: skip


@dataclass(frozen=True)
class LoRAChoice:
    """A LoRA as it is asked for: file, weight, and the expert, "auto", "high", "low" or "both"."""

    path: Path
    weight: float = 1.0
    expert: str = "auto"


def parse_choice(text: str) -> LoRAChoice:
    """FILE[:WEIGHT][@high|@low|@both] of a command line.

    Raises:
        ConfigError: an unknown expert or a weight that is no finite number.
    """
    rule = "FILE[:WEIGHT][@high|@low|@both]"
    # What follows the file's ending can be nothing but a suffix; elsewhere ":" and "@" may belong to a path.
    ending = re.search(r"\.safetensors([:@].*)$", text)
    require(ending is None or _SUFFIX.fullmatch(ending[1]) is not None, "lora", text, rule)
    rest, at, expert = text.rpartition("@")
    if not at or expert not in ("high", "low", "both"):
        rest, expert = text, "auto"
    path, colon, number = rest.rpartition(":")
    try:
        weight = float(number) if colon else 1.0
    except ValueError:  # the colon belongs to the path
        path, weight = rest, 1.0
    else:
        path = path if colon else rest
    require(bool(path), "lora", text, rule)
    require(abs(weight) < float("inf"), "lora.weight", weight, "a finite number")
    return LoRAChoice(Path(path), weight, expert)


def check_choice(choice: LoRAChoice) -> LoRAChoice:
    """The choice itself, with its file found and its keys read, before any model is loaded.

    Raises:
        ConfigError: see `read_lora`.
        FileNotFoundError: no such file.
    """
    read_lora(choice.path)
    return choice


def load_lora(
    pipe: Any, lora: str | Path | LoRAChoice, weight: float = 1.0, *, expert: str = "auto", name: str | None = None
) -> LoRAReport:
    """Add a LoRA to a pipeline, stock or accelerated.

    Args:
        pipe: a Wan pipeline of diffusers.
        lora: a .safetensors file or a folder of PEFT's, or a whole choice.
        weight: it is multiplied with; may be negative.
        expert: of a pipeline of two experts the one to change, "high", "low" or "both". "auto" goes by the keys
            (`transformer_2.`), then by the name of the file ("high", "low"), and changes both otherwise.
        name: to unload it by; by default that of the file, with its folder's where another LoRA has it.

    Raises:
        ConfigError: nothing in the file fits this model, shapes differ, another kind of adapter, a name that is taken,
            or projections that were fused. The pipeline is then unchanged.
        FileNotFoundError: no such file.
    """
    choice = lora if isinstance(lora, LoRAChoice) else LoRAChoice(Path(lora), weight, expert)
    require(choice.expert in ("auto", "high", "low", "both"), "expert", choice.expert, "auto, high, low or both")
    require(abs(choice.weight) < float("inf"), "weight", choice.weight, "a finite number")
    denoisers = _denoisers(pipe)
    file = read_lora(choice.path)
    origins = {k: v for module in denoisers.values() if (state := state_of(module)) for k, v in state.origins.items()}
    taken = sorted(origins)
    if name is None:
        name = file.path.stem
        if name in taken and origins[name].path != str(file.path.resolve()):
            name = f"{file.path.absolute().parent.name}/{name}"
    require(name not in taken, "name", name, f"one that no LoRA here has; taken: {', '.join(taken)}")
    targets = _targets(denoisers, file, choice.expert)
    fitted, unmatched = {}, list(file.unread)
    for part, (modules, _) in targets.items():
        fitted[part], missing = _fit(part, denoisers[part], modules, file)
        unmatched += [key for key in missing if key not in unmatched]
    if not any(fitted.values()):
        shown = unmatched or [f"{file.num_zero} changes that are zero"]
        rule = f"a LoRA of this model: none of its {len(shown)} modules is in it ({some(shown)})"
        raise ConfigError(f"lora: got {file.path.name}; must be {rule}")
    notes = [note for _, note in targets.values() if note]
    if unmatched:
        notes.append(f"{len(unmatched)} modules of the file have no place in this model: {some(unmatched)}")
    if file.num_zero:
        notes.append(f"{file.num_zero} changes of the file are all zeros and left out")
    origin = LoRAOrigin(str(file.path.resolve()), file_digest(file.path), choice.expert)
    for part, changes in fitted.items():
        if changes:
            state = state_of(denoisers[part]) or InstalledLoRAs(denoisers[part])
            state.add(name, choice.weight, changes, origin)
    counts = {part: len(changes) for part, changes in fitted.items()}
    return LoRAReport(name, choice.weight, counts, unmatched, list(dict.fromkeys(notes)))


def unload_lora(pipe: Any, name: str | None = None) -> None:
    """Take off one LoRA, or all of them. The weights are those that were there before, bit for bit.

    Raises:
        ConfigError: no LoRA of that name.
    """
    states = [state for module in _denoisers(pipe).values() if (state := state_of(module)) is not None]
    known = sorted({key for state in states for key in state.adapters})
    require(name is None or name in known, "name", name, f"one of {', '.join(known) or 'none: no LoRA is loaded'}")
    for state in states:
        for key in list(state.adapters) if name is None else [name]:
            state.drop(key)


def set_lora_weight(pipe: Any, name: str, weight: float) -> None:
    """Give a loaded LoRA another weight from the next forward pass on.

    Raises:
        ConfigError: no LoRA of that name, or a weight that is not finite.
    """
    require(abs(weight) < float("inf"), "weight", weight, "a finite number")
    states = [state for module in _denoisers(pipe).values() if (state := state_of(module)) is not None]
    having = [state for state in states if name in state.adapters]
    known = sorted({key for state in states for key in state.adapters})
    require(bool(having), "name", name, f"one of {', '.join(known) or 'none: no LoRA is loaded'}")
    for state in having:
        state.set_weight(name, weight)


def loaded_loras(pipe: Any) -> dict[str, dict[str, float]]:
    """Weights by denoiser and name."""
    states = {part: state_of(module) for part, module in _denoisers(pipe).items()}
    return {
        part: {name: weight for name, (weight, _) in state.adapters.items()} for part, state in states.items() if state
    }


def describe_loras(pipe: Any) -> list[dict[str, Any]]:
    """What is loaded, as plain data for reports: name, path, sha256, expert, weight, and by denoiser the number of
    modules that it changes. Empty without a LoRA, and for an object that is no pipeline.
    """
    found: dict[str, dict[str, Any]] = {}
    for part in EXPERTS.values():
        module = getattr(pipe, part, None)
        state = state_of(module) if isinstance(module, nn.Module) else None
        for name, (weight, changes) in ({} if state is None else state.adapters).items():
            assert state is not None
            origin: LoRAOrigin = state.origins[name]
            entry = {"name": name, "path": origin.path, "sha256": origin.sha256, "expert": origin.expert,
                     "weight": weight, "modules": {}}  # fmt: skip
            found.setdefault(name, entry)["modules"][part] = len(changes)
    return list(found.values())


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _denoisers(pipe: Any) -> dict[str, nn.Module]:
    found = {part: module for part in EXPERTS.values() if (module := getattr(pipe, part, None)) is not None}
    if not found:
        raise ConfigError(f"pipeline: got {type(pipe).__name__} without a transformer; must be a Wan pipeline")
    return found


def _targets(denoisers: dict[str, nn.Module], file: LoRAFile, expert: str) -> dict[str, tuple[dict[str, Change], str]]:
    """Which changes go into which denoiser, and what to tell the user."""
    first, second = file.changes["first"], file.changes["second"]
    pair = len(denoisers) == 2
    if not pair:
        (part,) = denoisers
        wanted = "auto" if part == EXPERTS.get(expert) else expert
        require(wanted == "auto", "expert", expert, f"left out: this pipeline has one denoiser, {part}")
        return {part: (first, "" if not second else f"{len(second)} modules of a second expert are not used")}
    if second:
        require(expert in ("auto", "both"), "expert", expert, "left out: the keys of the file name both experts")
        return {"transformer": (first, ""), "transformer_2": (second, "")}
    if expert == "auto" and file.noise is not None:
        part = EXPERTS[file.noise]
        return {part: (first, f"only {part} is changed, as the name of the file says ({file.noise} noise)")}
    if expert in EXPERTS:
        return {EXPERTS[expert]: (first, "")}
    return dict.fromkeys(denoisers, (first, ""))


def _fit(
    part: str, transformer: nn.Module, modules: dict[str, Change], file: LoRAFile
) -> tuple[dict[str, Change], list[str]]:
    """The changes by name in this transformer, checked, and the names that are not in it."""
    check_unfused(transformer)
    names = {name for name, _ in transformer.named_modules()} | {name for name, _ in transformer.named_parameters()}
    resolved, unmatched = resolve_names(modules, names)
    fitted: dict[str, Change] = {}
    wrong = []
    for key, name in resolved.items():
        require(name not in fitted, f"lora.{key}", "a second change", f"the only one of {name}")
        fitted[name] = modules[key]
        wrong += _faults(name, find(transformer, name), modules[key])
    if wrong:
        raise ConfigError(
            f"lora: got {file.path.name}, of another size than {part}; must fit: {len(wrong)} differ ({some(wrong)})"
        )
    return fitted, unmatched


def _faults(name: str, layer: nn.Module | nn.Parameter, change: Change) -> list[str]:
    if multiplies(layer):
        weight: tuple[int, ...] | None = (layer.out_features, layer.in_features)  # type: ignore[union-attr, assignment]
        bias: tuple[int, ...] | None = (layer.out_features,)  # type: ignore[union-attr, assignment]
    elif isinstance(layer, nn.Module):
        shapes = {leaf: tuple(p.shape) for leaf, p in layer._parameters.items() if p is not None}
        weight, bias = shapes.get("weight"), shapes.get("bias")
    else:
        weight, bias = tuple(layer.shape), None
    faults = []
    if change.down is not None and change.up is not None:
        got = (change.up.shape[0], *change.down.shape[1:])
        if weight is None or torch.Size(got).numel() != torch.Size(weight).numel() or got[0] != weight[0]:
            faults.append(f"{name} {list(got)}, not {None if weight is None else list(weight)}")
    for tensor, shape, what in ((change.weight, weight, "weight"), (change.bias, bias, "bias")):
        if tensor is not None and (shape is None or tensor.numel() != torch.Size(shape).numel()):
            faults.append(f"{name}.{what} {list(tensor.shape)}, not {None if shape is None else list(shape)}")
    return faults
