"""The source tree, the list of packages, the built wheel and the README say the same."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROJECT = ROOT / "pyproject.toml"
pytestmark = pytest.mark.skipif(not PROJECT.is_file(), reason="runs in a source tree only")
NO_PACKAGE = {"src", "tests", "build", "dist", "docs", "outputs"}


def settings() -> dict:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(PROJECT.read_text(encoding="utf-8"))


def folders() -> dict[str, str]:
    """Dotted package name to its folder, from the files."""
    found = {"videospark": "src/videospark"}
    for top in sorted(p for p in ROOT.iterdir() if p.is_dir() and p.name not in NO_PACKAGE and p.name[0] != "."):
        for init in sorted(top.rglob("__init__.py")):
            folder = init.parent.relative_to(ROOT)
            found["videospark." + ".".join(folder.parts)] = folder.as_posix()
    return found


def test_the_package_list_equals_the_folders():
    tool = settings()["tool"]["setuptools"]
    assert set(tool["packages"]) == set(folders())
    assert tool["package-dir"] == folders()


def test_the_links_for_type_checkers_point_at_every_package():
    links = {p.name: p for p in (ROOT / "src/videospark").iterdir() if p.is_symlink()}
    assert set(links) == {name.split(".")[1] for name in folders() if "." in name}
    for name, link in links.items():
        assert link.readlink() == Path("../..") / name


def test_the_make_targets_of_the_texts_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    for text in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"\bmake ([a-z][a-z-]*)`?", _code_of(ROOT / text)))
        assert named, text
        assert named <= targets, f"{text}: {sorted(named - targets)}"
    documented = set(re.findall(r"^([a-z][a-z-]*):.*## \S", makefile, re.MULTILINE))
    assert documented == targets


def test_the_commands_of_the_readme_exist():
    import typer

    from videospark.app.cli import app

    known = set(typer.main.get_command(app).commands)
    named = set(re.findall(r"^(?:\$ )?videospark ([a-z]+)", _code_of(ROOT / "README.md"), re.MULTILINE))
    assert named
    assert named <= known


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_the_checkpoint(tmp_path):
    left_out = (".git", ".venv", "*.egg-info", "build", "dist", "outputs", "__pycache__", ".*_cache")
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*left_out), symlinks=True)
    command = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(tmp_path / "dist"),
    ]
    done = subprocess.run([*command, str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    expected = {"videospark/py.typed"}
    for package, folder in folders().items():
        target = package.replace(".", "/")
        expected |= {f"{target}/{p.name}" for p in (ROOT / folder).glob("*.py")}
    checkpoint = ROOT / "tiny/checkpoint"
    expected |= {f"videospark/tiny/{p.relative_to(ROOT / 'tiny')}" for p in checkpoint.rglob("*") if p.is_file()}
    assert expected <= names, sorted(expected - names)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert all(name.startswith(("videospark/", "videospark-")) for name in names)


def _code_of(path: Path) -> str:
    """The fenced and the inline code of a Markdown file."""
    text = path.read_text(encoding="utf-8")
    fenced = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    rest = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return "\n".join([*fenced, *re.findall(r"`([^`\n]+)`", rest)])
