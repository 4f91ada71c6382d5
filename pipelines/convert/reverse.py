"""From a folder of the diffusers layout back to a file with the names of Wan or of a published student."""

from __future__ import annotations

from pathlib import Path

import torch

from ...core.config import ConfigError, require
from ...quantization.loading import QUANTIZED_FILE
from ..loading import BRANCH_FILE, DEFAULTS_FILE, RECIPE_FILE
from .keys import BRANCH_MARK, tensor_to_native
from .mapping import some
from .reader import TensorFiles, find_files
from .sources import EXPERTS
from .students import DEFAULTS_KEY, FORMATS, RECIPE_KEY
from .writer import Planned, check_target, made_parents, write_safetensors

_FLAT_PATCH = ("spark", "turbodiffusion")


def revert_checkpoint(folder: str | Path, to: str | Path, *, format: str = "auto") -> list[Path]:
    """Write the transformers of a folder under the names of Wan, tensor by tensor.

    Args:
        folder: of a pipeline, or of one transformer.
        to: a .safetensors file; of a pair of experts, NAME-High.safetensors and NAME-Low.safetensors are written.
        format: one of `FORMATS`; "auto" goes by the branch. "spark" and "turbodiffusion" have a flattened patch
            embedding and need their branch, "fastvideo" keeps the names of diffusers.

    Recipe and defaults of the folder go into the header of the file, where `convert_checkpoint` finds them again.

    Returns:
        The files.

    Raises:
        ConfigError: a tensor without a name there, a branch that is missing or has no place, or a file that exists.
    """
    folder, to = Path(folder), Path(to)
    require(format in FORMATS, "format", format, f"one of {', '.join(FORMATS)}")
    rule = "a file ending in .safetensors: no pickles are written"
    require(to.suffix == ".safetensors", "to", str(to), rule)
    parts = [folder / name for name in EXPERTS if (folder / name).is_dir()] or [folder]
    pair = len(parts) == 2
    targets = [to.with_stem(f"{to.stem}-{half}") for half in ("High", "Low")] if pair else [to]
    for target in targets:
        check_target(target)
    plans = [_plan(part, format) for part in parts]
    carried = _carried(folder)
    written: list[Path] = []
    with made_parents(to):
        try:
            for target, tensors in zip(targets, plans, strict=True):
                write_safetensors(target, tensors, carried)
                written.append(target)
        except BaseException:
            for target in written:  # half a pair is worse than none
                target.unlink(missing_ok=True)
            raise
    return targets


def _carried(folder: Path) -> dict[str, str]:
    """Recipe and defaults for the header, so that the file converts again without being told what it is."""
    files = {RECIPE_KEY: folder / RECIPE_FILE, DEFAULTS_KEY: folder / DEFAULTS_FILE}
    return {key: file.read_text(encoding="utf-8") for key, file in files.items() if file.is_file()}


def _plan(folder: Path, format: str) -> list[Planned]:
    narrow = (folder / QUANTIZED_FILE).is_file()
    require(not narrow, "folder", str(folder), "one with 16-bit weights: those that were stored in eight bits are gone")
    branch_file = folder / BRANCH_FILE
    paths = [path for path in find_files(folder) if path.name != BRANCH_FILE]
    files = TensorFiles(paths + ([branch_file] if branch_file.is_file() else []))
    kind = _kind(format, list(files.entries), folder)
    planned, nameless = [], []
    for name, entry in files.entries.items():
        native = name if kind == "fastvideo" else tensor_to_native(name)
        if native is None:
            nameless.append(name)
            continue
        shape = entry.shape
        if name == "patch_embedding.weight" and kind in _FLAT_PATCH:
            shape = (shape[0], torch.Size(shape[1:]).numel())
        planned.append(Planned(native, shape, entry.dtype, _maker(files, name, shape)))
    if nameless:
        raise ConfigError(f"folder: got {len(nameless)} tensors without a name in Wan's files ({some(nameless)})")
    return planned


def _maker(files: TensorFiles, name: str, shape: tuple[int, ...]):
    def make() -> torch.Tensor:
        return files.read(name).reshape(shape)

    return make


def _kind(format: str, names: list[str], folder: Path) -> str:
    leaves = {name.split(BRANCH_MARK)[1] for name in names if BRANCH_MARK in name}
    has = "spark" if "gate_bias" in leaves else "turbodiffusion" if leaves else None
    if format == "auto":
        return has or "wan"
    if format in _FLAT_PATCH or has is not None:
        rule = f"{has!r}, whose branch it has" if has else "'wan': it has no linear branch"
        require(format == has, "format", format, f"that of {folder.name}: {rule}")
    return format
