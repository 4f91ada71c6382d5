"""Stage times and memory: by a clock of the test's own, and by memory that is really taken."""

import numpy as np
import pytest

from videospark.pipelines import stages
from videospark.pipelines.stages import StageTimer


@pytest.fixture
def clock(monkeypatch):
    """A list whose only number is the time."""
    now = [0.0]
    monkeypatch.setattr(stages.time, "perf_counter", lambda: now[0])
    return now


def fail_after_a_second(clock):
    clock[0] += 1.0
    raise RuntimeError


def test_seconds_by_stage_and_step(clock):
    timer = StageTimer()
    with timer.stage("denoise"):
        timer.start_steps()
        clock[0] += 2.0
        assert timer.step_done() == 2.0
        clock[0] += 5.0  # a preview: no step's work, but the stage's
        timer.restart_step()
        clock[0] += 3.0
        assert timer.step_done() == 3.0
    with pytest.raises(RuntimeError), timer.stage("decode"):
        fail_after_a_second(clock)
    with timer.stage("decode"):
        clock[0] += 1.0
    data = timer.to_dict()
    assert data["seconds"] == {"denoise": 10.0, "decode": 2.0}
    assert data["step_seconds"] == [2.0, 3.0] and data["total_seconds"] == 12.0
    assert "denoise" in timer.table() and "83.3 %" in timer.table()


@pytest.mark.skipif(stages.resident_bytes() is None, reason="resident memory is not known here")
def test_memory_of_a_stage_is_its_own():
    size = 96 * 2**20
    timer = StageTimer()
    with timer.stage("small"):
        pass
    with timer.stage("large"):
        block = np.ones(size, np.uint8)
    del block
    memory = timer.to_dict()["peak_memory"]
    assert memory["large"]["rss_sampled_peak_bytes"] - memory["small"]["rss_sampled_peak_bytes"] > 0.8 * size
    assert timer.to_dict()["process_peak_rss_bytes"] > 0.8 * size
