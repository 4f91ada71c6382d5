"""Copies of a batch's clips anywhere that fsspec reaches: object stores, other machines, other folders.

The local folder stays the one that counts. A clip's sidecar is copied last and differs from clip to clip, as it holds
the times that were measured; so where the remote sidecar equals the local one, the whole clip is there.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.config import ConfigError
from .batch import Observer
from .batch_folder import CLIPS, MANIFEST, BatchFolder
from .jobs import Job

_LOG = logging.getLogger("videospark.batch")


class RemoteCopy:
    """A folder of clips behind a URL.

    Args:
        url: as fsspec takes it, such as "s3://bucket/night" or "file:///mnt/share/night".

    Raises:
        ConfigError: an unknown protocol.
        ImportError: a protocol whose package is not installed.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        if "://" not in url:
            raise ConfigError(f"copy_to: got {url!r}; must be a URL such as s3://bucket/folder")
        try:
            self._files, root = fsspec.core.url_to_fs(url)
        except ValueError as error:
            raise ConfigError(f"copy_to: got {url!r}; must be a URL that fsspec knows ({error})") from None
        self.url, self._root = url, root.rstrip("/")

    def check(self) -> None:
        """Writes and removes a small file, so that a wrong key or bucket is told before anything is made.

        Raises:
            ConfigError: with the cause.
        """
        probe = f"{self._root}/.probe-{uuid.uuid4().hex}"
        try:
            self._files.makedirs(f"{self._root}/{CLIPS}", exist_ok=True)
            self._files.pipe_file(probe, b"probe")
            self._files.rm_file(probe)
        except Exception as error:  # each store has errors of its own
            raise ConfigError(
                f"copy_to: got {self.url!r}; must be writable ({type(error).__name__}: {error})"
            ) from None

    def has(self, folder: BatchFolder, job_id: str) -> bool:
        """Whether the clip that lies in the folder now is there."""
        sidecar = folder.files(job_id)["sidecar"]
        try:
            return bool(self._files.cat_file(self._place(sidecar.name)) == sidecar.read_bytes())
        except FileNotFoundError:
            return False

    def put(self, folder: BatchFolder, job_id: str) -> None:
        """Copies a clip, the sidecar last."""
        files = folder.files(job_id)
        self.remove(folder, job_id, only="sidecar")
        for name in ("video", "sheet", "sidecar"):
            self._files.put_file(str(files[name]), self._place(files[name].name))

    def remove(self, folder: BatchFolder, job_id: str, only: str | None = None) -> None:
        """Takes a clip away, the sidecar first: a failed job has none."""
        files = folder.files(job_id)
        for name in (only,) if only else ("sidecar", "video", "sheet"):
            place = self._place(files[name].name)
            if self._files.exists(place):
                self._files.rm_file(place)

    def put_manifest(self, folder: BatchFolder) -> None:
        """Copies the manifest."""
        self._files.put_file(str(folder.path / MANIFEST), f"{self._root}/{MANIFEST}")

    def _place(self, name: str) -> str:
        return f"{self._root}/{CLIPS}/{name}"


class CopyingObserver(Observer):
    """Copies each clip as soon as it is done, and hands everything on to another observer.

    Args:
        inner: hears what this one hears.
        remote: where to.
        folder: where from.
    """

    def __init__(self, inner: Observer, remote: RemoteCopy, folder: BatchFolder) -> None:
        self._inner, self._remote, self._folder = inner, remote, folder

    def states(self, states: Mapping[str, str]) -> None:
        """Handed on."""
        self._inner.states(states)

    def begins(self, job: Job) -> None:
        """Handed on."""
        self._inner.begins(job)

    def step(self, job: Job, index: int, steps: int, seconds: float) -> None:
        """Handed on."""
        self._inner.step(job, index, steps, seconds)

    def waiting(self, jobs: Sequence[Job]) -> None:
        """Handed on."""
        self._inner.waiting(jobs)

    def ended(self, job: Job, record: Mapping[str, Any], seconds_left: float | None) -> None:
        """Copies a clip that is done; a store that fails now is tried again in the end."""
        self._inner.ended(job, record, seconds_left)
        try:
            if record["status"] == "done":
                self._remote.put(self._folder, job.id)
        except Exception:
            _LOG.warning("job %s: not copied yet", job.id, exc_info=True)

    def finish(self, jobs: Sequence[Job]) -> dict[str, str]:
        """Copies what is not there yet, and the manifest; returns what could not be copied, with the reasons."""
        problems: dict[str, str] = {}
        records = self._folder.records()
        for job in jobs:
            status = records.get(job.id, {}).get("status")
            try:
                if status == "failed":
                    self._remote.remove(self._folder, job.id)
                elif status == "done" and not self._remote.has(self._folder, job.id):
                    self._remote.put(self._folder, job.id)
            except Exception as error:
                problems[job.id] = f"{type(error).__name__}: {error}"
        try:
            if records:
                self._remote.put_manifest(self._folder)
        except Exception as error:
            problems[MANIFEST] = f"{type(error).__name__}: {error}"
        return problems
