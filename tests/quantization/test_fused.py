"""The parts of `fused.py` and a fused block, against formulas in float32 and against the stock block."""

import pytest
import torch
import torch.nn.functional as F

from videospark.attention.config import AttentionConfig
from videospark.attention.processors import install
from videospark.core.config import ConfigError
from videospark.core.numerics import relative_error, three_way
from videospark.quantization import QuantizationConfig, fused, native, quantize_
from videospark.quantization.fused_block import NORM_ROPE, check_fused_blocks
from videospark.quantization.primitives import quantize_rows

from .conftest import build_wan, run_wan, wan_inputs

SHAPES = [(1, 1, 5), (2, 7, 48), (1, 17, 130)]
DTYPES = [torch.float32, torch.bfloat16]


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=["whole", "chunked", "native"])
def path(request, monkeypatch):
    """The torch path with all tokens at once and in chunks, and the C++ kernels."""
    if request.param == "native":
        if native.unavailable():
            pytest.skip(native.unavailable())
        return "native"
    monkeypatch.setattr(fused, "_CPU_CHUNK_ELEMENTS", {"whole": 2**19, "chunked": 100}[request.param])
    return "torch"


def same_rows(actual, wanted):
    return (
        actual.num_rows == wanted.num_rows
        and torch.equal(actual.values.view(torch.int8), wanted.values.view(torch.int8))
        and torch.equal(actual.scale, wanted.scale)
    )


def factors(batch, length, width, kind):
    sizes = {"all": (1, 1), "batch": (batch, 1), "token": (batch, length)}[kind]
    return gaussian(*sizes, width, seed=5), gaussian(*sizes, width, seed=6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["all", "batch", "token"])
@pytest.mark.parametrize("affine", [False, True])
def test_layer_norm_and_modulation(path, dtype, shape, kind, affine):
    x = gaussian(*shape, dtype=dtype) * 3 + 1
    scale, shift = factors(*shape, kind)
    options = {"affine": affine, "path": path}
    actual, rows = fused.layer_norm_modulate(x, scale, shift, 1e-6, number="int8", row_multiple=8, **options)
    wanted = fused.layer_norm_modulate_reference(x, scale, shift, 1e-6, affine=affine)
    plain = F.layer_norm(x, shape[-1:], eps=1e-6) * (scale if affine else 1 + scale).to(dtype) + shift.to(dtype)
    assert actual.dtype == dtype and actual.shape == shape
    assert (result := three_way(actual, plain, wanted)), result.message
    assert same_rows(rows, quantize_rows(actual.flatten(0, 1), "int8", row_multiple=8))
    assert fused.layer_norm_modulate(x, scale, shift, 1e-6, **options)[1] is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("number", ["fp8", "int8"])
def test_gelu(path, dtype, shape, number):
    x = gaussian(*shape, dtype=dtype) * 3
    actual, rows = fused.gelu_tanh(x, number=number, path=path)
    assert actual.dtype == dtype
    assert (result := three_way(actual, F.gelu(x, approximate="tanh"), fused.gelu_tanh_reference(x))), result.message
    assert same_rows(rows, quantize_rows(actual.flatten(0, 1), number))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape,heads", [((1, 1, 12), 3), ((2, 9, 64), 2), ((1, 33, 80), 5)])
