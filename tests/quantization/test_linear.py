import gc

import pytest
import torch
from torch import nn

from videospark.core.config import ConfigError
from videospark.core.numerics import relative_error
from videospark.quantization.config import QuantizationConfig
from videospark.quantization.linear import QuantizedLinear, SharedRows, StepControl
from videospark.quantization.primitives import quantize_rows

LIMITS = {"fp8": 0.045, "int8": 0.015, "fp8_weight_only": 0.035, "int8_weight_only": 0.012}


def linear(inputs=64, outputs=48, *, bias=True, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    made = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(made.weight)
    return made.to(dtype).requires_grad_(False)


def config(mode, **settings):
    return QuantizationConfig(mode=mode, include=("layer",), exclude=(), **settings)


@pytest.mark.parametrize("mode", LIMITS)
@pytest.mark.parametrize("shape", [(1, 1536), (7, 1536), (2, 17, 1536), (3, 1, 5, 1536)])
def test_error_is_that_of_the_numbers(mode, shape):
    layer = linear(1536, 64)
    made = QuantizedLinear.from_linear(layer, config(mode))
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    actual = made(x)
    assert actual.shape == (*shape[:-1], 64) and actual.dtype == x.dtype
    assert 0 < relative_error(actual, layer(x)) <= LIMITS[mode]


@pytest.mark.parametrize("mode", LIMITS)
@pytest.mark.parametrize("bias", [True, False])
def test_bfloat16_in_and_out(mode, bias):
    layer = linear(256, 32, bias=bias, dtype=torch.bfloat16)
    made = QuantizedLinear.from_linear(layer, config(mode))
    x = torch.randn(17, 256, generator=torch.Generator().manual_seed(1)).bfloat16()
    actual = made(x)
    assert actual.dtype == torch.bfloat16
    assert relative_error(actual, torch.nn.functional.linear(x.float(), layer.weight.float(),
                          None if layer.bias is None else layer.bias.float())) <= LIMITS[mode] + 2**-8  # fmt: skip


@pytest.mark.parametrize("mode", ["fp8", "int8", "fp8_weight_only", "int8_weight_only"])
def test_zero_rows_and_channels_are_the_bias(mode):
    layer = linear()
    with torch.no_grad():
        layer.weight[5] = 0
    made = QuantizedLinear.from_linear(layer, config(mode))
    x = torch.randn(4, 64)
    x[2] = 0
    actual = made(x)
    assert torch.equal(actual[2], layer.bias) and torch.equal(actual[:, 5], layer.bias[5].expand(4))


@pytest.mark.parametrize("mode", ["fp8", "int8"])
@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_broken_input_is_a_named_error(mode, bad):
    made = QuantizedLinear.from_linear(linear(), config(mode), name="blocks.3.ffn.net.2")
    x = torch.randn(2, 5, 64)
    x[1, 3, 9] = bad
    with pytest.raises(FloatingPointError, match=r"blocks\.3\.ffn\.net\.2: NaN or infinity in 1 rows"):
        made(x)


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_broken_weights_are_a_named_error(bad):
    layer = linear()
    layer.weight.data[1, 2] = bad
    with pytest.raises(ConfigError, match=r"blocks\.0\.attn1\.to_q\.weight"):
        QuantizedLinear.from_linear(layer, config("int8"), name="blocks.0.attn1.to_q")


@pytest.mark.parametrize("number", ["fp8", "int8"])
def test_no_rows_at_all(number):
    made = QuantizedLinear.from_linear(linear(), config(number))
    assert made(torch.zeros(2, 0, 64)).shape == (2, 0, 48)


@pytest.mark.parametrize("number", ["fp8", "int8"])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_chunks_leave_no_seam(number, granularity, monkeypatch):
    made = QuantizedLinear.from_linear(linear(), config(number, granularity=granularity))
    x = torch.randn(37, 64)
    whole = made(x)
    for module in ("linear", "engines"):
        monkeypatch.setattr(f"videospark.quantization.{module}.CPU_CHUNK_ROWS", 8)
    assert relative_error(made(x), whole) < 1e-6


def test_a_cast_leaves_values_and_scales_alone():
    made = QuantizedLinear.from_linear(linear(), config("fp8"))
    values, scale = made.weight.view(torch.uint8).clone(), made.weight_scale.clone()
    made.to(torch.bfloat16)
    assert torch.equal(made.weight.view(torch.uint8), values) and torch.equal(made.weight_scale, scale)
    assert made.weight.dtype == torch.float8_e4m3fn and made.weight_scale.dtype == torch.float32
    assert made.bias.dtype == torch.bfloat16
    assert made(torch.randn(3, 64).bfloat16()).dtype == torch.bfloat16


def test_a_gradient_is_refused():
    made = QuantizedLinear.from_linear(linear(), config("int8"), name="layer")
    with pytest.raises(NotImplementedError, match="fake_quantize_"):
        made(torch.randn(2, 64, requires_grad=True))
    with torch.no_grad():
        assert made(torch.randn(2, 64, requires_grad=True)).shape == (2, 48)


@pytest.mark.parametrize("mode", ["fp8", "int8"])
def test_hot_channels_are_multiplied_apart(mode):
    layer = linear(256, 32)
    x = torch.randn(50, 256, generator=torch.Generator().manual_seed(1))
    hot = torch.tensor([3, 77, 200])
    x[:, hot] *= 60
    wanted = layer(x)
    plain = QuantizedLinear.from_linear(layer, config(mode))
    apart = QuantizedLinear.from_linear(layer, config(mode, hot_channels=3), hot_index=hot)
    # Only the cold channels carry an error now, and the output is mostly that of the hot ones.
    assert relative_error(apart(x), wanted) < relative_error(plain(x), wanted) / 5
    assert torch.equal(apart.dequantized_weight(torch.float32)[:, hot], layer.weight[:, hot])
    assert "3 hot channels" in repr(apart)


def test_shared_rows_are_made_once_and_never_stale():
    shared, made = SharedRows(), []

    def get(source):
        def make():
            made.append(1)
            return quantize_rows(source, "int8")

        return shared.get(source, make)

    x, other = torch.randn(4, 16), torch.randn(4, 16)
    first = get(x)
    assert get(x) is first and len(made) == 1
    x.add_(1)
    assert get(x) is not first and len(made) == 2
    get(other)
    get(x)
    assert len(made) == 4
    del x
    gc.collect()
    assert shared._rows is None


@pytest.mark.parametrize("inference", [False, True])
def test_layers_that_share_an_input_give_what_they_give_alone(inference):
    layers = [QuantizedLinear.from_linear(linear(seed=s), config("int8")) for s in range(3)]
    x = torch.randn(2, 9, 64)
    with torch.inference_mode(inference):
        alone = [layer(x) for layer in layers]
        shared = SharedRows()
        for layer in layers:
            layer.shared = shared
        assert all(torch.equal(layer(x), wanted) for layer, wanted in zip(layers, alone, strict=True))


def test_an_input_changed_in_inference_mode_is_not_taken_for_the_old_one():
    # Tensors of inference mode have no version that would tell.
    layer = QuantizedLinear.from_linear(linear(), config("int8"))
    layer.shared = SharedRows()
    with torch.inference_mode():
        x = torch.randn(4, 64)
        layer(x)
        x.mul_(2)
        layer_alone = QuantizedLinear.from_linear(linear(), config("int8"))
        assert torch.equal(layer(x), layer_alone(x))


def test_steps_in_high_precision_run_the_original():
    layer = linear()
    made = QuantizedLinear.from_linear(layer, config("int8", high_precision_steps=(1,), originals="keep"))
    made.control = StepControl((1,))
    made.hold_original(layer)
    x = torch.randn(3, 64)
    with pytest.raises(RuntimeError, match="set_step"):
        made(x)
    made.control.step = 0
    assert not torch.equal(made(x), layer(x))
    made.control.step = 1
    assert torch.equal(made(x), layer(x))
    assert set(made.state_dict()) == {"weight", "weight_scale", "bias"}


@pytest.mark.slow
@pytest.mark.parametrize("width,ffn", [(1536, 8960), (5120, 13824)])
@pytest.mark.parametrize("mode", ["fp8", "int8"])
def test_products_of_wan_size(width, ffn, mode):
    for inputs, outputs in ((width, width), (width, ffn), (ffn, width)):
        torch.manual_seed(0)
        layer, x = linear(inputs, outputs), torch.randn(33, inputs)
        made = QuantizedLinear.from_linear(layer, config(mode))
        assert relative_error(made(x), layer(x)) <= LIMITS[mode]
