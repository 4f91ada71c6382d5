"""What has to be settled before PyTorch is imported: where compiled code is kept, and how the allocator grows.

Compiled blocks and tuned Triton kernels are kept in one folder from process to process: PyTorch's own place is the
folder for temporary files, so that a reboot, or another container, pays for them again. Expandable segments keep a card
that is nearly full from losing memory between allocations. Whatever the user has set stays.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import MutableMapping
from pathlib import Path

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""The variable since PyTorch 2.9, and the older one, which works as well."""
EXPANDABLE = "expandable_segments:True"


def cache_folder(environment: MutableMapping[str, str]) -> Path:
    """Where compiled code is kept: below the user's cache folder."""
    home = environment.get("XDG_CACHE_HOME") or str(Path("~").expanduser() / ".cache")
    return Path(home) / "videospark" / "compiled"


def prepare_process(
    environment: MutableMapping[str, str] | None = None, platform: str = sys.platform
) -> dict[str, str]:
    """Settle the variables that are not set, for this process and those it starts; returns what was set.

    Args:
        environment: by default that of this process.
        platform: as `sys.platform`; expandable segments are for Linux.
    """
    environment = os.environ if environment is None else environment
    folder = cache_folder(environment)
    wanted = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        wanted = {}  # nowhere to keep it: PyTorch's own place serves for this process
    if platform == "linux" and not any(name in environment for name in ALLOCATOR):
        wanted[ALLOCATOR[0]] = EXPANDABLE
    made = {name: value for name, value in wanted.items() if name not in environment}
    environment.update(made)
    return made


_REMARKS = (
    ("transformers.utils.import_utils", "requires torchvision"),
    ("torchao", "Failed to load"),
    ("torch.utils._pytree", "is now natively supported by torch.compile"),
    ("diffusers.quantizers.torchao.torchao_quantizer", "Unable to import `torchao` Tensor objects"),
)
"""Loggers of libraries, and words of what they say at every start without having been asked."""


def quiet_remarks() -> None:
    """Drop what libraries say at every start about parts that nobody here has asked for.

    transformers: that PIL prepares pictures where torchvision is absent. diffusers imports torchao where it is
    installed: that its kernels for other machines do not load. `videospark doctor` lists both libraries, and an engine
    is chosen by a product that it has computed.
    """
    for name, words in _REMARKS:
        logging.getLogger(name).addFilter(_Without(words))


class _Without(logging.Filter):
    """Lets pass what does not say some words."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self._words = words

    def filter(self, record: logging.LogRecord) -> bool:
        return self._words not in record.getMessage()
