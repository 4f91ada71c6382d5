"""Batches: what is made, kept and made again; kills at any moment; two processes; the command itself."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from pathlib import Path

import imageio.v3 as imageio
import pytest
from typer.testing import CliRunner

from videospark.app import batch_folder
from videospark.app.batch import Observer, run_batch
from videospark.app.batch_folder import BatchFolder, settings_hash
from videospark.app.cli import app
from videospark.app.estimate import Estimator
from videospark.app.jobs import Job
from videospark.pipelines.generation import GenerationRequest

sys.path.insert(0, str(Path(__file__).parent))
from fakes import SIZE, FakeEngine

runner = CliRunner()


def job(name, prompt=None, seed=0, **changes):
    return Job(name, 1, GenerationRequest(prompt or name, seed=seed, **{**SIZE, **changes}))


def folder_of(path, jobs, model="m"):
    return BatchFolder(path, {j.id: settings_hash(j, model) for j in jobs}, {"model": model})


def run(path, jobs, engine=None, model="m", **options):
    engine = engine or FakeEngine()
    return run_batch(jobs, folder_of(path, jobs, model), lambda: engine, **options), engine


def records(path):
    return [json.loads(line) for line in (path / "manifest.jsonl").read_text().splitlines()]


def check_complete(path, jobs):
    """Every clip is there, decodes, and has exactly one record; nothing else is left."""
    assert [record["id"] for record in records(path)] == [j.id for j in jobs]
    for record in records(path):
        assert record["status"] == "done"
        assert imageio.imread(path / record["video"]).shape == (5, 32, 32, 3)
        assert json.loads((path / record["sidecar"]).read_text())["batch"]["id"] == record["id"]
    assert sorted(p.name for p in (path / "clips").iterdir()) == sorted(
        f"{j.id}.{suffix}" for j in jobs for suffix in ("mp4", "png", "json")
    )


def test_everything_is_made_once_and_kept(tmp_path):
    jobs = [job("a"), job("b", num_frames=5, width=64), job("c")]
    summary, engine = run(tmp_path, jobs)
    assert sorted(summary.made) == ["a", "b", "c"] and not summary.failed
    assert [prompt for prompt, _ in engine.ran] == ["a", "c", "b"]  # by shape
    (record,) = (r for r in records(tmp_path) if r["id"] == "b")
    assert imageio.imread(tmp_path / record["video"]).shape == (5, 32, 64, 3)
    assert json.loads((tmp_path / record["sidecar"]).read_text())["model"] == "m"
    summary, engine = run(tmp_path, jobs)
    assert summary.kept == ["a", "b", "c"] and engine.ran == []


def test_missing_broken_and_changed_are_made_again_and_no_others(tmp_path):
    jobs = [job(name) for name in "abcdefg"]
    run(tmp_path, jobs)
    clips = tmp_path / "clips"
    (clips / "b.mp4").unlink()
    (clips / "c.mp4").write_bytes((clips / "c.mp4").read_bytes()[:-5])
    data = bytearray((clips / "d.mp4").read_bytes())
    data[-3] ^= 255  # one bit flips, and the size stays
    (clips / "d.mp4").write_bytes(data)
    (clips / "e.json").write_text("{")
    jobs[5] = dataclasses.replace(jobs[5], request=dataclasses.replace(jobs[5].request, seed=1))
    states = {}

    class Watch(Observer):
        def states(self, found):
            states.update(found)

    summary, engine = run(tmp_path, jobs, observer=Watch())
    expected = {"b": "broken", "c": "broken", "d": "broken", "e": "broken", "f": "changed"}
    assert states == {**dict.fromkeys("ag", "done"), **expected}
    assert sorted(summary.made) == sorted(expected) and summary.kept == ["a", "g"]
    check_complete(tmp_path, jobs)
    assert run(tmp_path, jobs, model="another")[0].made == list("abcdefg")


def test_a_job_whose_process_died_before_its_record_is_adopted_or_made_again(tmp_path):
    jobs = [job(name) for name in "abc"]
    run(tmp_path, jobs)
    lines = (tmp_path / "manifest.jsonl").read_text().splitlines()
    (tmp_path / "manifest.jsonl").write_text(lines[0] + "\n" + lines[1][:40])  # half a line, and none
    video = tmp_path / "clips" / "c.mp4"
    video.write_bytes(video.read_bytes()[: video.stat().st_size // 2])
    summary, _ = run(tmp_path, jobs)
    assert summary.kept == ["a", "b"] and summary.made == ["c"]
    check_complete(tmp_path, jobs)


def test_a_bad_job_is_recorded_and_the_rest_is_made(tmp_path):
    jobs = [job("a"), job("bad", "this must fail"), job("big", "needs memory"), job("nan", "gives nan"), job("c")]
    summary, engine = run(tmp_path, jobs)
    assert summary.made == ["a", "c"] and set(summary.failed) == {"bad", "big", "nan"}
    assert engine.freed == 3
    by_id = {record["id"]: record for record in records(tmp_path)}
    assert by_id["big"]["error"].startswith("out of memory: ") and by_id["bad"]["status"] == "failed"
    assert sorted(p.name for p in (tmp_path / "clips").glob("*.mp4")) == ["a.mp4", "c.mp4"]
    jobs[1] = job("bad", "this is mended")
    summary, engine = run(tmp_path, jobs)
    assert summary.made == ["bad"] and len(engine.ran) == 3  # what failed is tried again


def test_a_job_that_fails_with_new_settings_keeps_no_old_clip(tmp_path):
    run(tmp_path, [job("a")])
    summary, _ = run(tmp_path, [job("a", "now it must fail")])
    assert list(summary.failed) == ["a"] and list((tmp_path / "clips").iterdir()) == []


def test_a_full_disk_ends_the_batch(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(batch_folder, "write_result", full)
    with pytest.raises(OSError, match="No space left"):
        run(tmp_path, [job("a"), job("b")])


def test_a_limit_leaves_the_rest_for_later(tmp_path):
    jobs = [job(name) for name in "abc"]
    summary, _ = run(tmp_path, jobs, limit=2)
    assert summary.made == ["a", "b"] and summary.left == ["c"]
    assert run(tmp_path, jobs)[0].made == ["c"]


def in_another_process(path, jobs, log, step_seconds=0.01):
    """A forked process that runs the batch; it costs no second import."""

    def work():
        run(path, jobs, FakeEngine(step_seconds, log))

    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    return process


forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


@forks
@pytest.mark.parametrize(
    ("count", "longest"), [(12, 0.5), pytest.param(100, 4.0, marks=pytest.mark.slow)], ids=["few", "hundred"]
)
def test_kills_at_any_moment_lose_and_repeat_nothing(tmp_path, count, longest):
    jobs = [job(f"job{i:02}") for i in range(count)]
    chance = random.Random(0)
    path, log = tmp_path / "out", tmp_path / "log"
    for _ in range(5):
        process = in_another_process(path, jobs, log)
        process.join(chance.uniform(0.05, longest))
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
        process.join()
    done_before = {r["id"] for r in records(path)} if (path / "manifest.jsonl").exists() else set()
    summary, engine = run(path, jobs, FakeEngine(0, log))
    assert done_before <= set(summary.kept)
    check_complete(path, jobs)
    # Each kill can cost the one job that was worked on, and no other.
    started = log.read_text().splitlines()
    assert len(started) <= len(jobs) + 5


@forks
def test_two_processes_share_the_jobs(tmp_path):
    jobs = [job(f"job{i:02}") for i in range(10)]
    log = tmp_path / "log"
    processes = [in_another_process(tmp_path / "out", jobs, log) for _ in range(2)]
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    check_complete(tmp_path / "out", jobs)
    assert sorted(log.read_text().split()) == [j.id for j in jobs]  # each exactly once
    assert len({record["worker"] for record in records(tmp_path / "out")}) == 2


@forks
def test_the_job_of_a_process_that_dies_is_taken_over(tmp_path):
    jobs = [job("slow")]
    log = tmp_path / "log"
    process = in_another_process(tmp_path / "out", jobs, log, step_seconds=30)
    while not log.exists():
        time.sleep(0.01)
    waited = []

    class Watch(Observer):
        def waiting(self, jobs):
            waited.append([j.id for j in jobs])
            os.kill(process.pid, signal.SIGKILL)
            process.join()

    summary, _ = run(tmp_path / "out", jobs, observer=Watch())
    assert waited == [["slow"]] and summary.made == ["slow"]


def test_the_estimate_comes_from_measured_jobs():
    small, large = job("s"), job("l", height=64)
    estimator = Estimator()
    assert estimator.seconds([small]) is None
    estimator.add(small, 2.0)
    estimator.add(small, 4.0)
    assert estimator.seconds([small, small]) == pytest.approx(6.0)
    assert estimator.seconds([large]) == pytest.approx(6.0)  # twice the pixels
    assert estimator.measured(small) and not estimator.measured(large)


def test_settings_hash_sees_what_decides_the_clip():
    base = job("a")
    same = dataclasses.replace(base, id="b", line=9)
    assert settings_hash(base, "m") == settings_hash(same, "m")
    others = [settings_hash(base, "n"), settings_hash(dataclasses.replace(base, recipe="dense"), "m")]
    others += [settings_hash(job("a", seed=1), "m"), settings_hash(job("a", fps=9), "m"), settings_hash(base, "m")]
    assert len(set(others)) == 5


def command(*arguments):
    return runner.invoke(app, ["batch", *(str(a) for a in arguments)])


def test_the_command_makes_resumes_and_estimates(model_folder, tmp_path):
    jobs = tmp_path / "jobs.csv"
    jobs.write_text('id,prompt,seed,frames\none,a red circle,"0,1",\nwrong,a circle,0,5\n')
    output = tmp_path / "out"
    options = ["--output", output, "--model", model_folder, "--device", "cpu", "--size", "32x32", "--json"]
    dry = json.loads(command(jobs, *options, "--dry-run").stdout)
    assert dry["to_make"] == ["one-seed0", "one-seed1", "wrong"] and dry["seconds"] is None
    assert not output.exists()
    first = command(jobs, *options, "--limit", 1)
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout)["made"] == 1
    dry = json.loads(command(jobs, *options, "--dry-run").stdout)
    assert dry["seconds"] > 0 and len(dry["to_make"]) == 2
    report = json.loads(command(jobs, *options).stdout)
    assert (report["made"], report["kept"], report["failed"]) == (2, 1, 0)
    assert "[3/3]" in command(jobs, *options, "--seed", 0, "--fps", 4).stderr  # changed: all of them again
    assert imageio.imread(output / "clips" / "one-seed1.mp4").shape == (5, 32, 32, 3)
    sidecar = json.loads((output / "clips" / "wrong.json").read_text())
    assert sidecar["batch"]["id"] == "wrong" and sidecar["model"] == str(model_folder) and sidecar["seed"] == 0


def test_the_exit_code_tells_a_partial_failure(model_folder, tmp_path, monkeypatch):
    from videospark.app import engine

    monkeypatch.setattr(engine, "Engine", lambda *_: FakeEngine())
    (tmp_path / "jobs.txt").write_text("a circle\nthis must fail\n")
    result = command(tmp_path / "jobs.txt", "--output", tmp_path / "out", "--model", model_folder)
    assert result.exit_code == 3
    assert "1 made" in result.stdout and "must not" in result.stdout and "FAILED" in result.stderr


@pytest.mark.parametrize(
    ("text", "options", "names"),
    [
        ('{"prompt": "a", "frames": 6}', [], ["jobs.jsonl:2: num_frames: got 6"]),
        ('{"prompt": "a", "recipe": "no-such"}', [], ["jobs.jsonl:2: recipe: got 'no-such'"]),
        ('{"prompt": "a", "recipe": "spark-4step"}', [], ["jobs.jsonl:2: recipe", "few-step"]),
        ('{"prompt": "a", "colour": 1}', [], ["jobs.jsonl:2: colour: unknown key"]),
        ('{"prompt": "a"}', ["--recipe", "no-such"], ["no-such"]),
        ('{"prompt": "a"}', ["--size", "big"], ["size"]),
        ('{"prompt": "a"}', ["--seeds", "0"], ["seeds"]),
        ('{"prompt": "a"}', ["--workers", "2"], ["workers", "--ray"]),
        ('{"prompt": "a"}', ["--model", "no/such/model"], ["model"]),
    ],
)
def test_a_wrong_file_ends_before_loading(text, options, names, model_folder, tmp_path, monkeypatch):
    from videospark.pipelines import loading

    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("loaded the model before checking"))
    (tmp_path / "jobs.jsonl").write_text('{"prompt": "fine"}\n' + text)
    arguments = [tmp_path / "jobs.jsonl", "--output", tmp_path / "out", "--model", model_folder, *options]
    result = command(*arguments)
    assert result.exit_code == 2, result.output
    for name in names:
        assert name in result.stderr
    assert not (tmp_path / "out").exists()
