"""The planner against classes built without memory, hand-computed tables, and figures that others published."""

import dataclasses
import json

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from typer.testing import CliRunner

from videospark.app.cli import app
from videospark.attention.config import AttentionConfig, RoLAConfig, SLAConfig
from videospark.core.config import ConfigError
from videospark.pipelines.plan import Settings, make_plan, parse_size
from videospark.pipelines.plan_cards import CARDS, find_card
from videospark.pipelines.plan_memory import GIB, transformer_bytes
from videospark.pipelines.plan_models import (
    IMAGE_ENCODER_PARAMETERS,
    MODELS,
    TEXT_ENCODER_PARAMETERS,
    VAES,
    kept_share,
    operations,
)
from videospark.pipelines.recipe import Recipe, SamplerConfig
from videospark.quantization.config import QuantizationConfig

VAE_22 = {
    "base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "patch_size": 2, "in_channels": 12,
    "out_channels": 12, "scale_factor_spatial": 16, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48,
}  # fmt: skip


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_diffusers(name):
    shape = MODELS[name]
    with torch.device("meta"):
        model = WanTransformer3DModel(**shape.config())
    assert count(model) == shape.parameters()
    assert count(model.blocks[0]) == shape.block_parameters()
    plain, none = QuantizationConfig(), AttentionConfig()
    kept = model._keep_in_fp32_modules
    stored = sum(p.numel() * (4 if set(kept) & set(n.split(".")) else 2) for n, p in model.named_parameters())
    assert transformer_bytes(shape, plain, none) == pytest.approx(stored, rel=1e-4)


def test_other_parts_have_the_parameters_that_are_written_down():
    from transformers import CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

    text = UMT5Config(
        vocab_size=256384, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64,
        feed_forward_proj="gated-gelu", relative_attention_num_buckets=32, is_encoder_decoder=False, use_cache=False,
    )  # fmt: skip
    image = CLIPVisionConfig(
        hidden_size=1280, intermediate_size=5120, projection_dim=1024, num_hidden_layers=32, num_attention_heads=16,
        image_size=224, patch_size=14,
    )  # fmt: skip
    with torch.device("meta"):
        assert count(UMT5EncoderModel(text)) == TEXT_ENCODER_PARAMETERS
        assert count(CLIPVisionModel(image)) == pytest.approx(IMAGE_ENCODER_PARAMETERS, rel=3e-3)
        assert count(AutoencoderKLWan()) == VAES["wan2.1"].parameters
        assert count(AutoencoderKLWan(**VAE_22)) == VAES["wan2.2"].parameters


SIZES = [
    ("wan2.1-t2v-1.3b", (480, 832, 81), 32760),
    ("wan2.1-t2v-14b", (720, 1280, 81), 75600),
    ("wan2.2-ti2v-5b", (704, 1280, 121), 27280),
]


@pytest.mark.parametrize(("name", "size", "tokens"), SIZES)
def test_tokens(name, size, tokens):
    assert MODELS[name].tokens(*size) == tokens


def rola(keep):
    return AttentionConfig(backend="gather", keep_ratio=keep, token_order="raster", branch="rola")


@pytest.mark.parametrize(
    ("name", "tokens", "ratios"),
    [
        ("wan2.1-t2v-14b", 75600, (2.82, 3.13, 3.28)),
        ("wan2.1-t2v-1.3b", 32760, (2.68, 2.96, 3.08)),
        ("wan2.1-t2v-14b", 32760, (1.89, 1.99, 2.03)),
    ],
)
def test_operations_are_those_of_the_table(name, tokens, ratios):
    shape = MODELS[name]
    dense = operations(shape, tokens)
    if tokens == 75600:
        per_layer = [value / shape.layers / 1e12 for value in (dense.linear, dense.cross, dense.attention)]
        assert per_layer == pytest.approx([45.2, 0.8, 117], rel=0.02)
    for keep, ratio in zip((0.1, 0.05, 0.03), ratios, strict=True):
        sparse = operations(shape, tokens, rola(keep))
        # The table has nominal shares and no branch.
        nominal = dense.total / (dense.linear + dense.cross + keep * dense.attention)
        assert nominal == pytest.approx(ratio, rel=0.01)
        assert sparse.attention / dense.attention == pytest.approx(kept_share(rola(keep), tokens))
        assert sparse.branch / dense.attention < 0.02
        assert dense.total / sparse.total == pytest.approx(nominal, rel=0.02)


