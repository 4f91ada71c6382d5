"""Eight-bit transformers on disk, and big ones read block by block without ever being whole in 16 bits.

A quantized transformer is a folder with `config.json` and `videospark_quantized.safetensors`: per layer `weight`
(eight bits), `weight_scale` (float32), `bias`, with hot channels `hot_index` and `hot_weight`; all else as it is. The
settings it was made with are in the metadata of the file. It has another name than the weights of diffusers, which
would otherwise load the eight-bit numbers without their scales.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..core.config import ConfigError, from_dict, require, to_dict
from .config import QuantizationConfig
from .convert import (
    HotChannels,
    InstalledQuantization,
    _checked_hot,
    attach_state,
    kept_reason,
    select_layers,
    set_module,
    state_of,
)
from .linear import QuantizedLinear
from .primitives import DTYPES

QUANTIZED_FILE = "videospark_quantized.safetensors"
METADATA_KEY = "videospark_quantization"
STORED_FIELDS = ("mode", "granularity", "include", "exclude", "hot_channels")
"""Settings that decide what is in the file; the others may change from run to run."""

_SCALE_NAMES = ("weight_scale", "scale_weight")
_STATIC_NAMES = ("input_scale", "scale_input")
_MARKERS = ("scaled_fp8",)
_EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)


def save_quantized_transformer(transformer: Any, folder: str | Path) -> Path:
    """Write a quantized transformer as plain tensors and a configuration; complete or not at all.

    Args:
        transformer: quantized by `quantize_` with one of our engines, or loaded by `load_quantized_transformer`.
        folder: made if it is missing.

    Returns:
        The file with the tensors.

    Raises:
        ConfigError: it is not quantized, its engine keeps the weights in a form of its own, or it has steps that need
            the original layers, which such a file does not hold.
    """
    from safetensors.torch import save_file

    state = state_of(transformer)
    if state is None or not state.replaced:
        raise ConfigError("transformer: got one that is not quantized; must be quantized to be saved in eight bits")
    ours = all(isinstance(layer, QuantizedLinear) for layer in state.replaced.values())
    require(ours, "engine", state.config.engine, "one of ours to be saved in eight bits; save the original weights")
    steps = state.config.high_precision_steps
    require(not steps, "high_precision_steps", steps, "empty to be saved in eight bits; save the original weights")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().contiguous()
        for name, tensor in transformer.state_dict().items()
        if ".processor." not in name
    }
    metadata = {"format": "pt", **quantized_metadata(state.config)}
    target = folder / QUANTIZED_FILE
    partial = folder / f".{uuid.uuid4().hex}.partial"
    try:
        save_file(tensors, partial, metadata=metadata)
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    transformer.save_config(folder)
    return target


def quantized_metadata(config: QuantizationConfig) -> dict[str, str]:
    """What the header of a file in eight bits says of the settings that it was made with."""
    return {METADATA_KEY: json.dumps(_stored(config))}


def load_quantized_transformer(
    folder: str | Path,
    config: QuantizationConfig,
    *,
    weights: str | Path | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    hot_channels: HotChannels | None = None,
) -> tuple[Any, InstalledQuantization]:
    """Build a Wan transformer in eight bits, reading and quantizing one block after the other.

    At most one block is in 16 bits at a time. The original layers are never held, so the quantization cannot be undone.

    Args:
        folder: with `config.json`, and unless `weights` is given with one of ours or of diffusers' safetensors files.
        config: the settings; must agree with those of a file that is quantized already.
        weights: a safetensors file to read instead, with the names of diffusers or of Wan; eight-bit weights are taken
            with the scales beside them (`scale_weight` or `weight_scale`).
        device: where the quantized layers go.
        dtype: of everything that is not quantized; parts that diffusers keeps in float32 stay so.
        hot_channels: as for `quantize_`.

    Returns:
        The transformer, in evaluation mode, and its installation.

    Raises:
        ConfigError: missing or unknown tensors, eight-bit weights without scales or in another format than asked for,
            settings that contradict the file, or settings that need the original layers.
        FileNotFoundError: no weights there.
    """
    from accelerate import init_empty_weights
    from diffusers import WanTransformer3DModel

    require(config.mode != "none", "mode", config.mode, "one that quantizes")
    steps = config.high_precision_steps
    require(not steps, "high_precision_steps", steps, "empty here: the original layers are never held")
    foreign = config.engine in ("torchao", "transformer_engine")
    require(not foreign, "engine", config.engine, "one of ours: others keep weights in a form of their own")
    folder, device = Path(folder), torch.device(device)
    source = _open_source(folder, Path(weights) if weights is not None else None)
    _check_stored(source, config)
    with init_empty_weights():
        transformer = WanTransformer3DModel.from_config(WanTransformer3DModel.load_config(folder))
    transformer.eval().requires_grad_(False)
    selected = select_layers(transformer, config)
    expected = dict(transformer.state_dict())
    tables = sum(t.numel() * t.element_size() for name, t in transformer.named_buffers() if name not in expected)
    plan = _plan(source, expected, selected)
    loader = _Loader(transformer, config, source, selected, device, dtype)
    if not source.stored:
        loader.hot = _checked_hot(config, hot_channels, selected)
    for names in plan.values():
        loader.load(names)
        _give_back_memory()
    transformer.to(device)  # what is computed rather than stored, such as rotary tables
    installed = loader.installed
    stored = sum(tensor.numel() * loader.dtype_of(name).itemsize for name, tensor in expected.items())
    installed._bytes_before = stored + tables
    installed.notes += source.notes
    installed.share_inputs()
    installed.install_fused()
    attach_state(transformer, installed)
    return transformer, installed


@dataclass
class _Source:
    """Where every tensor lies: our name -> file and name there."""

    places: dict[str, tuple[Path, str]]
    stored: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Any]:
        """Gives `read(name) -> tensor or None`. Files are mapped only meanwhile, so their pages do not pile up."""
        from safetensors import safe_open

        with contextlib.ExitStack() as stack:
            handles: dict[Path, Any] = {}

            def read(name: str) -> torch.Tensor | None:
                if name not in self.places:
                    return None
                path, key = self.places[name]
                if path not in handles:
                    handles[path] = stack.enter_context(safe_open(path, framework="pt"))
                tensor: torch.Tensor = handles[path].get_tensor(key)
                return tensor

            yield read
            handles.clear()


def _stored(config: QuantizationConfig) -> dict[str, Any]:
    return {name: value for name, value in to_dict(config).items() if name in STORED_FIELDS}


def _open_source(folder: Path, weights: Path | None) -> _Source:
    from safetensors import safe_open

    if weights is not None:
        require(weights.suffix == ".safetensors", "weights", str(weights), "a .safetensors file")
        if not weights.is_file():
            raise FileNotFoundError(f"weights: got {str(weights)!r}; no such file")
        files = [weights]
    elif (folder / QUANTIZED_FILE).is_file():
        files = [folder / QUANTIZED_FILE]
    else:
        files = sorted(folder.glob("diffusion_pytorch_model*.safetensors"))
        if not files:
            raise FileNotFoundError(
                f"weights: no {QUANTIZED_FILE} and no diffusion_pytorch_model*.safetensors in {folder}"
            )
    source = _Source({})
    for path in files:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata() or {}
            if METADATA_KEY in metadata:
                source.stored = json.loads(metadata[METADATA_KEY])
            for key in handle.keys():  # noqa: SIM118 - no mapping
                source.places[_our_name(key)] = (path, key)
    _check_complete(folder, files, source)
    return source


def _check_complete(folder: Path, files: list[Path], source: _Source) -> None:
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    if files[0].parent != folder or files[0].name == QUANTIZED_FILE or not index.is_file():
        return
    listed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    absent = sorted(listed - {path.name for path in files})
    require(not absent, "weights", absent, "complete: these files of the index are missing")


def _our_name(key: str) -> str:
    """The diffusers name of a tensor; names of Wan's own files are translated."""
    from diffusers.loaders.single_file_utils import convert_wan_transformer_to_diffusers

    for prefix in ("model.diffusion_model.", "diffusion_model."):
        key = key.removeprefix(prefix)
    native = (
        ".self_attn.",
        ".cross_attn.",
        "time_embedding.",
        "text_embedding.",
        "time_projection.",
        "head.",
        "img_emb.",
    )
    blocks = key.startswith("blocks.") and (".modulation" in key or ".ffn.0." in key or ".ffn.2." in key)
    alone = (".norm3." in key and ".norm3.weight" in key) or ".norm3.bias" in key
    if blocks or alone or any(part in f".{key}" or key.startswith(part) for part in native):
        (key,) = convert_wan_transformer_to_diffusers({key: None})
    return key


