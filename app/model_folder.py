"""What a model folder says about itself, read from its JSON files before anything heavy is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def locate_model(model: str | None) -> str:
    """The folder or hub id to load; None is the embedded "tiny", and embedded models have names.

    Raises:
        FileNotFoundError: it is neither a model folder nor of the form `owner/name`, or no model is embedded.
    """
    from ..tiny import EMBEDDED, checkpoint_path

    if model is None or model in EMBEDDED:
        return str(checkpoint_path(model or "tiny"))
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not (folder / "model_index.json").is_file():
            raise FileNotFoundError(f"model: got {model!r}; the folder has no model_index.json, so it is no pipeline")
        return str(folder)
    if folder.exists() or not re.fullmatch(r"[\w.-]+/[\w.-]+", model) or model.startswith("."):
        names = ", ".join(EMBEDDED)
        raise FileNotFoundError(
            f"model: got {model!r}; must be a diffusers folder, a hub id of the form owner/name, or one of {names}"
        )
    return model


def display_name(model: str) -> str:
    """Of an embedded model its name, of another folder that of the folder, of a model on the Hub its id."""
    from ..tiny import EMBEDDED, folder_of

    for name in EMBEDDED:
        if Path(model) == folder_of(name):
            return name
    return Path(model).name if Path(model).is_dir() else model


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: not JSON: {error}") from None


def read_defaults(model: str) -> dict[str, Any]:
    """The folder's `videospark_defaults.json`; empty for a hub id or a folder without one."""
    file = Path(model) / "videospark_defaults.json"
    return _read(file) if file.is_file() else {}


def stand_in(model: str) -> SimpleNamespace | None:
    """An object with a pipeline's strides (and no weights), enough for the size rule; None for a hub id."""
    vae, transformer = (Path(model) / part / "config.json" for part in ("vae", "transformer"))
    if not (vae.is_file() and transformer.is_file()):
        return None
    vae_config, transformer_config = _read(vae), _read(transformer)
    patch_size = tuple(transformer_config.get("patch_size", (1, 2, 2)))
    spatial = vae_config.get("scale_factor_spatial", 8)
    temporal = vae_config.get("scale_factor_temporal", 4)
    config = SimpleNamespace(**{**transformer_config, "patch_size": patch_size})
    return SimpleNamespace(
        vae_scale_factor_spatial=spatial,
        vae_scale_factor_temporal=temporal,
        vae=SimpleNamespace(
            config=SimpleNamespace(**{**vae_config, "scale_factor_spatial": spatial, "scale_factor_temporal": temporal})
        ),
        transformer=SimpleNamespace(config=config),
        transformer_2=None,
        config=SimpleNamespace(**_read(Path(model) / "model_index.json")),
    )
