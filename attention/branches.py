"""What a linear branch is to the layer that runs it, and which branch a configuration asks for.

A branch stands in for the blocks that sparse attention leaves out. It is a module on the layer, `attn1.linear_branch`,
so its parameters are trained, moved and saved with the model; the processor hands it what it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..core.config import ConfigError
from .config import AttentionConfig
from .context import ForwardContext
from .parallel import Ulysses
from .routing import BlockMap

MODULE_NAME = "linear_branch"
INITIAL_SEED = 0


@dataclass(frozen=True)
class BranchInputs:
    """What one layer has at hand; H is the number of heads at work here, all of them or a share (context parallelism).

    Attributes:
        sparse: output of the sparse softmax [batch, tokens, H, head_dim].
        query: after normalisation, before the rotary embedding, like `sparse`; None where the branch said that it does
            without (`LinearBranch.takes_rotated`), see `unrotated`.
        key: likewise.
        value: like `sparse`.
        rotated_query: after the rotary embedding.
        rotated_key: likewise.
        gate: float32 [batch, tokens, H], from `LinearBranch.gate`; None where the branch has none.
        rotary: the tables that the model rotates with, [1, tokens, 1, head_dim] each.
        heads: which heads of the layer these are.
        context: the forward pass.
        block_map: what the sparse softmax attended to, where the branch asked for it.
        ranks: who holds the other tokens, where these are only a share of them (see `LinearBranch.takes_shares`).
        overwrite: whether the branch may write its result into `sparse`.
    """

    sparse: torch.Tensor
    query: torch.Tensor | None
    key: torch.Tensor | None
    value: torch.Tensor
    rotated_query: torch.Tensor
    rotated_key: torch.Tensor
    gate: torch.Tensor | None
    rotary: tuple[torch.Tensor, torch.Tensor]
    heads: slice
    context: ForwardContext
    block_map: BlockMap | None = None
    ranks: Ulysses | None = None
    overwrite: bool = False

    def unrotated(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Query and key before the rotary embedding; turned back, which rounds once more, where they are not there."""
        if self.query is not None and self.key is not None:
            return self.query, self.key
        cos, sin = self.rotary
        return rotate(self.rotated_query, cos, -sin), rotate(self.rotated_key, cos, -sin)

    def room(self) -> torch.Tensor | None:
        """`sparse` where the result may take its place and nothing else lies there, else None."""
        others = {tensor.untyped_storage().data_ptr() for tensor in (self.rotated_query, self.rotated_key, self.value)}
        alone = self.sparse.is_contiguous() and self.sparse.untyped_storage().data_ptr() not in others
        return self.sparse if self.overwrite and alone else None


