"""`videospark distill`: the shipped settings, and prepare and run from the command line."""

import json

import pytest
from typer.testing import CliRunner

from videospark.app.cli import app

runner = CliRunner()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    import torch

    from videospark.tiny.components import build_pipeline

    torch.manual_seed(0)
    pipe = build_pipeline()
    torch.nn.init.normal_(pipe.transformer.proj_out.weight, std=0.05)
    folder = tmp_path_factory.mktemp("model")
    pipe.save_pretrained(folder)
    defaults = {"height": 32, "width": 32, "num_frames": 5, "fps": 8, "num_inference_steps": 2, "guidance_scale": 3.0}
    (folder / "videospark_defaults.json").write_text(json.dumps(defaults | {"max_sequence_length": 32}))
    return folder


def invoke(*arguments):
    return runner.invoke(app, ["distill", *map(str, arguments)])


def test_the_shipped_settings_are_valid_and_listed():
    result = invoke("recipes", "--json")
    assert result.exit_code == 0, result.stderr
    configs = json.loads(result.stdout)
    assert {c["method"] for c in configs.values()} >= {"sparse_warmup", "pcm", "crossdistill"}
    for name, config in configs.items():
        assert config["name"] == name and config["description"]
        assert config["attention"]["keep_ratio"] == 0.25 or not name.startswith("tiny-")
    assert len(configs["tiny-pcm-3step"]["model"]["sigmas"]) == 3
    assert len(configs["tiny-crossdistill-3step"]["model"]["sigmas"]) == 3
    listed = invoke("recipes").stdout
    assert all(name in listed for name in configs)
    assert 'method = "pcm"' in invoke("recipes", "--show", "tiny-pcm-3step").stdout
    assert invoke("recipes", "--show", "nothing").exit_code == 2


def test_a_training_is_planned():
    options = ("wan2.1-1.3b-warmup-90-lora", "--gpu", "rtx4090")
    result = invoke("plan", *options)
    assert result.exit_code == 0, result.stderr
    assert "wan2.1-t2v-1.3b at 832x480x81 (32,760 tokens), 1 x rtx4090" in result.stdout
    assert "activations" in result.stdout and "s an iteration" in result.stdout
    facts = json.loads(invoke("plan", *options, "--size", "832x480x41", "--json").stdout)
    assert facts["tokens"] == 11 * 30 * 52 and facts["peak_gib"] == pytest.approx(sum(facts["gpu_gib"].values()))
    wrong = invoke("plan", options[0], "--gpu", "abacus")
    assert wrong.exit_code == 2 and "gpu: got 'abacus'" in wrong.stderr
    nowhere = invoke("plan", "tiny-warmup-75", "--gpu", "h100")
    assert nowhere.exit_code == 2 and "model: got 'tiny'" in nowhere.stderr


def test_trajectories_then_run(model, tmp_path):
    options = ("--trajectories", "0.99,0.7", "--image-share", 0.5, "--guidance-scale", 2, "--device", "cpu")
    prepared = invoke("prepare", "--model", model, "--tiny-world", 3, *options, "--output", tmp_path / "data")
    assert prepared.exit_code == 0, prepared.stderr
    settings = json.loads((tmp_path / "data" / "dataset.json").read_text())["sampling"]
    assert settings["num_inference_steps"] == 10 and settings["sigmas"] == [0.99, 0.7]
    config = tmp_path / "config.toml"
    config.write_text(
        f"""
        name = "smoke"
        method = "ode_regression"
        [data]
        path = {json.dumps(str(tmp_path / "data"))}
        [model]
        teacher = {json.dumps(str(model))}
        sigmas = [0.99, 0.7]
        guidance_scale = 2.0
        [training]
        num_steps = 1
        """
    )
    result = invoke("run", config, "--output", tmp_path / "out", "--device", "cpu")
    assert result.exit_code == 0, result.stderr


def test_prepare_then_run_then_generate(model, tmp_path):
    prepared = invoke("prepare", "--model", model, "--tiny-world", 3, "--output", tmp_path / "data", "--device", "cpu")
    assert prepared.exit_code == 0, prepared.stderr
    assert "3 clips, 3 of them new" in prepared.stdout
    config = tmp_path / "config.toml"
    config.write_text(
        f"""
        name = "smoke"
        method = "pcm"
        [data]
        path = "nowhere"
        [model]
        teacher = {json.dumps(str(model))}
        sigmas = [0.99, 0.7]
        [training]
        num_steps = 1
        """
    )
    arguments = ("run", config, "--data", tmp_path / "data", "--output", tmp_path / "out", "--device", "cpu")
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    student = tmp_path / "out" / "student"
    assert result.stdout.strip().splitlines()[-1] == str(student)
    again = invoke(*arguments)
    assert again.exit_code == 2 and "must be resumed" in again.stderr
    assert invoke(*arguments, "--resume").exit_code == 0
    shown = runner.invoke(app, ["generate", "--model", str(student), "--prompt", "a red circle", "--output",
                                str(tmp_path / "x.mp4"), "--device", "cpu"])  # fmt: skip
    assert shown.exit_code == 0, shown.stderr
    assert (tmp_path / "x.mp4").stat().st_size > 0


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("prepare", "--output", "x"), "--clips, --prompts, --tiny-world"),
        (("prepare", "--output", "x", "--tiny-world", 2, "--prompts", "p"), "source: got prompts, tiny-world"),
        (("prepare", "--output", "x", "--tiny-world", -1), "tiny-world: got -1"),
        (("prepare", "--output", "x", "--clips", "nowhere"), "clips: got 'nowhere'"),
        (("prepare", "--output", "x", "--tiny-world", 2, "--steps", 9), "steps: got 9"),
        (("prepare", "--output", "x", "--tiny-world", 2, "--image-share", 0.5), "image-share: got 0.5"),
        (("prepare", "--output", "x", "--tiny-world", 2, "--trajectories", "a"), "trajectories: got 'a'"),
        (("prepare", "--output", "x", "--tiny-world", 2, "--trajectories", "0.5,0.9"), "sigmas"),
        (("run", "nowhere.toml"), "config: got 'nowhere.toml'"),
        (("run", "tiny-unknown"), "tiny-pcm-3step"),
        (("run", "tiny-pcm-3step", "--device", "tpu"), "device: got 'tpu'"),
    ],
)
def test_wrong_input_is_named(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


def test_bad_clips_give_exit_code_1(model, tmp_path):
    (tmp_path / "clips.csv").write_text("path,caption\nmissing.mp4,a red circle\n")
    result = invoke("prepare", "--model", model, "--clips", tmp_path / "clips.csv", "--output", tmp_path / "d",
                    "--device", "cpu")  # fmt: skip
    assert result.exit_code == 1
    assert "missing.mp4" in (tmp_path / "d" / "bad.jsonl").read_text()