def test_kept_shares_are_those_of_the_table():
    for tokens, kept in ((32760, (51, 25, 15)), (75600, (118, 59, 35))):
        for keep, blocks in zip((0.1, 0.05, 0.03), kept, strict=True):
            assert kept_share(rola(keep), tokens) == pytest.approx(blocks * 64 / tokens)
    by_layer = AttentionConfig(backend="gather", keep_ratio=0.5, keep_ratios=(1.0, 0.5) * 20, token_order="raster")
    assert kept_share(by_layer, 6400) == pytest.approx(0.75)


def spark(keep, steps, **quantization):
    sampler = SamplerConfig(num_inference_steps=steps, guidance_scale=1.0)
    precision = QuantizationConfig(mode="fp8", fused=True, **quantization)
    return Recipe("spark", attention=rola(keep), sampler=sampler, quantization=precision)


def turbo():
    attention = AttentionConfig(
        backend="gather", keep_ratio=0.1, token_order="raster", branch="sla", block_size_q=128, sla=SLAConfig()
    )
    sampler = SamplerConfig(num_inference_steps=4, guidance_scale=1.0)
    return Recipe(
        "turbo", attention=attention, sampler=sampler, quantization=QuantizationConfig(mode="int8", fused=True)
    )


FREED = Settings(text_encoder="freed", vae_dtype="bfloat16")
MEMORY = [
    # what, published GiB, model, size, recipe, settings, stage, weights alone
    ("SparkDiffusion 14B FP8, at rest", 13.8, "wan2.1-t2v-14b", "1280x720x81", spark(0.05, 3), FREED, "denoise", True),
    ("the same, denoising", 21.3, "wan2.1-t2v-14b", "1280x720x81", spark(0.05, 3), FREED, "denoise", False),
    ("the same, decoding", 23.4, "wan2.1-t2v-14b", "1280x720x81", spark(0.05, 3), FREED, "decode", False),
    ("SparkDiffusion I2V 14B FP8", 27.9, "wan2.1-i2v-14b", "1248x720x81", spark(0.03, 4), FREED, "decode", False),
    ("Wan 2.1 1.3B offloaded, 8.19 GB", 7.63, "wan2.1-t2v-1.3b", "832x480x81", "dense", Settings(offload="model"),
     "decode", False),
    ("umT5, 11 GB", 10.24, "wan2.1-t2v-1.3b", "832x480x81", "dense", Settings(offload="model"), "text", True),
]  # fmt: skip
TIMES = [
    # what, published seconds, model, size, recipe, card, part, compiled
    ("Wan 2.1 14B dense, RTX 5090, a pass", 47.7, "wan2.1-t2v-14b", "1280x720x81", "dense", "rtx5090", "pass", False),
    ("Wan 2.1 1.3B dense, RTX 5090, a pass", 1.84, "wan2.1-t2v-1.3b", "832x480x81", "dense", "rtx5090", "pass", False),
    ("Wan 2.2 I2V A14B dense, RTX 5090, a pass", 56.9, "wan2.2-i2v-a14b", "1280x720x81", "dense", "rtx5090", "pass",
     False),
    ("Wan 2.1 1.3B dense, RTX 4090, a step", 4.8, "wan2.1-t2v-1.3b", "832x480x81", "dense", "rtx4090", "step", False),
    ("I2V 14B dense in diffusers, H100, a step", 9.77, "wan2.1-i2v-14b", "832x480x81", "dense", "h100", "step", False),
    ("the same, RTX 4090D", 30.5, "wan2.1-i2v-14b", "832x480x81", "dense", "rtx4090d", "step", False),
    ("SparkDiffusion 14B 95 %, RTX 5090, a step", 6.7, "wan2.1-t2v-14b", "1280x720x81", spark(0.05, 3), "rtx5090",
     "step", True),
    ("SparkDiffusion 14B 97 %", 6.1, "wan2.1-t2v-14b", "1280x720x81", spark(0.03, 4), "rtx5090", "step", True),
    ("SparkDiffusion 1.3B 90 %", 0.445, "wan2.1-t2v-1.3b", "832x480x81", spark(0.1, 4), "rtx5090", "step", True),
    ("TurboDiffusion 1.3B, RTX 5090, a step", 0.475, "wan2.1-t2v-1.3b", "832x480x81", turbo(), "rtx5090", "step", True),
    ("decoding 720p, RTX 5090", 7.0, "wan2.1-t2v-14b", "1280x720x81", spark(0.05, 3), "rtx5090", "decode", True),
    ("decoding 480p, RTX 5090", 3.0, "wan2.1-t2v-1.3b", "832x480x81", spark(0.1, 4), "rtx5090", "decode", True),
]  # fmt: skip