def rotate(tokens: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate each pair of channels of tokens [batch, tokens, heads, head_dim]; the tables hold every angle twice."""
    cos, sin = cos[..., 0::2], sin[..., 1::2]
    pairs = tokens.unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(tokens.dtype)


class LinearBranch(nn.Module):
    """Base of the branches. Its parameters keep the dtype that they were made or loaded with.

    `transformer.to(dtype)` moves them and leaves their dtype alone: small learned maps lose more by rounding than they
    save, and the products cast them as they need.
    """

    needs_block_map = False

    def gate(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Weight of the branch, float32 [batch, tokens, heads], from the layer's input [batch, tokens, heads x dim]."""
        return None

    def kernel_choice(self, device: str, dtype: torch.dtype) -> tuple[str, str]:
        """What computes the branch on that type of device, "triton", "native" or "torch", and why."""
        raise NotImplementedError

    def takes_shares(self, device: str, dtype: torch.dtype) -> bool:
        """Whether ranks that each hold a share of the tokens, with all heads, can compute it by summing up alone.

        Otherwise each rank gets all tokens with a share of the heads.
        """
        return False

    def takes_rotated(self, device: str, dtype: torch.dtype) -> bool:
        """Whether queries and keys after the rotary embedding are enough for it, so that nobody keeps the others."""
        return False

    def forward(self, inputs: BranchInputs) -> torch.Tensor:
        """The merged output, like `inputs.sparse`."""
        raise NotImplementedError

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        def keep_dtype(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        # Children hand the function on to their own parameters, so wrapping it here reaches all of them.
        return super()._apply(keep_dtype, recurse)


class Weight(nn.Module):
    """Holds a parameter under the name `weight`; no `nn.Linear`, so that what converts those passes it by."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)


def build_branch(
    config: AttentionConfig, heads: int, head_dim: int, generator: torch.Generator | None
) -> LinearBranch | None:
    """One layer's branch, freshly initialised on the CPU in float32; None where the configuration has none."""
    if config.branch == "none":
        return None
    if config.branch == "rola":
        from .rola.module import RoLABranch

        return RoLABranch(config.rola, heads, head_dim, generator)
    from .sla.module import SLABranch

    return SLABranch(config.sla, heads, head_dim)


class InstalledBranches:
    """The branches of all layers of a transformer, put in and taken out together."""

    def __init__(self, layers: list[Any], branches: list[LinearBranch], given: bool) -> None:
        self.branches = branches
        self.given = given
        self._layers = layers

    @classmethod
    def build(
        cls,
        layers: list[Any],
        config: AttentionConfig,
        head_dim: int,
        state: dict[str, torch.Tensor] | None,
        generator: torch.Generator | None,
    ) -> InstalledBranches | None:
        """Make the branches, with the tensors of `state` where there is one; nothing is put in yet.

        Args:
            layers: the self-attention modules, in order.
            config: the settings.
            head_dim: channels of a head.
            state: tensors under "blocks.N.attn1.linear_branch.X", complete; or None for fresh ones.
            generator: of the fresh ones; by default one with a fixed seed, so that they repeat.

        Raises:
            ConfigError: tensors that are missing, unknown or of the wrong shape, or weights that are not in memory.
        """
        if config.branch == "none":
            if state is not None:
                raise ConfigError(f"branch_state: got {len(state)} tensors; must be left out where branch is 'none'")
            return None
        generator = generator or torch.Generator().manual_seed(INITIAL_SEED)
        branches = []
        for layer in layers:
            branch = build_branch(config, layer.heads, head_dim, generator)
            assert branch is not None
            branches.append(branch)
        made = cls(layers, branches, given=state is not None)
        if state is not None:
            made._load(state)
        for index, (layer, branch) in enumerate(zip(layers, branches, strict=True)):
            device = layer.norm_q.weight.device
            if device.type == "meta":
                raise ConfigError(
                    f"blocks.{index}.attn1: its weights are on the meta device; must be in memory: "
                    "install a branch before weights are offloaded"
                )
            branch.to(device)
        return made

    def put_in(self) -> None:
        """Make each branch a submodule of its layer."""
        for layer, branch in zip(self._layers, self.branches, strict=True):
            layer.add_module(MODULE_NAME, branch)

    def take_out(self) -> None:
        """Undo `put_in`; a module that somebody else put there since stays."""
        for layer, branch in zip(self._layers, self.branches, strict=True):
            if layer._modules.get(MODULE_NAME) is branch:
                delattr(layer, MODULE_NAME)

    def state(self) -> dict[str, torch.Tensor]:
        """All tensors, not copied, under the names that `build` takes."""
        return {
            f"{_prefix(index)}{name}": tensor.detach()
            for index, branch in enumerate(self.branches)
            for name, tensor in branch.state_dict().items()
        }

    def _load(self, state: dict[str, torch.Tensor]) -> None:
        expected = self.state()
        missing = [name for name in expected if name not in state]
        unknown = [name for name in state if name not in expected]
        misshaped = [
            f"{name}: got {list(state[name].shape)}, must be {list(tensor.shape)}"
            for name, tensor in expected.items()
            if name in state and (state[name].shape != tensor.shape or not state[name].is_floating_point())
        ]
        faults = {"missing": missing, "unknown": unknown, "of the wrong shape or kind": misshaped}
        if any(faults.values()):
            texts = [f"{len(names)} {fault} ({_some(names)})" for fault, names in faults.items() if names]
            raise ConfigError(f"branch_state: got {len(state)} tensors, of them or besides them {'; '.join(texts)}")
        for index, branch in enumerate(self.branches):
            own = {name: nn.Parameter(state[_prefix(index) + name].detach().clone()) for name in branch.state_dict()}
            # Assigned, not copied: the dtype of the file is kept.
            branch.load_state_dict(own, strict=True, assign=True)


def _prefix(index: int) -> str:
    return f"blocks.{index}.attn1.{MODULE_NAME}."


def _some(names: list[str], limit: int = 4) -> str:
    rest = len(names) - limit
    return "; ".join(names[:limit]) + (f"; and {rest} more" if rest > 0 else "")
