"""The flow's formulas, guidance, first frames, and draws that depend on nothing but their names."""

import pytest
import torch

from videospark.core.config import ConfigError
from videospark.distill.draws import Draws
from videospark.distill.flow import (
    TwoScales,
    add_noise,
    euler_step,
    guided_velocity,
    levels,
    shift_time,
    solve,
    unshift_time,
)
from videospark.distill.method import teacher_guidance


@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0, 12.0])
def test_the_shift_and_its_inverse(shift):
    times = torch.linspace(0, 1, 101, dtype=torch.float64)
    sigmas = shift_time(times, shift)
    assert torch.allclose(unshift_time(sigmas, shift), times, atol=1e-12)
    assert (sigmas >= times - 1e-12).all()
    # Known values: half time is at shift / (1 + shift).
    assert float(sigmas[50]) == pytest.approx(shift / (1 + shift))


def test_an_euler_step_along_the_true_velocity_goes_from_noise_to_data():
    clean, noise = torch.randn(2, 3, 1, 4, 2, 2, generator=torch.Generator().manual_seed(0)).unbind(0)
    sigma = torch.tensor([0.9, 0.4, 0.1])
    noisy = add_noise(clean, noise, sigma)
    assert torch.allclose(euler_step(noisy, noise - clean, sigma, torch.zeros(3)), clean, atol=1e-5)
    assert torch.allclose(euler_step(noisy, noise - clean, sigma, torch.ones(3)), noise, atol=1e-5)


def test_guidance_moves_the_mean_beyond_the_prompt(toy):
    batch = toy.batch(4)
    sigma, field = torch.full((4,), 0.7), toy.GaussianField()
    guided = guided_velocity(field, batch.latents, sigma, batch.condition, 3.0)
    expected = toy.GaussianField(mean=toy.guided_mean)(batch.latents, sigma, batch.condition)
    assert torch.allclose(guided, expected, atol=1e-6)
    field.calls.clear()
    guided_velocity(field, batch.latents, sigma, batch.condition, 1.0)
    assert len(field.calls) == 1


def test_two_experts_have_scales_of_their_own(toy):
    batch, field = toy.batch(4), toy.GaussianField()
    sigma = torch.tensor([0.9, 0.7, 0.7, 0.3])
    both = guided_velocity(field, batch.latents, sigma, batch.condition, TwoScales(4.0, 3.0, boundary=0.7))
    high, low = (guided_velocity(field, batch.latents, sigma, batch.condition, scale) for scale in (4.0, 3.0))
    assert torch.equal(both[:3], high[:3]) and torch.equal(both[3:], low[3:]) and not torch.equal(high, low)
    assert teacher_guidance(4.0, 3.0, 0.7) == TwoScales(4.0, 3.0, 0.7)
    assert teacher_guidance(4.0, None, 0.7) == 4.0
    with pytest.raises(ConfigError, match="guidance_scale_2: got 3.0; must be left out"):
        teacher_guidance(4.0, 3.0, None)


def test_solving_the_flow_gives_the_guided_distribution(toy):
    batch = toy.batch(512)
    sigmas = [shift_time(1 - i / 200, 5.0) for i in range(201)]
    end = solve(toy.GaussianField(), batch.noise("x"), sigmas, batch.condition, 3.0)
    assert float(end.mean()) == pytest.approx(toy.guided_mean, abs=0.03)
    assert float(end.std()) == pytest.approx(toy.std, abs=0.03)


def test_given_first_frames_are_held_and_do_not_move(toy):
    batch = toy.batch(4, first_frames=True)
    noise = batch.noise("x")
    held = batch.condition.hold(noise)
    assert torch.equal(held[::2, :, :1], batch.latents[::2, :, :1])
    assert torch.equal(held[1::2], noise[1::2]) and torch.equal(held[:, :, 1:], noise[:, :, 1:])
    still = batch.condition.still(noise)
    assert not still[::2, :, :1].any() and torch.equal(still[1::2], noise[1::2])
    assert torch.equal(levels(0.3, noise), torch.full((4,), 0.3))


def test_draws_depend_on_seed_sample_and_name_alone():
    together = Draws(3, [5, 6, 7])
    apart = Draws(3, [6])
    assert torch.equal(together.normal("a", (2, 3))[1], apart.normal("a", (2, 3))[0])
    assert torch.equal(together.uniform("a")[1], apart.uniform("a")[0])
    assert not torch.equal(apart.normal("a", (2,)), apart.normal("b", (2,)))
    assert not torch.equal(apart.normal("a", (2,)), Draws(4, [6]).normal("a", (2,)))
    uniform = Draws(0, range(4000)).uniform("u", 2.0, 4.0)
    assert uniform.min() >= 2 and uniform.max() < 4 and float(uniform.mean()) == pytest.approx(3.0, abs=0.05)
