"""Set a linear branch from what a dense model does, without gradients.

What sparse attention misses is T = O_dense - O_sparse = (P - P_s) V, with P and P_s the weights of the two softmaxes.
Three walks over a handful of forward passes of the dense model, layer by layer:

1. **Maps of RoLA.** For each pair of features with rotation angles theta m the best rank-one term of P - P_s,
   Re(e^(i theta (m - n)) (u q) conj(v k)), in the metric of the queries and keys that occur: with S_q, S_k their second
   moments and X = sum_ij (P - P_s)_ij e^(i theta m_i) q_i e^(-i theta n_j) k_j^T, the first singular pair of
   S_q^(-1/2) X S_k^(-1/2). Pairs whose rotations cannot be told apart on this grid take further singular pairs. The
   feature map is nearly linear for small inputs and not for large ones, so several sizes are tried.
2. **Sizes.** Least squares of T on what each candidate's branch gives: a gate per head, then its dependence on the
   layer's input (linearised). SLA has its projection alone to set, by least squares too.
3. **Errors** of the merged output, by which the better of the candidates, none of them worse than the start, is kept.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..core.config import require
from .backends import AttentionBackend, checked_backend
from .branches import INITIAL_SEED, BranchInputs, LinearBranch, build_branch, rotate
from .config import AttentionConfig
from .context import ForwardContext
from .processors import install
from .rola.fused import linear_branch
from .rola.module import RoLABranch
from .routing import BlockMap
from .sla.module import SLABranch

SIZES = (0.1, 0.5, 2.0)
"""Root mean squares of the inputs of the feature map that are tried."""

RIDGE = 1e-4
"""Added to the diagonal of second moments, as a share of its mean."""

SAME_ROTATION = 0.5
"""Two columns count as one where the mean of e^(i (a - b)) over the tokens is larger than this in magnitude squared."""

Forward = Callable[[], object]


@dataclass(frozen=True)
class LayerSample:
    """What one self-attention layer works on in one forward pass; tensors [batch, tokens, heads, head_dim].

    Attributes:
        query: after normalisation, before the rotary embedding.
        key: likewise.
        value: like query.
        rotated_query: after the rotary embedding.
        rotated_key: likewise.
        hidden_states: input of the layer [batch, tokens, heads x head_dim].
        rotary: tables [1, tokens, 1, head_dim].
        context: the forward pass.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rotated_query: torch.Tensor
    rotated_key: torch.Tensor
    hidden_states: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor]
    context: ForwardContext