def planned_memory(row):
    _, _, model, size, recipe, settings, stage, weights = row
    plan = make_plan(model, parse_size(size), recipe, "80gb", settings)
    found = {s.name: s for s in plan.stages}[stage]
    return (found.weights if weights else found.gpu_peak) / GIB


def planned_time(row):
    _, _, model, size, recipe, card, part, compiled = row
    times = make_plan(model, parse_size(size), recipe, card, FREED, compiled=compiled).times
    return {"pass": times.step / 2, "step": times.step, "decode": times.decode}[part]


@pytest.mark.parametrize("row", MEMORY, ids=lambda row: row[0])
def test_memory_against_published_figures(row):
    assert planned_memory(row) == pytest.approx(row[1], rel=0.15)


@pytest.mark.parametrize("row", TIMES, ids=lambda row: row[0])
def test_times_against_published_figures(row):
    # What is compared is arithmetic: nothing is timed here.
    assert planned_time(row) == pytest.approx(row[1], rel=0.35)


def test_the_published_example_on_a_small_and_a_big_card():
    small = make_plan("wan2.2-t2v-a14b", (1280, 720, 81), "dense", "rtx5090")
    assert not small.fits and small.peak_gib > 60
    best = small.recommended
    assert best is not None and best.fits and best.gpu_gib <= small.budget_gib
    assert all(option.gpu_gib < small.peak_gib for option in small.options)
    again = make_plan("wan2.2-t2v-a14b", (1280, 720, 81), "dense", "rtx5090", best.settings)
    assert again.fits and again.options == [] and again.peak_gib == pytest.approx(best.gpu_gib)
    assert make_plan("wan2.2-t2v-a14b", (832, 480, 81), "dense", "h200").fits
    tiny = make_plan("wan2.1-t2v-14b", (1280, 720, 81), "dense", "rtx3060-12")
    assert tiny.recommended is not None and tiny.recommended.settings.offload == "group"


