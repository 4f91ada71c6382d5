"""Every method for thirty iterations: it learns, the teacher stays as it was, a resumed run ends alike."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from videospark.distill import run as runs
from videospark.distill.run import run

CRITIC = {"critic_updates": 2}
ARMS = {
    "warm-up": ("sparse_warmup", {"sparse_warmup": {"start_keep_ratio": 0.6, "ramp_share": 0.2}}, ("loss/student",)),
    "pcm": ("pcm", {"pcm": {"solver_steps": 10}}, ("loss/student",)),
    "dmd": ("dmd", {"dmd": CRITIC | {"form": "dmd"}}, ()),
    "tdm": ("dmd", {"dmd": CRITIC | {"form": "tdm"}}, ()),
    "joint": ("crossdistill", {"dmd": CRITIC, "pcm": {"solver_steps": 10}}, ()),
    "staged": (
        "crossdistill",
        {"dmd": CRITIC, "pcm": {"solver_steps": 10}, "crossdistill": {"mode": "staged", "staged_steps": 12}},
        (),
    ),
}
STEPS, HALF = 30, 15
TRAINING = {
    "num_steps": STEPS, "batch_size": 4, "learning_rate": 2e-3, "critic_learning_rate": 5e-3, "checkpoint_every": HALF,
    "ema_decay": 0.0,
}  # fmt: skip


def log_of(folder):
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


def checkpoint(folder, step):
    found = folder / "checkpoints" / f"step-{step:08d}"
    return {path.name: load_file(path) for path in sorted(found.glob("*.safetensors"))}


@pytest.mark.parametrize("arm", ARMS)
def test_thirty_iterations(world, build, fresh, tmp_path, arm, monkeypatch):
    method, settings, falling = ARMS[arm]
    teachers = []
    denoiser_of = runs.denoiser_of

    def watched(pipe, experts=None):
        made = denoiser_of(pipe, experts)
        teachers.append((made, {name: p.detach().clone() for name, p in made.named_parameters()}))
        return made

    monkeypatch.setattr(runs, "denoiser_of", watched)
    config = build(world, tmp_path / "whole", method, TRAINING, data={"image_share": 0.0}, **settings)
    run(config, device="cpu")
    log = log_of(tmp_path / "whole")
    assert [record["step"] for record in log] == list(range(1, STEPS + 1))
    # A critic follows a student that moves: its loss need not fall in 30 iterations, it must stay finite.
    assert all(np.isfinite(value) for record in log for name, value in record.items() if name.startswith("loss/"))
    for name in falling:
        values = [record[name] for record in log if name in record]
        third = len(values) // 3
        assert third >= 2 and sum(values[-third:]) < 0.9 * sum(values[:third]), (name, values)
    # The networks are made in this order: student, critic where there is one, teacher.
    teacher, before = teachers[-1]
    after = dict(teacher.named_parameters())
    assert all(torch.equal(before[name], after[name]) and after[name].grad is None for name in before)
    student, start = teachers[0]
    assert any(not torch.equal(start[name], p.detach()) for name, p in student.named_parameters() if name in start)

    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / f"step-{STEPS:08d}")
    fresh()
    run(dataclasses.replace(config, output=str(tmp_path / "half")), device="cpu", resume=True)
    left, right = checkpoint(tmp_path / "whole", STEPS), checkpoint(tmp_path / "half", STEPS)
    assert left.keys() == right.keys()
    for file in left:
        assert all(torch.equal(value, right[file][key]) for key, value in left[file].items()), file
    assert log_of(tmp_path / "half") == log


@pytest.mark.parametrize(("arm", "name"), [("pcm", "loss/student"), ("staged", "student/pcm")])
def test_consistency_is_learned(world, build, fresh, tmp_path, arm, name):
    """Measured by the same draws without learning: noise levels differ by more than a few steps help."""
    method, settings, _ = ARMS[arm]
    late = {}
    for rate in (2e-4, 1e-12):
        fresh()
        changed = TRAINING | {"learning_rate": rate}
        run(build(world, tmp_path / str(rate), method, changed, data={"image_share": 0.0}, **settings), device="cpu")
        values = [record[name] for record in log_of(tmp_path / str(rate)) if name in record]
        late[rate] = sum(values[-(len(values) // 3) :])
    assert 0 < late[2e-4] < 0.9 * late[1e-12]
