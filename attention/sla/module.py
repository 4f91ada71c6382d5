"""The SLA branch of one layer, on the code that RoLA runs on."""

from __future__ import annotations

import torch
from torch import nn

from ..branches import BranchInputs, LinearBranch
from ..config import SLAConfig
from ..rola.fused import LinearForm, linear_branch


class _Projection(nn.Module):
    """proj, from zero, so that training starts at the sparse output itself; no `nn.Linear`, see `branches.Weight`."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(head_dim, head_dim))
        self.bias = nn.Parameter(torch.zeros(head_dim))


class SLABranch(LinearBranch):
    """Linear attention of the rotated queries and keys, projected and added; see `SLAConfig`.

    Parameters: `proj.weight` [head_dim, head_dim] and `proj.bias` [head_dim], shared by all heads.
    """

    def __init__(self, config: SLAConfig, heads: int, head_dim: int) -> None:
        super().__init__()
        self.config = config
        self.needs_block_map = config.exclude_selected
        self.form = LinearForm(config.feature_map, "denominator", matched=False)
        self.proj = _Projection(head_dim)

    def kernel_choice(self, device: str, dtype: torch.dtype) -> tuple[str, str]:
        """Always "torch"."""
        return "torch", "SLA has no kernels of its own"

    def takes_shares(self, device: str, dtype: torch.dtype) -> bool:
        """Where no block is left out: the sums over the keys are then all that ranks exchange."""
        return not self.config.exclude_selected

    def takes_rotated(self, device: str, dtype: torch.dtype) -> bool:
        """Always: they are what its features are made of."""
        return True

    def forward(self, inputs: BranchInputs) -> torch.Tensor:
        """The merged output, like `inputs.sparse`."""
        return linear_branch(
            self.form,
            inputs.sparse,
            inputs.rotated_query,
            inputs.rotated_key,
            inputs.value,
            out_weight=self.proj.weight,
            out_bias=self.proj.bias,
            excluded=inputs.block_map if self.config.exclude_selected else None,
            ranks=inputs.ranks,
        )
