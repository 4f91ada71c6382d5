"""Distribution matching where student, critic and teacher are normal distributions."""

import pytest
import torch

from videospark.core.config import ConfigError
from videospark.distill.config_methods import DMDConfig
from videospark.distill.flow import unshift_time
from videospark.distill.method import Roles
from videospark.distill.methods.dmd import DMD, DistributionMatching

KNOTS = (0.999, 0.85, 0.5, 0.0)
SHIFT, GUIDANCE = 5.0, 3.0


def matching(knots=KNOTS, **settings):
    return DistributionMatching(knots, SHIFT, GUIDANCE, DMDConfig(**settings))


def train(parameters, loss, steps=100, lr=0.07, size=64, toy=None):
    optimizer = torch.optim.Adam(parameters, lr=lr)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = lr * (1 - step / steps)
        optimizer.zero_grad()
        loss(toy.batch(size, first=size * step)).backward()
        optimizer.step()


@pytest.mark.parametrize("form, step", [("dmd", 1), ("tdm", 1), ("tdm", 2), ("tdm", 3)])
def test_the_student_finds_the_guided_distribution(toy, form, step):
    """With a perfect critic, N(mean, spread^2) must become what the guided teacher has at the end level."""
    losses = matching(form=form)
    start, end = KNOTS[step - 1], losses.end_level(step)
    mean, spread = (torch.tensor(v, requires_grad=True) for v in (0.0, 1.0))

    def loss(batch):
        critic = toy.NoisedField(end, mean.detach(), spread.detach())
        roles = Roles(toy.StepField(start, end, mean, spread), toy.GaussianField(), critic)
        # The step's input is standard normal here, so its output is N(mean, spread^2).
        return losses.student_loss(roles, batch, step, batch.noise("start")).value

    train([mean, spread], loss, toy=toy)
    assert mean.item() == pytest.approx((1 - end) * toy.guided_mean, abs=0.08)
    assert abs(spread.item()) == pytest.approx(((1 - end) ** 2 * toy.std**2 + end**2) ** 0.5, abs=0.08)


@pytest.mark.parametrize("form, step", [("dmd", 1), ("tdm", 1), ("tdm", 3)])
def test_a_right_student_has_no_gradient(toy, form, step):
    losses = matching(form=form)
    end = losses.end_level(step)
    mean, spread = (1 - end) * toy.guided_mean, ((1 - end) ** 2 * toy.std**2 + end**2) ** 0.5
    fields = toy.StepField(KNOTS[step - 1], end, mean, spread), toy.GaussianField(), toy.NoisedField(end, mean, spread)
    batch = toy.batch(64)
    loss = losses.student_loss(Roles(*fields), batch, step, batch.noise("start"))
    assert float(loss.parts["dmd_gradient"]) < 1e-3
    unguided = toy.NoisedField(end, (1 - end) * toy.mean, spread)
    other = losses.student_loss(Roles(fields[0], fields[1], unguided), batch, step, batch.noise("start"))
    assert float(other.parts["dmd_gradient"]) > 0.02


@pytest.mark.parametrize("form, step", [("dmd", 2), ("tdm", 1), ("tdm", 2), ("tdm", 3)])
def test_the_critic_finds_the_students_distribution(toy, form, step):
    losses = matching(form=form)
    end = losses.end_level(step)
    student = toy.StepField(KNOTS[step - 1], end, 0.7, 0.9)
    mean, spread = (torch.tensor(v, requires_grad=True) for v in (0.0, 1.3))

    def loss(batch):
        roles = Roles(student, None, toy.NoisedField(end, mean, spread))
        return losses.critic_loss(roles, batch, step, batch.noise("start")).value

    train([mean, spread], loss, size=128, toy=toy)
    assert mean.item() == pytest.approx(0.7, abs=0.06)
    assert abs(spread.item()) == pytest.approx(0.9, abs=0.06)