@contextmanager
def observed(
    transformer: nn.Module, config: AttentionConfig, on_layer: Callable[[int, LayerSample], None]
) -> Iterator[None]:
    """While this lasts the transformer is dense, in the token order of `config`, and shows what each layer works on.

    Args:
        transformer: with stock processors.
        config: of a sparse backend.
        on_layer: called with the index of a layer and its sample, inside the forward pass and without gradients.
    """
    blocks: Any = transformer.blocks
    every = tuple(range(len(blocks)))
    dense = AttentionConfig(
        backend="reference", token_order=config.token_order, tile=config.tile, block_size_q=config.block_size_q,
        block_size_k=config.block_size_k, dense_layers=every,
    )  # fmt: skip

    def hook(index: int) -> Callable[..., None]:
        def show(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: object) -> None:
            given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            with torch.no_grad():
                on_layer(index, _sample(module, given["hidden_states"], given["rotary_emb"], index))

        return show

    installed = install(transformer, dense)
    handles = [block.attn1.register_forward_hook(hook(i), with_kwargs=True) for i, block in enumerate(blocks)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        installed.remove()


def _sample(layer: Any, hidden_states: torch.Tensor, rotary: Any, index: int) -> LayerSample:
    if getattr(layer, "fused_projections", False):
        query, key, value = layer.to_qkv(hidden_states).chunk(3, dim=-1)
    else:
        query, key, value = layer.to_q(hidden_states), layer.to_k(hidden_states), layer.to_v(hidden_states)
    parts = (layer.norm_q(query), layer.norm_k(key), value)
    query, key, value = (part.unflatten(2, (layer.heads, -1)) for part in parts)
    context = dataclasses.replace(rotary.context, layer=index, keep_maps=True)
    rotated = rotate(query, *rotary), rotate(key, *rotary)
    return LayerSample(query, key, value, *rotated, hidden_states, tuple(rotary), context)


@dataclass(frozen=True)
class LayerErrors:
    """Errors of the attention output of one layer over all samples: |O - O_dense| / |O_dense|.

    Attributes:
        layer: its index.
        keep_ratio: that of the sparse softmax.
        sparse: of the sparse softmax alone.
        before: with the branch as it was.
        after: with the calibrated branch.
        size: root mean square chosen for the inputs of the feature map; None where the maps stayed as they were.
    """

    layer: int
    keep_ratio: float
    sparse: float
    before: float
    after: float
    size: float | None


@dataclass(frozen=True)
class CalibratedBranch:
    """The tensors of all layers, as `install` takes them, and the errors of those that are sparse."""

    state: dict[str, torch.Tensor]
    layers: tuple[LayerErrors, ...]


def calibrate_branch(
    transformer: nn.Module,
    config: AttentionConfig,
    forwards: Sequence[Forward],
    *,
    rows: int = 256,
    generator: torch.Generator | None = None,
) -> CalibratedBranch:
    """Calibrate the branch that `config` asks for.

    Args:
        transformer: the dense model, a diffusers `WanTransformer3DModel` with its stock processors.
        config: of a sparse backend with a branch.
        forwards: each runs one forward pass of the model; they are run three times.
        rows: queries of each head and sample that the maps are fitted on.
        generator: draws the branch that is started from; by default as `install` does.

    Raises:
        ConfigError: no branch, no forward pass, or a transformer or backend that cannot run.
    """
    require(config.branch != "none", "branch", config.branch, "'rola' or 'sla' to be calibrated")
    require(len(forwards) > 0, "forwards", 0, "at least one forward pass")
    layers = [block.attn1 for block in transformer.blocks]  # type: ignore[union-attr]
    head_dim = int(transformer.config.attention_head_dim)  # type: ignore[union-attr, arg-type]
    weight = layers[0].norm_q.weight
    dtype = str(weight.dtype).removeprefix("torch.")
    backend = checked_backend(config, device=weight.device.type, dtype=dtype, head_dim=head_dim)
    generator = generator or torch.Generator().manual_seed(INITIAL_SEED)
    fits: dict[int, _Fit] = {}
    starts: list[LinearBranch] = []
    for index, layer in enumerate(layers):
        start = build_branch(config, layer.heads, head_dim, generator)
        assert start is not None
        starts.append(start.to(weight.device).requires_grad_(False))
        if index not in config.dense_layers:
            fits[index] = _RolaFit(start, config, rows) if isinstance(start, RoLABranch) else _SlaFit(start, config)

    def walk(step: Callable[[_Fit, LayerSample, torch.Tensor, BlockMap | None], None]) -> None:
        def on_layer(index: int, sample: LayerSample) -> None:
            if index in fits:
                sparse, block_map = run_sparse(backend, sample, config)
                step(fits[index], sample, sparse, block_map)

        with torch.no_grad(), observed(transformer, config, on_layer):
            for forward in forwards:
                forward()

    if config.branch == "rola":
        walk(lambda fit, sample, sparse, block_map: fit.see_weights(sample, block_map))
    walk(lambda fit, sample, sparse, block_map: fit.see_output(sample, sparse, block_map))
    for fit in fits.values():
        fit.solve()
    walk(lambda fit, sample, sparse, block_map: fit.judge(sample, sparse, block_map))
    branches = [fits[index].best() if index in fits else start for index, start in enumerate(starts)]
    state = {
        f"blocks.{index}.attn1.linear_branch.{name}": tensor.detach().cpu()
        for index, branch in enumerate(branches)
        for name, tensor in branch.state_dict().items()
    }
    return CalibratedBranch(state, tuple(fit.errors(index, config.keep_ratio_of(index)) for index, fit in fits.items()))


def run_sparse(
    backend: AttentionBackend, sample: LayerSample, config: AttentionConfig
) -> tuple[torch.Tensor, BlockMap | None]:
    """Output of the sparse softmax, and the blocks that it kept."""
    out = backend(sample.rotated_query, sample.rotated_key, sample.value, context=sample.context, config=config)
    return out, sample.context.maps.pop(sample.context.layer, None)


def dense_output(sample: LayerSample) -> torch.Tensor:
    """Softmax attention over all tokens, float32 [batch, tokens, heads, head_dim]."""
    query, key, value = (t.transpose(1, 2) for t in (sample.rotated_query, sample.rotated_key, sample.value))
    return nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).float()


def branch_inputs(
    branch: LinearBranch, sample: LayerSample, sparse: torch.Tensor, block_map: BlockMap | None
) -> BranchInputs:
    """What the processor of a layer would hand its branch."""
    gate, heads = branch.gate(sample.hidden_states), slice(0, sparse.shape[2])
    return BranchInputs(
        sparse, sample.query, sample.key, sample.value, sample.rotated_query, sample.rotated_key, gate, sample.rotary,
        heads, sample.context, block_map if branch.needs_block_map else None,
    )  # fmt: skip


