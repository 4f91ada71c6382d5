"""The whole-clip ratio: its factors multiply, its parts add up, and the full run really denoises."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from videospark.app.cli import app
from videospark.benchmarks import end_to_end as bench
from videospark.core.config import ConfigError


@pytest.fixture(scope="module")
def result():
    return bench.bench_end_to_end(
        "tiny", tokens=200, keep_ratio=0.25, block_sizes=(16, 16), dtype=torch.float32, full=True
    )


def test_factors_multiply_to_the_ratio(result):
    assert result.ratio_steps == pytest.approx(50 / 3) and result.ratio_guidance == 2
    assert result.ratio_total == pytest.approx(result.ratio_steps * result.ratio_guidance * result.ratio_forward)
    assert result.ratio_total == pytest.approx(result.seconds_dense_clip / result.seconds_accelerated_clip)
    stock, accelerated = result.block.rows[0], result.block.rows[-1]
    product = result.ratio_attention * result.ratio_linear * result.ratio_fusion
    assert product == pytest.approx(stock.seconds / accelerated.seconds)
    assert result.seconds_dense_forward == pytest.approx(6 * stock.seconds + stock.rest_seconds)
    assert accelerated.contender == "int8+fused+sparse+rola" and accelerated.sparsity > 0.5


def test_the_full_run_is_held_against_the_extrapolation(result):
    full = result.full
    assert full["seconds"] > 0
    assert full["over_extrapolation"] == pytest.approx(full["seconds"] / result.seconds_accelerated_clip)
    assert full["ratio_total"] == pytest.approx(result.seconds_dense_clip / full["seconds"])


def test_the_data_has_every_part(result):
    data = json.loads(json.dumps(result.to_dict()))
    assert set(data["parts"]) == {*bench.PARTS, "outside of the blocks"}
    for part in bench.PARTS:
        for name in ("stock", "accelerated"):
            assert data["parts"][part][name]["seconds"] > 0
    assert data["parts"]["cross-attention"]["stock"]["gemm_peak_share"] > 0
    text = result.markdown()
    assert "Really run" in text and "| **clip** |" in text and "GEMM peak of this run" in text


@pytest.mark.parametrize("settings,field", [({"shape": "wan"}, "shape"), ({"branch": "sla"}, "branch")])
def test_wrong_settings_name_their_field(settings, field):
    with pytest.raises(ConfigError, match=f"^{field}: got"):
        bench.bench_end_to_end(**({"shape": "tiny"} | settings))


def test_the_command_writes_numbers(tmp_path):
    path = tmp_path / "new" / "clip.json"
    arguments = [
        "bench",
        "end-to-end",
        "--shape",
        "tiny",
        "--tokens",
        "100",
        "--blocks",
        "16,16",
        "--keep-ratio",
        "0.3",
    ]
    outcome = CliRunner().invoke(app, [*arguments, "--device", "cpu", "--branch", "none", "--json", str(path)])
    assert outcome.exit_code == 0, outcome.output
    data = json.loads(path.read_text())
    names = "ratio_total ratio_steps ratio_guidance ratio_forward seconds_dense_forward seconds_accelerated_forward"
    assert all(data[name] > 0 for name in names.split()) and data["full"] is None and data["branch"] == "none"
    assert "times as fast" in outcome.output and "machine" in data
