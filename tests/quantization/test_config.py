import pytest

from videospark.core.config import ConfigError, from_dict, to_dict
from videospark.quantization.config import QuantizationConfig


@pytest.mark.parametrize(
    "settings,field",
    [
        ({"mode": "fp4"}, "mode"),
        ({"mode": "fp8", "engine": "int_mm"}, "engine"),
        ({"mode": "int8", "engine": "scaled_mm"}, "engine"),
        ({"mode": "int8", "engine": "transformer_engine"}, "engine"),
        ({"engine": "reference"}, "engine"),
        ({"mode": "fp8", "granularity": "block"}, "granularity"),
        ({"mode": "fp8", "include": ()}, "include"),
        ({"mode": "fp8", "include": ("",)}, "include"),
        ({"mode": "fp8", "exclude": "proj_out"}, "exclude"),
        ({"mode": "fp8", "high_precision_steps": (-1,), "originals": "keep"}, "high_precision_steps"),
        ({"mode": "fp8", "high_precision_steps": (0,)}, "originals"),
        ({"mode": "fp8", "originals": "burn"}, "originals"),
        ({"mode": "int8", "hot_channels": -1}, "hot_channels"),
        ({"mode": "int8", "hot_channels": True}, "hot_channels"),
        ({"mode": "int8_weight_only", "hot_channels": 4}, "hot_channels"),
        ({"mode": "int8", "engine": "torchao", "hot_channels": 4}, "hot_channels"),
        ({"hot_channels": 4}, "hot_channels"),
        ({"mode": "fp8", "transformer_engine_recipe": "mxfp8"}, "transformer_engine_recipe"),
        (
            {"mode": "fp8", "engine": "transformer_engine", "transformer_engine_recipe": "mxfp6"},
            "transformer_engine_recipe",
        ),
        ({"granularity": "tensor"}, "mode"),
    ],
)
def test_wrong_settings_name_their_field(settings, field):
    with pytest.raises(ConfigError, match=rf"^{field}: got"):
        QuantizationConfig(**settings)


def test_plain_data_and_back():
    config = QuantizationConfig(mode="int8", engine="int_mm", hot_channels=8, fused=True, originals="keep",
                                high_precision_steps=(0, 2))  # fmt: skip
    assert from_dict(QuantizationConfig, to_dict(config)) == config


def test_the_defaults_are_the_ten_products_of_a_block():
    config = QuantizationConfig(mode="fp8")
    inside = [f"blocks.7.{a}.{b}" for a in ("attn1", "attn2") for b in ("to_q", "to_k", "to_v", "to_out.0")]
    inside += ["blocks.7.ffn.net.0.proj", "blocks.7.ffn.net.2"]
    assert all(config.selects(name) for name in inside)
    outside = ["proj_out", "patch_embedding", "condition_embedder.time_proj", "blocks.7.attn2.add_k_proj",
               "condition_embedder.text_embedder.linear_1", "blocks.7.attn1.linear_branch.gate"]  # fmt: skip
    assert not any(config.selects(name) for name in outside)
    without = QuantizationConfig(mode="fp8", exclude=("blocks.7.ffn.net.2",))
    assert not without.selects("blocks.7.ffn.net.2") and without.selects("blocks.8.ffn.net.2")


def test_what_is_active():
    assert not QuantizationConfig().active
    assert QuantizationConfig(fused=True).active and QuantizationConfig(mode="fp8").active
    assert QuantizationConfig(mode="int8_weight_only").weight_only and not QuantizationConfig(mode="int8").weight_only
    assert QuantizationConfig(mode="int8_weight_only").number == "int8"
    assert QuantizationConfig(mode="fp8_weight_only").number == "fp8"
