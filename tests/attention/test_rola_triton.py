"""RoLA's Triton kernels against the reference; without a GPU they run under Triton's interpreter."""

from __future__ import annotations

import dataclasses
import importlib.util

import pytest
import torch

from videospark.attention.block_sparse.triton_tiles import SHARED_MEMORY_LIMITS
from videospark.attention.branches import BranchInputs
from videospark.attention.config import RoLAConfig
from videospark.attention.context import ForwardContext
from videospark.attention.grid import TokenGrid
from videospark.attention.rola.frequencies import UNROTATED, select_columns, token_angles
from videospark.attention.rola.fused import LinearForm
from videospark.attention.rola.module import TRITON_HEAD_DIMS, TRITON_RANKS, RoLABranch
from videospark.attention.rola.reference import RoLATensors, reference_rola
from videospark.attention.rola.triton_branch import HEAD_DIMS, RANKS, rola_triton
from videospark.attention.rola.triton_tiles import choose_rola_tiles
from videospark.core.config import ConfigError
from videospark.core.numerics import three_way

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRITON = importlib.util.find_spec("triton") is not None
needs_triton = pytest.mark.skipif(not TRITON, reason="the package triton is not installed")
HEADS = 2
NAMES = ("sparse", "query", "key", "value", "gate", "map_q", "map_k")


def scaled(feature_map, **more):
    return RoLAConfig(rank=32, feature_map=feature_map, merge="scaled", normalizer="mean", **more)


