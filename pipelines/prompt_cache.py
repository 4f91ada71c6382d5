"""Prompt embeddings on disk, so that a prompt that was encoded once needs no text encoder again.

An entry is one safetensors file named by its key. It holds the rows [tokens, text_dim] without the zeros that fill a
prompt up to its maximum length, and a checksum: an entry that is cut short, changed or foreign is made again.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ..core.config import require
from .video_io import write_atomically

FORMAT = "videospark prompt embedding 1"
SAMPLES = 257
"""Numbers of each tensor that `fingerprint` looks at."""
_NAME = "prompt_embeds"
_VOLATILE = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype")


class PromptCache:
    """Embeddings in a folder, which several processes may share.

    Attributes:
        folder: where the entries lie; made where it does not exist.
        hits: entries that were found.
        misses: prompts that had none.
        remade: broken entries that were replaced.

    Raises:
        ConfigError: no folder, or one that cannot be written to.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        require(not self.folder.exists() or self.folder.is_dir(), "prompt_cache", str(folder), "a folder")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            require(False, "prompt_cache", str(folder), f"a folder that can be made ({error})")
        require(os.access(self.folder, os.W_OK), "prompt_cache", str(folder), "a folder that can be written to")
        self.hits = self.misses = self.remade = 0

    def path(self, key: str) -> Path:
        """File of an entry."""
        return self.folder / f"{key}.safetensors"

    def get(self, key: str, length: int, dtype: torch.dtype) -> torch.Tensor | None:
        """The embeddings [1, length, text_dim] on the CPU, or None; a broken entry warns and counts as none."""
        path = self.path(key)
        if not path.is_file():
            self.misses += 1
            return None
        try:
            rows = _read(path, key, length, dtype)
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            self.remade += 1
            warnings.warn(f"prompt_cache: {path.name} is broken and made again ({error})", stacklevel=2)
            return None
        self.hits += 1
        return torch.cat([rows, rows.new_zeros(length - rows.shape[0], rows.shape[1])])[None]

    def put(self, key: str, embeds: torch.Tensor) -> None:
        """Write embeddings [1, length, text_dim], complete or not at all; a full disk warns and loses no video."""
        rows = embeds[0].detach().cpu()
        used = rows.abs().amax(dim=1).nonzero()
        rows = rows[: int(used.max()) + 1 if len(used) else 1].contiguous().clone()
        metadata = {"format": FORMAT, "key": key, "sha256": _checksum(rows)}
        try:
            write_atomically(self.path(key), lambda partial: save_file({_NAME: rows}, partial, metadata=metadata))
        except (OSError, SafetensorError) as error:
            warnings.warn(f"prompt_cache: {self.path(key).name} could not be written ({error})", stacklevel=2)

    def report(self) -> dict[str, Any]:
        """Plain data: folder, hits, misses and remade entries, and the bytes of all entries."""
        sizes = [path.stat().st_size for path in self.folder.glob("*.safetensors")]
        return {
            "folder": str(self.folder), "hits": self.hits, "misses": self.misses, "remade": self.remade,
            "entries": len(sizes), "bytes_on_disk": sum(sizes),
        }  # fmt: skip


def prompt_key(identity: str, tokenizer: Any, text: str, length: int, dtype: torch.dtype) -> str:
    """Name of an entry: a hash of the text encoder, the text with its tokens, the maximum length and the dtype."""
    tokens = list(tokenizer(text, add_special_tokens=True)["input_ids"])
    parts = [FORMAT, identity, text, tokens, length, str(dtype)]
    return hashlib.sha256(json.dumps(parts, ensure_ascii=False).encode()).hexdigest()


def fingerprint(module: nn.Module) -> str:
    """What tells one text encoder from another: its class, its settings, and of each tensor name, shape, dtype and
    some evenly spread numbers. A change of single numbers can escape it; a training or another precision cannot.
    """
    settings = getattr(module, "config", None)
    data = settings.to_dict() if settings is not None else {}
    plain = {key: value for key, value in data.items() if key not in _VOLATILE}
    digest = hashlib.sha256(f"{type(module).__name__} {json.dumps(plain, sort_keys=True, default=str)}".encode())
    for name, tensor in _tensors(module):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.detach().reshape(-1)
        digest.update(_bytes(flat[:: max(flat.numel() // SAMPLES, 1)][:SAMPLES]))
    return digest.hexdigest()


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from sorted([*module.named_parameters(), *module.named_buffers()], key=lambda item: item[0])


def _read(path: Path, key: str, length: int, dtype: torch.dtype) -> torch.Tensor:
    with safe_open(path, "pt") as file:
        metadata = file.metadata() or {}
        rows: torch.Tensor = file.get_tensor(_NAME)
    if metadata.get("format") != FORMAT or metadata.get("key") != key:
        raise ValueError("it belongs to another prompt or program")
    if rows.ndim != 2 or not 1 <= rows.shape[0] <= length or rows.dtype != dtype:
        raise ValueError(f"its embeddings are {tuple(rows.shape)}, {rows.dtype}")
    if metadata.get("sha256") != _checksum(rows):
        raise ValueError("its checksum is wrong")
    return rows


def _checksum(rows: torch.Tensor) -> str:
    return hashlib.sha256(_bytes(rows)).hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    data: bytes = tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes()
    return data
