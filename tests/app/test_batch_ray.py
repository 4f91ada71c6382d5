"""A batch on a local Ray with two workers, one of which is killed in the middle."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from videospark.app.batch import Observer
from videospark.app.ray_batch import MAX_DEATHS, run_on_ray
from videospark.core.config import ConfigError

sys.path.insert(0, str(Path(__file__).parent))
import fakes
from test_batch import check_complete, folder_of, job, records, run


@pytest.fixture(scope="module")
def ray():
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    ray.cloudpickle.register_pickle_by_value(fakes)
    yield ray
    ray.shutdown()


class Marked(fakes.FakeEngine):
    """Writes its process's id where a test finds it; a job called "killer" ends its process."""

    def run(self, request, recipe=None, **options):
        if request.prompt == "killer":
            os.kill(os.getpid(), signal.SIGKILL)
        with open(self.pids, "a") as file:
            file.write(f"{os.getpid()}\n")
        return super().run(request, recipe, **options)


def maker(log, seconds=0.1):
    def make(model):
        engine = Marked(seconds)
        engine.pids = str(log)
        return engine

    return make


@pytest.mark.slow
def test_a_killed_worker_loses_nothing(ray, tmp_path):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    jobs = [job(f"job{i:02}") for i in range(10)]
    jobs += [job("bad", "must fail")]
    log, out = tmp_path / "log", tmp_path / "out"

    class KillOne(Observer):
        killed = None

        def ended(self, done, record, seconds_left):
            if self.killed is None and len(records(out)) == 3:
                # The one that did not just end a job: it is in the middle of one.
                idle = int(record["worker"].split(":")[1])
                (self.killed,) = {int(pid) for pid in log.read_text().split()} - {idle}
                os.kill(self.killed, signal.SIGKILL)

    observer = KillOne()
    summary = run_on_ray(
        jobs, folder_of(out, jobs), "m", "auto", observer, workers=2, make_runner=maker(log)
    )  # fmt: skip
    assert observer.killed is not None
    assert sorted(summary.made) == sorted(j.id for j in jobs[:-1]) and list(summary.failed) == ["bad"]
    assert [record["id"] for record in records(out)] == [j.id for j in jobs]
    assert len({record["worker"] for record in records(out)[:-1]}) >= 2
    # The same folder without Ray: nothing but the failed job is left to do.
    jobs[-1] = job("bad", "is mended")
    assert run(out, jobs)[0].made == ["bad"]
    check_complete(out, jobs)


@pytest.mark.slow
def test_a_job_that_kills_its_workers_fails_and_the_rest_is_made(ray, tmp_path):
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    jobs = [job("killer"), job("a"), job("b")]
    out = tmp_path / "out"
    summary = run_on_ray(
        jobs, folder_of(out, jobs), "m", "auto", Silent(), workers=2, make_runner=maker(tmp_path / "log")
    )
    assert sorted(summary.made) == ["a", "b"] and f"died {MAX_DEATHS} times" in summary.failed["killer"]


class Silent(Observer):
    """Hears nothing."""


@pytest.mark.slow
def test_workers_that_cannot_begin_end_the_batch(ray, tmp_path):
    jobs = [job("a")]
    with pytest.raises(RuntimeError, match="could not load the model"):
        run_on_ray(jobs, folder_of(tmp_path, jobs), "no/such/model/folder", "auto", Silent(), workers=1)
    with pytest.raises(ConfigError, match="workers: got 9; must be at most 2"):
        run_on_ray(jobs, folder_of(tmp_path, jobs), "m", "auto", Silent(), workers=9)
    assert not (tmp_path / "clips").exists()


def test_without_ray_the_way_out_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    jobs = [job("a")]
    with pytest.raises(ImportError, match=r"videospark\[ray\]"):
        run_on_ray(jobs, folder_of(tmp_path, jobs), "m", "auto", Silent())
