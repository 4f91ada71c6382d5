"""Which loss trains which part of the noise axis, for every crossover, order, mode and coupling."""

import pytest
import torch

from videospark.distill.method import Roles
from videospark.distill.methods.crossdistill import CrossDistill
from videospark.distill.methods.dmd import DMD
from videospark.distill.methods.pcm import PCM

KNOTS = (0.999, 0.85, 0.5, 0.0)
SHIFT = 5.0


def cross(toy, dmd=None, training=None, **settings):
    config = toy.config("crossdistill", crossdistill=settings, dmd=dmd or {}, training=training or {})
    return CrossDistill(config, SHIFT)


def fields(toy, mean=0.2):
    student = toy.TrajectoryField(KNOTS, torch.tensor(mean, requires_grad=True))
    return Roles(student, toy.GaussianField(), toy.GaussianField(mean=0.0))


def trained_levels(toy, method, steps=30, size=40):
    """Noise levels at which the student had a gradient, one [size] tensor a call, over the updates of the student."""
    found = []
    for step in range(steps):
        if "student" in method.updates(step):
            roles = fields(toy)
            method.loss("student", roles, toy.batch(size), step)
            found += [sigma for sigma, grad in roles.student.calls if grad]
    return found


def is_knot(sigma):
    """A DMD step has one level for the whole batch."""
    return bool((sigma == sigma[0]).all())


def test_crossover_0_is_dmd_alone(toy):
    method, plain = cross(toy, crossover=0), DMD(toy.config("dmd"), SHIFT)
    assert method.trained_roles == plain.trained_roles
    for step in range(12):
        (role,) = plain.updates(step)
        assert method.updates(step) == (role,)
        ours, theirs = (m.loss(role, fields(toy), toy.batch(8), step) for m in (method, plain))
        assert torch.equal(ours.value, theirs.value) and ours.parts.keys() == theirs.parts.keys()


def test_the_last_crossover_is_pcm_alone(toy):
    method, plain = cross(toy, crossover=3), PCM(toy.config("pcm"), SHIFT)
    assert method.trained_roles == ("student",)
    for step in range(4):
        assert method.updates(step) == ("student",)
        roles = fields(toy)
        assert torch.equal(
            method.loss("student", roles, toy.batch(8), step).value,
            plain.loss("student", roles, toy.batch(8), step).value,
        )


@pytest.mark.parametrize("crossover", [1, 2])
def test_trajectory_above_and_distribution_below(toy, crossover):
    levels = trained_levels(toy, cross(toy, crossover=crossover))
    matched = {round(float(s[0]), 3) for s in levels if is_knot(s)}
    assert matched == {round(k, 3) for k in KNOTS[crossover:3]}
    phased = torch.cat([s for s in levels if not is_knot(s)])
    assert (phased > KNOTS[crossover]).all() and (phased <= KNOTS[0] + 1e-6).all()


@pytest.mark.parametrize("crossover", [1, 2])
def test_the_reversed_order(toy, crossover):
    levels = trained_levels(toy, cross(toy, crossover=crossover, order="reversed"))
    matched = {round(float(s[0]), 3) for s in levels if is_knot(s)}
    assert matched == {round(k, 3) for k in KNOTS[:crossover]}
    phased = torch.cat([s for s in levels if not is_knot(s)])
    assert (phased <= KNOTS[crossover] + 1e-6).all()


def test_reversed_ends_are_the_other_method(toy):
    assert cross(toy, crossover=0, order="reversed").trained_roles == ("student",)
    assert cross(toy, crossover=3, order="reversed").consistency is None


def test_the_joint_loss_is_the_weighted_sum(toy):
    method = cross(toy, dmd={"critic_updates": 1}, crossover=1, pcm_weight=7.0)
    loss = method.loss("student", fields(toy), toy.batch(8), 1)
    assert loss.value.item() == pytest.approx(float(loss.parts["dmd"] + 7.0 * loss.parts["pcm"]), rel=1e-6)


def test_staged_is_pcm_first_and_dmd_afterwards(toy):
    options = {"crossover": 1, "mode": "staged", "staged_steps": 6}
    method = cross(toy, dmd={"critic_updates": 1}, training={"num_steps": 20}, **options)
    assert [method.updates(i)[0] for i in range(10)] == ["student"] * 6 + ["critic", "student"] * 2
    assert set(method.loss("student", fields(toy), toy.batch(8), 3).parts) == {"pcm"}
    assert set(method.loss("student", fields(toy), toy.batch(8), 7).parts) == {"dmd", "dmd_gradient"}
    kept = cross(toy, training={"num_steps": 20}, staged_pcm_weight=0.5, **options)
    assert "pcm" in kept.loss("student", fields(toy), toy.batch(8), 10).parts


def test_the_lower_steps_start_from_the_students_own_state(toy):
    batch, roles = toy.batch(400), fields(toy, mean=-0.5)
    state = cross(toy, crossover=1)._start(roles, batch, 2)
    x = batch.noise("dmd-start")
    own = x + (0.85 - 0.999) * roles.student(x, torch.full((400,), 0.999), batch.condition)
    assert torch.allclose(state, own, atol=1e-6) and not state.requires_grad


@pytest.mark.parametrize("coupling", ["teacher", "data"])
def test_decoupled_lower_steps_start_from_elsewhere(toy, coupling):
    batch, roles = toy.batch(800), fields(toy, mean=-0.5)
    method = cross(toy, crossover=1, coupling=coupling)
    state = method._start(roles, batch, 2)
    assert not roles.student.calls
    mean = toy.guided_mean if coupling == "teacher" else toy.mean
    assert float(state.mean()) == pytest.approx(0.15 * mean, abs=0.04)
    assert float(state.std()) == pytest.approx((0.15**2 * toy.std**2 + 0.85**2) ** 0.5, abs=0.04)
    method._start(roles, batch, 3)
    assert [round(float(s[0]), 3) for s, _ in roles.student.calls] == [0.85]


def test_the_critic_learns_from_the_lower_steps_alone(toy):
    method, last = cross(toy, crossover=1), set()
    for step in range(12):
        if method.updates(step) == ("critic",):
            roles = fields(toy)
            method.loss("critic", roles, toy.batch(2), step)
            assert not any(grad for _, grad in roles.student.calls)
            last.add(round(float(roles.student.calls[-1][0][0]), 3))
    assert last == {0.85, 0.5}
