"""What is settled before PyTorch is imported, and that a second process finds the compiled code of the first."""

import json
import logging
import os
import shutil
import subprocess
import sys

import pytest

from videospark.app.process import _REMARKS, ALLOCATOR, EXPANDABLE, prepare_process, quiet_remarks


def test_what_the_user_set_stays(tmp_path):
    environment = {"XDG_CACHE_HOME": str(tmp_path), "TRITON_CACHE_DIR": "mine", ALLOCATOR[1]: "mine"}
    made = prepare_process(environment, "linux")
    assert set(made) == {"TORCHINDUCTOR_CACHE_DIR"} and environment["TRITON_CACHE_DIR"] == "mine"
    assert made["TORCHINDUCTOR_CACHE_DIR"].startswith(str(tmp_path)) and ALLOCATOR[0] not in environment
    fresh = {"XDG_CACHE_HOME": str(tmp_path)}
    prepare_process(fresh, "linux")
    assert fresh[ALLOCATOR[0]] == EXPANDABLE and prepare_process(fresh, "linux") == {}
    assert ALLOCATOR[0] not in prepare_process({"XDG_CACHE_HOME": str(tmp_path)}, "win32")


def test_remarks_are_dropped_and_nothing_else(caplog):
    loggers = [logging.getLogger(name) for name, _ in _REMARKS]
    before = [list(logger.filters) for logger in loggers]
    quiet_remarks()
    try:
        for logger, (_, words) in zip(loggers, _REMARKS, strict=True):
            logger.warning("`A` %s (B); falling back to `C`", words)
        loggers[0].warning("something else")
    finally:
        for logger, filters in zip(loggers, before, strict=True):
            logger.filters[:] = filters
    assert caplog.messages == ["something else"]


def test_no_place_for_a_cache_is_no_failure(tmp_path):
    (tmp_path / "file").write_text("")
    made = prepare_process({"XDG_CACHE_HOME": str(tmp_path / "file")}, "linux")
    assert set(made) == {ALLOCATOR[0]}


def test_the_command_settles_it_before_pytorch_is_there(tmp_path):
    code = (
        "import sys, os, json; sys.argv = ['videospark', '--version']; from videospark.app import cli\n"
        "try:\n    cli.main()\nexcept SystemExit:\n    pass\n"
        "print(json.dumps([os.environ.get('TORCHINDUCTOR_CACHE_DIR'), 'torch' in sys.modules]))"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"}
    ran = subprocess.run([sys.executable, "-c", code], env={**environment, "XDG_CACHE_HOME": str(tmp_path)},
                         capture_output=True, text=True, check=True)  # fmt: skip
    folder, loaded = json.loads(ran.stdout.splitlines()[-1])
    assert folder.startswith(str(tmp_path)) and not loaded


_COMPILE = """
import json, torch
from videospark.app.process import prepare_process
prepare_process()
from videospark.pipelines.acceleration import accelerate, current_report
from videospark.tiny.components import build_pipeline
pipe = build_pipeline()
accelerate(pipe, {"name": "c", "compile": "default"})
with torch.no_grad():
    for _ in range(2):
        noise = torch.randn(1, pipe.transformer.config.in_channels, 2, 8, 8)
        pipe.transformer(noise, torch.tensor([400.0]), torch.randn(1, 16, 128))
print(json.dumps(current_report(pipe).to_dict()["compilation"]["transformer"]))
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiling for a CPU needs a C++ compiler")
def test_a_second_process_finds_what_the_first_compiled(tmp_path):
    hidden = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_INTERPRET")
    environment = {k: v for k, v in os.environ.items() if k not in hidden} | {"XDG_CACHE_HOME": str(tmp_path)}
    reports = []
    for _ in range(2):
        ran = subprocess.run(
            [sys.executable, "-c", _COMPILE], env=environment, capture_output=True, text=True, check=True
        )
        reports.append(json.loads(ran.stdout.splitlines()[-1]))
    cold, warm = reports
    assert cold["graphs"] == warm["graphs"] > 0 and cold["cached_graphs"] == 0
    assert warm["cached_graphs"] == warm["graphs"]