def test_settings_take_less():
    def peaks(**settings):
        made = make_plan("wan2.2-t2v-a14b", (1280, 720, 81), "dense", "rtx5090", Settings(**settings))
        return {stage.name: stage.gpu_peak for stage in made.stages}, made

    plain, made = peaks()
    freed, _ = peaks(text_encoder="freed")
    assert freed["denoise"] == pytest.approx(plain["denoise"] - 2 * TEXT_ENCODER_PARAMETERS)
    swapped, other = peaks(swap_experts=True)
    expert = transformer_bytes(made.model, QuantizationConfig(), AttentionConfig())
    assert swapped["denoise"] == pytest.approx(plain["denoise"] - expert) and other.stages[-1].ram > made.stages[-1].ram
    model, _ = peaks(offload="model")
    group, grouped = peaks(offload="group")
    assert model["denoise"] == pytest.approx(
        plain["denoise"] - expert - 2 * TEXT_ENCODER_PARAMETERS - 4 * VAES["wan2.1"].parameters
    )
    assert group["denoise"] < model["denoise"] - 0.9 * expert
    tiled, _ = peaks(vae_tiling=True)
    assert tiled["decode"] < plain["decode"] - 10 * GIB
    eight, _ = peaks(quantization="fp8")
    saved = plain["denoise"] - eight["denoise"]
    assert saved == pytest.approx(2 * made.model.quantizable_parameters(), rel=0.01)
    assert grouped.times.parts["transfer"] >= 0
    slow = dataclasses.replace(CARDS["rtx5090"], link=0.1)
    from videospark.pipelines.plan import estimate_times

    waiting = estimate_times(made.model, slow, made.clip, made.recipe, Settings(offload="group"), compiled=False)
    assert waiting.parts["transfer"] > 100


def test_wrong_input():
    for size in ((1280, 721, 81), (1280, 720, 80)):
        with pytest.raises(ConfigError):
            make_plan("wan2.1-t2v-14b", size, "dense", "rtx5090")
    with pytest.raises(ConfigError, match=r"wan2\.1-t2v-1\.3b"):
        make_plan("wan", (832, 480, 81), "dense", "rtx5090")
    with pytest.raises(ConfigError, match="rtx5090"):
        find_card("rtx9999")
    with pytest.raises(ConfigError, match="one expert"):
        make_plan("wan2.1-t2v-14b", (832, 480, 81), "dense", "h100", Settings(swap_experts=True))
    with pytest.raises(ConfigError, match="1280x720x81"):
        parse_size("1280x720")
    assert (
        find_card("16gb").memory_gib == 16
        and make_plan("wan2.1-t2v-1.3b", (832, 480, 81), "dense", "16gb").times is None
    )


def test_branches_are_counted_as_they_are():
    shape = MODELS["wan2.1-t2v-14b"]
    plain = transformer_bytes(shape, QuantizationConfig(), AttentionConfig())
    with_rola = transformer_bytes(shape, QuantizationConfig(), rola(0.1))
    assert with_rola - plain == 4 * 40 * 16552
    assert RoLAConfig().rank == 64


def test_command_and_folder(tmp_path):
    runner = CliRunner()
    arguments = ["plan", "--model", "wan2.2-t2v-a14b", "--size", "1280x720x81", "--gpu", "rtx5090"]
    told = runner.invoke(app, arguments)
    assert told.exit_code == 0, told.output
    for text in ("does not fit", "what would fit", "denoise", "assumed", "s a step"):
        assert text in told.output
    data = json.loads(runner.invoke(app, [*arguments, "--json", "--offload", "group", "--vae-tiling"]).stdout)
    assert (
        data["fits"]
        and data["seconds"]["steps"] == 40
        and set(data["stages_gib"]) == {"load", "text", "denoise", "decode"}
    )
    with torch.device("meta"):
        WanTransformer3DModel(**MODELS["wan2.1-t2v-1.3b"].config()).save_config(tmp_path / "transformer")
    folder = json.loads(runner.invoke(app, ["plan", "--model", str(tmp_path), "--gpu", "rtx4090", "--json"]).stdout)
    named = json.loads(runner.invoke(app, ["plan", "--model", "wan2.1-t2v-1.3b", "--gpu", "rtx4090", "--json"]).stdout)
    assert folder["stages_gib"] == named["stages_gib"]
    assert runner.invoke(app, [*arguments[:-1], "rtx1"]).exit_code == 2
