"""Put an attention backend into the self-attention layers of a Wan transformer, and take it out again.

Tokens are laid out in the order of the configuration once per forward pass: after patching, together with the rotary
tables and, where there is one time per token, the modulation; and put back before the output layer. Everything between
is attention, which gets the matching tables, or works on each token alone, so the result is that of raster order.

Under Ulysses context parallelism (`parallel.py`) each rank holds a run of the tokens in that same order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..core.config import ConfigError, require
from .accounting import flop_sparsity
from .auto import AutoChoice, choose_backend
from .backends import AUTO, AttentionBackend, checked_backend, get_backend
from .branches import MODULE_NAME, BranchInputs, InstalledBranches, LinearBranch, rotate
from .config import AttentionConfig
from .context import ForwardContext, RotaryTables
from .grid import TokenGrid, inverse_order
from .parallel import Ulysses, ulysses_of, ulysses_problems

Tables = tuple[torch.Tensor, torch.Tensor]

FUSED_NORM_ROPE = "_videospark_norm_rope"
"""Attribute by which fused blocks (`quantization.fused_block`) offer norm and rotation of queries and keys in one."""


class _State:
    """What the hooks and processors of one installation share."""

    def __init__(
        self, transformer: nn.Module, config: AttentionConfig, sparse: bool, keep_maps: bool, auto: AutoChoice | None
    ) -> None:
        self.patch_size: tuple[int, int, int] = tuple(transformer.config.patch_size)  # type: ignore
        self.config = config
        self.sparse = sparse
        self.keep_maps = keep_maps
        self.auto = auto
        self.dense_below = auto.dense_below if auto is not None else config.dense_below or 0
        self.processors: list[SelfAttentionProcessor] = []
        self.step: int | None = None
        self.context: ForwardContext | None = None
        self._orders: dict[tuple[TokenGrid, torch.device], tuple[torch.Tensor, torch.Tensor]] = {}

    def begin(self, latents: torch.Tensor) -> ForwardContext:
        """Start the context of a forward pass over `latents` [batch, channels, frames, height, width]."""
        if self.sparse and self.config.dense_steps and self.step is None:
            raise RuntimeError("dense_steps is set, but not which step this is; call set_step(index) before each step")
        grid = TokenGrid.from_latents(tuple(latents.shape), self.patch_size)
        order, inverse = self._order(grid, latents.device)
        self.context = ForwardContext(grid=grid, order=order, inverse=inverse, step=self.step, keep_maps=self.keep_maps)
        return self.context

    def ulysses(self) -> Ulysses | None:
        """The ranks that share the tokens now; diffusers tells the processors, before or after the installation."""
        return ulysses_of(self.processors[0]._parallel_config) if self.processors else None

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

    def __init__(
        self,
        layer: int,
        backend: AttentionBackend,
        dense: AttentionBackend,
        branch: LinearBranch | None,
        state: _State,
    ) -> None:
        self.layer = layer
        self.backend = backend
        self.dense = dense
        self.branch = branch
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
            NotImplementedError: an attention mask, encoder states, or a context parallelism that cannot be done.
        """
        self._refuse_unsupported(attn, encoder_hidden_states, attention_mask)
        ranks = ulysses_of(self._parallel_config)
        context = self._context(rotary_emb, hidden_states.shape[1] * (1 if ranks is None else ranks.degree))
        if getattr(attn, "fused_projections", False):
            query, key, value = attn.to_qkv(hidden_states).chunk(3, dim=-1)
        else:
            query, key, value = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        dense = self.is_dense(context.step, context.grid.num_tokens)
        branch = None if dense else self.branch
        gate = None if branch is None else branch.gate(hidden_states)
        heads = slice(0, attn.heads)
        # Only a branch that must see all tokens at once has to be given queries and keys before the rotation by all
        # ranks; otherwise each rank rotates its own tokens.
        whole = (
            ranks is not None
            and branch is not None
            and not branch.takes_shares(hidden_states.device.type, hidden_states.dtype)
        )
        fused = attn.__dict__.get(FUSED_NORM_ROPE)
        # Some branches need queries and keys before the rotation.
        alone = branch is None or (not whole and branch.takes_rotated(hidden_states.device.type, hidden_states.dtype))
        if fused is not None and alone and rotary_emb is not None:
            rotated = tuple(
                fused(norm, x, rotary_emb, attn.heads) for norm, x in ((attn.norm_q, query), (attn.norm_k, key))
            )
            dtype, query, key = query.dtype, None, None
            value = value.unflatten(2, (attn.heads, -1))
        else:
            query, key = attn.norm_q(query), attn.norm_k(key)
            dtype = query.dtype
            query, key, value = (tensor.unflatten(2, (attn.heads, -1)) for tensor in (query, key, value))
            if ranks is not None and whole:
                heads, rotary_emb = ranks.heads_of(attn.heads), context.tables
                query, key, value = (ranks.to_heads(tensor) for tensor in (query, key, value))
                gate = None if gate is None else ranks.to_heads(gate)
            rotated = (query, key) if rotary_emb is None else (rotate(query, *rotary_emb), rotate(key, *rotary_emb))
        backend = self.dense if dense else self.backend
        inputs = (*rotated, value)
        if ranks is not None and not whole:
            inputs = tuple(ranks.to_heads(tensor) for tensor in inputs)
        out = backend(*inputs, context=context, config=self.state.config)
        if ranks is not None and not whole:
            out = ranks.to_tokens(out)
        if branch is not None:
            assert rotary_emb is not None, "a linear branch needs the rotary tables"
            block_map = context.maps.pop(self.layer, None)
            if branch.needs_block_map and block_map is None:
                name = self.state.config.backend
                raise RuntimeError(f"exclude_selected: backend {name!r} does not record which blocks it keeps")
            shares = None if whole else ranks
            out = branch(
                BranchInputs(
                    out, query, key, value, rotated[0], rotated[1], gate, rotary_emb, heads, context, block_map, shares,
                    overwrite=True,
                )
            )  # fmt: skip
        if ranks is not None and whole:
            out = ranks.to_tokens(out)
        out = out.flatten(2, 3).to(dtype)
        for module in attn.to_out:
            out = module(out)
        return out

    def is_dense(self, step: int | None, tokens: int | None) -> bool:
        """Whether this layer attends to everything at sampling step `step` over so many tokens; None: any."""
        config = self.state.config
        short = tokens is not None and tokens < self.state.dense_below
        return not self.state.sparse or short or self.layer in config.dense_layers or step in config.dense_steps

    def _context(self, rotary_emb: object, tokens: int) -> ForwardContext:
        # Tables rebuilt on the way, as device hooks do, have lost their context; it is then the latest one.
        context = getattr(rotary_emb, "context", None) or self.state.context
        if context is None:
            raise RuntimeError("this layer can only run inside a forward pass of the transformer it belongs to")
        if tokens != context.grid.num_tokens:
            raise RuntimeError(f"got {tokens} tokens; must be {context.grid.num_tokens}, those of {context.grid}")
        return dataclasses.replace(context, layer=self.layer, dispatch_backend=self._attention_backend)

    def _refuse_unsupported(self, attn: Any, encoder_states: torch.Tensor | None, mask: torch.Tensor | None) -> None:
        if encoder_states is not None or mask is not None:
            raise NotImplementedError("self-attention takes neither encoder states nor an attention mask")
        problems = [] if self._parallel_config is None else ulysses_problems(self._parallel_config, attn.heads)
        if problems:
            raise NotImplementedError(f"context parallelism: {'; '.join(problems)}")


