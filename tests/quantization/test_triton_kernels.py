import os
import subprocess
import sys
from pathlib import Path

import pytest

from videospark.core.compile_case import TARGETS

pytest.importorskip("triton")
HERE = Path(__file__).parent
CAPABILITIES = {"sm_80": 80, "sm_89": 89, "sm_90": 90, "sm_100": 100, "sm_120": 120}


def python(*arguments, **environment):
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, **environment},
        cwd=HERE,
        capture_output=True,
        text=True,
    )


def test_kernels_equal_the_torch_path_under_the_interpreter():
    done = python("-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "interpreted_kernels.py", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and "skipped" not in done.stdout


CODE = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from videospark.quantization.triton_kernels import compile_cases

capability, rows = int(sys.argv[1]), []
for case in compile_cases():
    if sys.argv[2] not in case.targets:
        continue
    if sys.argv[3] == "small" and "1.3B" not in case.label:
        continue
    attributes = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(case.kernel.arg_names)
                  if str(case.signature.get(name, "")).startswith("*") or name in case.divisible_by_16}
    signature = {name: case.signature.get(name, "constexpr") for name in case.kernel.arg_names}
    source = ASTSource(case.kernel, signature, dict(case.constexprs), attributes)
    options = {"num_warps": case.num_warps, "num_stages": case.num_stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    rows.append([case.label, made.metadata.shared, made.asm["ptx"]])
print(json.dumps(rows))
"""


def compiled(target, size):
    import json

    done = python("-c", CODE, str(CAPABILITIES[target]), target, size, TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def check(rows, target):
    labels = [label for label, _, _ in rows]
    assert len(set(labels)) == len(labels)
    # FP8 conversions came with sm_89.
    assert any("fp8" in label for label in labels) == (target != "sm_80")
    for label, shared, code in rows:
        assert f".target {target}" in code and shared < 48 * 1024, label
        if "fp8" in label:
            assert "cvt.rn.satfinite.e4m3x2.f32" in code, label


def test_kernels_compile_for_hopper():
    check(compiled("sm_90", "small"), "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("target", CAPABILITIES)
def test_kernels_compile_for_every_target(target):
    rows = compiled(target, "all")
    assert len(rows) >= 2 * (2 if target == "sm_80" else 3)
    check(rows, target)


def test_the_targets_are_those_of_the_compile_check():
    assert set(CAPABILITIES) == {target for target in TARGETS if target.startswith("sm_")}
