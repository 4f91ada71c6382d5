"""RoLA and SLA: the reference against the published formula, the chunked path against the reference, gradients too."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F

from videospark.attention.config import FEATURE_MAPS, POSITIVE_FEATURE_MAPS, RoLAConfig, SLAConfig
from videospark.attention.grid import TokenGrid
from videospark.attention.rola.frequencies import (
    UNROTATED,
    axis_columns,
    select_columns,
    tables_from_model,
    tables_from_rounded_angles,
    token_angles,
)
from videospark.attention.rola.fused import LinearForm, linear_branch
from videospark.attention.rola.reference import RoLATensors, reference_rola
from videospark.attention.routing import block_map
from videospark.attention.sla.reference import reference_sla
from videospark.core.config import ConfigError
from videospark.core.numerics import three_way
from videospark.tiny.components import build_transformer

BATCH, HEADS, DIM = 2, 3, 32
OPTIONS = [
    RoLAConfig(rank=16),
    RoLAConfig(rank=10, frequencies="balanced", per_head_maps=True),
    RoLAConfig(rank=16, exclude_selected=True),
    RoLAConfig(rank=16, merge="scaled", normalizer="mean", feature_map="identity"),
    *(
        RoLAConfig(rank=16, merge="scaled", normalizer="denominator", feature_map=name, exclude_selected=excluded)
        for name, excluded in itertools.product(POSITIVE_FEATURE_MAPS, (False, True))
    ),
]


def inputs(length, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (BATCH, length, HEADS, DIM)
    sparse, query, key, value = (torch.randn(shape, generator=generator).to(dtype) for _ in range(4))
    hidden = torch.randn(BATCH, length, HEADS * DIM, generator=generator).to(dtype)
    return sparse, query, key, value, hidden


def tensors(config, seed=1):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=0.3):
        return scale * torch.randn(*shape, generator=generator)

    shape = (HEADS, config.rank, DIM) if config.per_head_maps else (config.rank, DIM)
    scale = None if config.merge == "rms_matched" else normal(1, HEADS, 1, 1)
    return RoLATensors(normal(*shape), normal(*shape), normal(1, DIM), normal(1, HEADS, 1, 1), scale)


def tables(length, config):
    columns = select_columns(config.frequencies, config.rank, DIM)
    angles = token_angles(TokenGrid(1, 1, length), DIM) + token_angles(TokenGrid(length, 1, 1), DIM)
    chosen = torch.stack([angles[:, max(0, c)] * (c != UNROTATED) for c in columns], dim=1)
    return chosen.cos().float(), chosen.sin().float()


def chosen_map(query, key):
    return block_map(query, key, keep_ratio=0.4, block_size_q=32, block_size_k=16)


def by_chunks(config, data, weights, cos, sin, **options):
    sparse, query, key, value, hidden = data
    own = hidden.unflatten(-1, (HEADS, DIM))
    gate = ((own @ weights.gate_proj[0].to(own.dtype)).float() + weights.gate_bias.flatten()).sigmoid()
    if weights.output_scale is not None:
        gate = gate * weights.output_scale.flatten()
    excluded = chosen_map(query, key) if config.exclude_selected else None
    form = LinearForm(config.feature_map, config.normalizer, config.merge == "rms_matched")
    return linear_branch(
        form, sparse, query, key, value,
        gate=gate, map_q=weights.proj_q, map_k=weights.proj_k, cos=cos, sin=sin, excluded=excluded, **options,
    )  # fmt: skip


def by_reference(config, data, weights, cos, sin):
    selected = chosen_map(data[1], data[2]).token_mask() if config.exclude_selected else None
    return reference_rola(*data, cos, sin, weights, config, selected)


def test_reference_equals_the_published_formula():
    """O = O_s + sigmoid(w_g x + b) sqrt(mean O_s^2 + 1e-5) RMSNorm(sum_j <R silu(W_q q_i), R silu(W_k k_j)> v_j)."""
    config, length = RoLAConfig(rank=16), 37
    sparse, query, key, value, hidden = data = inputs(length)
    weights = tensors(config)
    # The first rank / 2 columns of the table, written as complex numbers.
    angles = token_angles(TokenGrid(1, length, 1), DIM)[:, :8]
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex64)[:, None]

    def turned(x, weight):
        pairs = F.silu(x @ weight.T).unflatten(-1, (8, 2)).contiguous()
        return torch.view_as_complex(pairs) * turn

    q, k = turned(query, weights.proj_q), turned(key, weights.proj_k)
    similarity = torch.einsum("bihc,bjhc->bhij", q, k.conj()).real
    linear = torch.einsum("bhij,bjhd->bihd", similarity, value)
    normal = linear / (linear.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()
    own = hidden.unflatten(-1, (HEADS, DIM))
    gate = torch.sigmoid(own @ weights.gate_proj.T + weights.gate_bias.view(1, 1, HEADS, 1))
    expected = sparse + gate * (sparse.square().mean(-1, keepdim=True) + 1e-5).sqrt() * normal
    actual = by_reference(config, data, weights, angles.cos().float(), angles.sin().float())
    assert float((actual - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("length", [5, 77])
@pytest.mark.parametrize("config", OPTIONS, ids=lambda c: f"{c.feature_map}-{c.normalizer}-{c.exclude_selected}")
def test_chunks_equal_the_reference_with_gradients(config, length):
    weights, (cos, sin) = tensors(config), tables(length, config)
    leaves = [t.double().requires_grad_() for t in inputs(length)]
    names = [f.name for f in dataclasses.fields(weights) if getattr(weights, f.name) is not None]
    wide = dataclasses.replace(weights, **{n: getattr(weights, n).double().requires_grad_() for n in names})
    slope = torch.randn(BATCH, length, HEADS, DIM, generator=torch.Generator().manual_seed(5)).double()
    wanted = [*leaves, *(getattr(wide, name) for name in names)]

    expected = by_reference(config, leaves, wide, cos.double(), sin.double())
    actual = by_chunks(config, leaves, wide, cos.double(), sin.double(), chunk_elements=2000)
    # The root mean square has an epsilon of the working precision, which the chunked path takes from its dtype.
    assert torch.allclose(actual, expected, rtol=1e-5, atol=1e-6)
    for name, a, b in zip(
        ["sparse", "query", "key", "value", "hidden", *names],
        torch.autograd.grad(actual, wanted, slope, allow_unused=True),
        torch.autograd.grad(expected, wanted, slope, allow_unused=True),
        strict=True,
    ):
        scale = float(b.abs().max())
        assert float((a - b).abs().max()) <= 1e-5 * max(scale, 1e-3), name


@pytest.mark.parametrize("config", OPTIONS[:4], ids=lambda c: f"{c.feature_map}-{c.normalizer}-{c.exclude_selected}")
def test_chunks_in_bfloat16_are_as_near_as_plain_bfloat16(config):
    length = 77
    weights, (cos, sin) = tensors(config), tables(length, config)
    low = inputs(length, torch.bfloat16)
    exact = by_reference(config, [t.double() for t in low], weights, cos.double(), sin.double())

    def plain():
        """The reference's steps with every tensor rounded to bfloat16 in between."""
        given = {f.name: getattr(weights, f.name) for f in dataclasses.fields(weights)}
        rounded = RoLATensors(**{n: t if t is None else t.bfloat16().float() for n, t in given.items()})
        sparse, query, key, value, hidden = low
        q = (query.transpose(1, 2) @ rounded.proj_q.bfloat16().transpose(-1, -2)).transpose(1, 2)
        k = (key.transpose(1, 2) @ rounded.proj_k.bfloat16().transpose(-1, -2)).transpose(1, 2)
        eye = torch.eye(config.rank)
        same = dataclasses.replace(rounded, proj_q=eye, proj_k=eye)
        selected = chosen_map(query, key).token_mask() if config.exclude_selected else None
        single = dataclasses.replace(config, per_head_maps=False)
        return reference_rola(sparse, q, k, value, hidden, cos, sin, same, single, selected)

    check = three_way(by_chunks(config, low, weights, cos, sin), plain(), exact)
    assert check, check.message


