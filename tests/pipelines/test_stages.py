"""Stage times and memory: by a clock of the test's own, and by memory that is really taken."""

import threading

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


def test_memory_of_a_stage_is_its_own(monkeypatch):
    resident = [100]
    monkeypatch.setattr(stages, "resident_bytes", lambda: resident[0])
    monkeypatch.setattr(stages, "SAMPLE_SECONDS", 3600)  # the first and the last look remain
    timer = StageTimer()
    with timer.stage("large"):
        resident[0] = 900
    resident[0] = 200
    with timer.stage("small"):
        pass
    with timer.stage("large"):
        pass
    memory = timer.to_dict()["peak_memory"]
    assert memory["large"]["rss_sampled_peak_bytes"] == 900
    assert memory["small"]["rss_sampled_peak_bytes"] == 200


def test_a_peak_inside_a_stage_is_seen(monkeypatch):
    looks = threading.Event()
    resident = iter([100, 500])

    def look():
        value = next(resident, 100)
        if value == 500:
            looks.set()
        return value

    monkeypatch.setattr(stages, "resident_bytes", look)
    monkeypatch.setattr(stages, "SAMPLE_SECONDS", 0.001)
    timer = StageTimer()
    with timer.stage("denoise"):
        assert looks.wait(timeout=30)
    assert timer.to_dict()["peak_memory"]["denoise"]["rss_sampled_peak_bytes"] == 500


@pytest.mark.skipif(stages.resident_bytes() is None, reason="resident memory is not known here")
def test_the_numbers_of_the_system_are_bytes():
    psutil = pytest.importorskip("psutil")
    assert stages.resident_bytes() == pytest.approx(psutil.Process().memory_info().rss, rel=0.2)
    assert stages.process_peak_memory() >= 0.8 * stages.resident_bytes()
