"""The embedded default: a small Wan, really trained, its student, and the world that they were trained on."""

from pathlib import Path

if not __name__.startswith("videospark."):
    raise ImportError("import this package as videospark.tiny: a second copy under its bare name hides bugs")

EMBEDDED = {"tiny": "checkpoint", "tiny-3step": "students/3step"}
"""Folders of the embedded models: the dense teacher, and its student of three steps without guidance."""


def folder_of(name: str) -> Path:
    """Where an embedded model lies, if it is there."""
    return Path(__file__).parent / EMBEDDED[name]


def checkpoint_path(name: str = "tiny") -> Path:
    """Folder of an embedded model, in diffusers layout.

    Raises:
        ValueError: there is none of that name.
        FileNotFoundError: the package was installed without it.
    """
    if name not in EMBEDDED:
        raise ValueError(f"name: got {name!r}; must be one of {', '.join(EMBEDDED)}")
    path = folder_of(name)
    if not (path / "model_index.json").is_file():
        raise FileNotFoundError(f"{path}: the embedded model {name!r} is missing; `videospark tiny train` makes `tiny`")
    return path