@pytest.mark.parametrize("feature_map", ["softmax", "elu", "relu"])
@pytest.mark.parametrize("exclude_selected", [False, True])
def test_sla_chunks_equal_the_reference_with_gradients(feature_map, exclude_selected):
    config = SLAConfig(feature_map, exclude_selected)
    data = [t.double().requires_grad_() for t in inputs(77)[:4]]
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(DIM, DIM, generator=generator).double().requires_grad_()
    bias = torch.randn(DIM, generator=generator).double().requires_grad_()
    kept = chosen_map(data[1].detach(), data[2].detach())
    expected = reference_sla(*data, weight, bias, config, kept.token_mask() if exclude_selected else None)
    form = LinearForm(feature_map, "denominator", matched=False)
    actual = linear_branch(
        form, *data, out_weight=weight, out_bias=bias, excluded=kept if exclude_selected else None, chunk_elements=2000
    )
    assert torch.allclose(actual, expected, rtol=1e-9, atol=1e-9)
    slope = torch.randn(expected.shape, generator=generator).double()
    wanted = [*data, weight, bias]
    for a, b in zip(
        torch.autograd.grad(actual, wanted, slope), torch.autograd.grad(expected, wanted, slope), strict=True
    ):
        assert torch.allclose(a, b, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("choice", ["prefix", "balanced", "low", "strided"])
def test_frequencies_of_wan_heads(choice):
    time, height, width = axis_columns(128)
    assert (time, height, width) == (22, 21, 21)
    columns = select_columns(choice, 64, 128)
    assert len(columns) == len(set(columns)) == 32
    axes = [sum(low <= c < high for c in columns) for low, high in ((0, 22), (22, 43), (43, 64))]
    assert axes == ([22, 10, 0] if choice == "prefix" else [11, 10, 11])
    if choice == "low":
        assert max(columns) == 63
    assert select_columns(choice, 256, 128).count(UNROTATED) == 64


def test_unknown_frequencies_are_refused():
    with pytest.raises(ConfigError, match="frequencies"):
        select_columns("fast", 64, 128)


def test_tables_equal_those_of_the_model():
    transformer = build_transformer()
    cos, sin = transformer.rope(torch.zeros(1, transformer.config.in_channels, 3, 8, 12))
    columns = select_columns("balanced", 32, 64)
    ours = tables_from_model(cos, sin, columns)
    angles = token_angles(TokenGrid(3, 4, 6), 64)[:, list(columns)]
    assert torch.allclose(ours[0], angles.cos().float(), atol=1e-5)
    assert torch.allclose(ours[1], angles.sin().float(), atol=1e-5)
    rounded = tables_from_rounded_angles(TokenGrid(3, 4, 6), None, 64, columns, torch.device("cpu"))
    assert torch.equal(rounded[0], angles.bfloat16().float().cos())


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": 3},
        {"rank": True},
        {"feature_map": "gelu"},
        {"normalizer": "denominator", "merge": "scaled"},
        {"normalizer": "mean"},
    ],
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(ConfigError):
        RoLAConfig(**wrong)


def test_every_feature_map_is_known_to_the_reference():
    for name in FEATURE_MAPS:
        config = RoLAConfig(rank=8, feature_map=name, merge="scaled", normalizer="mean")
        data = inputs(5)
        assert by_reference(config, data, tensors(config), *tables(5, config)).isfinite().all()
