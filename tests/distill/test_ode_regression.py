"""ODE regression: the solver against exact trajectories, the loss, stored trajectories, and whole runs on them."""

import dataclasses
import json
import shutil
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file

from videospark.core.config import ConfigError
from videospark.distill.data import PreparedData, TeacherSampling
from videospark.distill.flow import euler_step, levels, states_at_knots
from videospark.distill.method import Roles
from videospark.distill.methods.ode_regression import ODERegression
from videospark.distill.prepare import prepare
from videospark.distill.run import run, stock_pipeline
from videospark.distill.sources import ClipSize, SourceItem, clips_from_tiny_world

KNOTS, SHIFT = (0.999, 0.85, 0.5, 0.0), 5.0
SIGMAS = (0.999, 0.9, 0.6)
SIZE = ClipSize(height=64, width=64, num_frames=5)


def exact_states(toy, noise):
    """By one step of the perfect student from knot to knot."""
    student, states = toy.TrajectoryField(KNOTS, toy.guided_mean), [noise]
    for start, end in pairwise(KNOTS):
        velocity = student(states[-1], levels(start, noise), None)
        states.append(euler_step(states[-1], velocity, levels(start, noise), levels(end, noise)))
    return torch.stack(states, dim=1)


def test_the_solver_follows_the_guided_trajectory_with_second_order(toy):
    batch = toy.batch(64)
    noise = batch.noise("start")
    exact, errors = exact_states(toy, noise), []
    for steps in (4, 8, 16, 32):
        states = states_at_knots(toy.GaussianField(), noise, KNOTS, steps, SHIFT, batch.condition, 3.0)
        assert states.shape == exact.shape and torch.equal(states[:, 0], noise)
        errors.append(float((states - exact).abs().mean()))
    # Halving the steps quarters the error.
    assert all(coarse / fine > 3 for coarse, fine in pairwise(errors[1:]))
    assert errors[-1] < 2e-3 and errors[0] < 0.05


def test_given_first_frames_stay(toy):
    batch = toy.batch(4, first_frames=True)
    states = states_at_knots(toy.GaussianField(), batch.noise("x"), KNOTS, 2, SHIFT, batch.condition, 3.0)
    first = batch.latents[::2, :, :1]
    assert all(torch.equal(states[::2, n, :, :1], first) for n in range(4))
    assert not torch.equal(states[1::2, 3, :, :1], batch.latents[1::2, :, :1])


def with_states(toy, size=32, first=0):
    batch = toy.batch(size, first=first)
    states = exact_states(toy, batch.noise("start"))
    return dataclasses.replace(batch, latents=states[:, -1], states=states)


def test_the_perfect_student_has_no_loss_and_every_step_counts(toy):
    method, batch = ODERegression(toy.config("ode_regression"), SHIFT), with_states(toy, 200)
    student = toy.TrajectoryField(KNOTS, toy.guided_mean)
    assert float(method.loss("student", Roles(student, None), batch, 0).value) < 1e-8
    asked = torch.cat([sigma for sigma, _ in student.calls])
    counts = [int((asked - knot).abs().lt(1e-6).sum()) for knot in KNOTS[:3]]
    assert sum(counts) == 200 and min(counts) > 40
    for wrong in (toy.TrajectoryField(KNOTS, toy.mean), toy.GaussianField(mean=toy.guided_mean)):
        assert float(method.loss("student", Roles(wrong, None), batch, 0).value) > 1e-3


def test_training_finds_the_guided_mean(toy):
    mean, method = torch.tensor(0.0, requires_grad=True), ODERegression(toy.config("ode_regression"), SHIFT)
    optimizer = torch.optim.Adam([mean], lr=0.1)
    for step in range(150):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / 150)
        roles = Roles(toy.TrajectoryField(KNOTS, mean), None)
        loss = method.loss("student", roles, with_states(toy, first=32 * step), step).value
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert mean.item() == pytest.approx(toy.guided_mean, abs=0.1)


@pytest.fixture(scope="module")
def trajectories(world, tmp_path_factory):
    """Twelve trajectories of the random teacher, half of them with a first frame."""
    folder = tmp_path_factory.mktemp("trajectories")
    sampling = TeacherSampling(6, 2.0, sigmas=SIGMAS, image_share=0.5)
    follow(world, clips_from_tiny_world(12, SIZE), folder, sampling)
    return folder


def follow(world, items, folder, sampling, **options):
    pipe = stock_pipeline(str(world / "model"), torch.float32)
    settings = {"source": "tiny-world", "model": str(world / "model"), "size": SIZE, "max_sequence_length": 32}
    return prepare(pipe, items, folder, sampling=sampling, **settings | options)


