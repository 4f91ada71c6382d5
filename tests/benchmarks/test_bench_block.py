import json

import pytest
import torch
from typer.testing import CliRunner

from videospark.app.cli import app
from videospark.attention.grid import TokenGrid
from videospark.benchmarks import block as bench
from videospark.benchmarks import sqnr
from videospark.core.config import ConfigError
from videospark.core.numerics import sqnr_db
from videospark.quantization.config import QuantizationConfig


@pytest.fixture(scope="module")
def result():
    return bench.bench_block("tiny", tokens=300, keep_ratio=0.25, block_sizes=(16, 16), repeats=1, dtype=torch.float32)


def test_every_contender_and_part_is_measured(result):
    assert [row.contender for row in result.rows] == ["stock", *bench.USUAL]
    stock = result.rows[0]
    for row in result.rows:
        assert set(row.parts) == set(bench.PARTS) and all(seconds > 0 for seconds in row.parts.values())
        assert sum(row.parts.values()) == pytest.approx(row.seconds, rel=1e-6)
        assert row.over_stock == pytest.approx(stock.seconds / row.seconds)
        sizes = bench.dataclasses.replace(bench.SHAPES["tiny"], tokens=result.tokens)
        work = sum(bench.operations(sizes, row.sparsity).values())
        assert row.share_of_peak == pytest.approx(work / row.seconds / result.gemm_peak)


def test_outputs_are_compared_with_stock(result):
    rows = {row.contender: row for row in result.rows}
    assert rows["stock"].relative_error == 0 and rows["stock"].sparsity == 0
    # Fusion changes rounding, INT8 a percent; leaving pairs out of random attention changes more than that.
    assert rows["fused"].relative_error < 1e-5
    assert 1e-4 < rows["int8"].relative_error < 0.03 and rows["int8"].cosine >= 0.999
    for name in ("sparse", "int8+fused+sparse", "int8+fused+sparse+rola"):
        assert 0.6 < rows[name].sparsity < 0.9
        # A token next to its own output, whatever the order inside.
        assert 1e-3 < rows[name].relative_error < 0.5 and rows[name].cosine > 0.85
    assert rows["int8+fused+sparse+rola"].relative_error != rows["int8+fused+sparse"].relative_error
    assert "int_mm" in rows["int8"].engine and "fused: off" in rows["int8"].engine
    assert "branch torch" in rows["int8+fused+sparse+rola"].engine


def test_operations_are_counted_by_hand():
    sizes = bench.BlockShape(8, 24, 10, 3)
    work = bench.operations(sizes, 0.5)
    products = sum(product.count * product.operations for product in sizes.products())
    pairs = 4 * 10 * 10 * 8 // 2 + 4 * 10 * 3 * 8
    assert sum(work.values()) == products + pairs


@pytest.mark.parametrize("tokens", [1, 300, 4096, 32760, 10**6])
def test_a_grid_shrinks_on_all_sides(tokens):
    grid = bench.shrunk(TokenGrid(21, 30, 52), tokens)
    wanted = min(tokens, 32760)
    assert wanted / 2 <= grid.num_tokens <= wanted * 2
    assert grid.frames <= grid.height <= grid.width


@pytest.mark.parametrize(
    "settings,field",
    [({"shape": "wan"}, "shape"), ({"contenders": ("int4",)}, "contenders"), ({"repeats": 0}, "repeats")],
)
def test_wrong_settings_name_their_field(settings, field):
    with pytest.raises(ConfigError, match=f"^{field}: got"):
        bench.bench_block(**({"shape": "tiny"} | settings))


def test_block_on_the_command_line(tmp_path):
    arguments = ["bench", "block", "--shape", "tiny", "--tokens", "200", "--contenders", "fused", "--repeats", "1"]
    outcome = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--output", str(tmp_path)])
    assert outcome.exit_code == 0, outcome.output
    data = json.loads((tmp_path / "block.json").read_text())
    assert [row["contender"] for row in data["rows"]] == ["stock", "fused"] and data["gemm_peak"] > 0
    assert "feed-forward" in (tmp_path / "block.md").read_text() and "over stock" in outcome.output


def test_sqnr_of_one_layer_is_that_of_its_own_inputs():
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"layer": torch.nn.Linear(32, 48)}).requires_grad_(False)
    x = torch.randn(40, 32)
    x[:, 3] *= 20
    config = QuantizationConfig(mode="int8", include=("layer",), exclude=())
    (row,) = sqnr.layer_sqnr("small", model, lambda: [model["layer"](x), model["layer"](x)], {"int8": config}, 10)
    assert row.rows == 20 and (row.inputs, row.outputs) == (32, 48) and row.peak_to_rms > 3
    assert not model["layer"]._forward_pre_hooks
    from videospark.quantization.linear import QuantizedLinear

    part = torch.cat([x[::4], x[::4]])
    found = QuantizedLinear.from_linear(model["layer"], config)(part)
    assert row.sqnr_db == pytest.approx(sqnr_db(found, model["layer"](part)), abs=1e-3)


def test_sqnr_of_the_tiny_model_on_the_command_line(tmp_path):
    arguments = ["bench", "sqnr", "--models", "tiny", "--rows", "32", "--device", "cpu", "--output", str(tmp_path)]
    outcome = CliRunner().invoke(app, arguments)
    assert outcome.exit_code == 0, outcome.output
    rows = json.loads((tmp_path / "sqnr.json").read_text())["rows"]
    assert len(rows) == 6 * 10 * 2 and {row["mode"] for row in rows} == {"int8", "fp8"}
    assert all(15 < row["sqnr_db"] < 60 for row in rows)
    assert "blocks.5.ffn.net.2" in outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("model", ["wan2.1-1.3b", "wan2.1-14b"])
def test_sqnr_of_random_blocks(model):
    rows = list(sqnr.bench_sqnr([model], modes=("int8", "fp8"), rows=64))
    assert len(rows) == 20
    for row in rows:
        # Inputs of the feed-forward's second product are those of a GELU, with longer tails than a Gaussian.
        limit = {"int8": 0.03, "fp8": 0.045}[row.mode]
        assert 0 < row.relative_error <= limit, row


def test_unknown_models_and_modes_are_refused():
    with pytest.raises(ConfigError, match="^models: got"):
        sqnr.bench_sqnr(["wan3"])
    with pytest.raises(ConfigError, match="^modes: got"):
        sqnr.bench_sqnr(["tiny"], modes=())
    with pytest.raises(ConfigError, match="^mode: got"):
        sqnr.bench_sqnr(["tiny"], modes=("fp3",))
