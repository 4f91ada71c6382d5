"""The output folder of a batch: resumable at any moment, shared by any number of processes.

The folder holds, for a job `x`:

    clips/x.mp4 x.png x.json      the clip, its contact sheet, its sidecar
    manifest.jsonl                one record per job
    .locks/x.lock                 locked by the process that works on it; the system frees it when that process dies
    .work/x/                      files not complete yet

The files are made under `.work` and moved when they are whole, the sidecar last. A record in the manifest holds size
and hash of the video, so that a damaged one is noticed, and a hash of every setting, so that a changed one is. While a
batch runs the manifest is only appended to (the last record of a job counts); in the end it is written anew in the
order of the jobs.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from filelock import FileLock, Timeout

from ..pipelines.generation import GenerationRequest, GenerationResult, StepCallback
from ..pipelines.recipe import Recipe
from ..pipelines.recipe import resolve as resolve_recipe
from ..pipelines.sidecar import write_result
from ..pipelines.video_io import decoded_size
from .console import describe_error, write_text
from .engine import is_out_of_memory, request_settings
from .jobs import Job

MANIFEST = "manifest.jsonl"
CLIPS = "clips"

_LOG = logging.getLogger("videospark.batch")
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
_SEPARATORS = (",", ":")


class Runner(Protocol):
    """What makes the clips: an `Engine`, or a test's stand-in."""

    def run(
        self, request: GenerationRequest, recipe: str | Recipe | None = None, *, on_step: StepCallback | None = None
    ) -> GenerationResult:
        """Makes one clip."""
        ...

    def free_memory(self) -> None:
        """Gives memory back after a failure."""
        ...