def test_what_is_stored_leads_from_noise_to_the_clip(world, trajectories):
    data = PreparedData(trajectories)
    assert data.settings.sampling == TeacherSampling(6, 2.0, sigmas=SIGMAS, image_share=0.5)
    states, keeps = data.read_trajectories(range(12))
    assert states.shape == (12, 4, *data.settings.latent_shape) and 2 <= int(keeps.sum()) <= 10
    assert torch.equal(states[:, -1], torch.stack([data.read(i)[0] for i in range(12)]))
    free = states[~keeps]
    assert float(free[:, 0].std()) == pytest.approx(1, abs=0.05)
    assert not torch.equal(free[0, 0], free[1, 0])
    # A given first frame is that of the clip, at every knot.
    pipe = stock_pipeline(str(world / "model"), torch.float32)
    index = int(keeps.nonzero()[0])
    still = torch.from_numpy(clips_from_tiny_world(12, SIZE)[index].frames()[:1]).permute(3, 0, 1, 2)[None]
    with torch.no_grad():
        expected = pipe.vae.encode(still.float() / 127.5 - 1).latent_dist.mode()[0]
    mean, std = (torch.tensor(v).view(-1, 1, 1, 1) for v in (pipe.vae.config.latents_mean, pipe.vae.config.latents_std))
    for knot in range(4):
        assert torch.allclose(states[index, knot, :, :1], (expected - mean) / std, atol=0.03, rtol=0.01)


def test_an_interrupted_preparation_gives_the_same_trajectories(world, trajectories, tmp_path):
    sampling, items = TeacherSampling(6, 2.0, sigmas=SIGMAS, image_share=0.5), clips_from_tiny_world(12, SIZE)
    assert follow(world, items[:5], tmp_path, sampling).made == 5
    assert follow(world, items, tmp_path, sampling).made == 7
    left, right = PreparedData(trajectories), PreparedData(tmp_path)
    assert torch.allclose(left.read_trajectories(range(12))[0], right.read_trajectories(range(12))[0], atol=0.02)
    with pytest.raises(ConfigError, match="sampling"):
        follow(world, items, tmp_path, dataclasses.replace(sampling, guidance_scale=3.0))


def test_parts_fill_one_folder(world, trajectories, tmp_path):
    sampling, items = TeacherSampling(6, 2.0, sigmas=SIGMAS, image_share=0.5), clips_from_tiny_world(12, SIZE)
    for place in (2, 1, 2):  # one again, which has nothing to do
        report = follow(world, items, tmp_path, sampling, part=(place, 2), shard_size=4)
    assert (report.total, report.made) == (12, 0) and len(list(tmp_path.glob("shard-*"))) == 4
    left, right = PreparedData(trajectories), PreparedData(tmp_path)
    assert [i[1] for i in left.items] == [i[1] for i in right.items]
    assert torch.allclose(left.read_trajectories(range(12))[0], right.read_trajectories(range(12))[0], atol=0.02)
    with pytest.raises(ConfigError, match="part"):
        follow(world, items, tmp_path, sampling, part=(3, 2))


def test_what_cannot_be_followed_is_refused(world, tmp_path):
    with pytest.raises(ConfigError, match=r"num_inference_steps: got 7; must be a multiple of 3"):
        TeacherSampling(7, sigmas=SIGMAS)
    with pytest.raises(ConfigError, match="image_share"):
        TeacherSampling(6, image_share=0.5)
    prompts = [SourceItem(f"{i:08d}", "a red circle") for i in range(4)]
    report = follow(world, prompts, tmp_path, TeacherSampling(3, 2.0, sigmas=SIGMAS, image_share=1.0))
    assert report.made == 0 and len(report.bad) == 4 and "starts from a picture" in report.bad[0][1]
    assert follow(world, prompts, tmp_path / "text", TeacherSampling(3, 2.0, sigmas=SIGMAS)).made == 4


TRAINING = {"num_steps": 30, "batch_size": 4, "checkpoint_every": 15, "learning_rate": 2e-3, "ema_decay": 0.0}


def test_thirty_iterations_learn_and_resume(world, trajectories, build, fresh, tmp_path):
    data = {"path": str(trajectories), "image_share": 0.0}
    config = build(world, tmp_path / "whole", "ode_regression", TRAINING, data=data)
    run(config, device="cpu")
    losses = [json.loads(line)["loss/student"] for line in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert len(losses) == 30 and sum(losses[20:]) < 0.9 * sum(losses[:10])
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "step-00000030")
    fresh()
    run(dataclasses.replace(config, output=str(tmp_path / "half")), device="cpu", resume=True)
    left, right = (
        load_file(tmp_path / name / "checkpoints" / "step-00000030" / "student.safetensors")
        for name in ("whole", "half")
    )
    assert all(torch.equal(value, right[key]) for key, value in left.items())
    assert (tmp_path / "whole" / "student" / "videospark_defaults.json").is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"sigmas": [0.999, 0.9]}}, "model.sigmas"),
        ({"model": {"guidance_scale": 3.0}}, "model.guidance_scale"),
        ({"data": {"path": "encoded"}}, "a folder of trajectories"),
    ],
)
def test_other_trajectories_are_refused(world, trajectories, build, tmp_path, changes, message):
    path = changes.pop("data", {"path": str(trajectories)})["path"]
    data = {"path": str(world / "data") if path == "encoded" else path, "image_share": 0.0}
    config = build(world, tmp_path, "ode_regression", TRAINING, data=data, **changes)
    with pytest.raises(ConfigError, match=message):
        run(config, device="cpu")


def test_the_share_of_pictures_belongs_to_the_trajectories(world, build, tmp_path):
    with pytest.raises(ConfigError, match=r"data.image_share: got 0.5; must be 0"):
        build(world, tmp_path, "ode_regression")
