"""Context parallelism through diffusers' own `enable_parallelism`: two gloo ranks against one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from videospark.core.numerics import relative_error

WORKER = Path(__file__).with_name("parallel_worker.py")
CASES = ("dense", "gather", "gather-raster", "rola", "rola-per-head", "rola-excluded", "rola-denominator", "sla")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Tensors by name, of one process and of two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    runs = {}
    for ranks in (1, 2):
        output = folder / f"{ranks}.safetensors"
        runs[ranks] = output, [
            subprocess.Popen(
                [sys.executable, str(WORKER), str(rank), str(ranks), str(folder / "init"), str(output)],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(ranks)
        ]  # fmt: skip
    for _, processes in runs.values():
        for process in processes:
            try:
                printed, _ = process.communicate(timeout=400)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
            assert process.returncode == 0, printed
    return {ranks: load_file(output) for ranks, (output, _) in runs.items()}


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_compute_what_one_process_computes(case, results):
    one, two = (
        {name: tensor for name, tensor in results[ranks].items() if name.startswith(f"{case}: ")} for ranks in (1, 2)
    )
    assert one.keys() == two.keys()
    gradients = [name for name in one if "grad" in name]
    assert gradients and (("rola" not in case) or any("proj_k" in name for name in gradients))
    for name, expected in one.items():
        assert expected.abs().max() > 0 or name.endswith("to_k.bias"), name
        error = relative_error(two[name], expected)
        noise = torch.linalg.vector_norm(two[name] - expected) < 1e-4
        assert error < 2e-5 or noise, f"{name}: {error}"


def test_the_cases_differ(results):
    outputs = [results[1][f"{case}: output"] for case in CASES]
    for index, output in enumerate(outputs):
        assert all(relative_error(output, other) > 1e-4 for other in outputs[:index])
