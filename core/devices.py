"""Device choice and description. Everything is asked when called, nothing at import."""

from __future__ import annotations

import platform
import re
from typing import Any

import torch

from .config import ConfigError

KNOWN_TYPES = ("cpu", "cuda", "mps")


def pick_device(name: str | None = None) -> torch.device:
    """The device called `name`, or the best one that is present: CUDA, then MPS, then CPU.

    A device that was asked for by name and is absent is an error: falling back to the CPU would hide it.

    Raises:
        ConfigError: an unknown name, or a device that this machine or this PyTorch build lacks.
    """
    if name is None:
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    rule = f"one of {', '.join(KNOWN_TYPES)}, with an optional index as in cuda:0"
    match = re.fullmatch(r"([a-z]+)(?::(\d+))?", name)
    if match is None or match[1] not in KNOWN_TYPES:
        raise ConfigError(f"device: got {name!r}; must be {rule}")
    # PyTorch keeps the index in eight bits and lets a large one wrap round, so it is checked before it gets there.
    index = int(match[2] or 0)
    if match[1] == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    else:
        count = 1 if match[1] == "cpu" or torch.backends.mps.is_available() else 0
    if index >= count:
        raise ConfigError(
            f"device: got {name!r}; must be a device that is present: "
            f"PyTorch {torch.__version__} sees {count} of type {match[1]}"
        )
    return torch.device(name)


def default_dtype(device: torch.device) -> torch.dtype:
    """bfloat16 on CUDA devices that compute it natively (sm_80 and later), else float32.

    float16 is never chosen: Wan's activations overflow its range.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return torch.bfloat16
    return torch.float32


def describe_device(device: torch.device) -> dict[str, Any]:
    """JSON-ready facts about a device, for reports: type, name, torch; on CUDA also capability and memory in GiB."""
    facts: dict[str, Any] = {"type": device.type, "torch": str(torch.__version__)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["name"] = properties.name
        facts["capability"] = f"{properties.major}.{properties.minor}"
        facts["memory_gib"] = round(properties.total_memory / 2**30, 2)
        facts["cuda"] = torch.version.cuda
    else:
        facts["name"] = platform.processor() or platform.machine()
        facts["num_threads"] = torch.get_num_threads()
    return facts
