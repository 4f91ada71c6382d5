"""`make gpu` without a GPU: it says in one line what it would do, and its whole code runs in a rehearsal."""

import dataclasses
import json

import pytest
import torch
from typer.testing import CliRunner

from videospark.app.cli import app
from videospark.benchmarks import gpu_checks, gpu_offload, gpu_report
from videospark.benchmarks.gpu_end_to_end import bench_end_to_end, markdown, planned_memory
from videospark.pipelines.recipe import preset

runner = CliRunner()
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: make gpu is the test")


@no_gpu
def test_one_line_without_a_gpu(tmp_path):
    told = runner.invoke(app, ["bench", "gpu", "--output", str(tmp_path)])
    assert told.exit_code == 0 and told.stdout.count("\n") == 1 and told.stdout.startswith("skipped:")
    assert list(tmp_path.iterdir()) == []


def rehearse(*sections):
    return gpu_report.gpu_report(rehearsal=True, only=sections)


@no_gpu
def test_the_light_sections_and_the_report(tmp_path):
    arguments = ["bench", "gpu", "--rehearse", "--only", "tests,attention,peers,products,block", "--output"]
    told = runner.invoke(app, [*arguments, str(tmp_path)])
    assert told.exit_code == 0, told.output
    text = (tmp_path / "gpu-rehearsal.md").read_text(encoding="utf-8")
    assert text.startswith("## REHEARSAL") and "commit" in text and "All sections are right" in text
    data = json.loads((tmp_path / "gpu-rehearsal.json").read_text(encoding="utf-8"))
    assert data["rehearsal"] and list(data["sections"]) == ["tests", "attention", "peers", "products", "block"]
    rows = [row for part in data["sections"]["attention"]["data"].values() for row in part]
    assert {"sdpa", "gather"} == {row["backend"] for row in rows} and all(row["seconds"] > 0 for row in rows)
    assert data["sections"]["products"]["data"]["tiny"]["ratios"].keys() == {"int8", "fp8"}
    assert {"stock", "int8+fused+sparse+rola"} < {
        row["contender"] for row in data["sections"]["block"]["data"]["tiny"]["rows"]
    }
    assert runner.invoke(app, ["bench", "gpu", "--only", "kernles"]).exit_code == 2


@no_gpu
def test_a_whole_clip_per_recipe():
    what = gpu_report.plan_of("cpu", True).end_to_end
    rows = bench_end_to_end(what, "cpu", torch.float32)
    assert len(rows) == len(what.recipes) and rows[0].over_first == 1
    for row, recipe in zip(rows, what.recipes, strict=True):
        assert row.run_steps == (recipe.sampler.steps or what.probe_steps) and row.warm_step > 0 and row.decode > 0
        assert row.planned_gib == planned_memory(what, recipe) and row.measured_gib == {}
    assert "branch" in rows[-1].engine and "products" in rows[-1].engine
    assert "no GPU" in markdown(rows, "x")


@no_gpu
def test_every_offloading_makes_the_same_latents(monkeypatch):
    what = gpu_report.plan_of("cpu", True).end_to_end
    rows = gpu_offload.bench_offloads(what, "cpu", torch.float32)
    assert [row.mode for row in rows] == list(gpu_offload.MODES)
    for row in rows:
        assert not row.error and row.ok and row.difference == 0 and len(row.steps) == 4, row.error
        assert set(row.planned_gib) == {"denoise", "decode"} and row.measured_gib == {}
    swapped = rows[1]
    assert swapped.early > 0 and swapped.late == 0
    text = gpu_offload.markdown(rows, "x")
    assert "no GPU" in text and f"{swapped.early} / 0" in text
    # Weights that came too late would be told, and so is what breaks.
    late = dataclasses.replace(swapped, difference=0.5)
    broken = gpu_offload.OffloadRow("group", error="RuntimeError: out | of it")
    assert not late.ok and not broken.ok
    told = gpu_offload.markdown([late, broken], "x")
    assert "**WRONG**" in told and "**broke**: RuntimeError: out / of it" in told


@no_gpu
def test_a_recipe_that_breaks_does_not_take_the_others_along():
    what = gpu_report.plan_of("cpu", True).end_to_end
    bad = preset("spark22-4step")  # for two experts
    rows = bench_end_to_end(dataclasses.replace(what, recipes=(bad, what.recipes[1])), "cpu", torch.float32)
    assert rows[0].error.startswith("ConfigError") and not rows[1].error and rows[1].over_first == 1
    assert "**broke**: ConfigError" in markdown(rows, "x")


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")
@pytest.mark.parametrize("chosen", ["RoLA kernels, 17 tokens, float16", "fused parts, float32, rows in int8 eight bits",
                                    "fused parts, float16, rows in no eight bits", "products in fp8",
                                    "fused Wan block, int8"])  # fmt: skip
@no_gpu
def test_checks_of_kernels(chosen):
    pytest.importorskip("triton")
    calls = dict(gpu_checks._calls("cpu", gpu_checks.SMALL))
    ok, detail = calls[chosen]()
    assert ok, detail


@pytest.mark.filterwarnings("ignore:All-NaN slice", "ignore:invalid value")
@pytest.mark.slow
@no_gpu
def test_all_checks_of_kernels():
    pytest.importorskip("triton")
    (section,) = rehearse("kernels").sections
    assert section.ok, section.text
    names = [check["name"] for check in section.data]
    assert any("triton_int8" in name for name in names) and len(names) > 15


def test_backends_of_other_devices_are_no_failure():
    names = [name for name, _ in gpu_checks._calls("cuda", gpu_checks.FULL)]
    assert "attention backend triton" in names or not torch.cuda.is_available()
    assert "attention backend gather" in names and "attention backend native" not in names


def test_a_wrong_kernel_and_a_broken_section_are_told(monkeypatch):
    def wrong(device, sizes):
        yield "right", lambda: (True, "fine")
        yield "wrong", lambda: (False, "off by 3")
        yield "broken", lambda: 1 / 0

    monkeypatch.setattr(gpu_checks, "_calls", wrong)
    monkeypatch.setattr(gpu_report, "bench_block", lambda *_, **__: [][0])
    report = rehearse("kernels", "block")
    kernels, block = report.sections
    assert not report.ok and not kernels.ok and not block.ok
    assert "**NO** | off by 3" in kernels.text and "ZeroDivisionError at test_gpu_report.py" in kernels.text
    assert "IndexError" in block.text and "Not right: kernels, block" in report.markdown()


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_check_finds_a_kernel_that_is_off(monkeypatch, factor):
    """The checks can fail: a product that is scaled wrongly is one."""
    from videospark.quantization import linear

    forward = linear.QuantizedLinear.forward
    monkeypatch.setattr(linear.QuantizedLinear, "forward", lambda self, x: forward(self, x) * factor)
    ok, detail = gpu_checks._product("cpu", gpu_checks.SMALL, "int8")
    assert ok == (factor == 1.0), detail
