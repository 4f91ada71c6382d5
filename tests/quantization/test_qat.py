import pytest
import torch
import torch.nn.functional as F
from torch import nn

from videospark.core.config import ConfigError
from videospark.core.numerics import relative_error
from videospark.quantization import QuantizationConfig, fake_quantize_, quantize_
from videospark.quantization.primitives import fake_quantize

from .conftest import build_wan, run_wan, wan_inputs

MODES = ["fp8", "int8", "fp8_weight_only", "int8_weight_only"]


def one_layer(mode, *, inputs=48, outputs=32, **settings):
    torch.manual_seed(0)
    model = nn.ModuleDict({"layer": nn.Linear(inputs, outputs)})
    return model, QuantizationConfig(mode=mode, include=("layer",), exclude=(), **settings)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 48), (7, 48), (2, 17, 48)])
def test_outputs_are_on_the_grid_and_gradients_go_straight_through(mode, granularity, dtype, shape):
    model, config = one_layer(mode, granularity=granularity)
    model.to(dtype)
    layer = model["layer"]
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    grad = torch.randn(*shape[:-1], 32, generator=torch.Generator().manual_seed(2)).to(dtype)
    fake_quantize_(model, config)
    out = layer(x)
    actual = torch.autograd.grad(out, (x, layer.weight, layer.bias), grad)
    on_grid = x.detach() if config.weight_only else fake_quantize(x.detach(), config.number, granularity)
    weight = fake_quantize(layer.weight.detach(), config.number, granularity)
    leaves = [on_grid.clone().requires_grad_(), weight.clone().requires_grad_(), layer.bias]
    wanted = F.linear(*leaves)
    assert torch.equal(out, wanted)
    # The identity: gradients are those at the points of the grid.
    for got, expected in zip(actual, torch.autograd.grad(wanted, leaves, grad), strict=True):
        assert torch.equal(got, expected) and got.abs().sum() > 0


@pytest.mark.parametrize("mode", MODES)
def test_training_sees_what_inference_computes(mode):
    config = QuantizationConfig(mode=mode)
    wan = build_wan()
    exact = run_wan(wan)
    fake = fake_quantize_(wan, config)
    trained_for = run_wan(wan)
    fake.remove()
    assert torch.equal(run_wan(wan), exact)
    quantize_(wan, config)
    apart, error = relative_error(run_wan(wan), trained_for), relative_error(trained_for, exact)
    assert error > 0 and apart < error / 5, (apart, error)


def test_parameters_and_names_stay():
    wan = build_wan().requires_grad_(True)
    before = dict(wan.named_parameters())
    fake = fake_quantize_(wan, QuantizationConfig(mode="int8"))
    assert len(fake.layers) == 20 and fake.kept == {}
    now = dict(wan.named_parameters())
    assert now.keys() == before.keys() and all(now[name] is before[name] for name in now)
    wan(**wan_inputs(), return_dict=False)[0].square().mean().backward()
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in wan.parameters())
    fake.remove()
    fake.remove()
    assert not any("forward" in module.__dict__ for module in wan.modules())


def test_a_student_trained_on_the_grid_is_better_on_the_grid():
    # One huge row makes the grid of the others coarse; as inputs are correlated, rounding can be made up for.
    errors = {}
    for aware in (False, True):
        model, config = one_layer("int8_weight_only", granularity="tensor")
        layer = model["layer"]
        with torch.no_grad():
            layer.weight[0] *= 60
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(256, 8, generator=generator) @ torch.randn(8, 48, generator=generator)
        target = layer(x).detach()
        if aware:
            fake = fake_quantize_(model, config)
            optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
            for step in range(200):
                optimizer.param_groups[0]["lr"] = 5e-3 * (1 - step / 200)
                optimizer.zero_grad()
                F.mse_loss(layer(x), target).backward()
                optimizer.step()
            fake.remove()
        quantize_(model.requires_grad_(False), config)
        errors[aware] = float((model["layer"](x) - target)[:, 1:].square().mean())
    assert errors[True] < errors[False] / 2


def test_hot_channels_stay_off_the_grid():
    x = torch.randn(9, 48)
    x[:, 5] *= 50
    errors = {}
    for hot in (0, 2):
        model, config = one_layer("int8", hot_channels=hot)
        wanted = model["layer"](x)
        fake_quantize_(model, config, hot_channels={"layer": [5]} if hot else None)
        errors[hot] = relative_error(model["layer"](x), wanted)
    assert errors[2] < errors[0] / 5


@pytest.mark.parametrize(
    "settings,field",
    [
        ({}, "mode"),
        ({"mode": "int8", "fused": True}, "fused"),
        ({"mode": "int8", "high_precision_steps": (0,), "originals": "keep"}, "high_precision_steps"),
        ({"mode": "int8", "engine": "torchao"}, "engine"),
    ],
)
def test_settings_of_inference_are_refused(settings, field):
    with pytest.raises(ConfigError, match=f"^{field}: got"):
        fake_quantize_(build_wan(), QuantizationConfig(**settings))


def test_quantized_twice_or_wrapped_is_refused():
    wan = build_wan()
    fake = fake_quantize_(wan, QuantizationConfig(mode="int8"))
    with pytest.raises(ConfigError, match="remove"):
        fake_quantize_(wan, QuantizationConfig(mode="int8"))
    with pytest.raises(ConfigError, match="wraps"):
        quantize_(wan, QuantizationConfig(mode="int8"))
    layer = wan.blocks[0].attn1.to_q
    mine = layer.forward
    layer.forward = lambda x: mine(x)
    with pytest.raises(ConfigError, match="unwrapped"):
        fake.remove()
    layer.forward = mine
    fake.remove()
    installed = quantize_(wan, QuantizationConfig(mode="int8"))
    with pytest.raises(ConfigError, match="remove"):
        fake_quantize_(wan, QuantizationConfig(mode="int8"))
    installed.remove()