class InstalledAttention:
    """A backend at work in a transformer; made by `install`."""

    def __init__(
        self,
        transformer: nn.Module,
        config: AttentionConfig,
        backend: AttentionBackend,
        branches: InstalledBranches | None = None,
        auto: AutoChoice | None = None,
        *,
        compute_dtype: torch.dtype,
    ) -> None:
        self.config = config
        self._auto = auto
        self._configured = config
        self._branches = branches
        self._head_dim = int(transformer.config.attention_head_dim)  # type: ignore
        self._dtype = compute_dtype
        keep_maps = branches is not None and any(branch.needs_block_map for branch in branches.branches)
        self._state = _State(transformer, config, backend.constraints.sparse, keep_maps, auto)
        self._layers = [block.attn1 for block in transformer.blocks]  # type: ignore
        self._originals = [layer.processor for layer in self._layers]
        self._processors = self._state.processors
        dense = get_backend("dense")
        for index, (layer, original) in enumerate(zip(self._layers, self._originals, strict=True)):
            branch = None if branches is None else branches.branches[index]
            processor = SelfAttentionProcessor(index, backend, dense, branch, self._state)
            processor._attention_backend = original._attention_backend
            processor._parallel_config = original._parallel_config
            layer.set_processor(processor)
            self._processors.append(processor)
        if branches is not None:
            branches.put_in()
        self._handles = _add_hooks(transformer, self._state)

    def set_step(self, index: int) -> None:
        """Say which sampling step comes next, counted from 0; `dense_steps` refers to it."""
        require(index >= 0, "step", index, "0 or more")
        self._state.step = index

    def set_keep_ratio(self, keep_ratio: float) -> None:
        """Use another keep ratio from the next forward pass on, for a training that lowers it step by step.

        It is for all layers; the keep ratio of the configuration brings back those that layers have on their own.
        """
        own = self._configured.keep_ratios if keep_ratio == self._configured.keep_ratio else ()
        self.config = self._state.config = dataclasses.replace(self.config, keep_ratio=keep_ratio, keep_ratios=own)

    def report(self) -> list[dict[str, Any]]:
        """One row per layer.

        `layer`, `backend`, `keep_ratio`, `nominal_sparsity`; `actual_sparsity`, the share of token pairs left out, and
        `flop_sparsity`, the share of the operations saved with router and branch counted in, both of the latest forward
        pass and None before the first; `branch`, and where there is one `branch_kernel` ("triton", "native", "torch"),
        `branch_kernel_reason` and `branch_weights` ("given" or "initial"). A layer that is dense by configuration has
        keep ratio 1 and no branch, and so has every layer once a video was too short; in a dense step only the two
        measured sparsities tell. With "auto" `backend` is what it stands for, and `backend_reason` says why.
        """
        context = self._state.context
        rows = []
        for processor in self._processors:
            dense = processor.is_dense(None, None if context is None else context.grid.num_tokens)
            record = None if context is None else context.records.get(processor.layer)
            measured = 0.0 if context is not None else None
            row = {
                "layer": processor.layer,
                "backend": "dense" if dense else self.config.backend if self._auto is None else self._auto.name,
                "keep_ratio": 1.0 if dense else self.config.keep_ratio_of(processor.layer),
                "nominal_sparsity": 0.0 if dense else 1.0 - self.config.keep_ratio_of(processor.layer),
                "actual_sparsity": measured if record is None else record.sparsity(),
                "flop_sparsity": measured if record is None else flop_sparsity(self.config, record, self._head_dim),
                "branch": "none" if dense else self.config.branch,
            }
            if self._auto is not None:
                row["backend_reason"] = self._auto.reason
            rows.append(row if dense else {**row, **self._branch_row(processor.branch)})
        return rows

    def _branch_row(self, branch: LinearBranch | None) -> dict[str, Any]:
        if branch is None or self._branches is None:
            return {}
        kernel, reason = branch.kernel_choice(next(branch.parameters()).device.type, self._dtype)
        weights = "given" if self._branches.given else "initial"
        return {"branch_kernel": kernel, "branch_kernel_reason": reason, "branch_weights": weights}

    def branch_state(self) -> dict[str, torch.Tensor]:
        """The tensors of the branches of all layers, not copied, as `install` takes them; empty without a branch."""
        return {} if self._branches is None else self._branches.state()

    @contextmanager
    def without_branches(self) -> Iterator[None]:
        """The transformer as its own class knows it, for saving: the branches are no submodules of it meanwhile."""
        if self._branches is None:
            yield
            return
        self._branches.take_out()
        try:
            yield
        finally:
            self._branches.put_in()

    def remove(self) -> None:
        """Put the very processors back that were there before; take hooks and branches away. Again is harmless."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._branches is not None:
            self._branches.take_out()
        for layer, original, processor in zip(self._layers, self._originals, self._processors, strict=True):
            if layer.processor is processor:
                # A diffusers attention backend or parallelism chosen meanwhile stays chosen.
                original._attention_backend = processor._attention_backend
                original._parallel_config = processor._parallel_config
                layer.set_processor(original)


def install(
    transformer: nn.Module,
    config: AttentionConfig,
    *,
    branch_state: dict[str, torch.Tensor] | None = None,
    generator: torch.Generator | None = None,
    device: torch.device | str | None = None,
    compute_dtype: torch.dtype | None = None,
) -> InstalledAttention:
    """Compute the self-attention of `transformer` as `config` says. Cross-attention is left alone.

    A branch is put into every layer, also into those that `dense_layers` names: which layers run it is a setting, which
    tensors there are is not.

    Args:
        transformer: a diffusers `WanTransformer3DModel` with its stock processors.
        config: the settings.
        branch_state: tensors of the branch, "blocks.N.attn1.linear_branch.X" for every layer; None starts fresh ones.
        generator: draws the fresh ones; by default one with a fixed seed, so that they are the same every time.
        device: where it will run, if not where its weights are now, as with offloading.
        compute_dtype: of the values it will be given, if not that of its weights, as under autocast.

    Raises:
        ConfigError: the transformer is not one this can handle or already has a backend installed, a dense layer does
            not exist, the backend does not run on the device, dtype or head size of the transformer, a branch beside a
            dense backend, or tensors of the branch that are missing, unknown or of the wrong shape. The transformer is
            then unchanged.
    """
    _check_transformer(transformer)
    num_layers = len(transformer.blocks)  # type: ignore
    missing = [index for index in config.dense_layers if index >= num_layers]
    require(not missing, "dense_layers", config.dense_layers, f"indices below {num_layers}, the number of layers")
    given = len(config.keep_ratios)
    require(given in (0, num_layers), "keep_ratios", config.keep_ratios, f"{num_layers} numbers, one for each layer")
    head_dim = int(transformer.config.attention_head_dim)  # type: ignore
    # The projections' own weights may be stored in a narrower type than they compute in; their outputs follow the norm.
    weight = transformer.blocks[0].attn1.norm_q.weight  # type: ignore
    compute_dtype = compute_dtype or weight.dtype
    kind, dtype = torch.device(device or weight.device).type, str(compute_dtype).removeprefix("torch.")
    backend = checked_backend(config, device=kind, dtype=dtype, head_dim=head_dim)
    auto = None
    if config.backend == AUTO:
        auto = choose_backend(config, device=kind, dtype=dtype, head_dim=head_dim)
    useful = config.branch == "none" or backend.constraints.sparse
    require(useful, "branch", config.branch, f"'none' with backend {config.backend!r}, which leaves nothing out")
    layers = [block.attn1 for block in transformer.blocks]  # type: ignore
    branches = InstalledBranches.build(layers, config, head_dim, branch_state, generator)
    return InstalledAttention(transformer, config, backend, branches, auto, compute_dtype=compute_dtype)


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
        require(
            MODULE_NAME not in block.attn1._modules,
            f"blocks.{index}.attn1.{MODULE_NAME}",
            "a module",
            "absent: it belongs to a branch that somebody else put in",
        )
        parallel = processor._parallel_config
        problems = [] if parallel is None else ulysses_problems(parallel, block.attn1.heads)
        if problems:
            raise ConfigError(f"blocks.{index}.attn1: context parallelism is enabled: {'; '.join(problems)}")


def _add_hooks(transformer: Any, state: _State) -> list[RemovableHandle]:
    """Hooks that begin a context, lay the tokens out, and put them back; in the order the model calls the parts."""

    def rope(module: Any, args: tuple[Any, ...], tables: Tables) -> RotaryTables:
        context, ranks = state.begin(args[0]), state.ulysses()
        if ranks is not None:
            # diffusers has split these already; the layers need all of them, and the order is one of all tokens.
            tables = type(module).forward(module, *args)
        if context.order is not None:
            cos, sin = (table.index_select(1, context.order.to(table.device)) for table in tables)
            tables = cos, sin
        if ranks is None:
            return RotaryTables.build((tables[0], tables[1]), context)
        state.context = context = dataclasses.replace(context, tables=(tables[0], tables[1]))
        return RotaryTables.build((ranks.own(tables[0]), ranks.own(tables[1])), context)

    def patches(module: nn.Module, args: tuple[Any, ...], out: torch.Tensor) -> torch.Tensor:
        # Tokens are split only at the first block, so these are all of them.
        order = _current(state).order
        if order is None:
            return out
        return out.flatten(2).index_select(2, order.to(out.device)).reshape(out.shape)

    def conditions(module: nn.Module, args: tuple[Any, ...], out: tuple[Any, ...]) -> tuple[Any, ...]:
        order, modulation = _current(state).order, out[1]
        if order is None or modulation.ndim != 3:
            return out
        # One time per token: the blocks see it laid out, the output layer (out[0]) in raster order.
        return (out[0], _reordered(modulation, order, state.ulysses()), *out[2:])

    def output(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        inverse = _current(state).inverse
        return args if inverse is None else (_reordered(args[0], inverse, state.ulysses()), *args[1:])

    return [
        transformer.rope.register_forward_hook(rope),
        transformer.patch_embedding.register_forward_hook(patches),
        transformer.condition_embedder.register_forward_hook(conditions),
        transformer.norm_out.register_forward_pre_hook(output),
    ]


def _reordered(tokens: torch.Tensor, order: torch.Tensor, ranks: Ulysses | None) -> torch.Tensor:
    """Tokens [batch, tokens, ...] in another order; under context parallelism this rank's share, before and after."""
    order = order.to(tokens.device)
    if ranks is None:
        return tokens.index_select(1, order)
    return ranks.gather(tokens).index_select(1, ranks.own(order[None])[0])


def _current(state: _State) -> ForwardContext:
    if state.context is None:
        raise RuntimeError("parts of the transformer cannot run alone while an attention backend is installed")
    return state.context
