"""The Triton kernels against the reference; without a GPU they run under Triton's interpreter."""

import importlib.util
import math

import pytest
import torch
import torch.nn.functional as F

from videospark.attention import AttentionConfig, get_backend
from videospark.attention.backends import checked_backend
from videospark.attention.block_sparse.reference import reference_attention
from videospark.attention.block_sparse.triton_backend import (
    InvertedMap,
    invert_map,
    triton_attention,
    triton_attention_int8,
)
from videospark.attention.block_sparse.triton_tiles import SHARED_MEMORY_LIMITS, choose_tiles
from videospark.attention.context import ForwardContext
from videospark.attention.grid import TokenGrid
from videospark.attention.routing import BlockMap, block_map
from videospark.core.config import ConfigError
from videospark.core.numerics import relative_error, three_way

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not TRITON, reason="the package triton is not installed")


def inputs(length, *, dim=64, dtype=torch.float32, batch=2, heads=2, seed=0, length_k=None):
    generator = torch.Generator().manual_seed(seed)
    lengths = (length, length_k or length, length_k or length, length)
    return [torch.randn(batch, n, heads, dim, generator=generator).to(DEVICE, dtype) for n in lengths]


def route(query, key, keep_ratio=0.4, size_q=16, size_k=16):
    return block_map(query, key, keep_ratio=keep_ratio, block_size_q=size_q, block_size_k=size_k)


def plain(query, key, value, chosen):
    """Output and natural LSE of masked attention, in the precision of the inputs."""
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    mask = chosen.token_mask()
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    scores = (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).masked_fill(~mask, -math.inf)
    return out, scores.logsumexp(dim=-1)


