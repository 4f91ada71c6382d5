"""Put an attention backend into the self-attention layers of a Wan transformer, and take it out again.

Tokens are laid out in the order of the configuration once per forward pass: after patching, together with the rotary
tables and, where there is one time per token, the modulation; and put back before the output layer. Everything between
is attention, which gets the matching tables, or works on each token alone, so the result is that of raster order.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..core.config import ConfigError, require
from .backends import AttentionBackend, checked_backend, get_backend
from .config import AttentionConfig
from .context import ForwardContext, RotaryTables
from .grid import TokenGrid, inverse_order


class _State:
    """What the hooks and processors of one installation share."""

    def __init__(self, transformer: nn.Module, config: AttentionConfig, sparse: bool) -> None:
        self.patch_size: tuple[int, int, int] = tuple(transformer.config.patch_size)  # type: ignore
        self.config = config
        self.sparse = sparse
        self.step: int | None = None
        self.context: ForwardContext | None = None
        self._orders: dict[tuple[TokenGrid, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, latents: torch.Tensor) -> ForwardContext:
        """Start the context of a forward pass over `latents` [batch, channels, frames, height, width]."""
        if self.sparse and self.config.dense_steps and self.step is None:
            raise RuntimeError("dense_steps is set, but not which step this is; call set_step(index) before each step")
        grid = TokenGrid.from_latents(tuple(latents.shape), self.patch_size)
        order, inverse = self._order(grid, latents.device)
        self.context = ForwardContext(grid=grid, order=order, inverse=inverse, step=self.step)
        return self.context

    def _order(self, grid: TokenGrid, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        # Dense attention gives the same in any order; leaving it alone keeps its results bit for bit.
        if not self.sparse or self.config.token_order == "raster":
            return None, None
        if (grid, device) not in self._orders:
            order = grid.order(self.config.token_order, self.config.tile)
            assert order is not None
            self._orders[grid, device] = (order.to(device), inverse_order(order).to(device))
        return self._orders[grid, device]


class SelfAttentionProcessor:
    """Projects, normalises and rotates as the stock Wan processor does, then attends with the chosen backend."""

    # diffusers sets these two by name on whichever processor a layer has.
    _attention_backend: Any = None
    _parallel_config: Any = None

    def __init__(self, layer: int, backend: AttentionBackend, dense: AttentionBackend, state: _State) -> None:
        self.layer = layer
        self.backend = backend
        self.dense = dense
        self.state = state

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Self-attention of hidden_states [batch, tokens, dim]; returns the same shape.

        Raises:
            RuntimeError: outside a forward pass of the transformer, or with tokens that are not those of its grid.
            NotImplementedError: an attention mask, encoder states, or context parallelism.
        """
        self._refuse_unsupported(encoder_hidden_states, attention_mask)
        context = self._context(rotary_emb, hidden_states.shape[1])
        if getattr(attn, "fused_projections", False):
            query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        query, key = attn.norm_q(query), attn.norm_k(key)
        query, key, value = (tensor.unflatten(2, (attn.heads, -1)) for tensor in (query, key, value))
        if rotary_emb is not None:
            query, key = _rotate(query, *rotary_emb), _rotate(key, *rotary_emb)
        backend = self.dense if self.is_dense(context.step) else self.backend
        out = backend(query, key, value, context=context, config=self.state.config)
        out = out.flatten(2, 3).type_as(query)
        for module in attn.to_out:
            out = module(out)
        return out

    def is_dense(self, step: int | None) -> bool:
        """Whether this layer attends to everything at sampling step `step`."""
        config = self.state.config
        return not self.state.sparse or self.layer in config.dense_layers or step in config.dense_steps

    def _context(self, rotary_emb: object, tokens: int) -> ForwardContext:
        # Tables rebuilt on the way, as device hooks do, have lost their context; it is then the latest one.
        context = getattr(rotary_emb, "context", None) or self.state.context
        if context is None:
            raise RuntimeError("this layer can only run inside a forward pass of the transformer it belongs to")
        if tokens != context.grid.num_tokens:
            raise RuntimeError(f"got {tokens} tokens; must be {context.grid.num_tokens}, those of {context.grid}")
        return dataclasses.replace(context, layer=self.layer, dispatch_backend=self._attention_backend)

    def _refuse_unsupported(self, encoder_states: torch.Tensor | None, mask: torch.Tensor | None) -> None:
        if encoder_states is not None or mask is not None:
            raise NotImplementedError("self-attention takes neither encoder states nor an attention mask")
        if self._parallel_config is not None:
            raise NotImplementedError("context parallelism: remove the attention backend before enabling it")


