import pytest
import torch
import torch.nn.functional as F

from videospark.attention.block_sparse import gather
from videospark.attention.block_sparse.gather import gather_attention
from videospark.attention.block_sparse.reference import reference_attention
from videospark.attention.routing import block_map
from videospark.core.numerics import relative_error, three_way

LENGTHS = [1, 5, 63, 64, 65, 127, 300, 3 * 5 * 7]


def inputs(length, *, dim=32, dtype=torch.float32, batch=2, heads=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, length, heads, dim, generator=generator).to(dtype) for _ in range(4)]


def route(query, key, keep_ratio, size_q=16, size_k=16):
    return block_map(query, key, keep_ratio=keep_ratio, block_size_q=size_q, block_size_k=size_k)


def dense(query, key, value):
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (query, key, value))).transpose(1, 2)


def with_gradients(function, tensors, grad, **options):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = function(*leaves, **options)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("length", LENGTHS)
def test_keeping_everything_equals_dense(length):
    *qkv, grad = inputs(length)
    chosen = route(qkv[0], qkv[1], 1.0, 32, 16)
    for actual, wanted in zip(
        with_gradients(gather_attention, qkv, grad, block_map=chosen), with_gradients(dense, qkv, grad), strict=True
    ):
        assert torch.allclose(actual, wanted, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize(("dim", "sizes"), [(32, (16, 16)), (64, (64, 64)), (32, (128, 16)), (64, (16, 128))])
@pytest.mark.parametrize("length", LENGTHS)
def test_gather_equals_reference(length, dim, sizes):
    *qkv, grad = inputs(length, dim=dim)
    chosen = route(qkv[0], qkv[1], 0.4, *sizes)
    actual = with_gradients(gather_attention, qkv, grad, block_map=chosen, chunk_elements=200_000)
    wanted = with_gradients(reference_attention, qkv, grad, block_map=chosen)
    for got, want in zip(actual, wanted, strict=True):
        assert torch.allclose(got, want, atol=5e-6, rtol=1e-4)


@pytest.mark.parametrize("length", [5, 65, 300])
def test_bfloat16_is_as_near_to_the_truth_as_bfloat16_allows(length):
    *qkv, grad = inputs(length, dim=64, dtype=torch.bfloat16)
    chosen = route(qkv[0], qkv[1], 0.4)
    mask = chosen.token_mask()

    def plain(query, key, value):
        q, k, v = (t.transpose(1, 2) for t in (query, key, value))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)

    actual = with_gradients(gather_attention, qkv, grad, block_map=chosen)
    low = with_gradients(plain, qkv, grad)
    truth = with_gradients(plain, [t.double() for t in qkv], grad.double())
    for got, near, want in zip(actual, low, truth, strict=True):
        assert got.dtype == torch.bfloat16
        assert relative_error(got, want) < 1e-2
        result = three_way(got, near, want)
        assert result.ok, result.message


def test_gradients_match_finite_differences():
    query, key, value, _ = (t.requires_grad_() for t in inputs(11, dim=3, dtype=torch.float64, batch=1, heads=2))
    chosen = route(query, key, 0.5, 4, 3)
    assert torch.autograd.gradcheck(lambda *qkv: gather_attention(*qkv, chosen, 100), (query, key, value))
    assert torch.autograd.gradcheck(lambda *qkv: reference_attention(*qkv, chosen), (query, key, value))


def test_padding_never_reaches_the_result(monkeypatch):
    *qkv, grad = inputs(70)
    chosen = route(qkv[0], qkv[1], 0.7)
    clean = with_gradients(gather_attention, qkv, grad, block_map=chosen)
    monkeypatch.setattr(gather, "PADDING_VALUE", 1e3)
    poisoned = with_gradients(gather_attention, qkv, grad, block_map=chosen)
    for got, want in zip(poisoned, clean, strict=True):
        assert torch.equal(got, want)


def test_nothing_is_read_past_the_tokens():
    *qkv, _ = inputs(70)
    stores = [torch.full((2, 128, 2, 32), float("nan")) for _ in qkv]
    for store, tensor in zip(stores, qkv, strict=True):
        store[:, :70] = tensor
    views = [store[:, :70] for store in stores]
    chosen = route(*views[:2], 0.7)
    assert torch.equal(gather_attention(*views, chosen), gather_attention(*qkv, route(*qkv[:2], 0.7)))


def test_keys_of_blocks_left_out_get_no_gradient():
    *qkv, grad = inputs(64, batch=1, heads=1)
    chosen = route(qkv[0][:, :16], qkv[1], 0.25)
    queries = [qkv[0][:, :16], *qkv[1:]]
    _, _, grad_k, grad_v = with_gradients(gather_attention, queries, grad[:, :16], block_map=chosen)
    own = int(chosen.indices) * 16
    for got in (grad_k, grad_v):
        assert torch.count_nonzero(got[:, own : own + 16]) > 0
        assert torch.count_nonzero(got) == torch.count_nonzero(got[:, own : own + 16])


def test_batches_and_heads_do_not_mix():
    *qkv, _ = inputs(100)
    whole = gather_attention(*qkv, route(*qkv[:2], 0.4))
    one = [tensor[1:, :, 1:] for tensor in qkv]
    assert torch.allclose(whole[1:, :, 1:], gather_attention(*one, route(*one[:2], 0.4)), atol=1e-6)


def test_repeating_gives_the_same_bits_and_chunks_do_not_matter():
    *qkv, _ = inputs(300)
    chosen = route(*qkv[:2], 0.4)
    once = gather_attention(*qkv, chosen)
    assert torch.equal(once, gather_attention(*qkv, chosen))
    assert torch.allclose(once, gather_attention(*qkv, chosen, 1), atol=1e-6)
