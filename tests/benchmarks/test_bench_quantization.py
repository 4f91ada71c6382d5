import importlib.util
import json

import pytest
import torch

from videospark.benchmarks.quantization import SHAPES, BlockShape, bench_quantization
from videospark.core.config import ConfigError

SMALL = BlockShape(64, 160, 33, 7)


def test_a_shape_has_the_ten_products_of_a_block():
    for shape in SHAPES.values():
        products = shape.products()
        assert sum(product.count for product in products) == 10
        assert {p.rows for p in products} == {shape.tokens, shape.text_tokens}
    assert SHAPES["wan2.1-1.3b-480p"].products()[2].operations == 2 * 32760 * 1536 * 8960


def test_every_contender_at_every_product():
    result = bench_quantization(SMALL, repeats=1, compare_torchao=False, modes=("int8", "fp8", "int8_weight_only"))
    names = ["plain", "int8", "fp8", "int8_weight_only"]
    assert [row.contender for row in result.rows] == names * 4
    limits = {"plain": 0.005, "int8": 0.015, "fp8": 0.045, "int8_weight_only": 0.012}
    for row in result.rows:
        assert 0 < row.relative_error <= limits[row.contender]
        assert row.share_of_peak == pytest.approx(row.product.operations / row.seconds / result.gemm_peak)
    by_hand = sum(row.product.count * row.seconds for row in result.rows if row.contender == "int8")
    assert result.seconds("int8") == pytest.approx(by_hand)
    assert result.ratios()["int8"] == pytest.approx(result.seconds("plain") / by_hand)
    assert set(result.engines) == {"int8", "fp8"} and "int_mm" in result.engines["int8"]
    data = json.loads(json.dumps(result.to_dict()))
    assert data["ratios"].keys() == {"int8", "fp8", "int8_weight_only"} and data["dtype"] == "bfloat16"
    assert "ten products, int8" in str(result) and "GEMM peak" in str(result)


def test_torchao_takes_part_or_is_said_to_be_absent():
    result = bench_quantization(SMALL, repeats=1, modes=("int8",), dtype=torch.bfloat16)
    there = importlib.util.find_spec("torchao") is not None
    assert ("torchao int8" in result.ratios()) == there
    assert any("not installed" in note for note in result.notes) != there


def test_tokens_replace_those_of_the_shape():
    result = bench_quantization("tiny", repeats=1, tokens=5, modes=("int8",), compare_torchao=False)
    assert {row.product.rows for row in result.rows} == {5, 32}


@pytest.mark.parametrize(
    "settings,field",
    [
        ({"shape": "wan-9000"}, "shape"),
        ({"modes": ()}, "modes"),
        ({"modes": ("none",)}, "modes"),
        ({"modes": ("fp3",)}, "mode"),
        ({"repeats": 0}, "repeats"),
        ({"tokens": 0}, "tokens"),
    ],
)
def test_wrong_settings_name_their_field(settings, field):
    with pytest.raises(ConfigError, match=f"^{field}: got"):
        bench_quantization(**({"shape": SMALL} | settings))
