"""Copies of a batch through fsspec, on its file system in memory and on one that breaks."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import fsspec
import pytest
from typer.testing import CliRunner

from videospark.app.batch import Observer, run_batch
from videospark.app.cli import app
from videospark.app.remote_copy import CopyingObserver, RemoteCopy
from videospark.core.config import ConfigError

sys.path.insert(0, str(Path(__file__).parent))
from fakes import FakeEngine
from test_batch import folder_of, job


class Silent(Observer):
    """Hears nothing."""


@pytest.fixture
def url(tmp_path):
    made = f"memory://bucket/{tmp_path.name}"
    yield made
    files = fsspec.filesystem("memory")
    if files.exists(made):
        files.rm(made, recursive=True)


def copied(path, jobs, url):
    folder = folder_of(path, jobs)
    observer = CopyingObserver(Silent(), RemoteCopy(url), folder)
    engine = FakeEngine()
    run_batch(jobs, folder, lambda: engine, observer)
    return observer.finish(jobs), folder


def remote_names(url):
    files = fsspec.filesystem("memory")
    return sorted(Path(name).name for name in files.find(url))


def test_clips_and_manifest_are_copied_whole(tmp_path, url):
    jobs = [job("a"), job("b"), job("bad", "must fail")]
    problems, folder = copied(tmp_path, jobs, url)
    assert problems == {}
    assert remote_names(url) == sorted(["manifest.jsonl"] + [f"{n}.{s}" for n in "ab" for s in ("mp4", "png", "json")])
    files = fsspec.filesystem("memory")
    for name in ("a.mp4", "a.png", "a.json"):
        assert files.cat_file(f"{url}/clips/{name}") == (tmp_path / "clips" / name).read_bytes()
    assert files.cat_file(f"{url}/manifest.jsonl") == (tmp_path / "manifest.jsonl").read_bytes()


def test_what_is_missing_or_old_is_copied_again_and_nothing_else(tmp_path, url, monkeypatch):
    jobs = [job("a"), job("b"), job("c")]
    copied(tmp_path, jobs, url)
    files = fsspec.filesystem("memory")
    files.rm(f"{url}/clips/a.json")
    files.pipe_file(f"{url}/clips/b.json", b"{}")  # of an earlier clip
    put, real = [], RemoteCopy.put
    monkeypatch.setattr(RemoteCopy, "put", lambda self, folder, name: (put.append(name), real(self, folder, name)))
    assert copied(tmp_path, jobs, url)[0] == {}
    assert put == ["a", "b"]
    assert files.cat_file(f"{url}/clips/b.json") == (tmp_path / "clips" / "b.json").read_bytes()


def test_a_job_that_fails_now_loses_its_old_copy(tmp_path, url):
    copied(tmp_path, [job("a"), job("b")], url)
    copied(tmp_path, [job("a", "must fail"), job("b")], url)
    assert remote_names(url) == ["b.json", "b.mp4", "b.png", "manifest.jsonl"]


def test_a_store_that_fails_costs_no_clip_and_is_told(tmp_path, url, monkeypatch):
    jobs = [job("a"), job("b")]
    real = RemoteCopy.put

    def put(self, folder, name):
        if name == "a":
            raise OSError("the store is away")
        real(self, folder, name)

    with monkeypatch.context() as patch:
        patch.setattr(RemoteCopy, "put", put)
        problems, _ = copied(tmp_path, jobs, url)
    assert problems == {"a": "OSError: the store is away"}
    assert (tmp_path / "clips" / "a.mp4").is_file() and "a.json" not in remote_names(url)
    assert copied(tmp_path, jobs, url)[0] == {} and "a.json" in remote_names(url)


@pytest.mark.parametrize("wrong", ["outputs/there", "nosuch://x/y"])
def test_wrong_addresses(wrong):
    with pytest.raises(ConfigError, match="copy_to"):
        RemoteCopy(wrong)


def test_a_place_that_cannot_be_written_is_told_before_anything_is_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match="must be writable"):
        RemoteCopy(f"file://{tmp_path}/file/there").check()


def test_the_command_copies_and_tells(model_folder, tmp_path, url):
    jobs = tmp_path / "jobs.jsonl"
    jobs.write_text('{"id": "a", "prompt": "a circle", "steps": 1}\n')
    options = ["batch", str(jobs), "-o", str(tmp_path / "out"), "--model", str(model_folder), "--json"]
    done = CliRunner().invoke(app, [*options, "--copy-to", url])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["copied_to"] == url and report["not_copied"] == {} and "a.mp4" in remote_names(url)
    wrong = CliRunner().invoke(app, [*options, "--copy-to", "outputs"])
    assert wrong.exit_code == 2 and "copy_to" in wrong.stderr