class BatchFolder:
    """The output folder of a batch.

    Args:
        path: the folder; made when the first job is claimed.
        settings: by job id, a hash of everything that decides its clip.
        extra: further entries of every sidecar, such as the model's name.
    """

    def __init__(self, path: str | Path, settings: Mapping[str, str], extra: Mapping[str, Any] | None = None) -> None:
        self.path, self.settings, self.extra = Path(path), settings, dict(extra or {})
        self._read_inode, self._read_bytes = -1, 0
        self._records: dict[str, dict[str, Any]] = {}
        self.worker = f"{socket.gethostname()}:{os.getpid()}"

    def records(self) -> dict[str, dict[str, Any]]:
        """The last record of each job in the manifest; a line that a killed process left half is none.

        Only what was added since the last call is read, unless another process wrote the file anew.
        """
        try:
            with (self.path / MANIFEST).open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._read_inode or status.st_size < self._read_bytes:
                    self._read_inode, self._read_bytes, self._records = status.st_ino, 0, {}
                file.seek(self._read_bytes)
                data = file.read()
        except FileNotFoundError:
            return {}
        whole = data[: data.rfind(b"\n") + 1]
        self._read_bytes += len(whole)
        for line in whole.split(b"\n"):
            record = _parse_record(line)
            if record is not None:
                self._records[record["id"]] = record
        return dict(self._records)

    def state(self, job: Job, record: Mapping[str, Any] | None) -> str:
        """Of a job by its files and its record: "done", "missing", "changed", "broken" or "failed"."""
        files = self.files(job.id)
        present = all(file.is_file() for file in files.values())
        if self.is_current(job, record):
            assert record is not None
            size, digest = record.get("bytes"), record.get("sha256")
            whole = present and files["video"].stat().st_size == size and _sha256(files["video"]) == digest
            return "done" if whole and _read_json(files["sidecar"]) is not None else "broken"
        # A process that died between moving the files and writing the record leaves an old record, or none.
        unrecorded = self._state_without_record(job, files) if present else "missing"
        if unrecorded == "done" or record is None:
            return unrecorded
        return "failed" if record.get("settings") == self.settings[job.id] else "changed"

    def is_current(self, job: Job, record: Mapping[str, Any] | None) -> bool:
        """Whether the record says that the job was made with its present settings."""
        if record is None:
            return False
        return record["status"] == "done" and record.get("settings") == self.settings[job.id]

    def files(self, job_id: str) -> dict[str, Path]:
        """The three files of a job, whether they exist or not."""
        clips = self.path / CLIPS
        return {
            "video": clips / f"{job_id}.mp4", "sheet": clips / f"{job_id}.png", "sidecar": clips / f"{job_id}.json"
        }  # fmt: skip

    @contextmanager
    def claim(self, job_id: str) -> Iterator[bool]:
        """Yields whether this process may work on the job until the block ends; nobody else may then."""
        lock = FileLock(self._lock_path(job_id))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            lock.release()

    def make(self, job: Job, runner: Runner, on_step: StepCallback | None = None) -> dict[str, Any]:
        """Makes one claimed job's files and appends its record, also of a failure; returns the record.

        Raises:
            OSError: the disk is full or read-only, which no other job would survive either.
        """
        start = time.time()
        failure = None
        try:
            result = runner.run(job.request, job.recipe, on_step=on_step)
            record = {**self._base(job, self.worker), "status": "done", **self._store(job, result)}
        except Exception as error:  # a bad job is recorded, and the others are made
            if isinstance(error, OSError) and error.errno in _FULL_DISK:
                raise
            _LOG.warning("job %s (line %d) failed", job.id, job.line, exc_info=True)
            memory = "out of memory: " if is_out_of_memory(error) else ""
            failure = memory + describe_error(error)[:2000]
        if failure is not None:
            runner.free_memory()
            self._remove(job.id)
            record = self.failure(job, failure)
        record["seconds"] = round(time.time() - start, 3)
        record["finished"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self.append(record)
        return record

    def failure(self, job: Job, reason: str) -> dict[str, Any]:
        """The record of a failed job; not appended yet."""
        return {**self._base(job, self.worker), "status": "failed", "error": reason, "seconds": 0.0}

    def receive(self, job: Job, record: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Takes over what another machine made of a claimed job: its record, and its files where it is done.

        Raises:
            OSError: the video is not the one that was made there.
        """
        if record["status"] != "done":
            self._remove(job.id)
            self.append(record)
            return
        work = self._fresh_work(job.id)
        made = {name: work / self.files(job.id)[name].name for name in files}
        for name, data in files.items():
            made[name].write_bytes(data)
        if _sha256(made["video"]) != record["sha256"]:
            raise OSError(f"{job.id}: the video was damaged on its way from {record['worker']}")
        self._move(job.id, made)
        self.append(record)

    def adopt(self, job: Job) -> None:
        """Appends the record of a job whose files are whole and whose process died before it could."""
        sidecar = _read_json(self.files(job.id)["sidecar"]) or {}
        base = self._base(job, sidecar.get("batch", {}).get("worker"))
        seconds = round(sidecar["stages"]["total_seconds"], 3)
        self.append({**base, "status": "done", **self._video_facts(job.id), "seconds": seconds})

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a line to the manifest, on a line of its own even where a killed process left half of one."""
        self.path.mkdir(parents=True, exist_ok=True)
        line = json.dumps(record, ensure_ascii=False, separators=_SEPARATORS) + "\n"
        with self._manifest_lock(), (self.path / MANIFEST).open("ab+") as file:
            if file.seek(0, os.SEEK_END) > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = "\n" + line
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())

    def finish(self, jobs: Sequence[Job]) -> None:
        """Writes the manifest anew: one record per job, in their order; then those of jobs no longer asked."""
        with self._manifest_lock():
            records = self.records()
            order = [job.id for job in jobs if job.id in records]
            order += [name for name in records if name not in set(order)]
            lines = [json.dumps(records[name], ensure_ascii=False, separators=_SEPARATORS) + "\n" for name in order]
            write_text(self.path / MANIFEST, "".join(lines))

    def _state_without_record(self, job: Job, files: Mapping[str, Path]) -> str:
        sidecar = _read_json(files["sidecar"])
        if sidecar is None:
            return "broken"
        if sidecar.get("batch", {}).get("settings") != self.settings[job.id]:
            return "changed"
        return "done" if _decodes(files["video"], sidecar["size"]) else "broken"

    def _base(self, job: Job, worker: str | None) -> dict[str, Any]:
        request = job.request
        return {
            "id": job.id, "line": job.line, "settings": self.settings[job.id], "prompt": request.prompt,
            "seed": request.seed, "recipe": job.recipe, "shape": list(job.shape[1:]), "cost": job.cost,
            "worker": worker,
        }  # fmt: skip

    def _store(self, job: Job, result: GenerationResult) -> dict[str, Any]:
        work = self._fresh_work(job.id)
        own = {"id": job.id, "settings": self.settings[job.id], "worker": self.worker}
        made = write_result(result, work / f"{job.id}.mp4", extra={**self.extra, "batch": own})
        self._move(job.id, made)
        return {**self._video_facts(job.id), "stages": {k: round(v, 4) for k, v in result.stages["seconds"].items()}}

    def _fresh_work(self, job_id: str) -> Path:
        work = self.path / ".work" / job_id
        shutil.rmtree(work, ignore_errors=True)  # what a killed process left
        work.mkdir(parents=True)
        return work

    def _move(self, job_id: str, made: Mapping[str, Path]) -> None:
        """Whole files to their places, the sidecar last."""
        files = self.files(job_id)
        files["sidecar"].parent.mkdir(parents=True, exist_ok=True)
        files["sidecar"].unlink(missing_ok=True)  # an earlier clip's must not describe this one's video
        for name in ("video", "sheet", "sidecar"):
            os.replace(made[name], files[name])
        shutil.rmtree(self.path / ".work" / job_id, ignore_errors=True)

    def _video_facts(self, job_id: str) -> dict[str, Any]:
        files = self.files(job_id)
        places = {name: file.relative_to(self.path).as_posix() for name, file in files.items()}
        return {**places, "bytes": files["video"].stat().st_size, "sha256": _sha256(files["video"])}

    def _remove(self, job_id: str) -> None:
        """A failed job has no clip: not even that of earlier settings, which would pass for its own."""
        for file in self.files(job_id).values():
            file.unlink(missing_ok=True)
        shutil.rmtree(self.path / ".work" / job_id, ignore_errors=True)

    def _lock_path(self, name: str) -> Path:
        folder = self.path / ".locks"
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f"{name}.lock"

    def _manifest_lock(self) -> FileLock:
        # "=" is in no id, so this is no job's lock.
        return FileLock(self._lock_path("=manifest"))


def settings_hash(job: Job, model: str, own_recipe: Recipe | None = None) -> str:
    """A hash of everything that decides a resolved job's clip: request, recipe, model; not its id or line.

    Args:
        job: with a resolved request.
        model: the model's fingerprint.
        own_recipe: what the model is loaded with; used for jobs that name none.
    """
    recipe = resolve_recipe(job.recipe) if job.recipe is not None else own_recipe
    data = {
        "request": request_settings(job.request),
        "recipe": dataclasses.asdict(recipe) if recipe is not None else None,
        "model": model,
    }
    text = json.dumps(data, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() if hasattr(hashlib, "file_digest") else _sha256_old(file)


def _sha256_old(file: Any) -> str:  # Python 3.10
    digest = hashlib.sha256()
    while block := file.read(2**20):
        digest.update(block)
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _parse_record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        return record if isinstance(record["id"], str) and record["status"] in ("done", "failed") else None
    except (ValueError, KeyError, TypeError):
        return None


def _decodes(path: Path, size: Mapping[str, int]) -> bool:
    """Whether every frame that the sidecar promises can be decoded."""
    try:
        return decoded_size(path) == (size["width"], size["height"], size["num_frames"])
    except (OSError, KeyError):
        return False
