"""The rule "top_p": which blocks it keeps, and that every backend and branch honours rows of different lengths."""

from __future__ import annotations

import dataclasses
import importlib.util
import math

import pytest
import torch

from videospark.attention import AttentionConfig, get_backend, install
from videospark.attention.block_sparse.flex import flex_block_mask
from videospark.attention.block_sparse.gather import gather_attention
from videospark.attention.block_sparse.reference import reference_attention
from videospark.attention.config import RoLAConfig
from videospark.attention.context import ForwardContext
from videospark.attention.grid import TokenGrid
from videospark.attention.rola.fused import LinearForm, linear_branch
from videospark.attention.routing import block_map, diagonal_blocks, pool_blocks
from videospark.core.config import ConfigError
from videospark.core.numerics import relative_error
from videospark.tiny.components import LATENT_CHANNELS, build_transformer

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


def inputs(length=105, *, batch=2, heads=2, dim=32, seed=0):
    """Query, key, value and a slope; some heads look at few blocks and some at many."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value, grad = (torch.randn(batch, length, heads, dim, generator=generator) for _ in range(4))
    # Blocks whose tokens agree have means that stand out.
    key = (
        key
        + 3 * torch.randn(batch, -(-length // 16), heads, dim, generator=generator).repeat_interleave(16, 1)[:, :length]
    )
    query = query * torch.linspace(0.1, 1.5, heads)[:, None]
    return query, key, value, grad


def route(query, key, top_p=0.8, keep_ratio=0.9, size_q=16, size_k=16, forced=None):
    return block_map(
        query, key, keep_ratio=keep_ratio, block_size_q=size_q, block_size_k=size_k, forced=forced, top_p=top_p
    )


def kept_sets(chosen):
    flat = chosen.indices.flatten(0, 2).tolist()
    return [[block for block in row if block < chosen.num_key_blocks] for row in flat]


@pytest.mark.parametrize("top_p", [0.3, 0.8, 0.999])
@pytest.mark.parametrize("keep_ratio", [0.3, 1.0])
def test_rows_keep_the_fewest_best_blocks_that_hold_the_share(top_p, keep_ratio):
    query, key, *_ = inputs()
    chosen = route(query, key, top_p, keep_ratio)
    scores = pool_blocks(query, 16) @ pool_blocks(key, 16).transpose(-1, -2)
    shares = (scores / math.sqrt(32)).softmax(-1).flatten(0, 2)
    cap = max(1, math.floor(keep_ratio * 7))
    lengths = set()
    for row, kept in zip(shares, kept_sets(chosen), strict=True):
        order = row.argsort(descending=True, stable=True).tolist()
        wanted, held = [], 0.0
        while held < top_p and len(wanted) < cap:
            wanted.append(order[len(wanted)])
            held += float(row[wanted[-1]])
        assert kept == sorted(wanted)
        lengths.add(len(kept))
    assert torch.equal(chosen.counts().flatten(), torch.tensor([len(kept) for kept in kept_sets(chosen)]))
    assert len(lengths) > 1 or (top_p, keep_ratio) != (0.8, 1.0)


def test_ragged_rows_are_ascending_and_end_in_empty_places():
    chosen = route(*inputs()[:2])
    assert chosen.ragged and not chosen.is_full
    for row, count in zip(chosen.indices.flatten(0, 2).tolist(), chosen.counts().flatten().tolist(), strict=True):
        assert count >= 1 and row[:count] == sorted(set(row[:count]))
        assert all(block == chosen.num_key_blocks for block in row[count:])


def test_a_share_of_one_is_top_k():
    query, key, *_ = inputs()
    all_of_them = block_map(query, key, keep_ratio=0.6, block_size_q=16, block_size_k=16)
    assert torch.equal(route(query, key, 1.0, 0.6).token_mask(), all_of_them.token_mask())


def test_forced_blocks_are_kept_whatever_the_share():
    query, key, *_ = inputs()
    forced = diagonal_blocks(105, 16, 16)
    mask = route(query, key, 1e-6, 0.5, forced=forced)
    assert all(index % 7 in kept for index, kept in enumerate(kept_sets(mask)))
    assert set(mask.counts().flatten().tolist()) == {1}


def test_kept_pairs_count_what_is_kept():
    query, key, *_ = inputs()
    chosen = route(query, key, size_q=32)
    assert int(chosen.kept_pairs()) == int(chosen.token_mask().sum())
    assert chosen.actual_sparsity() == pytest.approx(1 - chosen.token_mask().double().mean().item())


def test_nan_keeps_all_that_a_row_may():
    query, key, *_ = inputs()
    query[0, 3, 0] = math.nan
    chosen = route(query, key, 0.1, 0.6)
    assert int(chosen.counts()[0, 0, 0]) == 4


def gradients(function, tensors, grad, chosen, **options):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    out = function(*leaves, chosen, **options)
    out = out[0] if isinstance(out, tuple) else out
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("sizes", [(16, 16), (32, 48), (64, 16)])
@pytest.mark.parametrize("chunk_elements", [None, 60_000])
def test_gather_equals_the_reference(sizes, chunk_elements):
    *qkv, grad = inputs()
    chosen = route(*qkv[:2], 0.6, 1.0, *sizes)
    actual = gradients(gather_attention, qkv, grad, chosen, chunk_elements=chunk_elements)
    for got, want in zip(actual, gradients(reference_attention, qkv, grad, chosen), strict=True):
        assert relative_error(got, want) < 1e-5


def test_blocks_that_a_row_leaves_out_cannot_reach_it():
    query, key, value, _ = inputs(batch=1, heads=1)
    chosen = route(query, key, 0.5)
    block = next(b for b in range(7) if any(b not in kept for kept in kept_sets(chosen)))
    value[:, block * 16 : block * 16 + 16] = math.nan
    out = gather_attention(query, key, value, chosen)
    for index, kept in enumerate(kept_sets(chosen)):
        rows = out[0, index * 16 : index * 16 + 16]
        assert bool(rows.isnan().any()) == (block in kept)


@needs_triton
@pytest.mark.parametrize("sizes", [(16, 16), (32, 48)])
def test_triton_equals_the_reference(sizes):
    from videospark.attention.block_sparse.triton_backend import triton_attention, triton_attention_int8

    *qkv, grad = inputs(75, batch=1)
    chosen = route(*qkv[:2], 0.6, 1.0, *sizes)
    wanted = gradients(reference_attention, qkv, grad, chosen)
    for got, want in zip(gradients(triton_attention, qkv, grad, chosen), wanted, strict=True):
        assert relative_error(got, want) < 1e-5
    assert relative_error(triton_attention_int8(*qkv, chosen)[0], wanted[0]) < 0.05


def test_the_mask_for_flex_holds_the_same_blocks():
    query, key, *_ = inputs()
    chosen = route(query, key)
    for with_transpose in (False, True):
        dense = flex_block_mask(chosen, with_transpose=with_transpose).to_dense().bool()
        rows = dense.flatten(0, 2).tolist()
        assert [[i for i, on in enumerate(row) if on] for row in rows] == kept_sets(chosen)


@pytest.mark.parametrize("normalizer", ["rms", "denominator"])
def test_branches_leave_out_exactly_the_kept_blocks(normalizer):
    query, key, value, slope = (tensor.double() for tensor in inputs())
    chosen = route(query, key, 0.6, 0.9, 32, 16)
    form = LinearForm("relu", normalizer, matched=False)
    assert len(set(chosen.counts().flatten().tolist())) > 1

    def plain(sparse, query, key, value):
        kernel = torch.einsum("bihd,bjhd->bhij", query.relu(), key.relu()).masked_fill(chosen.token_mask(), 0.0)
        out = torch.einsum("bhij,bjhd->bihd", kernel, value)
        if normalizer == "rms":
            return sparse + torch.nn.functional.rms_norm(out, (32,), eps=torch.finfo(torch.float64).eps)
        return sparse + out / (kernel.sum(-1).transpose(1, 2).unsqueeze(-1) + 1e-5)

    leaves = [tensor.clone().requires_grad_() for tensor in (value, query, key, value)]
    actual = linear_branch(form, *leaves, excluded=chosen, chunk_elements=3000)
    wanted = plain(*leaves)
    assert torch.allclose(actual, wanted, rtol=1e-7, atol=1e-7)
    for got, want in zip(
        torch.autograd.grad(actual, leaves, slope), torch.autograd.grad(wanted, leaves, slope), strict=True
    ):
        assert relative_error(got, want) < 1e-6


CONFIG = AttentionConfig(
    backend="gather", keep_ratio=0.6, routing_rule="top_p", top_p=0.5, block_size_q=16, block_size_k=16
)


@pytest.fixture
def transformer():
    torch.manual_seed(0)
    model = build_transformer()
    torch.nn.init.normal_(model.proj_out.weight, std=0.05)
    return model


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(1, LATENT_CHANNELS, 5, 8, 8, generator=generator),
        "encoder_hidden_states": torch.randn(1, 8, 128, generator=generator),
        "timestep": torch.tensor([500.0]),
    }


def run(model, batch):
    with torch.no_grad():
        return model(**batch, return_dict=False)[0]


def test_in_the_model_gather_equals_reference_and_the_report_tells_what_was_kept(transformer, batch):
    outputs = []
    for backend in ("gather", "reference"):
        branch = RoLAConfig(rank=32, exclude_selected=True)
        config = dataclasses.replace(CONFIG, backend=backend, branch="rola", rola=branch)
        installed = install(transformer, config)
        outputs.append(run(transformer, batch))
        rows = installed.report()
        installed.remove()
        assert all(row["actual_sparsity"] >= row["nominal_sparsity"] - 0.05 for row in rows)
    assert relative_error(*outputs) < 1e-5


def test_each_layer_has_its_own_keep_ratio(transformer, batch):
    ratios = (0.2, 0.4, 0.6, 0.8, 1.0, 0.2)
    config = AttentionConfig(backend="gather", keep_ratios=ratios, block_size_q=16, block_size_k=16)
    installed = install(transformer, config)
    run(transformer, batch)
    rows = installed.report()
    assert [row["keep_ratio"] for row in rows] == list(ratios)
    assert [row["actual_sparsity"] for row in rows] == pytest.approx([1 - math.floor(r * 5) / 5 for r in ratios])
    installed.set_keep_ratio(0.4)
    assert {row["keep_ratio"] for row in installed.report()} == {0.4}
    installed.set_keep_ratio(1.0)
    assert [row["keep_ratio"] for row in installed.report()] == list(ratios)
    installed.remove()
    with pytest.raises(ConfigError, match="keep_ratios.*6"):
        install(transformer, dataclasses.replace(config, keep_ratios=ratios[:3]))


@pytest.mark.parametrize(
    ("wrong", "field"),
    [({"routing_rule": "top_p"}, "top_p"), ({"top_p": 0.5}, "top_p"), ({"routing_rule": "best"}, "routing_rule")]
    + [({"routing_rule": "top_p", "top_p": 0.0}, "top_p"), ({"keep_ratios": (0.5, 0.0)}, "keep_ratios")],
)
def test_wrong_settings_are_refused(wrong, field):
    with pytest.raises(ConfigError, match=field):
        AttentionConfig(**wrong)


def test_a_backend_sees_the_rule_through_its_configuration():
    query, key, value, _ = inputs()
    context = ForwardContext(TokenGrid(105, 1, 1), keep_maps=True)
    get_backend("gather")(query, key, value, context=context, config=CONFIG)
    assert context.maps[0].ragged and torch.equal(context.maps[0].indices, route(query, key, 0.5, 0.6).indices)
