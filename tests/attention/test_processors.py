import dataclasses

import pytest
import torch

from videospark.attention import AttentionConfig, available_backends, get_backend, install, register_backend
from videospark.attention import backends as backends_module
from videospark.attention.backends import BackendConstraints
from videospark.core.config import ConfigError
from videospark.core.numerics import relative_error
from videospark.tiny.components import LATENT_CHANNELS, build_transformer

SPARSE = AttentionConfig(backend="gather", keep_ratio=0.3, block_size_q=16, block_size_k=16)


@pytest.fixture(scope="module")
def transformer():
    torch.manual_seed(0)
    model = build_transformer()
    torch.nn.init.normal_(model.proj_out.weight, std=0.05)
    return model


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(2, LATENT_CHANNELS, 5, 16, 16, generator=generator),
        "encoder_hidden_states": torch.randn(2, 24, 128, generator=generator),
        # Different times along the frames, as image-to-video has them: a wrong layout of the times would show.
        "timestep": torch.rand(2, 320, generator=generator) * 1000,
    }


@pytest.fixture(autouse=True)
def clean(transformer):
    yield
    for block in transformer.blocks:
        assert type(block.attn1.processor).__name__ == "WanAttnProcessor", "a test left its installation behind"


def run(model, batch):
    with torch.no_grad():
        return model(**batch, return_dict=False)[0]


class Installed:
    def __init__(self, model, config):
        self.model, self.config = model, config

    def __enter__(self):
        self.handle = install(self.model, self.config)
        return self.handle

    def __exit__(self, *error):
        self.handle.remove()