def leaves(config, length, dim, dtype, batch=1, seed=0):
    """sparse, query, key, value, gate and the maps; the gate is left in float32 like the maps."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    tokens = [normal(batch, length, HEADS, dim).to(DEVICE, dtype) for _ in range(4)]
    shape = (HEADS, config.rank, dim) if config.per_head_maps else (config.rank, dim)
    return [*tokens, *(t.to(DEVICE) for t in (normal(batch, length, HEADS).sigmoid(), normal(*shape), normal(*shape)))]


def tables(length, config, dim):
    columns = select_columns(config.frequencies, config.rank, dim)
    angles = token_angles(TokenGrid(length, 1, 1), dim) + token_angles(TokenGrid(1, 1, length), dim)
    chosen = torch.stack([angles[:, max(0, c)] * (c != UNROTATED) for c in columns], dim=1)
    return chosen.cos().float().to(DEVICE), chosen.sin().float().to(DEVICE)


def form_of(config):
    return LinearForm(config.feature_map, config.normalizer, config.merge == "rms_matched")


def reference(config, tensors, cos, sin):
    """The reference with the gate as a given number: hidden states of one channel, g = sigmoid(x)."""
    sparse, query, key, value, gate, map_q, map_k = tensors
    dtype, dim = sparse.dtype, sparse.shape[-1]
    logits = torch.logit(gate.to(torch.promote_types(dtype, torch.float32)))
    hidden = torch.zeros_like(sparse, dtype=logits.dtype)
    hidden = torch.cat((logits.unsqueeze(-1), hidden[..., 1:]), dim=-1).flatten(2)
    weights = RoLATensors(
        map_q, map_k, torch.eye(1, dim, dtype=logits.dtype, device=gate.device),
        torch.zeros(1, HEADS, 1, 1, dtype=logits.dtype, device=gate.device),
        torch.ones(1, HEADS, 1, 1, dtype=logits.dtype, device=gate.device),
    )  # fmt: skip
    return reference_rola(sparse, query, key, value, hidden, cos, sin, weights, config)


def plain(config, tensors, cos, sin):
    """The same steps with every tensor rounded to the dtype of the inputs, as PyTorch would without kernels."""
    sparse, query, key, value, gate, map_q, map_k = tensors
    low = value.dtype
    q = (query.transpose(1, 2) @ map_q.to(low).transpose(-1, -2)).transpose(1, 2)
    k = (key.transpose(1, 2) @ map_k.to(low).transpose(-1, -2)).transpose(1, 2)
    eye = torch.eye(config.rank, device=q.device)
    single = dataclasses.replace(config, per_head_maps=False)
    return reference(single, [sparse, q, k, value, gate, eye, eye], cos, sin)


def kernels(config, tensors, cos, sin):
    return rola_triton(form_of(config), *tensors, cos, sin)


def with_gradients(function, config, tensors, cos, sin, slope):
    own = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = function(config, own, cos, sin)
    return [out.detach(), *torch.autograd.grad(out, own, slope.to(out.dtype))]


@needs_triton
@pytest.mark.parametrize(
    ("config", "length", "dim", "dtype"),
    [
        (RoLAConfig(rank=64), 17, 128, torch.float32),
        (RoLAConfig(rank=32, frequencies="balanced"), 1, 32, torch.float32),
        (RoLAConfig(rank=32, per_head_maps=True), 77, 64, torch.float16),
        (RoLAConfig(rank=64, frequencies="strided"), 130, 64, torch.bfloat16),
        (RoLAConfig(rank=128, per_head_maps=True, feature_map="relu"), 33, 32, torch.float32),
        (RoLAConfig(rank=32, feature_map="softmax"), 40, 256, torch.float16),
        (scaled("silu"), 63, 64, torch.float16),
        (scaled("relu"), 31, 64, torch.float32),
        (scaled("elu", per_head_maps=True), 33, 32, torch.float16),
        (scaled("softmax"), 50, 32, torch.bfloat16),
        (scaled("identity", frequencies="low"), 45, 32, torch.float32),
        (RoLAConfig(rank=32, merge="scaled"), 45, 32, torch.float32),
    ],
    ids=lambda value: (
        f"{value.feature_map}-{value.normalizer}-{value.merge}" if isinstance(value, RoLAConfig) else None
    ),
)
def test_output_and_gradients_equal_the_reference(config, length, dim, dtype):
    tensors, (cos, sin) = leaves(config, length, dim, dtype, batch=2 if length < 40 else 1), tables(length, config, dim)
    slope = torch.randn(tensors[0].shape, generator=torch.Generator().manual_seed(5)).to(DEVICE, dtype)
    actual = with_gradients(kernels, config, tensors, cos, sin, slope)
    low = with_gradients(plain, config, tensors, cos, sin, slope)
    wide = [tensor.double() for tensor in tensors]
    truth = with_gradients(reference, config, wide, cos.double(), sin.double(), slope.double())
    for name, got, near, want in zip(("out", *NAMES), actual, low, truth, strict=True):
        outcome = three_way(got, near, want, 2.0 if name == "out" else 3.0)
        assert outcome.ok, f"{name}: {outcome.message}"
        assert got.dtype == (tensors[NAMES.index(name)].dtype if name != "out" else dtype)


@needs_triton
def test_memory_around_the_tokens_and_layout_change_nothing():
    config = RoLAConfig(rank=32)
    tensors, (cos, sin) = leaves(config, 50, 32, torch.float32), tables(50, config, 32)
    wanted = kernels(config, tensors, cos, sin)
    buried = []
    for tensor in tensors[:5]:
        store = torch.full((tensor.shape[0], 300, *tensor.shape[2:]), float("nan"), device=DEVICE)
        store[:, 100:150] = tensor
        buried.append(store[:, 100:150])
    assert torch.equal(kernels(config, [*buried, *tensors[5:]], cos, sin), wanted)
    turned = [t.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0) for t in tensors[:4]]
    assert torch.equal(kernels(config, [*turned, *tensors[4:]], cos, sin), wanted)


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_unusual_values_stay_finite_and_nan_shows(dtype):
    config = RoLAConfig(rank=32)
    tensors, (cos, sin) = leaves(config, 40, 32, dtype), tables(40, config, 32)
    slope = torch.ones_like(tensors[0])
    for fill in (0.0, 3.0):
        constant = [torch.full_like(tensor, fill) for tensor in tensors[:4]]
        assert all(
            t.isfinite().all() for t in with_gradients(kernels, config, [*constant, *tensors[4:]], cos, sin, slope)
        )
    tensors[1][0, 3, 1, 5] = float("nan")
    out = kernels(config, tensors, cos, sin)
    assert out[0, 3, 1].isnan().all() and out[0, 3, 0].isfinite().all() and out[0, 4].isfinite().all()


@needs_triton
def test_only_gradients_that_are_wanted_are_computed():
    config = RoLAConfig(rank=32)
    tensors, (cos, sin) = leaves(config, 17, 32, torch.float32), tables(17, config, 32)
    slope = torch.ones_like(tensors[0])
    wanted = with_gradients(kernels, config, tensors, cos, sin, slope)
    for place in (0, 4, 5, 6):
        leaf = tensors[place].clone().requires_grad_()
        some = [leaf if i == place else tensor for i, tensor in enumerate(tensors)]
        (got,) = torch.autograd.grad(kernels(config, some, cos, sin), leaf, slope)
        assert torch.equal(got, wanted[1 + place])


@needs_triton
def test_the_branch_of_a_layer_runs_on_the_kernels(monkeypatch):
    config = RoLAConfig(rank=32, frequencies="balanced", merge="scaled", normalizer="mean")
    branch = RoLABranch(config, HEADS, 32, torch.Generator().manual_seed(1)).to(DEVICE)
    sparse, query, key, value = leaves(config, 45, 32, torch.float32)[:4]
    hidden = torch.randn(1, 45, 64, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    angles = token_angles(TokenGrid(3, 3, 5), 32).repeat_interleave(2, dim=1)[None, :, None].to(DEVICE)
    rotary = angles.cos().float(), angles.sin().float()
    outputs = []
    for kind in ("torch", "triton"):
        monkeypatch.setattr(RoLABranch, "kernel_choice", lambda self, device, dtype, kind=kind: (kind, "test"))
        context = ForwardContext(TokenGrid(3, 3, 5))
        made = BranchInputs(
            sparse, query, key, value, query, key, branch.gate(hidden), rotary, slice(0, HEADS), context
        )
        outputs.append(branch(made))
    assert torch.allclose(*outputs, atol=1e-5) and not torch.equal(outputs[0], sparse)


def test_what_has_no_kernel_is_refused():
    config = RoLAConfig(rank=32)
    tensors, (cos, sin) = leaves(config, 5, 32, torch.float32), tables(5, config, 32)
    with pytest.raises(ConfigError, match="normalizer"):
        rola_triton(LinearForm("relu", "denominator", matched=False), *tensors, cos, sin)
    with pytest.raises(ConfigError, match="dtype"):
        kernels(config, [t.double() for t in tensors], cos, sin)
    with pytest.raises(ConfigError, match="rank"):
        kernels(config, [*tensors[:5], *(t[:16] for t in tensors[5:])], cos[:, :8], sin[:, :8])
    assert RANKS == TRITON_RANKS and HEAD_DIMS == TRITON_HEAD_DIMS


@pytest.mark.parametrize("kernel", ["summary", "outer", "merge", "grad_query", "grad_key_value"])
def test_tiles_divide_the_head_everywhere(kernel):
    for shared_memory in SHARED_MEMORY_LIMITS.values():
        for rank in RANKS:
            for dim in HEAD_DIMS:
                for item_bytes in (2, 4):
                    tiles = choose_rola_tiles(
                        kernel, rank=rank, head_dim=dim, item_bytes=item_bytes, shared_memory=shared_memory
                    )
                    assert dim % tiles.columns == 0 and tiles.columns >= 16 and tiles.tokens >= 16
