"""Checkpoints: complete or absent, the newest good one, pruning, and being killed at any moment."""

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from videospark.distill.checkpoints import (
    MARKER,
    list_checkpoints,
    newest_checkpoint,
    problem,
    prune_checkpoints,
    step_of,
    write_checkpoint,
)


def writer(text):
    def write(folder):
        (folder / "weights.bin").write_text(text)
        (folder / "state.json").write_text("{}")

    return write


def test_a_written_checkpoint_is_good_and_found(tmp_path):
    for step in (1, 10, 2):
        write_checkpoint(tmp_path, step, writer(f"at {step}"))
    newest = newest_checkpoint(tmp_path)
    assert step_of(newest) == 10
    assert (newest / "weights.bin").read_text() == "at 10"
    assert [step_of(p) for p in list_checkpoints(tmp_path)] == [1, 2, 10]


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    def broken(folder):
        (folder / "weights.bin").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_checkpoint(tmp_path, 3, broken)
    assert list(tmp_path.iterdir()) == []
    assert newest_checkpoint(tmp_path) is None


def damage_marker(folder):
    (folder / MARKER).unlink()


def damage_byte(folder):
    (folder / "weights.bin").write_text("at 9")  # same length, other content


def damage_length(folder):
    (folder / "weights.bin").write_text("at")


def damage_missing(folder):
    (folder / "state.json").unlink()


def damage_half_marker(folder):
    text = (folder / MARKER).read_text()
    (folder / MARKER).write_text(text[: len(text) // 2])


DAMAGES = [damage_marker, damage_byte, damage_length, damage_missing, damage_half_marker]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path, damage):
    write_checkpoint(tmp_path, 1, writer("at 1"))
    damage(write_checkpoint(tmp_path, 2, writer("at 2")))
    with pytest.warns(UserWarning, match="step-00000002 is passed over"):
        assert step_of(newest_checkpoint(tmp_path)) == 1


@pytest.mark.parametrize("damage", DAMAGES)
def test_pruning_never_deletes_the_only_good_one(tmp_path, damage):
    write_checkpoint(tmp_path, 1, writer("at 1"))
    for step in (2, 3):
        damage(write_checkpoint(tmp_path, step, writer(f"at {step}")))
    assert prune_checkpoints(tmp_path, 1) == []
    assert problem(tmp_path / "step-00000001") is None
    write_checkpoint(tmp_path, 4, writer("at 4"))
    prune_checkpoints(tmp_path, 1)
    assert [step_of(p) for p in list_checkpoints(tmp_path)] == [4]


def test_pruning_keeps_as_many_good_ones_as_asked(tmp_path):
    for step in range(1, 6):
        write_checkpoint(tmp_path, step, writer(f"at {step}"))
    prune_checkpoints(tmp_path, 2)
    assert [step_of(p) for p in list_checkpoints(tmp_path)] == [4, 5]


def test_a_damaged_checkpoint_of_the_same_step_is_written_anew_and_a_good_one_stays(tmp_path):
    folder = write_checkpoint(tmp_path, 2, writer("at 2"))
    write_checkpoint(tmp_path, 2, writer("else"))
    assert (folder / "weights.bin").read_text() == "at 2"
    damage_length(folder)
    write_checkpoint(tmp_path, 2, writer("else"))
    assert problem(folder) is None and (folder / "weights.bin").read_text() == "else"


KILLED = """
import sys
from pathlib import Path
from videospark.distill.checkpoints import prune_checkpoints, write_checkpoint
root, step = Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
while True:
    step += 1
    def write(folder):
        for name in "abc":
            (folder / name).write_bytes(step.to_bytes(8, "big") * 40000)
    write_checkpoint(root, step, write)
    prune_checkpoints(root, 2)
"""


def test_killing_the_writer_at_random_moments_breaks_nothing(tmp_path):
    rng = random.Random(0)
    step = 0
    for _ in range(20):
        process = subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path), str(step)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout.readline() == "ready\n"
        time.sleep(0.02 + 0.06 * rng.random())
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
        newest = newest_checkpoint(tmp_path)
        if newest is None:
            assert step == 0
            continue
        assert step_of(newest) >= step
        step = step_of(newest)
        assert (newest / "b").read_bytes()[:8] == step.to_bytes(8, "big")
    assert step > 0