class _Fit:
    """One layer's calibration: candidates, what was seen of them, and their errors."""

    def __init__(self, start: LinearBranch) -> None:
        self.start = start
        self.candidates: list[tuple[LinearBranch, float | None]] = []
        self._squares: torch.Tensor | None = None

    def see_weights(self, sample: LayerSample, block_map: BlockMap | None) -> None:
        raise NotImplementedError

    def see_output(self, sample: LayerSample, sparse: torch.Tensor, block_map: BlockMap | None) -> None:
        raise NotImplementedError

    def solve(self) -> None:
        raise NotImplementedError

    def judge(self, sample: LayerSample, sparse: torch.Tensor, block_map: BlockMap | None) -> None:
        """Add up the squared errors: of the dense output itself, of sparse, of the start and of each candidate."""
        dense = dense_output(sample)
        outputs = [torch.zeros_like(dense), sparse]
        for branch, _ in [(self.start, None), *self.candidates]:
            outputs.append(branch(branch_inputs(branch, sample, sparse, block_map)))
        squares = torch.stack([(dense - out.float()).square().sum(dtype=torch.float64) for out in outputs])
        self._squares = squares if self._squares is None else self._squares + squares

    def _choice(self) -> int:
        """0 for the start, else one more than the index of the candidate."""
        assert self._squares is not None
        squares = self._squares[2:].nan_to_num(nan=torch.inf)
        return int(squares.argmin())

    def best(self) -> LinearBranch:
        """The branch with the least error."""
        choice = self._choice()
        return self.start if choice == 0 else self.candidates[choice - 1][0]

    def errors(self, layer: int, keep_ratio: float) -> LayerErrors:
        """Relative errors over all that was judged."""
        assert self._squares is not None
        relative = (self._squares / self._squares[0].clamp(min=1e-30)).sqrt().tolist()
        choice = self._choice()
        size = None if choice == 0 else self.candidates[choice - 1][1]
        return LayerErrors(layer, keep_ratio, relative[1], relative[2], relative[2 + choice], size)


class _RolaFit(_Fit):
    def __init__(self, start: RoLABranch, config: AttentionConfig, rows: int) -> None:
        super().__init__(start)
        self.rola = start
        self.config = config
        self.rows = rows
        self._moments: list[torch.Tensor] | None = None
        self._groups: list[int] | None = None
        self._variants: list[tuple[LinearBranch, float | None]] | None = None
        self._sums: list[list[torch.Tensor]] = []

    def see_weights(self, sample: LayerSample, block_map: BlockMap | None) -> None:
        """Add up S_q, S_k and X."""
        from .calibration_maps import map_moments, occurrences

        assert block_map is not None
        inputs = branch_inputs(self.start, sample, sample.value, block_map)
        cos, sin = self.rola.tables(inputs)
        if self._groups is None:
            self._groups = occurrences(cos, sin, SAME_ROTATION)
        moments = map_moments(
            sample.query, sample.key, (sample.rotated_query, sample.rotated_key), (cos, sin), block_map, rows=self.rows,
            by_head=self.rola.config.per_head_maps, missed_only=self.rola.config.exclude_selected,
        )  # fmt: skip
        self._moments = (
            moments if self._moments is None else [a + b for a, b in zip(self._moments, moments, strict=True)]
        )

    def _make_variants(self) -> list[tuple[LinearBranch, float | None]]:
        """The start, and the factorised maps in several sizes."""
        from .calibration_maps import factorised_maps

        assert self._moments is not None and self._groups is not None
        second_q, second_k, cross, count = self._moments
        map_q, map_k = factorised_maps(second_q, second_k, cross, count, self._groups, ridge=RIDGE)
        variants: list[tuple[LinearBranch, float | None]] = [(self.start, None)]
        for size in SIZES:
            branch = clone(self.rola)
            branch.proj_q.weight.data = map_q.to(branch.proj_q.weight) * size
            branch.proj_k.weight.data = map_k.to(branch.proj_k.weight) * size
            variants.append((branch, size))
        return variants

    def see_output(self, sample: LayerSample, sparse: torch.Tensor, block_map: BlockMap | None) -> None:
        """Add up, for each variant and head: <T, e>, |e|^2, sum |e|^2 x x^T, sum <T, e> x and sum |e|^2 x."""
        if self._variants is None:
            self._variants = self._make_variants()
        missed = dense_output(sample) - sparse.float()
        hidden = sample.hidden_states.float().unflatten(2, (missed.shape[2], -1))
        for place, (branch, _) in enumerate(self._variants):
            given = unit_output(branch, sample, sparse, block_map)
            along, square = (missed * given).sum(dim=-1), given.square().sum(dim=-1)
            sums = [
                along.sum(dim=(0, 1)),
                square.sum(dim=(0, 1)),
                torch.einsum("blh,blhd,blhe->hde", square, hidden, hidden),
                torch.einsum("blh,blhd->hd", along, hidden),
                torch.einsum("blh,blhd->hd", square, hidden),
            ]
            if place == len(self._sums):
                self._sums.append(sums)
            else:
                self._sums[place] = [a + b for a, b in zip(self._sums[place], sums, strict=True)]

    def solve(self) -> None:
        """Gates by least squares; each variant gives a candidate with a constant gate and one that sees the input."""
        assert self._variants is not None
        for (variant, size), (along, square, moment, along_x, square_x) in zip(self._variants, self._sums, strict=True):
            assert isinstance(variant, RoLABranch)
            constant = clone(variant)
            wanted = along / square.clamp(min=1e-30)
            opened = set_gate(constant, wanted)
            self.candidates.append((constant, size))
            slope = opened * (1.0 - constant.gate_bias.float().flatten().sigmoid())
            left = torch.einsum("h,hde->de", slope.square(), moment).double()
            right = torch.einsum("h,hd->d", slope, along_x - opened[:, None] * square_x).double()
            left += RIDGE * left.diagonal().mean() * torch.eye(left.shape[0], dtype=left.dtype, device=left.device)
            if bool(left.diagonal().min() > 0):
                seeing = clone(constant)
                seeing.gate_proj.weight.data = torch.linalg.solve(left, right)[None].to(seeing.gate_proj.weight)
                self.candidates.append((seeing, size))