def _check_stored(source: _Source, config: QuantizationConfig) -> None:
    if source.stored is None:
        return
    saved = from_dict(QuantizationConfig, source.stored, METADATA_KEY)
    for name in STORED_FIELDS:
        have, want = getattr(saved, name), getattr(config, name)
        require(have == want, name, want, f"{have!r}, which the quantized file was made with")


def _plan(source: _Source, expected: dict[str, Any], selected: dict[str, nn.Linear]) -> dict[str, list[str]]:
    """Names to load by block, once it is known that nothing is missing and nothing is left over."""
    known = set(expected)
    for layer in {name.rpartition(".")[0] for name in expected if name.endswith(".weight")}:
        known |= {f"{layer}.{scale}" for scale in _SCALE_NAMES}
    known |= {f"{layer}.{hot}" for layer in selected for hot in ("hot_index", "hot_weight")}
    missing = sorted(set(expected) - set(source.places))
    require(not missing, "weights", missing[:5], f"complete; {len(missing)} tensors are missing")
    ignored = {"static activation scales": [], "markers": []}  # type: dict[str, list[str]]
    unknown = []
    for name in sorted(set(source.places) - known):
        if name.endswith(_STATIC_NAMES):
            ignored["static activation scales"].append(name)
        elif name in _MARKERS or "norm_added_q" in name:
            ignored["markers"].append(name)
        else:
            unknown.append(name)
    require(not unknown, "weights", unknown[:5], f"of this model; {len(unknown)} tensors have no place in it")
    if ignored["static activation scales"]:
        count = len(ignored["static activation scales"])
        source.notes.append(f"{count} static activation scales of the file are not used: every token has its own scale")
    plan: dict[str, list[str]] = {}
    for name in expected:
        parts = name.split(".")
        plan.setdefault(".".join(parts[:2]) if parts[0] == "blocks" else parts[0], []).append(name)
    return plan


