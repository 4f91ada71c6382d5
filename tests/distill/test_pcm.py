"""Phased consistency where the teacher's trajectories are known in closed form."""

from itertools import pairwise

import pytest
import torch

from videospark.distill.config_methods import PCMConfig
from videospark.distill.flow import unshift_time
from videospark.distill.method import Roles
from videospark.distill.methods.pcm import PCM, PhasedConsistency

KNOTS = (0.999, 0.85, 0.5, 0.0)
SHIFT, GUIDANCE = 5.0, 3.0


def consistency(phases=range(3), **settings):
    return PhasedConsistency(KNOTS, phases, SHIFT, GUIDANCE, PCMConfig(**{"solver_steps": 400} | settings))


def test_the_guided_trajectory_is_consistent_and_nothing_else_is(toy):
    batch, loss = toy.batch(256), consistency()
    right = float(loss(Roles(toy.TrajectoryField(KNOTS, toy.guided_mean), toy.GaussianField()), batch))
    wrong = {
        "no guidance": toy.TrajectoryField(KNOTS, toy.mean),
        "guidance counted from zero": toy.TrajectoryField(KNOTS, 3.0 * toy.mean),
        "guidance w + 1": toy.TrajectoryField(KNOTS, toy.guided_mean + toy.mean - toy.negative_mean),
        "another spread": toy.TrajectoryField(KNOTS, toy.guided_mean, std=0.7),
        "one phase for all": toy.TrajectoryField((0.999, 0.0), toy.guided_mean),
        "velocity of a point, not of a step": toy.GaussianField(mean=toy.guided_mean),
    }
    for name, field in wrong.items():
        assert float(loss(Roles(field, toy.GaussianField()), batch)) > 30 * right, name


def test_training_finds_the_guided_mean(toy):
    mean = torch.tensor(0.0, requires_grad=True)
    optimizer = torch.optim.Adam([mean], lr=0.08)
    loss = consistency(solver_steps=100)
    for step in range(150):
        optimizer.param_groups[0]["lr"] = 0.08 * (1 - step / 150)
        value = loss(Roles(toy.TrajectoryField(KNOTS, mean), toy.GaussianField()), toy.batch(32, first=32 * step))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    assert mean.item() == pytest.approx(toy.guided_mean, abs=0.1)


def test_steps_are_of_equal_unshifted_time_and_end_at_the_edge(toy):
    sigma, following, edge = consistency(solver_steps=20).draw_levels(toy.batch(2000))
    expected = [max(k for k in KNOTS if k < float(s)) for s in sigma]
    assert torch.allclose(edge, torch.tensor(expected))
    assert (following >= edge).all() and (following < sigma).all()
    length = unshift_time(sigma.double(), SHIFT) - unshift_time(following.double(), SHIFT)
    whole = following > edge
    assert torch.allclose(length[whole], torch.tensor(1 / 20, dtype=torch.float64), atol=1e-4)
    assert (length[~whole] <= 1 / 20 + 1e-4).all() and (~whole).any()
    # Uniform in unshifted time from 0 to the top.
    time = unshift_time(sigma.double(), SHIFT)
    top = unshift_time(KNOTS[0], SHIFT)
    for share in (0.25, 0.5, 0.75):
        assert float((time < share * top).double().mean()) == pytest.approx(share, abs=0.04)


def test_only_the_chosen_phases_are_trained(toy):
    for phases in (range(0, 1), range(1, 3), range(0, 2)):
        sigma, following, edge = consistency(phases).draw_levels(toy.batch(500))
        low, high = KNOTS[phases[-1] + 1], KNOTS[phases[0]]
        assert (sigma > low).all() and (sigma <= high + 1e-6).all()
        assert (edge >= low).all() and (following >= low).all()
    with pytest.raises(ValueError, match="phases"):
        consistency(range(2, 4))


def test_the_top_of_the_phases(toy):
    sigma, _, edge = consistency(start="top").draw_levels(toy.batch(300))
    assert torch.allclose(sigma.unique(), torch.tensor(sorted(KNOTS[:3])), atol=1e-6)
    assert torch.allclose(edge.unique(), torch.tensor(sorted(KNOTS[1:])))


def test_the_target_has_no_gradient_and_may_be_the_average(toy):
    student, average = toy.TrajectoryField(KNOTS, 0.3), toy.TrajectoryField(KNOTS, toy.guided_mean)
    batch = toy.batch(32)
    roles = Roles(student, toy.GaussianField(), average=average)
    online = float(consistency()(roles, batch))
    assert [grad for _, grad in student.calls] == [False, True] and not average.calls
    student.calls.clear()
    averaged = float(consistency(target="ema")(roles, batch))
    assert [grad for _, grad in student.calls] == [True]
    assert [grad for _, grad in average.calls] == [False]
    assert averaged != online


def test_the_pseudo_huber_distance(toy):
    roles = Roles(toy.TrajectoryField(KNOTS, 0.0), toy.GaussianField())
    squared, huber = (float(consistency(loss=k, huber_c=c)(roles, toy.batch(64))) for k, c in
                      (("squared", 1e-3), ("pseudo_huber", 1.0)))  # fmt: skip
    # Far below c it is half the square over c.
    assert huber * 2 == pytest.approx(squared, rel=0.2)


def test_the_method_trains_every_phase(toy):
    method = PCM(toy.config("pcm"), SHIFT)
    assert method.updates(0) == ("student",) and method.provides == ("few-step",)
    student = toy.TrajectoryField(KNOTS, 0.0)
    method.loss("student", Roles(student, toy.GaussianField()), toy.batch(200), 0)
    with_gradient = torch.cat([s for s, grad in student.calls if grad])
    inside = [(with_gradient > low) & (with_gradient <= high + 1e-6) for high, low in pairwise(KNOTS)]
    counts = [int(phase.sum()) for phase in inside]
    assert min(counts) > 10 and sum(counts) == 200
