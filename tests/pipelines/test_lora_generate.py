"""`videospark generate --lora`: the clip that the library makes, a report, and a sidecar that repeats it."""

import json
import shutil

import imageio.v3 as imageio
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from videospark.app.cli import app
from videospark.pipelines.generation import GenerationRequest, generate
from videospark.pipelines.loading import load
from videospark.pipelines.lora import describe_loras, load_lora, unload_lora

from .conftest import DEFAULTS

runner = CliRunner()


@pytest.fixture(scope="module")
def folder(_shared_pipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    _shared_pipe.save_pretrained(folder)
    (folder / "videospark_defaults.json").write_text(json.dumps(DEFAULTS))
    return folder


def write_lora(path, scale=0.3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for block in range(6):
        for layer, size in (("self_attn.v", 192), ("ffn.0", 512)):
            stem = f"diffusion_model.blocks.{block}.{layer}"
            state[f"{stem}.lora_down.weight"] = torch.randn(4, 192, generator=generator) * scale
            state[f"{stem}.lora_up.weight"] = torch.randn(size, 4, generator=generator) * scale
    save_file(state, path)
    return path


def run(*arguments):
    return runner.invoke(app, ["generate", "--device", "cpu", "--json", *(str(a) for a in arguments)])


def clip(result):
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    return imageio.imread(report["video"]), report


def test_the_clip_of_the_library_with_report_and_sidecar(folder, tmp_path):
    first, second = write_lora(tmp_path / "a.safetensors"), write_lora(tmp_path / "b.safetensors", seed=1)
    common = ("--prompt", "a red circle", "--model", folder, "--seed", 0)
    plain, report = clip(run(*common, "--output", tmp_path / "plain.mp4"))
    assert report["loras"] == []
    asked = ("--lora", f"{first}:0.5", "--lora", second)
    pixels, report = clip(run(*common, *asked, "--output", tmp_path / "both.mp4"))
    assert not np.array_equal(pixels, plain)
    assert [(entry["name"], entry["weight"]) for entry in report["loras"]] == [("a", 0.5), ("b", 1.0)]
    assert all(entry["modules"] == {"transformer": 12} for entry in report["loras"])
    sidecar = json.loads((tmp_path / "both.json").read_text(encoding="utf-8"))
    assert sidecar["loras"] == report["loras"] and len(sidecar["loras"][0]["sha256"]) == 64

    pipe = load(folder, device="cpu")
    pipe.set_progress_bar_config(disable=True)
    load_lora(pipe, first, 0.5)
    load_lora(pipe, second)
    assert describe_loras(pipe) == sidecar["loras"]
    made = generate(pipe, GenerationRequest("a red circle", seed=0))
    assert list(made.loras) == sidecar["loras"]
    unload_lora(pipe)
    assert describe_loras(pipe) == []

    # Moved together: the files are found beside the sidecar.
    (tmp_path / "moved").mkdir()
    for name in ("both.json", "a.safetensors", "b.safetensors"):
        shutil.move(tmp_path / name, tmp_path / "moved" / name)
    again, _ = clip(run("--from-sidecar", tmp_path / "moved/both.json", "--output", tmp_path / "again.mp4"))
    assert np.array_equal(again, pixels)
    # Another file under that name would make another clip.
    write_lora(tmp_path / "moved/a.safetensors", seed=2)
    refused = run("--from-sidecar", tmp_path / "moved/both.json", "--output", tmp_path / "no.mp4")
    assert refused.exit_code == 2 and "SHA-256" in refused.stderr and not (tmp_path / "no.mp4").exists()


def test_beside_a_quantized_and_sparse_recipe(folder, tmp_path):
    recipe = tmp_path / "recipe.json"
    recipe.write_text(json.dumps({
        "name": "all", "quantization": {"mode": "int8"},
        "attention": {"backend": "gather", "keep_ratio": 0.5, "block_size_q": 16, "block_size_k": 16},
    }))  # fmt: skip
    lora = write_lora(tmp_path / "a.safetensors")
    common = ("--prompt", "a red circle", "--model", folder, "--seed", 0, "--recipe", recipe)
    plain, _ = clip(run(*common, "--output", tmp_path / "plain.mp4"))
    pixels, report = clip(run(*common, "--lora", lora, "--output", tmp_path / "with.mp4"))
    assert not np.array_equal(pixels, plain)
    assert report["loras"][0]["modules"] == {"transformer": 12} and report["report"]["quantization"]
    silent, _ = clip(run(*common, "--lora", f"{lora}:0", "--output", tmp_path / "silent.mp4"))
    assert np.array_equal(silent, plain)


@pytest.mark.parametrize("text", ["absent.safetensors", "foreign.safetensors", "a.safetensors:inf"])
def test_wrong_choices_end_before_loading(folder, tmp_path, monkeypatch, text):
    from videospark.pipelines import loading

    monkeypatch.setattr(loading, "load", lambda *_, **__: pytest.fail("loaded the model before checking"))
    write_lora(tmp_path / "a.safetensors")
    save_file({"blocks.0.attn1.to_q.lokr_w1": torch.ones(2, 2)}, tmp_path / "foreign.safetensors")
    result = run("--prompt", "a", "--model", folder, "--lora", tmp_path / text, "--output", tmp_path / "out/clip.mp4")
    assert result.exit_code == 2 and "lora" in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()