def test_from_clean_samples_the_critic_learns_by_flow_matching(toy):
    losses = matching(form="dmd")
    seen = {}

    def critic(latents, sigma, condition):
        seen.update(latents=latents, sigma=sigma)
        return torch.zeros_like(latents)

    batch = toy.batch(16)
    student = toy.StepField(KNOTS[0], 0.0, 0.2, 0.5)
    loss = losses.critic_loss(Roles(student, None, critic), batch, 1, batch.noise("start")).value
    sample = 0.2 + 0.5 * batch.noise("start")
    noise = batch.noise("critic-noise")
    assert float(loss) == pytest.approx(float((noise - sample).square().mean()), rel=1e-4)
    s = seen["sigma"].view(-1, 1, 1, 1, 1)
    assert torch.allclose(seen["latents"], (1 - s) * sample + s * noise, atol=1e-5)


@pytest.mark.parametrize("end", [0.0, 0.5, 0.85])
def test_noising_further_keeps_the_law_and_resamples_the_time(toy, end):
    losses, batch = matching(), toy.batch(3000)
    noise = batch.noise("n")
    at_end = (1 - end) * batch.latents + end * noise
    noisy, sigma, _, spread = losses.noise_further(batch, at_end, end, "x", 1)
    s = sigma.view(-1, 1, 1, 1, 1)
    standard = (noisy - (1 - s) * toy.mean) / ((1 - s) ** 2 * toy.std**2 + s**2).sqrt()
    assert float(standard.mean()) == pytest.approx(0, abs=0.03)
    assert float(standard.std()) == pytest.approx(1, abs=0.03)
    assert (sigma > end).all() and (spread > 0).all()
    low = max(unshift_time(end, SHIFT), 0.02)
    share = (unshift_time(sigma.double(), SHIFT) - low) / (0.98 - low)
    for quantile in (0.1, 0.5, 0.9):  # a clamp would heap them up at the bottom
        assert float((share < quantile).double().mean()) == pytest.approx(quantile, abs=0.04)


def test_the_rollout_is_the_students_own_euler_path(toy):
    batch, student = toy.batch(8), toy.TrajectoryField(KNOTS, toy.guided_mean)
    state = matching().rollout(Roles(student, None), batch, 0, 2)
    x = batch.noise("dmd-start")
    for s, t in ((0.999, 0.85), (0.85, 0.5)):
        x = x + (t - s) * student(x, torch.full((8,), s), batch.condition)
    assert torch.allclose(state, x, atol=1e-6)
    assert not any(grad for _, grad in student.calls[:2])
    start = batch.noise("other")
    assert torch.equal(matching().rollout(Roles(student, None), batch, 1, 1, start), start)


def test_stochastic_steps_noise_the_clean_prediction_again(toy):
    batch = toy.batch(2000)
    student = toy.GaussianField(mean=toy.mean)
    state = matching(form="dmd", stochastic=True).rollout(Roles(student, None), batch, 0, 1)
    x, noise = batch.noise("dmd-start"), batch.noise("dmd-renoise-0")
    clean = x - 0.999 * student(x, torch.full((2000,), 0.999), batch.condition)
    assert torch.allclose(state, 0.15 * clean + 0.85 * noise, atol=1e-5)


def test_a_rollout_critic_sees_clean_samples_of_all_steps(toy):
    student = toy.TrajectoryField(KNOTS, toy.guided_mean)
    losses, batch = matching(critic_target="rollout"), toy.batch(8)
    losses.critic_loss(Roles(student, None, toy.GaussianField()), batch, 1)
    assert [round(float(s[0]), 3) for s, _ in student.calls] == [0.999, 0.85, 0.5]
    student.calls.clear()
    losses.critic_loss(Roles(student, None, toy.GaussianField()), batch, 3, batch.noise("s"))
    assert [round(float(s[0]), 3) for s, _ in student.calls] == [0.5]


