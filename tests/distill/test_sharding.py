"""Networks split over processes: the same run as in one process, checkpoints that fit either way, parts that agree."""

import dataclasses
import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from videospark.core.config import ConfigError, save_file
from videospark.distill.checkpoints import newest_checkpoint, step_of
from videospark.distill.run import run
from videospark.distill.sharding import build_accelerator, exchanged, rows_of, split_as, whole

CROSSDISTILL = {"dmd": {"critic_updates": 1}, "pcm": {"solver_steps": 10, "target": "ema"}}
TRAINING = {"num_steps": 4, "batch_size": 4, "learning_rate": 1e-4, "critic_learning_rate": 1e-4, "checkpoint_every": 2}


def tensors(folder):
    newest = newest_checkpoint(folder / "checkpoints")
    found = {path.name: load_file(path) for path in sorted(newest.glob("*.safetensors"))}
    return found, json.loads((newest / "state.json").read_text())


def test_one_process_in_parts_equals_one_without(world, build, fresh, tmp_path):
    """The whole path, from parts in RAM to the saved student; a run may be resumed either way."""
    training = TRAINING | {"gradient_checkpointing": True}
    config = build(world, tmp_path / "plain", "crossdistill", training, **CROSSDISTILL)
    plain = run(config, device="cpu")
    fresh()
    offloaded = dataclasses.replace(config.training, sharding="fsdp2", offload=True)
    sheets = dataclasses.replace(config.samples, every=4, count=1, frames=1)
    split = dataclasses.replace(config, output=str(tmp_path / "split"), training=offloaded, samples=sheets)
    result = run(split, device="cpu")
    assert not torch.distributed.is_initialized()
    assert (tmp_path / "split" / "samples" / "step-00000004.png").is_file()
    (left, left_state), (right, right_state) = tensors(tmp_path / "plain"), tensors(tmp_path / "split")
    assert left.keys() == right.keys() and left_state["updates"] == right_state["updates"]
    for name in left.keys() - {"random-0.safetensors"}:  # of this process, which no run draws from
        assert left[name].keys() == right[name].keys()
        for key, value in left[name].items():
            assert torch.allclose(value.float(), right[name][key].float(), rtol=1e-4, atol=1e-6), (name, key)
    weights = [load_file(r.student / "transformer" / "diffusion_pytorch_model.safetensors") for r in (plain, result)]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.allclose(weights[0][key], weights[1][key], atol=1e-6) for key in weights[0])
    # What was split goes on in one piece: the newest checkpoint is thrown away, the older one taken up.
    for path in newest_checkpoint(tmp_path / "split" / "checkpoints").iterdir():
        path.unlink()
    fresh()
    whole_again = dataclasses.replace(config, output=str(tmp_path / "split"))
    with pytest.warns(UserWarning, match="passed over"):
        run(whole_again, device="cpu", resume=True)
    resumed, _ = tensors(tmp_path / "split")
    for name in ("student.safetensors", "critic-optimizer.safetensors", "average.safetensors"):
        for key, value in left[name].items():
            assert torch.allclose(value, resumed[name][key], rtol=1e-4, atol=1e-6), (name, key)


# Imports once, then forks the processes of every job, so that a dozen of them need not import torch a dozen times.
NURSERY = """
import os, socket, sys, traceback
import torch
import torch.distributed as dist
torch.set_num_threads(1)
from accelerate import Accelerator
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.tensorboard import SummaryWriter
from videospark.distill.denoiser import Denoiser, as_field
from videospark.distill.flow import Condition
from videospark.distill.run import load_config, run
from videospark.distill.sharding import Sharding, whole

def start(ranks, job, *arguments):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                if ranks > 1:
                    os.environ |= {
                        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port),
                        "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1",
                    }
                job(*arguments)
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        children.append(child)
    for child in children:
        if os.waitpid(child, 0)[1] != 0:
            sys.exit(f"a process of {arguments} failed")

def train(path):
    run(load_config(path), resume=True, device="cpu")

def ask_experts(output):
    accelerator = Accelerator(cpu=True)
    experts = {}
    for seed, name in enumerate(("transformer", "transformer_2")):
        torch.manual_seed(seed)
        experts[name] = WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=1, attention_head_dim=24, in_channels=2, out_channels=2,
            text_dim=8, freq_dim=16, ffn_dim=16, num_layers=1, rope_max_seq_len=16,
        )
    both = Denoiser(experts, boundary_ratio=0.5, expand_timesteps=False)
    generator = torch.Generator().manual_seed(0)
    x, prompt = torch.randn(2, 2, 1, 4, 4, generator=generator), torch.randn(2, 3, 8, generator=generator)
    sigma = torch.tensor([0.9, 0.2])  # the first process needs one expert, the second the other
    rank, world = accelerator.process_index, accelerator.num_processes
    rows = slice(None)
    if world > 1:
        Sharding(init_device_mesh("cpu", (world,)), False, False).shard(both)
        rows = slice(rank, rank + 1)
    out = as_field(both)(x[rows], sigma[rows], Condition(prompt[rows], prompt[:1]))
    out.square().mean().backward()
    tensors = {name: whole(p.grad).contiguous() for name, p in both.named_parameters()}
    tensors["out"] = accelerator.gather(out.detach()).contiguous()
    if rank == 0:
        save_file(tensors, output)

for line in sys.stdin:
    ranks, job, argument = line.split()
    start(int(ranks), {"train": train, "ask_experts": ask_experts}[job], argument)
"""


