"""Quantize the linear layers of a transformer in place, report what was done, and put the very same layers back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from ..core.config import ConfigError, require, to_dict
from .config import DEFAULT_EXCLUDE, QuantizationConfig
from .engines import ALIGNMENT
from .linear import QuantizedLinear, ReplacedLinear, SharedRows, StepControl
from .report import QuantizationReport, kept_row, module_bytes, quantized_row

_STATE = "_videospark_quantization"
HotChannels = Mapping[str, Sequence[int]]
"""Indices of hot input channels by layer name."""


class InstalledQuantization:
    """A quantized transformer: report, steps and the way back. Made by `quantize_` and by `load_quantized_transformer`.

    Attributes:
        config: the settings.
        replaced: the eight-bit layers by name.
    """

    def __init__(self, transformer: nn.Module, config: QuantizationConfig) -> None:
        self.config = config
        self.replaced: dict[str, ReplacedLinear] = {}
        self.kept: dict[str, tuple[nn.Linear, str]] = {}
        self.notes: list[str] = []
        self._transformer = transformer
        self._originals: dict[str, nn.Linear] = {}
        self._fused: Any = None
        self._control = StepControl(config.high_precision_steps)
        self._bytes_before = module_bytes(transformer)

    @property
    def has_originals(self) -> bool:
        """Whether `remove` can put the original layers back."""
        return self._originals.keys() == self.replaced.keys()

    def set_step(self, index: int) -> None:
        """Say which sampling step comes next, counted from 0; `high_precision_steps` refers to it."""
        require(index >= 0, "step", index, "0 or more")
        self._control.step = index

    def report(self) -> QuantizationReport:
        """What is quantized now."""
        rows = [quantized_row(name, layer, self._originals.get(name)) for name, layer in self.replaced.items()]
        rows += [kept_row(name, layer, reason) for name, (layer, reason) in self.kept.items()]
        waiting = sum(module_bytes(layer) for layer in self._originals.values())
        notes = list(self.notes)
        if self.replaced and not self.has_originals:
            notes.append("the original layers are gone: the quantization cannot be undone")
        return QuantizationReport(
            config=to_dict(self.config),
            engine=self._engine_text(),
            layers=rows,
            bytes_before=self._bytes_before,
            bytes_after=module_bytes(self._transformer),
            bytes_originals=waiting,
            fused=self._fused.path if self._fused is not None else "off",
            notes=notes,
        )

    def _engine_text(self) -> str:
        if not self.replaced:
            return "none"
        layer = next(iter(self.replaced.values()))
        if not isinstance(layer, QuantizedLinear):
            return self.config.engine
        if layer.weight_only:
            return "reference (weights are widened, then multiplied in the precision of the model)"
        dtype = layer.bias.dtype if layer.bias is not None else layer.model_dtype
        return str(layer.engine_on(layer.weight.device, dtype))

    def remove(self) -> None:
        """Put the very same Linear modules back; their results are bit-identical. Again is harmless.

        Raises:
            ConfigError: the originals were dropped, or something else wraps the blocks now.
        """
        if self.replaced and not self.has_originals:
            rule = "kept or offloaded to be put back: load the model again instead"
            raise ConfigError(f"originals: got {self.config.originals!r}; must be {rule}")
        if self._fused is not None:
            self._fused.remove()
            self._fused = None
        for name, layer in self.replaced.items():
            original = self._originals[name]
            _follow(original, layer)
            set_module(self._transformer, name, original)
        self.replaced, self._originals = {}, {}
        attach_state(self._transformer, None)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The original layers in place for the length of a `with` block, for saving them.

        Raises:
            ConfigError: the originals were dropped.
        """
        if self.replaced and not self.has_originals:
            raise ConfigError("weights: got 'original'; must be 'quantized', as the original layers were dropped")
        try:
            for name, original in self._originals.items():
                set_module(self._transformer, name, original)
            yield
        finally:
            for name, layer in self.replaced.items():
                set_module(self._transformer, name, layer)

    def adopt(self, name: str, layer: ReplacedLinear) -> None:
        """Take an eight-bit layer in, wired to this transformer's steps; the caller puts it in its place."""
        layer.control, layer.layer_name = self._control, name
        self.replaced[name] = layer

    def share_inputs(self) -> None:
        """Let the layers that read one tensor quantize it once: q, k, v of a block; k, v of all cross-attentions.

        All cross-attentions of a forward pass read the same text.
        """
        groups: dict[str, list[QuantizedLinear]] = {}
        for name, layer in self.replaced.items():
            if not isinstance(layer, QuantizedLinear) or layer.weight_only:
                continue
            block, _, leaf = name.rpartition(".")
            if leaf in ("to_q", "to_k", "to_v") and block.endswith("attn1"):
                groups.setdefault(block, []).append(layer)
            elif leaf in ("to_k", "to_v") and block.endswith("attn2"):
                groups.setdefault("text", []).append(layer)
        for members in groups.values():
            by_hot: dict[tuple[int, ...], SharedRows] = {}
            for layer in members:
                hot = tuple(layer.hot_index.tolist()) if layer.hot_index is not None else ()
                layer.shared = by_hot.setdefault(hot, SharedRows())

    def install_fused(self) -> None:
        """Give the blocks their fused forward, as the configuration asks."""
        if self.config.fused:
            from .fused_block import install_fused_blocks

            self._fused = install_fused_blocks(self._transformer)


