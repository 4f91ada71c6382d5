"""The linear branches on any device, in chunks of tokens: one pass over the keys, one over the queries.

The features of the whole sequence are never held. Every chunk goes through all its steps while it is in the cache, in
float32 but for the products, which take the dtype of the values. The backward pass walks the same chunks and lets
autograd differentiate each on its own: every option has its gradient from the formulas of the forward pass, in memory
that grows with the tokens.

Features are kept as two halves, the even and the odd channels, instead of interleaved: the sum over them does not
depend on their order, and halves are turned without picking every second number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from ..parallel import Ulysses
from ..routing import BlockMap
from .reference import DENOMINATOR_EPS, MATCH_EPS, feature_map

CPU_CHUNK_ELEMENTS = 2**19
ACCELERATOR_CHUNK_ELEMENTS = 2**25
"""Numbers in the largest temporary of a chunk: on a CPU a few of them fit into the cache of a core."""


@dataclass(frozen=True)
class LinearForm:
    """Which linear branch; see `RoLAConfig` for the words.

    Attributes:
        feature_map: phi.
        normalizer: "rms", "denominator" or "mean".
        matched: the output takes on the size of the sparse output.
    """

    feature_map: str
    normalizer: str
    matched: bool


@dataclass(frozen=True)
class _Plan:
    """What a pass needs besides the tensors that have gradients: `length` tokens here, `total` on all ranks."""

    form: LinearForm
    length: int
    total: int
    chunk: int
    cos: torch.Tensor | None
    sin: torch.Tensor | None
    excluded: BlockMap | None
    ranks: Ulysses | None

    def angles(self, tokens: slice) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self.cos is None or self.sin is None:
            return None
        return self.cos[tokens], self.sin[tokens]

    def chunks(self, block_size: int) -> Iterator[slice]:
        """Runs of tokens, each but the last a whole number of blocks."""
        step = max(1, self.chunk // block_size) * block_size
        for start in range(0, self.length, step):
            yield slice(start, min(start + step, self.length))


def linear_branch(
    form: LinearForm,
    sparse: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    gate: torch.Tensor | None = None,
    map_q: torch.Tensor | None = None,
    map_k: torch.Tensor | None = None,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    out_weight: torch.Tensor | None = None,
    out_bias: torch.Tensor | None = None,
    excluded: BlockMap | None = None,
    ranks: Ulysses | None = None,
    chunk_elements: int | None = None,
) -> torch.Tensor:
    """sparse + gate * size * (N(O_l) W^T + bias); differentiable once.

    Args:
        form: features, normaliser and size.
        sparse: [batch, tokens, heads, head_dim].
        query: like sparse.
        key: like sparse.
        value: like sparse; the products are computed in its dtype.
        gate: [batch, tokens, heads] or None for 1.
        map_q: [rank, head_dim] or [heads, rank, head_dim], or None where the features are the queries themselves.
        map_k: likewise for the keys.
        cos: [tokens, rank / 2], or None for features that are not rotated.
        sin: likewise.
        out_weight: W [head_dim, head_dim], or None.
        out_bias: [head_dim], or None.
        excluded: the pairs that the sum over the keys leaves out; None for the sum over all.
        ranks: who holds the other tokens where these are a share of them; no pairs can be left out then. The sums over
            the keys and their gradients are exchanged, the gradients of the maps are those of the own tokens.
        chunk_elements: numbers in the largest temporary of a chunk; by default set by the device.

    Returns:
        [batch, tokens, heads, head_dim] in the dtype of `sparse`.
    """
    if chunk_elements is None:
        chunk_elements = CPU_CHUNK_ELEMENTS if query.device.type == "cpu" else ACCELERATOR_CHUNK_ELEMENTS
    batch, length, heads, head_dim = query.shape
    if map_q is not None and map_k is not None and cos is not None:
        # Even rows first: see the top of the file.
        map_q, map_k = (torch.cat((each[..., 0::2, :], each[..., 1::2, :]), dim=-2) for each in (map_q, map_k))
    widest = head_dim if map_q is None else max(head_dim, map_q.shape[-2])
    chunk = max(1, chunk_elements // (batch * heads * widest))
    assert ranks is None or excluded is None, "blocks are left out among all tokens"
    plan = _Plan(form, length, length * (1 if ranks is None else ranks.degree), chunk, cos, sin, excluded, ranks)
    query, key = query.to(value.dtype), key.to(value.dtype)
    out: torch.Tensor = _LinearBranch.apply(  # type: ignore[no-untyped-call]
        plan, query, key, value, sparse, gate, map_q, map_k, out_weight, out_bias
    )
    return out


class _LinearBranch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: _Plan, *tensors: torch.Tensor | None) -> torch.Tensor:
        query, key, value, sparse, gate, map_q, map_k, out_weight, out_bias = tensors
        assert query is not None and key is not None and value is not None and sparse is not None
        with torch.autocast(query.device.type, enabled=False):
            summary, features = (_of_all_ranks(plan, part) for part in _sum_over_keys(plan, key, value, map_k))
            out = torch.empty_like(sparse)
            for tokens in plan.chunks(_query_block(plan)):
                own = _summary_of(plan, summary, tokens), _summary_of(plan, features, tokens)
                rows = _rows(tokens, query, sparse, gate)
                out[:, tokens] = _merged(plan, tokens, *rows, *own, map_q, out_weight, out_bias)  # type: ignore
        ctx.save_for_backward(summary, features, *tensors)
        ctx.plan = plan
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        summary, features, *tensors = ctx.saved_tensors
        query, key, value, sparse, gate, map_q, map_k, out_weight, out_bias = tensors
        plan: _Plan = ctx.plan
        needs = ctx.needs_input_grad[1:]
        keys_need = needs[1] or needs[2] or needs[6]
        # Gradients of tokens are written chunk by chunk, those of the maps are summed up.
        grads = [torch.empty_like(each) if need else None for each, need in zip(tensors[:5], needs[:5], strict=True)]
        for each, need in zip(tensors[5:], needs[5:], strict=True):
            grads.append(torch.zeros(each.shape, dtype=summary.dtype, device=each.device) if need else None)
        grad_summary = torch.zeros_like(summary)
        grad_features = None if features is None else torch.zeros_like(features)
        wanted = (needs[0], needs[3], needs[4], keys_need, keys_need, needs[5], needs[7], needs[8])
        with torch.autocast(query.device.type, enabled=False):
            for tokens in plan.chunks(_query_block(plan)):
                own = _summary_of(plan, summary, tokens), _summary_of(plan, features, tokens)
                rows = _rows(tokens, query, sparse, gate)
                leaves = _leaves([*rows, *own, map_q, out_weight, out_bias], wanted)
                with torch.enable_grad():
                    merged = _merged(plan, tokens, *leaves)  # type: ignore[arg-type]
                parts = _gradients([merged], leaves, [grad_out[:, tokens]])
                for place, part in zip((0, 3, 4), parts[:3], strict=True):
                    _put(grads[place], part, tokens)
                _spread(plan, grad_summary, parts[3], tokens)
                _spread(plan, grad_features, parts[4], tokens)
                for place, part in zip((5, 7, 8), parts[5:], strict=True):
                    _add(grads[place], part)
            if keys_need:
                shared = [_of_all_ranks(plan, part) for part in (grad_summary, grad_features)]
                _backward_of_keys(plan, (key, value, map_k), grads, needs, *shared)  # type: ignore[arg-type]
        typed = (None if grad is None else grad.to(each.dtype) for grad, each in zip(grads, tensors, strict=True))
        return (None, *typed)


def _backward_of_keys(
    plan: _Plan,
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
    grads: list[torch.Tensor | None],
    needs: tuple[bool, ...],
    grad_summary: torch.Tensor,
    grad_features: torch.Tensor | None,
) -> None:
    """Fill the gradients of keys, values and their map (places 1, 2 and 6) from that of the summary."""
    key, value, map_k = tensors
    if plan.excluded is not None:
        # Every block is also part of the sum of all.
        grad_summary = grad_summary[:, :, :-1] + grad_summary[:, :, -1:]
        grad_features = None if grad_features is None else grad_features[:, :, :-1] + grad_features[:, :, -1:]
    for tokens in plan.chunks(_key_block(plan)):
        leaves = _leaves([*_rows(tokens, key, value), map_k], (needs[1], needs[2], needs[6]))
        with torch.enable_grad():
            summary, features = _key_summary(plan, tokens, *leaves)  # type: ignore[arg-type]
        blocks = _blocks_of(plan, tokens)
        outputs, slopes = [summary], [grad_summary[:, :, blocks]]
        if features is not None and features.requires_grad:
            assert grad_features is not None
            outputs.append(features)
            slopes.append(grad_features[:, :, blocks])
        parts = _gradients(outputs, leaves, slopes)
        _put(grads[1], parts[0], tokens)
        _put(grads[2], parts[1], tokens)
        _add(grads[6], parts[2])


# The formulas, chunk by chunk; all of them are differentiated by autograd. C below is the summary of the keys.


def _features(
    inputs: torch.Tensor,
    weight: torch.Tensor | None,
    form: LinearForm,
    angles: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of inputs [batch, tokens, heads, head_dim], rotated and not: [batch, heads, tokens, rank], wide."""
    wide = _wide(inputs.dtype)
    if weight is None:
        projected = inputs
    elif weight.ndim == 2:
        projected = inputs @ weight.to(inputs.dtype).transpose(0, 1)
    else:
        per_head = inputs.transpose(1, 2) @ weight.to(inputs.dtype).transpose(1, 2)
        projected = per_head.transpose(1, 2)
    plain = feature_map(projected.to(wide), form.feature_map)
    if angles is None:
        return plain.transpose(1, 2), plain.transpose(1, 2)
    cos, sin = (table.to(wide)[:, None, :] for table in angles)
    even, odd = plain.chunk(2, dim=-1)
    turned = torch.cat(
        (torch.addcmul(even * cos, odd, sin, value=-1), torch.addcmul(even * sin, odd, cos)),
        dim=-1,
    )
    return turned.transpose(1, 2), plain.transpose(1, 2)


