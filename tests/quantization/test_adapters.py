"""torchao and Transformer Engine: how settings are translated, and what happens where they are absent."""

import contextlib
import importlib.util
import sys
import types

import pytest
import torch
from torch import nn

from videospark.core.config import ConfigError
from videospark.core.numerics import relative_error
from videospark.quantization import QuantizationConfig, quantize_
from videospark.quantization import torchao as adapter
from videospark.quantization import transformer_engine as engine

from .conftest import build_wan, run_wan

needs_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")


@pytest.mark.parametrize("mode,package", [("int8", "torchao"), ("fp8", "torchao"), ("fp8", "transformer_engine")])
def test_absence_is_an_error_that_says_what_to_do(mode, package, monkeypatch):
    for name in ("torchao", "torchao.quantization", "transformer_engine", "transformer_engine.common.recipe"):
        monkeypatch.setitem(sys.modules, name, None)
    wan = build_wan()
    before, modules = run_wan(wan), dict(wan.named_modules())
    extra = {"torchao": "torchao", "transformer_engine": "te"}[package]
    with pytest.raises(ConfigError, match=rf"engine: got '{package}'.*videospark\[{extra}\].*auto"):
        quantize_(wan, QuantizationConfig(mode=mode, engine=package))
    assert all(module is modules[name] for name, module in wan.named_modules())
    assert torch.equal(run_wan(wan), before)


@pytest.mark.parametrize("error", [RuntimeError("no CUDA core"), OSError("libcuda.so.1"), FileNotFoundError("core")])
def test_a_transformer_engine_without_cuda_is_absent(error, monkeypatch):
    def fails(name):
        raise error

    monkeypatch.setattr(engine.importlib, "import_module", fails)
    with pytest.raises(ConfigError, match=f"transformer_engine.*{error}"):
        engine.translate("mxfp8")


@needs_torchao
@pytest.mark.parametrize(
    "mode,name",
    [
        ("fp8", "Float8DynamicActivationFloat8WeightConfig"),
        ("int8", "Int8DynamicActivationInt8WeightConfig"),
        ("fp8_weight_only", "Float8WeightOnlyConfig"),
        ("int8_weight_only", "Int8WeightOnlyConfig"),
    ],
)
def test_torchao_gets_the_same_numbers(mode, name):
    assert type(adapter.translate(QuantizationConfig(mode=mode, engine="torchao"))).__name__ == name


@needs_torchao
def test_torchao_granularity():
    quantization = importlib.import_module("torchao.quantization")
    for granularity, kind in (("row", quantization.PerRow), ("tensor", quantization.PerTensor)):
        made = adapter.translate(QuantizationConfig(mode="fp8", engine="torchao", granularity=granularity))
        chosen = made.granularity
        assert all(isinstance(one, kind) for one in (chosen if isinstance(chosen, (list, tuple)) else (chosen,)))
    with pytest.raises(ConfigError, match="granularity"):
        adapter.translate(QuantizationConfig(mode="int8", engine="torchao", granularity="tensor"))


@needs_torchao
@pytest.mark.parametrize("mode,limit", [("int8", 0.02), ("int8_weight_only", 0.02), ("fp8_weight_only", 0.05)])
def test_torchao_multiplies_and_goes_again(mode, limit):
    wan = build_wan()
    before, modules = run_wan(wan), dict(wan.named_modules())
    installed = quantize_(wan, QuantizationConfig(mode=mode, engine="torchao"))
    assert installed.report().engine == "torchao" and 0 < relative_error(run_wan(wan), before) < limit
    installed.remove()
    assert all(module is modules[name] for name, module in wan.named_modules())
    assert torch.equal(run_wan(wan), before)


class _Linear(nn.Linear):
    """The arguments of `transformer_engine.pytorch.Linear` that the adapter uses."""

    def __init__(self, in_features, out_features, bias=True, params_dtype=None, device="cuda"):
        super().__init__(in_features, out_features, bias=bias, dtype=params_dtype, device=device)

    def forward(self, x):
        assert x.shape[0] % 32 == 0 and _Context.active
        return super().forward(x)


class _Context:
    active = None


def _stand_in(monkeypatch, *, old):
    """Modules with the names of Transformer Engine's API, which cannot be imported without CUDA."""

    class Recipe:
        def __init__(self, **settings):
            self.settings = settings

    names = ("Float8CurrentScaling", "DelayedScaling", "Float8BlockScaling", "MXFP8BlockScaling")
    recipes = types.ModuleType("transformer_engine.common.recipe")
    for name in names:
        setattr(recipes, name, type(name, (Recipe,), {}))
    recipes.Format = types.SimpleNamespace(HYBRID="HYBRID")
    pytorch = types.ModuleType("transformer_engine.pytorch")
    pytorch.Linear = _Linear

    @contextlib.contextmanager
    def autocast(enabled, **settings):
        (key,) = settings
        assert enabled and key == ("fp8_recipe" if old else "recipe")
        _Context.active = settings[key]
        yield
        _Context.active = None

    setattr(pytorch, "fp8_autocast" if old else "autocast", autocast)
    known = {"transformer_engine.common.recipe": recipes, "transformer_engine.pytorch": pytorch}
    monkeypatch.setattr(engine, "importlib", types.SimpleNamespace(import_module=known.__getitem__))


def test_recipes_by_name(monkeypatch):
    _stand_in(monkeypatch, old=False)
    for name, kind in engine._RECIPES.items():
        if name == "nvfp4":
            continue
        assert type(engine.translate(name)).__name__ == kind
    delayed = engine.translate("delayed_scaling").settings
    assert delayed == {"margin": 0, "fp8_format": "HYBRID", "amax_history_len": 1024, "amax_compute_algo": "max"}
    with pytest.raises(ConfigError, match="NVFP4BlockScaling"):
        engine.translate("nvfp4")


@pytest.mark.parametrize("old", [False, True])
def test_rows_are_filled_up_and_the_recipe_is_active(old, monkeypatch):
    _stand_in(monkeypatch, old=old)
    torch.manual_seed(0)
    linear, x = nn.Linear(32, 48), torch.randn(2, 7, 32)
    settings = {"engine": "transformer_engine", "transformer_engine_recipe": "block_scaling"}
    config = QuantizationConfig(mode="fp8", include=("layer",), exclude=(), **settings)
    made = engine.TransformerEngineLinear(linear, config)
    with torch.no_grad():
        assert torch.allclose(made(x), linear(x), atol=1e-6)
    assert type(made.recipe).__name__ == "Float8BlockScaling"
    assert made.inner.weight is not linear.weight


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_transformer_engine_multiplies():
    pytest.importorskip("transformer_engine.pytorch")
    torch.manual_seed(0)
    linear, x = nn.Linear(128, 256).cuda().bfloat16(), torch.randn(37, 128).cuda().bfloat16()
    config = QuantizationConfig(mode="fp8", engine="transformer_engine", include=("layer",), exclude=())
    made = engine.TransformerEngineLinear(linear, config)
    with torch.no_grad():
        assert 0 < relative_error(made(x), linear(x)) < 0.06
