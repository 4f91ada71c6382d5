"""The Triton kernels under Triton's interpreter; run by `test_triton_kernels.py` in a process of its own.

Triton decides at its import whether it interprets, so that a process can do one or the other.
"""

import pytest
import torch

from videospark.core.numerics import three_way
from videospark.quantization import fused

from .conftest import build_wan, run_wan, wan_inputs

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
KINDS = [
    (torch.float32, None),
    (torch.float32, "fp8"),
    (torch.float32, "int8"),
    (torch.float16, "fp8"),
    (torch.bfloat16, None),
    (torch.bfloat16, "int8"),
]


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_rows(rows, y, number, row_multiple=1):
    """Values and scales equal those of the torch path for the same y."""
    if number is None:
        assert rows is None
        return
    wanted = fused.quantize(y, number, row_multiple=row_multiple)
    assert rows.num_rows == wanted.num_rows and rows.values.shape == wanted.values.shape
    assert torch.equal(rows.scale, wanted.scale)
    assert torch.equal(rows.values.float(), wanted.values.float())  # as numbers: minus zero may be zero


def factors(batch, length, width, kind):
    sizes = {"all": (1, 1), "batch": (batch, 1), "token": (batch, length)}[kind]
    return gaussian(*sizes, width, seed=5), gaussian(*sizes, width, seed=6)


def close(actual, torch_path, reference):
    result = three_way(actual, torch_path, reference)
    assert result, result.message


@pytest.mark.parametrize("dtype,number", KINDS)
@pytest.mark.parametrize(
    "shape,kind,affine",
    [((1, 1, 5), "all", False), ((2, 7, 48), "batch", False), ((2, 7, 48), "token", False), ((1, 9, 130), "all", True)],
)
def test_layer_norm_and_modulation(dtype, shape, kind, affine, number):
    x, (scale, shift) = gaussian(*shape, dtype=dtype) * 3 + 1, factors(*shape, kind)
    settings = {"affine": affine, "number": number, "row_multiple": 4}
    y, rows = fused.layer_norm_modulate(x, scale, shift, 1e-6, **settings, path="triton")
    plain, _ = fused.layer_norm_modulate(x, scale, shift, 1e-6, affine=affine)
    assert y.dtype == dtype and y.shape == shape
    close(y, plain, fused.layer_norm_modulate_reference(x, scale, shift, 1e-6, affine=affine))
    check_rows(rows, y, number, 4)


@pytest.mark.parametrize("dtype,number", KINDS)
@pytest.mark.parametrize("shape", [(1, 1, 5), (1, 9, 130)])
def test_gelu(dtype, shape, number):
    x = gaussian(*shape, dtype=dtype) * 3
    y, rows = fused.gelu_tanh(x, number=number, path="triton")
    close(y, fused.gelu_tanh(x)[0], fused.gelu_tanh_reference(x))
    check_rows(rows, y, number)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("number", ["fp8", "int8"])
@pytest.mark.parametrize("rows,width", [(1, 3), (7, 100), (17, 33)])
def test_quantization_alone(dtype, number, rows, width):
    x = gaussian(rows, width, dtype=dtype)
    x[0] = 0
    made = fused.quantize(x, number, row_multiple=8, path="triton")
    check_rows(made, x, number, 8)
    assert (made.dequantize()[0] == 0).all()


@pytest.mark.parametrize("number", ["fp8", "int8"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_broken_rows_stay_broken_and_break_no_other(number, bad):
    x = gaussian(3, 20)
    x[1, 4] = bad
    made = fused.quantize(x, number, path="triton")
    assert torch.isfinite(made.scale).flatten().tolist() == [True, False, True]
    whole = fused.quantize(x[[0, 2]], number)
    assert torch.equal(made.values.view(torch.int8)[[0, 2]], whole.values.view(torch.int8))
    _, rows = fused.gelu_tanh(x[None].abs(), number=number, path="triton")
    assert torch.isfinite(rows.scale).flatten().tolist() == [True, False, True]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape,heads", [((1, 1, 12), 3), ((2, 9, 64), 2), ((1, 33, 80), 5)])
def test_norm_and_rotation(dtype, shape, heads):
    x, weight = gaussian(*shape, dtype=dtype) * 4, gaussian(shape[-1], seed=3, dtype=dtype)
    width = shape[-1] // heads
    angles = (gaussian(1, shape[1], 1, width // 2, seed=9) * 6).repeat_interleave(2, dim=-1)
    tables = angles.cos(), angles.sin()
    y = fused.rms_norm_rope(x, weight, 1e-6, *tables, heads, path="triton")
    plain = fused.rms_norm_rope(x, weight, 1e-6, *tables, heads)
    assert y.shape == plain.shape and y.dtype == dtype
    close(y, plain, fused.rms_norm_rope_reference(x, weight, 1e-6, *tables, heads))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape,kind", [((1, 1, 5), "all"), ((2, 7, 48), "batch"), ((2, 7, 48), "token"), ((1, 2, 2100), "all")]
)
def test_residual_and_gate(dtype, shape, kind):
    x, update, (gate, _) = gaussian(*shape, dtype=dtype), gaussian(*shape, seed=1, dtype=dtype), factors(*shape, kind)
    y = fused.residual_gate(x, update, gate, path="triton")
    close(y, fused.residual_gate(x, update, gate), fused.residual_gate_reference(x, update, gate))


@pytest.mark.parametrize("mode", ["fp8", "int8", "none"])
def test_a_fused_wan_runs_on_the_kernels(mode, monkeypatch):
    from videospark.core.numerics import relative_error
    from videospark.quantization import QuantizationConfig, fused_block, quantize_

    wan, inputs = build_wan(num_layers=1), wan_inputs(frames=1, height=6)
    quantize_(wan, QuantizationConfig(mode=mode, fused=True))
    plain = run_wan(wan, **inputs)
    monkeypatch.setattr(fused_block, "available_path", lambda *_: ("triton", "interpreted"))
    # A sum in another order may move a number to the next point of its grid.
    assert 0 < relative_error(run_wan(wan, **inputs), plain) < {"fp8": 0.02, "int8": 0.006, "none": 1e-5}[mode]