def _rotate(tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of channels of tokens [batch, tokens, heads, head_dim]; the tables hold every angle twice."""
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    pairs = tokens.unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(tokens.dtype)


class InstalledAttention:
    """A backend at work in a transformer; made by `install`."""

    def __init__(self, transformer: nn.Module, config: AttentionConfig, backend: AttentionBackend) -> None:
        self.config = config
        self._transformer = transformer
        self._state = _State(transformer, config, backend.constraints.sparse)
        self._layers = [block.attn1 for block in transformer.blocks]  # type: ignore
        self._originals = [layer.processor for layer in self._layers]
        self._processors: list[SelfAttentionProcessor] = []
        dense = get_backend("dense")
        for index, (layer, original) in enumerate(zip(self._layers, self._originals, strict=True)):
            processor = SelfAttentionProcessor(index, backend, dense, self._state)
            processor._attention_backend = original._attention_backend
            layer.set_processor(processor)
            self._processors.append(processor)
        self._handles = _add_hooks(transformer, self._state)

    def set_step(self, index: int) -> None:
        """Say which sampling step comes next, counted from 0; `dense_steps` refers to it."""
        require(index >= 0, "step", index, "0 or more")
        self._state.step = index

    def report(self) -> list[dict[str, Any]]:
        """One row per layer: layer, backend, keep_ratio, nominal_sparsity, actual_sparsity.

        The actual sparsity is the share of token pairs left out in the latest forward pass, None before the first. A
        layer that is dense by configuration has keep ratio 1; in a dense step only the actual sparsity tells.
        """
        context = self._state.context
        rows = []
        for processor in self._processors:
            dense = processor.is_dense(None)
            record = None if context is None else context.records.get(processor.layer)
            actual = None if context is None else 0.0 if record is None else record.sparsity()
            rows.append(
                {
                    "layer": processor.layer,
                    "backend": "dense" if dense else self.config.backend,
                    "keep_ratio": 1.0 if dense else self.config.keep_ratio,
                    "nominal_sparsity": 0.0 if dense else self.config.sparsity,
                    "actual_sparsity": actual,
                }
            )
        return rows

    def remove(self) -> None:
        """Put the very processors back that were there before, and take all hooks away. Again is harmless."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        for layer, original, processor in zip(self._layers, self._originals, self._processors, strict=True):
            if layer.processor is processor:
                # A diffusers attention backend chosen meanwhile stays chosen.
                original._attention_backend = processor._attention_backend
                layer.set_processor(original)


def install(transformer: nn.Module, config: AttentionConfig) -> InstalledAttention:
    """Compute the self-attention of `transformer` as `config` says. Cross-attention is left alone.

    Args:
        transformer: a diffusers `WanTransformer3DModel` with its stock processors.
        config: the settings.

    Raises:
        ConfigError: the transformer is not one this can handle or already has a backend installed, a dense layer does
            not exist, or the backend does not run on the device, dtype or head size of the transformer.
    """
    _check_transformer(transformer)
    num_layers = len(transformer.blocks)  # type: ignore
    missing = [index for index in config.dense_layers if index >= num_layers]
    require(not missing, "dense_layers", config.dense_layers, f"indices below {num_layers}, the number of layers")
    # The projections' own weights may be stored in a narrower type than they compute in; their outputs follow the norm.
    weight = transformer.blocks[0].attn1.norm_q.weight  # type: ignore
    backend = checked_backend(
        config,
        device=weight.device.type,
        dtype=str(weight.dtype).removeprefix("torch."),
        head_dim=int(transformer.config.attention_head_dim),  # type: ignore
    )
    return InstalledAttention(transformer, config, backend)


def _check_transformer(transformer: nn.Module) -> None:
    from diffusers.models.transformers.transformer_wan import WanAttnProcessor, WanTransformer3DModel

    kind = type(transformer).__name__
    require(isinstance(transformer, WanTransformer3DModel), "transformer", kind, "a diffusers WanTransformer3DModel")
    for index, block in enumerate(transformer.blocks):  # type: ignore
        processor = block.attn1.processor
        if isinstance(processor, SelfAttentionProcessor):
            raise ConfigError("transformer: it has an attention backend installed already; call remove() on that first")
        name = type(processor).__name__
        require(type(processor) is WanAttnProcessor, f"blocks.{index}.attn1.processor", name, "the stock processor")
        parallel = processor._parallel_config
        require(parallel is None, f"blocks.{index}.attn1 parallelism", parallel, "off; the whole sequence is needed")


def _add_hooks(transformer: Any, state: _State) -> list[RemovableHandle]:
    """Hooks that begin a context, lay the tokens out, and put them back; in the order the model calls the parts."""

    def rope(module: nn.Module, args: tuple[Any, ...], tables: tuple[torch.Tensor, ...]) -> RotaryTables:
        context = state.begin(args[0])
        if context.order is not None:
            tables = tuple(table.index_select(1, context.order.to(table.device)) for table in tables)
        return RotaryTables.build((tables[0], tables[1]), context)

    def patches(module: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
        order = _current(state).order
        if order is None:
            return out
        return out.flatten(2).index_select(2, order.to(out.device)).reshape(out.shape)

    def conditions(module: nn.Module, args: tuple[Any, ...], out: tuple[Any, ...]) -> tuple[Any, ...]:
        order, modulation = _current(state).order, out[1]
        if order is None or modulation.ndim != 3:
            return out
        # One time per token: the blocks see it laid out, the output layer (out[0]) in raster order.
        return (out[0], modulation.index_select(1, order.to(modulation.device)), *out[2:])

    def output(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        inverse = _current(state).inverse
        return args if inverse is None else (args[0].index_select(1, inverse.to(args[0].device)), *args[1:])

    return [
        transformer.rope.register_forward_hook(rope),
        transformer.patch_embedding.register_forward_hook(patches),
        transformer.condition_embedder.register_forward_hook(conditions),
        transformer.norm_out.register_forward_pre_hook(output),
    ]


def _current(state: _State) -> ForwardContext:
    if state.context is None:
        raise RuntimeError("parts of the transformer cannot run alone while an attention backend is installed")
    return state.context