def state_of(transformer: nn.Module) -> InstalledQuantization | None:
    """The quantization at work in this transformer, or None."""
    return transformer.__dict__.get(_STATE)


def attach_state(transformer: nn.Module, state: InstalledQuantization | None) -> None:
    """Note the quantization on the transformer it belongs to; it is neither a submodule nor saved."""
    if state is None:
        transformer.__dict__.pop(_STATE, None)
    else:
        transformer.__dict__[_STATE] = state


def quantize_(
    transformer: nn.Module, config: QuantizationConfig, *, hot_channels: HotChannels | None = None
) -> InstalledQuantization:
    """Replace the selected linear layers by eight-bit ones, in place.

    Args:
        transformer: a diffusers `WanTransformer3DModel`, or any module whose layers `config.include` names.
        config: the settings.
        hot_channels: what `find_hot_channels` found; needed where `config.hot_channels` is above 0.

    Returns:
        The installation: `.report()`, `.set_step(index)` and `.remove()`, which brings the very same modules back.

    Raises:
        ConfigError: it is quantized already, a pattern matches no layer, a weight is not finite, the engine does not
            work here, or layers are wrapped (LoRA, fused projections, offloading). Nothing is changed then.
        RuntimeError: something unforeseen half-way, with originals "drop": the model is to be loaded again. With other
            originals the error itself is raised, and nothing is changed.
    """
    if state_of(transformer) is not None:
        raise ConfigError("transformer: got one that is quantized already; must be restored first: call remove()")
    installed = InstalledQuantization(transformer, config)
    selected = select_layers(transformer, config) if config.mode != "none" else {}
    hot = _checked_hot(config, hot_channels, selected)
    _check_layers(transformer, selected)
    if selected:
        _check_engine(config, next(iter(selected.values())))
    if config.fused:
        from .fused_block import check_fused_blocks

        check_fused_blocks(transformer)
    try:
        for name in tuple(selected):
            linear = selected.pop(name)  # so that dropped layers are freed one by one
            reason = kept_reason(config, linear.in_features, linear.out_features)
            if reason is not None:
                installed.kept[name] = (linear, reason)
                continue
            layer = _build(name, linear, config, hot.get(name))
            installed.adopt(name, layer)
            if config.originals == "keep":
                layer.hold_original(linear)
            if config.originals != "drop":
                installed._originals[name] = linear
            set_module(transformer, name, layer)
            if config.originals == "offload":
                linear.to("cpu")
        if installed.kept and not installed.replaced:
            name, (_, reason) = next(iter(installed.kept.items()))
            raise ConfigError(
                f"include: none of the {len(installed.kept)} selected layers can be quantized; {name}: {reason}"
            )
        installed.share_inputs()
        installed.install_fused()
    except BaseException as error:
        if not installed.has_originals:
            rule = "loaded again: some of its original layers are dropped already"
            raise RuntimeError(f"transformer: quantizing it failed half-way ({error}); must be {rule}") from error
        installed.remove()
        raise
    attach_state(transformer, installed)
    return installed


def select_layers(transformer: nn.Module, config: QuantizationConfig) -> dict[str, nn.Linear]:
    """The linear layers that include and exclude choose, by module name.

    Raises:
        ConfigError: a pattern of `include`, or one of `exclude` that is not a default, matches nothing.
    """
    linears = {name: module for name, module in transformer.named_modules() if isinstance(module, nn.Linear)}
    lora = any(name.endswith(".base_layer") for name in linears)
    for pattern in config.include:
        if not any(fnmatchcase(name, pattern) for name in linears):
            hint = "; a LoRA wraps layers here: fuse_lora() and unload_lora_weights() first" if lora else ""
            raise ConfigError(f"include: pattern {pattern!r} matches no linear layer of this model{hint}")
    names = {name for name, _ in transformer.named_modules()}
    for pattern in config.exclude:
        used = pattern in DEFAULT_EXCLUDE or any(fnmatchcase(name, pattern) for name in names)
        require(used, "exclude", pattern, "a pattern that matches a module of this model")
    return {name: module for name, module in linears.items() if config.selects(name)}


