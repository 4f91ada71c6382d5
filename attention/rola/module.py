"""The RoLA branch of one layer: its parameters, under the names of the released checkpoints, and what computes it."""

from __future__ import annotations

import importlib.util
import math

import torch
from torch import nn

from ..branches import BranchInputs, LinearBranch, Weight
from ..config import RoLAConfig
from . import native
from .frequencies import select_columns, tables_from_model, tables_from_rounded_angles
from .fused import LinearForm, linear_branch

TRITON_RANKS = (32, 64, 128)
TRITON_HEAD_DIMS = (32, 64, 128, 256)


class RoLABranch(LinearBranch):
    """Rotary low-rank attention beside the sparse softmax of one layer; see `RoLAConfig` and `reference.py`.

    Parameters: `proj_q.weight` and `proj_k.weight` [rank, head_dim] (or one such map per head), `gate_proj.weight`
    [1, head_dim], `gate_bias` [1, heads, 1, 1], and with merge "scaled" `output_scale` [1, heads, 1, 1].

    The maps start from the uniform distribution on +-1/sqrt(head_dim) (Kaiming's with a = sqrt(5)), the gate from its
    bias alone.

    Args:
        config: the form.
        heads: attention heads of the layer.
        head_dim: their channels.
        generator: draws the maps; None for PyTorch's own.
    """

    def __init__(self, config: RoLAConfig, heads: int, head_dim: int, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.head_dim = head_dim
        self.needs_block_map = config.exclude_selected
        self.columns = select_columns(config.frequencies, config.rank, head_dim)
        self.form = LinearForm(config.feature_map, config.normalizer, matched=config.merge == "rms_matched")
        shape = (heads, config.rank, head_dim) if config.per_head_maps else (config.rank, head_dim)
        bound = 1.0 / math.sqrt(head_dim)
        self.proj_q = Weight(torch.empty(shape).uniform_(-bound, bound, generator=generator))
        self.proj_k = Weight(torch.empty(shape).uniform_(-bound, bound, generator=generator))
        self.gate_proj = Weight(torch.zeros(1, head_dim))
        self.gate_bias = nn.Parameter(torch.full((1, heads, 1, 1), config.gate_bias))
        if config.merge == "scaled":
            self.output_scale = nn.Parameter(torch.ones(1, heads, 1, 1))

    def gate(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """g, times the learned size where there is one: float32 [batch, tokens, heads]."""
        if self._native_gate(hidden_states):
            size = self.output_scale if self.config.merge == "scaled" else None
            return native.rola_gate(hidden_states, self.gate_proj.weight, self.gate_bias, size)
        own = hidden_states.unflatten(-1, (-1, self.head_dim))
        logit = (own @ self.gate_proj.weight[0].to(own.dtype)).float() + self.gate_bias.float().flatten()
        gate = logit.sigmoid()
        return gate * self.output_scale.float().flatten() if self.config.merge == "scaled" else gate

    def _native_gate(self, hidden_states: torch.Tensor) -> bool:
        wanted = torch.is_grad_enabled() and (
            hidden_states.requires_grad or any(tensor.requires_grad for tensor in self.parameters())
        )
        return not wanted and self.kernel_choice(hidden_states.device.type, hidden_states.dtype)[0] == "native"

    def kernel_choice(self, device: str, dtype: torch.dtype) -> tuple[str, str]:
        """ "triton" on CUDA, "native" for bfloat16 on CPUs, if those kernels know this form; else "torch"; and why."""
        if device == "cpu":
            return self._cpu_choice(dtype)
        if device != "cuda":
            return "torch", f"the device is {device}"
        faults = [
            text
            for fault, text in (
                (self.config.rank not in TRITON_RANKS, f"rank {self.config.rank}"),
                (self.head_dim not in TRITON_HEAD_DIMS, f"head size {self.head_dim}"),
                (self.config.normalizer == "denominator", "normalizer 'denominator'"),
                (self.config.exclude_selected, "exclude_selected"),
                (importlib.util.find_spec("triton") is None, "triton not installed"),
            )
            if fault
        ]
        if faults:
            return "torch", f"the Triton kernels do not know {', '.join(faults)}"
        return "triton", "the device is cuda"

    def _cpu_choice(self, dtype: torch.dtype) -> tuple[str, str]:
        faults = [
            text
            for fault, text in (
                (dtype != torch.bfloat16, str(dtype).removeprefix("torch.")),
                (self.config.rank % native.STEP, f"rank {self.config.rank}"),
                (self.head_dim % native.STEP, f"head size {self.head_dim}"),
                (self.config.feature_map not in native.FEATURES, f"feature_map {self.config.feature_map!r}"),
                (self.config.normalizer not in native.NORMALIZERS, f"normalizer {self.config.normalizer!r}"),
                (self.config.exclude_selected, "exclude_selected"),
            )
            if fault
        ]
        if faults:
            return "torch", f"the C++ kernel does not know {', '.join(faults)}"
        reason = native.unavailable()
        return ("native", "a CPU with AVX-512 BF16; with gradients torch") if reason is None else ("torch", reason)

    def takes_shares(self, device: str, dtype: torch.dtype) -> bool:
        """Outside of CUDA where no block is left out: the sum over the keys is then all that ranks exchange."""
        return self.kernel_choice(device, dtype)[0] != "triton" and not self.config.exclude_selected

    def takes_rotated(self, device: str, dtype: torch.dtype) -> bool:
        """The C++ kernel turns them back as it reads them."""
        return self.kernel_choice(device, dtype)[0] == "native"

    def tables(self, inputs: BranchInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of the pairs of features, float32 [own tokens, rank / 2]; made once per forward pass."""
        context, device = inputs.context, inputs.value.device
        key = ("rola", self.columns, self.config.angle_dtype, device)
        if key not in context.cache:
            if self.config.angle_dtype == "bfloat16":
                made = tables_from_rounded_angles(context.grid, context.order, self.head_dim, self.columns, device)
                if inputs.ranks is not None:
                    made = (inputs.ranks.own(made[0][None])[0], inputs.ranks.own(made[1][None])[0])
            else:
                made = tables_from_model(*inputs.rotary, self.columns)
            context.cache[key] = made
        tables: tuple[torch.Tensor, torch.Tensor] = context.cache[key]
        return tables

    def forward(self, inputs: BranchInputs) -> torch.Tensor:
        """The merged output, like `inputs.sparse`."""
        cos, sin = self.tables(inputs)
        maps: tuple[torch.Tensor, torch.Tensor] = (self.proj_q.weight, self.proj_k.weight)
        if self.config.per_head_maps:
            maps = (maps[0][inputs.heads], maps[1][inputs.heads])
        assert inputs.gate is not None
        kernel, _ = self.kernel_choice(inputs.value.device.type, inputs.value.dtype)
        if kernel == "native" and not self._wants_gradients(inputs):
            return self._native(inputs, maps, cos, sin)
        query, key = inputs.unrotated()
        if kernel == "triton":
            from .triton_branch import rola_triton

            return rola_triton(
                self.form, inputs.sparse, query, key, inputs.value, inputs.gate, *maps, cos, sin
            )  # fmt: skip
        return linear_branch(
            self.form,
            inputs.sparse,
            query,
            key,
            inputs.value,
            gate=inputs.gate,
            map_q=maps[0],
            map_k=maps[1],
            cos=cos,
            sin=sin,
            excluded=inputs.block_map if self.config.exclude_selected else None,
            ranks=inputs.ranks,
        )

    def _native(
        self, inputs: BranchInputs, maps: tuple[torch.Tensor, torch.Tensor], cos: torch.Tensor, sin: torch.Tensor
    ) -> torch.Tensor:
        if inputs.query is None or inputs.key is None:
            query, key, angles = inputs.rotated_query, inputs.rotated_key, self._model_tables(inputs)
        else:
            query, key, angles = inputs.query, inputs.key, None
        dtype = inputs.value.dtype
        assert inputs.gate is not None
        return native.rola_native(
            self.form, inputs.sparse, query.to(dtype), key.to(dtype), inputs.value, inputs.gate, *maps, cos, sin,
            inputs.ranks, model_tables=angles, out=inputs.room() if inputs.sparse.dtype == dtype else None,
        )  # fmt: skip

    def _model_tables(self, inputs: BranchInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin that the model rotates with, each angle once: float32 [own tokens, head_dim / 2]."""
        name = ("model tables", inputs.value.device)
        if name not in inputs.context.cache:
            every = tuple(range(self.head_dim // 2))
            inputs.context.cache[name] = tuple(t.float() for t in tables_from_model(*inputs.rotary, every))
        tables: tuple[torch.Tensor, torch.Tensor] = inputs.context.cache[name]
        return tables

    def _wants_gradients(self, inputs: BranchInputs) -> bool:
        own = (inputs.sparse, inputs.query, inputs.key, inputs.rotated_query, inputs.rotated_key, inputs.value)
        tensors = (tensor for tensor in (*own, *self.parameters()) if tensor is not None)
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
