"""The warm-up's loss on data whose velocity is known, its noise levels, its ramp and its stopping rule."""

import math
from types import SimpleNamespace

import pytest
import torch

from videospark.distill.method import Roles
from videospark.distill.methods.sparse_warmup import SparseWarmup

SHIFT = 5.0


def warmup(toy, training=None, **settings):
    return SparseWarmup(toy.config("sparse_warmup", sparse_warmup=settings, training=training or {}), SHIFT)


def test_velocity_matching_is_zero_at_the_teacher_and_only_there(toy):
    method, batch, teacher = warmup(toy), toy.batch(64), toy.GaussianField()
    assert float(method.loss("student", Roles(teacher, teacher), batch, 0).value) == 0.0
    for wrong in (toy.GaussianField(mean=0.0), toy.GaussianField(std=0.6), lambda *a: -teacher(*a)):
        assert float(method.loss("student", Roles(wrong, teacher), batch, 0).value) > 1e-4


def test_flow_matching_has_its_minimum_at_the_true_velocity(toy):
    method, batch, exact = warmup(toy, target="flow"), toy.batch(4096), toy.GaussianField()

    def loss(scale, offset):
        return method.loss("student", Roles(lambda *a: scale * exact(*a) + offset, None), batch, 0).value

    scale, offset = torch.tensor(1.0, requires_grad=True), torch.tensor(0.0, requires_grad=True)
    gradients = torch.autograd.grad(loss(scale, offset), (scale, offset))
    assert all(abs(float(g)) < 0.02 for g in gradients)
    best = float(loss(1.0, 0.0))
    assert all(float(loss(s, o)) > best + 0.005 for s, o in ((0.8, 0), (1.2, 0), (1, 0.2), (1, -0.2), (-1, 0)))


def test_the_teacher_is_asked_without_gradient_and_without_guidance(toy):
    teacher = toy.GaussianField()
    warmup(toy).loss("student", Roles(toy.GaussianField(), teacher), toy.batch(2), 0)
    assert [grad for _, grad in teacher.calls] == [False]


def test_noise_levels_are_logit_normal_then_shifted(toy):
    sigma = warmup(toy, logit_mean=-0.8, logit_std=1.6).draw_sigma(toy.batch(4000)).double()
    unshifted = sigma / (SHIFT - (SHIFT - 1) * sigma)
    logit = torch.log(unshifted / (1 - unshifted))
    assert float(logit.mean()) == pytest.approx(-0.8, abs=0.1)
    assert float(logit.std()) == pytest.approx(1.6, abs=0.1)
    uniform = warmup(toy, sigma_distribution="uniform").draw_sigma(toy.batch(4000))
    # Half of the times lie above 1/2, that is, half of the levels above shift / (1 + shift).
    assert float((uniform > SHIFT / (1 + SHIFT)).float().mean()) == pytest.approx(0.5, abs=0.03)


def test_the_weighting(toy):
    batch, teacher = toy.batch(64), toy.GaussianField()
    off = Roles(lambda *a: teacher(*a) + 1, teacher)  # an error of 1 everywhere
    method = warmup(toy, weighting="trigflow")
    sigma = method.draw_sigma(batch)
    expected = float((sigma**2 + (1 - sigma) ** 2).mean())
    assert float(method.loss("student", off, batch, 0).value) == pytest.approx(expected, rel=1e-5)
    assert float(warmup(toy).loss("student", off, batch, 0).value) == pytest.approx(1.0, rel=1e-5)


def test_alignment_is_the_relative_distance_of_the_layers(toy):
    method, teacher = warmup(toy, alignment_weight=2.0), toy.GaussianField()
    features = {
        "student": SimpleNamespace(outputs={0: torch.full((2, 3), 1.5), 1: torch.full((2, 3), 2.0)}),
        "teacher": SimpleNamespace(outputs={0: torch.ones(2, 3), 1: torch.full((2, 3), 2.0)}),
    }
    loss = method.loss("student", Roles(teacher, teacher, features=features), toy.batch(2), 0)
    assert float(loss.parts["alignment"]) == pytest.approx(0.125)
    assert float(loss.value) == pytest.approx(0.25)
    features["student"].outputs.pop(1)
    with pytest.raises(RuntimeError, match="alignment"):
        method.loss("student", Roles(teacher, teacher, features=features), toy.batch(2), 0)


def test_first_frames_are_not_scored(toy):
    batch = toy.batch(4, first_frames=True)
    method = warmup(toy, target="flow")

    def student(latents, sigma, condition):  # off by one where a frame is scored
        noise = batch.noise("noise")
        return condition.still(noise - batch.latents + 1)

    # 2 of 4 clips hold one of their 2 frames.
    assert float(method.loss("student", Roles(student, None), batch, 0).value) == pytest.approx(0.75)


def test_the_keep_ratio_falls_linearly_and_stays(toy):
    method = warmup(toy, {"num_steps": 100}, start_keep_ratio=0.5, ramp_share=0.4)
    assert method.keep_ratio(0) == 0.5
    assert method.keep_ratio(20) == pytest.approx(0.3)
    assert method.keep_ratio(40) == method.keep_ratio(99) == 0.1


def test_training_stops_where_the_slope_is_small_and_remembers_it(toy):
    def run(losses, split=None):
        method = warmup(toy, {"num_steps": 1000}, stop_slope=0.02, stop_window=10, ramp_share=0.01)
        for step, loss in enumerate(losses):
            if step == split:
                state, method = (
                    method.state_dict(),
                    warmup(toy, {"num_steps": 1000}, stop_slope=0.02, stop_window=10, ramp_share=0.01),
                )
                method.load_state_dict(state)
            if method.observe(step, {"student": loss}):
                return step
        return None

    falling = [math.exp(-step / 100) for step in range(1000)]
    assert run(falling) is None
    flat = [max(loss, 0.5) for loss in falling]
    stopped = run(flat)
    assert 70 < stopped < 110
    assert run(flat, split=55) == stopped
    assert run([0.0] * 10) is None  # the ramp's steps are not counted
