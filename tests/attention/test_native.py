"""The C++ kernel against the formulas in float32, by the rule for low precision; and what happens without it."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from videospark.attention import AttentionConfig, install
from videospark.attention.auto import choose_backend
from videospark.attention.backends import checked_backend
from videospark.attention.block_sparse import native
from videospark.attention.block_sparse.native import native_attention
from videospark.attention.routing import BlockMap, block_map
from videospark.core.config import ConfigError
from videospark.core.numerics import relative_error, three_way
from videospark.tiny.components import LATENT_CHANNELS, build_transformer

needs_kernel = pytest.mark.skipif(bool(native.unavailable()), reason="; ".join(native.unavailable()))

LENGTHS = [1, 5, 63, 64, 65, 127, 1000, 3 * 5 * 7]
SIZES = [(16, 16), (64, 64), (128, 64), (128, 128), (16, 128), (128, 16), (48, 80)]


def inputs(length, *, dim=64, batch=2, heads=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, length, heads, dim, generator=generator).bfloat16() for _ in range(4)]


def plain(query, key, value, mask):
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)


def check(query, key, value, chosen):
    actual = native_attention(query, key, value, chosen)
    mask = chosen.token_mask()
    truth = plain(query.double(), key.double(), value.double(), mask)
    assert actual.dtype == torch.bfloat16 and actual.shape == query.shape
    assert relative_error(actual, truth) < 1e-2
    result = three_way(actual, plain(query, key, value, mask), truth)
    assert result.ok, result.message


@needs_kernel
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("keep", [0.3, 1.0])
def test_odd_lengths_and_block_sizes(length, sizes, keep):
    query, key, value, _ = inputs(length)
    check(query, key, value, block_map(query, key, keep_ratio=keep, block_size_q=sizes[0], block_size_k=sizes[1]))


@needs_kernel
@pytest.mark.parametrize("dim", [16, 32, 48, 80, 96, 128, 256])
def test_head_sizes(dim):
    query, key, value, _ = inputs(130, dim=dim)
    check(query, key, value, block_map(query, key, keep_ratio=0.5, block_size_q=32, block_size_k=32))


@needs_kernel
def test_other_numbers_of_queries_than_of_keys():
    query, key, value = inputs(70)[0], *inputs(333, seed=1)[1:3]
    check(query, key, value, block_map(query, key, keep_ratio=0.5, block_size_q=32, block_size_k=64))


@needs_kernel
def test_layouts():
    query, key, value, _ = inputs(90, dim=32)
    chosen = block_map(query, key, keep_ratio=0.4, block_size_q=32, block_size_k=16)
    wanted = native_attention(query, key, value, chosen)
    by_head = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (query, key, value)]
    assert torch.equal(native_attention(*by_head, chosen), wanted)
    apart = [torch.stack((tensor, tensor), dim=-1)[..., 0] for tensor in (query, key, value)]
    assert apart[0].stride(-1) == 2 and torch.equal(native_attention(*apart, chosen), wanted)
    packed = torch.cat((query, key, value), dim=-1).chunk(3, dim=-1)
    assert torch.equal(native_attention(*packed, chosen), wanted)


@needs_kernel
def test_rows_may_keep_different_numbers_of_blocks():
    query, key, value, _ = inputs(200, dim=32, batch=1, heads=2)
    none = 7  # blocks of 32 keys
    rows = [[0, 3, 6], [2, none, none], [5, 6, none], [1, 2, 3], [6, none, none], [0, none, none], [4, 5, 6]]
    indices = torch.tensor([[rows, rows[::-1]]])
    check(query, key, value, BlockMap(indices, 32, 32, 200, 200, ragged=True))


@needs_kernel
def test_growing_scores_are_rescaled():
    # Each run of keys has scores far above those of the run before it.
    query, key, value, _ = inputs(1200, dim=32, batch=1, heads=1)
    key = key * torch.linspace(0.01, 6, 1200)[None, :, None, None].bfloat16()
    query = query * 3
    check(query, key, value, block_map(query, key, keep_ratio=1.0, block_size_q=64, block_size_k=64))


@needs_kernel
@pytest.mark.parametrize("fill", [0.0, 1.0, -3.0, 100.0])
def test_constants_stay_finite(fill):
    query = key = value = torch.full((1, 77, 2, 32), fill).bfloat16()
    chosen = block_map(query, key, keep_ratio=0.5, block_size_q=32, block_size_k=16)
    out = native_attention(query, key, value, chosen)
    assert torch.allclose(out, value)


@needs_kernel
def test_a_nan_stays_in_the_rows_that_see_it():
    query, key, value, _ = inputs(96, dim=32, batch=1, heads=1)
    chosen = BlockMap(torch.tensor([[[[0], [1], [2]]]]), 32, 32, 96, 96)
    value[0, 40] = float("nan")
    query[0, 70] = float("nan")
    broken = native_attention(query, key, value, chosen)[0, :, 0].isnan().any(dim=-1)
    assert broken[32:64].all() and broken[70] and not broken[:32].any() and broken[64:].sum() == 1


def gradients(function, qkv, grad):
    leaves = [tensor.clone().requires_grad_() for tensor in qkv]
    return torch.autograd.grad(function(*leaves), leaves, grad)


def check_gradients(qkv, grad, chosen):
    mask = chosen.token_mask()
    actual = gradients(lambda *x: native_attention(*x, chosen), qkv, grad)
    low = gradients(lambda *x: plain(*x, mask), qkv, grad)
    truth = gradients(lambda *x: plain(*x, mask), [tensor.double() for tensor in qkv], grad.double())
    for name, got, of_plain, wanted in zip(("query", "key", "value"), actual, low, truth, strict=True):
        assert got.dtype == torch.bfloat16 and got.shape == wanted.shape
        if wanted.abs().max() < 1e-12:
            # Over one key alone the weight is 1, whatever the scores.
            assert not got.any(), name
            continue
        assert relative_error(got, wanted) < 2e-2, name
        result = three_way(got, of_plain, wanted, 3.0)
        assert result.ok, f"{name}: {result.message}"


@needs_kernel
@pytest.mark.parametrize("sizes", [(16, 16), (128, 64), (16, 128), (48, 80)])
@pytest.mark.parametrize("length", [1, 5, 63, 64, 65, 127, 400])
@pytest.mark.parametrize("keep", [0.3, 1.0])
def test_gradients(length, sizes, keep):
    *qkv, grad = inputs(length)
    check_gradients(
        qkv, grad, block_map(*qkv[:2], keep_ratio=keep, block_size_q=sizes[0], block_size_k=sizes[1])
    )  # fmt: skip


@needs_kernel
@pytest.mark.parametrize("dim", [16, 48, 128, 256])
def test_gradients_of_head_sizes(dim):
    *qkv, grad = inputs(130, dim=dim)
    check_gradients(qkv, grad, block_map(*qkv[:2], keep_ratio=0.5, block_size_q=32, block_size_k=32))


@needs_kernel
def test_gradients_with_rows_of_different_lengths_and_keys_that_nobody_attends_to():
    *qkv, grad = inputs(200, dim=32, batch=1, heads=2)
    none = 7  # blocks of 32 keys; nobody keeps block 4
    rows = [[0, 3, 6], [2, none, none], [5, 6, none], [1, 2, 3], [6, none, none], [0, none, none], [3, 5, 6]]
    chosen = BlockMap(torch.tensor([[rows, rows[::-1]]]), 32, 32, 200, 200, ragged=True)
    check_gradients(qkv, grad, chosen)
    for part in gradients(lambda *x: native_attention(*x, chosen), qkv, grad)[1:]:
        assert not part[:, 128:160].any() and part[:, :128].any()


@needs_kernel
def test_gradients_with_other_numbers_of_queries_than_of_keys_and_other_layouts():
    (query, _, _, grad), (key, value) = inputs(70), inputs(333, seed=1)[1:3]
    chosen = block_map(query, key, keep_ratio=0.5, block_size_q=32, block_size_k=64)
    check_gradients([query, key, value], grad, chosen)
    wanted = gradients(lambda *x: native_attention(*x, chosen), (query, key, value), grad)
    turned = [tensor.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for tensor in (query, key, value, grad)]
    again = gradients(lambda *x: native_attention(*x, chosen), turned[:3], turned[3])
    assert all(torch.equal(a, b) for a, b in zip(again, wanted, strict=True))


@needs_kernel
def test_gradients_of_scores_far_below_zero_stay_finite():
    # The short last block is filled up with keys of zero, whose scores would be far above all others.
    *qkv, grad = inputs(40, dim=32, batch=1, heads=1)
    qkv[0], qkv[1] = torch.full_like(qkv[0], 30.0), torch.full_like(qkv[1], -30.0) + qkv[1]
    chosen = block_map(*qkv[:2], keep_ratio=1.0, block_size_q=32, block_size_k=32)
    for part in gradients(lambda *x: native_attention(*x, chosen), qkv, grad):
        assert part.isfinite().all()


@needs_kernel
def test_a_nan_reaches_the_gradients():
    *qkv, grad = inputs(96, dim=32, batch=1, heads=1)
    chosen = BlockMap(torch.tensor([[[[0], [1], [2]]]]), 32, 32, 96, 96)
    grad[0, 40] = float("nan")
    for part in gradients(lambda *x: native_attention(*x, chosen), qkv, grad):
        broken = part[0, :, 0].isnan().any(dim=-1)
        assert broken[32:64].any() and not broken[:32].any() and not broken[64:].any()


@needs_kernel
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_number_of_threads_changes_nothing(threads):
    *qkv, grad = inputs(300)
    chosen = block_map(*qkv[:2], keep_ratio=0.4, block_size_q=32, block_size_k=16)
    slopes = gradients(lambda *x: native_attention(*x, chosen), qkv, grad)
    wanted, before = native_attention(*qkv, chosen), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(native_attention(*qkv, chosen), wanted)
        again = gradients(lambda *x: native_attention(*x, chosen), qkv, grad)
        assert all(torch.equal(a, b) for a, b in zip(again, slopes, strict=True))
    finally:
        torch.set_num_threads(before)


CONFIG = AttentionConfig("auto", keep_ratio=0.1)


def test_auto_takes_it_where_it_runs_and_says_why_not(monkeypatch):
    monkeypatch.setattr("videospark.attention.auto._has_amx", lambda: False)
    monkeypatch.setattr(native, "unavailable", lambda: ())
    assert choose_backend(CONFIG, device="cpu", dtype="bfloat16", head_dim=128).name == "native"
    other = choose_backend(CONFIG, device="cpu", dtype="float32", head_dim=128)
    assert other.name == "gather" and "native cannot run: dtype is float32" in other.reason
    monkeypatch.setattr(native, "unavailable", lambda: ("no C++ compiler",))
    other = choose_backend(CONFIG, device="cpu", dtype="bfloat16", head_dim=128)
    assert other.name == "gather" and "no C++ compiler" in other.reason
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler.*gather"):
        checked_backend(AttentionConfig("native", keep_ratio=0.1), device="cpu", dtype="bfloat16", head_dim=128)


def test_auto_prefers_gather_where_there_is_amx(monkeypatch):
    monkeypatch.setattr("videospark.attention.auto._has_amx", lambda: True)
    assert choose_backend(CONFIG, device="cpu", dtype="bfloat16", head_dim=128).name == "gather"


@needs_kernel
def test_takes_float32_weights_under_autocast():
    torch.manual_seed(0)
    model = build_transformer()
    torch.nn.init.normal_(model.proj_out.weight, std=0.05)
    batch = {
        "hidden_states": torch.randn(1, LATENT_CHANNELS, 5, 16, 16),
        "encoder_hidden_states": torch.randn(1, 24, 128),
        "timestep": torch.tensor([500.0]),
    }
    settings = {"keep_ratio": 0.3, "block_size_q": 16, "block_size_k": 16}
    with pytest.raises(ConfigError, match="dtype is float32"):
        install(model, AttentionConfig("native", **settings))
    outputs = {}
    for backend in ("native", "gather"):
        handle = install(model, AttentionConfig(backend, **settings), compute_dtype=torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(**batch, return_dict=False)[0]
        out.float().square().mean().backward()
        outputs[backend] = out.detach(), model.blocks[0].attn1.to_q.weight.grad
        model.zero_grad()
        handle.remove()
    for native_one, gather_one in zip(*outputs.values(), strict=True):
        assert gather_one.abs().max() > 0 and relative_error(native_one, gather_one) < 0.05


@needs_kernel
def test_values_of_another_dtype_are_refused():
    x = torch.randn(1, 32, 1, 16)
    chosen = BlockMap(torch.zeros(1, 1, 2, 1, dtype=torch.int64), 16, 16, 32, 32)
    with pytest.raises(TypeError, match="value: got torch.float32"):
        native_attention(x, x, x, chosen)
