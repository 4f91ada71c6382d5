"""What a run tells while it trains: a JSONL log, TensorBoard, loss curves as pictures, and a progress bar."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ..pipelines.video_io import write_atomically

LOG_FILE = "log.jsonl"


class RunRecords:
    """Log, TensorBoard events and pictures of one run; only the main process has one.

    Args:
        folder: of the run.
        first_step: iterations done before; later records are dropped, as the resumed run writes them again.
    """

    def __init__(self, folder: Path, first_step: int) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / LOG_FILE
        kept = [record for record in read_log(self.path) if record["step"] <= first_step]
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(json.dumps(record) + "\n" for record in kept), encoding="utf-8")
        os.replace(temporary, self.path)
        self._log = self.path.open("a", encoding="utf-8")
        from torch.utils.tensorboard import SummaryWriter  # slow to import, wanted by training alone

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + 1)
        self._start = time.monotonic()

    def write(self, step: int, values: dict[str, float]) -> None:
        """Appends one record of iteration `step`."""
        record = {"step": step, "seconds": round(time.monotonic() - self._start, 2)} | values
        self._log.write(json.dumps(record) + "\n")
        self._log.flush()
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def draw(self) -> Path | None:
        """Draws all curves of the log into `losses.png`; None where there is nothing to draw."""
        return draw_curves(self.path, self._folder / "losses.png")

    def close(self) -> None:
        """Closes the files."""
        self._log.close()
        self._writer.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The records of a log; a last line that was cut off is left out."""
    if not path.is_file():
        return []
    records = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def draw_curves(log: Path, picture: Path) -> Path | None:
    """One panel per logged value over the steps, raw and smoothed."""
    from matplotlib.figure import Figure

    records = read_log(log)
    names = list(dict.fromkeys(name for r in records for name in r if name not in ("step", "seconds")))
    if not names:
        return None
    columns = min(3, len(names))
    rows = math.ceil(len(names) / columns)
    figure = Figure(figsize=(4.5 * columns, 3 * rows), layout="constrained")
    panels = np.atleast_1d(figure.subplots(rows, columns)).ravel()
    for panel, name in zip(panels, names, strict=False):
        points = [(r["step"], r[name]) for r in records if name in r]
        steps, values = np.array([p[0] for p in points]), np.array([p[1] for p in points], dtype=float)
        panel.plot(steps, values, alpha=0.35)
        width = max(1, len(values) // 30)
        panel.plot(steps[width - 1 :], np.convolve(values, np.ones(width) / width, mode="valid"))
        panel.set(title=name, xlabel="step")
        if name.startswith("loss") and (values > 0).all():
            panel.set_yscale("log")
        panel.grid(alpha=0.3)
    for panel in panels[len(names) :]:
        panel.axis("off")
    return write_atomically(picture, lambda partial: figure.savefig(partial, dpi=100))


class Progress:
    """A bar on stderr where that is a terminal, else nothing."""

    def __init__(self, total: int, done: int, *, enabled: bool) -> None:
        self._bar: Any = None
        if enabled and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("", total=total, completed=done)
            self._bar.start()

    def advance(self, text: str) -> None:
        """One iteration more, with what is to be said of it."""
        if self._bar is not None:
            self._bar.update(self._task, advance=1, description=text)

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()
