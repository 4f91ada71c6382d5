import pytest
import torch

from videospark.core.config import ConfigError
from videospark.core.numerics import relative_error
from videospark.quantization import engines
from videospark.quantization.engines import choose_engine
from videospark.quantization.primitives import quantize_rows, reference_product

CPU = torch.device("cpu")
PAIRS = [("scaled_mm", "fp8"), ("reference", "fp8"), ("int_mm", "int8"), ("reference", "int8")]
LIMITS = {"fp8": 0.045, "int8": 0.015}


@pytest.fixture(autouse=True)
def _every_test_chooses_anew():
    choose_engine.cache_clear()
    yield
    choose_engine.cache_clear()


def product(rows, inputs, outputs, number, granularity, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, inputs, generator=generator), torch.randn(outputs, inputs, generator=generator)
    bias = torch.randn(outputs, generator=generator)
    return x, weight, bias, quantize_rows(x, number, granularity), quantize_rows(weight, number, granularity)


@pytest.mark.parametrize("engine,number", PAIRS)
@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [1, 7, 17])
def test_engines_equal_the_reference_up_to_rounding(engine, number, granularity, dtype, rows):
    _, _, bias, left, right = product(rows, 96, 48, number, granularity)
    chosen = choose_engine(engine, number, granularity, CPU, dtype)
    assert chosen.name == engine and str(dtype).removeprefix("torch.") in chosen.reason
    for offset in (bias.to(dtype), None):
        actual = chosen.multiply(left, right.values, right.scale, offset, dtype)
        wanted = reference_product(left, right.values, right.scale, offset, torch.float32)
        assert actual.dtype == dtype and actual.shape == (rows, 48)
        # The largest rounding step of the result, twice; float32 sums differ in their order only.
        assert relative_error(actual, wanted) <= 2 * torch.finfo(dtype).eps + 1e-6


@pytest.mark.parametrize("engine,number", PAIRS)
@pytest.mark.parametrize("rows,inputs,outputs", [(1, 1536, 64), (17, 1536, 48), (40, 512, 96)])
def test_relative_error_of_gaussian_products(engine, number, rows, inputs, outputs):
    x, weight, _, left, right = product(rows, inputs, outputs, number, "row")
    chosen = choose_engine(engine, number, "row", CPU, torch.bfloat16)
    actual = chosen.multiply(left, right.values, right.scale, None, torch.bfloat16)
    error = relative_error(actual, x @ weight.t())
    assert LIMITS[number] / 10 < error <= LIMITS[number]


@pytest.mark.parametrize("number", ["fp8", "int8"])
def test_reference_takes_sizes_that_16_does_not_divide(number):
    x, weight, bias, left, right = product(5, 771, 13, number, "row")
    chosen = choose_engine("reference", number, "row", CPU, torch.float32)
    assert chosen.alignment == 1
    actual = chosen.multiply(left, right.values, right.scale, bias, torch.float32)
    assert relative_error(actual, x @ weight.t() + bias) <= LIMITS[number]


def test_int8_chunks_of_rows_and_columns_leave_no_seam(monkeypatch):
    _, _, bias, left, right = product(37, 64, 80, "int8", "row")
    whole = engines.int_mm(left, right.values, right.scale, bias, torch.float32)
    monkeypatch.setattr(engines, "CPU_CHUNK_ROWS", 8)
    monkeypatch.setattr(engines, "_CPU_CHUNK_ELEMENTS", 8 * 32)
    assert torch.equal(engines.int_mm(left, right.values, right.scale, bias, torch.float32), whole)
    without = engines.int_mm(left, right.values, right.scale, None, torch.float32)
    assert torch.allclose(without + bias, whole, atol=1e-5)


@pytest.mark.parametrize("variant", [engines.scaled_mm_inside, engines.scaled_mm_after])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_both_ways_to_scale_agree(variant, granularity):
    _, _, bias, left, right = product(9, 64, 32, "fp8", granularity)
    wanted = reference_product(left, right.values, right.scale, bias, torch.float32)
    assert relative_error(variant(left, right.values, right.scale, bias, torch.bfloat16), wanted) < 0.01


@pytest.mark.parametrize("number,name", [("fp8", "scaled_mm"), ("int8", "int_mm")])
def test_auto_takes_the_fast_engine_and_says_so(number, name):
    chosen = choose_engine("auto", number, "row", CPU, torch.bfloat16)
    assert chosen.name == name
    assert "a tiny" in str(chosen) and name in str(chosen)


def _broken(*_):
    raise RuntimeError("no such kernel")


def _replace(monkeypatch, name, multiply):
    import dataclasses

    made = tuple(dataclasses.replace(c, multiply=multiply) if c.name == name else c for c in engines._CANDIDATES)
    monkeypatch.setattr(engines, "_CANDIDATES", made)


def test_auto_passes_over_what_fails_and_names_it(monkeypatch):
    _replace(monkeypatch, "int_mm", _broken)
    chosen = choose_engine("auto", "int8", "row", CPU, torch.bfloat16)
    assert chosen.name == "reference" and "no such kernel" in chosen.reason


def test_a_product_that_is_wrong_is_no_engine(monkeypatch):
    def twice(*arguments):
        return 2 * reference_product(*arguments)

    _replace(monkeypatch, "scaled_mm", twice)
    assert "wrong product" in choose_engine("auto", "fp8", "row", CPU, torch.bfloat16).reason


def test_a_named_engine_that_fails_is_an_error_with_the_alternatives(monkeypatch):
    _replace(monkeypatch, "int_mm", _broken)
    with pytest.raises(ConfigError, match=r"'int_mm'.*no such kernel.*reference"):
        choose_engine("int_mm", "int8", "row", CPU, torch.bfloat16)