def test_norm_and_rotation(path, dtype, shape, heads):
    x, weight = gaussian(*shape, dtype=dtype) * 4, gaussian(shape[-1], seed=3, dtype=dtype)
    width = shape[-1] // heads
    angles = (gaussian(1, shape[1], 1, width // 2, seed=9) * 6).repeat_interleave(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    actual = fused.rms_norm_rope(x, weight, 1e-6, cos, sin, heads, path=path)
    wanted = fused.rms_norm_rope_reference(x, weight, 1e-6, cos, sin, heads)
    normed = F.rms_norm(x, shape[-1:], weight, 1e-6).unflatten(-1, (heads, -1))
    even, odd = normed[..., 0::2], normed[..., 1::2]
    c, s = cos[..., 0::2].to(dtype), sin[..., 1::2].to(dtype)
    plain = torch.stack((even * c - odd * s, even * s + odd * c), dim=-1).flatten(-2)
    assert actual.shape == (*shape[:2], heads, width) and actual.dtype == dtype
    # Of a dozen float32 numbers the plain form may by chance get all but one bit right.
    close = relative_error(actual, wanted) < 2e-7
    assert close or (result := three_way(actual, plain, wanted)), result.message


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["all", "batch", "token"])
def test_residual_and_gate(path, dtype, shape, kind):
    x, update, (gate, _) = gaussian(*shape, dtype=dtype), gaussian(*shape, seed=1, dtype=dtype), factors(*shape, kind)
    actual = fused.residual_gate(x, update, gate, path=path)
    plain = x + update * gate.to(dtype)
    assert (result := three_way(actual, plain, fused.residual_gate_reference(x, update, gate))), result.message


@pytest.mark.parametrize("broken", ["inf", "-inf", "nan"])
def test_broken_rows_stay_broken(path, broken):
    x = gaussian(1, 3, 16)
    x[0, 1, 2] = float(broken)
    y, rows = fused.gelu_tanh(x, number="int8", path=path)
    # GELU makes nothing of minus infinity.
    assert torch.isfinite(rows.scale).flatten().tolist() == torch.isfinite(y).all(-1).flatten().tolist()
    assert torch.isfinite(y[0, 0]).all() and (broken == "-inf" or not torch.isfinite(y[0, 1, 2]))
    flat = fused.quantize(x, "int8", path=path)
    assert torch.isfinite(flat.scale).flatten().tolist() == [True, False, True]


@pytest.mark.parametrize("reason,path", [(None, "native"), ("no C++ compiler", "torch")])
def test_the_path_says_why(reason, path, monkeypatch):
    monkeypatch.setattr(native, "unavailable", lambda: reason)
    chosen, why = fused.available_path.__wrapped__("cpu", 1536)
    assert chosen == path and (reason or "C++ kernels") in why
    assert fused.available_path("mps", 1536) == ("torch", "no kernels for mps")
    assert fused.available_path("cuda", 20000)[0] == "torch"


@pytest.mark.parametrize("capability,writes", [((8, 0), False), ((8, 6), False), ((8, 9), True), ((9, 0), True)])
def test_fp8_is_written_by_kernels_where_the_chip_has_it(capability, writes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    fused.kernel_writes.cache_clear()
    device = torch.device("cuda", 0)
    assert fused.kernel_writes("fp8", device) == writes and fused.kernel_writes("int8", device)
    fused.kernel_writes.cache_clear()


MODES = ["none", "fp8", "int8", "int8_weight_only"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("processors", ["stock", "videospark"])
def test_fusion_changes_rounding_only(mode, dtype, per_token, processors, monkeypatch):
    monkeypatch.setattr("videospark.quantization.fused_block.CPU_CHUNK_ROWS", 16)
    inputs = wan_inputs(dtype=dtype, per_token=per_token)
    exact = run_wan(build_wan(), **wan_inputs(per_token=per_token))
    outputs = []
    for on in (False, True):
        wan = build_wan().to(dtype)
        attention = install(wan, AttentionConfig()) if processors == "videospark" else None
        if mode != "none" or on:
            quantize_(wan, QuantizationConfig(mode=mode, fused=on))
        outputs.append(run_wan(wan, **inputs))
        if attention is not None:
            attention.remove()
    apart, error = relative_error(outputs[1], outputs[0]), relative_error(outputs[0], exact)
    if mode == "none" and dtype == torch.float32:
        assert apart < 1e-5
    else:
        # A sum in another order may move a number to the next point of its grid: no more than the grid itself does.
        assert apart <= error, (apart, error)
        assert relative_error(outputs[1], exact) <= 1.2 * error


@pytest.mark.parametrize("cross_attn_norm", [True, False])
def test_blocks_without_a_norm_before_cross_attention(cross_attn_norm):
    wan = build_wan(cross_attn_norm=cross_attn_norm)
    before = run_wan(wan)
    quantize_(wan, QuantizationConfig(fused=True))
    assert relative_error(run_wan(wan), before) < 1e-5


def test_fused_layers_quantize_their_input_once_and_together(monkeypatch):
    from videospark.quantization.linear import QuantizedLinear

    wan = build_wan()
    quantize_(wan, QuantizationConfig(mode="int8", fused=True))
    calls = []
    original = QuantizedLinear.quantize_input
    monkeypatch.setattr(
        QuantizedLinear, "quantize_input", lambda self, *a: (calls.append(self.layer_name), original(self, *a))[1]
    )
    run_wan(wan)
    # What is left: two attention outputs and the cross queries of each block, and the text once.
    assert len(calls) == 2 * 3 + 1
    assert not [name for name in calls if "ffn" in name or "attn1.to_q" in name]


def test_attention_of_ours_takes_the_fused_norm(monkeypatch):
    wan = build_wan()
    install(wan, AttentionConfig())
    before = run_wan(wan)
    installed = quantize_(wan, QuantizationConfig(fused=True))
    calls = []
    original = fused.rms_norm_rope
    monkeypatch.setattr(
        "videospark.quantization.fused_block.rms_norm_rope", lambda *a, **k: (calls.append(1), original(*a, **k))[1]
    )
    assert relative_error(run_wan(wan), before) < 1e-5 and len(calls) == 4
    installed.remove()
    assert all(NORM_ROPE not in block.attn1.__dict__ for block in wan.blocks)
    assert torch.equal(run_wan(wan), before) and len(calls) == 4


def test_a_gradient_is_refused():
    wan = build_wan()
    quantize_(wan, QuantizationConfig(fused=True))
    inputs = wan_inputs()
    inputs["hidden_states"].requires_grad_()
    with pytest.raises(NotImplementedError, match="fused"):
        wan(**inputs)


def test_broken_input_is_a_named_error_in_fused_blocks():
    wan = build_wan()
    quantize_(wan, QuantizationConfig(mode="int8", fused=True))
    inputs = wan_inputs()
    inputs["hidden_states"][0, 0, 0, 0, 0] = float("inf")
    with pytest.raises(FloatingPointError, match=r"blocks\.0\.attn1\.to_q"):
        run_wan(wan, **inputs)


def test_blocks_that_are_wrapped_are_refused_and_kept():
    wan = build_wan()
    with pytest.raises(ConfigError, match="fused"):
        check_fused_blocks(torch.nn.Linear(2, 2))
    wan.blocks[1].forward = wan.blocks[1].forward
    with pytest.raises(ConfigError, match=r"blocks\.1\.forward"):
        quantize_(wan, QuantizationConfig(fused=True))
    del wan.blocks[1].forward
    installed = quantize_(wan, QuantizationConfig(mode="int8", fused=True))
    fused_forward = wan.blocks[1].forward
    wan.blocks[1].forward = lambda *a, **k: fused_forward(*a, **k)
    with pytest.raises(ConfigError, match="wrapped"):
        installed.remove()
    wan.blocks[1].forward = fused_forward
    installed.remove()