class _Loader:
    """Fills a transformer that has shapes but no data."""

    def __init__(
        self, transformer: Any, config: QuantizationConfig, source: _Source, selected: dict[str, nn.Linear],
        device: torch.device, dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.transformer, self.config, self.source = transformer, config, source
        self.selected, self.device, self.dtype = selected, device, dtype
        self.hot: dict[str, torch.Tensor] = {}
        self.installed = InstalledQuantization(transformer, config)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype that diffusers loads this parameter in."""
        keep = self.transformer._keep_in_fp32_modules or ()
        return torch.float32 if any(part in name.split(".") for part in keep) else self.dtype

    def load(self, names: list[str]) -> None:
        """Load the parameters of one block."""
        layers = [name.rpartition(".")[0] for name in names if name.endswith(".weight")]
        quantized = [layer for layer in layers if layer in self.selected]
        with self.source.opened() as read:
            for name in names:
                if name.rpartition(".")[0] not in quantized:
                    self._assign(name, self._plain(name, read))
            for layer in quantized:
                self._load_layer(layer, read)

    def _plain(self, name: str, read: Any) -> torch.Tensor:
        tensor = read(name)
        if tensor.dtype in _EIGHT_BITS:
            layer = name.rpartition(".")[0]
            scale = self._scale(layer, read)
            tensor = tensor.float() * (scale if scale.numel() == 1 else scale.reshape(-1, *[1] * (tensor.ndim - 1)))
            if not any("widened" in note for note in self.source.notes):
                self.source.notes.append(f"layers that stay in {_name(self.dtype)} were widened from eight bits")
        # A copy even where nothing changes: a view would keep the whole file mapped.
        return tensor.to(self.device, self.dtype_of(name), copy=True)

    def _load_layer(self, layer: str, read: Any) -> None:
        linear, weight = self.selected[layer], read(f"{layer}.weight")
        if weight.dtype in _EIGHT_BITS:
            made = self._prescaled(layer, weight, read)
        else:
            reason = kept_reason(self.config, linear.in_features, linear.out_features)
            weight = weight.to(self.device, self.dtype_of(f"{layer}.weight"), copy=reason is not None)
            self._assign(f"{layer}.weight", weight)
            if linear.bias is not None:
                self._assign(f"{layer}.bias", self._plain(f"{layer}.bias", read))
            if reason is not None:
                self.installed.kept[layer] = (linear, reason)
                return
            made = QuantizedLinear.from_linear(linear, self.config, hot_index=self.hot.get(layer), name=layer)
        self.installed.adopt(layer, made)
        set_module(self.transformer, layer, made)
        # The model's own layer is not used any more, and must not keep 16-bit weights alive.
        self.selected[layer] = linear.to("meta")

    def _prescaled(self, layer: str, weight: torch.Tensor, read: Any) -> QuantizedLinear:
        linear, number = self.selected[layer], self.config.number
        rule = f"{_name(DTYPES[number])} for mode {self.config.mode!r}: eight-bit weights are not converted"
        require(weight.dtype == DTYPES[number], f"{layer}.weight", _name(weight.dtype), rule)
        require(
            weight.shape == linear.weight.shape, f"{layer}.weight", tuple(weight.shape), str(tuple(linear.weight.shape))
        )
        scale = self._scale(layer, read)
        rows = linear.out_features if self.config.granularity == "row" else 1
        rule = f"one or {rows} numbers for granularity {self.config.granularity!r}"
        require(scale.numel() in (1, rows), f"{layer}.weight_scale", tuple(scale.shape), rule)
        hot = read(f"{layer}.hot_index")
        made = QuantizedLinear(
            linear.in_features, linear.out_features, self.config, bias=linear.bias is not None,
            hot=0 if hot is None else hot.numel(), dtype=self.dtype, device="meta",
        )  # fmt: skip
        made.weight = weight.view(torch.uint8).to(self.device, copy=True).view(weight.dtype)
        made.weight_scale = scale.reshape(-1, 1).expand(rows, 1).to(self.device).contiguous()
        if linear.bias is not None:
            made.bias = self._plain(f"{layer}.bias", read)
        if hot is not None:
            made.hot_index = hot.to(self.device, copy=True)
            made.hot_weight = self._plain(f"{layer}.hot_weight", read)
        return made

    def _scale(self, layer: str, read: Any) -> torch.Tensor:
        found = [s for name in _SCALE_NAMES if (s := read(f"{layer}.{name}")) is not None]
        rule = f"one of {' or '.join(_SCALE_NAMES)} beside eight-bit weights: without it they mean nothing"
        require(len(found) == 1, f"{layer}.weight", f"{len(found)} scales", rule)
        return found[0].to(torch.float32, copy=True)

    def _assign(self, name: str, tensor: torch.Tensor) -> None:
        parent, _, leaf = name.rpartition(".")
        module = self.transformer.get_submodule(parent)
        held = getattr(module, leaf)
        require(tuple(tensor.shape) == tuple(held.shape), name, tuple(tensor.shape), f"of shape {tuple(held.shape)}")
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        else:
            module._buffers[leaf] = tensor


def _give_back_memory() -> None:
    """Let glibc return what it holds for later: up to the size of two of the largest tensors; a no-op elsewhere."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
