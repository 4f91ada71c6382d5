"""C++ files are compiled once, kept, and made again when anything they depend on changes; failures have a reason."""

from __future__ import annotations

import ctypes
import shutil

import pytest

from videospark.core import native
from videospark.core.native import NativeBuildError, cache_folder, find_compiler, load

SOURCE = 'extern "C" int answer() { return %d; }\n'

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in native.COMPILERS), reason="there is no C++ compiler"
)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    load.cache_clear()
    yield tmp_path
    load.cache_clear()


def write(folder, text):
    source = folder / "answer.cpp"
    source.write_text(text)
    return source


@needs_compiler
def test_a_file_is_built_once_and_again_when_it_changes(folder):
    source = write(folder, SOURCE % 41)
    library = load(source)
    assert library.answer() == 41 and isinstance(library, ctypes.CDLL)
    (built,) = cache_folder().iterdir()
    before = built.stat().st_mtime_ns
    load.cache_clear()
    assert load(source).answer() == 41 and built.stat().st_mtime_ns == before
    write(folder, SOURCE % 42)
    load.cache_clear()
    assert load(source).answer() == 42 and len(list(cache_folder().iterdir())) == 2


@needs_compiler
def test_a_broken_file_says_what_the_compiler_said_and_leaves_nothing(folder):
    with pytest.raises(NativeBuildError, match=r"answer\.cpp.*error"):
        load(write(folder, "int answer( {"))
    assert not list(cache_folder().iterdir())


def test_no_compiler_is_a_reason(folder, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NativeBuildError, match="no-such-compiler"):
        find_compiler()
    with pytest.raises(NativeBuildError, match=r"no C\+\+ compiler"):
        load(write(folder, SOURCE % 1))


@needs_compiler
def test_a_cache_that_cannot_be_written_is_a_reason(folder, monkeypatch):
    blocker = folder / "file"
    blocker.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocker))
    with pytest.raises(NativeBuildError, match="cannot be built"):
        load(write(folder, SOURCE % 1))
