"""The planner against classes built without memory, hand-computed tables, and figures that others published."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from typer.testing import CliRunner

from videospark.app.cli import app
from videospark.attention.config import AttentionConfig, RoLAConfig
from videospark.core.config import ConfigError
from videospark.pipelines.convert.students import detect_format
from videospark.pipelines.plan import Settings, make_plan, parse_size
from videospark.pipelines.plan_cards import CARDS, find_card
from videospark.pipelines.plan_checkpoints import CHECKPOINTS, RUN_BY_US, checkpoint_table, expectation_table
from videospark.pipelines.plan_memory import GIB, transformer_bytes
from videospark.pipelines.plan_models import (
    IMAGE_ENCODER_PARAMETERS,
    MODELS,
    TEXT_ENCODER_PARAMETERS,
    VAES,
    kept_share,
    operations,
)
from videospark.pipelines.plan_published import MEMORY_LIMIT, TIME_LIMIT, published, published_table
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


PUBLISHED = published()


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row.source}: {row.what}")
def test_published_figures(row):
    # What is compared is arithmetic: nothing is timed here.
    limit = MEMORY_LIMIT if row.unit == "GiB" else TIME_LIMIT
    assert abs(row.deviation()) <= limit, f"{row.planned():.3f} {row.unit}, published {row.value}"


def test_enough_is_compared():
    assert MEMORY_LIMIT == 0.15 and TIME_LIMIT == 0.35
    assert sum(row.unit == "GiB" for row in PUBLISHED) >= 6 and sum(row.unit == "s" for row in PUBLISHED) >= 12


@pytest.mark.parametrize(
    ("name", "tables"),
    [("real-weights.md", (published_table,)), ("models.md", (checkpoint_table, expectation_table))],
)
def test_the_tables_of_the_documents_are_those_of_the_planner(name, tables):
    file = Path(__file__).resolve().parents[2] / "docs" / name
    if not file.is_file():
        pytest.skip("runs in a source tree only")
    text = file.read_text(encoding="utf-8")
    for table in tables:
        assert table() in text, f"{name} is out of date: videospark plan --published --checkpoints"


def test_every_checkpoint_is_a_model_with_a_recipe():
    names = {entry.name for entry in CHECKPOINTS}
    assert len(names) == len(CHECKPOINTS) and set(RUN_BY_US) <= names
    assert {entry.model for entry in CHECKPOINTS} == set(MODELS)
    for entry in CHECKPOINTS:
        if entry.kind not in ("diffusers", "wan"):
            assert detect_format(entry.name, ()) == entry.kind
            assert entry.recipe().requires == "few-step"
            steps = re.search(r"(\d)Step", entry.name)
            assert entry.recipe().sampler.steps == (int(steps[1]) if steps else 3 if entry.kind == "fastvideo" else 4)
        sparsity = re.search(r"(0\.\d+)Sparsity", entry.name)
        if sparsity:
            assert entry.recipe().attention.keep_ratio == pytest.approx(1 - float(sparsity[1]))


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
    _, eight = peaks(quantization="fp8")
    weights = [next(stage.weights for stage in one.stages if stage.name == "denoise") for one in (made, eight)]
    assert weights[0] - weights[1] == pytest.approx(2 * made.model.quantizable_parameters(), rel=0.01)
    narrow, quick = peaks(vae_dtype="bfloat16")
    assert narrow["decode"] < plain["decode"] - 8 * GIB and quick.times.decode == pytest.approx(made.times.decode / 2)
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


HD = (1280, 720, 81)


def in_eight_bits(originals):
    return {"name": "x", "quantization": {"mode": "fp8", "fused": True, "originals": originals}}


def test_what_becomes_of_the_original_layers_is_counted():
    drop, offload, keep = (
        make_plan("wan2.1-t2v-14b", HD, in_eight_bits(name), "h100") for name in ("drop", "offload", "keep")
    )
    originals = 2 * MODELS["wan2.1-t2v-14b"].quantizable_parameters() / GIB
    assert offload.peak_gib == drop.peak_gib and keep.peak_gib == pytest.approx(drop.peak_gib + originals)
    assert all(later.ram - stage.ram == pytest.approx(originals * GIB)
               for stage, later in list(zip(drop.stages, offload.stages, strict=True))[1:])  # fmt: skip
    # Block by block: while it loads, RAM holds the text encoder and the VAE alone.
    assert drop.ram_gib < 16 and any("block by block" in text for text in drop.assumptions)
    assert offload.ram_gib > 40 and any("original layers wait" in text for text in offload.assumptions)
    assert any("stay on the card" in text for text in keep.assumptions)


def test_a_recipe_with_a_memory_section_is_planned_with_it():
    memory = {"text_encoder": "free_after_encoding", "vae_tiling": True, "vae_dtype": "bfloat16"}
    by_recipe = make_plan("wan2.1-t2v-14b", HD, {"name": "x", "memory": memory}, "h100")
    by_hand = make_plan(
        "wan2.1-t2v-14b", HD, "dense", "h100",
        Settings(text_encoder="freed", vae_tiling=True, vae_dtype="bfloat16"),
    )  # fmt: skip
    assert by_recipe.settings == by_hand.settings and by_recipe.stages == by_hand.stages
    int8 = make_plan("wan2.1-t2v-14b", HD, {"name": "x", "memory": {"text_encoder": "int8"}}, "rtx3060-12")
    assert int8.settings.text_bits == 8
    # The text encoder has one setting: an option that frees it does not have it in eight bits as well.
    assert all(o.settings.text_bits == (16 if o.settings.text_encoder == "freed" else 8) for o in int8.options)


def test_every_setting_that_is_offered_can_be_had():
    """Each option, said as a recipe and an offloading, is planned with the very same peaks."""
    from videospark.pipelines.offload import MODES

    for name in MODELS:
        for option in make_plan(
            name, (832, 480, 81) if "ti2v" not in name else (1280, 704, 121), "dense", "8gb"
        ).options:
            asked = option.settings
            text = {"freed": "free_after_encoding", "resident": "int8" if asked.text_bits == 8 else "keep"}
            memory = {
                "text_encoder": text[asked.text_encoder], "vae_tiling": asked.vae_tiling,
                "vae_dtype": "bfloat16" if asked.vae_dtype == "bfloat16" else "keep",
            }  # fmt: skip
            recipe = {"name": "x", "memory": memory}
            if asked.quantization:
                recipe["quantization"] = {"mode": asked.quantization, "fused": True, "originals": "drop"}
            assert ("experts" if asked.swap_experts else asked.offload) in MODES
            placed = Settings(offload=asked.offload, swap_experts=asked.swap_experts)
            size = (832, 480, 81) if "ti2v" not in name else (1280, 704, 121)
            again = make_plan(name, size, recipe, "8gb", placed)
            assert (again.peak_gib, again.ram_gib) == pytest.approx((option.gpu_gib, option.ram_gib)), asked.words()


def test_ram_is_held_against_where_it_is_given():
    roomy = make_plan("wan2.2-t2v-a14b", HD, "dense", "rtx5090", ram=256)
    small = make_plan("wan2.2-t2v-a14b", HD, "dense", "rtx5090", ram=48)
    assert roomy.recommended is not None and small.ram_budget_gib == 48
    assert all(option.ram_gib <= 48 for option in small.options if option.fits)
    assert sum(option.fits for option in small.options) < sum(option.fits for option in roomy.options)
    whole = make_plan("wan2.1-t2v-1.3b", (832, 480, 81), "dense", "h100", ram=4)
    assert not whole.fits and whole.peak_gib < whole.budget_gib
    with pytest.raises(ConfigError, match="ram: got 0"):
        make_plan("wan2.1-t2v-1.3b", (832, 480, 81), "dense", "h100", ram=0)
    with pytest.raises(ConfigError, match="quantization: got 'fp4'"):
        Settings(quantization="fp4")


def test_a_laptop_card_is_not_taken_for_its_namesake(monkeypatch):
    from types import SimpleNamespace

    from videospark.pipelines import plan_cards

    for name, known in (("NVIDIA GeForce RTX 4090", True), ("NVIDIA GeForce RTX 4090 Laptop GPU", False)):
        found = SimpleNamespace(name=name, total_memory=16 * 2**30)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, found=found: found)
        card = plan_cards.find_card(None)
        assert card.memory_gib == 16 and (card.bf16 > 0) == known


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
    own = ["plan", "--model", str(tmp_path), "--gpu", "rtx4090", "--json"]
    folder = json.loads(runner.invoke(app, own).stdout)
    named = json.loads(runner.invoke(app, ["plan", "--model", "wan2.1-t2v-1.3b", "--gpu", "rtx4090", "--json"]).stdout)
    assert folder["stages_gib"] == named["stages_gib"] and folder["seconds"]["steps"] == 50
    # A folder is planned as it is loaded: with its own recipe and its own steps.
    (tmp_path / "videospark_recipe.json").write_text(json.dumps({"name": "own", "quantization": {"mode": "int8"}}))
    (tmp_path / "videospark_defaults.json").write_text(json.dumps({"num_inference_steps": 6, "guidance_scale": 1.0}))
    folder = json.loads(runner.invoke(app, own).stdout)
    assert folder["recipe"] == "own" and folder["seconds"]["steps"] == 6
    assert folder["seconds"]["step"] < 0.6 * named["seconds"]["step"]
    assert json.loads(runner.invoke(app, [*own, "--recipe", "dense"]).stdout)["recipe"] == "dense"
    assert "64 GiB there" in runner.invoke(app, [*own[:-1], "--ram", "64"]).output
    # A published checkpoint is planned with the recipe and at the size that it was made for.
    for name in ("SparkWan2.1-T2V-14B-720P-0.95Sparsity-3Step", "SparkWan2.1-T2V-14B-720P-0.95Sparsity-3Step.pth"):
        student = json.loads(runner.invoke(app, ["plan", "--model", name, "--gpu", "h100", "--json"]).stdout)
        assert student["recipe"] == "spark-95-3step" and student["seconds"]["steps"] == 3
        assert student["size"] == {"width": 1280, "height": 720, "frames": 81} and student["model"] == "wan2.1-t2v-14b"
    smaller = ["plan", "--model", name, "--size", "832x480x81", "--recipe", "dense", "--gpu", "h100", "--json"]
    assert json.loads(runner.invoke(app, smaller).stdout)["tokens"] == 32760
    assert runner.invoke(app, [*arguments[:-1], "rtx1"]).exit_code == 2
    assert runner.invoke(app, ["plan"]).exit_code == 2
    assert runner.invoke(app, ["plan", "--published"]).stdout == published_table()
    both = runner.invoke(app, ["plan", "--checkpoints"]).stdout
    assert checkpoint_table() in both and expectation_table() in both


@pytest.mark.parametrize("memory", ["0gb", "0.5gb"])
def test_a_card_smaller_than_its_driver_is_refused(memory):
    with pytest.raises(ConfigError, match="gpu: got .*more than the 0.8 GiB"):
        find_card(memory)
