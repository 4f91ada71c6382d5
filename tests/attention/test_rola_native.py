"""RoLA's C++ kernel against the branch in float64, by the rule for low precision."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from videospark.attention.config import RoLAConfig
from videospark.attention.rola import native
from videospark.attention.rola.fused import LinearForm, linear_branch
from videospark.attention.rola.module import RoLABranch
from videospark.attention.rola.native import rola_native
from videospark.core.numerics import relative_error, three_way

pytestmark = pytest.mark.skipif(native.unavailable() is not None, reason=native.unavailable() or "")

RMS = LinearForm("silu", "rms", matched=True)


def inputs(length, *, dim=64, rank=32, heads=3, batch=2, per_head=False):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    tensors = [random(batch, length, heads, dim).bfloat16() for _ in range(4)]
    maps = [random(*((heads,) if per_head else ()), rank, dim) * dim**-0.5 for _ in range(2)]
    angles = random(length, rank // 2) * 5
    gate = random(batch, length, heads).sigmoid()
    return tensors, gate, maps, (angles.cos(), angles.sin())


def check(form, length, **sizes):
    (sparse, query, key, value), gate, maps, tables = inputs(length, **sizes)
    actual = rola_native(form, sparse, query, key, value, gate, *maps, *tables)
    options = {"gate": gate, "map_q": maps[0], "map_k": maps[1], "cos": tables[0], "sin": tables[1]}
    low = linear_branch(form, sparse, query, key, value, **options)
    wide = {name: tensor.double() for name, tensor in options.items()}
    truth = linear_branch(form, *(tensor.double() for tensor in (sparse, query, key, value)), **wide)
    assert actual.dtype == torch.bfloat16 and actual.shape == query.shape
    # Enough of the output is the branch for an error in it to show.
    assert relative_error(truth, sparse.double()) > 0.1
    assert relative_error(actual, low) < 2e-2
    # The double form stabilises the root mean square by an epsilon of its own: over one token alone that shows.
    assert length == 1 or relative_error(actual, truth) < 2e-2
    result = three_way(actual, low, truth)
    assert result.ok, result.message


@pytest.mark.parametrize("length", [1, 5, 63, 127, 128, 129, 300, 1000])
def test_lengths(length):
    check(RMS, length)


@pytest.mark.parametrize("form", [
    LinearForm("silu", "rms", False), LinearForm("relu", "rms", True), LinearForm("identity", "rms", True),
    LinearForm("silu", "mean", False), LinearForm("relu", "mean", False),
])  # fmt: skip
def test_forms(form):
    # A mean over many tokens is small; over few it shows.
    check(form, 9)


@pytest.mark.parametrize("dim,rank", [(32, 32), (32, 64), (96, 32), (128, 64), (128, 128), (256, 64)])
@pytest.mark.parametrize("per_head", [False, True])
def test_sizes(dim, rank, per_head):
    check(RMS, 150, dim=dim, rank=rank, per_head=per_head, batch=1)


def test_layouts_and_repeats():
    tensors, gate, maps, tables = inputs(140)
    wanted = rola_native(RMS, *tensors, gate, *maps, *tables)
    assert torch.equal(rola_native(RMS, *tensors, gate, *maps, *tables), wanted)
    by_head = [tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in tensors]
    assert torch.equal(rola_native(RMS, *by_head, gate, *maps, *tables), wanted)
    apart = [torch.stack((tensor, tensor), dim=-1)[..., 0] for tensor in tensors]
    assert torch.equal(rola_native(RMS, *apart, gate, *maps, *tables), wanted)


def test_gate_zero_gives_the_sparse_output():
    (sparse, query, key, value), gate, maps, tables = inputs(70)
    out = rola_native(RMS, sparse, query, key, value, torch.zeros_like(gate), *maps, *tables)
    assert torch.equal(out, sparse)


def test_zeros_and_large_numbers_stay_finite():
    (sparse, query, key, value), gate, maps, tables = inputs(70)
    zeros = torch.zeros_like(query)
    assert torch.equal(rola_native(RMS, sparse, zeros, zeros, zeros, gate, *maps, *tables), sparse)
    out = rola_native(RMS, sparse, query * 1e4, key * 1e4, value * 1e4, gate, *maps, *tables)
    assert out.isfinite().all()


def test_a_nan_reaches_the_output():
    (sparse, query, key, value), gate, maps, tables = inputs(70)
    query[0, 3, 1, 5] = float("nan")
    broken = rola_native(RMS, sparse, query, key, value, gate, *maps, *tables).isnan().any(dim=-1)
    assert broken.sum() == 1 and broken[0, 3, 1]


def test_the_module_takes_it_for_bfloat16_without_gradients():
    config = RoLAConfig(rank=32)
    branch = RoLABranch(config, 3, 64)
    assert branch.kernel_choice("cpu", torch.bfloat16)[0] == "native"
    kind, reason = branch.kernel_choice("cpu", torch.float32)
    assert kind == "torch" and "float32" in reason
    for name, value in (("rank", 40), ("feature_map", "elu"), ("exclude_selected", True)):
        kind, reason = RoLABranch(dataclasses.replace(config, **{name: value}), 3, 64).kernel_choice(
            "cpu", torch.bfloat16
        )
        assert kind == "torch" and (name in reason or str(value) in reason)
