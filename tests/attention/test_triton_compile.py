"""The kernels compile for GPUs that are not here, in processes of their own: this one interprets Triton."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from videospark.core.compile_case import TARGETS
from videospark.core.config import ConfigError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="the package triton is not installed"
)

INSTRUCTIONS = {
    "sm_80": "mma.sync", "sm_89": "mma.sync", "sm_90": "wgmma", "sm_100": "tcgen05", "sm_120": "mma.sync",
    "gfx942": "mfma",
}  # fmt: skip

EACH_KERNEL = """
import dataclasses, json
from videospark.benchmarks.compile import all_cases, compile_case

first = {}
for module, case in all_cases("attention.block_sparse"):
    if "sm_90" in case.targets and " bf16" in case.label:
        first.setdefault(case.label.partition(" bf16")[0], (module, case))
results = [compile_case(module, case, "sm_90") for module, case in first.values()]
module, case = first["quantize key"]
results.append(compile_case(module, dataclasses.replace(case, needs_matrix_instruction=True), "sm_90"))
module, case = first["forward"]
results.append(compile_case(module, dataclasses.replace(case, num_stages=24), "sm_90"))
print(json.dumps([dataclasses.asdict(result) for result in results]))
"""


def compiling(*arguments, timeout):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-W", "ignore", *arguments], capture_output=True, text=True, env=environment, timeout=timeout
    )
    return run.returncode, run.stdout, run.stderr


def test_each_kernel_compiles_for_hopper_and_faults_are_seen():
    code, out, err = compiling("-c", EACH_KERNEL, timeout=150)
    assert code == 0, err
    *rows, without_matrix, deep = json.loads(out)
    found = {row["label"].partition(" bf16")[0]: row for row in rows}
    assert set(found) == {
        "forward", "forward int8", "grad_query", "grad_key_value", "quantize query", "quantize key"
    }  # fmt: skip
    for name, row in found.items():
        assert row["faults"] == [], row
        assert row["matrix_instruction"] == ("none" if "quantize" in name else "wgmma")
        assert 16 <= row["registers"] <= 255 and row["shared_bytes"] <= row["shared_limit"] == 227 * 1024
    assert without_matrix["faults"] == ["no matrix instruction"]
    assert deep["faults"] == [f"shared memory {deep['shared_bytes']} above {227 * 1024}"]


def test_report_as_a_program(tmp_path):
    path = tmp_path / "rows.json"
    code, out, err = compiling(
        "-m", "videospark.benchmarks.compile", "--target", "sm_90", "--only", "quantize key bf16 d64",
        "--json", str(path), timeout=100,
    )  # fmt: skip
    assert code == 0, err
    assert "1 compiled, 0 with faults" in out and "quantize key bf16 d64" in out
    assert json.loads(path.read_text())[0]["target"] == "sm_90"


def test_interpreting_processes_unknown_targets_and_empty_selections_are_refused(monkeypatch):
    from videospark.benchmarks.compile import compile_report

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match="TRITON_INTERPRET"):
        compile_report(["sm_90"])
    with pytest.raises(ConfigError, match="sm_42"):
        compile_report(["sm_42"])
    code, _, err = compiling("-m", "videospark.benchmarks.compile", "--only", "no such kernel", timeout=100)
    assert code != 0 and "only: got 'no such kernel'" in err


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_case_fits_every_target(target, tmp_path):
    path = tmp_path / "rows.json"
    code, out, err = compiling(
        "-m", "videospark.benchmarks.compile", "--target", target, "--only", "attention.block_sparse",
        "--json", str(path), timeout=900,
    )  # fmt: skip
    assert code == 0, f"{out}\n{err}"
    for row in json.loads(path.read_text()):
        if "blocks 64x64 " in row["label"] and " d64 " in row["label"]:
            assert row["matrix_instruction"] == INSTRUCTIONS[target], row
