import pytest
import torch
from torch import nn

from videospark.core.config import ConfigError
from videospark.core.numerics import relative_error
from videospark.quantization import QuantizationConfig, find_hot_channels, quantize_
from videospark.quantization.calibration import channel_peaks

from .conftest import build_wan, run_wan


def hot_wan(channels=(3, 40), factor=60.0):
    """A Wan whose second block's self-attention and feed-forward read a few channels that are always large."""
    wan = build_wan()
    with torch.no_grad():
        wan.blocks[1].scale_shift_table[:, 0, list(channels)] += factor  # the shift of the first modulation
        wan.blocks[1].scale_shift_table[:, 3, list(channels)] += factor  # and of the third
    return wan


HOT_LAYERS = {"blocks.1.attn1.to_q", "blocks.1.attn1.to_k", "blocks.1.attn1.to_v", "blocks.1.ffn.net.0.proj"}
CONFIG = QuantizationConfig(mode="int8", hot_channels=4)


def test_hot_channels_are_found_where_they_are():
    wan = hot_wan()
    hot = find_hot_channels(wan, CONFIG, lambda: run_wan(wan))
    assert {name: hot[name] for name in HOT_LAYERS} == {name: [3, 40] for name in HOT_LAYERS}
    assert not any(wan.blocks[1].attn1.to_q._forward_pre_hooks.values())


def test_a_gaussian_model_has_none():
    wan = build_wan()
    hot = find_hot_channels(wan, CONFIG, lambda: run_wan(wan))
    assert not HOT_LAYERS & set(hot)


def test_the_largest_ones_are_taken_first():
    wan = hot_wan(channels=(3, 11, 40))
    with torch.no_grad():
        wan.blocks[1].scale_shift_table[:, 0, 11] += 100
    hot = find_hot_channels(wan, QuantizationConfig(mode="int8", hot_channels=1), lambda: run_wan(wan))
    assert hot["blocks.1.attn1.to_q"] == [11]


def test_multiplying_them_apart_helps_int8():
    errors = {}
    for apart in (False, True):
        wan, seen = hot_wan(), []
        layer = wan.blocks[1].ffn.net[0].proj
        handle = layer.register_forward_pre_hook(lambda m, args, seen=seen: seen.append(args[0]))
        run_wan(wan)
        handle.remove()
        x = seen[0]
        wanted = layer(x)
        hot = find_hot_channels(wan, CONFIG, lambda wan=wan: run_wan(wan)) if apart else None
        config = CONFIG if apart else QuantizationConfig(mode="int8")
        installed = quantize_(wan, config, hot_channels=hot)
        # What the hot channels give is the same for every token; the rest is what the model is about.
        constant = wanted.mean(dim=(0, 1), keepdim=True)
        errors[apart] = relative_error(wan.blocks[1].ffn.net[0].proj(x) - constant, wanted - constant)
        row = next(row for row in installed.report().layers if row["layer"] == "blocks.1.ffn.net.0.proj")
        assert row["hot_channels"] == (2 if apart else 0)
    assert errors[True] < 0.02 and errors[True] < errors[False] / 5


@pytest.mark.parametrize("fused", [False, True])
def test_a_whole_model_with_hot_channels_is_closer(fused):
    wan = hot_wan()
    exact = run_wan(wan)
    hot = find_hot_channels(wan, CONFIG, lambda: run_wan(wan))
    plain = quantize_(wan, QuantizationConfig(mode="int8", fused=fused))
    without = relative_error(run_wan(wan), exact)
    plain.remove()
    quantize_(wan, QuantizationConfig(mode="int8", hot_channels=4, fused=fused), hot_channels=hot)
    assert relative_error(run_wan(wan), exact) < without


def test_peaks_are_over_all_calls():
    model = nn.ModuleDict({"layer": nn.Linear(4, 4)})
    config = QuantizationConfig(mode="int8", include=("layer",), exclude=(), hot_channels=1)

    def run():
        model["layer"](torch.tensor([[1.0, -5.0, 0.0, 2.0]]))
        model["layer"](torch.tensor([[-3.0, 1.0, 0.0, 1.0]]))

    assert channel_peaks(model, config, run)["layer"].tolist() == [3.0, 5.0, 0.0, 2.0]


def test_wrong_use_is_named():
    wan = build_wan()
    with pytest.raises(ConfigError, match="hot_channels"):
        find_hot_channels(wan, QuantizationConfig(mode="int8"), lambda: None)
    with pytest.raises(ConfigError, match="ratio"):
        find_hot_channels(wan, CONFIG, lambda: None, ratio=1.0)
    with pytest.raises(ConfigError, match="run"):
        find_hot_channels(wan, CONFIG, lambda: None)
    with pytest.raises(ConfigError, match="find_hot_channels"):
        quantize_(wan, CONFIG)
    with pytest.raises(ConfigError, match="left out"):
        quantize_(wan, QuantizationConfig(mode="int8"), hot_channels={"blocks.0.ffn.net.2": [1]})
    for indices in ([1, 1], [160], [-1], [0, 1, 2, 3, 4]):
        with pytest.raises(ConfigError, match=r"hot_channels\.blocks\.0\.ffn\.net\.2"):
            quantize_(wan, CONFIG, hot_channels={"blocks.0.ffn.net.2": indices})
    with pytest.raises(ConfigError, match="proj_out"):
        quantize_(wan, CONFIG, hot_channels={"proj_out": [1]})
