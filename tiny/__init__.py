"""The embedded default: a small Wan, really trained, and the world that it was trained on."""

from pathlib import Path

if not __name__.startswith("videospark."):
    raise ImportError("import this package as videospark.tiny: a second copy under its bare name hides bugs")


def checkpoint_path() -> Path:
    """Folder of the embedded model, in diffusers layout.

    Raises:
        FileNotFoundError: the package was installed without its checkpoint.
    """
    path = Path(__file__).parent / "checkpoint"
    if not (path / "model_index.json").is_file():
        raise FileNotFoundError(f"{path}: the embedded checkpoint is missing; `videospark tiny train` makes it anew")
    return path
