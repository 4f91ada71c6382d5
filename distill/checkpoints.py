"""Checkpoints that are complete or not there at all.

A checkpoint is written into a folder with a temporary name; its last file is the marker `COMPLETE.json` with size and
SHA-256 of every other one. Files and folder are flushed to the disk, then the folder gets its name, `step-00000100`, in
one rename. Whoever reads checks the marker, so a folder that was damaged later is passed over as well.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path

MARKER = "COMPLETE.json"
_NAME = re.compile(r"step-(\d{8,})")
_TEMPORARY = re.compile(r"\.step-\d{8,}\.[0-9a-f]{32}\.partial")


def _digest(path: Path) -> str:
    total = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            total.update(block)
    return total.hexdigest()


def _flush(path: Path) -> None:
    """Have the disk hold what was written to a file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_checkpoint(root: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Writes the checkpoint of `step` below `root` and returns its folder.

    Args:
        root: folder of all checkpoints; made where missing.
        step: iterations done.
        write: puts files into the folder it is given (no sub-folders).

    A good checkpoint of the same step stays as it is, as the run repeats itself bit for bit; a damaged one is replaced.
    """
    root.mkdir(parents=True, exist_ok=True)
    target = root / f"step-{step:08d}"
    if target.exists():
        if problem(target) is None:
            return target
        shutil.rmtree(target)
    partial = root / f".{target.name}.{uuid.uuid4().hex}.partial"
    partial.mkdir()
    try:
        write(partial)
        files = sorted(p for p in partial.iterdir())
        content = {p.name: {"bytes": p.stat().st_size, "sha256": _digest(p)} for p in files}
        marker = partial / MARKER
        marker.write_text(json.dumps({"step": step, "files": content}, indent=2) + "\n", encoding="utf-8")
        for path in (*files, marker, partial):
            _flush(path)
        os.rename(partial, target)
        _flush(root)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def problem(folder: Path) -> str | None:
    """Why the checkpoint in `folder` cannot be used; None for a good one."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        files = dict(marker["files"])
        if f"step-{int(marker['step']):08d}" != folder.name:
            return f"it is of step {marker['step']}"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its {MARKER} cannot be read ({type(error).__name__})"
    for name, facts in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != facts["bytes"]:
            return f"{name} has {path.stat().st_size} bytes instead of {facts['bytes']}"
        if _digest(path) != facts["sha256"]:
            return f"{name} has changed since it was written"
    return None


def step_of(folder: Path) -> int:
    """Iterations done at the checkpoint in `folder`."""
    found = _NAME.fullmatch(folder.name)
    if found is None:
        raise ValueError(f"checkpoint: got {folder.name!r}; must be step-NNNNNNNN")
    return int(found[1])


def list_checkpoints(root: Path) -> list[Path]:
    """Every folder with a checkpoint's name, oldest first, good or not."""
    if not root.is_dir():
        return []
    return sorted((p for p in root.iterdir() if p.is_dir() and _NAME.fullmatch(p.name)), key=step_of)


def newest_checkpoint(root: Path) -> Path | None:
    """The newest good checkpoint; None where there is none. Damaged ones on the way are named in a warning."""
    for folder in reversed(list_checkpoints(root)):
        fault = problem(folder)
        if fault is None:
            return folder
        warnings.warn(f"checkpoint {folder.name} is passed over: {fault}", stacklevel=2)
    return None


def prune_checkpoints(root: Path, keep: int) -> list[Path]:
    """Deletes what is older than the `keep` newest good checkpoints, and what an interrupted write left behind.

    Nothing complete is deleted unless `keep` newer ones were just read and found good.

    Returns:
        The folders that were deleted.
    """
    if keep < 1:
        raise ValueError(f"keep: got {keep}; must be at least 1")
    good = 0
    deleted = []
    for folder in reversed(list_checkpoints(root)):
        if good >= keep:
            # Renamed first, so that a deletion cut short leaves nothing with a checkpoint's name.
            doomed = root / f".{folder.name}.{uuid.uuid4().hex}.partial"
            os.rename(folder, doomed)
            shutil.rmtree(doomed)
            deleted.append(folder)
        elif problem(folder) is None:
            good += 1
    remove_leftovers(root)
    return deleted


def remove_leftovers(root: Path) -> None:
    """Deletes temporary folders of writes that were cut short; only the one process that writes may call this."""
    if root.is_dir():
        for path in root.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                shutil.rmtree(path, ignore_errors=True)