class _SlaFit(_Fit):
    def __init__(self, start: LinearBranch, config: AttentionConfig) -> None:
        super().__init__(start)
        self._left: torch.Tensor | None = None
        self._right: torch.Tensor | None = None

    def see_output(self, sample: LayerSample, sparse: torch.Tensor, block_map: BlockMap | None) -> None:
        """Add up the normal equations of T = O_l W^T + b over all heads."""
        given = unit_output(self.start, sample, sparse, block_map).flatten(0, 2).double()
        given = torch.cat((given, torch.ones_like(given[:, :1])), dim=1)
        missed = (dense_output(sample) - sparse.float()).flatten(0, 2).double()
        left, right = given.T @ given, given.T @ missed
        self._left = left if self._left is None else self._left + left
        self._right = right if self._right is None else self._right + right

    def solve(self) -> None:
        assert self._left is not None and self._right is not None
        ridge = RIDGE * self._left.diagonal().mean() * torch.eye(len(self._left), dtype=torch.float64)
        solution = torch.linalg.solve(self._left + ridge.to(self._left.device), self._right)
        made = clone(self.start)
        assert isinstance(made, SLABranch)
        made.proj.weight.data = solution[:-1].T.contiguous().to(made.proj.weight)
        made.proj.bias.data = solution[-1].to(made.proj.bias)
        self.candidates.append((made, None))


def unit_output(
    branch: LinearBranch, sample: LayerSample, sparse: torch.Tensor, block_map: BlockMap | None
) -> torch.Tensor:
    """What the branch would add with a gate of one, float32; for SLA its output before the projection."""
    inputs = branch_inputs(branch, sample, sparse.float(), block_map)
    value = inputs.value.float()
    if isinstance(branch, RoLABranch):
        cos, sin = branch.tables(inputs)
        out = linear_branch(
            branch.form, inputs.sparse, sample.query, sample.key, value, map_q=branch.proj_q.weight,
            map_k=branch.proj_k.weight, cos=cos, sin=sin, excluded=inputs.block_map,
        )  # fmt: skip
        return out - inputs.sparse
    assert isinstance(branch, SLABranch)
    zeros = torch.zeros_like(inputs.sparse)
    return linear_branch(branch.form, zeros, inputs.rotated_query, inputs.rotated_key, value, excluded=inputs.block_map)


def set_gate(branch: RoLABranch, wanted: torch.Tensor) -> torch.Tensor:
    """Make the gate of each head the number `wanted` [heads], as far as the merge allows; returns what it is.

    With merge "scaled" the gate keeps its bias and the learned size takes the number; with "rms_matched" the gate
    itself must lie between 0 and 1.
    """
    if branch.config.merge == "scaled":
        opening = branch.gate_bias.float().flatten().sigmoid()
        branch.output_scale.data = (wanted / opening).view_as(branch.output_scale).to(branch.output_scale)
        return wanted
    bounded = wanted.clamp(1e-4, 0.98)
    branch.gate_bias.data = bounded.logit().view_as(branch.gate_bias).to(branch.gate_bias)
    return bounded


def clone(branch: Any) -> Any:
    """A copy with parameters of its own."""
    return copy.deepcopy(branch)
