"""The examples of the three guides and of `examples/`, run as they stand, on a small untrained model.

Fenced blocks are found by their language and the words after it: `file=NAME` is written into the working folder,
`continues` runs with what the block before it left, `needs=server` while the page is served, `needs=ray` with Ray.
What is replaced is where the model is, on which device, and how many steps it takes: what would take hours.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from videospark.app.cli import app

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
GUIDES = ("batch", "page", "diffusers")


def blocks(guide):
    """Language, words and text of the fenced blocks of a guide that name a language."""
    text = (ROOT / "docs" / f"{guide}.md").read_text(encoding="utf-8")
    return [(found[1], found[2].split(), found[3]) for found in BLOCK.finditer(text)]


@pytest.fixture
def small(model_folder, tmp_path, monkeypatch):
    """A working folder in which the embedded model is the small one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("videospark.tiny.checkpoint_path", lambda name="tiny": model_folder)
    return tmp_path


def run_commands(text, *more):
    """Runs the lines; returns what they printed."""
    printed = ""
    for line in text.strip().splitlines():
        program, *arguments = shlex.split(line)
        assert program == "videospark"
        arguments = [part.replace("file://", f"file://{Path.cwd()}/") for part in arguments]
        result = CliRunner().invoke(app, [*arguments, *more])
        assert result.exit_code == 0, f"{line}\n{result.output}\n{result.exception!r}"
        printed += result.output
    return printed


def made_small(text, model_folder):
    text = text.replace("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", str(model_folder)).replace('"cuda"', '"cpu"')
    text = text.replace("torch.bfloat16", "torch.float32")
    size = "height=64, width=64, num_frames=5"
    text = text.replace("height=480, width=832, num_frames=81)", f"{size}, num_inference_steps=2)")
    text = text.replace("height=480, width=832, num_frames=81", size)
    return text.replace("num_inference_steps=20", "num_inference_steps=2")


def test_every_block_is_run_somewhere():
    """A block that no test below understands would be an example that nobody runs."""
    known = {"sh", "python", "jsonl", "csv", "toml", "text"}
    for guide in GUIDES:
        for language, words, text in blocks(guide):
            assert language in known, f"{guide}: {language}"
            assert language in ("sh", "python") or any(word.startswith("file=") for word in words), text
            assert all(word.startswith(("file=", "needs=")) or word == "continues" for word in words), words


def write_files(guide):
    for _, words, text in blocks(guide):
        for word in words:
            if word.startswith("file="):
                Path(word.removeprefix("file=")).write_text(text, encoding="utf-8")


def test_the_batch_guide(small):
    write_files("batch")
    for language, words, text in blocks("batch"):
        if language == "sh" and not words:
            run_commands(text)
    assert len(list(Path("outputs/night/clips").glob("circle-seed*.mp4"))) == 3
    assert len(list(Path("outputs/bucket/night/clips").glob("*.mp4"))) == 3


@pytest.mark.slow
def test_the_batch_guide_on_ray(small):
    ray = pytest.importorskip("ray")
    write_files("batch")
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        for language, words, text in blocks("batch"):
            if language == "sh" and "needs=ray" in words:
                run_commands(text)
    finally:
        ray.shutdown()
    assert len(list(Path("outputs/cluster/clips").glob("*.mp4"))) == 3


def test_the_page_guide(small, monkeypatch):
    pytest.importorskip("gradio")
    from videospark.app.commands_serve import Server

    write_files("page")
    programs = [text for language, words, text in blocks("page") if "needs=server" in words]
    visited = []

    def visit(server):
        """In place of waiting for an interrupt."""
        address = server.address.rstrip("/")
        with urllib.request.urlopen(address, timeout=30) as answer:
            visited.append(answer.status)
        if len(visited) == 1:
            for program in programs:
                exec(compile(program.replace("http://127.0.0.1:7860", address), "page.md", "exec"), {})

    start = Server.start

    def start_and_note(self, *arguments, **options):
        self.address = start(self, *arguments, **options).replace("0.0.0.0", "127.0.0.1")
        return self.address

    monkeypatch.setattr(Server, "start", start_and_note)
    monkeypatch.setattr(Server, "wait", visit)
    printed = ""
    for language, _, text in blocks("page"):
        if language == "sh":
            printed = printed + run_commands(text, "--port", "0", "--host", "127.0.0.1")
    assert len(visited) == 2 and ".mp4" in printed and "sparse-50" in printed


def test_the_diffusers_guide(small, model_folder):
    write_files("diffusers")
    names = {}
    for language, words, text in blocks("diffusers"):
        if language == "sh":
            run_commands(text)
        elif language == "python":
            names = names if "continues" in words else {}
            exec(compile(made_small(text, model_folder), "diffusers.md", "exec"), names)
    assert names["result"].frames.shape == (5, 64, 64, 3)
    import videospark

    assert videospark.current_report(names["again"]).recipe["name"] == "mine"


def test_the_example(small, monkeypatch, capsys):
    example = ROOT / "examples" / "diffusers_import.py"
    monkeypatch.setattr(sys, "argv", [str(example)])
    names = runpy.run_path(str(example), run_name="__main__")
    assert names["frames"].shape == (17, 64, 64, 3) and Path("accelerated.mp4").stat().st_size > 0
    assert "sparse-50" in capsys.readouterr().out
    import videospark

    assert videospark.current_report(names["pipe"]) is None
