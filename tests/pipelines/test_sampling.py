import pytest
import torch

from videospark.core.config import ConfigError, to_dict
from videospark.pipelines.recipe import preset, preset_names, resolve
from videospark.pipelines.scheduling_few_step import FewStepScheduler
from videospark.pipelines.sizes import check_size

SIGMAS = (0.99, 0.7, 0.2)


def _run(scheduler, generator=None):
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    scheduler.set_timesteps(3)
    for t in scheduler.timesteps:
        x = scheduler.step(torch.sin(3 * x) + t / 1000, t, x, generator=generator, return_dict=False)[0]
    return x


def test_euler_equals_a_loop_by_hand():
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    for s, following in zip(SIGMAS, (*SIGMAS[1:], 0.0), strict=True):
        x = x + (following - s) * (torch.sin(3 * x) + torch.tensor(s))
    torch.testing.assert_close(_run(FewStepScheduler(SIGMAS)), x, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("through_setter", [True, False])
def test_stochastic_equals_a_loop_by_hand(through_setter):
    noise = torch.Generator().manual_seed(5)
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1))
    for s, following in zip(SIGMAS, (*SIGMAS[1:], 0.0), strict=True):
        x = x - s * (torch.sin(3 * x) + torch.tensor(s))
        if following:
            x = (1 - following) * x + following * torch.randn(x.shape, generator=noise)
    scheduler, generator = FewStepScheduler(SIGMAS, stochastic=True), torch.Generator().manual_seed(5)
    if through_setter:
        scheduler.set_generator(generator)
    actual = _run(scheduler, None if through_setter else generator)
    torch.testing.assert_close(actual, x, rtol=1e-5, atol=1e-5)


def test_times_are_the_sigmas_and_dtype_is_kept():
    scheduler = FewStepScheduler(SIGMAS)
    assert scheduler.timesteps.tolist() == pytest.approx([990, 700, 200])
    assert scheduler.sigmas.tolist() == pytest.approx([*SIGMAS, 0])
    x = torch.ones(1, 2, dtype=torch.bfloat16)
    assert scheduler.step(x, scheduler.timesteps[0], x).prev_sample.dtype == torch.bfloat16
    noisy = scheduler.add_noise(torch.ones(1, 2), torch.zeros(1, 2), torch.tensor([250.0]))
    assert noisy.tolist() == [[0.75, 0.75]]


def test_wrong_step_count_names_the_right_one():
    with pytest.raises(ConfigError, match="num_inference_steps: got 50; must be 3"):
        FewStepScheduler(SIGMAS).set_timesteps(50)


@pytest.mark.parametrize("sigmas", [(), (0.5, 0.7), (0.5, 0.5), (1.1, 0.5), (0.5, 0.0)])
def test_bad_sigmas_are_refused(sigmas):
    with pytest.raises(ConfigError, match="sigmas"):
        FewStepScheduler(sigmas)


@pytest.mark.parametrize(("steps", "last"), [(2, 0.933781), (3, 0.852895), (4, 0.608979), (8, 0.297157)])
def test_spark_presets(steps, last):
    sampler = preset(f"spark-{steps}step").sampler
    assert len(sampler.sigmas) == steps == sampler.steps
    assert sampler.sigmas[0] == pytest.approx(0.999375, abs=1e-6)
    assert sampler.sigmas[-1] == last
    assert sampler.guidance_scale == 1.0


@pytest.mark.parametrize("name", preset_names())
def test_presets_survive_plain_data_and_files(name, tmp_path):
    from videospark.core.config import save_file

    assert resolve(to_dict(preset(name))) == preset(name)
    for suffix in (".json", ".toml"):
        save_file(preset(name), tmp_path / f"r{suffix}")
        assert resolve(tmp_path / f"r{suffix}") == preset(name)


def test_unknown_preset_and_shift_twice():
    with pytest.raises(ConfigError, match="did you mean 'sparse-50'"):
        resolve("sparse50")
    with pytest.raises(ConfigError, match=r"flow_shift: got 5\.0; must be left out"):
        resolve({"name": "x", "sampler": {"sigmas": [1.0, 0.5], "flow_shift": 5}})


def test_sizes(pipe):
    check_size(pipe, 64, 96, 5)
    check_size(pipe, 16, 16, 1)
    for size, message in {
        (70, 64, 5): "height: got 70; must be a multiple of 16; nearest: 64 or 80",
        (64, 8, 5): "width: got 8; must be a multiple of 16; nearest: 16",
        (64, 64, 16): "num_frames: got 16; must be 1 plus a multiple of 4; nearest: 13 or 17",
        (64, 64, 0): "num_frames: got 0; must be a positive",
        (16 * 65, 64, 5): "height: got 1040; must be at most 1024, the 64 positions this model knows",
    }.items():
        with pytest.raises(ConfigError, match=message):
            check_size(pipe, *size)
