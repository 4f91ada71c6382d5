"""The one core under page and API: models stay loaded, requests wait in a bounded queue, one runs per device.

Every request has an id. `watch` yields what is known of it each time that changes, to any number of watchers and again
after a reload; the log names the id beside the real cause of each failure, and the user reads a short one.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import logging
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from ..core.config import require
from ..pipelines.generation import GenerationCancelled, GenerationRequest
from ..pipelines.recipe import Recipe
from ..pipelines.video_io import read_image
from .block_maps import BlockMapRecorder
from .console import describe_error
from .engine import TEACHER, Engine
from .history import Clip, History, new_id
from .model_folder import display_name
from .service_data import NotReady, QueueFull, ServiceLimits, Snapshot, Status, recipe_name, short_cause

_LOG = logging.getLogger("videospark.service")
_FORGET_AFTER = 1000
"""Settled requests that are remembered; older clips are still in the history."""


class _Task:
    """A request on its way; its fields are changed under the service's lock alone."""

    def __init__(self, snapshot: Snapshot, owner: str | None, record_maps: bool) -> None:
        self.snapshot, self.owner, self.record_maps = snapshot, owner, record_maps
        self.cancel = threading.Event()
        self.created = time.time()
        self.last_preview = 0.0
        self.step_seconds: list[float] = []