def kept_reason(config: QuantizationConfig, in_features: int, out_features: int) -> str | None:
    """Why a selected layer of this size has to stay as it is, or None."""
    if config.weight_only or config.engine == "reference":
        return None
    for what, size in (("inputs", in_features), ("outputs", out_features)):
        if size % ALIGNMENT:
            return f"{size} {what}, which is no multiple of {ALIGNMENT}"
    return None


def set_module(root: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of the one called `name`."""
    parent, _, leaf = name.rpartition(".")
    root.get_submodule(parent)._modules[leaf] = module


def _build(name: str, linear: nn.Linear, config: QuantizationConfig, hot: torch.Tensor | None) -> ReplacedLinear:
    if config.engine == "torchao":
        from .torchao import TorchaoLinear

        return TorchaoLinear(linear, config)
    if config.engine == "transformer_engine":
        from .transformer_engine import TransformerEngineLinear

        return TransformerEngineLinear(linear, config)
    return QuantizedLinear.from_linear(linear, config, hot_index=hot, name=name)


def _check_engine(config: QuantizationConfig, linear: nn.Linear) -> None:
    """Everything that can be known of the engine before a layer is touched."""
    if config.engine == "torchao":
        from .torchao import translate

        translate(config)
    elif config.engine == "transformer_engine":
        from .transformer_engine import translate as translate_recipe

        translate_recipe(config.transformer_engine_recipe)
    elif not config.weight_only:
        from .engines import choose_engine

        choose_engine(config.engine, config.number, config.granularity, linear.weight.device, linear.weight.dtype)


def _check_layers(transformer: nn.Module, selected: dict[str, nn.Linear]) -> None:
    for name, module in transformer.named_modules():
        if getattr(module, "fused_projections", False):
            raise ConfigError(f"{name}: got fused projections; must be separate: call unfuse_qkv_projections() first")
    for name, linear in selected.items():
        require(not linear.weight.is_meta, name, "a layer without data", "loaded before it is quantized")
        floating = linear.weight.is_floating_point() and linear.weight.element_size() >= 2
        require(floating, f"{name}.weight", str(linear.weight.dtype), "in 16, 32 or 64 bits to be quantized")
        plain = not linear._forward_hooks and not linear._forward_pre_hooks and "forward" not in linear.__dict__
        rule = "free of hooks: enable offloading after quantizing, by model rather than by layer"
        require(plain, name, "a layer that something else wraps", rule)
        if not torch.isfinite(linear.weight.detach()).all():
            raise ConfigError(f"{name}.weight: got NaN or infinite values; must be finite to be quantized")


def _checked_hot(
    config: QuantizationConfig, hot_channels: HotChannels | None, selected: dict[str, nn.Linear]
) -> dict[str, torch.Tensor]:
    if config.hot_channels == 0:
        require(not hot_channels, "hot_channels", "a table of channels", "left out where the configuration has none")
        return {}
    if hot_channels is None:
        raise ConfigError("hot_channels: got no table of channels; must come from find_hot_channels")
    found: dict[str, torch.Tensor] = {}
    for name, indices in hot_channels.items():
        require(name in selected, f"hot_channels.{name}", list(indices), "of a layer that is quantized")
        inside = all(0 <= i < selected[name].in_features for i in indices) and len(set(indices)) == len(indices)
        require(inside, f"hot_channels.{name}", list(indices), f"distinct, below {selected[name].in_features}")
        limit = config.hot_channels
        require(len(indices) <= limit, f"hot_channels.{name}", list(indices), f"at most {limit}, as configured")
        if indices:
            found[name] = torch.tensor(sorted(indices), dtype=torch.int64)
    return found


def _follow(original: nn.Linear, layer: ReplacedLinear) -> None:
    """Move a waiting layer to where its stand-in was moved meanwhile, and to the dtype it was cast to."""
    tensors = [t for t in (getattr(layer, "bias", None), *layer.buffers()) if t is not None]
    if tensors:
        original.to(tensors[0].device)
    bias = getattr(layer, "bias", None)
    if isinstance(bias, torch.Tensor) and bias.dtype != original.weight.dtype:
        original.to(bias.dtype)
