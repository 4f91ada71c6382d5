"""Batches on a Ray cluster: one worker per GPU, each with its own model; no shared folder is needed.

Workers send finished files back through Ray, and this process alone writes the output folder. So the same folder is
resumed with or without Ray, and other processes on it are kept apart by the same locks. A job whose worker dies goes to
another one.
"""

from __future__ import annotations

import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from ..core.config import ConfigError, require
from .batch import WAIT_SECONDS, Observer, Summary, begin, note, settled_by_others
from .batch_folder import BatchFolder, Runner
from .estimate import Estimator
from .jobs import Job

CPUS_PER_WORKER = 4
MAX_DEATHS = 3
"""Workers that may die on a job before it counts as failed: a job that kills workers must not kill them all."""


class Worker:
    """Runs in a process of the cluster: makes jobs in a temporary folder and returns their files.

    Args:
        model: folder or hub id; has to be found on the worker's machine.
        settings: see `BatchFolder`.
        extra: see `BatchFolder`.
        make_runner: makes what runs the jobs of a model; None is an `Engine` on the best device.
    """

    def __init__(
        self,
        model: str,
        settings: Mapping[str, str],
        extra: Mapping[str, Any],
        make_runner: Callable[[str], Runner] | None,
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="videospark-")
        self._folder = BatchFolder(self._temporary.name, settings, extra)
        if make_runner is None:
            from .engine import Engine

            engine = Engine(model)
            engine.load()
            self._runner: Runner = engine
        else:
            self._runner = make_runner(model)

    def make(self, job: Job) -> tuple[dict[str, Any], dict[str, bytes]]:
        """The job's record, and its files where it is done."""
        record = self._folder.make(job, self._runner)
        if record["status"] != "done":
            return record, {}
        paths = self._folder.files(job.id)
        files = {name: path.read_bytes() for name, path in paths.items()}
        for path in paths.values():
            path.unlink()
        return record, files


def run_on_ray(
    jobs: Sequence[Job],
    folder: BatchFolder,
    model: str,
    address: str,
    observer: Observer,
    *,
    workers: int | None = None,
    limit: int | None = None,
    make_runner: Callable[[str], Runner] | None = None,
) -> Summary:
    """As `batch.run_batch`, with the jobs spread over a cluster.

    Args:
        jobs: with resolved requests and different ids.
        folder: where to.
        model: has to be found on the workers' machines.
        address: of the cluster; "auto" is the one that runs here, or else one started for this batch.
        observer: hears of the progress; not of steps.
        workers: at most this many; None is one per GPU, or one per four CPUs where there is none.
        limit: most jobs to make now.
        make_runner: see `Worker`.

    Raises:
        ConfigError: no cluster at this address.
        ImportError: Ray is not installed.
    """
    pending, known, summary = begin(jobs, folder, observer)
    if pending:
        ray, started = _connect(address)
        try:
            _Spread(ray, folder, observer, known, summary, model, make_runner).run(pending, workers, limit)
        finally:
            if started:
                ray.shutdown()
    folder.finish(jobs)
    return summary


def _connect(address: str) -> tuple[Any, bool]:
    """Ray, and whether it was connected here."""
    try:
        import ray
    except ImportError:
        raise ImportError("ray is not installed; --ray needs it: pip install 'videospark[ray]'") from None
    if ray.is_initialized():
        return ray, False
    quiet = {"log_to_driver": False, "configure_logging": False}
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, ValueError, TimeoutError) as error:
        if address != "auto":
            raise ConfigError(f"ray: got {address!r}; must be auto or the address of a cluster ({error})") from None
        ray.init(address="local", include_dashboard=False, **quiet)  # none runs here yet
    return ray, True


