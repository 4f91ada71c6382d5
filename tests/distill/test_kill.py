"""A training that is killed at any moment goes on as if nothing had happened."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest
import torch
from safetensors.torch import load_file

from videospark.core.config import save_file
from videospark.distill.checkpoints import list_checkpoints, newest_checkpoint, problem, step_of

KILLS = 20

# Imports once, then forks a process per line of input: twenty starts need not import torch twenty times. The child is a
# process of its own, with nothing between it and SIGKILL.
NURSERY = """
import os, sys, traceback
import torch
torch.set_num_threads(1)
from torch.utils.tensorboard import SummaryWriter
from videospark.distill.run import load_config, run
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run(load_config(line.strip()), resume=True, device="cpu")
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    print(child, flush=True)
    print(os.waitpid(child, 0)[1], flush=True)
"""


@pytest.mark.slow
def test_kill_9_at_twenty_random_moments(world, build, tmp_path):
    training = {"num_steps": 100_000, "batch_size": 1, "checkpoint_every": 1, "log_every": 1, "keep_checkpoints": 2}
    folder = tmp_path / "killed"
    config = build(world, folder, "crossdistill", training, dmd={"critic_updates": 1}, pcm={"solver_steps": 10})
    save_file(config, tmp_path / "killed.toml")
    dice = random.Random(0)
    reached, partial = [], 0
    with subprocess.Popen(
        [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as nursery:

        def start(path):
            nursery.stdin.write(f"{path}\n")
            nursery.stdin.flush()
            return int(nursery.stdout.readline())

        for _ in range(KILLS):
            # The first moments are those of loading, the later ones fall into steps, checkpoints and pruning.
            child = start(tmp_path / "killed.toml")
            time.sleep(dice.uniform(0.05, 4.0))
            os.kill(child, signal.SIGKILL)
            assert int(nursery.stdout.readline()) == signal.SIGKILL
            root = folder / "checkpoints"
            partial += any(p.name.startswith(".") for p in root.iterdir()) if root.is_dir() else 0
            good = [c for c in list_checkpoints(root) if problem(c) is None]
            assert len(good) == len(list_checkpoints(root))  # whole, or not there
            steps = [step_of(c) for c in good]
            assert not reached or max(steps) >= reached[-1]
            reached += steps[-1:]
            assert not (folder / "student").exists()
        assert reached and reached[-1] >= 5, (reached, partial)
        total = reached[-1] + 2
        results = {}
        for name in ("killed", "whole"):
            output = str(tmp_path / name)
            last = build(world, output, "crossdistill", training | {"num_steps": total}, dmd={"critic_updates": 1},
                         pcm={"solver_steps": 10})  # fmt: skip
            save_file(last, tmp_path / f"{name}-end.toml")
            start(tmp_path / f"{name}-end.toml")
            assert int(nursery.stdout.readline()) == 0
            newest = newest_checkpoint(tmp_path / name / "checkpoints")
            assert step_of(newest) == total
            results[name] = {p.name: load_file(p) for p in newest.glob("*.safetensors")}
            assert (tmp_path / name / "student" / "model_index.json").is_file()
        nursery.stdin.close()
    assert results["killed"].keys() == results["whole"].keys() >= {"critic-optimizer.safetensors"}
    for name in set(results["whole"]) - {"random-0.safetensors"}:  # of the process, and used by nothing in a run
        for key, value in results["whole"][name].items():
            assert torch.equal(value, results["killed"][name][key]), (name, key)
