"""The embedded default: a small Wan, really trained, its student, and the world that they were trained on."""

import hashlib
import os
import shutil
import uuid
from pathlib import Path

if not __name__.startswith("videospark."):
    raise ImportError("import this package as videospark.tiny: a second copy under its bare name hides bugs")

EMBEDDED = {"tiny": "checkpoint", "tiny-3step": "students/3step"}
"""Folders of the embedded models: the dense teacher, and its student of three steps without guidance."""


def folder_of(name: str) -> Path:
    """Where an embedded model lies, if it is there: a student in the user's cache folder, once it was put together."""
    own = Path(__file__).parent / EMBEDDED[name]
    if name == "tiny":
        return own
    from ..core.native import cache_folder

    digest = hashlib.sha256()
    for folder in (own, Path(__file__).parent / EMBEDDED["tiny"]):
        for file in sorted(path for path in folder.rglob("*") if path.is_file()):
            digest.update(file.read_bytes())
    return cache_folder().parent / "models" / f"{name}-{digest.hexdigest()[:16]}"


def _put_together(own: Path, target: Path) -> None:
    """A student brings transformer, recipe and defaults; all else is its teacher's. Complete or not there at all."""
    partial = target.with_name(f".{uuid.uuid4().hex}.partial")
    try:
        shutil.copytree(Path(__file__).parent / EMBEDDED["tiny"], partial, ignore=shutil.ignore_patterns("transformer"))
        shutil.copytree(own, partial, dirs_exist_ok=True)
        try:
            os.replace(partial, target)
        except OSError:
            if not target.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def checkpoint_path(name: str = "tiny") -> Path:
    """Folder of an embedded model, in diffusers layout.

    Raises:
        ValueError: there is none of that name.
        FileNotFoundError: the package was installed without it.
    """
    if name not in EMBEDDED:
        raise ValueError(f"name: got {name!r}; must be one of {', '.join(EMBEDDED)}")
    path, own = folder_of(name), Path(__file__).parent / EMBEDDED[name]
    if not path.exists() and (own / "transformer" / "config.json").is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        _put_together(own, path)
    if not (path / "model_index.json").is_file():
        raise FileNotFoundError(f"{path}: the embedded model {name!r} is missing; `videospark tiny train` makes `tiny`")
    return path