class _Spread:
    """One run over the workers of a cluster."""

    def __init__(
        self, ray: Any, folder: BatchFolder, observer: Observer, known: Mapping[str, Any], summary: Summary, model: str,
        make_runner: Callable[[str], Runner] | None,
    ) -> None:  # fmt: skip
        self.ray, self.folder, self.observer, self.known, self.summary = ray, folder, observer, known, summary
        self._arguments = (model, dict(folder.settings), folder.extra, make_runner)
        self._estimator = Estimator()
        self._deaths: dict[str, int] = {}
        self._busy: dict[Any, tuple[Any, Job, ExitStack]] = {}
        self._idle: list[Any] = []
        self._starting: dict[Any, Any] = {}
        self._bad_starts = 0

    def run(self, pending: Sequence[Job], workers: int | None, limit: int | None) -> None:
        """Until every job is settled, or `limit` are made."""
        self._options, count = self._share(workers)
        count = min(count, len(pending))
        for _ in range(count):
            self._start_worker()
        queue, elsewhere = deque(pending), deque[Job]()
        try:
            while queue or elsewhere or self._busy:
                self._hand_out(queue, elsewhere, limit)
                if limit is not None and self._settled() >= limit and not self._busy:
                    self.summary.left = [job.id for job in (*queue, *elsewhere)]
                    return
                if self._busy or (queue and not self._idle):
                    self._collect(queue, elsewhere)
                elif elsewhere:
                    self.observer.waiting(list(elsewhere))
                    time.sleep(WAIT_SECONDS)
                    queue, elsewhere = elsewhere, deque()
        finally:
            for worker, _, claim in self._busy.values():
                claim.close()
                self._idle.append(worker)
            for worker in (*self._idle, *self._starting.values()):
                self.ray.kill(worker)

    def _share(self, workers: int | None) -> tuple[dict[str, float], int]:
        """What one worker takes of the cluster, and how many there shall be: more than fit would wait for ever."""
        resources = self.ray.cluster_resources()
        gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 1))
        most = gpus or cpus
        require(
            workers is None or workers <= most, "workers", workers, f"at most {most}, what this cluster has room for"
        )
        if gpus:
            return {"num_gpus": 1, "num_cpus": 0}, workers or gpus
        count = workers or max(1, cpus // CPUS_PER_WORKER)
        return {"num_cpus": cpus // count}, count

    def _start_worker(self) -> None:
        worker = self.ray.remote(Worker).options(**self._options).remote(*self._arguments)
        self._starting[worker.__ray_ready__.remote()] = worker

    def _start_ended(self, answer: Any) -> None:
        """A worker is ready, or could not load the model; as the next would not either, a few such end the batch."""
        worker = self._starting.pop(answer)
        try:
            self.ray.get(answer)
        except self.ray.exceptions.RayActorError as error:
            self._bad_starts += 1
            if self._bad_starts >= MAX_DEATHS:
                reason = str(error).strip().splitlines()
                raise RuntimeError(
                    f"ray: workers could not load the model: {reason[-1] if reason else error}"
                ) from None
            self._start_worker()
        else:
            self._bad_starts = 0
            self._idle.append(worker)

    def _settled(self) -> int:
        return len(self.summary.made) + len(self.summary.failed)

    def _hand_out(self, queue: deque[Job], elsewhere: deque[Job], limit: int | None) -> None:
        """Gives each idle worker a job that nobody else works on; its lock is held here until it is settled."""
        while queue and self._idle:
            if limit is not None and self._settled() + len(self._busy) >= limit:
                return
            job = queue.popleft()
            claim = ExitStack()
            if not claim.enter_context(self.folder.claim(job.id)):
                claim.close()
                elsewhere.append(job)
                continue
            if settled_by_others(job, self.folder, self.known[job.id], self.summary):
                claim.close()
                continue
            worker = self._idle.pop()
            self.observer.begins(job)
            self._busy[worker.make.remote(job)] = (worker, job, claim)

    def _collect(self, queue: deque[Job], elsewhere: deque[Job]) -> None:
        """Waits for one worker to be ready, to end a job or to die."""
        (answer,), _ = self.ray.wait([*self._starting, *self._busy], num_returns=1)
        if answer in self._starting:
            self._start_ended(answer)
            return
        worker, job, claim = self._busy.pop(answer)
        with claim:
            try:
                record, files = self.ray.get(answer)
            except self.ray.exceptions.RayActorError as error:
                self._start_worker()
                self._deaths[job.id] = self._deaths.get(job.id, 0) + 1
                if self._deaths[job.id] < MAX_DEATHS:
                    queue.appendleft(job)
                    return
                record, files = self.folder.failure(job, f"its worker died {MAX_DEATHS} times: {error}"), {}
            else:
                self._idle.append(worker)
            self.folder.receive(job, record, files)
        note(job, record, self.summary)
        if record["status"] == "done":
            self._estimator.add(job, record["seconds"])
        rest = [*queue, *elsewhere, *(other for _, other, _ in self._busy.values())]
        seconds = self._estimator.seconds(rest)
        count = max(1, len(self._busy) + len(self._idle) + len(self._starting))
        self.observer.ended(job, record, None if seconds is None else seconds / count)
