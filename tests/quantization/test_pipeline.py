"""Recipes with low precision on a whole pipeline."""

import copy

import pytest
import torch
from diffusers import WanPipeline

from videospark import accelerate, restore
from videospark.core.config import ConfigError
from videospark.core.numerics import relative_error
from videospark.pipelines.acceleration import current_report
from videospark.quantization import QuantizationConfig, find_hot_channels, quantize_
from videospark.quantization.convert import state_of
from videospark.tiny.components import build_scheduler, build_transformer


def latents(pipe, **changes):
    settings = {"prompt": "a red circle", "height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 2}
    settings |= {"guidance_scale": 2.0, "output_type": "latent", "max_sequence_length": 16} | changes
    return pipe(**settings, generator=torch.Generator().manual_seed(0)).frames


@pytest.mark.parametrize("recipe,engine,limit", [("fp8", "scaled_mm", 0.1), ("int8", "int_mm", 0.05)])
def test_a_recipe_quantizes_and_restore_is_bit_identical(tiny_pipeline, recipe, engine, limit):
    before, modules = latents(tiny_pipeline), dict(tiny_pipeline.transformer.named_modules())
    weights = copy.deepcopy(tiny_pipeline.transformer.state_dict())
    report = accelerate(tiny_pipeline, recipe)
    assert 0 < relative_error(latents(tiny_pipeline), before) < limit
    row = report.to_dict()["quantization"]["transformer"]
    assert row["num_quantized"] == 60 and row["engine"].startswith(engine)
    assert row["fused"].startswith(("torch", "native"))
    assert row["bytes_after"] < row["bytes_before"] and engine in str(report)
    restore(tiny_pipeline)
    transformer = tiny_pipeline.transformer
    assert all(module is modules[name] for name, module in transformer.named_modules())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in transformer.state_dict().items())
    assert torch.equal(latents(tiny_pipeline), before) and current_report(tiny_pipeline) is None


def test_sparse_attention_and_int8_together(tiny_pipeline):
    before = latents(tiny_pipeline)
    sparse = {"backend": "gather", "keep_ratio": 0.5, "block_size_q": 16, "block_size_k": 16}
    accelerate(tiny_pipeline, {"name": "sparse", "attention": sparse})
    wanted = latents(tiny_pipeline)
    restore(tiny_pipeline)
    both = {"name": "both", "attention": sparse, "quantization": {"mode": "int8", "fused": True}}
    accelerate(tiny_pipeline, both)
    assert relative_error(latents(tiny_pipeline), wanted) < 0.1
    restore(tiny_pipeline)
    assert torch.equal(latents(tiny_pipeline), before)


def test_both_experts_are_quantized_and_restored(tiny_pipeline):
    torch.manual_seed(1)
    second = build_transformer()
    torch.nn.init.normal_(second.proj_out.weight, std=0.05)
    both = WanPipeline(
        **{**tiny_pipeline.components, "transformer_2": second, "scheduler": build_scheduler()}, boundary_ratio=0.9
    )
    both.set_progress_bar_config(disable=True)
    before = latents(both, num_inference_steps=3)
    report = accelerate(both, "int8")
    assert set(report.quantization) == {"transformer", "transformer_2"}
    assert all(row["num_quantized"] == 60 for row in report.quantization.values())
    assert not torch.equal(latents(both, num_inference_steps=3), before)
    restore(both)
    assert torch.equal(latents(both, num_inference_steps=3), before)


def test_steps_in_high_precision_are_told_by_the_scheduler(tiny_pipeline):
    before = latents(tiny_pipeline)
    precision = {"mode": "int8", "originals": "keep", "high_precision_steps": [0, 1]}
    accelerate(tiny_pipeline, {"name": "all", "quantization": precision})
    assert torch.equal(latents(tiny_pipeline), before)
    restore(tiny_pipeline)
    accelerate(tiny_pipeline, {"name": "first", "quantization": precision | {"high_precision_steps": [0]}})
    assert not torch.equal(latents(tiny_pipeline), before)


def test_hot_channels_by_denoiser(tiny_pipeline):
    config = QuantizationConfig(mode="int8", hot_channels=2)
    hot = find_hot_channels(tiny_pipeline.transformer, config, lambda: latents(tiny_pipeline), ratio=1.5)
    assert hot
    recipe = {"name": "hot", "quantization": {"mode": "int8", "hot_channels": 2}}
    with pytest.raises(ConfigError, match="find_hot_channels"):
        accelerate(tiny_pipeline, recipe)
    with pytest.raises(ConfigError, match="hot_channels"):
        accelerate(tiny_pipeline, recipe, hot_channels={"transformer_3": hot})
    report = accelerate(tiny_pipeline, recipe, hot_channels={"transformer": hot})
    rows = report.quantization["transformer"]["layers"]
    assert {row["layer"]: row["hot_channels"] for row in rows if row["hot_channels"]} == {
        name: len(indices) for name, indices in hot.items()
    }


def test_a_denoiser_quantized_before_is_taken_over_and_left(tiny_pipeline):
    config = QuantizationConfig(mode="int8")
    installed = quantize_(tiny_pipeline.transformer, config)
    quantized = latents(tiny_pipeline)
    with pytest.raises(ConfigError, match="quantized already"):
        accelerate(tiny_pipeline, "fp8")
    accelerate(tiny_pipeline, {"name": "same", "quantization": {"mode": "int8"}})
    restore(tiny_pipeline)
    assert state_of(tiny_pipeline.transformer) is installed
    assert torch.equal(latents(tiny_pipeline), quantized)


def test_a_failure_leaves_the_pipeline_alone(tiny_pipeline, monkeypatch):
    before = latents(tiny_pipeline)
    monkeypatch.setattr("videospark.pipelines.acceleration._follow_steps", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        accelerate(tiny_pipeline, "int8")
    assert state_of(tiny_pipeline.transformer) is None and current_report(tiny_pipeline) is None
    assert torch.equal(latents(tiny_pipeline), before)