def results(function, tensors, grad, chosen, grad_lse=None):
    """Output, LSE and the gradients of query, key, value of a loss of both."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out, lse = function(*leaves, chosen)
    loss = (out * grad).sum() + (0 if grad_lse is None else (lse * grad_lse).sum())
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def assert_as_good_as_plain(tensors, grad, chosen, grad_lse=None):
    actual = results(triton_attention, tensors, grad, chosen, grad_lse)
    low = results(plain, tensors, grad, chosen, grad_lse)
    wide_lse = None if grad_lse is None else grad_lse.double()
    truth = results(plain, [tensor.double() for tensor in tensors], grad.double(), chosen, wide_lse)
    for name, got, near, want, factor in zip(
        ["o", "lse", "dq", "dk", "dv"], actual, low, truth, (2, 2, 3, 3, 3), strict=True
    ):
        outcome = three_way(got, near, want, factor)
        assert outcome.ok, f"{name}: {outcome.message}"


@needs_triton
@pytest.mark.parametrize(
    ("length", "dim", "sizes", "dtype"),
    [
        (1, 64, (16, 16), torch.float32),
        (65, 64, (64, 64), torch.float16),
        (105, 128, (32, 48), torch.bfloat16),
        (130, 64, (96, 16), torch.float16),
        (140, 128, (128, 64), torch.float32),
        (129, 64, (16, 128), torch.bfloat16),
        (70, 32, (16, 32), torch.float32),
        (40, 256, (16, 16), torch.float16),
    ],
)
def test_output_lse_and_gradients_equal_the_reference(length, dim, sizes, dtype):
    *qkv, grad = inputs(length, dim=dim, dtype=dtype, batch=1)
    chosen = route(*qkv[:2], 0.5, *sizes)
    lse_grad = torch.randn(1, 2, length, generator=torch.Generator().manual_seed(9)).to(DEVICE)
    assert_as_good_as_plain(qkv, grad, chosen, lse_grad)


@needs_triton
@pytest.mark.slow
def test_a_thousand_tokens():
    *qkv, grad = inputs(1000, batch=1)
    assert_as_good_as_plain(qkv, grad, route(*qkv[:2], 0.1))


@needs_triton
def test_queries_and_keys_of_different_lengths():
    *qkv, grad = inputs(50, length_k=83, heads=3, batch=1)
    assert_as_good_as_plain(qkv, grad, route(*qkv[:2], 0.5, 16, 32))


@needs_triton
def test_key_blocks_that_nobody_keeps_get_no_gradient():
    *qkv, grad = inputs(64, batch=1, heads=1)
    indices = torch.tensor([1, 1, 1, 1], device=DEVICE).view(1, 1, 4, 1)
    *_, grad_k, grad_v = results(triton_attention, qkv, grad, BlockMap(indices, 16, 16, 64, 64))
    for got in (grad_k, grad_v):
        assert torch.count_nonzero(got[:, 16:32]) == got[:, 16:32].numel()
        assert torch.count_nonzero(got) == torch.count_nonzero(got[:, 16:32])


@needs_triton
def test_only_gradients_that_are_wanted_are_computed():
    query, key, value, grad = inputs(40)
    chosen = route(query, key)
    wanted = results(triton_attention, (query, key, value), grad, chosen)[2]
    (got,) = torch.autograd.grad(triton_attention(query.requires_grad_(), key, value, chosen)[0], query, grad)
    assert torch.equal(got, wanted)


def test_inverted_lists_hold_every_pair_once_in_order():
    query, key, *_ = inputs(200, dim=16, heads=3)
    chosen = route(query, key, 0.3, 16, 32)
    inverted = invert_map(chosen)
    assert isinstance(inverted, InvertedMap) and inverted.queries.dtype == inverted.first.dtype == torch.int32
    for batch in range(2):
        for head in range(3):
            first, queries = inverted.first[batch, head].tolist(), inverted.queries[batch, head].tolist()
            assert first[0] == 0 and first[-1] == len(queries)
            for block in range(chosen.num_key_blocks):
                keeps = (chosen.indices[batch, head] == block).any(dim=-1).nonzero().flatten().tolist()
                assert queries[first[block] : first[block + 1]] == keeps


@needs_triton
@pytest.mark.parametrize("sizes", [(16, 16), (48, 32)])
def test_int8_equals_attention_over_the_rounded_numbers(sizes):
    query, key, value, _ = inputs(105)
    # A strong mean is what smoothing is there for; without it the scores would be lost.
    key = key + 20 * torch.randn(1, 1, 2, 64, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    chosen = route(query, key, 0.4, *sizes)
    out, lse = triton_attention_int8(query, key, value, chosen)
    mean = key.mean(dim=1, keepdim=True)
    rounded = [round_blocks(query, sizes[0]), round_blocks(key - mean, sizes[1])]
    wanted, partial = plain(*rounded, value, chosen)
    shift = (query * mean).sum(dim=-1).transpose(1, 2) / 8
    assert relative_error(out, wanted) < 1e-5
    assert relative_error(lse, partial + shift) < 1e-5
    exact, exact_lse = plain(query, key, value, chosen)
    assert relative_error(out, exact) < 0.03
    assert torch.allclose(lse, exact_lse, atol=0.1)


def round_blocks(tokens, size):
    parts = []
    for part in tokens.split(size, dim=1):
        scale = part.abs().amax(dim=(1, 3), keepdim=True) / 127
        parts.append((part / scale).round() * scale)
    return torch.cat(parts, dim=1)


@needs_triton
def test_int8_shows_nan_and_stays_finite_at_zero():
    query, key, value, _ = inputs(40)
    chosen = route(query, key)
    out, _ = triton_attention_int8(torch.zeros_like(query), torch.zeros_like(key), value, chosen)
    assert torch.isfinite(out).all()
    query[0, 3, 1, 5] = math.nan
    out, _ = triton_attention_int8(query, key, value, chosen)
    assert torch.isnan(out[0, 3, 1]).all() and torch.isfinite(out[1]).all()


@needs_triton
def test_keeping_everything_is_dense_attention():
    query, key, value, _ = inputs(70)
    config = AttentionConfig(backend="triton", keep_ratio=1.0)
    context = ForwardContext(grid=TokenGrid(70, 1, 1))
    out = get_backend("triton")(query, key, value, context=context, config=config)
    direct, _ = triton_attention(query, key, value, route(query, key, 1.0, 64, 64))
    wanted = reference_attention(query, key, value, route(query, key, 1.0))
    assert torch.allclose(out, wanted, atol=2e-6) and torch.allclose(direct, wanted, atol=2e-6)


@pytest.mark.parametrize("name", ["triton", "triton_int8"])
def test_refused_with_reasons_and_alternatives(name, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    config = AttentionConfig(backend=name)
    with pytest.raises(ConfigError, match=r"device is cpu, it needs cuda.*Backends that can: .*gather"):
        checked_backend(config, device="cpu", dtype="bfloat16", head_dim=64)
    with pytest.raises(ConfigError, match="head size is 80"):
        checked_backend(config, device="cuda", dtype="bfloat16", head_dim=80)
    with pytest.raises(ConfigError, match="dtype is float64"):
        checked_backend(config, device="cuda", dtype="float64", head_dim=64)


def test_absence_of_triton_is_a_reason(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "triton" else find(name, *rest)
    )
    with pytest.raises(ConfigError, match="the package triton is not installed"):
        checked_backend(AttentionConfig(backend="triton"), device="cuda", dtype="bfloat16", head_dim=64)


@needs_triton
def test_a_map_of_other_tokens_is_refused():
    query, key, value, _ = inputs(40)
    with pytest.raises(ConfigError, match="block_map"):
        triton_attention(query, key, value, route(query[:, :30], key[:, :30]))


@pytest.mark.parametrize("kernel", ["forward", "grad_query", "grad_key_value"])
@pytest.mark.parametrize("target", SHARED_MEMORY_LIMITS)
def test_tiles_divide_their_blocks(kernel, target):
    for size_q in range(16, 129, 16):
        for size_k in range(16, 129, 16):
            for dim, item_bytes in ((32, 2), (64, 2), (128, 2), (256, 2), (128, 4)):
                tiles = choose_tiles(
                    kernel, block_size_q=size_q, block_size_k=size_k, head_dim=dim, item_bytes=item_bytes,
                    shared_memory=SHARED_MEMORY_LIMITS[target],
                )  # fmt: skip
                assert size_q % tiles.tile_q == 0 and size_k % tiles.tile_k == 0
                assert min(tiles.tile_q, tiles.tile_k) >= 16 and tiles.num_warps in (1, 2, 4, 8)
