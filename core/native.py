"""Compile a C++ file of this package with the compiler of the machine, once, and load it.

The files have plain C entry points and need no headers but the compiler's own, so that a build takes seconds. The
result lies in the user's cache folder under a hash of everything it depends on: source, flags, compiler and processor.
Without a compiler whoever asks is told why, and takes the path in PyTorch.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared")
COMPILERS = ("g++", "clang++", "c++")
BUILD_SECONDS = 120
"""A build takes a few; a compiler that hangs is given up on."""


class NativeBuildError(RuntimeError):
    """There is no compiler, or it failed; the text says which."""


@functools.cache
def load(source: Path) -> ctypes.CDLL:
    """The library made of one C++ file.

    Raises:
        NativeBuildError: it cannot be built or loaded.
    """
    compiler = find_compiler()
    name = f"{source.stem}-{_fingerprint(source, compiler)}.so"
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / name
        if not target.exists():
            _build(source, compiler, target)
        return ctypes.CDLL(str(target))
    except OSError as error:
        raise NativeBuildError(f"{source.name} cannot be built or loaded: {error}") from error


def find_compiler() -> str:
    """Path of the C++ compiler: the one that CXX names, else the first of `COMPILERS`.

    Raises:
        NativeBuildError: there is none.
    """
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else COMPILERS:
        found = shutil.which(name)
        if found:
            return found
    raise NativeBuildError(f"no C++ compiler ({wanted or ', '.join(COMPILERS)})")


def cache_folder() -> Path:
    """Where libraries are kept: "videospark/native" in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "videospark" / "native"


def _fingerprint(source: Path, compiler: str) -> str:
    version = _run([compiler, "--version"]).stdout
    parts = (*_texts(source), " ".join(FLAGS), compiler, version, platform.machine(), _processor())
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _texts(source: Path) -> list[str]:
    """The file and the files of this package that it includes."""
    text = source.read_text()
    included = re.findall(r'^#include "(.+)"$', text, flags=re.MULTILINE)
    return [text, *(part for name in included for part in _texts(source.parent / name))]


def _processor() -> str:
    """What the processor can do: a home folder may be shared by machines that differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _build(source: Path, compiler: str, target: Path) -> None:
    # Built beside it and moved: another process sees the whole file or none.
    handle, unfinished = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        run = _run([compiler, *FLAGS, str(source), "-o", unfinished])
        if run.returncode != 0:
            lines = [line for line in run.stderr.splitlines() if "error" in line] or run.stderr.splitlines()[-1:]
            raise NativeBuildError(f"{compiler} failed on {source.name}: {lines[0].strip() if lines else 'no message'}")
        os.replace(unfinished, target)
    finally:
        Path(unfinished).unlink(missing_ok=True)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=BUILD_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise NativeBuildError(f"{command[0]} did not end within {BUILD_SECONDS} s") from None
