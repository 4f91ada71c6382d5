"""Files of LoRAs: every convention in use, sorted into what each module of a Wan transformer gets.

| written by | names |
|---|---|
| PEFT, diffusers | `transformer.blocks.0.attn1.to_q.lora_A.weight`, `base_model.model. ... .lora_A.default.weight` |
| Wan's names | `diffusion_model.blocks.0.self_attn.q.lora_down.weight`, `.lora_A.weight`, `.alpha` |
| kohya, musubi | `lora_unet_blocks_0_self_attn_q.lora_down.weight`, `.alpha` |
| Kijai, LightX2V | beside those `.diff` (weight), `.diff_b` (bias), `.diff_m` (modulation) |
| older diffusers | `...attn1.processor.to_q_lora.down.weight`, `.lora.down.weight`, `.lora_linear_layer.down.weight` |

The change of a weight is alpha / rank * up @ down, or a whole difference. Without an alpha, in the file or its PEFT
settings, it is the rank, so that the factor is 1.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..core.config import ConfigError, require
from .convert.keys import module_to_diffusers, module_to_native
from .convert.mapping import some
from .convert.reader import TensorFiles

_ROLES = [
    (re.compile(r"\.lora_A(\.\w+)?\.weight$|\.lora_A$|\.lora_down(\.\w+)?\.weight$"), "down"),
    (re.compile(r"\.lora_B(\.\w+)?\.weight$|\.lora_B$|\.lora_up(\.\w+)?\.weight$"), "up"),
    (re.compile(r"(_lora|\.lora|\.lora_linear_layer)\.down\.weight$"), "down"),
    (re.compile(r"(_lora|\.lora|\.lora_linear_layer)\.up\.weight$"), "up"),
    (re.compile(r"\.lora_B(\.\w+)?\.bias$"), "up_bias"),
    (re.compile(r"\.alpha$"), "alpha"),
    (re.compile(r"\.diff$"), "weight"),
    (re.compile(r"\.diff_b$"), "bias"),
    (re.compile(r"\.diff_m$"), "modulation"),
]
_OTHER_KINDS = re.compile(r"dora_scale|lora_magnitude_vector|hada_w|lokr_w|lora_mid|oft_|\.glora|\.a1\.weight")
_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "base_model.model.", "pipe.dit.", "dit.", "unet.",
             "transformer.", "model.")  # fmt: skip
_FLAT_PREFIXES = ("lora_unet_", "lora_transformer_", "lycoris_")
_SECOND = ("transformer_2.", "lora_transformer_2_")
_FOLDER_FILES = ("adapter_model.safetensors", "pytorch_lora_weights.safetensors")
_NOISE = re.compile(r"(?<![A-Za-z])(high|low)(?![A-Za-z])", re.IGNORECASE)


@dataclass
class Change:
    """What a LoRA adds to one module, before its weight.

    Attributes:
        down: [rank, in], of a convolution [rank, in, t, h, w].
        up: [out, rank], likewise.
        factor: alpha / rank.
        weight: a whole difference of the module's weight, or of a bare parameter.
        bias: a difference of the bias.
    """

    down: torch.Tensor | None = None
    up: torch.Tensor | None = None
    factor: float = 1.0
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None


@dataclass
class LoRAFile:
    """A file, parsed.

    Attributes:
        path: of the file.
        changes: by module name as the file has it, of the first and, where keys say so, of the second expert.
        unread: keys that belong to no convention.
        num_zero: modules whose changes are all zeros and left out.
    """

    path: Path
    changes: dict[str, dict[str, Change]]
    unread: list[str] = field(default_factory=list)
    num_zero: int = 0

    @property
    def names_second(self) -> bool:
        """Whether keys name the second expert."""
        return bool(self.changes["second"])

    @property
    def noise(self) -> str | None:
        """The expert that the name of the file says, or that of its folder, "high" or "low", or None."""
        for text in (self.path.stem, self.path.absolute().parent.name):
            found = {word.lower() for word in _NOISE.findall(text)}
            if found:
                return found.pop() if len(found) == 1 else None
        return None


def read_lora(path: str | Path) -> LoRAFile:
    """Read a LoRA.

    Raises:
        ConfigError: a broken file, halves of pairs, or another kind of adapter (DoRA, LoHa, LoKr).
        FileNotFoundError: no such file, or a folder without one.
    """
    path = Path(path)
    if path.is_dir():
        inside = [path / name for name in _FOLDER_FILES if (path / name).is_file()]
        if not inside:
            raise FileNotFoundError(f"lora: got {str(path)!r}; the folder has none of {', '.join(_FOLDER_FILES)}")
        path = inside[0]
    if not path.is_file():
        raise FileNotFoundError(f"lora: got {str(path)!r}; no such file")
    files = TensorFiles([path], "lora")
    foreign = [name for name in files.entries if _OTHER_KINDS.search(name)]
    if foreign:
        rule = f"a plain LoRA: {len(foreign)} keys are of DoRA, LoHa, LoKr or the like ({some(foreign)})"
        raise ConfigError(f"lora: got {path.name}; must be {rule}")
    made = LoRAFile(path, {"first": {}, "second": {}})
    tensors: dict[str, dict[str, dict[str, torch.Tensor]]] = {"first": {}, "second": {}}
    for name in files.entries:
        module, role = _split(name)
        if role is None:
            made.unread.append(name)
            continue
        expert = "second" if module.startswith(_SECOND) else "first"
        tensors[expert].setdefault(module, {})[role] = files.read(name)
    settings = _peft_settings(path)
    for expert, modules in tensors.items():
        for module, parts in modules.items():
            change = _change(path, module, parts, settings)
            if change is None:
                made.num_zero += 1
            else:
                made.changes[expert][module] = change
    return made


def resolve_names(modules: Iterable[str], targets: set[str]) -> tuple[dict[str, str], list[str]]:
    """Names as a LoRA has them -> names in a transformer, and those that match nothing.

    Args:
        modules: names in the file.
        targets: names of modules and bare parameters of a diffusers Wan transformer.
    """
    flat = {}
    for target in targets:
        for name in (target, module_to_native(target)):
            if name is not None:
                flat[name.replace(".", "_")] = target
    found: dict[str, str] = {}
    unmatched: list[str] = []
    for module in modules:
        resolved = _resolve(module, targets, flat)
        if resolved is None:
            unmatched.append(module)
        else:
            found[module] = resolved
    return found, unmatched


def _resolve(module: str, targets: set[str], flat: Mapping[str, str]) -> str | None:
    for prefix in ("lora_transformer_2_", *_FLAT_PREFIXES):
        if module.startswith(prefix):
            return flat.get(module.removeprefix(prefix))
    bare, before = module.removeprefix("transformer_2."), ""
    while bare != before:
        before = bare
        for prefix in _PREFIXES:
            bare = bare.removeprefix(prefix)
    bare = bare.replace(".processor.", ".")
    bare = f"{bare}.0" if bare.endswith("to_out") else bare
    candidates = (module_to_diffusers(bare), bare)
    return next((name for name in candidates if name in targets), None)


def _split(name: str) -> tuple[str, str | None]:
    for pattern, role in _ROLES:
        if (found := pattern.search(name)) is not None:
            module = name[: found.start()]
            return (f"{module}.modulation", "weight") if role == "modulation" else (module, role)
    return name, None


def _change(path: Path, module: str, parts: Mapping[str, torch.Tensor], settings: Mapping[str, Any]) -> Change | None:
    """One module's change; None where it is nothing but zeros."""
    down, up = parts.get("down"), parts.get("up")
    if (down is None) != (up is None):
        raise ConfigError(f"lora: got {path.name} with half a pair at {module}; must have both, down and up")
    factor, bias = 1.0, parts.get("bias")
    if down is not None and up is not None:
        rank = down.shape[0]
        fits = down.ndim >= 2 and up.ndim == down.ndim and up.shape[1] == rank
        require(fits, f"lora.{module}", (tuple(down.shape), tuple(up.shape)), "down [rank, in] and up [out, rank]")
        factor = _factor(module, parts, rank, settings)
        if "up_bias" in parts:
            bias = parts["up_bias"].float() * factor
    bad = [role for role, tensor in parts.items() if tensor.is_floating_point() and not tensor.isfinite().all()]
    require(not bad, f"lora.{module}", f"NaN or infinite values in {', '.join(bad)}", "finite")
    if down is not None and up is not None and not (factor and up.any() and down.any()):
        down = up = None  # one that was never trained, or whose alpha is 0
    whole = parts.get("weight")
    # Extracted LoRAs carry differences of norms that are all zeros.
    whole = None if whole is not None and not whole.any() else whole
    bias = None if bias is not None and not bias.any() else bias
    if down is None and whole is None and bias is None:
        return None
    return Change(down, up, factor, whole, bias)


