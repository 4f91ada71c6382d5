"""RoLA's C++ kernel against the branch in float64, by the rule for low precision."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from videospark.attention.branches import BranchInputs, rotate
from videospark.attention.config import RoLAConfig
from videospark.attention.context import ForwardContext
from videospark.attention.grid import TokenGrid
from videospark.attention.rola import native
from videospark.attention.rola.fused import LinearForm, linear_branch
from videospark.attention.rola.module import RoLABranch
from videospark.attention.rola.native import rola_gate, rola_native
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


def model_tables(length, dim):
    angles = torch.randn(length, dim // 2, generator=torch.Generator().manual_seed(5)) * 4
    return angles.cos(), angles.sin()


def whole(table):
    """As the model has it: every angle twice."""
    return table.repeat_interleave(2, dim=1)[None, :, None]


@pytest.mark.parametrize("length,dim", [(5, 32), (150, 64), (129, 128)])
def test_rotated_queries_and_keys_are_turned_back(length, dim):
    (sparse, query, key, value), gate, maps, tables = inputs(length, dim=dim)
    cos, sin = model_tables(length, dim)
    query, key = (rotate(tensor, whole(cos), whole(sin)) for tensor in (query, key))
    actual = rola_native(RMS, sparse, query, key, value, gate, *maps, *tables, model_tables=(cos, sin))
    options = {"gate": gate, "map_q": maps[0], "map_k": maps[1], "cos": tables[0], "sin": tables[1]}
    back = [rotate(tensor, whole(cos), -whole(sin)) for tensor in (query, key)]
    low = linear_branch(RMS, sparse, *back, value, **options)
    back = [rotate(tensor.double(), whole(cos.double()), -whole(sin.double())) for tensor in (query, key)]
    wide = {name: tensor.double() for name, tensor in options.items()}
    truth = linear_branch(RMS, sparse.double(), *back, value.double(), **wide)
    assert relative_error(actual, truth) < 2e-2
    result = three_way(actual, low, truth)
    assert result.ok, result.message


def test_the_result_may_take_the_place_of_the_sparse_output():
    (sparse, query, key, value), gate, maps, tables = inputs(140)
    wanted = rola_native(RMS, sparse, query, key, value, gate, *maps, *tables)
    place = sparse.clone()
    made = rola_native(RMS, place, query, key, value, gate, *maps, *tables, out=place)
    assert made is place and torch.equal(place, wanted)


@pytest.mark.parametrize("dim", [32, 48, 128])
def test_gate(dim):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(2, 77, 3 * dim, generator=generator).bfloat16()
    weight, bias = torch.randn(1, dim, generator=generator) * 0.3, torch.randn(1, 3, 1, 1, generator=generator)
    size = torch.rand(1, 3, 1, 1, generator=generator) * 3
    truth = (hidden.double().unflatten(2, (3, dim)) @ weight[0].double() + bias.double().flatten()).sigmoid()
    assert torch.allclose(rola_gate(hidden, weight, bias), truth.float(), atol=1e-6)
    assert torch.allclose(rola_gate(hidden, weight, bias, size), (truth * size.flatten()).float(), atol=1e-5)
    apart = torch.cat((hidden, hidden), dim=2)[..., : 3 * dim]
    assert torch.equal(rola_gate(apart, weight, bias), rola_gate(hidden, weight, bias))
    hidden[1, 3, dim + 2] = float("nan")
    broken = rola_gate(hidden, weight, bias).isnan()
    assert broken[1, 3, 1] and broken.sum() == 1


def branch_inputs(branch, overwrite=False):
    (sparse, query, key, value), gate, _, _ = inputs(140)
    rotary = tuple(whole(table) for table in model_tables(140, 64))
    rotated = [rotate(tensor, *rotary) for tensor in (query, key)]
    gate = branch.gate(query.flatten(2))
    context = ForwardContext(grid=TokenGrid(140, 1, 1))
    return BranchInputs(
        sparse, query, key, value, *rotated, gate, rotary, slice(0, 3), context, overwrite=overwrite
    )  # fmt: skip


@torch.no_grad()
def test_the_module_does_without_what_was_not_rotated():
    branch = RoLABranch(RoLAConfig(rank=32), 3, 64, torch.Generator().manual_seed(0))
    given = branch_inputs(branch)
    wanted = branch(given)
    without = branch(dataclasses.replace(given, query=None, key=None))
    assert branch.takes_rotated("cpu", torch.bfloat16) and not branch.takes_rotated("cpu", torch.float32)
    assert 0 < relative_error(without, wanted) < 5e-3
    # The formulas in PyTorch turn back too, where a kernel was expected and gradients are wanted after all.
    with torch.enable_grad():
        slow = branch(dataclasses.replace(given, query=None, key=None))
    assert slow.requires_grad and relative_error(slow, wanted) < 1e-2


@torch.no_grad()
def test_the_module_overwrites_only_where_it_may():
    branch = RoLABranch(RoLAConfig(rank=32), 3, 64, torch.Generator().manual_seed(0))
    kept = branch_inputs(branch)
    before, wanted = kept.sparse.clone(), branch(kept)
    assert torch.equal(kept.sparse, before) and not torch.equal(wanted, before)
    free = branch_inputs(branch, overwrite=True)
    assert branch(free) is free.sparse and torch.equal(free.sparse, wanted)
    shared = dataclasses.replace(free, sparse=free.value)
    before = free.value.clone()
    assert branch(shared) is not free.value and torch.equal(free.value, before)


def test_the_gate_has_gradients_where_they_are_wanted():
    branch = RoLABranch(RoLAConfig(rank=32, merge="scaled"), 3, 64, torch.Generator().manual_seed(0))
    torch.nn.init.normal_(branch.gate_proj.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    hidden = torch.randn(1, 20, 192, generator=torch.Generator().manual_seed(2)).bfloat16()
    plain = branch.gate(hidden)
    assert plain.requires_grad and plain.dtype == torch.float32
    with torch.no_grad():
        assert torch.allclose(branch.gate(hidden), plain, atol=1e-2)
