"""Tensors of big files, one at a time: safetensors, alone or sharded, and PyTorch's zip files.

Files are memory-mapped. Pages that were read count as memory of the process until the file is unmapped, so it is opened
anew now and then.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...core.config import ConfigError, require

REOPEN_BYTES = 128 * 2**20
"""Bytes read between two openings of a file."""

SAFETENSORS, PICKLED = (".safetensors",), (".pth", ".pt", ".ckpt", ".bin")
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
DTYPE_CODES = {dtype: code for code, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """A tensor in a file: where it lies, its name there, shape and dtype."""

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        count = self.dtype.itemsize
        for side in self.shape:
            count *= side
        return count


class TensorFiles:
    """All tensors of some files, by name.

    Args:
        paths: files; a name may be in one of them only.
        field: what errors call them.

    Attributes:
        entries: by name.
        metadata: texts in the headers of safetensors files.

    Raises:
        ConfigError: another kind of file, a broken one, or a name that two files have.
        FileNotFoundError: no such file.
    """

    def __init__(self, paths: list[Path], field: str = "source") -> None:
        self._field = field
        self.entries: dict[str, Entry] = {}
        self.metadata: dict[str, str] = {}
        self._open: dict[Path, Any] = {}
        self._bytes_read = 0
        for path in paths:
            if not path.is_file():
                raise FileNotFoundError(f"{field}: got {str(path)!r}; no such file")
            for entry in _entries(path, field):
                twice = self.entries.get(entry.name)
                require(twice is None, f"{path.name}.{entry.name}", "a second one", "in one of the files only")
                self.entries[entry.name] = entry
            self.metadata |= _metadata(path, field)
        self.close()

    def read(self, name: str) -> torch.Tensor:
        """A copy of one tensor, on the CPU."""
        entry = self.entries[name]
        if self._bytes_read + entry.nbytes > REOPEN_BYTES:
            self.close()
        self._bytes_read += entry.nbytes
        if entry.path not in self._open:
            self._open[entry.path] = _open(entry.path, self._field)
        opened = self._open[entry.path]
        tensor: torch.Tensor = opened[name] if isinstance(opened, dict) else opened.get_tensor(name)
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def close(self) -> None:
        """Unmap the files; reading goes on afterwards."""
        self._open.clear()
        self._bytes_read = 0


def find_files(source: Path) -> list[Path]:
    """The weight files of a source: itself, or those of a folder, as its index lists them where it has one.

    Raises:
        ConfigError: no weights there, files of the index that are missing, or more than one choice.
        FileNotFoundError: no such file or folder.
    """
    if source.is_file():
        known = source.suffix in SAFETENSORS + PICKLED
        require(known, "source", str(source), f"a file ending in {', '.join(SAFETENSORS + PICKLED)}, or a folder")
        return [source]
    if not source.is_dir():
        raise FileNotFoundError(f"source: got {str(source)!r}; no such file or folder")
    indices = sorted(source.glob("*.safetensors.index.json"))
    require(len(indices) < 2, "source", [p.name for p in indices], "a folder with one index; name the file otherwise")
    if indices:
        listed = sorted(set(json.loads(indices[0].read_text(encoding="utf-8"))["weight_map"].values()))
        absent = [name for name in listed if not (source / name).is_file()]
        require(
            not absent, "source", absent, f"complete: {len(absent)} of the {len(listed)} files of the index are missing"
        )
        return [source / name for name in listed]
    files = sorted(source.glob("*.safetensors"))
    if not files:
        others = sorted(p.name for suffix in PICKLED for p in source.glob(f"*{suffix}"))
        hint = f"; name one of these files: {', '.join(others)}" if others else ""
        raise ConfigError(f"source: got {str(source)!r}, which holds no .safetensors file; must hold the weights{hint}")
    return files


def _metadata(path: Path, field: str) -> dict[str, str]:
    return {} if path.suffix not in SAFETENSORS else dict(_open(path, field).metadata() or {})


def _entries(path: Path, field: str) -> Iterator[Entry]:
    opened = _open(path, field)
    if isinstance(opened, dict):
        for name, tensor in opened.items():
            yield Entry(path, name, tuple(tensor.shape), tensor.dtype)
        return
    for name in opened.keys():  # noqa: SIM118 - no mapping
        part = opened.get_slice(name)
        code = part.get_dtype()
        require(code in _DTYPES, f"{path.name}.{name}", code, f"one of the dtypes {', '.join(_DTYPES)}")
        yield Entry(path, name, tuple(part.get_shape()), _DTYPES[code])


def _open(path: Path, field: str) -> Any:
    """A safetensors handle, or for PyTorch's files a dictionary of mapped tensors."""
    if path.suffix in SAFETENSORS:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ConfigError(f"{field}: got {str(path)!r}, which is no complete safetensors file ({error})") from error
    try:
        data = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        rule = "a file of torch.save in its zip form, of tensors only"
        raise ConfigError(f"{field}: got {str(path)!r}; must be {rule} ({reason})") from error
    return dict(_flat(data, path, field))


def _flat(data: Any, path: Path, field: str, prefix: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors of nested dictionaries under dotted names; numbers and texts beside them are passed over."""
    require(isinstance(data, Mapping), field, f"{path.name} holding a {type(data).__name__}", "a table of tensors")
    for name, value in data.items():
        if isinstance(value, torch.Tensor):
            yield f"{prefix}{name}", value
        elif isinstance(value, Mapping):
            yield from _flat(value, path, field, f"{prefix}{name}.")