def count_hooks(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_dense_is_bit_identical(transformer, batch):
    stock = run(transformer, batch)
    with Installed(transformer, AttentionConfig()):
        assert torch.equal(run(transformer, batch), stock)
    raster = dataclasses.replace(SPARSE, token_order="raster", dense_layers=tuple(range(6)))
    with Installed(transformer, raster):
        assert torch.equal(run(transformer, batch), stock)


def test_removing_restores_the_very_same_processors_and_results(transformer, batch):
    before = run(transformer, batch)
    processors = dict(transformer.attn_processors)
    hooks = count_hooks(transformer)
    with Installed(transformer, SPARSE) as handle:
        assert not torch.equal(run(transformer, batch), before)
        for name, processor in transformer.attn_processors.items():
            assert (processor is processors[name]) == ("attn2" in name)
    handle.remove()
    assert count_hooks(transformer) == hooks
    assert all(processor is processors[name] for name, processor in transformer.attn_processors.items())
    assert torch.equal(run(transformer, batch), before)


@pytest.mark.parametrize("times", ["per token", "per video"])
def test_tile_order_with_dense_attention_equals_raster(transformer, batch, times):
    if times == "per video":
        batch = {**batch, "timestep": torch.tensor([300.0, 700.0])}
    stock = run(transformer, batch)
    config = dataclasses.replace(SPARSE, dense_layers=tuple(range(6)))
    with Installed(transformer, config) as handle:
        assert handle._state.begin(batch["hidden_states"]).order is not None
        out = run(transformer, batch)
    assert relative_error(out, stock) < 1e-5


def test_tile_order_reaches_the_layers(transformer, batch):
    with Installed(transformer, SPARSE):
        tile = run(transformer, batch)
    with Installed(transformer, dataclasses.replace(SPARSE, token_order="raster")):
        assert relative_error(tile, run(transformer, batch)) > 1e-4


@pytest.mark.parametrize("token_order", ["raster", "tile"])
def test_gather_equals_reference_in_the_model(transformer, batch, token_order):
    config = dataclasses.replace(SPARSE, token_order=token_order, keep_diagonal=True, keep_first_frame=True)
    with Installed(transformer, config):
        actual = run(transformer, batch)
    with Installed(transformer, dataclasses.replace(config, backend="reference")):
        assert relative_error(actual, run(transformer, batch)) < 1e-5


def test_report_gives_nominal_and_actual_sparsity(transformer, batch):
    with Installed(transformer, dataclasses.replace(SPARSE, dense_layers=(0, 5))) as handle:
        assert all(row["actual_sparsity"] is None for row in handle.report())
        run(transformer, batch)
        rows = handle.report()
    assert [row["layer"] for row in rows] == list(range(6))
    assert rows[0] == {
        "layer": 0, "backend": "dense", "keep_ratio": 1.0, "nominal_sparsity": 0.0, "actual_sparsity": 0.0,
        "flop_sparsity": 0.0, "branch": "none",
    }  # fmt: skip
    assert rows[1]["backend"] == "gather" and rows[1]["nominal_sparsity"] == pytest.approx(0.7)
    assert rows[1]["actual_sparsity"] == pytest.approx(1 - 6 / 20)
    assert 0 < rows[1]["flop_sparsity"] < rows[1]["actual_sparsity"]


def test_dense_steps_are_dense_and_need_to_know_the_step(transformer, batch):
    stock = run(transformer, batch)
    with Installed(transformer, dataclasses.replace(SPARSE, dense_steps=(0,))) as handle:
        with pytest.raises(RuntimeError, match="set_step"):
            run(transformer, batch)
        handle.set_step(0)
        assert relative_error(run(transformer, batch), stock) < 1e-5
        assert all(row["actual_sparsity"] == 0.0 for row in handle.report())
        handle.set_step(1)
        assert relative_error(run(transformer, batch), stock) > 1e-4
        assert all(row["actual_sparsity"] > 0.5 for row in handle.report())


def test_dense_layers_stay_dense(transformer, batch):
    with Installed(transformer, dataclasses.replace(SPARSE, dense_layers=(0, 1, 2, 3, 4))) as handle:
        run(transformer, batch)
        assert [row["actual_sparsity"] > 0 for row in handle.report()] == [False] * 5 + [True]


def test_other_sizes_follow_in_the_same_installation(transformer, batch):
    small = {**batch, "hidden_states": batch["hidden_states"][:, :, :3, :, :12], "timestep": torch.tensor([5.0, 9.0])}
    stock = run(transformer, small)
    with Installed(transformer, dataclasses.replace(SPARSE, keep_ratio=1.0)):
        run(transformer, batch)
        assert relative_error(run(transformer, small), stock) < 1e-5


def test_checkpointed_gradients_equal_plain_ones_with_forwards_interleaved(transformer, batch):
    def gradient(checkpointed):
        model_input = batch["hidden_states"].clone().requires_grad_()
        if checkpointed:
            transformer.enable_gradient_checkpointing()
        out = transformer(**{**batch, "hidden_states": model_input}, return_dict=False)[0]
        transformer.disable_gradient_checkpointing()
        # Another size runs before the backward pass computes the blocks again.
        small = {**batch, "hidden_states": batch["hidden_states"][:, :, :2], "timestep": torch.tensor([5.0, 9.0])}
        run(transformer, small)
        return torch.autograd.grad(out.square().sum(), model_input)[0]

    transformer.train()
    try:
        with Installed(transformer, SPARSE):
            plain, again = gradient(False), gradient(True)
    finally:
        transformer.eval()
    assert relative_error(again, plain) < 1e-5


def test_fused_projections_work(transformer, batch):
    with Installed(transformer, SPARSE):
        plain = run(transformer, batch)
        for block in transformer.blocks:
            block.attn1.fuse_projections()
        fused = run(transformer, batch)
        for block in transformer.blocks:
            block.attn1.unfuse_projections()
    assert relative_error(fused, plain) < 1e-5


def test_what_cannot_work_is_refused_at_install(transformer):
    with pytest.raises(ConfigError, match=r"dense_layers.*below 6"):
        install(transformer, dataclasses.replace(SPARSE, dense_layers=(6,)))
    with pytest.raises(ConfigError, match="WanTransformer3DModel"):
        install(torch.nn.Linear(2, 2), SPARSE)
    with Installed(transformer, SPARSE), pytest.raises(ConfigError, match="installed already"):
        install(transformer, SPARSE)


def test_backend_constraints_name_reason_and_alternatives(transformer, monkeypatch):
    for name in available_backends():
        get_backend(name)  # a module that is first imported below would be forgotten with the copy
    monkeypatch.setattr(backends_module, "_REGISTERED", dict(backends_module._REGISTERED))

    @register_backend("picky")
    class Picky:
        constraints = BackendConstraints(devices=("cuda",), head_dims=(128,))

    assert "picky" in available_backends()
    with pytest.raises(ConfigError, match=r"device is cpu, it needs cuda; head size is 64.*can: dense, .*gather"):
        install(transformer, dataclasses.replace(SPARSE, backend="picky"))
    with pytest.raises(ConfigError, match="no other backend"):
        register_backend("gather")(Picky)
    with pytest.raises(ConfigError, match="did you mean 'gather'"):
        get_backend("gathr")


def test_a_layer_cannot_run_alone(transformer):
    with Installed(transformer, SPARSE), pytest.raises(RuntimeError, match="inside a forward pass"):
        transformer.blocks[0].attn1(torch.randn(1, 320, 192))
