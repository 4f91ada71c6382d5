"""Linear branches inside the model: put in, saved, counted, taken out."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from videospark.attention import AttentionConfig, install
from videospark.attention.accounting import branch_flops, dense_flops, flop_sparsity, router_flops
from videospark.attention.config import RoLAConfig, SLAConfig
from videospark.attention.context import LayerRecord
from videospark.attention.processors import FUSED_NORM_ROPE, rotate
from videospark.attention.rola import native
from videospark.core.config import ConfigError
from videospark.core.numerics import relative_error
from videospark.tiny.components import LATENT_CHANNELS, build_transformer

BASE = AttentionConfig(backend="gather", keep_ratio=0.2, block_size_q=16, block_size_k=16)
CONFIGS = {
    "rola": dataclasses.replace(BASE, branch="rola", rola=RoLAConfig(rank=32, frequencies="balanced")),
    "rola-excluded": dataclasses.replace(BASE, branch="rola", rola=RoLAConfig(rank=32, exclude_selected=True)),
    "sla": dataclasses.replace(BASE, branch="sla"),
    "sla-excluded": dataclasses.replace(BASE, branch="sla", sla=SLAConfig(exclude_selected=True)),
}


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


@pytest.mark.parametrize("name", CONFIGS)
def test_a_branch_changes_the_output_and_leaves_without_a_trace(name, transformer, batch):
    before, keys = run(transformer, batch), list(transformer.state_dict())
    plain = install(transformer, BASE)
    sparse = run(transformer, batch)
    plain.remove()
    installed = install(transformer, CONFIGS[name])
    with_branch = run(transformer, batch)
    # SLA's projection starts from zero; RoLA's gate starts at 0.125.
    assert torch.equal(with_branch, sparse) == name.startswith("sla")
    assert with_branch.isfinite().all()
    assert any("linear_branch" in key for key in transformer.state_dict())
    row = installed.report()[0]
    assert (
        row["branch"] == name.split("-")[0] and row["branch_kernel"] == "torch" and row["branch_weights"] == "initial"
    )
    assert row["flop_sparsity"] < row["actual_sparsity"] <= row["nominal_sparsity"] + 0.05
    installed.remove()
    assert list(transformer.state_dict()) == keys and torch.equal(run(transformer, batch), before)


@pytest.mark.parametrize("name", CONFIGS)
def test_token_order_does_not_matter_to_the_branch_alone(name, transformer, batch):
    """With every block kept, tile order and raster order give the same."""
    config = dataclasses.replace(CONFIGS[name], keep_ratio=1.0)
    outputs = []
    for order in ("raster", "tile"):
        installed = install(transformer, dataclasses.replace(config, token_order=order))
        outputs.append(run(transformer, batch))
        installed.remove()
    assert torch.allclose(*outputs, atol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_tensors_go_out_and_come_back(name, transformer, batch):
    installed = install(transformer, CONFIGS[name], generator=torch.Generator().manual_seed(3))
    state = {key: tensor + 0.01 for key, tensor in installed.branch_state().items()}
    installed.remove()
    again = install(transformer, CONFIGS[name], branch_state=state)
    assert all(torch.equal(tensor, state[key]) for key, tensor in again.branch_state().items())
    assert again.report()[0]["branch_weights"] == "given"
    first = run(transformer, batch)
    again.remove()
    third = install(transformer, CONFIGS[name], branch_state=state)
    assert torch.equal(run(transformer, batch), first)
    third.remove()


def test_wrong_tensors_are_counted_and_nothing_is_left_behind(transformer):
    state = install_state(transformer)
    name = "blocks.0.attn1.linear_branch.proj_q.weight"
    wrong = {**{k: v for k, v in state.items() if k != name}, "blocks.9.attn1.linear_branch.gate_bias": torch.zeros(1)}
    with pytest.raises(ConfigError, match=r"1 missing .*proj_q.*1 unknown .*blocks\.9"):
        install(transformer, CONFIGS["rola"], branch_state=wrong)
    with pytest.raises(ConfigError, match="1 of the wrong shape"):
        install(transformer, CONFIGS["rola"], branch_state={**state, name: torch.zeros(3, 3)})
    with pytest.raises(ConfigError, match="branch is 'none'"):
        install(transformer, BASE, branch_state=state)
    assert not any("linear_branch" in key for key in transformer.state_dict())


def install_state(transformer):
    installed = install(transformer, CONFIGS["rola"])
    state = dict(installed.branch_state())
    installed.remove()
    return state


def test_branch_tensors_keep_their_dtype(transformer):
    installed = install(transformer, CONFIGS["rola"])
    transformer.to(torch.bfloat16)
    assert {t.dtype for t in installed.branch_state().values()} == {torch.float32}
    installed.remove()


def test_a_branch_learns(transformer, batch):
    """Two hundred parameters of the gate alone come nearer to the dense output by gradient descent."""
    target = run(transformer, batch)
    installed = install(transformer, CONFIGS["rola"])
    transformer.requires_grad_(False)
    parameters = [p for branch in installed._branches.branches for p in branch.parameters()]
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimizer = torch.optim.Adam(parameters, lr=3e-2)
    losses = []
    for _ in range(8):
        loss = (transformer(**batch, return_dict=False)[0] - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in parameters)
        optimizer.step()
        losses.append(float(loss.detach()))
    installed.remove()
    assert losses[-1] < 0.9 * losses[0]


def test_operations_are_counted_by_hand():
    record = LayerRecord(torch.tensor(20 * 16 * 16), 40 * 40 * 16 * 16, 640, 640, 40, 40)
    rola, sla = CONFIGS["rola"], CONFIGS["sla"]
    assert dense_flops(640, 640, 64) == 4 * 640 * 640 * 64
    assert router_flops(record, 64) == 2 * 640 * 64 + 2 * 40 * 40 * 64
    assert branch_flops(rola, record, 64) == 8 * 640 * 32 * 64 + 2 * 640 * 64
    assert branch_flops(sla, record, 64) == 6 * 640 * 64 * 64
    kept = dense_flops(640, 640, 64) * 20 / 1600
    expected = 1 - (kept + router_flops(record, 64) + branch_flops(rola, record, 64)) / dense_flops(640, 640, 64)
    assert flop_sparsity(rola, record, 64) == pytest.approx(expected)


def test_a_branch_beside_dense_attention_is_refused(transformer):
    with pytest.raises(ConfigError, match="branch"):
        install(transformer, AttentionConfig(backend="dense", branch="rola"))


@pytest.mark.parametrize("name", ["rola", "sla", "rola-excluded"])
def test_a_fused_norm_and_rotation_is_taken_where_the_branch_does_without_the_rest(name, transformer, batch):
    if native.unavailable() is not None:
        pytest.skip(native.unavailable())
    transformer, calls = transformer.to(torch.bfloat16), []
    batch = {key: tensor.bfloat16() for key, tensor in batch.items()}
    installed = install(transformer, CONFIGS[name])
    for branch in (block.attn1.linear_branch for block in transformer.blocks):
        if name == "sla":
            torch.nn.init.normal_(branch.proj.weight, std=0.1)
    plain = run(transformer, batch)

    def fused(norm, x, rotary, heads):
        calls.append(1)
        return rotate(norm(x).unflatten(2, (heads, -1)), *rotary)

    for block in transformer.blocks:
        block.attn1.__dict__[FUSED_NORM_ROPE] = fused
    made = run(transformer, batch)
    assert len(calls) == (0 if name == "rola-excluded" else 2 * len(transformer.blocks))
    assert relative_error(made, plain) < 2e-2
    installed.remove()
