"""Whole runs on a random tiny model: they learn, resume bit for bit, leave the teacher alone, and save what loads."""

import dataclasses
import json
import random
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

import videospark
from videospark.core.config import ConfigError, save_file
from videospark.distill import run as runs
from videospark.distill import trainer as training_loop
from videospark.distill.checkpoints import newest_checkpoint, step_of
from videospark.distill.data import PreparedData
from videospark.distill.method import build_method
from videospark.distill.run import STUDENT_FOLDER, load_config, run, stock_pipeline

METHODS = {
    "sparse_warmup": {"sparse_warmup": {"start_keep_ratio": 0.9, "ramp_share": 1.0}},
    "pcm": {"pcm": {"target": "ema", "solver_steps": 10}},
    "dmd": {"dmd": {"critic_updates": 1}},
    "crossdistill": {"dmd": {"critic_updates": 1}, "pcm": {"solver_steps": 10}},
}


def seed_everything(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)
    torch.rand(3), np.random.normal(), random.gauss(0, 1)  # leave half-used states behind


def tensors(folder):
    newest = newest_checkpoint(folder / "checkpoints")
    found = {path.name: load_file(path) for path in sorted(newest.glob("*.safetensors"))}
    return found, json.loads((newest / "state.json").read_text())


# crossdistill has the losses and roles of pcm and dmd, so these two are left to the slow tests.
@pytest.mark.parametrize(
    "method",
    [pytest.param(name, marks=[pytest.mark.slow] if name in ("pcm", "dmd") else []) for name in METHODS],
)
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(world, build, tmp_path, method, monkeypatch):
    before = load_file(world / "model" / "transformer" / "diffusion_pytorch_model.safetensors")
    config = build(
        world,
        tmp_path / "whole",
        method,
        {"gradient_accumulation": 2 if method == "pcm" else 1, "schedule": "cosine"},
        **METHODS[method],
    )
    seed_everything(7)
    whole = run(config, device="cpu")
    assert whole.training.step == 6

    class Stopped(Exception):
        pass

    parts = dataclasses.replace(config, output=str(tmp_path / "parts"))
    iterate, seen = training_loop.Trainer._iterate, []

    def interrupted(self):
        if self.step == 5:  # after the checkpoint at 3: iterations 4 and 5 are lost and done again
            raise Stopped
        seen.append(self.step)
        return iterate(self)

    seed_everything(7)
    monkeypatch.setattr(training_loop.Trainer, "_iterate", interrupted)
    with pytest.raises(Stopped):
        run(parts, device="cpu")
    monkeypatch.setattr(training_loop.Trainer, "_iterate", iterate)
    seed_everything(12345)  # a new process has other global generators
    with pytest.raises(ConfigError, match="must be resumed"):
        run(parts, device="cpu")
    resumed = run(parts, device="cpu", resume=True)
    assert seen == [0, 1, 2, 3, 4] and resumed.training == whole.training

    (left, left_state), (right, right_state) = tensors(tmp_path / "whole"), tensors(tmp_path / "parts")
    assert left.keys() == right.keys()
    expected = {"student.safetensors", "student-optimizer.safetensors", "average.safetensors", "random-0.safetensors"}
    if method in ("dmd", "crossdistill"):
        expected |= {"critic.safetensors", "critic-optimizer.safetensors"}
    assert set(left) == expected
    for name in left:
        assert left[name].keys() == right[name].keys()
        for key in left[name]:
            assert torch.equal(left[name][key], right[name][key]), (name, key)
    assert left_state == right_state
    logs = [
        [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in path.read_text().splitlines()]
        for path in (tmp_path / "whole" / "log.jsonl", tmp_path / "parts" / "log.jsonl")
    ]
    assert logs[0] == logs[1] and [r["step"] for r in logs[0]] == [1, 2, 3, 4, 5, 6]
    # The teacher is what it was, and the student is not.
    after = load_file(world / "model" / "transformer" / "diffusion_pytorch_model.safetensors")
    student = load_file(tmp_path / "whole" / "student" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert not all(torch.equal(before[key], student[key]) for key in before)


def test_the_student_loads_with_its_recipe_and_samples(world, build, tmp_path):
    config = build(world, tmp_path, "crossdistill", **METHODS["crossdistill"])
    result = run(config, device="cpu")
    pipe = videospark.load(result.student, device="cpu")
    assert pipe.videospark_defaults["provides"] == ["few-step"]
    assert pipe.videospark_defaults["num_inference_steps"] == 3
    assert [round(float(s), 3) for s in pipe.scheduler.sigmas] == [*config.model.sigmas, 0.0]
    pipe.set_progress_bar_config(disable=True)
    out = pipe(
        "a red circle",
        height=64,
        width=64,
        num_frames=5,
        num_inference_steps=3,
        guidance_scale=1.0,
        max_sequence_length=32,
        output_type="latent",
        generator=torch.Generator().manual_seed(0),
    ).frames
    assert torch.isfinite(out).all()
    # What is saved is the average of the trained weights.
    average = load_file(newest_checkpoint(tmp_path / "checkpoints") / "average.safetensors")
    key = "experts.transformer.blocks.0.ffn.net.2.weight"
    assert torch.equal(average[key], pipe.transformer.blocks[0].ffn.net[2].weight)
    for name in ("losses.png", "log.jsonl", "config.toml"):
        assert (tmp_path / name).stat().st_size > 0
    assert list((tmp_path / "tensorboard").iterdir())
    assert load_config(tmp_path / "config.toml") == config


@pytest.mark.slow
def test_one_stage_goes_on_from_the_student_of_another(world, build, tmp_path):
    first = run(build(world, tmp_path / "a", "sparse_warmup", {"num_steps": 1}), device="cpu")
    AcceleratorState._reset_state(True)
    second = run(
        build(world, tmp_path / "b", "pcm", {"num_steps": 1, "ema_decay": 0.0}, model={"student": str(first.student)}),
        device="cpu",
    )
    defaults = json.loads((second.student / "videospark_defaults.json").read_text())
    assert defaults["provides"] == ["sparse", "few-step"]


@pytest.mark.parametrize("method", ["sparse_warmup", pytest.param("pcm", marks=pytest.mark.slow)])
def test_the_loss_falls(world, build, tmp_path, method):
    settings = dict(METHODS[method])
    if method == "sparse_warmup":
        settings = {"sparse_warmup": {"ramp_share": 0.0, "start_keep_ratio": 0.3}}
    training = {"num_steps": 24, "batch_size": 4, "ema_decay": 0.9, "checkpoint_every": 24, "optimizer": "muon"}
    run(build(world, tmp_path, method, training, data={"image_share": 0.0}, **settings), device="cpu")
    losses = [json.loads(line)["loss/student"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert sum(losses[-8:]) < 0.9 * sum(losses[:8]), losses


def test_the_keep_ratio_follows_its_schedule(world, build, tmp_path):
    run(build(world, tmp_path, "sparse_warmup", **METHODS["sparse_warmup"]), device="cpu")
    ratios = [json.loads(line)["keep_ratio"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert ratios == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5, 0.4])


@pytest.mark.slow
def test_bfloat16_checkpointing_and_alignment_run(world, build, tmp_path):
    training = {"num_steps": 2, "mixed_precision": "bf16", "gradient_checkpointing": True}
    run(build(world, tmp_path / "a", "crossdistill", training, **METHODS["crossdistill"]), device="cpu")
    AcceleratorState._reset_state(True)
    run(
        build(world, tmp_path / "b", "sparse_warmup", {"num_steps": 2}, sparse_warmup={"alignment_weight": 1.0}),
        device="cpu",
    )
    record = json.loads((tmp_path / "b" / "log.jsonl").read_text().splitlines()[0])
    assert record["student/alignment"] > 0


@pytest.mark.slow
def test_recomputing_blocks_changes_no_number(world, build, tmp_path):
    values = []
    for name, recompute in (("a", False), ("b", True)):
        training = {"num_steps": 2, "gradient_checkpointing": recompute}
        run(build(world, tmp_path / name, "pcm", training, **METHODS["pcm"]), device="cpu")
        values.append(tensors(tmp_path / name)[0]["student.safetensors"])
        AcceleratorState._reset_state(True)
    assert all(torch.allclose(values[0][k], values[1][k], atol=1e-6) for k in values[0])


@pytest.mark.slow
def test_accumulating_equals_a_larger_batch(world, build, tmp_path):
    values = []
    for name, training in (("a", {"batch_size": 4}), ("b", {"batch_size": 2, "gradient_accumulation": 2})):
        training |= {"num_steps": 1, "learning_rate": 1e-5, "ema_decay": 0.0, "max_grad_norm": 0.0}
        run(build(world, tmp_path / name, "pcm", training), device="cpu")
        values.append(tensors(tmp_path / name)[0])
        AcceleratorState._reset_state(True)
    for key, left in values[0]["student-optimizer.safetensors"].items():
        right = values[1]["student-optimizer.safetensors"][key]
        assert torch.allclose(left, right, rtol=1e-2, atol=1e-6), key


def test_a_tensor_without_gradient_is_named(world, build, tmp_path, monkeypatch):
    from videospark.distill.methods.pcm import PCM

    loss = PCM.loss

    def detached(self, role, roles, batch, step):
        result = loss(self, role, roles, batch, step)
        (lonely,) = [p for n, p in student.named_parameters() if n.endswith("blocks.1.ffn.net.2.bias")]
        lonely.requires_grad_(False)
        return dataclasses.replace(result, value=loss(self, role, roles, batch, step).value)

    choose = training_loop.TrainedRole.prepare
    student = None

    def remember(self, *arguments, **options):
        nonlocal student
        student = self.network
        return choose(self, *arguments, **options)

    monkeypatch.setattr(training_loop.TrainedRole, "prepare", remember)
    monkeypatch.setattr(PCM, "loss", detached)
    with pytest.raises(RuntimeError, match=r"student: 1 of \d+ tensors got no gradient: .*blocks.1.ffn.net.2.bias"):
        run(build(world, tmp_path, "pcm", {"ema_decay": 0.0}), device="cpu")


def test_a_loss_that_is_not_finite_ends_the_run(world, build, tmp_path, monkeypatch):
    from videospark.distill.methods.pcm import PCM

    loss = PCM.loss

    def broken(self, role, roles, batch, step):
        result = loss(self, role, roles, batch, step)
        return dataclasses.replace(result, value=result.value * (float("nan") if step == 2 else 1))

    monkeypatch.setattr(PCM, "loss", broken)
    with pytest.raises(FloatingPointError, match="step 2, student"):
        run(build(world, tmp_path, "pcm", {"ema_decay": 0.0, "checkpoint_every": 1}), device="cpu")
    assert step_of(newest_checkpoint(tmp_path / "checkpoints")) == 2
    assert not (tmp_path / STUDENT_FOLDER).exists()


def test_other_settings_do_not_resume(world, build, tmp_path):
    run(build(world, tmp_path, "pcm", {"num_steps": 1, "ema_decay": 0.0}), device="cpu")
    AcceleratorState._reset_state(True)
    with pytest.raises(ConfigError, match="config: got other settings"):
        run(build(world, tmp_path, "pcm", {"num_steps": 2, "ema_decay": 0.0}, pcm={"solver_steps": 5}), device="cpu",
            resume=True)  # fmt: skip
    AcceleratorState._reset_state(True)
    longer = run(build(world, tmp_path, "pcm", {"num_steps": 2, "ema_decay": 0.0}), device="cpu", resume=True)
    assert longer.training.step == 2


def test_other_clips_do_not_resume(world, build, tmp_path):
    shutil.copytree(world / "data", tmp_path / "data")
    data = {"path": str(tmp_path / "data")}
    run(build(world, tmp_path / "out", "pcm", {"num_steps": 1}, data=data), device="cpu")
    sorted((tmp_path / "data").glob("shard-*"))[0].unlink()
    AcceleratorState._reset_state(True)
    with pytest.raises(ConfigError, match=r"data.path: .* with other clips or settings; must be the data that step-"):
        run(build(world, tmp_path / "out", "pcm", {"num_steps": 2}, data=data), device="cpu", resume=True)


def test_a_batch_that_is_split_otherwise_resumes(world, build, tmp_path):
    run(build(world, tmp_path, "pcm", {"num_steps": 1, "batch_size": 2}), device="cpu")
    for size, micro, fits in ((1, 2, True), (2, 2, False)):
        AcceleratorState._reset_state(True)
        training = {"num_steps": 2, "batch_size": size, "gradient_accumulation": micro}
        config = build(world, tmp_path, "pcm", training)
        if fits:
            assert run(config, device="cpu", resume=True).training.step == 2
        else:
            with pytest.raises(ConfigError, match="batch over all processes: got 4; must be 2"):
                run(config, device="cpu", resume=True)


def test_two_losses_of_two_experts_need_split_networks(build, world, tmp_path):
    two = SimpleNamespace(transformer=object(), transformer_2=object())
    config = build(world, tmp_path, "crossdistill")
    method = build_method(config, 5.0, 0.8)
    runs._check_processes(config, method, two, 1)
    with pytest.raises(ConfigError, match="training.sharding: got 'none'; must be 'fsdp2'"):
        runs._check_processes(config, method, two, 2)
    alone = build(world, tmp_path, "dmd")
    runs._check_processes(alone, build_method(alone, 5.0, 0.8), two, 2)


def test_data_of_another_model_is_refused(world, build, tmp_path):
    config = build(world, tmp_path, "pcm", {"ema_decay": 0.0})
    data = json.loads(json.dumps({"path": str(tmp_path / "data")}))
    (tmp_path / "data").mkdir()
    for path in (world / "data").iterdir():
        (tmp_path / "data" / path.name).write_bytes(path.read_bytes())
    settings = tmp_path / "data" / "dataset.json"
    wrong = json.loads(settings.read_text())
    wrong["latent_shape"][0] += 1
    settings.write_text(json.dumps(wrong))
    with pytest.raises(ConfigError, match="data latent channels"):
        run(dataclasses.replace(config, data=dataclasses.replace(config.data, **data)), device="cpu")
    assert len(PreparedData(world / "data")) == 8


@pytest.mark.parametrize("method", [pytest.param("sparse_warmup", marks=pytest.mark.slow), "crossdistill"])
def test_adapters_learn_and_are_merged(world, build, tmp_path, method):
    pytest.importorskip("peft")
    training = {"num_steps": 2, "trainable": "lora", "lora": {"rank": 2, "alpha": 2.0}}
    config = build(world, tmp_path, method, training, **METHODS[method])
    result = run(config, device="cpu")
    values = tensors(tmp_path)[0]["student.safetensors"]
    assert values and all(".lora_" in name for name in values)
    before = load_file(world / "model" / "transformer" / "diffusion_pytorch_model.safetensors")
    after = load_file(result.student / "transformer" / "diffusion_pytorch_model.safetensors")
    assert before.keys() == after.keys()
    changed = {key for key in before if not torch.equal(before[key], after[key])}
    assert any("to_q.weight" in key for key in changed) and not any("patch_embedding" in key for key in changed)


def test_branches_alone_learn_are_saved_and_go_on(world, build, tmp_path):
    branch = {"attention": {"branch": "rola", "rola": {"rank": 8}}}
    training = {"num_steps": 2, "trainable": "branch"}
    first = run(build(world, tmp_path / "a", "sparse_warmup", training, **branch), device="cpu")
    values = tensors(tmp_path / "a")[0]["average.safetensors"]
    assert values and all(".linear_branch." in name for name in values)
    pipe = videospark.load(first.student, device="cpu")
    loaded = dict(pipe.transformer.named_parameters())
    for name, value in values.items():
        assert torch.equal(loaded[name.removeprefix("experts.transformer.")], value), name
    before = load_file(world / "model" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(value, loaded[key]) for key, value in before.items())
    AcceleratorState._reset_state(True)
    # A student that runs by a backend for bfloat16 alone can be trained on from, in float32.
    recipe = json.loads((first.student / "videospark_recipe.json").read_text())
    recipe["attention"]["backend"] = "native"
    (first.student / "videospark_recipe.json").write_text(json.dumps(recipe))
    changes = branch | {"model": {"student": str(first.student)}}
    run(
        build(world, tmp_path / "b", "pcm", training | {"learning_rate": 1e-30, "ema_decay": 0.0}, **changes),
        device="cpu",
    )
    later = tensors(tmp_path / "b")[0]["student.safetensors"]
    assert all(torch.allclose(later[name], value, atol=1e-6) for name, value in values.items())
    AcceleratorState._reset_state(True)
    with pytest.raises(ConfigError, match="attention.branch"):
        run(build(world, tmp_path / "c", "pcm", {"num_steps": 1}, model=changes["model"]), device="cpu")


@pytest.mark.slow
def test_two_experts_are_trained_jointly(world, build, tmp_path):
    import copy

    from diffusers import WanPipeline

    pipe = stock_pipeline(str(world / "model"), torch.float32)
    parts = {name: part for name, part in pipe.components.items() if name != "transformer_2"}
    second = copy.deepcopy(pipe.transformer)
    WanPipeline(**parts, transformer_2=second, boundary_ratio=0.8).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "videospark_defaults.json").write_bytes(
        (world / "model" / "videospark_defaults.json").read_bytes()
    )
    model = {"teacher": str(tmp_path / "model")}
    training = {"ema_decay": 0.0}
    config = build(world, tmp_path / "out", "crossdistill", training, model=model, data={"image_share": 0.0},
                   dmd={"critic_updates": 1})  # fmt: skip
    result = run(config, device="cpu")
    student = videospark.load(result.student, device="cpu")
    before = dict(pipe.transformer.named_parameters())
    for expert in (student.transformer, student.transformer_2):
        assert any(not torch.equal(p, before[name]) for name, p in expert.named_parameters())


TWO_PROCESSES = """
import sys
from videospark.distill.run import load_config, run
run(load_config(sys.argv[1]), device="cpu")
"""


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sparse_warmup", "crossdistill"])
def test_two_processes_equal_one(world, build, tmp_path, method):
    """DistributedDataParallel over gloo: the same samples, the same draws, the same weights up to the order of sums."""
    values = []
    for name, size, processes in (("one", 4, 1), ("two", 2, 2)):
        training = {"num_steps": 4, "batch_size": size, "learning_rate": 1e-4, "critic_learning_rate": 1e-4}
        config = build(world, tmp_path / name, method, training, **METHODS[method])
        save_file(config, tmp_path / f"{name}.toml")
        (tmp_path / "script.py").write_text(TWO_PROCESSES)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"] if processes == 2 else []
        command = [sys.executable, *launcher, str(tmp_path / "script.py"), str(tmp_path / f"{name}.toml")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        values.append(tensors(tmp_path / name))
    (left, left_state), (right, right_state) = values
    assert len(right_state["random"]) == 2 and left_state["updates"] == right_state["updates"]
    start = load_file(world / "model" / "transformer" / "diffusion_pytorch_model.safetensors")
    for key, value in left["student.safetensors"].items():
        other = right["student.safetensors"][key]
        moved = (value - start[key.removeprefix("experts.transformer.")]).abs().mean()
        # Adam turns a gradient near zero into a step of either sign, so the mean is compared, not the largest one.
        assert (value - other).abs().mean() <= 0.05 * moved + 1e-9, key


def test_adapters_on_layers_that_do_not_exist_are_refused(world, build, tmp_path):
    pytest.importorskip("peft")
    training = {"trainable": "lora", "lora": {"targets": ["to_q", "to_x"]}}
    with pytest.raises(ConfigError, match="training.lora.targets: got 'to_x'"):
        run(build(world, tmp_path, "pcm", training), device="cpu")
