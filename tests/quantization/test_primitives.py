import pytest
import torch

from videospark.quantization.primitives import (
    DTYPES,
    LIMITS,
    SCALE_FLOOR,
    QuantizedRows,
    fake_quantize,
    quantize_rows,
    quantize_weight,
    to_grid,
)

NUMBERS = ["fp8", "int8"]


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("rows,channels", [(1, 3), (7, 100), (17, 33)])
def test_every_number_moves_less_than_half_a_step(number, rows, channels):
    x = gaussian(rows, channels)
    made = quantize_rows(x, number)
    assert made.values.dtype == DTYPES[number] and made.scale.shape == (rows, 1)
    error = (made.dequantize() - x).abs()
    # INT8 has equal steps; FP8 has three bits after the leading one, and steps of 2^-9 near zero.
    half = made.scale / 2 if number == "int8" else torch.maximum(x.abs() / 16, made.scale * 2**-10)
    assert (error <= half * 1.0001).all()
    largest = made.values.float().abs().amax(dim=1)
    assert torch.equal(largest, torch.full((rows,), LIMITS[number]))


@pytest.mark.parametrize("number", NUMBERS)
def test_scales_do_not_depend_on_the_other_rows(number):
    x = gaussian(5, 40) * torch.tensor([1e-6, 1.0, 1e4, 3.0, 1e-2])[:, None]
    whole = quantize_rows(x, number)
    for row in range(5):
        alone = quantize_rows(x[row : row + 1], number)
        assert torch.equal(alone.values.view(torch.int8)[0], whole.values.view(torch.int8)[row])
        assert alone.scale[0] == whole.scale[row]


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_zeros_stay_zeros(number, granularity):
    x = gaussian(4, 16)
    x[1], x[:, 5] = 0, 0
    back = quantize_rows(x, number, granularity).dequantize()
    assert (back[1] == 0).all() and (back[:, 5] == 0).all() and back.abs().sum() > 0
    empty = quantize_rows(torch.zeros(3, 8), number, granularity)
    assert (empty.dequantize() == 0).all() and (empty.scale == SCALE_FLOOR).all()


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_so_small_that_squares_vanish(number):
    x = gaussian(2, 64) * 1e-7
    assert torch.linalg.vector_norm(quantize_rows(x, number).dequantize() - x) < 0.04 * torch.linalg.vector_norm(x)


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_broken_row_stays_broken_and_breaks_no_other(number, bad):
    x = gaussian(3, 16)
    x[1, 2] = bad
    made = quantize_rows(x, number)
    assert torch.isfinite(made.scale).flatten().tolist() == [True, False, True]
    back = made.dequantize()
    assert not torch.isfinite(back[1]).any() and torch.isfinite(back[[0, 2]]).all()


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_padding_counts_for_nothing(number, granularity):
    x = gaussian(5, 16)
    padded, plain = (quantize_rows(x, number, granularity, row_multiple=multiple) for multiple in (8, 1))
    assert padded.values.shape == (8, 16) and padded.num_rows == 5
    assert (padded.values[5:].float() == 0).all()
    assert torch.equal(padded.dequantize(), plain.dequantize())


@pytest.mark.parametrize("granularity,scales", [("row", (4, 1)), ("tensor", (1, 1))])
def test_narrow_is_a_run_of_rows(granularity, scales):
    whole = quantize_rows(gaussian(9, 16), "int8", granularity)
    part = whole.narrow(3, 7)
    assert isinstance(part, QuantizedRows) and part.scale.shape == scales
    assert torch.equal(part.dequantize(), whole.dequantize()[3:7])


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_quantized_in_runs_is_the_same(number, granularity, dtype, monkeypatch):
    weight = gaussian(37, 20).to(dtype)
    whole = quantize_rows(weight, number, granularity)
    monkeypatch.setattr("videospark.quantization.primitives._WEIGHT_CHUNK_ELEMENTS", 100)
    values, scale = quantize_weight(weight, number, granularity)
    assert torch.equal(values.view(torch.int8), whole.values.view(torch.int8)) and torch.equal(scale, whole.scale)


def test_int8_rounds_to_nearest_and_ties_to_even():
    scaled = torch.tensor([-200.0, -1.5, -0.5, 0.5, 1.5, 2.5, 2.51, 200.0])
    assert to_grid(scaled, "int8").tolist() == [-127, -2, 0, 0, 2, 2, 3, 127]


@pytest.mark.parametrize("number", NUMBERS)
def test_fake_quantization_is_the_same_grid(number):
    x = gaussian(2, 3, 24).bfloat16()
    moved = fake_quantize(x, number)
    assert moved.shape == x.shape and moved.dtype == x.dtype
    assert torch.equal(moved.reshape(6, 24), quantize_rows(x.reshape(6, 24), number).dequantize(torch.bfloat16))