def start_all(jobs):
    """Runs (number of processes, name of a job, its argument) one after the other."""
    lines = "".join(f"{ranks} {job} {argument}\n" for ranks, job, argument in jobs)
    done = subprocess.run([sys.executable, "-c", NURSERY], input=lines, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.slow
def test_two_processes_in_parts_equal_one(world, build, tmp_path):
    """FSDP2 over gloo, interrupted and taken up again, full and with adapters, against one process."""
    kinds = {"full": {"gradient_checkpointing": True}, "bf16": {"mixed_precision": "bf16"}}
    if importlib.util.find_spec("peft"):
        kinds["lora"] = {"trainable": "lora", "lora": {"rank": 2, "alpha": 2.0}}
    jobs = []
    for name, changes in kinds.items():
        config = build(world, tmp_path / f"{name}-one", "crossdistill", TRAINING | changes, **CROSSDISTILL)
        halves = dataclasses.replace(config.training, batch_size=2, sharding="fsdp2")
        first = dataclasses.replace(halves, num_steps=2)
        two = str(tmp_path / f"{name}-two")
        runs = [
            (1, config),
            (2, dataclasses.replace(config, output=two, training=first)),
            (2, dataclasses.replace(config, output=two, training=halves)),
        ]
        for number, (ranks, settings) in enumerate(runs):
            path = tmp_path / f"{name}-{number}.toml"
            save_file(settings, path)
            jobs.append((ranks, "train", path))
    start_all(jobs)
    start = load_file(world / "model" / "transformer" / "diffusion_pytorch_model.safetensors")
    for name in kinds:
        (left, left_state), (right, right_state) = tensors(tmp_path / f"{name}-one"), tensors(tmp_path / f"{name}-two")
        assert left_state["updates"] == right_state["updates"] and len(right_state["random"]) == 2
        assert left.keys() | {"random-1.safetensors"} == right.keys()
        for file in ("student.safetensors", "critic.safetensors", "average.safetensors"):
            assert left[file].keys() == right[file].keys()
            away = sum(float((v - right[file][k]).abs().sum()) for k, v in left[file].items())
            origin = {k: start.get(k.removeprefix("experts.transformer."), torch.zeros(())) for k in left[file]}
            moved = sum(float((v - origin[k]).abs().sum()) for k, v in left[file].items())
            # Adam turns a gradient near zero into a step of either sign, so the mean is compared, not the largest one.
            assert away <= (0.3 if name == "bf16" else 0.05) * moved, (name, file)
        files = [tmp_path / f"{name}-{k}" / "student" / "transformer" / "diffusion_pytorch_model.safetensors"
                 for k in ("one", "two")]  # fmt: skip
        made = [load_file(file) for file in files]
        assert made[0].keys() == made[1].keys() == start.keys()
        assert step_of(newest_checkpoint(tmp_path / f"{name}-two" / "checkpoints")) == 4


@pytest.mark.slow
def test_processes_that_need_different_experts_wait_for_each_other(tmp_path):
    start_all([(ranks, "ask_experts", tmp_path / f"{ranks}") for ranks in (1, 2)])
    one, two = load_file(tmp_path / "1"), load_file(tmp_path / "2")
    assert one.keys() == two.keys() and len(one) > 40
    assert all(torch.allclose(one[key], two[key], rtol=1e-4, atol=1e-6) for key in one)
    for expert in ("transformer.", "transformer_2."):
        assert sum(float(v.abs().sum()) for k, v in one.items() if f"experts.{expert}" in k) > 0


def test_tensors_that_are_not_split_are_left_as_they_are():
    parameter, value = torch.nn.Parameter(torch.arange(6.0).view(3, 2)), torch.ones(3, 2)
    assert torch.equal(whole(parameter), parameter) and torch.equal(rows_of(value, parameter), value)
    assert split_as(value, parameter).data_ptr() != value.data_ptr()
    before = parameter.detach().clone()

    def fail():
        assert torch.equal(parameter, torch.ones(3, 2)) and torch.equal(value, before)
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"), exchanged({"p": parameter}, {"p": value}):
        fail()
    assert torch.equal(parameter, before) and torch.equal(value, torch.ones(3, 2))


def test_settings_that_cannot_be_split_are_named(world, build, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="training.offload: got True"):
        build(world, tmp_path, "pcm", {"offload": True})
    with pytest.raises(ConfigError, match="training.optimizer: got 'muon'"):
        build(world, tmp_path, "pcm", {"sharding": "fsdp2", "optimizer": "muon"})
    plain = build(world, tmp_path, "pcm")
    split = build(world, tmp_path, "pcm", {"sharding": "fsdp2", "offload": True})
    assert plain.fingerprint() == split.fingerprint()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="use_fsdp: got true"):
        build_accelerator(plain, "cpu")