def _key_summary(
    plan: _Plan, tokens: slice, key: torch.Tensor, value: torch.Tensor, map_k: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """C = sum of k_r v^T over a chunk, per block where blocks are excluded; divided by the number of tokens.

    Returns:
        C [batch, heads, blocks, rank, head_dim] and, for a denominator, the sum of un-rotated features
        [batch, heads, blocks, rank, 1]; else None. The division keeps half precision in range, and cancels.
    """
    rotated, plain = _features(key, map_k, plan.form, plan.angles(tokens))
    blocks = 1 if plan.excluded is None else -(-key.shape[1] // plan.excluded.block_size_k)
    size = key.shape[1] if plan.excluded is None else plan.excluded.block_size_k
    values = _in_blocks(value.to(rotated.dtype).transpose(1, 2), blocks, size)
    summary = _in_blocks(rotated, blocks, size).transpose(-1, -2) @ values / plan.total
    if plan.form.normalizer != "denominator":
        return summary, None
    return summary, _in_blocks(plain, blocks, size).sum(dim=-2).unsqueeze(-1) / plan.total


def _merged(
    plan: _Plan,
    tokens: slice,
    query: torch.Tensor,
    sparse: torch.Tensor,
    gate: torch.Tensor | None,
    summary: torch.Tensor,
    features: torch.Tensor | None,
    map_q: torch.Tensor | None,
    out_weight: torch.Tensor | None,
    out_bias: torch.Tensor | None,
) -> torch.Tensor:
    """The merged output of a chunk of queries [batch, tokens, heads, head_dim]."""
    rotated, plain = _features(query, map_q, plan.form, plan.angles(tokens))
    out = _from_queries(plan, rotated, summary, query.dtype)
    if plan.form.normalizer == "rms":
        # The root mean square of the published form is taken before the division by the number of tokens.
        eps = torch.finfo(query.dtype).eps / plan.total**2
        out = out * torch.rsqrt(out.square().mean(dim=-1, keepdim=True) + eps)
    elif plan.form.normalizer == "denominator":
        assert features is not None
        total = _from_queries(plan, plain, features, plain.dtype)
        out = out / (total + DENOMINATOR_EPS / plan.total)
    if out_weight is not None:
        out = F.linear(out, out_weight.to(out.dtype), None if out_bias is None else out_bias.to(out.dtype))
    wide = sparse.to(out.dtype)
    factor = None if gate is None else gate.to(out.dtype).unsqueeze(-1)
    if plan.form.matched:
        size = torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + MATCH_EPS)
        factor = size if factor is None else factor * size
    merged = wide + out if factor is None else torch.addcmul(wide, out, factor)
    return merged.to(sparse.dtype)


def _from_queries(plan: _Plan, features: torch.Tensor, summary: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """features [batch, heads, tokens, rank] by summary [batch, heads, blocks, rank, n]: [batch, tokens, heads, n]."""
    tokens, blocks = features.shape[2], summary.shape[2]
    size = tokens if plan.excluded is None else plan.excluded.block_size_q
    out = _in_blocks(features, blocks, size).to(dtype) @ summary.to(dtype)
    return out.flatten(2, 3)[:, :, :tokens].transpose(1, 2).to(features.dtype)


def _in_blocks(tokens: torch.Tensor, blocks: int, size: int) -> torch.Tensor:
    """[batch, heads, length, n] to [batch, heads, blocks, size, n], filled up with zeros."""
    missing = blocks * size - tokens.shape[2]
    filled = F.pad(tokens, (0, 0, 0, missing)) if missing else tokens
    return filled.unflatten(2, (blocks, size))


# Sums over the keys and their way back. With excluded blocks a summary has one entry per key block, and after them the
# sum of all, from which every query block takes away those of the key blocks that it attends to.


def _sum_over_keys(
    plan: _Plan, key: torch.Tensor, value: torch.Tensor, map_k: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    parts = (
        _key_summary(plan, tokens, key[:, tokens], value[:, tokens], map_k) for tokens in plan.chunks(_key_block(plan))
    )
    if plan.excluded is None:
        summary, features = next(parts)
        for part, sums in parts:
            summary += part
            if features is not None and sums is not None:
                features += sums
        return summary, features
    summaries, sums_of = zip(*parts, strict=True)
    summary = torch.cat((*summaries, sum(part.sum(dim=2, keepdim=True) for part in summaries)), dim=2)
    if sums_of[0] is None:
        return summary, None
    return summary, torch.cat((*sums_of, sum(part.sum(dim=2, keepdim=True) for part in sums_of)), dim=2)


def _of_all_ranks(plan: _Plan, part: torch.Tensor | None) -> torch.Tensor | None:
    return part if part is None or plan.ranks is None else plan.ranks.sum(part)


def _summary_of(plan: _Plan, summary: torch.Tensor | None, tokens: slice) -> torch.Tensor | None:
    """What the queries of a chunk see of the keys: [batch, heads, 1 or query blocks, rank, n]."""
    if summary is None or plan.excluded is None:
        return summary
    entries = summary.flatten(0, 2)
    picks, real = _picks(plan, summary, tokens)
    left_out = torch.zeros((picks.shape[0], *entries.shape[1:]), dtype=summary.dtype, device=summary.device)
    for column, present in zip(picks.unbind(dim=1), real.unbind(dim=1), strict=True):
        picked = entries.index_select(0, column)
        left_out += picked.masked_fill_(~present[:, None, None], 0.0) if plan.excluded.ragged else picked
    return summary[:, :, -1:] - left_out.unflatten(0, (*summary.shape[:2], -1))


def _spread(plan: _Plan, total: torch.Tensor | None, part: torch.Tensor | None, tokens: slice) -> None:
    """Add the gradient of `_summary_of` to that of the summary."""
    if total is None or part is None:
        return
    if plan.excluded is None:
        total += part
        return
    total[:, :, -1:] += part.sum(dim=2, keepdim=True)
    entries = total.flatten(0, 2)
    slopes = part.flatten(0, 2)
    picks, real = _picks(plan, total, tokens)
    for column, present in zip(picks.unbind(dim=1), real.unbind(dim=1), strict=True):
        own = slopes.masked_fill(~present[:, None, None], 0.0) if plan.excluded.ragged else slopes
        entries.index_add_(0, column, own, alpha=-1)


def _picks(plan: _Plan, summary: torch.Tensor, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries that the query blocks of a chunk leave out, counted over batch and heads: int64 [rows, kept].

    Second, which of them there are, bool: a ragged map leaves some places empty.
    """
    assert plan.excluded is not None
    size = plan.excluded.block_size_q
    own = plan.excluded.indices[:, :, tokens.start // size : -(-tokens.stop // size)]
    sequences = torch.arange(summary.shape[0] * summary.shape[1], device=own.device) * summary.shape[2]
    real = own < plan.excluded.num_key_blocks
    return (own + sequences.reshape(*summary.shape[:2], 1, 1)).flatten(0, 2), real.flatten(0, 2)


def _blocks_of(plan: _Plan, tokens: slice) -> slice:
    if plan.excluded is None:
        return slice(0, 1)
    size = plan.excluded.block_size_k
    return slice(tokens.start // size, -(-tokens.stop // size))


def _query_block(plan: _Plan) -> int:
    return 1 if plan.excluded is None else plan.excluded.block_size_q


def _key_block(plan: _Plan) -> int:
    return 1 if plan.excluded is None else plan.excluded.block_size_k


# Bookkeeping of gradients.


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _rows(tokens: slice, *tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    return [None if tensor is None else tensor[:, tokens] for tensor in tensors]


def _leaves(tensors: list[torch.Tensor | None], wanted: tuple[bool, ...]) -> list[torch.Tensor | None]:
    pairs = zip(tensors, wanted, strict=True)
    return [None if tensor is None else tensor.detach().requires_grad_(needed) for tensor, needed in pairs]


def _gradients(
    outputs: list[torch.Tensor], leaves: list[torch.Tensor | None], slopes: list[torch.Tensor]
) -> list[torch.Tensor | None]:
    """The gradient of each leaf that wants one; None for the others."""
    wanted = [leaf for leaf in leaves if leaf is not None and leaf.requires_grad]
    if not wanted:
        return [None] * len(leaves)
    found = iter(torch.autograd.grad(outputs, wanted, slopes, allow_unused=True))
    return [next(found) if leaf is not None and leaf.requires_grad else None for leaf in leaves]


def _put(total: torch.Tensor | None, part: torch.Tensor | None, tokens: slice) -> None:
    if total is not None:
        total[:, tokens] = 0 if part is None else part


def _add(total: torch.Tensor | None, part: torch.Tensor | None) -> None:
    if total is not None and part is not None:
        total += part