def test_only_the_last_step_has_a_gradient_and_every_step_has_its_turn(toy):
    method = DMD(toy.config("dmd", dmd={"critic_updates": 2}), SHIFT)
    assert [method.updates(i)[0] for i in range(6)] == ["critic", "critic", "student"] * 2
    visited = {"student": set(), "critic": set()}
    for step in range(18):
        (role,) = method.updates(step)
        student, teacher, critic = toy.TrajectoryField(KNOTS, 0.1), toy.GaussianField(), toy.GaussianField(mean=0.0)
        method.loss(role, Roles(student, teacher, critic), toy.batch(2), step)
        graded = [float(s[0]) for s, grad in student.calls if grad]
        assert not any(grad for _, grad in teacher.calls)
        assert any(grad for _, grad in critic.calls) == (role == "critic")
        if role == "student":
            assert len(graded) == 1 and graded[0] == pytest.approx(float(student.calls[-1][0][0]))
        else:
            assert not graded
        visited[role].add(round(float(student.calls[-1][0][0]), 3))
    assert visited["student"] == visited["critic"] == {0.999, 0.85, 0.5}


def test_a_knot_above_the_range_of_times_is_refused():
    with pytest.raises(ConfigError, match="dmd.max_time"):
        matching((0.9999, 0.997, 0.0))


def test_first_frames_take_no_part(toy):
    batch = toy.batch(4, first_frames=True)

    def field(latents, sigma, condition):
        return condition.still(torch.ones_like(latents))

    loss = matching(form="dmd").critic_loss(Roles(field, None, field), batch, 1)
    assert torch.isfinite(loss.value)
    offset = torch.zeros(4, 1, 2, 2, 2, requires_grad=True)

    def student(latents, sigma, condition):
        return condition.still(torch.zeros_like(latents) + offset)

    matching(form="dmd").student_loss(
        Roles(student, toy.GaussianField(), lambda *a: 0 * a[0]), batch, 1, batch.noise("s")
    ).value.backward()
    assert not offset.grad[::2, :, :1].any() and offset.grad[1::2].all()


@pytest.mark.parametrize("form", ["dmd", "tdm"])
def test_two_experts_are_scored_at_their_own_levels(toy, form):
    """Steps from 0.999 and 0.85 belong to the expert above 0.8, the one from 0.5 to the other."""
    boundary = 0.8
    config = toy.config("dmd", dmd={"form": form})
    method = DMD(config, SHIFT, boundary)
    batch = toy.batch(4000)
    for step, high in ((1, True), (2, True), (3, False)):
        end = method.matching.end_level(step)
        _, sigma, _, spread = method.matching.noise_further(batch, batch.latents, end, "x", step)
        assert (sigma.double() >= boundary).all() if high else (sigma.double() < boundary).all()
        assert (sigma > end).all() and (spread > 0).all()
        low, top = method.matching.time_range(step, end)
        share = (unshift_time(sigma.double(), SHIFT) - low) / (top - low)
        assert float((share < 0.5).double().mean()) == pytest.approx(0.5, abs=0.04)
    asked = []

    def remember(latents, sigma, condition):
        asked.append(bool((sigma >= boundary).all()))
        return toy.GaussianField()(latents, sigma, condition)

    for step, high in ((1, True), (3, False)):
        asked.clear()
        start = batch.noise("dmd-start")
        method.matching.student_loss(Roles(toy.GaussianField(), remember, remember), batch, step, start)
        assert asked == [high] * 3  # guided teacher twice, critic once
    whole = DMD(toy.config("dmd", dmd={"form": form, "noise_range": "whole"}), SHIFT, boundary)
    plain = DMD(config, SHIFT)
    for other in (whole, plain):
        sigma = other.matching.noise_further(batch, batch.latents, 0.0, "x", 3)[1]
        assert (sigma > boundary).any() and (sigma < boundary).any()


def test_an_expert_without_levels_to_be_scored_at_is_refused(toy):
    config = toy.config("dmd", dmd={"form": "dmd", "max_time": 0.5})
    with pytest.raises(ConfigError, match="dmd.min_time and max_time"):
        DMD(config, SHIFT, 0.99)
