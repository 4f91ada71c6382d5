"""The benchmarks run and count right; no time is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from videospark.app.cli import app
from videospark.benchmarks.attention import SHAPES, Shape, bench_attention, markdown
from videospark.benchmarks.timing import gemm_peak, measure, peak_extra_bytes
from videospark.core.config import ConfigError


@pytest.mark.parametrize("backward", [False, True])
def test_rows_count_the_kept_pairs(backward):
    shape = Shape(2, 8, 13, 2, 32)
    rows = list(
        bench_attention(
            shape, backends=["gather", "dense"], keep_ratios=[0.25], block_sizes=(16, 16), backward=backward,
            repeats=1, check=not backward, dtype=torch.float32,
        )
    )  # fmt: skip
    assert [row.backend for row in rows] == ["sdpa", "gather", "dense"]
    sdpa, gather, dense = rows
    assert 0.7 < gather.sparsity < 0.8 and dense.sparsity == 0
    per_pair = (14 if backward else 4) * 32
    work = per_pair * 2 * shape.tokens**2
    assert gather.operations_per_second * gather.seconds == pytest.approx((1 - gather.sparsity) * work)
    assert gather.over_sdpa == pytest.approx(sdpa.seconds / gather.seconds)
    assert backward or gather.error < 1e-5
    assert "| gather | 0.25 |" in markdown(rows, "title")


def test_backends_that_cannot_run_are_refused_before_measuring(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigError, match="backends: got 'flex'"):
        next(bench_attention(SHAPES["tiny-96"], backends=["flex"], dtype=torch.float64))


def test_measure_and_peak():
    calls = []
    timing = measure(lambda: calls.append(0), "cpu", repeats=3, warm_up=2)
    assert len(calls) == 5 and timing.low <= timing.median <= timing.high and timing.repeats == 3
    assert gemm_peak("cpu", torch.float32, repeats=1) > 1e8
    with pytest.raises(ConfigError, match="repeats"):
        measure(lambda: None, "cpu", repeats=0)


def test_command_writes_table_and_numbers(tmp_path):
    arguments = ["bench", "attention", "--shape", "tiny-96", "--backends", "gather", "--keep-ratio", "0.1,0.5"]
    arguments += ["--blocks", "16,16", "--repeats", "1", "--device", "cpu", "--output", str(tmp_path / "results")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.stderr
    data = json.loads((tmp_path / "results/attention.json").read_text())
    assert [row["keep_ratio"] for row in data["rows"]] == [1.0, 0.1, 0.5] and data["machine"]["device"] == "cpu"
    assert "share of GEMM peak" in (tmp_path / "results/attention.md").read_text()


@pytest.mark.parametrize("wrong", [["--shape", "x"], ["--blocks", "64"], ["--keep-ratio", "a"], ["--dtype", "int8"]])
def test_wrong_options_are_named(wrong):
    result = CliRunner().invoke(app, ["bench", "attention", *wrong])
    assert result.exit_code == 2 and wrong[0].lstrip("-") in result.stderr


def test_linear_command_writes_numbers(tmp_path):
    arguments = ["bench", "linear", "--shape", "tiny", "--tokens", "32", "--repeats", "1", "--device", "cpu"]
    result = CliRunner().invoke(app, [*arguments, "--no-torchao", "--output", str(tmp_path)])
    assert result.exit_code == 0, result.stderr
    data = json.loads((tmp_path / "linear.json").read_text())
    assert set(data["ratios"]) == {"int8", "fp8"} and "ten products" in (tmp_path / "linear.txt").read_text()


def test_every_row_has_the_fields_that_are_read_by_others(tmp_path):
    path = tmp_path / "rows.json"
    arguments = ["bench", "attention", "--tokens", "200", "--heads", "2", "--head-dim", "32", "--dtype", "float32"]
    arguments += ["--keep-ratio", "0.25", "--blocks", "16,16", "--backends", "gather", "--branch", "none,rola"]
    arguments += ["--repeats", "1", "--device", "cpu", "--crossover", "--json", str(path)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    data = json.loads(path.read_text())
    fields = "backend tokens heads head_dim dtype keep_ratio pass seconds over_sdpa over_flex gemm_peak_share"
    for row in data["rows"]:
        assert set(f"{fields} peak_extra_bytes".split()) <= set(row)
        assert (row["tokens"], row["heads"], row["head_dim"]) == (200, 2, 32) and row["pass"] == "forward"
    assert [(row["backend"], row["branch"]) for row in data["rows"]] == [
        ("sdpa", "none"), ("gather", "none"), ("gather", "rola"),
    ]  # fmt: skip
    assert data["crossover"]["backend"] == "gather" and "faster than dense" in result.output


def test_extra_memory_is_what_a_call_holds():
    if not Path("/proc/self/clear_refs").exists():
        pytest.skip("this system does not count the peak of resident memory")
    kept = []
    made = peak_extra_bytes(lambda: kept.append(torch.ones(2**23)), "cpu")
    assert 2**25 <= made < 1.3 * 2**25
