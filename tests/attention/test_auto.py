"""Backend "auto": which backend, from how many tokens on, and why."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from videospark.attention import AttentionConfig, install, register_backend
from videospark.attention import auto as auto_module
from videospark.attention.auto import (
    ALWAYS_DENSE,
    LEAST_SAVED,
    LEAST_TOKENS,
    choose_backend,
    computed_crossover,
    expected_flop_sparsity,
    measure_crossover,
)
from videospark.attention.backends import checked_backend
from videospark.attention.config import RoLAConfig
from videospark.core.config import ConfigError, from_dict, to_dict
from videospark.core.numerics import relative_error
from videospark.tiny.components import LATENT_CHANNELS, build_transformer

AUTO = AttentionConfig(backend="auto", keep_ratio=0.2, block_size_q=16, block_size_k=16)


@pytest.fixture(scope="module")
def transformer():
    torch.manual_seed(0)
    model = build_transformer()
    torch.nn.init.normal_(model.proj_out.weight, std=0.05)
    return model


def run(model, frames):
    generator = torch.Generator().manual_seed(1)
    inputs = {
        "hidden_states": torch.randn(1, LATENT_CHANNELS, frames, 8, 8, generator=generator),
        "encoder_hidden_states": torch.randn(1, 8, 128, generator=generator),
        "timestep": torch.tensor([500.0]),
    }
    with torch.no_grad():
        return model(**inputs, return_dict=False)[0]


def test_short_videos_are_dense_and_longer_ones_sparse(transformer):
    stock = run(transformer, 3), run(transformer, 5)
    branch = dataclasses.replace(AUTO, dense_below=60, branch="rola", rola=RoLAConfig(rank=32))
    installed = install(transformer, branch)
    assert relative_error(run(transformer, 3), stock[0]) < 1e-5  # 48 tokens: neither sparse nor a branch
    short = installed.report()
    assert {row["backend"] for row in short} == {"dense"} and {row["branch"] for row in short} == {"none"}
    assert relative_error(run(transformer, 5), stock[1]) > 1e-4  # 80 tokens
    rows = installed.report()
    installed.remove()
    assert {row["backend"] for row in rows} == {"gather"} and {row["keep_ratio"] for row in rows} == {0.2}
    (reason,) = {row["backend_reason"] for row in rows}
    assert "device is cpu" in reason and "below 60 tokens (given)" in reason


def test_dense_below_holds_for_a_named_backend_too(transformer):
    stock = run(transformer, 3)
    installed = install(transformer, dataclasses.replace(AUTO, backend="gather", dense_below=49))
    assert relative_error(run(transformer, 3), stock) < 1e-5
    assert "backend_reason" not in installed.report()[0]
    installed.remove()


def test_by_default_the_limit_is_computed_and_said_to_be(transformer):
    stock = run(transformer, 5)
    installed = install(transformer, AUTO)
    assert relative_error(run(transformer, 5), stock) < 1e-5  # 80 tokens
    (reason,) = {row["backend_reason"] for row in installed.report()}
    installed.remove()
    assert f"dense below {LEAST_TOKENS:,} tokens (computed" in reason


def test_the_computed_limit_is_where_enough_operations_are_saved():
    config = AttentionConfig(backend="auto", keep_ratio=0.7, block_size_q=64, block_size_k=64, branch="rola")
    found = computed_crossover(config, 128)
    assert found > LEAST_TOKENS
    assert expected_flop_sparsity(config, found, 128) >= LEAST_SAVED > expected_flop_sparsity(config, found - 64, 128)
    assert computed_crossover(dataclasses.replace(config, keep_ratio=0.9), 128) == ALWAYS_DENSE
    reason = choose_backend(
        dataclasses.replace(config, keep_ratio=0.9), device="cpu", dtype="float32", head_dim=128
    ).reason
    assert "always dense" in reason


def test_the_best_backend_that_can_run_is_taken_and_the_others_are_named(monkeypatch):
    monkeypatch.setattr(auto_module, "PREFERENCE", {"cpu": ("picky", "gather")})
    monkeypatch.setattr("videospark.attention.backends._REGISTERED", dict(_registered()))

    @register_backend("picky")
    class Picky:
        constraints = dataclasses.replace(checked("gather").constraints, head_dims=(128,))

    assert choose_backend(AUTO, device="cpu", dtype="float32", head_dim=128).name == "picky"
    choice = choose_backend(AUTO, device="cpu", dtype="float32", head_dim=64)
    assert choice.name == "gather" and "picky cannot run: head size is 64" in choice.reason
    monkeypatch.setattr(auto_module, "PREFERENCE", {"cpu": ("picky",)})
    with pytest.raises(ConfigError, match="head size is 64"):
        choose_backend(AUTO, device="cpu", dtype="float32", head_dim=64)


def _registered():
    from videospark.attention import backends

    return backends._REGISTERED


def checked(name):
    config = dataclasses.replace(AUTO, backend=name)
    return checked_backend(config, device="cpu", dtype="float32", head_dim=64)


def test_cuda_takes_triton_where_it_can_run():
    if not checked_backends_of_cuda():
        pytest.skip("Triton is not installed")
    assert choose_backend(AUTO, device="cuda", dtype="bfloat16", head_dim=128).name == "triton"
    choice = choose_backend(AUTO, device="cuda", dtype="bfloat16", head_dim=80)
    assert choice.name == "gather" and "head size is 80" in choice.reason


def checked_backends_of_cuda():
    from videospark.attention.backends import get_backend

    return not get_backend("triton").constraints.unavailable


def test_measured_times_and_the_length_from_which_sparse_is_faster():
    found = measure_crossover(
        AUTO, heads=1, head_dim=16, dtype=torch.float32, device=torch.device("cpu"), lengths=(16, 128), repeats=1
    )
    assert found.backend == "gather" and [row[0] for row in found.rows] == [16, 128]
    assert all(dense > 0 and sparse > 0 for _, dense, sparse in found.rows)
    slower = [length for length, dense, sparse in found.rows if sparse >= dense]
    longer = [length for length, *_ in found.rows if not slower or length > max(slower)]
    assert found.tokens == (longer[0] if longer else None)
    with pytest.raises(ConfigError, match="lengths"):
        measure_crossover(AUTO, heads=1, head_dim=16, dtype=torch.float32, device=torch.device("cpu"), lengths=(5, 3))


def test_settings_survive_a_file_and_nobody_takes_the_name():
    config = dataclasses.replace(AUTO, dense_below=2048)
    assert from_dict(AttentionConfig, to_dict(config)) == config
    with pytest.raises(ConfigError, match="dense_below"):
        AttentionConfig(dense_below=-1)
    with pytest.raises(ConfigError, match="no other backend"):
        register_backend("auto")(type("Mine", (), {}))