class GenerationService:
    """Runs requests on its engines, one at a time on each.

    Args:
        engines: one per device, all with the same model.
        folder: where the clips go; nothing else is written.
        limits: see `ServiceLimits`.
        model_name: for the sidecars; a name, not a place on this machine.
    """

    def __init__(
        self, engines: Sequence[Engine], folder: str | Path, limits: ServiceLimits | None = None, model_name: str = ""
    ) -> None:
        self.engines, self.limits, self.model_name = list(engines), limits or ServiceLimits(), model_name
        self.history = History(folder)
        self._changed = threading.Condition()
        self._tasks: dict[str, _Task] = {}
        self._waiting: list[tuple[bool, int, str]] = []
        self._numbers = itertools.count()
        self._closing = False
        self._ready = threading.Event()
        self._load_error: str | None = None
        self._finish_seconds: dict[tuple[Any, ...], float] = {}
        self._threads = [
            threading.Thread(target=self._work, args=(engine,), name=f"videospark-worker-{index}", daemon=True)
            for index, engine in enumerate(self.engines)
        ]

    def start(self) -> GenerationService:
        """Begins to load the models, and then to work; returns at once."""
        for thread in self._threads:
            thread.start()
        return self

    def close(self) -> None:
        """Cancels everything and waits for the workers."""
        with self._changed:
            self._closing = True
            for task in self._tasks.values():
                task.cancel.set()
            self._changed.notify_all()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()

    def wait_until_ready(self, timeout: float | None = None) -> Engine:
        """The first engine, once its model is loaded.

        Raises:
            NotReady: it could not be, or not in this many seconds.
        """
        if not self._ready.wait(timeout):
            raise NotReady("the model is still being loaded; try again in a moment")
        if self._load_error is not None:
            raise NotReady(self._load_error)
        return self.engines[0]

    @property
    def comparison(self) -> str:
        """What a recipe is compared with: the teacher where one is known, else the model itself without a recipe."""
        return TEACHER if getattr(self.engines[0], "teacher", None) is not None else "dense"

    @property
    def is_ready(self) -> bool:
        """Whether a model is loaded and requests run at once."""
        return self._ready.is_set() and self._load_error is None

    def check(self, request: GenerationRequest, recipe: str | Recipe | None = None) -> GenerationRequest:
        """The request resolved and held against the limits, as `submit` does; raises what it raises."""
        engine = self.wait_until_ready()
        self.limits.check_texts(request)
        resolved = engine.resolve(request, recipe)
        self.limits.check(resolved)
        return resolved

    def submit(
        self,
        request: GenerationRequest,
        recipe: str | Recipe | None = None,
        *,
        owner: str | None = None,
        label: str = "",
        group: str | None = None,
        background: bool = False,
        record_maps: bool = False,
    ) -> str:
        """Puts a request into the queue; returns its id.

        Args:
            request: what to make.
            recipe: a preset's name or a Recipe; None is the model's own.
            owner: only they may ask for it later; None is everybody.
            label: what the asker calls it.
            group: id of a job file.
            background: runs when nothing else waits.
            record_maps: keeps beside the clip which blocks its sparse layers attended to.

        Raises:
            ConfigError: a wrong or too large request.
            QueueFull: nothing more may wait.
            NotReady: there is no model.
        """
        request_id = new_id()
        resolved = self.check(request, recipe)
        with self._changed:
            self._require_room(background, 1)
        if resolved.image is not None:
            resolved = dataclasses.replace(resolved, image=self._keep_image(request_id, resolved.image))
        snapshot = Snapshot(
            request_id, Status.queued, steps=resolved.num_inference_steps or 0, request=resolved, recipe=recipe,
            label=label, group=group,
        )  # fmt: skip
        with self._changed:
            self._require_room(background, 1)
            self._tasks[request_id] = _Task(snapshot, owner, record_maps)
            heapq.heappush(self._waiting, (background, next(self._numbers), request_id))
            self._update_positions()
            self._changed.notify_all()
        _LOG.info("request %s: queued, owner %s, recipe %s", request_id, owner, recipe_name(recipe))
        return request_id

    def submit_group(self, jobs: Sequence[Any], *, owner: str | None = None) -> str:
        """Puts all jobs of a file (`app.jobs.Job`) into the queue, behind everything else; returns the group's id."""
        with self._changed:
            self._require_room(True, len(jobs))
        for job in jobs:
            self.check(job.request, job.recipe)
        group = new_id()
        for job in jobs:
            self.submit(job.request, job.recipe, owner=owner, label=job.id, group=group, background=True)
        return group

    def snapshot(self, request_id: str, owner: str | None = None) -> Snapshot | None:
        """What is known now; None for an id that is not known, or is another owner's."""
        with self._changed:
            task = self._tasks.get(request_id)
            if task is not None:
                return task.snapshot if owner is None or task.owner == owner else None
        clip = self.clip(request_id, owner)
        return None if clip is None else Snapshot(request_id, Status.done)

    def clip(self, request_id: str, owner: str | None = None) -> Clip | None:
        """The finished clip; None where there is none, or it is another owner's."""
        clip = self.history.read(request_id)
        return clip if clip is not None and (owner is None or clip.origin.get("owner") == owner) else None

    def watch(self, request_id: str, owner: str | None = None, *, poll: float = 1.0) -> Iterator[Snapshot]:
        """Yields the present snapshot, then each newer one, and ends with a settled one.

        A watcher that is slow misses some in between, and never the last. Every `poll` seconds the present one comes
        again, so that whoever watches can notice that its user has gone.
        """
        known = -1
        while True:
            with self._changed:
                self._changed.wait_for(functools.partial(self._is_newer, request_id, known), timeout=poll)
            snapshot = self.snapshot(request_id, owner)
            if snapshot is None:
                return
            known = snapshot.version
            yield snapshot
            if snapshot.status.settled:
                return

    def group(self, group_id: str, owner: str | None = None) -> list[Snapshot]:
        """The requests of a job file, in its order."""
        with self._changed:
            tasks = [task for task in self._tasks.values() if task.snapshot.group == group_id]
            return [task.snapshot for task in tasks if owner is None or task.owner == owner]

    def cancel(self, request_id: str, owner: str | None = None) -> bool:
        """Ends a request: at once where it waits, within a step where it runs. False where there is nothing to end."""
        with self._changed:
            task = self._tasks.get(request_id)
            if task is None or task.snapshot.status.settled or (owner is not None and task.owner != owner):
                return False
            task.cancel.set()
            waited = task.snapshot.status is Status.queued
            if waited:
                self._waiting = [entry for entry in self._waiting if entry[2] != request_id]
                heapq.heapify(self._waiting)
                self._settle(task, Status.cancelled)
        if waited:  # of one that runs the worker takes the files away: it may be storing them
            self.history.discard(request_id)
        return True

    def queue_length(self) -> int:
        """Requests that wait."""
        with self._changed:
            return len(self._waiting)

    # Below: under the lock, or in a worker's thread.

    def _is_newer(self, request_id: str, version: int) -> bool:
        task = self._tasks.get(request_id)
        return task is None or task.snapshot.version != version

    def _require_room(self, background: bool, count: int) -> None:
        if self._closing:
            raise NotReady("the service ends")
        limit = self.limits.max_background if background else self.limits.max_queue
        waiting = sum(entry[0] == background for entry in self._waiting)
        if waiting + count > limit:
            raise QueueFull(f"the queue is full: {waiting} wait, and at most {limit} may; try again later")

    def _keep_image(self, request_id: str, image: Any) -> str:
        picture = image if isinstance(image, Image.Image) else read_image(image)
        pixels = picture.width * picture.height
        rule = f"at most {self.limits.max_image_pixels} pixels"
        require(pixels <= self.limits.max_image_pixels, "image", f"{picture.width}x{picture.height}", rule)
        return str(self.history.keep_input(request_id, picture))

    def _change(self, task: _Task, **changes: Any) -> None:
        task.snapshot = dataclasses.replace(task.snapshot, version=task.snapshot.version + 1, **changes)
        self._changed.notify_all()

    def _settle(self, task: _Task, status: Status, error: str | None = None) -> None:
        self._change(task, status=status, error=error, preview=None, seconds_left=None, position=0)
        settled = [name for name, other in self._tasks.items() if other.snapshot.status.settled]
        for name in settled[:-_FORGET_AFTER]:
            del self._tasks[name]
        self._update_positions()
        _LOG.info("request %s: %s", task.snapshot.id, status.value)

    def _update_positions(self) -> None:
        running = sum(task.snapshot.status is Status.running for task in self._tasks.values())
        for place, (_, _, request_id) in enumerate(sorted(self._waiting)):
            task = self._tasks[request_id]
            if task.snapshot.position != place + running:
                self._change(task, position=place + running)

    def _work(self, engine: Engine) -> None:
        try:
            engine.load()
        except Exception as error:
            _LOG.exception("the model could not be loaded")
            self._load_error = f"the model could not be loaded: {describe_error(error)}"
            return
        finally:
            self._ready.set()
        while (task := self._next()) is not None:
            failure = self._run(engine, task)
            if failure is None:
                continue
            try:
                engine.free_memory()  # here, where no frame of the failed run is alive
            except Exception:  # a broken GPU must not leave the requests waiting for a dead worker
                _LOG.exception("request %s: memory could not be freed", task.snapshot.id)
            self.history.discard(task.snapshot.id)
            with self._changed:
                self._settle(task, *failure)

    def _next(self) -> _Task | None:
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._waiting)
            if self._closing:
                for _, _, request_id in self._waiting:
                    self._settle(self._tasks[request_id], Status.cancelled)
                self._waiting = []
                return None
            task = self._tasks[heapq.heappop(self._waiting)[2]]
            self._change(task, status=Status.running, position=0, seconds_left=self._guess(task))
            self._update_positions()
            return task

    def _run(self, engine: Engine, task: _Task) -> tuple[Status, str | None] | None:
        """Runs a request and settles it; returns how to settle one that was not done."""
        request_id = task.snapshot.id
        try:
            self._make(engine, task)
            return None
        except GenerationCancelled:
            return Status.cancelled, None
        except Exception as error:  # whatever one request does, the next must find a worker
            _LOG.error("request %s failed", request_id, exc_info=True)
            return Status.failed, short_cause(error, request_id)

    def _make(self, engine: Engine, task: _Task) -> None:
        started = time.time()
        request = task.snapshot.request
        assert request is not None

        def on_step(index: int, steps: int, seconds: float) -> None:
            if task.cancel.is_set():
                raise GenerationCancelled
            task.step_seconds.append(seconds)
            with self._changed:
                self._change(task, step=index + 1, steps=steps, seconds_left=self._guess(task, steps - index - 1))

        def on_clean_latents(index: int, latents: Any) -> None:
            if task.cancel.is_set():
                raise GenerationCancelled
            if time.monotonic() - task.last_preview < self.limits.preview_seconds:
                return
            try:
                picture = engine.preview(latents)
            except Exception:
                _LOG.warning("request %s: no preview", task.snapshot.id, exc_info=True)
                task.last_preview = float("inf")  # not again for this request
                return
            task.last_preview = time.monotonic()
            with self._changed:
                self._change(task, preview=picture)

        recorder = BlockMapRecorder(request.num_inference_steps or 1) if task.record_maps else None
        more = {} if recorder is None else {"recorder": recorder}
        result = engine.run(request, task.snapshot.recipe, on_step=on_step, on_clean_latents=on_clean_latents, **more)
        if task.cancel.is_set():
            raise GenerationCancelled
        asked = task.snapshot
        origin = {
            "id": asked.id, "owner": task.owner, "recipe": recipe_name(asked.recipe), "label": asked.label,
            "group": asked.group, "created": task.created, "queue_seconds": round(started - task.created, 3),
        }  # fmt: skip
        maps = None if recorder is None else recorder.result()
        model = display_name(engine.teacher) if asked.recipe == TEACHER and engine.teacher else self.model_name
        clip = self.history.store(task.snapshot.id, result, {"model": model, "service": origin}, maps)
        seconds = clip.sidecar["stages"]["seconds"]
        with self._changed:
            self._finish_seconds[_shape(task)] = sum(seconds.get(name, 0.0) for name in ("decode", "save"))
            self._settle(task, Status.done)

    def _guess(self, task: _Task, steps_left: int | None = None) -> float | None:
        """Seconds left by the median of this request's steps and the ending of the last one of its shape."""
        if not task.step_seconds or steps_left is None:
            return None
        return statistics.median(task.step_seconds) * steps_left + self._finish_seconds.get(_shape(task), 0.0)


def _shape(task: _Task) -> tuple[Any, ...]:
    request = task.snapshot.request
    assert request is not None
    return (request.height, request.width, request.num_frames)