def _factor(module: str, parts: Mapping[str, torch.Tensor], rank: int, settings: Mapping[str, Any]) -> float:
    if "alpha" in parts:
        return float(parts["alpha"]) / rank
    alpha = settings.get("lora_alpha")
    for pattern, value in (settings.get("alpha_pattern") or {}).items():
        if module == pattern or module.endswith(f".{pattern}"):
            alpha = value
    if alpha is None:
        return 1.0
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _peft_settings(path: Path) -> dict[str, Any]:
    """PEFT's settings: in the file's metadata (diffusers), or in adapter_config.json beside it."""
    data: dict[str, Any] = {}
    if path.suffix == ".safetensors":
        from safetensors import safe_open

        with safe_open(path, framework="pt") as handle:
            text = (handle.metadata() or {}).get("lora_adapter_metadata")
        if text:
            data = {key.removeprefix("transformer."): value for key, value in _table(text, path.name).items()}
    config = path.with_name("adapter_config.json")
    if not data and path.name == _FOLDER_FILES[0] and config.is_file():
        data = _table(config.read_text(encoding="utf-8"), config.name)
    require(not data.get("use_dora"), "lora.use_dora", True, "false: DoRA is another kind of adapter")
    return data


def _table(text: str, name: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ConfigError(
            f"lora: got {name} with settings that are no JSON ({error}); must be a JSON object"
        ) from error
    require(isinstance(data, dict), f"lora.{name}", data, "settings as a JSON object")
    made: dict[str, Any] = data
    return made
